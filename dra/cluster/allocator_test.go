package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// classes are the cluster's device classes, as the scheduler's allocator reads them.
type classes map[string]*resourceapi.DeviceClass

func (classes classes) List() ([]*resourceapi.DeviceClass, error) {
	return slices.Collect(maps.Values(classes)), nil
}

func (classes classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, found := classes[name]; found {
		return class, nil
	}
	return nil, fmt.Errorf("there is no device class %s", name)
}

// allocationsAreThoseOfPlan gives random sets of pods to the scheduler's own allocator, one pod after the other, each
// on any node that it allows, with the devices and classes that are in the cluster. `ontime plan` must then find that
// every node holds what it was given, and that no refused pod has a place.
func (cluster *cluster) allocationsAreThoseOfPlan(t *testing.T) {
	published, err := cluster.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	var parts []*resourceapi.ResourceSlice
	for index := range published.Items {
		parts = append(parts, &published.Items[index])
	}
	installed, err := cluster.client.ResourceV1().DeviceClasses().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	known := classes{}
	for index := range installed.Items {
		known[installed.Items[index].Name] = &installed.Items[index]
	}
	nodes, err := cluster.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	room := map[string]int64{}
	for _, node := range cluster.nodes {
		room[node.name] = cluster.capacity(t.Context(), node)
	}
	cache := cel.NewCache(10, cel.Features{EnableConsumableCapacity: true})
	features := structured.Features{ConsumableCapacity: true, PrioritizedList: true}
	seed := uint64(number("SEED", 1))
	random := rand.New(rand.NewPCG(seed, 7))
	placed, refused := 0, 0
	for set := range number("SETS", 10_000) {
		state := structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](),
			AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
			AggregatedCapacity:       structured.NewConsumedCapacityCollection()}
		free := maps.Clone(room)
		text, without := host(), map[string]bool{}
		for pod := range 1 + random.IntN(16) {
			name, demand := strconv.Itoa(pod), anyDemand(random, 3)
			left := int(free[nodes.Items[random.IntN(len(nodes.Items))].Name])
			if random.IntN(4) == 0 && left >= 10 && left < 900_000 {
				// What fills a node to the last millionth, or exceeds it by one. (`plan` reserves no less than 10.)
				demand.vcpus, demand.budgetUs, demand.periodUs = 1, left+random.IntN(2), 1_000_000
			}
			claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
				UID: types.UID(name)}, Spec: counted(spec(demand.microcpus(), demand.parameters()), "ontime-shared", 1)}
			allocator, err := structured.NewAllocator(t.Context(), features, state, known, parts, cache)
			must(t, err)
			text += demand.tenant(name)
			without[name] = true
			for _, index := range random.Perm(len(nodes.Items)) {
				node := &nodes.Items[index]
				allocations, err := allocator.Allocate(t.Context(), node, []*resourceapi.ResourceClaim{claim})
				must(t, err)
				if len(allocations) == 0 {
					continue
				}
				for _, result := range allocations[0].Devices.Results {
					device := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
					state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(device, result.ShareID))
					state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(device, result.ConsumedCapacity))
				}
				text += fmt.Sprintf("host = %d\n", index+1)
				free[node.Name] -= demand.microcpus()
				delete(without, name)
				break
			}
		}
		placed, refused = placed+len(state.AllocatedSharedDeviceIDs), refused+len(without)
		if found := cluster.refusedByPlan(t, text); !maps.Equal(found, without) {
			t.Fatalf("seed %d, set %d: plan refuses %v, the scheduler's allocator %v:\n%s", seed, set, found, without, text)
		}
	}
	t.Logf("seed %d: %d pods placed, %d refused", seed, placed, refused)
	if placed == 0 || refused == 0 {
		t.Errorf("the sets were too small or too large to tell")
	}
}

// refusedByPlan are the tenants for which `ontime plan` finds no place on as many hosts as there are nodes.
func (cluster *cluster) refusedByPlan(t *testing.T, text string) map[string]bool {
	t.Helper()
	file := filepath.Join(cluster.dir, "set.toml")
	must(t, os.WriteFile(file, []byte(text), 0o600))
	ask := exec.Command(os.Getenv("ONTIME"), "plan", file, "--hosts", strconv.Itoa(len(cluster.nodes)), "--in-order",
		"--json")
	// Where a pod is refused, its status is not 0.
	out, err := ask.Output()
	if exited := new(exec.ExitError); err != nil && !(errors.As(err, &exited) && exited.ExitCode() == 1) {
		t.Fatalf("ontime plan: %v\n%s", err, text)
	}
	var report struct {
		Refused []struct {
			Tenant string `json:"tenant"`
		} `json:"refused"`
	}
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("ontime plan: %v: %s\n%s", err, out, text)
	}
	refused := map[string]bool{}
	for _, one := range report.Refused {
		refused[one.Tenant] = true
	}
	return refused
}
