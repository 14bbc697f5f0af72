package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"ontime/dra/daemontest"
)

// labelled is a pod with a level by label.
func labelled(namespace, name, level string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name + "-uid"),
		Labels: map[string]string{levelLabel: level}}}
}

// classesOf follows these pods.
func classesOf(daemon *daemonClient, pods ...*corev1.Pod) *classes {
	indexer := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	for _, pod := range pods {
		_ = indexer.Add(pod)
	}
	classes := newClasses(apiServer(), daemon, time.Minute)
	classes.namespaces = []*followed{{pods: corelisters.NewPodLister(indexer), synced: func() bool { return true }}}
	return classes
}

// levels is what is wanted, as text.
func levels(t *testing.T, classes *classes) string {
	t.Helper()
	wanted, err := classes.wanted(t.Context())
	ok(t, err)
	found := map[string]int{}
	for name, reservation := range wanted {
		found[name] = reservation.Level
	}
	return fmt.Sprint(found)
}

func TestOnlyLivingPodsWithALevelHaveAClass(t *testing.T) {
	done := labelled("plant", "done", "1")
	done.Status.Phase = corev1.PodSucceeded
	followed := classesOf(nil, labelled("plant", "most", "0"), labelled("plant", "least", "8"), done)
	if found := levels(t, followed); found != "map[class-least-uid:8 class-most-uid:0]" {
		t.Fatalf("%v", found)
	}
	for _, wrong := range []*corev1.Pod{labelled("plant", "a", ""), labelled("plant", "a", "9"),
		labelled("plant", "a", "-1"), labelled("plant", "a", "rt"), labelled("plant", "a", "01"),
		labelled("plant", "a", "99999999999999999999"), mirror("a", "0", "x/../../y"), mirror("a", "0", "")} {
		wanted, err := classesOf(nil, wrong, labelled("plant", "b", "3")).wanted(t.Context())
		if len(wanted) != 1 || err == nil || !strings.Contains(err.Error(), wrong.Namespace+"/a") {
			t.Errorf("label %q: %v, %v", wrong.Labels[levelLabel], wanted, err)
		}
	}
}

// mirror is what the API server has of a static pod.
func mirror(name, level, hash string) *corev1.Pod {
	pod := labelled("plant", name, level)
	pod.Annotations = map[string]string{"kubernetes.io/config.mirror": hash, "kubernetes.io/config.hash": hash}
	return pod
}

// A static pod's cgroup has the UID that kubelet chose, not the mirror's. On other pods a user may write the hash.
func TestAStaticPodHasTheUIDOfItsCgroup(t *testing.T) {
	const hash = "0af9c1d2e3b4a5968778695a4b3c2d1e"
	stranger := labelled("plant", "stranger", "5")
	stranger.Annotations = map[string]string{"kubernetes.io/config.hash": "victim-uid"}
	wanted, err := classesOf(nil, mirror("static", "3", hash), stranger).wanted(t.Context())
	ok(t, err)
	static, other := wanted["class-"+hash], wanted["class-stranger-uid"]
	if len(wanted) != 2 || static == nil || static.For.Pod != hash || other == nil {
		t.Errorf("%v", wanted)
	}
}

// A user of a listed namespace may write the annotation. With it no pod of another namespace gets a class, and what
// such a pod has by its own label stays.
func TestAnAnnotationNamesNoOtherPod(t *testing.T) {
	const victim = "8c5f9b1e-3d2a-4f60-9a7b-0c1d2e3f4a5b"
	own := labelled("cell", "own", "4")
	own.UID = victim
	for _, uid := range []string{victim, strings.ToUpper("0af9c1d2e3b4a5968778695a4b3c2d1e"),
		"0af9c1d2e3b4a5968778695a4b3c2d1", "0af9c1d2e3b4a5968778695a4b3c2d1e0", victim + "\n", "stranger-uid"} {
		attacker := mirror("attacker", "0", uid)
		claiming := mirror("claiming", "0", uid)
		claiming.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("gpu")}}
		wanted, err := classesOf(nil, attacker, own, claiming).wanted(t.Context())
		if err == nil || !strings.Contains(err.Error(), "pod plant/attacker: annotation kubernetes.io/config.mirror") {
			t.Errorf("%q: %v", uid, err)
		}
		if given := wanted["class-"+victim]; len(wanted) != 1 || given == nil || given.Level != 4 {
			t.Errorf("%q: %v", uid, wanted)
		}
	}
}

// A pod with CPU time by a claim has its class by this claim, a pod with another driver's claim by its label.
func TestAPodWithAnotherDriversClaimHasAClass(t *testing.T) {
	pod := func(name string, claims ...string) *corev1.Pod {
		pod := labelled("plant", name, "1")
		for index := range claims {
			pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: claims[index],
				ResourceClaimTemplateName: ptr.To("template")})
			pod.Status.ResourceClaimStatuses = append(pod.Status.ResourceClaimStatuses,
				corev1.PodResourceClaimStatus{Name: claims[index], ResourceClaimName: &claims[index]})
		}
		return pod
	}
	gpu := allocated("gpu", "{}", resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: "gpu.example.com"})
	cpu := allocated("cpu", tenth, deviceResult(sharedDevice, 100_000))
	gpu.Namespace, cpu.Namespace = "plant", "plant"
	api := apiServer(gpu, cpu)
	followed := classesOf(nil, pod("gpu", "gpu"), pod("cpu", "cpu"), pod("both", "gpu", "cpu"))
	followed.client = api
	for range 2 {
		if found := levels(t, followed); found != "map[class-gpu-uid:1]" {
			t.Errorf("%v", found)
		}
	}
	if asked := len(api.Actions()); asked != 4 {
		t.Errorf("%d look-ups of claims", asked)
	}
}

// What a pod has stays while its claims cannot be looked up.
func TestAClassIsKeptWhileAClaimCannotBeLookedUp(t *testing.T) {
	memory, socket := remember(t, map[string]bool{"class-pod-uid": true, "class-gone-uid": true})
	pod := labelled("plant", "pod", "1")
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("gpu")}}
	err := classesOf(newDaemonClient(socket), pod).look(t.Context())
	if err == nil || !strings.Contains(err.Error(), "pod plant/pod: look up claim gpu") {
		t.Errorf("%v", err)
	}
	if !memory.held["class-pod-uid"] || len(memory.held) != 1 {
		t.Errorf("%v", memory.held)
	}
}

// The driver's rights are those of a RoleBinding in each listed namespace.
func TestOnlyPodsOfListedNamespacesAreRead(t *testing.T) {
	memory, socket := remember(t, map[string]bool{})
	api := fake.NewClientset(labelled("plant", "a", "0"), labelled("cell", "b", "1"), labelled("other", "c", "2"))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		ended <- watchClasses(ctx, api, testNode, []string{"plant", "cell"}, newDaemonClient(socket), time.Minute,
			time.Millisecond, func(*told, warning) {})
	}()
	for end := time.Now().Add(daemontest.Patience); ; time.Sleep(time.Millisecond) {
		memory.mutex.Lock()
		held := maps.Clone(memory.held)
		memory.mutex.Unlock()
		if held["class-a-uid"] && held["class-b-uid"] {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%v", held)
		}
	}
	stop()
	ok(t, <-ended)
	if len(memory.held) != 2 {
		t.Errorf("%v", memory.held)
	}
	for _, action := range api.Actions() {
		if namespace := action.GetNamespace(); namespace != "plant" && namespace != "cell" {
			t.Errorf("%s %s in namespace %q", action.GetVerb(), action.GetResource().Resource, namespace)
		}
	}
}

// A namespace without a RoleBinding takes nothing from the pods of others. Until its pods are read, none of them loses a
// class. A RoleBinding may also be removed later, and come back.
func TestANamespaceThatIsNotReadIsToldAndTheOthersKeepTheirs(t *testing.T) {
	memory, socket := remember(t, map[string]bool{"class-gone-uid": true, "class-b-uid": true})
	api := fake.NewClientset(labelled("plant", "a", "0"), labelled("cell", "b", "1"))
	var forbids atomic.Bool
	forbids.Store(true)
	refuses := func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.GetNamespace() != "cell" || !forbids.Load() {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no RoleBinding"))
	}
	api.PrependReactor("list", "pods", refuses)
	var mutex sync.Mutex
	var said warning
	// The last watch of the namespace.
	var watching *watch.FakeWatcher
	api.PrependWatchReactor("pods", func(action clienttesting.Action) (bool, watch.Interface, error) {
		done, _, err := refuses(action)
		if done || action.GetNamespace() != "cell" {
			return done, nil, err
		}
		mutex.Lock()
		defer mutex.Unlock()
		watching = watch.NewFake()
		return true, watching, nil
	})
	go func() {
		_ = watchClasses(t.Context(), api, testNode, []string{"plant", "cell"}, newDaemonClient(socket), time.Minute,
			time.Millisecond, func(_ *told, now warning) {
				mutex.Lock()
				defer mutex.Unlock()
				said = now
			})
	}()
	until := func(reason, wanted string) {
		t.Helper()
		for end := time.Now().Add(daemontest.Patience); ; time.Sleep(time.Millisecond) {
			memory.mutex.Lock()
			held := fmt.Sprint(slices.Sorted(maps.Keys(memory.held)))
			memory.mutex.Unlock()
			mutex.Lock()
			now := said
			mutex.Unlock()
			if held == wanted && now.reason == reason && (reason == "" || strings.Contains(now.text, "namespaces: cell. ")) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the daemon holds %s, wanted %s; the event is %+v", held, wanted, now)
			}
		}
	}
	until(podsUnread, "[class-a-uid class-b-uid class-gone-uid]")
	forbids.Store(false)
	until("", "[class-a-uid class-b-uid]")

	isWatched := func() bool {
		mutex.Lock()
		defer mutex.Unlock()
		return watching != nil
	}
	for end := time.Now().Add(daemontest.Patience); !isWatched(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the pods are not watched")
		}
	}
	forbids.Store(true)
	mutex.Lock()
	watching.Stop()
	mutex.Unlock()
	until(podsUnread, "[class-a-uid class-b-uid]")
	// The pod of the other namespace ends, and so does this one's lease, which nobody renews.
	ok(t, api.CoreV1().Pods("plant").Delete(t.Context(), "a", metav1.DeleteOptions{}))
	memory.mutex.Lock()
	delete(memory.held, "class-b-uid")
	memory.mutex.Unlock()
	until(podsUnread, "[]")
	forbids.Store(false)
	until("", "[class-b-uid]")
}

// A pod may end after its daemon has forgotten what it had.
func TestWhatEndedPodsHadIsForgotten(t *testing.T) {
	memory, socket := remember(t, map[string]bool{})
	classes := classesOf(newDaemonClient(socket), labelled("plant", "a", "0"))
	ok(t, classes.look(t.Context()))
	memory.mutex.Lock()
	memory.held = map[string]bool{}
	memory.mutex.Unlock()
	classes.namespaces = classesOf(nil).namespaces
	ok(t, classes.look(t.Context()))
	if len(classes.given) != 0 {
		t.Errorf("%v", classes.given)
	}
}

func TestARealDaemonHasTheClassesOfPods(t *testing.T) {
	node := daemontest.Start(t, sched)
	daemon := newDaemonClient(node.Socket())
	first, second := labelled("plant", "first", "0"), labelled("plant", "second", "2")
	driver := newDriver(t, t.TempDir(), node.Socket(), apiServer())
	followed := classesOf(daemon, first, second)
	ok(t, followed.look(t.Context()))
	wantHeld(t, driver, map[string]microcpus{"class-first-uid": 0, "class-second-uid": 0})
	// A new driver knows nothing of what an earlier one gave. Its pods are others.
	ok(t, classesOf(daemon, second).look(t.Context()))
	wantHeld(t, driver, map[string]microcpus{"class-second-uid": 0})
	// What the daemon has lost is given again.
	ok(t, daemon.release(t.Context(), "class-second-uid"))
	ok(t, followed.look(t.Context()))
	wantHeld(t, driver, map[string]microcpus{"class-first-uid": 0, "class-second-uid": 0})
}
