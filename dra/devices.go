package main

import (
	"math"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/cpuset"
	"k8s.io/utils/ptr"
)

// Attributes of devices, which the manifests' selectors use.
const (
	// kindAttribute is "shared" or "pinned".
	kindAttribute = "kind"
	// realTimeAttribute says whether the node's kernel is PREEMPT_RT.
	realTimeAttribute = "realTimeKernel"
	// cpuAttribute is the number of a pinned device's CPU.
	cpuAttribute = "cpu"
)

// devicesOf are the devices of a node: one for unpinned work with the time of all CPUs that pinned work does not have,
// and one for each CPU of pinned work. A CPU is in one of them only, so the scheduler never counts its time twice. CPUs
// for pinned work that unpinned work needs as well, because the others are too few for it, are in the first one.
func devicesOf(state nodeState, pinned cpuset.CPUSet, anyKernel bool) []resourceapi.Device {
	if state.Off != nil || state.Capacity == nil {
		return nil
	}
	capacity := state.Capacity
	usable := cpuset.New(state.Cpus...)
	pinned = pinned.Intersection(usable)
	realTime := resourceapi.DeviceAttribute{BoolValue: ptr.To(capacity.PreemptRT || anyKernel)}
	var devices []resourceapi.Device

	shared, taken, pinned := timeOf(state, usable, pinned)
	if shared > 0 {
		capacities := divisible(shared)
		if capacity.Largest > 0 {
			// A vCPU runs on one CPU at a time, so its share has a bound of its own, however much all CPUs have left.
			capacities[perVcpuName] = bounded(capacity.Largest)
		}
		devices = append(devices, resourceapi.Device{
			Name: sharedDevice,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				kindAttribute:     {StringValue: ptr.To("shared")},
				realTimeAttribute: realTime,
			},
			Capacity:                 capacities,
			AllowMultipleAllocations: ptr.To(true),
		})
	}
	for _, cpu := range pinned.List() {
		left := capacity.PinnedPerCPU - taken[cpu]
		if left <= 0 {
			continue
		}
		devices = append(devices, resourceapi.Device{
			Name: cpuDevice(cpu),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				kindAttribute:     {StringValue: ptr.To("pinned")},
				realTimeAttribute: realTime,
				cpuAttribute:      {IntValue: ptr.To(int64(cpu))},
			},
			Capacity:                 divisible(left),
			AllowMultipleAllocations: ptr.To(true),
		})
	}
	return devices
}

// timeOf is the capacity of the shared device, what the devices of pinned CPUs cannot give out, and those of the pinned
// CPUs that have a device.
//
// A CPU on which a vCPU stays takes no part in the shared device, whoever reserved that vCPU: the daemon lets a vCPU
// without a pin run there only if what stays there and the largest such vCPU fit together, which no sum says.
func timeOf(state nodeState, usable, pinned cpuset.CPUSet) (microcpus, map[int]microcpus, cpuset.CPUSet) {
	capacity := state.Capacity
	// For each name of a tenant, the CPUs of the pinned requests that have it. A request has all of its tenants' vCPUs
	// or, with the reason in Why, none of them; it has none of a VM that sched.toml names.
	requested := map[string]cpuset.CPUSet{}
	taken, held := map[int]microcpus{}, map[int]microcpus{}
	shared, ownShared, anyShared := -capacity.Watcher, microcpus(0), false
	for _, reservation := range state.Requested {
		if !reservation.isHeld() {
			continue
		}
		if reservation.Why == nil {
			for _, tenant := range reservation.Tenants {
				requested[tenant] = requested[tenant].Union(cpuset.New(reservation.Cpus...))
			}
		}
		own := reservation.isOwn(reservationName(""))
		if len(reservation.Cpus) == 0 {
			anyShared = anyShared || reservation.MicroCpus > 0
			if own {
				ownShared += reservation.MicroCpus
			} else {
				shared -= reservation.MicroCpus
			}
		}
		for _, cpu := range reservation.Cpus {
			each := reservation.MicroCpus / int64(len(reservation.Cpus))
			held[cpu] += each
			// The scheduler counts this driver's claims of a published device itself.
			if !own || !pinned.Contains(cpu) {
				taken[cpu] += each
			}
		}
	}
	// The daemon's sum of what VMs of sched.toml have does not say on which CPUs.
	shared -= capacity.Other
	for _, vcpu := range state.Vcpus {
		anyShared = anyShared || vcpu.CPU == nil
		if vcpu.CPU == nil || requested[vcpu.VM].Contains(*vcpu.CPU) {
			continue
		}
		// A whole number of millionths is one here too, although a binary fraction is not 0.07.
		bandwidth := math.Round(vcpu.Bandwidth*1e12) / 1e6
		taken[*vcpu.CPU] += int64(math.Ceil(bandwidth))
		held[*vcpu.CPU] += int64(math.Ceil(bandwidth))
		// It was counted above or, if it is this driver's, is counted by the scheduler.
		shared += int64(math.Floor(bandwidth))
	}
	free := func(cpu int) microcpus { return capacity.UnpinnedPerCPU - capacity.Pacers[cpu] }
	for _, cpu := range usable.List() {
		taken[cpu] += capacity.Pacers[cpu]
		left := free(cpu) - held[cpu]
		if pinned.Contains(cpu) || held[cpu] > 0 {
			// Pacers that lack time there have it on other CPUs, where slices are planned for all CPUs at once.
			left = min(left, 0)
		}
		shared += left
	}
	if !anyShared {
		// What a pinned device gives out leaves time for the watcher.
		return shared, taken, pinned
	}
	// Work without a pin may run on pinned CPUs too. What it needs of them they have no more for pinned work: first
	// CPUs on which nothing stays go back, from the last on. Where they do not suffice, it is between what stays on the
	// others, of which no sum says how much is left.
	for _, cpu := range slices.Backward(pinned.List()) {
		if shared < ownShared && held[cpu] == 0 {
			shared += max(free(cpu), 0)
			pinned = pinned.Difference(cpuset.New(cpu))
		}
	}
	if shared < ownShared {
		pinned = cpuset.New()
	}
	return shared, taken, pinned
}

// divisible is a capacity of which a request takes any whole number. A request that names none takes 1, and the driver
// then says what it needs; without a policy it would take everything.
func divisible(all microcpus) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	one := resource.NewQuantity(1, resource.DecimalSI)
	return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		capacityName: {
			Value: *resource.NewQuantity(all, resource.DecimalSI),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default:    one,
				ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: one},
			},
		},
	}
}

// bounded is a capacity that never runs out, of which each request takes at most this.
func bounded(most microcpus) resourceapi.DeviceCapacity {
	one := resource.NewQuantity(1, resource.DecimalSI)
	return resourceapi.DeviceCapacity{
		Value: *resource.NewQuantity(1<<50, resource.DecimalSI),
		RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default: one,
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: one,
				Max: resource.NewQuantity(most, resource.DecimalSI)},
		},
	}
}

// poolOf is what the node publishes. A node without devices publishes an empty pool, which shows that the driver runs.
func poolOf(node string, devices []resourceapi.Device) resourceslice.DriverResources {
	var parts []resourceslice.Slice
	for part := range slices.Chunk(devices, resourceapi.ResourceSliceMaxDevices) {
		parts = append(parts, resourceslice.Slice{Devices: part})
	}
	if parts == nil {
		parts = []resourceslice.Slice{{}}
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: {Slices: parts}}}
}
