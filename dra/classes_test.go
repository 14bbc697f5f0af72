package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

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
	return newClasses(corelisters.NewPodLister(indexer), []string{"plant"}, daemon, time.Minute)
}

func TestOnlyLivingPodsWithALevelAndWithoutAClaimHaveAClass(t *testing.T) {
	done, claimed := labelled("plant", "done", "1"), labelled("plant", "claimed", "1")
	done.Status.Phase = corev1.PodSucceeded
	claimed.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "time"}}
	wanted, err := classesOf(nil, labelled("plant", "most", "0"), labelled("plant", "least", "8"), done, claimed).wanted()
	ok(t, err)
	found := map[string]int{}
	for name, reservation := range wanted {
		found[name] = reservation.Level
	}
	if fmt.Sprint(found) != "map[class-least-uid:8 class-most-uid:0]" {
		t.Fatalf("%v", found)
	}
	for _, wrong := range []*corev1.Pod{labelled("plant", "a", ""), labelled("plant", "a", "9"),
		labelled("plant", "a", "-1"), labelled("plant", "a", "rt"), labelled("plant", "a", "01"),
		labelled("plant", "a", "99999999999999999999"), labelled("other", "a", "0")} {
		wanted, err := classesOf(nil, wrong, labelled("plant", "b", "3")).wanted()
		if len(wanted) != 1 || err == nil || !strings.Contains(err.Error(), wrong.Namespace+"/a") {
			t.Errorf("label %q: %v, %v", wrong.Labels[levelLabel], wanted, err)
		}
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
