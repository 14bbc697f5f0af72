package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"
)

// record is a claim that the driver has prepared, or was preparing when it was killed, or whose reservation has to end.
type record struct {
	Namespace   string      `json:"namespace"`
	Name        string      `json:"name"`
	Reservation reservation `json:"reservation"`
	// Released says that the claim was given back, but the daemon may still hold its reservation.
	Released bool `json:"released,omitempty"`
}

// records keeps the prepared claims in a file, so that a new driver renews what an earlier one reserved, also after the
// node was restarted and the daemon has forgotten all reservations.
type records struct {
	path   string
	claims map[types.UID]record
}

func loadRecords(path string) (*records, error) {
	loaded := &records{path: path, claims: map[types.UID]record{}}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return loaded, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the list of prepared claims: %w", err)
	}
	if err := json.Unmarshal(text, &loaded.claims); err != nil {
		return nil, fmt.Errorf("%s is not a list of prepared claims (%w): remove it; reservations that it named end with "+
			"their leases, and pods have them again when kubelet is restarted", path, err)
	}
	return loaded, nil
}

// put adds or replaces a claim. The file has it before the caller goes on.
func (kept *records) put(claim types.UID, added record) error {
	former, existed := kept.claims[claim]
	kept.claims[claim] = added
	err := kept.store()
	if err != nil && existed {
		kept.claims[claim] = former
	} else if err != nil {
		delete(kept.claims, claim)
	}
	return err
}

// remove forgets a claim.
func (kept *records) remove(claim types.UID) error {
	former, existed := kept.claims[claim]
	if !existed {
		return nil
	}
	delete(kept.claims, claim)
	err := kept.store()
	if err != nil {
		kept.claims[claim] = former
	}
	return err
}

// store replaces the file as a whole: a reader sees the former list or the new one, also after a power failure.
func (kept *records) store() error {
	text, err := json.Marshal(kept.claims)
	if err != nil {
		return fmt.Errorf("encode the list of prepared claims: %w", err)
	}
	if err := replaceFile(kept.path, text); err != nil {
		return fmt.Errorf("write the list of prepared claims: %w", err)
	}
	return nil
}

func replaceFile(path string, text []byte) error {
	next := path + ".new"
	file, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	if err = errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	if err := os.Rename(next, path); err != nil {
		return err
	}
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(folder.Sync(), folder.Close())
}
