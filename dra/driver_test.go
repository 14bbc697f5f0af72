package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	eventrecord "k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/cpuset"

	"ontime/dra/daemontest"
)

// pages keeps what was published last.
type pages struct {
	devices map[string]int64
	count   int
}

func (pages *pages) PublishResources(_ context.Context, resources resourceslice.DriverResources) error {
	pages.devices = map[string]int64{}
	for _, slice := range resources.Pools[testNode].Slices {
		for name, capacity := range capacities(slice.Devices) {
			pages.devices[name] = capacity
		}
	}
	pages.count++
	return nil
}

// newDriver is a driver as a new process makes it; folder has the list of prepared claims.
func newDriver(t *testing.T, folder, socket string, api *fake.Clientset) *driver {
	t.Helper()
	records, err := loadRecords(filepath.Join(folder, "claims.json"))
	if err != nil {
		t.Fatal(err)
	}
	_, fatal := context.WithCancelCause(context.Background())
	return &driver{node: testNode, anyKernel: true, lease: time.Minute, client: api, daemon: newDaemonClient(socket),
		crowded: map[types.UID]error{}, events: &eventrecord.FakeRecorder{}, cdi: filepath.Join(folder, "cdi"), fatal: fatal, records: records}
}

// apiServer has these claims.
func apiServer(claims ...*resourceapi.ResourceClaim) *fake.Clientset {
	var objects []runtime.Object
	for _, claim := range claims {
		objects = append(objects, claim)
	}
	return fake.NewClientset(objects...)
}

// prepare is kubelet's call for one claim.
func prepare(t *testing.T, driver *driver, claim *resourceapi.ResourceClaim) error {
	t.Helper()
	prepared, err := driver.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{claim})
	if err != nil {
		t.Fatal(err)
	}
	result, found := prepared[claim.UID]
	if !found {
		t.Fatalf("no answer for %s", claim.UID)
	}
	if result.Err == nil && len(result.Devices) != len(claim.Status.Allocation.Devices.Results) {
		t.Fatalf("%d devices are prepared", len(result.Devices))
	}
	return result.Err
}

func unprepare(t *testing.T, driver *driver, claim *resourceapi.ResourceClaim) error {
	t.Helper()
	released, err := driver.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{UID: claim.UID,
		NamespacedName: types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}}})
	if err != nil {
		t.Fatal(err)
	}
	result, found := released[claim.UID]
	if !found {
		t.Fatalf("no answer for %s", claim.UID)
	}
	return result
}

// held are the names and shares of the daemon's reservations.
func held(t *testing.T, driver *driver) map[string]microcpus {
	t.Helper()
	state, err := driver.daemon.state(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	shares := map[string]microcpus{}
	for _, reservation := range state.Requested {
		shares[reservation.Name] = reservation.MicroCpus
	}
	return shares
}

func wantHeld(t *testing.T, driver *driver, wanted map[string]microcpus) {
	t.Helper()
	if found := held(t, driver); fmt.Sprint(found) != fmt.Sprint(wanted) {
		t.Fatalf("the daemon holds %v, wanted %v", found, wanted)
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const sched = "reserve = 0.05\n"

func TestARealDaemonHoldsWhatIsPrepared(t *testing.T) {
	node := daemontest.Start(t, sched)
	first := allocated("first", parameters(`"budget":"3ms","period":"10ms"`), deviceResult(sharedDevice, 300_000))
	folder, api := t.TempDir(), apiServer(first)
	driver := newDriver(t, folder, node.Socket(), api)
	var pages pages
	ok(t, driver.look(t.Context(), &pages))
	all := pages.devices[sharedDevice]
	if all < 500_000 {
		t.Fatalf("the node publishes %v", pages.devices)
	}
	name := reservationName(first.UID)
	ok(t, prepare(t, driver, first))
	ok(t, prepare(t, driver, first)) // A restarted kubelet asks again.
	wantHeld(t, driver, map[string]microcpus{name: 300_000})

	// What the node does not have is refused with the daemon's reason, and nothing of it stays.
	second := allocated("second", parameters(`"budget":"9ms","period":"10ms","vcpus":200`),
		deviceResult(sharedDevice, 180_000_000))
	if err := prepare(t, driver, second); err == nil || !strings.Contains(err.Error(), "daemon on this node refuses") {
		t.Fatalf("200 vCPUs: %v", err)
	}
	wantHeld(t, driver, map[string]microcpus{name: 300_000})

	// The published capacity is what the daemon admits, to the last millionth: the scheduler's sum is the daemon's.
	state, err := driver.daemon.state(t.Context())
	ok(t, err)
	rest, vcpus := all-300_000, int64(len(state.Cpus))
	filler := allocated("filler", parameters(fmt.Sprintf(`"budget":"%dus","period":"1s","vcpus":%d`, rest/vcpus, vcpus)),
		deviceResult(sharedDevice, rest))
	ok(t, prepare(t, driver, filler))
	drop := allocated("drop", parameters(fmt.Sprintf(`"budget":"%dus","period":"1s"`, vcpus)),
		deviceResult(sharedDevice, vcpus))
	if err := prepare(t, driver, drop); err == nil {
		t.Fatal("more is reserved than the node publishes")
	}
	ok(t, unprepare(t, driver, filler))
	ok(t, unprepare(t, driver, filler))

	// Each of the three may be killed at any time.
	driver = newDriver(t, folder, node.Socket(), api)
	node.Stop(syscall.SIGKILL)
	if err := driver.look(t.Context(), &pages); err == nil {
		t.Fatal("a dead daemon answers")
	}
	node.Restart()
	ok(t, driver.look(t.Context(), &pages))
	wantHeld(t, driver, map[string]microcpus{name: 300_000})

	// After a reboot the daemon has forgotten; the driver has not.
	node.Stop(syscall.SIGKILL)
	node.Forget()
	node.Restart()
	wantHeld(t, driver, nil)
	driver = newDriver(t, folder, node.Socket(), api)
	ok(t, driver.look(t.Context(), &pages))
	wantHeld(t, driver, map[string]microcpus{name: 300_000})

	ok(t, unprepare(t, driver, first))
	wantHeld(t, driver, nil)
	ok(t, driver.look(t.Context(), &pages))
	wantHeld(t, driver, nil)
}

// Another program has half of a CPU, which a large vCPU without a pin cannot use the rest of.
func TestARealDaemonAdmitsWhatIsPublishedBesideAPinnedReservation(t *testing.T) {
	driver := newDriver(t, t.TempDir(), daemontest.Start(t, sched).Socket(), apiServer())
	state, err := driver.daemon.state(t.Context())
	ok(t, err)
	if len(state.Cpus) < 2 {
		t.Skip("this machine has one CPU")
	}
	ok(t, driver.daemon.reserve(t.Context(), "cell", reservation{For: target{Pod: "cell"}, BudgetUs: 5_000,
		PeriodUs: 10_000, Count: 1, Cpus: state.Cpus[:1], LeaseSeconds: 60, Owner: "cell"}))
	var pages pages
	ok(t, driver.look(t.Context(), &pages))
	left := pages.devices[sharedDevice]
	if wanted := state.Capacity.UnpinnedPerCPU*int64(len(state.Cpus)-1) - state.Capacity.Watcher; left != wanted {
		t.Fatalf("the node publishes %d, wanted %d", left, wanted)
	}
	for number := 0; left >= 10; number++ {
		part := min(left, state.Capacity.Largest)
		left -= part
		claim := allocated(fmt.Sprint(number), parameters(fmt.Sprintf(`"budget":"%dus","period":"1s"`, part)),
			deviceResult(sharedDevice, part))
		ok(t, prepare(t, driver, claim))
	}
}

// A VM of sched.toml and another program take most of the CPUs that pinned work leaves. What is published beside them
// is what the daemon admits.
func TestARealDaemonAdmitsWhatIsPublishedBesideUnpinnedWork(t *testing.T) {
	node := daemontest.Start(t, sched)
	driver := newDriver(t, t.TempDir(), node.Socket(), apiServer())
	state, err := driver.daemon.state(t.Context())
	ok(t, err)
	cpus := int64(len(state.Cpus))
	if cpus < 2 {
		t.Skip("this machine has one CPU")
	}
	const cell = 300_000
	driver.pinned = cpuset.New(state.Cpus[1:]...)
	node.Declare(fmt.Sprintf("dra-%d", os.Getpid()), sched, "budget = \"16ms\"\nperiod = \"20ms\"\n")
	ok(t, driver.daemon.reserve(t.Context(), "cell", reservation{For: target{Pod: "cell"}, BudgetUs: cell,
		PeriodUs: 1_000_000, Count: 1, LeaseSeconds: 600, Owner: "cell"}))
	for end := time.Now().Add(daemontest.Patience); len(state.Vcpus) == 0; time.Sleep(time.Second / 4) {
		state, err = driver.daemon.state(t.Context())
		ok(t, err)
		if time.Now().After(end) {
			t.Fatalf("the daemon reserves nothing for the VM: %+v", state)
		}
	}
	var pages pages
	ok(t, driver.look(t.Context(), &pages))
	left := 2*state.Capacity.UnpinnedPerCPU - state.Capacity.Watcher - state.Capacity.Other - cell -
		state.Capacity.Pacers[state.Cpus[0]] - state.Capacity.Pacers[state.Cpus[cpus-1]]
	if found := pages.devices[sharedDevice]; found != left || int64(len(pages.devices)) != cpus-1 {
		t.Fatalf("the node publishes %v, wanted %d", pages.devices, left)
	}
	for number, part := 0, int64(0); left >= 10; number, left = number+1, left-part {
		part = min(left, state.Capacity.Largest)
		ok(t, prepare(t, driver, allocated(fmt.Sprint(number), parameters(fmt.Sprintf(`"budget":"%dus","period":"1s"`, part)),
			deviceResult(sharedDevice, part))))
	}
	for device, left := range pages.devices {
		if cpu, found := cpuOf(device); found {
			ok(t, prepare(t, driver, allocated(fmt.Sprint("on-", cpu),
				parameters(fmt.Sprintf(`"budget":"%dus","period":"1s"`, left)), deviceResult(device, left))))
		}
	}
}

func TestARealDaemonForgetsLostPods(t *testing.T) {
	node := daemontest.Start(t, sched)
	lost := allocated("lost", tenth, deviceResult(sharedDevice, 100_000))
	folder, api := t.TempDir(), apiServer(lost)
	driver := newDriver(t, folder, node.Socket(), api)
	// The shortest lease; the driver looks when more than a third of it is over.
	driver.lease = 10 * time.Second
	var pages pages
	ok(t, prepare(t, driver, lost))
	ok(t, api.ResourceV1().ResourceClaims("default").Delete(t.Context(), "lost", metav1.DeleteOptions{}))
	for end := time.Now().Add(daemontest.Patience); len(driver.records.claims) > 0; time.Sleep(time.Second / 4) {
		ok(t, driver.look(t.Context(), &pages))
		if time.Now().After(end) {
			t.Fatal("the reservation of a pod that is gone is renewed")
		}
	}
	wantHeld(t, driver, nil)

	// A driver that is gone for good leaks a lease at most.
	ok(t, prepare(t, driver, lost))
	wantHeld(t, driver, map[string]microcpus{reservationName(lost.UID): 100_000})
	for end := time.Now().Add(daemontest.Patience); len(held(t, driver)) > 0; time.Sleep(time.Second / 4) {
		if time.Now().After(end) {
			t.Fatal("a lease does not end")
		}
	}
}

// answers is an HTTP server on a Unix socket in the daemon's place, for errors that a real daemon seldom gives.
type answers struct {
	mutex    sync.Mutex
	status   int
	body     string
	requests []string
}

func (answers *answers) ServeHTTP(writer http.ResponseWriter, request *http.Request) {
	answers.mutex.Lock()
	defer answers.mutex.Unlock()
	answers.requests = append(answers.requests, request.Method+" "+request.URL.Path)
	status := answers.status
	if request.Method == http.MethodDelete {
		status = http.StatusNoContent
	}
	writer.WriteHeader(status)
	if status != http.StatusNoContent {
		_, _ = writer.Write([]byte(answers.body))
	}
}

func serve(t *testing.T) (*answers, string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "daemon")
	listener, err := net.Listen("unix", socket)
	ok(t, err)
	answers := &answers{}
	server := &http.Server{Handler: answers}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return answers, socket
}

func TestRefusalsOfTheDaemonReachThePod(t *testing.T) {
	answers, socket := serve(t)
	claim := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
	folder := t.TempDir()
	driver := newDriver(t, folder, socket, apiServer(claim))
	for _, example := range []struct {
		status int
		body   string
		reason string
	}{
		{409, `{"error":"CPU 3 has 0.05 left"}`, "CPU 3 has 0.05 left"},
		{429, `{"error":"this user holds 64"}`, "this user holds 64"},
		{403, `{"error":"user 7 may not"}`, "[reservations] in daemon.toml"},
		{503, ``, "HTTP status 503"},
		{500, `<html>`, "HTTP status 500"},
		{200, `<html>`, "same version of both"},
		{200, `{"held":false,"why":"its back end failed"}`, "its back end failed"},
	} {
		answers.status, answers.body, answers.requests = example.status, example.body, nil
		err := prepare(t, driver, claim)
		if err == nil || !strings.Contains(err.Error(), example.reason) {
			t.Errorf("%+v: %v", example, err)
		}
		path := "/v1/reservations/" + reservationName(claim.UID)
		if found := strings.Join(answers.requests, ", "); found != "PUT "+path+", DELETE "+path {
			t.Errorf("%+v: %s", example, found)
		}
		if again := newDriver(t, folder, socket, apiServer()); len(again.records.claims) != 0 {
			t.Errorf("%+v: %v is recorded", example, again.records.claims)
		}
	}
}

func TestANodeWithoutARealTimeKernelRefuses(t *testing.T) {
	answers, socket := serve(t)
	answers.status, answers.body = 200, `{"cpus":[0],"requested":[],"capacity":{"unpinned_micro_cpus_per_cpu":950000,
		"largest_micro_cpus":950000,"pinned_micro_cpus_per_cpu":950000,"other_micro_cpus":0,"preempt_rt":false}}`
	claim := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
	driver := newDriver(t, t.TempDir(), socket, apiServer(claim))
	driver.anyKernel = false
	if err := prepare(t, driver, claim); err == nil || !strings.Contains(err.Error(), "PREEMPT_RT") {
		t.Errorf("%v", err)
	}
	if found := strings.Join(answers.requests, ", "); found != "GET /v1/reservations" {
		t.Error(found)
	}
	answers.body = strings.Replace(answers.body, "false", "true", 1)
	ok(t, prepare(t, driver, claim))
}

// Of a pod that stays Pending the scheduler says only that no device fits; the node's events say why.
func TestTheNodesEventsSayWhyNothingIsPlacedThere(t *testing.T) {
	answers, socket := serve(t)
	driver := newDriver(t, t.TempDir(), socket, apiServer())
	events := eventrecord.NewFakeRecorder(10)
	driver.anyKernel, driver.events = false, events
	look := func(status int, body string, wanted ...string) {
		t.Helper()
		answers.status, answers.body = status, body
		_ = driver.look(t.Context(), &pages{})
		said := ""
		select {
		case said = <-events.Events:
		default:
		}
		if (said == "") != (len(wanted) == 0) {
			t.Fatalf("the event is %q, wanted are %q", said, wanted)
		}
		for _, part := range wanted {
			if !strings.Contains(said, part) {
				t.Fatalf("the event is %q, without %q", said, part)
			}
		}
	}
	const (
		realTime = `{"cpus":[0],"requested":[],"capacity":{"unpinned_micro_cpus_per_cpu":950000,"preempt_rt":true}}`
		off      = `{"off":"no sched.toml","cpus":[],"requested":[],"capacity":null}`
	)
	other := strings.Replace(realTime, "true", "false", 1)
	kernel := []string{"Warning KernelNotRealTime ", testNode, "PREEMPT_RT", "linux-image-rt-amd64", "--any-kernel"}
	silent := []string{"Warning DaemonUnavailable ", testNode, "HTTP status 503"}
	look(200, realTime)
	look(200, other, kernel...)
	look(200, other)
	look(200, off, "Warning ReservesNothing ", testNode, "no sched.toml")
	// A daemon that is being replaced is no event.
	for range unheardBeforeEmpty - 1 {
		look(503, "")
	}
	look(200, off)
	for range unheardBeforeEmpty - 1 {
		look(503, "")
	}
	look(503, "", silent...)
	look(503, "")
	look(200, other, kernel...)
	// Before the API server has forgotten the event, it is there again.
	driver.served.at = driver.served.at.Add(-warnAgain)
	look(200, other, kernel...)
	look(200, other)
	driver.anyKernel = true
	look(200, other)
	// CPU 0 is the daemon's only one.
	driver.pinned = cpuset.New(0, 2, 3)
	look(200, realTime, "Warning PinnedCPUsMissing ", testNode, "CPUs 2-3 of PINNED_CPUS", "time of CPUs 0;")
	driver.pinned = cpuset.New(0)
	look(200, realTime)
	// A VM of sched.toml without an affinity needs both CPUs.
	driver.pinned = cpuset.New(1)
	both := strings.Replace(realTime, `"cpus":[0],"requested":[]`,
		`"cpus":[0,1],"requested":[],"vcpus":[{"vm":"plc","cpu":null,"bandwidth":0.6}]`, 1)
	look(200, strings.Replace(both, `"preempt_rt"`, `"other_micro_cpus":1200000,"preempt_rt"`, 1),
		"Warning PinnedCPUsNeeded ", testNode, "CPUs 1 of PINNED_CPUS", "without a pin")
	look(200, both)
}

// An event without the right object is in nobody's `kubectl describe node`.
func TestEventsAreTheNodes(t *testing.T) {
	api := apiServer()
	driver := newDriver(t, t.TempDir(), "", api)
	driver.events = newEvents(t.Context(), api, testNode)
	driver.warn(&driver.served, warning{reason: kernelNotRealTime, text: "text"})
	for end := time.Now().Add(daemontest.Patience); ; time.Sleep(time.Millisecond) {
		events, err := api.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
		ok(t, err)
		if len(events.Items) == 1 {
			event := events.Items[0]
			object := event.InvolvedObject
			if object.Kind != "Node" || object.Name != testNode || object.UID != testNode || event.Type != "Warning" ||
				event.Reason != kernelNotRealTime || event.Message != "text" {
				t.Errorf("%+v", event)
			}
			return
		}
		if time.Now().After(end) {
			t.Fatal("no event is written")
		}
	}
}

func TestADaemonThatIsGonePublishesNothing(t *testing.T) {
	answers, socket := serve(t)
	answers.status, answers.body = 200, `{"cpus":[0],"requested":[],"capacity":{"unpinned_micro_cpus_per_cpu":950000,
		"largest_micro_cpus":950000,"pinned_micro_cpus_per_cpu":950000,"other_micro_cpus":0,"preempt_rt":true}}`
	driver := newDriver(t, t.TempDir(), socket, apiServer())
	var pages pages
	ok(t, driver.look(t.Context(), &pages))
	ok(t, driver.look(t.Context(), &pages))
	if pages.count != 1 || pages.devices[sharedDevice] != 950_000 {
		t.Fatalf("%+v", pages)
	}
	answers.status = 503
	for look := 1; look <= unheardBeforeEmpty+1; look++ {
		if err := driver.look(t.Context(), &pages); err == nil {
			t.Fatal("no error is told")
		}
		if gone := len(pages.devices) == 0; gone != (look >= unheardBeforeEmpty) {
			t.Fatalf("after %d looks: %v", look, pages.devices)
		}
	}
	if pages.count != 2 {
		t.Errorf("published %d times", pages.count)
	}
	answers.status = 200
	ok(t, driver.look(t.Context(), &pages))
	if pages.devices[sharedDevice] != 950_000 {
		t.Error("a daemon that is back publishes nothing")
	}
	// A daemon of an earlier version has no reservations by request.
	answers.body = `{"cpus":[0]}`
	if err := driver.look(t.Context(), &pages); err == nil || !strings.Contains(err.Error(), "same version") {
		t.Errorf("%v", err)
	}
}

func TestReservationsAreKeptWhileTheAPIServerIsAway(t *testing.T) {
	answers, socket := serve(t)
	answers.status, answers.body = 200, `{"cpus":[0],"requested":[],"capacity":{}}`
	claim := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
	api := apiServer()
	api.PrependReactor("get", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewServiceUnavailable("away")
	})
	driver := newDriver(t, t.TempDir(), socket, api)
	ok(t, prepare(t, driver, claim))
	answers.requests = nil
	ok(t, driver.look(t.Context(), &pages{}))
	path := "/v1/reservations/" + reservationName(claim.UID)
	if found := strings.Join(answers.requests, ", "); found != "GET /v1/reservations, PUT "+path {
		t.Error(found)
	}
}

// An API server that is cut off answers nothing at all, and each request to it takes its whole time.
func TestASilentAPIServerDoesNotDelayRenewals(t *testing.T) {
	answers, socket := serve(t)
	answers.status, answers.body = 200, `{"cpus":[0],"requested":[],"capacity":{}}`
	var asked atomic.Int32
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, request *http.Request) {
		asked.Add(1)
		<-request.Context().Done()
	}))
	t.Cleanup(silent.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: silent.URL})
	ok(t, err)
	driver := newDriver(t, t.TempDir(), socket, apiServer())
	driver.client, driver.lease = client, 6*time.Second
	for _, name := range []string{"a", "b", "c"} {
		ok(t, prepare(t, driver, allocated(name, tenth, deviceResult(sharedDevice, 100_000))))
	}
	answers.requests = nil
	ok(t, driver.look(t.Context(), &pages{}))
	if len(answers.requests) != 4 || strings.Contains(strings.Join(answers.requests, ", "), "DELETE") {
		t.Errorf("%v", answers.requests)
	}
	if count := asked.Load(); count > 1 {
		t.Errorf("%d look-ups waited one after the other", count)
	}
}

// A driver that starts while the API server is cut off cannot publish, but has to keep what its pods have.
func TestADriverThatStartsBesideASilentAPIServerRenews(t *testing.T) {
	answers, socket := serve(t)
	answers.status, answers.body = 200, `{"cpus":[0],"requested":[],"capacity":{"unpinned_micro_cpus_per_cpu":950000}}`
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, request *http.Request) {
		<-request.Context().Done()
	}))
	t.Cleanup(silent.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: silent.URL})
	ok(t, err)
	folder := t.TempDir()
	claim := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
	ok(t, prepare(t, newDriver(t, folder, socket, apiServer()), claim))
	driver := newDriver(t, folder, socket, apiServer())
	driver.client, driver.lease = client, 6*time.Millisecond
	answers.mutex.Lock()
	answers.requests = nil
	answers.mutex.Unlock()
	ctx, stop := context.WithCancel(t.Context())
	helper, err := kubeletplugin.Start(ctx, driver, kubeletplugin.DriverName(driverName),
		kubeletplugin.NodeName(testNode), kubeletplugin.KubeClient(client),
		kubeletplugin.RegistrarDirectoryPath(folder), kubeletplugin.PluginDataDirectoryPath(folder))
	ok(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		driver.run(ctx, helper, time.Millisecond)
	}()
	path := "PUT /v1/reservations/" + reservationName(claim.UID)
	for end := time.Now().Add(daemontest.Patience); ; time.Sleep(time.Millisecond) {
		answers.mutex.Lock()
		renewals := strings.Count(strings.Join(answers.requests, "\n"), path)
		answers.mutex.Unlock()
		if renewals > 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("a reservation is not renewed while the API server is silent")
		}
	}
	stop()
	<-ended
	helper.Stop()
}

func TestADriverIsReadyWhenKubeletHasRegisteredIt(t *testing.T) {
	for registered, status := range map[bool]int{false: 503, true: 200} {
		answer := httptest.NewRecorder()
		readiness(func() bool { return registered }).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/", nil))
		if answer.Code != status {
			t.Errorf("registered: %v, status %d", registered, answer.Code)
		}
	}
}

// All claims' look-ups may be due at once.
func TestTheClientMayAskForAllClaimsAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	ok(t, os.WriteFile(file, []byte(`{"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1"}}],
		"contexts":[{"name":"c","context":{"cluster":"c"}}],"current-context":"c"}`), 0o600))
	config, err := clientConfig(file)
	ok(t, err)
	if config.QPS < 50 || config.Burst < 100 || config.Host != "https://127.0.0.1" {
		t.Errorf("%+v", config)
	}
}

// A claim of the same name is another one, and one that another pod uses is not the recorded pod's.
func TestAReservationEndsWithItsPod(t *testing.T) {
	for what, change := range map[string]func(*resourceapi.ResourceClaim){
		"replaced":    func(claim *resourceapi.ResourceClaim) { claim.UID = "another" },
		"deallocated": func(claim *resourceapi.ResourceClaim) { claim.Status.Allocation = nil },
		"unused":      func(claim *resourceapi.ResourceClaim) { claim.Status.ReservedFor = nil },
		"other pod":   func(claim *resourceapi.ResourceClaim) { claim.Status.ReservedFor[0].UID = "another" },
	} {
		answers, socket := serve(t)
		answers.status, answers.body = 200, `{"cpus":[0],"requested":[],"capacity":{}}`
		claim := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
		changed := claim.DeepCopy()
		change(changed)
		driver := newDriver(t, t.TempDir(), socket, apiServer(changed))
		ok(t, prepare(t, driver, claim))
		answers.requests = nil
		ok(t, driver.look(t.Context(), &pages{}))
		wanted := "GET /v1/reservations, DELETE /v1/reservations/" + reservationName(claim.UID)
		if found := strings.Join(answers.requests, ", "); found != wanted || len(driver.records.claims) != 0 {
			t.Errorf("%s: %s, %v", what, found, driver.records.claims)
		}
	}
}

// A second replica that names the same claim must not take the time of the pod that runs, and is not prepared. Kubelet
// does not ask for a claim that is prepared, so an event names the pods.
func TestAPodKeepsItsTimeWhileAnotherNamesItsClaim(t *testing.T) {
	answers, socket := serve(t)
	answers.status, answers.body = 200, `{"cpus":[0],"requested":[],"capacity":{}}`
	claim := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
	shared := claim.DeepCopy()
	shared.Status.ReservedFor = append(shared.Status.ReservedFor, second)
	driver := newDriver(t, t.TempDir(), socket, apiServer(shared))
	ok(t, prepare(t, driver, claim))
	answers.requests = nil
	if err := prepare(t, driver, shared); err == nil || !strings.Contains(err.Error(), "2 pods (pod-a, second)") {
		t.Errorf("the second pod is prepared: %v", err)
	}
	event := eventOf(t, driver)
	wanted := "GET /v1/reservations, PUT /v1/reservations/" + reservationName(claim.UID)
	if found := strings.Join(answers.requests, ", "); found != wanted || len(driver.records.claims) != 1 || event != "" {
		t.Errorf("%s, %v, %q", found, driver.records.claims, event)
	}
	event = eventOf(t, driver)
	if !strings.Contains(event, "CPUTimeLost") || !strings.Contains(event, "claim a is for 2 pods (pod-a, second)") {
		t.Errorf("the event is %q", event)
	}
	// The second pod goes.
	_, err := driver.client.ResourceV1().ResourceClaims(claim.Namespace).UpdateStatus(t.Context(), claim,
		metav1.UpdateOptions{})
	ok(t, err)
	if event = eventOf(t, driver); event != "" || driver.lost[claim.UID] != nil {
		t.Errorf("the event is %q, lost is %v", event, driver.lost)
	}
}

// While a renewal asks the API server whether a pod is gone, kubelet may give its claim back and prepare it for another
// pod. What was found out about the first pod must neither end nor replace the reservation of the second.
func TestARenewalLeavesAClaimThatWasPreparedMeanwhile(t *testing.T) {
	for what, gone := range map[string]bool{"the pod is gone": true, "the pod is there": false} {
		answers, socket := serve(t)
		answers.status, answers.body = 200, `{"cpus":[0],"requested":[],"capacity":{}}`
		former := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
		later := former.DeepCopy()
		later.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{second}
		api := apiServer()
		driver := newDriver(t, t.TempDir(), socket, api)
		ok(t, prepare(t, driver, former))
		api.PrependReactor("get", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
			ok(t, unprepare(t, driver, former))
			ok(t, prepare(t, driver, later))
			answers.requests = nil
			if gone {
				return true, later, nil
			}
			return true, former, nil
		})
		ok(t, driver.look(t.Context(), &pages{}))
		pod := driver.records.claims[former.UID].Reservation.For.Pod
		if len(answers.requests) != 0 || pod != "another" {
			t.Errorf("%s: %v; the claim is recorded for pod %q", what, answers.requests, pod)
		}
	}
}

// The daemon gives a pod one reservation; the time of another would be held for nobody.
func TestAPodHasOneClaim(t *testing.T) {
	answers, socket := serve(t)
	answers.status, answers.body = 201, `{}`
	first := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
	second := allocated("b", tenth, deviceResult(sharedDevice, 100_000))
	second.Status.ReservedFor = first.Status.ReservedFor
	driver := newDriver(t, t.TempDir(), socket, apiServer(first, second))
	ok(t, prepare(t, driver, first))
	answers.requests = nil
	if err := prepare(t, driver, second); err == nil || !strings.Contains(err.Error(), "has claim a for") {
		t.Errorf("%v", err)
	}
	if len(answers.requests) != 0 || len(driver.records.claims) != 1 {
		t.Errorf("%v, %v", answers.requests, driver.records.claims)
	}
	ok(t, prepare(t, driver, first))
	ok(t, prepare(t, driver, allocated("c", tenth, deviceResult(sharedDevice, 100_000))))
}

func TestAPinnedPodLearnsItsCPUs(t *testing.T) {
	answers, socket := serve(t)
	answers.status, answers.body = 201, `{}`
	claim := allocated("a", parameters(`"budget":"1ms","period":"10ms","vcpus":2`),
		deviceResult("cpu-12", 100_000), deviceResult("cpu-3", 100_000))
	driver := newDriver(t, t.TempDir(), socket, apiServer(claim))
	prepared, err := driver.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{claim})
	ok(t, err)
	devices := prepared[claim.UID].Devices
	if len(devices) != 2 || len(devices[0].CDIDeviceIDs) != 1 || devices[1].CDIDeviceIDs != nil {
		t.Fatalf("%+v", prepared)
	}
	text, err := os.ReadFile(cdiFile(driver.cdi, claim.UID))
	ok(t, err)
	_, name, _ := strings.Cut(devices[0].CDIDeviceIDs[0], "=")
	if !strings.Contains(string(text), `"name":"`+name+`"`) || !strings.Contains(string(text), `"ONTIME_CPUS=12,3"`) {
		t.Errorf("%s", text)
	}
	ok(t, unprepare(t, driver, claim))
	if files, err := os.ReadDir(driver.cdi); err != nil || len(files) > 0 {
		t.Errorf("%v, %v", files, err)
	}
}

func TestTheListOfClaimsIsReplacedAsAWhole(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "claims.json")
	kept, err := loadRecords(path)
	ok(t, err)
	ok(t, kept.put("a", record{Name: "a"}))
	// A driver that was killed while it wrote leaves a part of the next list beside the former one.
	ok(t, os.WriteFile(path+".new", []byte(`{"b":`), 0o600))
	again, err := loadRecords(path)
	if err != nil || len(again.claims) != 1 || again.claims["a"].Name != "a" {
		t.Errorf("%v, %v", again, err)
	}
	ok(t, again.remove("a"))
	ok(t, again.remove("a"))
	ok(t, os.WriteFile(path, []byte(`{"b":`), 0o600))
	if _, err := loadRecords(path); err == nil || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("%v", err)
	}
	// What cannot be written is not kept in memory either.
	kept.path = filepath.Join(folder, "missing", "claims.json")
	if err := kept.put("c", record{}); err == nil || len(kept.claims) != 1 {
		t.Errorf("%v, %v", err, kept.claims)
	}
	if err := kept.remove("a"); err == nil || len(kept.claims) != 1 {
		t.Errorf("%v, %v", err, kept.claims)
	}
}

// Every user who may reserve chooses names and the stated owner, and root has other programs. Only what this driver's
// user holds with this driver's owner is the driver's.
func TestAnotherProgramsReservationIsNotTakenForTheDrivers(t *testing.T) {
	answers, socket := serve(t)
	claim := allocated("a", tenth, deviceResult(sharedDevice, 100_000))
	name := reservationName(claim.UID)
	driver := newDriver(t, t.TempDir(), socket, apiServer(claim))
	state := func(name string, uid int, owner string) string {
		return fmt.Sprintf(`{"cpus":[0],"capacity":{},"requested":[{"name":%q,"uid":%d,"owner":%q,"left_seconds":%d}]}`,
			name, uid, owner, 24*60*60)
	}
	answers.status, answers.body = 200, "{}"
	ok(t, prepare(t, driver, claim))
	followed := classesOf(newDaemonClient(socket))
	for _, example := range []struct {
		what  string
		uid   int
		owner string
		own   bool
	}{
		{"its own", os.Geteuid(), owner, true},
		{"another user's", os.Geteuid() + 1, owner, false},
		{"another program's", os.Geteuid(), "cell", false},
	} {
		requested := func(name string, look func() error) string {
			answers.body, answers.requests = state(name, example.uid, example.owner), nil
			ok(t, look())
			return strings.Join(answers.requests, ", ")
		}
		ofClaim, ofClass := "GET /v1/reservations", "GET /v1/reservations"
		if example.own {
			ofClass += ", DELETE /v1/reservations/class-x"
		} else {
			ofClaim += ", PUT /v1/reservations/" + name
		}
		look := func() error { return driver.look(t.Context(), &pages{}) }
		if found := requested(name, look); found != ofClaim {
			t.Errorf("%s: %s", example.what, found)
		}
		if found := requested("class-x", func() error { return followed.look(t.Context()) }); found != ofClass {
			t.Errorf("%s: %s", example.what, found)
		}
	}
}
