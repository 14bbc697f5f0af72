package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/cpuset"
	"k8s.io/utils/ptr"
)

const testNode = "node-a"

func deviceResult(device string, consumed int64) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{
		Request: "cpu", Driver: driverName, Pool: testNode, Device: device,
		ShareID: ptr.To(types.UID("7f0c0f5e-3b6e-4a0e-9a55-0d3f7b0f6a10")),
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{
			capacityName: *resource.NewQuantity(consumed, resource.DecimalSI)},
	}
}

func opaque(source resourceapi.AllocationConfigSource, text string) resourceapi.DeviceAllocationConfiguration {
	return resourceapi.DeviceAllocationConfiguration{Source: source,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(text)}}}}
}

// allocated is a claim for one pod, as the scheduler leaves it.
func allocated(name, config string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-of-" + name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: results,
				Config:  []resourceapi.DeviceAllocationConfiguration{opaque(resourceapi.AllocationConfigSourceClaim, config)},
			}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{
				{Resource: "pods", Name: "pod-" + name, UID: types.UID("pod-uid-of-" + name)}},
		},
	}
}

// second is a pod that names a claim that another pod already has.
var second = resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "second", UID: "another"}

var tenth = parameters(`"budget":"1ms","period":"10ms"`)

func TestAClaimBecomesAReservation(t *testing.T) {
	shared := allocated("a", parameters(`"budget":"3ms","period":"10ms","vcpus":2,"level":4`),
		deviceResult(sharedDevice, 600_000))
	wanted := reservation{For: target{Pod: "pod-uid-of-a"}, BudgetUs: 3000, PeriodUs: 10_000, Count: 2, Level: 4,
		LeaseSeconds: 90, Owner: owner}
	if found, err := reservationOf(shared, testNode, 90*time.Second); err != nil || !reflect.DeepEqual(found, wanted) {
		t.Errorf("%+v, %v", found, err)
	}
	pinned := allocated("b", parameters(`"budget":"500us","period":"1ms","vcpus":2`),
		deviceResult("cpu-3", 500_000), deviceResult("cpu-12", 500_000))
	found, err := reservationOf(pinned, testNode, 90*time.Second)
	if err != nil || !reflect.DeepEqual(found.Cpus, []int{3, 12}) || found.Count != 2 {
		t.Errorf("%+v, %v", found, err)
	}
	// The claim's parameters precede those of its class, and other drivers' devices are not this driver's matter.
	both := allocated("c", tenth, deviceResult(sharedDevice, 100_000))
	both.Status.Allocation.Devices.Config = append([]resourceapi.DeviceAllocationConfiguration{
		opaque(resourceapi.AllocationConfigSourceClass, parameters(`"budget":"5ms","period":"10ms"`))},
		both.Status.Allocation.Devices.Config...)
	both.Status.Allocation.Devices.Results = append(both.Status.Allocation.Devices.Results,
		resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: "gpu.example.com", Pool: "x", Device: "y"})
	if found, err := reservationOf(both, testNode, time.Minute); err != nil || found.BudgetUs != 1000 {
		t.Errorf("%+v, %v", found, err)
	}
}

func TestClaimsThatCannotBeKeptAreRefusedByName(t *testing.T) {
	for reason, change := range map[string]func(*resourceapi.ResourceClaim){
		"has no device": func(claim *resourceapi.ResourceClaim) { claim.Status.Allocation.Devices.Results = nil },
		"need 100000": func(claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results[0] = deviceResult(sharedDevice, 99_999)
		},
		"DRAConsumableCapacity": func(claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results[0].ConsumedCapacity = nil
		},
		"of node other": func(claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results[0].Pool = "other"
		},
		"admin access": func(claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
		},
		`device "cpu-03"`: func(claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results[0].Device = "cpu-03"
		},
		"2 devices of the node's shared": func(claim *resourceapi.ResourceClaim) {
			results := &claim.Status.Allocation.Devices.Results
			*results = append(*results, (*results)[0])
		},
		"write one request": func(claim *resourceapi.ResourceClaim) {
			other := deviceResult("cpu-4", 100_000)
			other.Request = "more"
			results := &claim.Status.Allocation.Devices.Results
			*results = []resourceapi.DeviceRequestAllocationResult{deviceResult("cpu-3", 100_000), other}
		},
		"count = vcpus": func(claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{
				deviceResult("cpu-3", 100_000), deviceResult("cpu-4", 100_000)}
		},
		"has no parameters": func(claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Config[0].Requests = []string{"another"}
		},
		"period is missing": func(claim *resourceapi.ResourceClaim) {
			claim.Status.Allocation.Devices.Config[0].Opaque.Parameters.Raw = []byte(parameters(`"budget":"1ms"`))
		},
		"for 0 pods": func(claim *resourceapi.ResourceClaim) { claim.Status.ReservedFor = nil },
		"for 2 pods (pod-a, second), but CPU time is reserved for one": func(claim *resourceapi.ResourceClaim) {
			claim.Status.ReservedFor = append(claim.Status.ReservedFor, second)
		},
	} {
		claim := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
		if _, err := reservationOf(claim, testNode, time.Minute); err != nil {
			t.Fatal(err)
		}
		change(claim)
		if found, err := reservationOf(claim, testNode, time.Minute); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: %+v, %v", reason, found, err)
		}
	}
}

// capacities is the capacity of each device.
func capacities(devices []resourceapi.Device) map[string]int64 {
	found := map[string]int64{}
	for _, device := range devices {
		value := device.Capacity[capacityName].Value
		found[device.Name] = value.Value()
	}
	return found
}

func TestNoCPUIsPublishedTwice(t *testing.T) {
	state := nodeState{Cpus: []int{0, 1, 2, 3, 5}, Capacity: &nodeCapacity{UnpinnedPerCPU: 949_996, Largest: 949_988,
		PinnedPerCPU: 849_740, Watcher: 100_000, Other: 250_000, PreemptRT: true},
		Vcpus: []reservedVcpu{{VM: "wide", Bandwidth: 0.25}}}
	for _, example := range []struct {
		pinned string
		wanted map[string]int64
	}{
		{"", map[string]int64{sharedDevice: 5*949_996 - 350_000}},
		// CPU 4 is not one of the daemon's.
		{"3-5", map[string]int64{sharedDevice: 3*949_996 - 350_000, "cpu-3": 849_740, "cpu-5": 849_740}},
		// VM wide needs one of these.
		{"0-5", map[string]int64{sharedDevice: 949_996 - 350_000, "cpu-0": 849_740, "cpu-1": 849_740, "cpu-2": 849_740,
			"cpu-3": 849_740}},
	} {
		pinned, err := cpuset.Parse(example.pinned)
		if err != nil {
			t.Fatal(err)
		}
		devices := devicesOf(state, pinned, false)
		if found := capacities(devices); !reflect.DeepEqual(found, example.wanted) {
			t.Errorf("%q: %v", example.pinned, found)
		}
		for _, device := range devices {
			perVcpu, found := device.Capacity[perVcpuName]
			if found != (device.Name == sharedDevice) || found && perVcpu.RequestPolicy.ValidRange.Max.Value() != 949_988 {
				t.Errorf("%q: a vCPU on device %s may have %+v", example.pinned, device.Name, perVcpu)
			}
		}
	}
	state.Off = ptr.To("the daemon only observes")
	if devices := devicesOf(state, cpuset.New(), false); devices != nil {
		t.Errorf("%v is published although nothing can be reserved", devices)
	}
}

// Work without a pin that has no room on the other CPUs has it on CPUs for pinned work, which then are for no other.
func TestCPUsThatUnpinnedWorkNeedsAreNotForPinnedWork(t *testing.T) {
	own := func(microCpus int64, cpus ...int) heldReservation {
		return heldReservation{Name: reservationName("a"), MicroCpus: microCpus, Cpus: cpus, UID: os.Geteuid(), Owner: owner}
	}
	wide := []reservedVcpu{{VM: "wide", Bandwidth: 0.6}, {VM: "wide", Bandwidth: 0.6}}
	const each, onCPU = 949_996, 849_740
	for name, example := range map[string]struct {
		cpus, pinned []int
		other        int64
		vcpus        []reservedVcpu
		requested    []heldReservation
		wanted       map[string]int64
	}{
		"a VM of sched.toml": {[]int{0, 1}, []int{1}, 1_200_000, wide, nil,
			map[string]int64{sharedDevice: 2*each - 1_300_000}},
		"claims from before": {[]int{0, 1, 2, 3}, []int{2, 3}, 0, nil, []heldReservation{own(3_500_000)},
			map[string]int64{sharedDevice: 4*each - 100_000}},
		"one CPU is enough": {[]int{0, 1, 2, 3}, []int{1, 2, 3}, 0, nil, []heldReservation{own(1_000_000)},
			map[string]int64{sharedDevice: 2*each - 100_000, "cpu-1": onCPU, "cpu-2": onCPU}},
		// CPU 3 has nothing that work without a pin could surely use.
		"the last has a claim": {[]int{0, 1, 2, 3}, []int{2, 3}, 0, nil, []heldReservation{own(1_900_000), own(500_000, 3)},
			map[string]int64{sharedDevice: 3*each - 100_000, "cpu-3": onCPU}},
		"what stays leaves too little": {[]int{0, 1, 2}, []int{1, 2}, 0, nil,
			[]heldReservation{own(2_000_000), own(500_000, 2)}, map[string]int64{sharedDevice: 2*each - 100_000}},
		"only the watcher": {[]int{0, 1}, []int{0, 1}, 0, nil, []heldReservation{own(500_000, 1)},
			map[string]int64{"cpu-0": onCPU, "cpu-1": onCPU}},
	} {
		state := nodeState{Cpus: example.cpus, Vcpus: example.vcpus, Requested: example.requested, Capacity: &nodeCapacity{
			UnpinnedPerCPU: each, Largest: 849_988, PinnedPerCPU: onCPU, Watcher: 100_000, Other: example.other}}
		found := capacities(devicesOf(state, cpuset.New(example.pinned...), true))
		if !reflect.DeepEqual(found, example.wanted) {
			t.Errorf("%s: %v, wanted %v", name, found, example.wanted)
		}
	}
}

// What a random node publishes, the daemon admits when all of it is placed beside what is held. Its admission test is
// that of crates/plan/src/admission.rs: work without a pin needs the CPUs on which its largest vCPU has room.
func TestWhatIsPublishedIsAdmitted(t *testing.T) {
	const reserve, watcher, largest = 50_000, 100_000, 849_988
	random := rand.New(rand.NewPCG(1, 1))
	admits := func(stays []microcpus, moves []microcpus) bool {
		moves = append(slices.Clone(moves), watcher)
		room, sum := microcpus(0), microcpus(0)
		for _, one := range moves {
			sum += one
		}
		for _, taken := range stays {
			if taken+slices.Max(moves)+8 <= wholeCPU {
				room += wholeCPU - taken
			}
		}
		return sum <= room && slices.Max(stays)+watcher <= wholeCPU
	}
	checked, withdrawn := 0, 0
	for range 100_000 {
		state := nodeState{Capacity: &nodeCapacity{UnpinnedPerCPU: wholeCPU - reserve - 4, Largest: largest,
			PinnedPerCPU: wholeCPU - reserve - watcher - 260, Watcher: watcher}}
		var stays, moves []microcpus
		var ownShared microcpus
		ownPinned := map[string]microcpus{}
		pinned := cpuset.New()
		reserved := heldReservation{Name: reservationName("a"), UID: os.Geteuid(), Owner: owner}
		for cpu := range 1 + random.IntN(5) {
			state.Cpus = append(state.Cpus, cpu)
			stays = append(stays, reserve+4)
			if random.IntN(2) > 0 {
				pinned = pinned.Union(cpuset.New(cpu))
			}
			if random.IntN(3) > 0 {
				continue
			}
			reserved.Cpus, reserved.MicroCpus, reserved.Owner = []int{cpu}, random.Int64N(800_000), owner
			if random.IntN(2) > 0 {
				reserved.Owner = "cell"
			} else {
				ownPinned[cpuDevice(cpu)] = reserved.MicroCpus
			}
			state.Requested = append(state.Requested, reserved)
			stays[cpu] += reserved.MicroCpus + 4
		}
		for range random.IntN(7) {
			one := 1 + random.Int64N(largest)
			moves = append(moves, one)
			reserved.Cpus, reserved.MicroCpus, reserved.Owner = nil, one, owner
			switch random.IntN(3) {
			case 0:
				state.Vcpus = append(state.Vcpus, reservedVcpu{VM: "vm", Bandwidth: float64(one) / 1e6})
				state.Capacity.Other += one
				continue
			case 1:
				reserved.Owner = "cell"
			default:
				ownShared += one
			}
			state.Requested = append(state.Requested, reserved)
		}
		if !admits(stays, moves) {
			continue
		}
		published := capacities(devicesOf(state, pinned, true))
		checked++
		for _, cpu := range pinned.List() {
			left, found := published[cpuDevice(cpu)]
			if found {
				stays[cpu] += max(left-ownPinned[cpuDevice(cpu)], 0) + 4
			} else {
				withdrawn++
			}
		}
		for left := published[sharedDevice] - ownShared; left > 0; left -= largest {
			moves = append(moves, min(left, largest))
		}
		if !admits(stays, moves) {
			t.Fatalf("of %+v with %+v, pinned %v, not all is admitted: %v", state, *state.Capacity, pinned, published)
		}
	}
	if checked < 10_000 || withdrawn < 1_000 {
		t.Errorf("%d nodes are checked, %d CPUs are withdrawn", checked, withdrawn)
	}
}

// A request that states no capacity consumes the default, which no reservation fits.
func TestARequestWithoutCapacityReservesNothing(t *testing.T) {
	state := nodeState{Cpus: []int{0, 1}, Capacity: &nodeCapacity{UnpinnedPerCPU: 900_000, Largest: 900_000,
		PinnedPerCPU: 900_000}}
	for _, device := range devicesOf(state, cpuset.New(1), true) {
		for name, capacity := range device.Capacity {
			if capacity.RequestPolicy.Default.Value() != 1 {
				t.Errorf("capacity %s of device %s has the default %v", name, device.Name, capacity.RequestPolicy.Default)
			}
		}
		least := allocated("a", parameters(`"budget":"1us","period":"500ms"`), deviceResult(device.Name, 1))
		if found, err := reservationOf(least, testNode, time.Minute); err == nil {
			t.Errorf("device %s: %+v", device.Name, found)
		}
	}
}

func TestWhatOtherProgramsReservedIsNotPublished(t *testing.T) {
	state := nodeState{Cpus: []int{0, 1, 2}, Capacity: &nodeCapacity{UnpinnedPerCPU: 900_000, PinnedPerCPU: 900_000},
		Requested: []heldReservation{
			{Name: reservationName("a"), MicroCpus: 500_000, UID: os.Geteuid(), Owner: owner},
			{Name: "cell", MicroCpus: 200_000, Held: ptr.To(true)},
			// Another user, and another program of the same user, chose these names.
			{Name: reservationName("b"), MicroCpus: 60_000, UID: os.Geteuid() + 1, Owner: owner},
			{Name: reservationName("c"), MicroCpus: 40_000, UID: os.Geteuid(), Owner: "cell"},
			{Name: "lost", MicroCpus: 800_000, Held: ptr.To(false)},
			{Name: "pinned", MicroCpus: 400_000, Cpus: []int{2, 1}},
		}}
	for pinned, wanted := range map[string]map[string]int64{
		// A CPU on which something stays is for nothing that may move.
		"":    {sharedDevice: 900_000 - 300_000},
		"2":   {sharedDevice: 900_000 - 300_000, "cpu-2": 700_000},
		"1-2": {sharedDevice: 900_000 - 300_000, "cpu-1": 700_000, "cpu-2": 700_000},
	} {
		cpus, err := cpuset.Parse(pinned)
		if err != nil {
			t.Fatal(err)
		}
		if found := capacities(devicesOf(state, cpus, true)); !reflect.DeepEqual(found, wanted) {
			t.Errorf("%q: %v", pinned, found)
		}
	}
}

// The daemon says in one number what VMs of sched.toml hold. What they and their pacers hold of CPUs for pinned work is
// not on the shared CPUs, and is not free on their own. So it is with claims of the shared device whose VM stays on one
// CPU, because its vCPUs may run nowhere else.
func TestWhatStaysOnACPUIsTakenFromItAlone(t *testing.T) {
	const answer = `{"off":null,"cpus":[0,1,2,3,4,5],"vcpus":[
		{"vm":"plc","vcpu":0,"bandwidth":0.07,"cpu":3},
		{"vm":"plc","vcpu":1,"bandwidth":0.2500001,"cpu":3},
		{"vm":"plc","vcpu":2,"bandwidth":0.1,"cpu":0},
		{"vm":"wide","vcpu":0,"bandwidth":0.2,"cpu":null},
		{"vm":"own","vcpu":0,"bandwidth":0.5,"cpu":2},
		{"vm":"stays","vcpu":0,"bandwidth":0.3,"cpu":3},
		{"vm":"stays","vcpu":1,"bandwidth":0.3,"cpu":null},
		{"vm":"cell","vcpu":0,"bandwidth":0.05,"cpu":3},
		{"vm":"both","vcpu":0,"bandwidth":0.03,"cpu":3}],
		"requested":[
		{"name":"dra-1","owner":"ontime-dra","uid":%[1]d,"cpus":[2],"micro_cpus":500000,"held":true,
			"tenants":["own"],"why":null},
		{"name":"dra-2","owner":"ontime-dra","uid":%[1]d,"micro_cpus":600000,"held":true,"tenants":["stays"],"why":null},
		{"name":"cell","owner":"cell","uid":1,"cpus":[3],"micro_cpus":50000,"held":true,"tenants":["cell"],"why":null},
		{"name":"both","owner":"cell","uid":1,"cpus":[1],"micro_cpus":10000,"held":true,"tenants":["both"],
			"why":"both: sched.toml has a [[reservation]] for it too"},
		{"name":"lost","owner":"cell","uid":1,"cpus":[3],"micro_cpus":900000,"held":false,"tenants":["plc"],"why":"full"}],
		"capacity":{"unpinned_micro_cpus_per_cpu":900000,"largest_micro_cpus":900000,"pinned_micro_cpus_per_cpu":890000,
			"other_micro_cpus":650001,"pacers_micro_cpus":{"0":500,"3":1000,"4":2000},"preempt_rt":true}}`
	var state nodeState
	ok(t, json.Unmarshal(fmt.Appendf(nil, answer, os.Geteuid()), &state))
	// CPUs 4 and 5, less what VM wide and pacers have there. The scheduler counts claim dra-2 against it.
	const free = 2*900_000 - 200_001 - 2_000 + 300_000
	for pinned, wanted := range map[string]map[string]int64{
		"":  {sharedDevice: free},
		"2": {sharedDevice: free, "cpu-2": 890_000},
		"2-3": {sharedDevice: free, "cpu-2": 890_000,
			"cpu-3": 890_000 - 350_001 - 50_000 - 300_000 - 1_000},
		"4": {sharedDevice: free - 900_000 + 2_000, "cpu-4": 888_000},
	} {
		cpus, err := cpuset.Parse(pinned)
		ok(t, err)
		if found := capacities(devicesOf(state, cpus, true)); !reflect.DeepEqual(found, wanted) {
			t.Errorf("%q: %v, wanted %v", pinned, found, wanted)
		}
	}
}

// A pod's user chooses the name of its VM.
func TestVMsOfOneNameAreToldApartByTheirCPUs(t *testing.T) {
	state := nodeState{Cpus: []int{0, 1, 2, 3}, Capacity: &nodeCapacity{UnpinnedPerCPU: 900_000, PinnedPerCPU: 890_000},
		Requested: []heldReservation{
			{Name: reservationName("a"), MicroCpus: 500_000, Cpus: []int{2}, UID: os.Geteuid(), Owner: owner,
				Tenants: []string{"vm"}},
			{Name: reservationName("b"), MicroCpus: 300_000, UID: os.Geteuid(), Owner: owner, Tenants: []string{"vm"}},
		},
		Vcpus: []reservedVcpu{{VM: "vm", Bandwidth: 0.5, CPU: ptr.To(2)}, {VM: "vm", Bandwidth: 0.3}}}
	wanted := map[string]int64{sharedDevice: 3 * 900_000, "cpu-2": 890_000}
	if found := capacities(devicesOf(state, cpuset.New(2), true)); !reflect.DeepEqual(found, wanted) {
		t.Errorf("%v, wanted %v", found, wanted)
	}
}

// Where what stays on a CPU leaves less than its part of the pacers' time, the other CPUs have the rest of it.
func TestPacersThatLackTimeOnACPUHaveItOnOthers(t *testing.T) {
	state := nodeState{Cpus: []int{0, 1}, Capacity: &nodeCapacity{UnpinnedPerCPU: 949_996, Other: 1_030_000,
		Pacers: map[int]microcpus{0: 34_525, 1: 34_525}},
		Vcpus: []reservedVcpu{{VM: "large", Bandwidth: 0.94, CPU: ptr.To(0)}, {VM: "small", Bandwidth: 0.09}}}
	wanted := map[string]int64{sharedDevice: 949_996 - 34_525 - 90_000 - (940_000 + 34_525 - 949_996)}
	if found := capacities(devicesOf(state, cpuset.New(), true)); !reflect.DeepEqual(found, wanted) {
		t.Errorf("%v, wanted %v", found, wanted)
	}
}

func TestAHostOfManyCPUsHasSeveralSlices(t *testing.T) {
	state := nodeState{Capacity: &nodeCapacity{UnpinnedPerCPU: 950_000, PinnedPerCPU: 950_000}}
	for cpu := range 400 {
		state.Cpus = append(state.Cpus, cpu)
	}
	slices := poolOf(testNode, devicesOf(state, cpuset.New(state.Cpus[1:]...), false)).Pools[testNode].Slices
	count := 0
	for _, slice := range slices {
		if len(slice.Devices) > resourceapi.ResourceSliceMaxDevices {
			t.Errorf("a slice has %d devices", len(slice.Devices))
		}
		count += len(slice.Devices)
	}
	if count != 400 || len(slices) != 4 {
		t.Errorf("%d devices in %d slices", count, len(slices))
	}
	if empty := poolOf(testNode, nil).Pools[testNode].Slices; len(empty) != 1 {
		t.Errorf("an empty pool has %d slices", len(empty))
	}
}

// FuzzClaim: whatever a claim says, what is asked of the daemon is for the claim's pod, within the daemon's bounds, and
// no more than the scheduler has counted for the claim's devices.
func FuzzClaim(f *testing.F) {
	f.Add(parameters(`"budget":"3ms","period":"10ms","vcpus":2,"level":4`), parameters(`"budget":"1ms","period":"2ms"`),
		"cpu", "cpu", sharedDevice, "cpu-1", "600000", testNode, "pods")
	f.Add(parameters(`"budget":"500us","period":"1ms","vcpus":2`), "", "cpu/a", "cpu", "cpu-3", "cpu-12", "500m",
		testNode, "pods")
	f.Fuzz(func(t *testing.T, config, ofClass, request, configured, device, second, consumed, pool, resourceKind string) {
		claim := allocated("a", config, deviceResult(device, 0))
		allocation := claim.Status.Allocation
		if second != "" {
			allocation.Devices.Results = append(allocation.Devices.Results, deviceResult(second, 0))
		}
		var counted int64
		for index := range allocation.Devices.Results {
			result := &allocation.Devices.Results[index]
			result.Request, result.Pool = request, pool
			if quantity, err := resource.ParseQuantity(consumed); err == nil {
				result.ConsumedCapacity[capacityName] = quantity
				counted += min(quantity.Value(), 1<<40)
			} else {
				delete(result.ConsumedCapacity, capacityName)
			}
		}
		allocation.Devices.Config[0].Requests = []string{configured}
		allocation.Devices.Config = append([]resourceapi.DeviceAllocationConfiguration{
			opaque(resourceapi.AllocationConfigSourceClass, ofClass)}, allocation.Devices.Config...)
		claim.Status.ReservedFor[0].Resource = resourceKind
		found, err := reservationOf(claim, testNode, time.Minute)
		if err != nil {
			return
		}
		count, pinned := int64(found.Count), len(found.Cpus)
		if pool != testNode || resourceKind != "pods" || found.For.Pod != "pod-uid-of-a" || found.LeaseSeconds != 60 {
			t.Errorf("%+v of pool %q, for %q", found, pool, resourceKind)
		}
		if found.BudgetUs < 1 || found.BudgetUs > found.PeriodUs || found.PeriodUs < 500 || found.PeriodUs > 1_000_000 ||
			count < 1 || count > mostVcpus || found.Level < 0 || found.Level > lowestLevel ||
			pinned > 0 && pinned != found.Count {
			t.Errorf("the daemon refuses %+v", found)
		}
		if each := (found.BudgetUs*wholeCPU + found.PeriodUs - 1) / found.PeriodUs; each*count > counted {
			t.Errorf("%+v takes %d, counted are %d", found, each*count, counted)
		}
	})
}
