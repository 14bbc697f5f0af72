package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	eventrecord "k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/cpuset"
)

// unheardBeforeEmpty is how many looks in a row the daemon may leave unanswered before the node publishes no capacity.
// A daemon that is being replaced is away for less.
const unheardBeforeEmpty = 3

// publisher writes the node's ResourceSlices.
type publisher interface {
	PublishResources(context.Context, resourceslice.DriverResources) error
}

// driver reserves CPU time with the node's daemon for claims that the scheduler has allocated here. It implements
// kubeletplugin.DRAPlugin.
type driver struct {
	node      string
	pinned    cpuset.CPUSet
	anyKernel bool
	lease     time.Duration
	cdi       string
	client    kubernetes.Interface
	events    eventrecord.EventRecorder
	daemon    *daemonClient
	// fatal ends the process after an error that a restart may cure.
	fatal context.CancelCauseFunc

	// mutex guards records, and keeps a renewal from bringing back what kubelet is giving back.
	mutex   sync.Mutex
	records *records

	// What look knows from before. Only its goroutine uses these.
	published []resourceapi.Device
	anything  bool
	unheard   int
	served    told
	losses    told
	lost      map[types.UID]error
	// crowded are claims that another pod uses as well, at the last renewal.
	crowded map[types.UID]error
}

// PrepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (driver *driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (
	map[types.UID]kubeletplugin.PrepareResult, error) {
	prepared := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		if err := driver.prepare(ctx, claim); err != nil {
			klog.FromContext(ctx).Error(err, "A claim is refused", "claim", klog.KObj(claim), "uid", claim.UID)
			prepared[claim.UID] = kubeletplugin.PrepareResult{Err: err}
			continue
		}
		var devices []kubeletplugin.Device
		for _, result := range results(claim) {
			devices = append(devices, kubeletplugin.Device{Requests: []string{result.Request}, PoolName: result.Pool,
				DeviceName: result.Device, ShareID: result.ShareID})
		}
		if _, pinned := cpuOf(devices[0].DeviceName); pinned {
			devices[0].CDIDeviceIDs = []string{cdiKind + "=" + string(claim.UID)}
		}
		prepared[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return prepared, nil
}

// prepare records the claim before it reserves: a driver that is killed in between renews or gives back what it finds
// recorded, so nothing stays reserved for nobody.
func (driver *driver) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	wanted, err := reservationOf(claim, driver.node, driver.lease)
	if err != nil {
		return err
	}
	if err := driver.checkKernel(ctx); err != nil {
		return err
	}
	driver.mutex.Lock()
	defer driver.mutex.Unlock()
	for uid, other := range driver.records.claims {
		if uid != claim.UID && !other.Released && other.Reservation.For == wanted.For {
			return fmt.Errorf("the pod of claim %s has claim %s for driver %s too, and can use only one: ask for all its "+
				"CPU time in one claim", claim.Name, other.Name, driverName)
		}
	}
	former, again := driver.records.claims[claim.UID]
	added := record{Namespace: claim.Namespace, Name: claim.Name, Reservation: wanted}
	if err := driver.records.put(claim.UID, added); err != nil {
		return err
	}
	err = driver.daemon.reserve(ctx, reservationName(claim.UID), wanted)
	if err == nil && wanted.Cpus != nil {
		err = describeCPUs(driver.cdi, claim.UID, wanted.Cpus)
	}
	if err != nil {
		if again {
			return errors.Join(err, driver.records.put(claim.UID, former))
		}
		// The daemon may have reserved although its answer was lost.
		return errors.Join(err, driver.giveBack(claim.UID, added), driver.end(ctx, claim.UID))
	}
	return nil
}

func (driver *driver) checkKernel(ctx context.Context) error {
	if driver.anyKernel {
		return nil
	}
	state, err := driver.daemon.state(ctx)
	if err == nil && state.Capacity != nil && !state.Capacity.PreemptRT {
		err = fmt.Errorf("node %s does not run a PREEMPT_RT kernel, so response times are not kept: install one, or "+
			"let the claim's device class select %s", driver.node, realTimeAttribute)
	}
	return err
}

// UnprepareResourceClaims implements [kubeletplugin.DRAPlugin]. A pod's end does not wait for a daemon that is away: a
// later look ends what is recorded as released.
func (driver *driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (
	map[types.UID]error, error) {
	driver.mutex.Lock()
	defer driver.mutex.Unlock()
	released := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		given := driver.records.claims[claim.UID]
		given.Namespace, given.Name = claim.Namespace, claim.Name
		err := driver.giveBack(claim.UID, given)
		released[claim.UID] = err
		if err != nil {
			continue
		}
		if err := driver.end(ctx, claim.UID); err != nil {
			klog.FromContext(ctx).Error(err, "A reservation that was given back could not be ended; trying again",
				"claim", klog.KRef(claim.Namespace, claim.Name), "uid", claim.UID)
		}
	}
	return released, nil
}

// giveBack records that the reservation of a claim has to end, whether the claim was recorded or not. The caller holds
// the mutex.
func (driver *driver) giveBack(claim types.UID, given record) error {
	given.Released = true
	return driver.records.put(claim, given)
}

// end ends the reservation of a claim that was given back. The caller holds the mutex.
func (driver *driver) end(ctx context.Context, claim types.UID) error {
	if err := driver.daemon.release(ctx, reservationName(claim)); err != nil {
		return err
	}
	if err := removeCPUs(driver.cdi, claim); err != nil {
		return err
	}
	return driver.records.remove(claim)
}

// WatchHealthStatus implements [kubeletplugin.DRAPlugin]: a reservation's state is in `ontime top`, not in the pod's.
func (driver *driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// HandleError implements [kubeletplugin.DRAPlugin].
func (driver *driver) HandleError(ctx context.Context, err error, message string) {
	runtime.HandleErrorWithContext(ctx, err, message)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		driver.fatal(fmt.Errorf("%s: %w", message, err))
	}
}

// newest gives a publisher the newest of what is published. The helper's first call does not return before the API
// server has answered, and renewals must not wait for that.
type newest struct {
	to      publisher
	waiting chan resourceslice.DriverResources
}

// PublishResources implements [publisher]. Only one goroutine calls it.
func (newest *newest) PublishResources(_ context.Context, resources resourceslice.DriverResources) error {
	select {
	case <-newest.waiting:
	default:
	}
	newest.waiting <- resources
	return nil
}

// forward publishes until the context ends.
func (newest *newest) forward(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case resources := <-newest.waiting:
			if err := newest.to.PublishResources(ctx, resources); err != nil {
				return fmt.Errorf("publish the node's CPU time: %w", err)
			}
		}
	}
}

// run looks at the daemon and at the prepared claims until the context ends.
func (driver *driver) run(ctx context.Context, helper publisher, interval time.Duration) {
	to := &newest{to: helper, waiting: make(chan resourceslice.DriverResources, 1)}
	go func() {
		if err := to.forward(ctx); err != nil && ctx.Err() == nil {
			driver.fatal(err)
		}
	}()
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var log changedErrors
	for {
		log.tell(ctx, driver.look(ctx, to), "The node's reservations could not all be looked after; trying again")
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// changedErrors logs an error that lasts once, not at each look, and its end.
type changedErrors struct {
	last string
}

func (errors *changedErrors) tell(ctx context.Context, err error, message string) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text == errors.last || ctx.Err() != nil {
		return
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, message)
	} else {
		klog.FromContext(ctx).Info("The last error is over", "error", errors.last)
	}
	errors.last = text
}

// look publishes the node's capacity if it has changed, or tells why there is none, and renews reservations.
func (driver *driver) look(ctx context.Context, to publisher) error {
	// Before the daemon's state is read: a claim that kubelet prepares meanwhile is not taken for lost.
	driver.mutex.Lock()
	recorded := maps.Clone(driver.records.claims)
	driver.mutex.Unlock()
	state, err := driver.daemon.state(ctx)
	if err != nil {
		driver.unheard++
		driver.warn(&driver.served, driver.warningOf(state, err))
		if driver.anything && driver.unheard < unheardBeforeEmpty {
			return err
		}
		return errors.Join(err, driver.publish(ctx, to, nil))
	}
	driver.unheard = 0
	driver.warn(&driver.served, driver.warningOf(state, nil))
	if state.Off != nil {
		err = fmt.Errorf("Ontime's daemon on this node reserves no CPU time, so the node publishes none: %s", *state.Off)
	}
	return errors.Join(err, driver.publish(ctx, to, devicesOf(state, driver.pinned, driver.anyKernel)),
		driver.renew(ctx, recorded, state))
}

func (driver *driver) publish(ctx context.Context, to publisher, devices []resourceapi.Device) error {
	if driver.anything && equality.Semantic.DeepEqual(devices, driver.published) {
		return nil
	}
	if err := to.PublishResources(ctx, poolOf(driver.node, devices)); err != nil {
		return fmt.Errorf("publish the node's CPU time: %w", err)
	}
	driver.published, driver.anything = devices, true
	return nil
}

// renew begins each lease anew that the daemon has lost or of which a third is over, gives back what belongs to pods
// that are gone, and ends what was given back. An event tells of pods that were without their CPU time at the last look
// too: KubeVirt pins a VM's vCPUs only some time after the VM's start.
func (driver *driver) renew(ctx context.Context, recorded map[types.UID]record, state nodeState) error {
	held := make(map[string]heldReservation, len(state.Requested))
	for _, reservation := range state.Requested {
		if reservation.isOwn(reservationName("")) {
			held[reservation.Name] = reservation
		}
	}
	// All look-ups together must leave time to renew each lease, because the API server may not answer any of them.
	lookups, cancel := context.WithTimeout(ctx, min(daemonTimeout, driver.lease/6))
	defer cancel()
	var problems []error
	lost, lasting := map[types.UID]error{}, map[types.UID]error{}
	// In this order an error that lasts has the same text again.
	for _, uid := range slices.Sorted(maps.Keys(recorded)) {
		record := recorded[uid]
		present, found := held[reservationName(uid)]
		var err error
		if record.Released || !found || present.LeftSeconds <= driver.lease.Seconds()*2/3 {
			err = driver.renewOne(ctx, lookups, uid, record, !found)
		}
		if err == nil && !record.Released {
			// A renewal changes nothing of it.
			err = cmp.Or(present.problem(), driver.crowded[uid])
		}
		if err == nil {
			continue
		}
		err = fmt.Errorf("claim %s/%s: %w", record.Namespace, record.Name, err)
		problems = append(problems, err)
		if !record.Released {
			lost[uid] = err
			if driver.lost[uid] != nil {
				lasting[uid] = err
			}
		}
	}
	driver.lost = lost
	maps.DeleteFunc(driver.crowded, func(uid types.UID, _ error) bool { _, found := recorded[uid]; return !found })
	driver.warn(&driver.losses, driver.lostWarning(lasting))
	return errors.Join(problems...)
}

// renewOne renews a reservation, or ends it. It asks the API server within `lookups`.
func (driver *driver) renewOne(ctx, lookups context.Context, uid types.UID, record record, lost bool) error {
	log := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KRef(record.Namespace, record.Name), "uid", uid)
	gone := false
	if !record.Released {
		// The API server may take long to answer, so kubelet does not wait for this.
		var err error
		if gone, err = driver.isGone(lookups, uid, record); err != nil {
			log.Error(err, "A claim's reservation is kept", "pod", record.Reservation.For.Pod)
		}
	}
	driver.mutex.Lock()
	defer driver.mutex.Unlock()
	// Meanwhile kubelet may have given the claim back, and prepared it for another pod.
	if now, still := driver.records.claims[uid]; !still || !reflect.DeepEqual(now, record) {
		return nil
	}
	if record.Released {
		return driver.end(ctx, uid)
	}
	if gone {
		log.Info("A pod is gone; its CPU time is given back")
		return errors.Join(driver.giveBack(uid, record), driver.end(ctx, uid))
	}
	renewed := record.Reservation
	renewed.LeaseSeconds = int64(driver.lease / time.Second)
	err := driver.daemon.reserve(ctx, reservationName(uid), renewed)
	if lost && err != nil {
		return fmt.Errorf("the daemon has lost its reservation, and does not take it again: %w", err)
	}
	if lost {
		log.Info("The daemon had lost a claim's reservation; it holds the CPU time again")
	}
	return err
}

// isGone says whether the pod that a claim was prepared for no longer uses it. While the API server does not answer,
// nothing counts as gone.
func (driver *driver) isGone(ctx context.Context, uid types.UID, record record) (bool, error) {
	claim, err := driver.client.ResourceV1().ResourceClaims(record.Namespace).Get(ctx, record.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up the claim: %w", err)
	}
	_, used := podsOf(claim)[types.UID(record.Reservation.For.Pod)]
	if claim.UID != uid || claim.Status.Allocation == nil || !used {
		return true, nil
	}
	// Where policy pods.cpu.ontime is not installed, another pod may use the claim as well, and has no CPU time: kubelet
	// asks no driver again for a claim that is prepared.
	_, driver.crowded[uid] = podOf(claim)
	return false, nil
}
