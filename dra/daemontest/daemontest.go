// Package daemontest starts real daemons of Ontime for tests, each with directories and a network namespace of its own.
package daemontest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// Patience is how long tests wait for what must happen; the machine may have other work.
const Patience = time.Minute

var count atomic.Int32

// Node is a daemon's directories and network namespace. Its daemon may be killed and started again.
type Node struct {
	t      testing.TB
	ontime string
	netns  string
	dir    string
	daemon *exec.Cmd
}

// Start makes a node with the given lines of sched.toml and starts its daemon. The test is skipped where there is no
// daemon to start: ONTIME names the program, and it needs root.
func Start(t testing.TB, sched string) *Node {
	t.Helper()
	ontime := os.Getenv("ONTIME")
	if ontime == "" {
		t.Skip("ONTIME is not set: it names the program ontime (make dra-test sets it where target/release has it)")
	}
	if os.Geteuid() != 0 {
		t.Skip("not root: a daemon and a network namespace need root")
	}
	node := &Node{t: t, ontime: ontime, dir: t.TempDir(),
		netns: fmt.Sprintf("ontime-dra-%d-%d", os.Getpid(), count.Add(1))}
	for _, name := range []string{"run", "state", "etc/daemon.conf.d", "debug"} {
		node.must(os.MkdirAll(filepath.Join(node.dir, name), 0o755))
	}
	// The kernel's fair server as debugfs shows it, so that the machine's own stays as it is.
	for cpu := range runtime.NumCPU() {
		server := filepath.Join(node.dir, fmt.Sprintf("debug/sched/fair_server/cpu%d", cpu))
		node.must(os.MkdirAll(server, 0o755))
		node.must(os.WriteFile(filepath.Join(server, "runtime"), []byte("50000000"), 0o644))
		node.must(os.WriteFile(filepath.Join(server, "period"), []byte("1000000000"), 0o644))
	}
	// Threads of other programs on this machine are not capped.
	node.Configure("daemon.conf.d/exempt.toml", "[cap]\nuncapped = [\"/\"]\n")
	node.Configure("sched.toml", sched)
	node.run("ip", "netns", "add", node.netns)
	t.Cleanup(func() {
		node.Stop(syscall.SIGTERM)
		// What the daemon set on this machine is given back.
		_ = node.command("reset").Run()
		_ = exec.Command("ip", "netns", "delete", node.netns).Run()
	})
	node.Restart()
	return node
}

// Socket is the daemon's socket.
func (node *Node) Socket() string {
	return filepath.Join(node.dir, "run", "ontime.sock")
}

// Configure writes a file of the daemon's configuration.
func (node *Node) Configure(file, text string) {
	node.must(os.WriteFile(filepath.Join(node.dir, "etc", file), []byte(text), 0o644))
}

// Forget removes what a reboot removes. The daemon must not run.
func (node *Node) Forget() {
	run := filepath.Join(node.dir, "run")
	node.must(os.RemoveAll(run))
	node.must(os.Mkdir(run, 0o755))
}

// Restart starts the daemon, and waits until it answers.
func (node *Node) Restart() {
	node.t.Helper()
	var log bytes.Buffer
	node.daemon = node.command("daemon")
	node.daemon.Stderr = &log
	node.must(node.daemon.Start())
	for end := time.Now().Add(Patience); ; time.Sleep(50 * time.Millisecond) {
		if out, _ := node.command("status").Output(); bytes.HasPrefix(out, []byte("method")) {
			return
		}
		if time.Now().After(end) {
			node.Stop(syscall.SIGKILL)
			node.t.Fatalf("the daemon does not answer: %s", log.String())
		}
	}
}

// Declare starts a VM of this name with one vCPU, which does not run, and reserves for it what the lines of sched.toml
// say. It returns how both end. The test is skipped without QEMU.
func (node *Node) Declare(name, sched, reserved string) func() {
	node.t.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		node.t.Skip("qemu-system-x86_64 is missing: apt-get install qemu-system-x86")
	}
	vm := exec.Command("qemu-system-x86_64", "-accel", "tcg", "-m", "32", "-nodefaults", "-display", "none",
		"-no-user-config", "-S", "-name", "guest="+name+",debug-threads=on")
	vm.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	node.must(vm.Start())
	node.Configure("tenants.toml", fmt.Sprintf("[[tenant]]\nname = %q\nclass = \"rt\"\n", name))
	node.Configure("sched.toml", fmt.Sprintf("%s[[reservation]]\nname = %q\n%s", sched, name, reserved))
	_ = node.command("reload").Run()
	end := sync.OnceFunc(func() {
		_ = vm.Process.Kill()
		_ = vm.Wait()
		node.Configure("sched.toml", sched)
		_ = node.command("reload").Run()
	})
	node.t.Cleanup(end)
	return end
}

// Stop ends the daemon by a signal, and waits for it and its guardian.
func (node *Node) Stop(signal syscall.Signal) {
	if node.daemon == nil {
		return
	}
	pid := node.daemon.Process.Pid
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	_ = node.daemon.Process.Signal(signal)
	_ = node.daemon.Wait()
	node.daemon = nil
	// The guardian restores what the daemon left, and then ends.
	for _, child := range bytes.Fields(children) {
		for end := time.Now().Add(Patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			if _, err := os.Stat("/proc/" + string(child)); err != nil {
				break
			}
		}
	}
}

// command is `ontime ARGUMENT` in the namespace. `ip netns exec` becomes the program, so signals reach it.
func (node *Node) command(argument string) *exec.Cmd {
	return exec.Command("ip", "netns", "exec", node.netns, node.ontime, argument,
		"--run-dir", filepath.Join(node.dir, "run"), "--state-dir", filepath.Join(node.dir, "state"),
		"--config-dir", filepath.Join(node.dir, "etc"), "--debugfs", filepath.Join(node.dir, "debug"))
}

func (node *Node) run(name string, arguments ...string) {
	node.t.Helper()
	if out, err := exec.Command(name, arguments...).CombinedOutput(); err != nil {
		node.t.Fatalf("%s %v: %v: %s", name, arguments, err, out)
	}
}

func (node *Node) must(err error) {
	node.t.Helper()
	if err != nil {
		node.t.Fatal(err)
	}
}
