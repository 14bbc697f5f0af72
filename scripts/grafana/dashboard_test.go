// Package grafana holds the dashboard against the schema that Grafana publishes, in its Foundation SDK.
package grafana

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
)

// problems are what the schema has against a dashboard: unknown and missing fields, and values of a wrong type.
func problems(text []byte) []string {
	err := new(dashboard.Dashboard).UnmarshalJSONStrict(text)
	// The error is not nil where it has no entry.
	var found cog.BuildErrors
	if err != nil && !errors.As(err, &found) {
		return []string{err.Error()}
	}
	var said []string
	for _, problem := range found {
		said = append(said, problem.Error())
	}
	return said
}

func TestGrafanasSchemaTakesTheDashboard(t *testing.T) {
	plugins.RegisterDefaultPlugins()
	text, err := os.ReadFile(filepath.Join("..", "..", "packaging", "grafana", "ontime.json"))
	if err != nil {
		t.Fatal(err)
	}
	if found := problems(text); len(found) > 0 {
		t.Errorf("the dashboard:\n%s", strings.Join(found, "\n"))
	}
	// Each query is one of a Prometheus, which the schema of its queries describes.
	var read dashboard.Dashboard
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatal(err)
	}
	queries := 0
	for _, panel := range read.Panels {
		if panel.Panel == nil {
			continue
		}
		for _, query := range panel.Panel.Targets {
			switch query := query.(type) {
			case prometheus.Dataquery, *prometheus.Dataquery:
				queries++
			default:
				t.Errorf("panel %v has a query of type %T", *panel.Panel.Title, query)
			}
		}
	}
	if queries <= 15 {
		t.Errorf("the dashboard has %d queries", queries)
	}
	// The schema does refuse mistakes, on each level.
	mistakes := map[string]string{`"titel": `: `"title": `, `"exp": `: `"expr": `, `"calculations": `: `"calcs": `,
		`"lineBreadth": `: `"lineWidth": `}
	for wrong, right := range mistakes {
		changed := strings.ReplaceAll(string(text), right, wrong)
		if changed == string(text) || len(problems([]byte(changed))) == 0 {
			t.Errorf("a dashboard with %s in place of %s is not refused", wrong, right)
		}
	}
}
