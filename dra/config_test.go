package main

import (
	"strings"
	"testing"
	"time"
)

// parameters is a valid configuration with further fields.
func parameters(fields string) string {
	return `{"apiVersion":"cpu.ontime/v1","kind":"Reservation",` + fields + `}`
}

func TestParametersAreRead(t *testing.T) {
	for text, wanted := range map[string]reservationConfig{
		parameters(`"budget":"3ms","period":"10ms"`): {3 * time.Millisecond, 10 * time.Millisecond, 1, "rt", 0},
		parameters(`"budget":"1us","period":"1s","vcpus":256,"class":"rt","level":8`): {
			time.Microsecond, time.Second, 256, "rt", 8},
		parameters(`"budget":"500us","period":"500us","vcpus":2`): {
			500 * time.Microsecond, 500 * time.Microsecond, 2, "rt", 0},
	} {
		config, err := parseConfig([]byte(text))
		if err != nil || config != wanted {
			t.Errorf("%s: %+v, %v", text, config, err)
		}
	}
}

func TestWrongParametersAreRefusedByName(t *testing.T) {
	for text, reason := range map[string]string{
		``:             "not a Reservation",
		`[]`:           "not a Reservation",
		`{} {}`:        "more than one",
		`{"kind":"x"}`: `kind "x"`,
		parameters(`"budget":"3ms","period":"10ms","cores":2`):           `"cores"`,
		parameters(`"budget":"3ms","period":"10ms","level":5,"Level":0`): `"Level"`,
		parameters(`"budget":"3ms"`):                                     "period is missing",
		parameters(`"period":"10ms"`):                                    "budget is missing",
		parameters(`"budget":"3ms","period":"0ms"`):                      "period is 0s: allowed is 500µs to 1s",
		parameters(`"budget":"3ms","period":"2s"`):                       "period is 2s",
		parameters(`"budget":"3us","period":"499us"`):                    "period is 499µs",
		parameters(`"budget":"0ms","period":"10ms"`):                     "budget is 0s",
		parameters(`"budget":"-1ms","period":"10ms"`):                    `budget is "-1ms"`,
		parameters(`"budget":"11ms","period":"10ms"`):                    "exceeds the period",
		parameters(`"budget":"9223372036s","period":"10ms"`):             `budget is "9223372036s"`,
		parameters(`"budget":"3","period":"10ms"`):                       `budget is "3"`,
		parameters(`"budget":"3.5ms","period":"10ms"`):                   `budget is "3.5ms"`,
		parameters(`"budget":"3ns","period":"10ms"`):                     `budget is "3ns"`,
		parameters(`"budget":3,"period":"10ms"`):                         "not a Reservation",
		parameters(`"budget":"3ms","period":"10ms","vcpus":0`):           "vcpus is 0",
		parameters(`"budget":"3ms","period":"10ms","vcpus":257`):         "vcpus is 257",
		parameters(`"budget":"3ms","period":"10ms","class":"bulk"`):      `class is "bulk"`,
		parameters(`"budget":"3ms","period":"10ms","class":"fastest"`):   `class is "fastest"`,
		parameters(`"budget":"3ms","period":"10ms","level":9`):           "level is 9",
		parameters(`"budget":"3ms","period":"10ms","level":-1`):          "level is -1",
	} {
		if config, err := parseConfig([]byte(text)); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%s: %+v, %v; wanted %q", text, config, err, reason)
		}
	}
}

// The scheduler's sum must never be below the daemon's, or it would place what the daemon refuses.
func TestBandwidthIsRoundedUpForEachVcpu(t *testing.T) {
	for _, example := range []struct {
		budget, period time.Duration
		vcpus          int
		total          microcpus
	}{
		{3 * time.Millisecond, 10 * time.Millisecond, 1, 300_000},
		{time.Millisecond, 3 * time.Millisecond, 3, 1_000_002},
		{time.Microsecond, time.Second, 1, 1},
		{time.Second, time.Second, 256, 256_000_000},
	} {
		config := reservationConfig{Budget: example.budget, Period: example.period, Vcpus: example.vcpus}
		if total := config.total(); total != example.total {
			t.Errorf("%+v: %d", example, total)
		}
	}
}

func FuzzParameters(f *testing.F) {
	f.Add([]byte(parameters(`"budget":"3ms","period":"10ms","vcpus":2,"level":1`)))
	f.Fuzz(func(t *testing.T, text []byte) {
		config, err := parseConfig(text)
		if err != nil {
			return
		}
		if share := config.perVcpu(); share < 1 || share > wholeCPU || config.total() < share {
			t.Errorf("%q: %+v has a share of %d", text, config, share)
		}
	})
}
