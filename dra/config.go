package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Names that users write in manifests.
const (
	driverName = "cpu.ontime"
	apiVersion = driverName + "/v1"
	configKind = "Reservation"
	// capacityName is the capacity of every device: CPU time in millionths of a CPU.
	capacityName = "microcpus"
	// perVcpuName is a second capacity of the shared device: the CPU time of each vCPU. It never runs out, but bounds
	// what one claim may ask for.
	perVcpuName = "microcpusPerVcpu"
)

// Bounds of a reservation, those of the daemon.
const (
	shortestPeriod = 500 * time.Microsecond
	longestPeriod  = time.Second
	mostVcpus      = 256
	lowestLevel    = 8
)

// microcpus is CPU time as a share of one CPU, in millionths. The scheduler adds these integers exactly.
type microcpus = int64

// wholeCPU is all the time of one CPU.
const wholeCPU microcpus = 1_000_000

// reservationConfig is the opaque configuration of a claim's request: what each of the pod's vCPUs or threads gets.
type reservationConfig struct {
	Budget time.Duration
	Period time.Duration
	Vcpus  int
	Class  string
	Level  int
}

// fieldNames are the fields of the parameters.
var fieldNames = []string{"apiVersion", "kind", "budget", "period", "vcpus", "class", "level"}

// parseConfig reads and checks the opaque parameters of a claim or a device class. An error names the field, what it
// holds and what is allowed, because it becomes an event of the pod.
func parseConfig(parameters []byte) (reservationConfig, error) {
	var written struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Budget     string `json:"budget"`
		Period     string `json:"period"`
		Vcpus      *int   `json:"vcpus"`
		Class      string `json:"class"`
		Level      int    `json:"level"`
	}
	decoder := json.NewDecoder(bytes.NewReader(parameters))
	if err := decoder.Decode(&written); err != nil {
		return reservationConfig{}, fmt.Errorf("the parameters for driver %s are not a %s: %w", driverName, configKind, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return reservationConfig{}, fmt.Errorf("the parameters for driver %s hold more than one object", driverName)
	}
	// Decode takes Level for level, which policies of the API server do not.
	var names map[string]json.RawMessage
	if err := json.Unmarshal(parameters, &names); err != nil {
		return reservationConfig{}, fmt.Errorf("the parameters for driver %s are not a %s: %w", driverName, configKind, err)
	}
	for name := range names {
		if !slices.Contains(fieldNames, name) {
			return reservationConfig{}, fmt.Errorf("the parameters for driver %s have a field %q: allowed are %s",
				driverName, name, strings.Join(fieldNames, ", "))
		}
	}
	if written.APIVersion != apiVersion || written.Kind != configKind {
		return reservationConfig{}, fmt.Errorf("the parameters for driver %s are apiVersion %q, kind %q: write %q and %q",
			driverName, written.APIVersion, written.Kind, apiVersion, configKind)
	}
	config := reservationConfig{Vcpus: 1, Class: written.Class, Level: written.Level}
	if written.Vcpus != nil {
		config.Vcpus = *written.Vcpus
	}
	if config.Class == "" {
		config.Class = "rt"
	}
	var err error
	if config.Period, err = parseDuration("period", written.Period); err != nil {
		return reservationConfig{}, err
	}
	if config.Budget, err = parseDuration("budget", written.Budget); err != nil {
		return reservationConfig{}, err
	}
	return config, config.check()
}

func (config reservationConfig) check() error {
	switch {
	case config.Period < shortestPeriod || config.Period > longestPeriod:
		return fmt.Errorf("period is %v: allowed is %v to %v", config.Period, shortestPeriod, longestPeriod)
	case config.Budget <= 0:
		return fmt.Errorf("budget is %v: it must be more than zero", config.Budget)
	case config.Budget > config.Period:
		return fmt.Errorf("budget %v exceeds the period %v: a vCPU cannot have more than one CPU; raise vcpus instead",
			config.Budget, config.Period)
	case config.Vcpus < 1 || config.Vcpus > mostVcpus:
		return fmt.Errorf("vcpus is %d: allowed is 1 to %d", config.Vcpus, mostVcpus)
	case config.Class != "rt":
		return fmt.Errorf("class is %q: only class rt can reserve CPU time; a pod of class bulk needs no claim",
			config.Class)
	case config.Level < 0 || config.Level > lowestLevel:
		return fmt.Errorf("level is %d: allowed is 0 (highest) to %d", config.Level, lowestLevel)
	}
	return nil
}

// perVcpu is the bandwidth of each vCPU, rounded up, so that what the scheduler adds is never less than what the daemon
// adds.
func (config reservationConfig) perVcpu() microcpus {
	budget, period := int64(config.Budget), int64(config.Period)
	return (budget*wholeCPU + period - 1) / period
}

// total is what all vCPUs take.
func (config reservationConfig) total() microcpus {
	return int64(config.Vcpus) * config.perVcpu()
}

// units are the units of a duration, as in /etc/ontime/sched.toml. The ValidatingAdmissionPolicy knows the same ones.
var units = []struct {
	suffix string
	length time.Duration
}{{"us", time.Microsecond}, {"ms", time.Millisecond}, {"s", time.Second}}

// parseDuration reads a whole number with its unit, such as 3ms.
func parseDuration(field, text string) (time.Duration, error) {
	if text == "" {
		return 0, fmt.Errorf("%s is missing: write a whole number with its unit, such as 10ms", field)
	}
	for _, unit := range units {
		digits, found := strings.CutSuffix(text, unit.suffix)
		if !found {
			continue
		}
		// 32 bits of the longest unit fit a time.Duration.
		number, err := strconv.ParseUint(digits, 10, 31)
		if err != nil {
			continue
		}
		return time.Duration(number) * unit.length, nil
	}
	return 0, fmt.Errorf("%s is %q: write a whole number with its unit, us, ms or s, such as 10ms", field, text)
}
