package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	eventrecord "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

// memory is in the daemon's place, and holds what is requested.
type memory struct {
	mutex sync.Mutex
	held  map[string]bool
	// away is a daemon that does not answer, refuses is one that takes no reservation.
	away, refuses bool
	// step is called before and after each change.
	step func(held map[string]bool)
}

func (memory *memory) ServeHTTP(writer http.ResponseWriter, request *http.Request) {
	memory.mutex.Lock()
	defer memory.mutex.Unlock()
	if memory.away {
		panic(http.ErrAbortHandler)
	}
	name := strings.TrimPrefix(request.URL.Path, "/v1/reservations/")
	switch {
	case request.Method == http.MethodGet:
		// Of each lease so little is left that the driver looks whether the pod is there.
		state := nodeState{Capacity: &nodeCapacity{}}
		for name := range memory.held {
			state.Requested = append(state.Requested, heldReservation{Name: name, UID: os.Geteuid(),
				Owner: owner})
		}
		_ = json.NewEncoder(writer).Encode(state)
	case request.Method == http.MethodPut && memory.refuses:
		writer.WriteHeader(http.StatusConflict)
		_, _ = writer.Write([]byte(`{"error":"CPU 3 has 0.05 left"}`))
	default:
		memory.step(memory.held)
		if request.Method == http.MethodPut {
			memory.held[name] = true
			_, _ = writer.Write([]byte(`{}`))
		} else {
			delete(memory.held, name)
			writer.WriteHeader(http.StatusNoContent)
		}
		memory.step(memory.held)
	}
}

// remember starts such a daemon, which holds these reservations.
func remember(t *testing.T, held map[string]bool) (*memory, string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "daemon")
	listener, err := net.Listen("unix", socket)
	ok(t, err)
	memory := &memory{held: held, step: func(map[string]bool) {}}
	server := &http.Server{Handler: memory}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return memory, socket
}

// wantNothing fails if anything of a claim is left: a reservation, a record or a CDI file.
func wantNothing(t *testing.T, what string, memory *memory, driver *driver) {
	t.Helper()
	files, _ := os.ReadDir(driver.cdi)
	if len(memory.held) > 0 || len(driver.records.claims) > 0 || len(files) > 0 {
		t.Errorf("%s: %v is held, %v is recorded, files %v", what, memory.held, driver.records.claims, files)
	}
}

func pinnedClaim() *resourceapi.ResourceClaim {
	return allocated("a", tenth, deviceResult("cpu-3", 100_000))
}

// A pod's end must not wait for a daemon that is away. The claim is still allocated, as it is when kubelet calls.
func TestAPodEndsWhileTheDaemonIsAway(t *testing.T) {
	memory, socket := remember(t, map[string]bool{})
	claim, folder := pinnedClaim(), t.TempDir()
	driver := newDriver(t, folder, socket, apiServer(claim))
	ok(t, prepare(t, driver, claim))
	memory.away = true
	ok(t, unprepare(t, driver, claim))
	ok(t, unprepare(t, driver, claim))

	driver = newDriver(t, folder, socket, apiServer(claim))
	if err := driver.look(t.Context(), &pages{}); err == nil {
		t.Fatal("a daemon that is away answers")
	}
	if !memory.held[reservationName(claim.UID)] || len(driver.records.claims) != 1 {
		t.Fatalf("%v is held, %v is recorded", memory.held, driver.records.claims)
	}
	memory.away = false
	ok(t, driver.look(t.Context(), &pages{}))
	wantNothing(t, "the daemon is back", memory, driver)

	// A claim that no driver has recorded may be reserved as well.
	memory.held[reservationName(claim.UID)], memory.away = true, true
	ok(t, unprepare(t, driver, claim))
	memory.away = false
	ok(t, driver.look(t.Context(), &pages{}))
	wantNothing(t, "no driver had recorded it", memory, driver)

	// A claim that is prepared again before its former reservation has ended is not ended.
	ok(t, prepare(t, driver, claim))
	memory.away = true
	ok(t, unprepare(t, driver, claim))
	memory.away = false
	ok(t, prepare(t, driver, claim))
	ok(t, driver.look(t.Context(), &pages{}))
	if !memory.held[reservationName(claim.UID)] {
		t.Error("a claim that was prepared again is ended")
	}
}

// disk is what a driver that was killed leaves: its folder's files, and what the daemon holds.
type disk struct {
	files map[string][]byte
	held  map[string]bool
}

// revive starts a driver and a daemon from it, with or without its CDI files.
func (disk *disk) revive(t *testing.T, cdi bool, claims ...*resourceapi.ResourceClaim) (*memory, *driver) {
	t.Helper()
	folder := t.TempDir()
	for path, text := range disk.files {
		if strings.HasPrefix(path, "cdi/") && !cdi {
			continue
		}
		path = filepath.Join(folder, path)
		ok(t, os.MkdirAll(filepath.Dir(path), 0o755))
		ok(t, os.WriteFile(path, text, 0o600))
	}
	memory, socket := remember(t, maps.Clone(disk.held))
	return memory, newDriver(t, folder, socket, apiServer(claims...))
}

// TestAKillBetweenStepsLeaksNothing stops the driver before and after each change that it asks of the daemon, and once
// more without the CDI file, which it writes and removes between two changes. A new driver must end what is left when
// the claim is gone, and kubelet's repeated calls must lead to the same as without a kill.
func TestAKillBetweenStepsLeaksNothing(t *testing.T) {
	claim := pinnedClaim()
	var left []disk
	memory, socket := remember(t, map[string]bool{})
	folder := t.TempDir()
	take := func(held map[string]bool) {
		files := map[string][]byte{}
		for _, pattern := range []string{"*.json", "cdi/*"} {
			paths, _ := filepath.Glob(filepath.Join(folder, pattern))
			for _, path := range paths {
				name, _ := filepath.Rel(folder, path)
				files[name], _ = os.ReadFile(path)
			}
		}
		left = append(left, disk{files: files, held: maps.Clone(held)})
	}
	memory.step = take
	driver := newDriver(t, folder, socket, apiServer(claim))
	for range 2 {
		ok(t, prepare(t, driver, claim))
		take(memory.held)
	}
	for range 2 {
		ok(t, unprepare(t, driver, claim))
		take(memory.held)
	}
	if len(left) != 12 {
		t.Fatalf("%d states", len(left))
	}
	for number, state := range left {
		for _, cdi := range []bool{true, false} {
			what := fmt.Sprintf("state %d, CDI file %v", number, cdi)
			daemon, revived := state.revive(t, cdi)
			ok(t, revived.look(t.Context(), &pages{}))
			wantNothing(t, what+", the claim is gone", daemon, revived)

			daemon, revived = state.revive(t, cdi, claim)
			ok(t, revived.look(t.Context(), &pages{}))
			ok(t, prepare(t, revived, claim))
			ok(t, revived.look(t.Context(), &pages{}))
			if _, err := os.Stat(cdiFile(revived.cdi, claim.UID)); err != nil || !daemon.held[reservationName(claim.UID)] {
				t.Errorf("%s: prepared again, %v is held; %v", what, daemon.held, err)
			}
			ok(t, unprepare(t, revived, claim))
			wantNothing(t, what+", given back", daemon, revived)
		}
	}
}

// look is one look of the driver, and what it logs.
func look(t *testing.T, driver *driver) (string, error) {
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	err := driver.look(ctx, &pages{})
	return log.String(), err
}

func TestAReservationThatTheDaemonLostIsTold(t *testing.T) {
	memory, socket := remember(t, map[string]bool{})
	claim := pinnedClaim()
	driver := newDriver(t, t.TempDir(), socket, apiServer(claim))
	ok(t, prepare(t, driver, claim))
	if log, err := look(t, driver); err != nil || log != "" {
		t.Errorf("%q, %v", log, err)
	}
	clear(memory.held)
	memory.refuses = true
	_, err := look(t, driver)
	if err == nil || !strings.Contains(err.Error(), "claim default/a: the daemon has lost its reservation") ||
		!strings.Contains(err.Error(), "CPU 3 has 0.05 left") {
		t.Errorf("%v", err)
	}
	memory.refuses = false
	log, err := look(t, driver)
	if err != nil || !strings.Contains(log, "had lost") || !strings.Contains(log, "default/a") ||
		!memory.held[reservationName(claim.UID)] {
		t.Errorf("%q, %v; %v is held", log, err, memory.held)
	}
}

func TestAReservationThatTheDaemonDoesNotHoldIsTold(t *testing.T) {
	answers, socket := serve(t)
	claim := pinnedClaim()
	driver := newDriver(t, t.TempDir(), socket, apiServer(claim))
	answers.status, answers.body = 200, `{}`
	ok(t, prepare(t, driver, claim))
	answers.body = fmt.Sprintf(`{"cpus":[0],"capacity":{},"requested":[{"name":%q,"uid":%d,"owner":%q,"left_seconds":59,
		"held":false,"why":"CPU 3 is offline"}]}`, reservationName(claim.UID), os.Geteuid(), owner)
	if _, err := look(t, driver); err == nil || !strings.Contains(err.Error(), "CPU 3 is offline") {
		t.Errorf("%v", err)
	}
}

// eventOf is the event of one look, if there is one.
func eventOf(t *testing.T, driver *driver) string {
	t.Helper()
	events := eventrecord.NewFakeRecorder(10)
	driver.events = events
	_ = driver.look(t.Context(), &pages{})
	select {
	case event := <-events.Events:
		return event
	default:
		return ""
	}
}

// Kubelet does not ask again for a pod that runs, so the node's events say that it has lost its CPU time.
func TestARunningPodThatLostItsCPUTimeIsAnEvent(t *testing.T) {
	memory, socket := remember(t, map[string]bool{})
	claim := pinnedClaim()
	driver := newDriver(t, t.TempDir(), socket, apiServer(claim))
	ok(t, prepare(t, driver, claim))
	expect := func(wanted ...string) {
		t.Helper()
		event := eventOf(t, driver)
		if (event == "") != (len(wanted) == 0) {
			t.Fatalf("the event is %q, wanted are %q", event, wanted)
		}
		for _, part := range wanted {
			if !strings.Contains(event, part) {
				t.Fatalf("the event is %q, without %q", event, part)
			}
		}
	}
	lost := []string{"Warning CPUTimeLost ", testNode, "claim default/a: the daemon has lost its", "CPU 3 has 0.05 left"}
	expect()
	// What the daemon takes again at once is no event.
	clear(memory.held)
	expect()
	clear(memory.held)
	memory.refuses = true
	expect()
	expect(lost...)
	expect()
	driver.losses.at = driver.losses.at.Add(-warnAgain)
	expect(lost...)
	memory.refuses = false
	expect()
	clear(memory.held)
	memory.refuses = true
	expect()
	expect(lost...)
	// The pod ends.
	ok(t, unprepare(t, driver, claim))
	expect()
}

// The daemon may hold the time although a VM cannot have it. Renewals change nothing of that, and are made.
func TestAPodThatDoesNotHaveWhatIsHeldIsAnEvent(t *testing.T) {
	answers, socket := serve(t)
	claim := pinnedClaim()
	driver := newDriver(t, t.TempDir(), socket, apiServer(claim))
	answers.status, answers.body = 200, `{"held":true,"why":"vCPU 0 may run on CPUs 0-3"}`
	ok(t, prepare(t, driver, claim))
	for look, left := range []int{59, 59, 1, 59} {
		answers.requests = nil
		answers.body = fmt.Sprintf(`{"cpus":[0],"capacity":{"preempt_rt":true},"requested":[{"name":%q,"uid":%d,"owner":%q,
			"left_seconds":%d,"held":true,"why":"vCPU 0 may run on CPUs 0-3, left %d"}]}`, reservationName(claim.UID),
			os.Geteuid(), owner, left, look)
		event := eventOf(t, driver)
		told := strings.Contains(event, "CPUTimeLost") && strings.Contains(event, "claim default/a: ") &&
			strings.Contains(event, "vCPU 0 may run on CPUs 0-3")
		if told != (look == 1) || !told && event != "" {
			t.Errorf("look %d: %q", look, event)
		}
		if renewed := strings.Contains(fmt.Sprint(answers.requests), "PUT"); renewed != (left == 1) {
			t.Errorf("look %d: %v", look, answers.requests)
		}
		if driver.lost[claim.UID] == nil {
			t.Errorf("look %d: it is not logged", look)
		}
	}
}

// The API server may refuse a long text, and forgets all but the first of many events.
func TestManyLostClaimsAreOneShortEvent(t *testing.T) {
	driver := newDriver(t, t.TempDir(), "", apiServer())
	lost := map[types.UID]error{}
	for number := range 70 {
		lost[types.UID(fmt.Sprint(number))] = fmt.Errorf("claim default/%02d: %s", number, strings.Repeat("ü", 300))
	}
	warning := driver.lostWarning(lost)
	if len(warning.text) > 1024 || !strings.HasSuffix(warning.text, "...; and 65 more") ||
		!strings.Contains(warning.text, "claim default/00: ") || !utf8.ValidString(warning.text) {
		t.Errorf("%d bytes: %q", len(warning.text), warning.text)
	}
}

func TestTheReasonOfADaemonThatReservesNothingIsLoggedOnce(t *testing.T) {
	answers, socket := serve(t)
	driver := newDriver(t, t.TempDir(), socket, apiServer())
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	var changes changedErrors
	const off = "the daemon only observes"
	for _, state := range []string{`"off":"` + off + `"`, `"off":"` + off + `"`, `"capacity":{}`} {
		answers.status, answers.body = 200, `{"cpus":[0],"requested":[],`+state+`}`
		changes.tell(ctx, driver.look(ctx, &pages{}), "trying again")
	}
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	if len(lines) != 2 || !strings.Contains(lines[0], "publishes none: "+off) || !strings.Contains(lines[1], "is over") {
		t.Errorf("%q", lines)
	}
}
