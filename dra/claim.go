package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// sharedDevice is the device whose capacity unpinned work of the node shares.
const sharedDevice = "shared"

// cpuDevice is the name of the device of one CPU for pinned work.
func cpuDevice(cpu int) string {
	return "cpu-" + strconv.Itoa(cpu)
}

// cpuOf is the CPU of such a device.
func cpuOf(device string) (int, bool) {
	digits, found := strings.CutPrefix(device, "cpu-")
	cpu, err := strconv.Atoi(digits)
	return cpu, found && err == nil && cpuDevice(cpu) == device
}

// reservationName is the daemon's name for a claim's reservation. A claim has one, so that its UID, which is all that
// kubelet knows when it unprepares, suffices to give it back.
func reservationName(claim types.UID) string {
	return "dra-" + string(claim)
}

// results are the devices of this driver that a claim was given.
func results(claim *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	var ours []resourceapi.DeviceRequestAllocationResult
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == driverName {
			ours = append(ours, result)
		}
	}
	return ours
}

// reservationOf translates an allocated claim. It checks everything again that the API server or the scheduler should
// have checked, because a claim may be made while their policies are not installed.
func reservationOf(claim *resourceapi.ResourceClaim, node string, lease time.Duration) (reservation, error) {
	ours := results(claim)
	if len(ours) == 0 {
		return reservation{}, fmt.Errorf("claim %s has no device of driver %s", claim.Name, driverName)
	}
	first := ours[0]
	config, err := configOf(claim, first.Request)
	if err != nil {
		return reservation{}, fmt.Errorf("claim %s: %w", claim.Name, err)
	}
	var cpus []int
	for _, result := range ours {
		switch {
		case result.Request != first.Request:
			return reservation{}, fmt.Errorf("claim %s has requests %q and %q for driver %s: write one request, with "+
				"vcpus in its parameters", claim.Name, first.Request, result.Request, driverName)
		case result.Pool != node:
			return reservation{}, fmt.Errorf("claim %s was given CPU time of node %s, this is %s", claim.Name,
				result.Pool, node)
		case result.AdminAccess != nil && *result.AdminAccess:
			return reservation{}, fmt.Errorf("claim %s asks for admin access, which reserves nothing", claim.Name)
		}
		needed := config.perVcpu()
		if cpu, pinned := cpuOf(result.Device); pinned {
			cpus = append(cpus, cpu)
		} else if result.Device == sharedDevice && len(ours) == 1 {
			needed = config.total()
		} else if result.Device == sharedDevice {
			return reservation{}, fmt.Errorf("claim %s asks for %d devices of the node's shared CPU time: ask for one, "+
				"with vcpus in its parameters", claim.Name, len(ours))
		} else {
			return reservation{}, fmt.Errorf("claim %s was given device %q, which this driver does not know: "+
				"delete the claim", claim.Name, result.Device)
		}
		consumed, found := result.ConsumedCapacity[capacityName]
		if !found {
			return reservation{}, fmt.Errorf("claim %s was allocated without capacity: the cluster needs the feature "+
				"DRAConsumableCapacity, on by default from Kubernetes 1.36", claim.Name)
		}
		if consumed.CmpInt64(needed) < 0 {
			return reservation{}, fmt.Errorf("claim %s requests a capacity of %s %s, its budget, period and vcpus need "+
				"%d: write capacity.requests.%s: %d", claim.Name, consumed.String(), capacityName, needed, capacityName,
				needed)
		}
	}
	if cpus != nil && len(cpus) != config.Vcpus {
		return reservation{}, fmt.Errorf("claim %s asks for %d CPUs and says vcpus %d: pinned work needs count = vcpus",
			claim.Name, len(cpus), config.Vcpus)
	}
	pod, err := podOf(claim)
	if err != nil {
		return reservation{}, err
	}
	return reservation{
		For:      target{Pod: string(pod)},
		BudgetUs: config.Budget.Microseconds(), PeriodUs: config.Period.Microseconds(),
		Count: config.Vcpus, Cpus: cpus, Level: config.Level,
		LeaseSeconds: int64(lease / time.Second), Owner: owner,
	}, nil
}

// configOf finds the parameters for a request. The scheduler lists those of the class before those of the claim, and
// the later ones take precedence.
func configOf(claim *resourceapi.ResourceClaim, request string) (reservationConfig, error) {
	main, _, _ := strings.Cut(request, "/")
	var found []byte
	for _, config := range claim.Status.Allocation.Devices.Config {
		applies := len(config.Requests) == 0 || slices.Contains(config.Requests, request) ||
			slices.Contains(config.Requests, main)
		if applies && config.Opaque != nil && config.Opaque.Driver == driverName {
			found = config.Opaque.Parameters.Raw
		}
	}
	if found == nil {
		return reservationConfig{}, fmt.Errorf("request %q has no parameters for driver %s: budget and period are "+
			"needed (spec.devices.config[].opaque)", request, driverName)
	}
	return parseConfig(found)
}

// podsOf are the names of the pods that may use a claim.
func podsOf(claim *resourceapi.ResourceClaim) map[types.UID]string {
	pods := map[types.UID]string{}
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.Resource == "pods" && consumer.APIGroup == "" {
			pods[consumer.UID] = consumer.Name
		}
	}
	return pods
}

// podOf is the only pod that a claim is for. Bandwidth that several pods shared would be promised to each of them.
func podOf(claim *resourceapi.ResourceClaim) (types.UID, error) {
	pods := podsOf(claim)
	if len(pods) != 1 {
		names := strings.Join(slices.Sorted(maps.Values(pods)), ", ")
		return "", fmt.Errorf("claim %s is for %d pods (%s), but CPU time is reserved for one: name a "+
			"ResourceClaimTemplate in each pod, which gives each a claim of its own", claim.Name, len(pods), names)
	}
	return slices.Collect(maps.Keys(pods))[0], nil
}
