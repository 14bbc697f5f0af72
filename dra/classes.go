package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
)

const (
	// levelLabel on a pod without a claim gives it class rt. Its value is the level, 0 (most urgent) to 8. The label is on
	// KubeVirt's virt-launcher pods where the template of the virtual machine has it.
	levelLabel = "cpu.ontime/level"
	// classPrefix begins the daemon's names for what pods have by label.
	classPrefix = "class-"
)

// classReservation asks the daemon for a class without CPU time.
type classReservation struct {
	For          target `json:"for"`
	Level        int    `json:"level"`
	LeaseSeconds int64  `json:"lease_seconds"`
	Owner        string `json:"owner"`
}

// classes gives pods of this node class rt by their label. Who may write the label in the allowed namespaces is the
// cluster's policy: a container of class rt delays all bulk work of its CPU, up to its runtime cap.
type classes struct {
	namespaces []string
	lease      time.Duration
	daemon     *daemonClient
	pods       corelisters.PodLister
	// changed has an element after a change of a pod.
	changed chan struct{}
	// given is the level of each reservation that was made, and when.
	given map[string]givenClass
}

type givenClass struct {
	level int
	at    time.Time
}

// watchClasses follows the labelled pods of a node until the context ends.
func watchClasses(ctx context.Context, client kubernetes.Interface, node string, namespaces []string,
	daemon *daemonClient, lease, interval time.Duration) error {
	ofNode := informers.WithTweakListOptions(func(options *metav1.ListOptions) {
		options.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
		options.LabelSelector = levelLabel
	})
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, ofNode)
	pods := factory.Core().V1().Pods()
	classes := newClasses(pods.Lister(), namespaces, daemon, lease)
	notify := func(any) {
		select {
		case classes.changed <- struct{}{}:
		default:
		}
	}
	handler := cache.ResourceEventHandlerFuncs{AddFunc: notify, DeleteFunc: notify,
		UpdateFunc: func(_, changed any) { notify(changed) }}
	if _, err := pods.Informer().AddEventHandler(handler); err != nil {
		return fmt.Errorf("follow the pods of node %s: %w", node, err)
	}
	factory.Start(ctx.Done())
	// What is not known yet must not be given back.
	if !cache.WaitForCacheSync(ctx.Done(), pods.Informer().HasSynced) {
		return nil
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var log changedErrors
	for {
		log.tell(ctx, classes.look(ctx), "Pods could not all be given their class; trying again")
		select {
		case <-ctx.Done():
			return nil
		case <-classes.changed:
		case <-ticker.C:
		}
	}
}

func newClasses(pods corelisters.PodLister, namespaces []string, daemon *daemonClient, lease time.Duration) *classes {
	return &classes{namespaces: namespaces, lease: lease, daemon: daemon, pods: pods,
		changed: make(chan struct{}, 1), given: map[string]givenClass{}}
}

// look makes the daemon's list what the pods' labels say.
func (classes *classes) look(ctx context.Context) error {
	wanted, problem := classes.wanted()
	state, err := classes.daemon.state(ctx)
	if err != nil {
		return errors.Join(problem, err)
	}
	problems := []error{problem}
	known := map[string]bool{}
	for _, reservation := range state.Requested {
		if reservation.isOwn(classPrefix) {
			known[reservation.Name] = true
		}
	}
	for name := range known {
		if _, still := wanted[name]; !still {
			problems = append(problems, classes.daemon.release(ctx, name))
			delete(classes.given, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		reservation := wanted[name]
		given, before := classes.given[name]
		if before && known[name] && given.level == reservation.Level && time.Since(given.at) < classes.lease/3 {
			continue
		}
		if err := classes.daemon.ask(ctx, http.MethodPut, name, &reservation, nil); err != nil {
			problems = append(problems, fmt.Errorf("pod %s: %w", reservation.For.Pod, err))
			continue
		}
		classes.given[name] = givenClass{level: reservation.Level, at: time.Now()}
	}
	return errors.Join(problems...)
}

// wanted is what the labels of living pods ask for, by the daemon's names. A pod with claims has its class by these.
func (classes *classes) wanted() (map[string]classReservation, error) {
	pods, err := classes.pods.List(labels.Everything())
	if err != nil {
		return nil, fmt.Errorf("list the node's pods: %w", err)
	}
	wanted := map[string]classReservation{}
	var problems []error
	for _, pod := range pods {
		ended := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
		if ended || len(pod.Spec.ResourceClaims) > 0 {
			continue
		}
		value := pod.Labels[levelLabel]
		level, err := strconv.Atoi(value)
		switch {
		case !slices.Contains(classes.namespaces, pod.Namespace):
			err = fmt.Errorf("its namespace is none of --class-namespaces, so label %s is ignored", levelLabel)
		case err != nil || level < 0 || level > lowestLevel || strconv.Itoa(level) != value:
			err = fmt.Errorf("label %s is %q: write a level from 0 (most urgent) to %d", levelLabel, value, lowestLevel)
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err))
			continue
		}
		wanted[classPrefix+string(pod.UID)] = classReservation{For: target{Pod: string(pod.UID)}, Level: level,
			LeaseSeconds: int64(classes.lease / time.Second), Owner: owner}
	}
	return wanted, errors.Join(problems...)
}
