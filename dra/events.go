package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	eventrecord "k8s.io/client-go/tools/record"
	"k8s.io/utils/cpuset"
)

// Reasons of the node's events.
const (
	kernelNotRealTime = "KernelNotRealTime"
	reservesNothing   = "ReservesNothing"
	daemonUnavailable = "DaemonUnavailable"
	cpuTimeLost       = "CPUTimeLost"
	podsUnread        = "PodsUnread"
	pinnedCPUsMissing = "PinnedCPUsMissing"
	pinnedCPUsNeeded  = "PinnedCPUsNeeded"
)

// warnAgain is how long after an event the same follows. The API server forgets an event after an hour.
const warnAgain = 30 * time.Minute

const (
	// mostNamed is how many claims an event names.
	mostNamed = 5
	// longestText of an event, in bytes.
	longestText = 1000
)

// warning is why pods' claims are not served with what the node publishes, or are not served any more. The scheduler
// does not say it: for it, the node only lacks a device that fits. Kubelet does not ask again for pods that run.
type warning struct {
	reason, text string
	// about is what the warning is about, if its text may change while that stays the same.
	about string
}

// told is a warning of which there was an event, and when.
type told struct {
	warning
	at time.Time
}

// warningOf is the zero value if claims are served. The daemon's error counts after some looks only, as for what is
// published.
func (driver *driver) warningOf(state nodeState, err error) warning {
	switch {
	case err != nil && driver.unheard < unheardBeforeEmpty:
		return driver.served.warning
	case err != nil:
		return warning{reason: daemonUnavailable,
			text: fmt.Sprintf("Node %s publishes no CPU time: %v", driver.node, err)}
	case state.Off != nil:
		return warning{reason: reservesNothing, text: fmt.Sprintf("Ontime's daemon reserves no CPU time on node %s, so "+
			"the node publishes none: %s", driver.node, *state.Off)}
	case !driver.anyKernel && !state.Capacity.PreemptRT:
		return warning{reason: kernelNotRealTime, text: fmt.Sprintf("Node %s does not run a PREEMPT_RT kernel, so no pod "+
			"with a claim of class ontime-shared or ontime-pinned is placed there: install such a kernel (Debian's package "+
			"linux-image-rt-amd64) and boot it, or start ontime-dra with --any-kernel", driver.node)}
	}
	has := cpuset.New(state.Cpus...)
	if missing := driver.pinned.Difference(has); !missing.IsEmpty() {
		return warning{reason: pinnedCPUsMissing, text: fmt.Sprintf("Node %s publishes no CPU time of CPUs %s of "+
			"PINNED_CPUS: Ontime's daemon there reserves time of CPUs %s; correct PINNED_CPUS, or cpus in sched.toml",
			driver.node, missing, has)}
	}
	if _, _, pinned := timeOf(state, has, driver.pinned); !driver.pinned.Equals(pinned) {
		return warning{reason: pinnedCPUsNeeded, text: fmt.Sprintf("Node %s has no pinned device for CPUs %s of "+
			"PINNED_CPUS: work without a pin needs their time; reserve less of it there, or name fewer CPUs",
			driver.node, driver.pinned.Difference(pinned))}
	}
	return warning{}
}

// lostWarning is about claims whose pods run without their CPU time. It is the zero value if there are none.
func (driver *driver) lostWarning(lost map[types.UID]error) warning {
	if len(lost) == 0 {
		return warning{}
	}
	var about, texts []string
	for uid, problem := range lost {
		about, texts = append(about, string(uid)), append(texts, problem.Error())
	}
	slices.Sort(about)
	slices.Sort(texts)
	more := ""
	if len(texts) > mostNamed {
		more = fmt.Sprintf("; and %d more", len(texts)-mostNamed)
		texts = texts[:mostNamed]
	}
	text := fmt.Sprintf("%d claims on node %s are prepared, but their pods do not have their CPU time: %s", len(lost),
		driver.node, strings.Join(texts, "; "))
	if most := longestText - len(more); len(text) > most {
		text = strings.ToValidUTF8(text[:most-len("...")], "") + "..."
	}
	return warning{reason: cpuTimeLost, text: text + more, about: strings.Join(about, " ")}
}

// warn records an event of the node when there is another warning than before, and again before that is forgotten.
func (driver *driver) warn(before *told, now warning) {
	same := now == before.warning || now.about != "" && now.about == before.about
	if same && time.Since(before.at) < warnAgain {
		return
	}
	*before = told{warning: now, at: time.Now()}
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
