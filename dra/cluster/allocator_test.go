package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
	"k8s.io/utils/ptr"
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

// allocator is the scheduler's own, with the devices and classes that are in the cluster.
type allocator struct {
	parts []*resourceapi.ResourceSlice
	known classes
	nodes []corev1.Node
	cache *cel.Cache
}

func (cluster *cluster) allocator(t *testing.T) allocator {
	t.Helper()
	published, err := cluster.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	installed, err := cluster.client.ResourceV1().DeviceClasses().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	nodes, err := cluster.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	made := allocator{known: classes{}, nodes: nodes.Items,
		cache: cel.NewCache(10, cel.Features{EnableConsumableCapacity: true})}
	for index := range published.Items {
		made.parts = append(made.parts, &published.Items[index])
	}
	for index := range installed.Items {
		made.known[installed.Items[index].Name] = &installed.Items[index]
	}
	return made
}

// nothingAllocated is the state of a cluster without claims.
func nothingAllocated() structured.AllocatedState {
	return structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection()}
}

// place allocates a claim beside what the state holds, on the first of the nodes in random order that has room, and
// adds it to the state. It returns the node's index and the devices; -1 and none where no node has room.
func (allocator allocator) place(t *testing.T, random *rand.Rand, state structured.AllocatedState, name string,
	spec resourceapi.ResourceClaimSpec) (int, []resourceapi.DeviceRequestAllocationResult) {
	t.Helper()
	// As of this release's scheduler.
	gates := feature.NewSchedulerFeaturesFromGates(utilfeature.DefaultFeatureGate)
	features := dynamicresources.AllocatorFeatures(gates)
	if !features.ConsumableCapacity {
		t.Fatal("the scheduler's defaults do not add up capacity")
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
		UID: types.UID(name)}, Spec: spec}
	tries, err := structured.NewAllocator(t.Context(), features, state, allocator.known, allocator.parts, allocator.cache)
	must(t, err)
	for _, index := range random.Perm(len(allocator.nodes)) {
		allocations, err := tries.Allocate(t.Context(), &allocator.nodes[index], []*resourceapi.ResourceClaim{claim})
		must(t, err)
		if len(allocations) == 0 {
			continue
		}
		results := allocations[0].Devices.Results
		for _, result := range results {
			device := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(device, result.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(device, result.ConsumedCapacity))
		}
		return index, results
	}
	return -1, nil
}

// others are what the first node holds for others than the driver, in millionths of a CPU and as lines of a file for
// `ontime plan`, and how that ends.
type others struct {
	microcpus int64
	tenants   string
	end       func()
}

// reservedByOthers lets the first node's sched.toml have a VM, and another program reserve CPU time there.
func (cluster *cluster) reservedByOthers(t *testing.T) others {
	t.Helper()
	first, name := cluster.nodes[0], fmt.Sprintf("cluster-%d", os.Getpid())
	before := cluster.capacity(t.Context(), first)
	ended := first.daemon.Declare(name, reserve, "budget = \"4ms\"\nperiod = \"20ms\"\n")
	must(t, first.ask(t.Context(), http.MethodPut, "/cell", `{"for":{"pod":"cell"},"budget_us":2500,"period_us":10000,
		"lease_seconds":86400,"owner":"cell"}`, nil))
	vm, cell := demand{vcpus: 1, budgetUs: 4_000, periodUs: 20_000}, demand{vcpus: 1, budgetUs: 2_500, periodUs: 10_000}
	made := others{microcpus: vm.microcpus() + cell.microcpus(),
		tenants: vm.tenant("others-vm") + "host = 1\n" + cell.tenant("others-cell") + "host = 1\n"}
	var state state
	cluster.until("the daemon reserves for the VM", func(ctx context.Context) error {
		err := first.ask(ctx, http.MethodGet, "", "", &state)
		if err == nil && state.Capacity.Other != vm.microcpus() {
			err = fmt.Errorf("it has %+v", state)
		}
		return err
	})
	// The VM's pacers, which `ontime plan` does not know.
	for cpu, each := range state.Capacity.Pacers {
		if each == 0 {
			continue
		}
		pacer := demand{vcpus: 1, budgetUs: int(each), periodUs: 1_000_000}
		made.microcpus += each
		made.tenants += pacer.tenant("others-pacer-"+cpu) + "host = 1\n"
	}
	published := func(wanted int64) {
		cluster.until("the node publishes what others leave", func(ctx context.Context) error {
			if found := cluster.capacity(ctx, first); found != wanted {
				return fmt.Errorf("it publishes %d, wanted %d", found, wanted)
			}
			return nil
		})
	}
	published(before - made.microcpus)
	made.end = func() {
		ended()
		must(t, first.ask(t.Context(), http.MethodDelete, "/cell", "", nil))
		published(before)
	}
	return made
}

// allocationsAreThoseOfPlan gives random sets of pods to the scheduler's own allocator, one pod after the other, each
// on any node that it allows, with the devices and classes that are in the cluster. `ontime plan` must then find that
// every node holds what it was given, and that no refused pod has a place. On the first node others have CPU time too.
func (cluster *cluster) allocationsAreThoseOfPlan(t *testing.T) {
	others := cluster.reservedByOthers(t)
	defer others.end()
	allocator := cluster.allocator(t)
	room := map[string]int64{}
	for _, node := range cluster.nodes {
		room[node.name] = cluster.capacity(t.Context(), node)
	}
	seed := uint64(number("SEED", 1))
	random := rand.New(rand.NewPCG(seed, 7))
	placed, refused := 0, 0
	for set := range number("SETS", 10_000) {
		state := nothingAllocated()
		free := maps.Clone(room)
		text, without := host(runtime.NumCPU())+others.tenants, map[string]bool{}
		for pod := range 1 + random.IntN(16) {
			name, demand := strconv.Itoa(pod), anyDemand(random, 3)
			left := int(free[allocator.nodes[random.IntN(len(allocator.nodes))].Name])
			if random.IntN(4) == 0 && left >= 10 && left < 900_000 {
				// What fills a node to the last millionth, or exceeds it by one. (`plan` reserves no less than 10.)
				demand.vcpus, demand.budgetUs, demand.periodUs = 1, left+random.IntN(2), 1_000_000
			}
			text += demand.tenant(name)
			index, _ := allocator.place(t, random, state, name,
				counted(shared(demand), "ontime-shared", 1))
			if index < 0 {
				without[name] = true
				continue
			}
			text += fmt.Sprintf("host = %d\n", index+1)
			free[allocator.nodes[index].Name] -= demand.microcpus()
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

// pinned is a claim of class ontime-pinned, as in dra/manifests/examples/pinned.yaml.
func pinned(demand demand) resourceapi.ResourceClaimSpec {
	claim := counted(spec(demand.microcpus()/int64(demand.vcpus), demand.parameters()), "ontime-pinned",
		int64(demand.vcpus))
	claim.Devices.Constraints = []resourceapi.DeviceConstraint{{Requests: []string{"cpu"},
		DistinctAttribute: ptr.To(resourceapi.FullyQualifiedName("cpu.ontime/cpu"))}}
	return claim
}

// watcher is what the cap watcher needs of all CPUs together.
const watcher = 100_000

// widened has nodes with this many CPUs: devices as their drivers would publish them there. On the first node others
// have this much.
func (allocator allocator) widened(cpus int, others int64) allocator {
	for index, part := range allocator.parts {
		part = part.DeepCopy()
		allocator.parts[index] = part
		devices := part.Spec.Devices
		first := slices.IndexFunc(devices, func(device resourceapi.Device) bool { return device.Name == "cpu-1" })
		if first < 0 {
			less := int64(watcher)
			if *part.Spec.NodeName == allocator.nodes[0].Name {
				less += others
			}
			for at := range devices {
				capacity := devices[at].Capacity["microcpus"]
				more := capacity.Value.Value() + less
				capacity.Value = *resource.NewQuantity(more*int64(cpus)/int64(runtime.NumCPU())-less, resource.DecimalSI)
				devices[at].Capacity["microcpus"] = capacity
			}
			continue
		}
		for cpu := runtime.NumCPU(); cpu < cpus; cpu++ {
			device := devices[first].DeepCopy()
			device.Name = fmt.Sprintf("cpu-%d", cpu)
			device.Attributes["cpu"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(cpu))}
			devices = append(devices, *device)
		}
		part.Spec.Devices = devices
	}
	return allocator
}

// pinnedAllocationsFitPlan adds a node whose driver publishes CPUs for pinned work. Of random sets of pinned and
// unpinned pods, `ontime plan` must find a place for all that the scheduler's allocator has placed, each pinned vCPU on
// the CPU that it was given. The sets are for nodes as these, or with eight CPUs where they have fewer.
func (cluster *cluster) pinnedAllocationsFitPlan(t *testing.T) {
	last := runtime.NumCPU() - 1
	if last == 0 {
		t.Log("not tested: this machine has one CPU, and pinned work needs another")
		return
	}
	cluster.addNode("node-pinned", anyKernel, "--pinned-cpus", fmt.Sprintf("1-%d", last))
	others := cluster.reservedByOthers(t)
	defer others.end()
	cpus := max(last+1, 8)
	allocator := cluster.allocator(t).widened(cpus, others.microcpus)
	seed := uint64(number("SEED", 1))
	random := rand.New(rand.NewPCG(seed, 11))
	placed, refused := 0, 0
	for set := range number("PINNED_SETS", 2_000) {
		state, text := nothingAllocated(), host(cpus)+others.tenants
		for pod := range 1 + random.IntN(40) {
			name, demand := strconv.Itoa(pod), anyDemand(random, 3)
			claim := counted(shared(demand), "ontime-shared", 1)
			onCPUs := random.IntN(2) == 0
			if onCPUs {
				claim = pinned(demand)
			}
			index, results := allocator.place(t, random, state, name, claim)
			if onCPUs && index < 0 {
				refused++
			}
			if index < 0 {
				continue
			}
			at := fmt.Sprintf("host = %d\n", index+1)
			if !onCPUs {
				text += demand.tenant(name) + at
				continue
			}
			placed++
			found := sets.New[string]()
			each := demand
			each.vcpus = 1
			for vcpu, result := range results {
				cpu, isPinned := strings.CutPrefix(result.Device, "cpu-")
				if !isPinned || found.Has(cpu) {
					t.Fatalf("seed %d, set %d: a pinned pod has %+v", seed, set, results)
				}
				found.Insert(cpu)
				text += each.tenant(fmt.Sprintf("%s-%d", name, vcpu)) + at + "cpus = [" + cpu + "]\n"
			}
		}
		if len(state.AllocatedSharedDeviceIDs) == 0 {
			continue
		}
		if found := cluster.refusedByPlan(t, text); len(found) > 0 {
			t.Fatalf("seed %d, set %d: the scheduler's allocator has placed what plan refuses, %v:\n%s", seed, set, found,
				text)
		}
	}
	t.Logf("seed %d: %d pinned pods placed, %d refused", seed, placed, refused)
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
