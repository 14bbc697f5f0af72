package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"k8s.io/utils/ptr"
)

const (
	// daemonTimeout bounds one request. The daemon answers within a pass, some 100 ms.
	daemonTimeout = 10 * time.Second
	// longestAnswer bounds what is read of an answer: 1,024 reservations of some 500 bytes, vCPUs and findings.
	longestAnswer = 16 << 20
	// owner marks this driver's reservations in the daemon's lists.
	owner = "ontime-dra"
)

// target says whose threads a reservation is for.
type target struct {
	Pod string `json:"pod"`
}

// reservation is what the driver asks of the daemon (PUT /v1/reservations/NAME).
type reservation struct {
	For          target `json:"for"`
	BudgetUs     int64  `json:"budget_us"`
	PeriodUs     int64  `json:"period_us"`
	Count        int    `json:"count"`
	Cpus         []int  `json:"cpus,omitempty"`
	Level        int    `json:"level"`
	LeaseSeconds int64  `json:"lease_seconds"`
	Owner        string `json:"owner"`
}

// heldReservation is a reservation as the daemon lists it.
type heldReservation struct {
	Name         string    `json:"name"`
	LeaseSeconds int64     `json:"lease_seconds"`
	LeftSeconds  float64   `json:"left_seconds"`
	MicroCpus    microcpus `json:"micro_cpus"`
	Cpus         []int     `json:"cpus"`
	// UID is the user who requested it, as the daemon's kernel knows that user. Owner is what the request stated.
	UID   int    `json:"uid"`
	Owner string `json:"owner"`
	// Held is whether the bandwidth is held now; Why says why not.
	Held *bool   `json:"held"`
	Why  *string `json:"why"`
	// Tenants are the names of its tenants that run.
	Tenants []string `json:"tenants"`
}

// isHeld says whether the daemon holds the bandwidth now.
func (held heldReservation) isHeld() bool {
	return held.Held == nil || *held.Held
}

// refused is why the daemon does not hold the bandwidth now.
func (held heldReservation) refused() error {
	if held.isHeld() {
		return nil
	}
	return fmt.Errorf("Ontime's daemon on this node does not hold the CPU time: %s",
		ptr.Deref(held.Why, "it does not say why"))
}

// problem is why a running pod does not have its CPU time, or has only a rate.
func (held heldReservation) problem() error {
	if held.isHeld() && held.Why != nil {
		return fmt.Errorf("Ontime's daemon on this node holds the CPU time, but the pod has only a rate: %s", *held.Why)
	}
	return held.refused()
}

// isOwn says whether this driver has requested a reservation with such a name. Any user who may reserve chooses names
// and the stated owner; other programs of this driver's user state another owner.
func (held heldReservation) isOwn(prefix string) bool {
	return held.UID == os.Geteuid() && held.Owner == owner && strings.HasPrefix(held.Name, prefix)
}

// reservedVcpu is a vCPU with reserved CPU time, by sched.toml or by a request.
type reservedVcpu struct {
	VM string `json:"vm"`
	// Bandwidth is in CPUs.
	Bandwidth float64 `json:"bandwidth"`
	// CPU is the one on which the daemon keeps it; nil if it may run on all.
	CPU *int `json:"cpu"`
}

// nodeState is what the driver reads of GET /v1/reservations.
type nodeState struct {
	Off       *string           `json:"off"`
	Cpus      []int             `json:"cpus"`
	Requested []heldReservation `json:"requested"`
	Vcpus     []reservedVcpu    `json:"vcpus"`
	Capacity  *nodeCapacity     `json:"capacity"`
}

// nodeCapacity is what may be reserved, computed by the daemon so that sums of integers equal its own admission.
type nodeCapacity struct {
	UnpinnedPerCPU microcpus `json:"unpinned_micro_cpus_per_cpu"`
	Largest        microcpus `json:"largest_micro_cpus"`
	PinnedPerCPU   microcpus `json:"pinned_micro_cpus_per_cpu"`
	// Watcher is taken once from what all CPUs have for work that is not pinned.
	Watcher microcpus `json:"watcher_micro_cpus"`
	Other   microcpus `json:"other_micro_cpus"`
	// Pacers is what the pacers of sched.toml's VMs need of each CPU.
	Pacers    map[int]microcpus `json:"pacers_micro_cpus"`
	PreemptRT bool              `json:"preempt_rt"`
}

// daemonClient speaks to the daemon of this node over its Unix socket.
type daemonClient struct {
	socket string
	http   http.Client
}

func newDaemonClient(socket string) *daemonClient {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var dialer net.Dialer
		return dialer.DialContext(ctx, "unix", socket)
	}
	return &daemonClient{socket: socket, http: http.Client{
		Transport: &http.Transport{DialContext: dial, MaxIdleConns: 1},
		Timeout:   daemonTimeout,
	}}
}

// state asks what the node has to give and what is reserved.
func (daemon *daemonClient) state(ctx context.Context) (nodeState, error) {
	var state nodeState
	if err := daemon.ask(ctx, http.MethodGet, "", nil, &state); err != nil {
		return nodeState{}, err
	}
	if state.Capacity == nil && state.Off == nil {
		return nodeState{}, fmt.Errorf("the daemon at %s does not know reservations by request: it is older than "+
			"this driver; install the same version of both", daemon.socket)
	}
	return state, nil
}

// reserve creates, renews or changes a reservation.
func (daemon *daemonClient) reserve(ctx context.Context, name string, wanted reservation) error {
	var held heldReservation
	if err := daemon.ask(ctx, http.MethodPut, name, &wanted, &held); err != nil {
		return err
	}
	return held.refused()
}

// release ends a reservation. It is no error if there is none of that name.
func (daemon *daemonClient) release(ctx context.Context, name string) error {
	return daemon.ask(ctx, http.MethodDelete, name, nil, nil)
}

func (daemon *daemonClient) ask(ctx context.Context, method, name string, body, answer any) error {
	// The host's name is not used: the transport connects to the socket.
	address := url.URL{Scheme: "http", Host: "ontime", Path: "/v1/reservations"}
	if name != "" {
		address.Path += "/" + name
	}
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("encode a reservation: %w", err)
		}
		content = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(ctx, method, address.String(), content)
	if err != nil {
		return fmt.Errorf("make a request to the daemon: %w", err)
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := daemon.http.Do(request)
	if err != nil {
		return fmt.Errorf("no answer from Ontime's daemon on this node (%w): see systemctl status ontimed", err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, longestAnswer))
	if err != nil {
		return fmt.Errorf("the answer of Ontime's daemon broke off: %w", err)
	}
	if response.StatusCode >= http.StatusMultipleChoices {
		return refusal(response.StatusCode, text)
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("the answer of Ontime's daemon is not what this driver expects (%w): "+
			"install the same version of both", err)
	}
	return nil
}

// refusal is the daemon's own reason, which becomes an event of the pod.
func refusal(status int, text []byte) error {
	var problem struct {
		Error string `json:"error"`
	}
	if json.Unmarshal(text, &problem) != nil || problem.Error == "" {
		problem.Error = fmt.Sprintf("HTTP status %d without a reason", status)
	}
	if status == http.StatusForbidden {
		problem.Error += " (the driver must run as root, or as a user of [reservations] in daemon.toml, which lists pod:* in for)"
	}
	return fmt.Errorf("Ontime's daemon on this node refuses: %s", problem.Error)
}
