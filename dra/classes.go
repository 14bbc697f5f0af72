package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
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
	// of has the pod.
	of *followed
}

// classes gives pods of this node class rt by their label. Who may write the label in the allowed namespaces is the
// cluster's policy: up to its runtime cap, such a pod delays bulk work, and pods with claims of its level or a less
// urgent one.
type classes struct {
	lease  time.Duration
	daemon *daemonClient
	client kubernetes.Interface
	// namespaces have the pods.
	namespaces []*followed
	// changed has an element after a change of a pod.
	changed chan struct{}
	// given is the level of each reservation that was made, and when.
	given map[string]givenClass
	// unread are the namespaces that were left out at the last look.
	unread map[*followed]bool
	// reserving says of each pod with claims whether one of them reserves CPU time.
	reserving map[types.UID]bool
}

type givenClass struct {
	level int
	at    time.Time
	of    *followed
}

// followed is a namespace of which the labelled pods are read.
type followed struct {
	name   string
	pods   corelisters.PodLister
	synced cache.InformerSynced
	// forbidden says whether the API server refused to show the pods when it was asked last.
	forbidden atomic.Bool
}

// isUnread says whether it is not known which pods there are.
func (namespace *followed) isUnread() bool {
	return namespace.forbidden.Load() || !namespace.synced()
}

// podsOf reads the labelled pods of a node, and notes whether the API server refuses that: a RoleBinding may be removed
// and come back at any time. `changed` is called when that changes.
func (namespace *followed) podsOf(client kubernetes.Interface, node string, changed func(any)) cache.ListerWatcher {
	ofNode := func(options *metav1.ListOptions) {
		options.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
		options.LabelSelector = levelLabel
	}
	note := func(ctx context.Context, err error) {
		forbidden := apierrors.IsForbidden(err)
		if err != nil && !forbidden || namespace.forbidden.Swap(forbidden) == forbidden {
			return
		}
		if forbidden {
			klog.FromContext(ctx).Error(err, "No pod of this namespace gets a class by its label: bind ClusterRole "+
				"ontime-pods there, or take the namespace out of --class-namespaces", "namespace", namespace.name)
		}
		changed(nil)
	}
	pods := client.CoreV1().Pods(namespace.name)
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			ofNode(&options)
			list, err := pods.List(ctx, options)
			note(ctx, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			ofNode(&options)
			watching, err := pods.Watch(ctx, options)
			note(ctx, err)
			return watching, err
		},
	}, client)
}

// watchClasses follows the labelled pods of a node in these namespaces until the context ends. It reads no other pods,
// so that a RoleBinding in each namespace suffices. `warn` tells of namespaces without one.
func watchClasses(ctx context.Context, client kubernetes.Interface, node string, namespaces []string,
	daemon *daemonClient, lease, interval time.Duration, warn func(*told, warning)) error {
	classes := newClasses(client, daemon, lease)
	notify := func(any) {
		select {
		case classes.changed <- struct{}{}:
		default:
		}
	}
	handler := cache.ResourceEventHandlerFuncs{AddFunc: notify, DeleteFunc: notify,
		UpdateFunc: func(_, changed any) { notify(changed) }}
	for _, namespace := range namespaces {
		followed := &followed{name: namespace}
		pods := cache.NewSharedIndexInformer(followed.podsOf(client, node, notify), &corev1.Pod{}, 0,
			cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
		if _, err := pods.AddEventHandler(handler); err != nil {
			return fmt.Errorf("follow the pods of node %s: %w", node, err)
		}
		followed.pods, followed.synced = corelisters.NewPodLister(pods.GetIndexer()), pods.HasSynced
		classes.namespaces = append(classes.namespaces, followed)
		go pods.RunWithContext(ctx)
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var log changedErrors
	var before told
	for {
		log.tell(ctx, classes.look(ctx), "Pods could not all be given their class; trying again")
		warn(&before, classes.warning(node))
		select {
		case <-ctx.Done():
			return nil
		case <-classes.changed:
		case <-ticker.C:
		}
	}
}

// warning is about namespaces whose pods the driver may not read. It is the zero value if there are none.
func (classes *classes) warning(node string) warning {
	var names []string
	for _, namespace := range classes.namespaces {
		if namespace.forbidden.Load() {
			names = append(names, namespace.name)
		}
	}
	if names == nil {
		return warning{}
	}
	return warning{reason: podsUnread, text: fmt.Sprintf("Label %s gives no class to pods on node %s of these "+
		"namespaces: %s. ontime-dra may not read their pods: "+
		"bind ClusterRole ontime-pods there, or take them out of CLASS_NAMESPACES",
		levelLabel, node, strings.Join(names, ", "))}
}

// mayEnd says whether a pod that is not wanted is known to be gone: the pods of its namespace have been read, or of all,
// where an earlier driver gave it its class.
func (classes *classes) mayEnd(name string) bool {
	if given, remembered := classes.given[name]; remembered {
		return !classes.unread[given.of]
	}
	return len(classes.unread) == 0
}

func newClasses(client kubernetes.Interface, daemon *daemonClient, lease time.Duration) *classes {
	return &classes{lease: lease, daemon: daemon, client: client, changed: make(chan struct{}, 1),
		given: map[string]givenClass{}, reserving: map[types.UID]bool{}}
}

// look makes the daemon's list what the pods' labels say.
func (classes *classes) look(ctx context.Context) error {
	wanted, problem := classes.wanted(ctx)
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
		if _, still := wanted[name]; !still && classes.mayEnd(name) {
			problems = append(problems, classes.daemon.release(ctx, name))
		}
	}
	maps.DeleteFunc(classes.given, func(name string, _ givenClass) bool {
		_, still := wanted[name]
		return !still && classes.mayEnd(name)
	})
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		reservation := wanted[name]
		if reservation == nil {
			continue
		}
		given, before := classes.given[name]
		if before && known[name] && given.level == reservation.Level && time.Since(given.at) < classes.lease/3 {
			continue
		}
		if err := classes.daemon.ask(ctx, http.MethodPut, name, reservation, nil); err != nil {
			problems = append(problems, fmt.Errorf("pod %s: %w", reservation.For.Pod, err))
			continue
		}
		classes.given[name] = givenClass{level: reservation.Level, at: time.Now(), of: reservation.of}
	}
	return errors.Join(problems...)
}

// wanted is what the labels of living pods ask for, by the daemon's names. It is nil for a pod whose claims could not
// be looked up: what such a pod has stays.
func (classes *classes) wanted(ctx context.Context) (map[string]*classReservation, error) {
	wanted, reserving := map[string]*classReservation{}, map[types.UID]bool{}
	var problems []error
	classes.unread = map[*followed]bool{}
	for _, namespace := range classes.namespaces {
		if namespace.isUnread() {
			// What is not known must not be given back.
			classes.unread[namespace] = true
			continue
		}
		pods, err := namespace.pods.List(labels.Everything())
		if err != nil {
			return nil, fmt.Errorf("list the node's pods: %w", err)
		}
		for _, pod := range pods {
			if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
				continue
			}
			uid, err := uidOf(pod)
			if err != nil {
				problems = append(problems, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err))
				continue
			}
			name := classPrefix + uid
			reserves, err := classes.reserves(ctx, pod)
			if err != nil {
				wanted[name] = nil
				problems = append(problems, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err))
				continue
			}
			reserving[pod.UID] = reserves
			if reserves {
				continue
			}
			reservation, err := classes.reservationFor(pod, uid)
			if err != nil {
				problems = append(problems, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err))
				continue
			}
			reservation.of = namespace
			wanted[name] = reservation
		}
	}
	classes.reserving = reserving
	return wanted, errors.Join(problems...)
}

// reserves says whether a pod has CPU time by a claim. Such a pod has its class by this claim. A pod's claims and their
// allocation stay the same while the pod is on the node.
func (classes *classes) reserves(ctx context.Context, pod *corev1.Pod) (bool, error) {
	if known, found := classes.reserving[pod.UID]; found {
		return known, nil
	}
	for index := range pod.Spec.ResourceClaims {
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[index])
		if err != nil {
			return false, err
		}
		if name == nil {
			continue
		}
		claim, err := classes.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, *name, metav1.GetOptions{})
		if err != nil {
			return false, fmt.Errorf("look up claim %s: %w", *name, err)
		}
		if claim.Status.Allocation != nil && len(results(claim)) > 0 {
			return true, nil
		}
	}
	return false, nil
}

// reservationFor is the class that a pod's label asks for.
func (classes *classes) reservationFor(pod *corev1.Pod, uid string) (*classReservation, error) {
	value := pod.Labels[levelLabel]
	level, err := strconv.Atoi(value)
	if err != nil || level < 0 || level > lowestLevel || strconv.Itoa(level) != value {
		return nil, fmt.Errorf("label %s is %q: write a level from 0 (most urgent) to %d", levelLabel, value, lowestLevel)
	}
	return &classReservation{For: target{Pod: uid}, Level: level, LeaseSeconds: int64(classes.lease / time.Second),
		Owner: owner}, nil
}

// generatedUID is what kubelet generates for a static pod. The API server's own UIDs have dashes.
var generatedUID = regexp.MustCompile("^[0-9a-f]{32}$")

// uidOf is the UID by which kubelet names a pod's cgroup. A static pod's own one is in an annotation: the API server
// gives another to the mirror pod that kubelet makes of it. Users may write this annotation too, so it must not be able
// to name a pod of the API server, which may be of another namespace.
func uidOf(pod *corev1.Pod) (string, error) {
	own, static := pod.Annotations[corev1.MirrorPodAnnotationKey]
	if !static {
		return string(pod.UID), nil
	}
	if !generatedUID.MatchString(own) {
		return "", fmt.Errorf("annotation %s is %q, which is no UID that kubelet generates (32 digits): remove the "+
			"annotation, or, for a static pod, metadata.uid in its file", corev1.MirrorPodAnnotationKey, own)
	}
	return own, nil
}
