// Command ontime-dra is the DRA (dynamic resource allocation) driver of one Kubernetes node. It publishes the CPU time
// that Ontime can reserve there, and reserves with the node's daemon what the scheduler has allocated to a pod's claim.
//
// It is a process of its own at normal priority: the daemon never speaks to Kubernetes. It is written in Go because the
// kubelet plugin helper and the ResourceSlice controller exist for Go only; in Rust both would be own code.
//
//   - config.go: the parameters that users write, and their bounds
//   - claim.go: from an allocated claim to a reservation (pure)
//   - devices.go: from the daemon's figures to the published devices (pure)
//   - daemon.go: the daemon's API
//   - cdi.go: the variable by which a pinned pod learns its CPUs
//   - records.go: the list of prepared claims on disk
//   - events.go: the node's events, which say why claims are not served, or not any more
//   - classes.go: the class of pods without a claim, by label
//   - driver.go: kubelet's calls, and the loop that publishes and renews
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/cpuset"
)

type options struct {
	node       string
	kubeconfig string
	kubeletDir string
	socket     string
	cdi        string
	pinned     string
	classes    string
	anyKernel  bool
	lease      time.Duration
	interval   time.Duration
	health     string
}

func main() {
	klog.InitFlags(nil)
	var options options
	flag.StringVar(&options.node, "node", os.Getenv("NODE_NAME"), "the node's name; default: $NODE_NAME")
	flag.StringVar(&options.kubeconfig, "kubeconfig", "", "kubeconfig file; default: the pod's service account")
	flag.StringVar(&options.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "kubelet's directory")
	flag.StringVar(&options.socket, "daemon", "/run/ontime/ontime.sock", "the socket of Ontime's daemon")
	flag.StringVar(&options.cdi, "cdi-dir", "/var/run/cdi", "the container runtime's directory of CDI files")
	flag.StringVar(&options.pinned, "pinned-cpus", os.Getenv("PINNED_CPUS"),
		"CPUs for pinned work, such as 2-3,6; all others are for unpinned work; default: $PINNED_CPUS")
	flag.StringVar(&options.classes, "class-namespaces", os.Getenv("CLASS_NAMESPACES"),
		"namespaces, with commas between, in which label "+levelLabel+" gives class rt; default: $CLASS_NAMESPACES")
	flag.BoolVar(&options.anyKernel, "any-kernel", false, "treat a kernel without PREEMPT_RT as a real-time kernel")
	flag.DurationVar(&options.lease, "lease", 5*time.Minute, "how long a reservation outlives this driver, 10s to 24h")
	flag.DurationVar(&options.interval, "interval", 5*time.Second, "how often the daemon is looked at")
	flag.StringVar(&options.health, "health", "", "where a readiness probe asks over HTTP, such as :8080; default: none")
	flag.Parse()
	if err := run(options); err != nil {
		fmt.Fprintln(os.Stderr, "ontime-dra:", err)
		os.Exit(1)
	}
}

func run(options options) error {
	if options.node == "" {
		return errors.New("no node name: set NODE_NAME, or give --node")
	}
	if options.lease < 10*time.Second || options.lease > 24*time.Hour {
		return fmt.Errorf("--lease %v: allowed is 10s to 24h", options.lease)
	}
	if options.interval <= 0 || options.interval > options.lease/6 {
		return fmt.Errorf("--interval %v: it must be more than zero and at most a sixth of --lease", options.interval)
	}
	pinned, err := cpuset.Parse(options.pinned)
	if err != nil {
		return fmt.Errorf("--pinned-cpus %q: %w; write a list such as 2-3,6", options.pinned, err)
	}
	config, err := clientConfig(options.kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("make the API server's client: %w", err)
	}
	// The helper needs this directory, which no other plugin may use.
	folder := filepath.Join(options.kubeletDir, "plugins", driverName)
	if err := os.MkdirAll(folder, 0o750); err != nil {
		return fmt.Errorf("make the plugin's directory: %w", err)
	}
	records, err := loadRecords(filepath.Join(folder, "claims.json"))
	if err != nil {
		return err
	}

	signals, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, fatal := context.WithCancelCause(signals)
	defer fatal(nil)
	driver := &driver{
		node: options.node, pinned: pinned, anyKernel: options.anyKernel, lease: options.lease, cdi: options.cdi,
		client: client, events: newEvents(ctx, client, options.node), daemon: newDaemonClient(options.socket),
		fatal: fatal, records: records, crowded: map[types.UID]error{},
	}
	helper, err := kubeletplugin.Start(ctx, driver,
		kubeletplugin.DriverName(driverName),
		kubeletplugin.NodeName(options.node),
		kubeletplugin.KubeClient(client),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(options.kubeletDir, "plugins_registry")),
		kubeletplugin.PluginDataDirectoryPath(folder),
	)
	if err != nil {
		return fmt.Errorf("start the kubelet plugin: %w", err)
	}
	if options.health != "" {
		listener, err := net.Listen("tcp", options.health)
		if err != nil {
			return fmt.Errorf("--health %q: %w; write an address of this host and a free port", options.health, err)
		}
		server := http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: readiness(func() bool {
			status := helper.RegistrationStatus()
			return status != nil && status.PluginRegistered
		})}
		go func() { fatal(server.Serve(listener)) }()
	}
	// An empty name would mean all namespaces.
	isComma := func(character rune) bool { return character == ',' }
	if namespaces := strings.FieldsFunc(options.classes, isComma); len(namespaces) > 0 {
		go func() {
			if err := watchClasses(ctx, client, options.node, namespaces, driver.daemon, options.lease,
				options.interval, driver.warn); err != nil {
				fatal(err)
			}
		}()
	}
	driver.run(ctx, helper, options.interval)
	helper.Stop()
	if signals.Err() == nil {
		return context.Cause(ctx)
	}
	return nil
}

// clientConfig is for the API server of a kubeconfig file, or of the pod's service account.
func clientConfig(kubeconfig string) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("configure the API server's client: %w", err)
	}
	// After a restart of the daemon the look-ups of all claims are due at once, and must end within a sixth of a lease:
	// at client-go's default of 5 a second, those of some 60 claims last as long as all look-ups together may.
	config.QPS, config.Burst = 50, 100
	return config, nil
}

// readiness answers a probe: the driver is ready when kubelet calls it. Without a daemon it is ready as well, because
// it still gives back what ended pods had.
func readiness(registered func() bool) http.Handler {
	return http.HandlerFunc(func(writer http.ResponseWriter, _ *http.Request) {
		if !registered() {
			http.Error(writer, "kubelet has not registered this driver", http.StatusServiceUnavailable)
		}
	})
}
