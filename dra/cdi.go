package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// cdiKind is the kind of the devices by which the container runtime gives a pinned pod its variable (CDI, the container
// device interface).
const cdiKind = driverName + "/claim"

// cpusVariable tells a pinned pod its CPUs, such as 3,12: the number of vCPU 0's CPU comes first.
const cpusVariable = "ONTIME_CPUS"

func cdiFile(folder string, claim types.UID) string {
	return filepath.Join(folder, driverName+"-"+string(claim)+".json")
}

// describeCPUs writes the CDI file of a pinned claim.
func describeCPUs(folder string, claim types.UID, cpus []int) error {
	numbers := make([]string, len(cpus))
	for index, cpu := range cpus {
		numbers[index] = strconv.Itoa(cpu)
	}
	variable := cpusVariable + "=" + strings.Join(numbers, ",")
	text, err := json.Marshal(map[string]any{
		"cdiVersion": "0.5.0",
		"kind":       cdiKind,
		"devices": []any{map[string]any{
			"name":           string(claim),
			"containerEdits": map[string]any{"env": []string{variable}},
		}},
	})
	if err != nil {
		return fmt.Errorf("encode a CDI file: %w", err)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("make the CDI directory: %w", err)
	}
	if err := replaceFile(cdiFile(folder, claim), text); err != nil {
		return fmt.Errorf("write a CDI file: %w", err)
	}
	return nil
}

// removeCPUs removes the CDI file of a claim, if it has one.
func removeCPUs(folder string, claim types.UID) error {
	if err := os.Remove(cdiFile(folder, claim)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a CDI file: %w", err)
	}
	return nil
}
