package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	eventrecord "k8s.io/client-go/tools/record"
)

// Reasons of the node's events.
const (
	kernelNotRealTime = "KernelNotRealTime"
	reservesNothing   = "ReservesNothing"
	daemonUnavailable = "DaemonUnavailable"
)

// warnAgain is how long after an event the same follows. The API server forgets an event after an hour.
const warnAgain = 30 * time.Minute

// warning is why pods' claims are not served with what the node publishes. The scheduler does not say it: for it, the
// node only lacks a device that fits.
type warning struct {
	reason, text string
}

// warningOf is the zero value if claims are served. The daemon's error counts after some looks only, as for what is
// published.
func (driver *driver) warningOf(state nodeState, err error) warning {
	switch {
	case err != nil && driver.unheard < unheardBeforeEmpty:
		return driver.warned
	case err != nil:
		return warning{daemonUnavailable, fmt.Sprintf("Node %s publishes no CPU time: %v", driver.node, err)}
	case state.Off != nil:
		return warning{reservesNothing, fmt.Sprintf("Ontime's daemon reserves no CPU time on node %s, so the node "+
			"publishes none: %s", driver.node, *state.Off)}
	case !driver.anyKernel && !state.Capacity.PreemptRT:
		return warning{kernelNotRealTime, fmt.Sprintf("Node %s does not run a PREEMPT_RT kernel, so no pod with a claim "+
			"of class ontime-shared or ontime-pinned is placed there: install such a kernel (Debian's package "+
			"linux-image-rt-amd64) and boot it, or start ontime-dra with --any-kernel", driver.node)}
	}
	return warning{}
}

// warn records an event of the node when there is another warning, and again before that is forgotten.
func (driver *driver) warn(now warning) {
	if now == driver.warned && time.Since(driver.warnedAt) < warnAgain {
		return
	}
	driver.warned, driver.warnedAt = now, time.Now()
	if now == (warning{}) {
		return
	}
	// By this UID, which is kubelet's for events as well, `kubectl describe node` finds them without a look-up here.
	node := &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: driver.node, UID: types.UID(driver.node)}
	driver.events.Event(node, corev1.EventTypeWarning, now.reason, now.text)
}

// newEvents gives events to the API server without waiting for it, until the context ends. The recorder puts those of
// nodes into namespace default.
func newEvents(ctx context.Context, client kubernetes.Interface, node string) eventrecord.EventRecorder {
	broadcaster := eventrecord.NewBroadcaster(eventrecord.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	return broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "ontime-dra", Host: node})
}
