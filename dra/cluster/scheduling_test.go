package cluster

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// demand is what a pod reserves for each of its vCPUs.
type demand struct {
	vcpus, budgetUs, periodUs int
}

// microcpus is what the driver's documentation says of a claim's capacity.
func (demand demand) microcpus() int64 {
	return int64(demand.vcpus) * int64((demand.budgetUs*1_000_000+demand.periodUs-1)/demand.periodUs)
}

// anyDemand is a share of up to a whole CPU, more than any vCPU can have, for one vCPU or several.
func anyDemand(random *rand.Rand, vcpus int) demand {
	period := 2 + random.IntN(99)
	return demand{vcpus: 1 + random.IntN(vcpus), budgetUs: 1000 * (1 + random.IntN(period)), periodUs: 1000 * period}
}

func (demand demand) parameters() string {
	return fmt.Sprintf(`{"apiVersion":"cpu.ontime/v1","kind":"Reservation","budget":"%dus","period":"%dus","vcpus":%d}`,
		demand.budgetUs, demand.periodUs, demand.vcpus)
}

// spec is a claim of class ontime-shared without the capacity of each vCPU.
func spec(microcpus int64, parameters string) resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{{Name: "cpu", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "ontime-shared",
			Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
				"microcpus": *resource.NewQuantity(microcpus, resource.DecimalSI)}}}}},
		Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "cpu.ontime",
				Parameters: apiruntime.RawExtension{Raw: []byte(parameters)}}}}},
	}}
}

// shared is such a claim as the documentation describes it.
func shared(demand demand) resourceapi.ResourceClaimSpec {
	claim := spec(demand.microcpus(), demand.parameters())
	claim.Devices.Requests[0].Exactly.Capacity.Requests["microcpusPerVcpu"] =
		*resource.NewQuantity(demand.microcpus()/int64(demand.vcpus), resource.DecimalSI)
	return claim
}

func TestCluster(t *testing.T) {
	cluster := newCluster(t, 3)
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"the documented pod runs", cluster.documentedPodRuns},
		{"bad claims are refused", cluster.badClaimsAreRefused},
		{"a claim is for one pod", cluster.claimsAreForOnePod},
		{"a driver writes what is its own node's", cluster.driversWriteTheirOwn},
		{"a pod has its class by its label", cluster.labelledPodsHaveTheirClass},
		{"allocations are those of plan", cluster.allocationsAreThoseOfPlan},
		{"placements are those of plan", cluster.placementsAreThoseOfPlan},
		{"a kill at any step leaks nothing", cluster.killsAtEveryStepLeakNothing},
		{"kills leak nothing", cluster.killsLeakNothing},
		{"lost pods leak nothing", cluster.lostPodsLeakNothing},
		{"allocations with pinned work fit plan", cluster.pinnedAllocationsFitPlan},
		{"a node without a real-time kernel refuses", cluster.otherKernelsAreRefused},
	} {
		begin := time.Now()
		step.run(t)
		t.Logf("%s: %v", step.name, time.Since(begin).Round(time.Second))
	}
}

// number is an environment variable's, or the default.
func number(name string, otherwise int) int {
	if value, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return value
	}
	return otherwise
}

// documentedPodRuns runs the commands of docs/use/kubernetes.md: from nothing to a held reservation.
func (cluster *cluster) documentedPodRuns(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "use", "kubernetes.md"))
	must(t, err)
	said := ""
	for line := range strings.Lines(string(page)) {
		// The page's commands are its indented lines, in lists too.
		command := strings.TrimSpace(line)
		if !strings.HasPrefix(line, "    ") || command == "" {
			continue
		}
		words := strings.Fields(strings.NewReplacer("NODE", cluster.nodes[0].name, "NAMESPACE", namespace).Replace(command))
		switch {
		case strings.HasPrefix(command, "kubectl wait "):
			// No kubelet starts the pod here; in scripts/kubelet-test.sh one does.
		case words[0] == "kubectl":
			out, err := cluster.kubectl(words[1:]...)
			must(t, err)
			said += out
		case slices.Contains([]string{"make", "podman"}, words[0]):
			// scripts/kubernetes-test.sh builds the driver; no container runs here.
		case strings.HasSuffix(command, "/daemonset.yaml"):
			// The repository's file stays as it is.
			show := exec.Command("sh", "-c", strings.Replace(command, "sed -i", "sed", 1))
			show.Dir = filepath.Join("..", "..")
			out, err := show.Output()
			must(t, err)
			if !regexp.MustCompile(`(?m)^ +image: REGISTRY/ontime-dra:1$`).Match(out) {
				t.Fatalf("%s: the manifest does not name the image: %s", command, out)
			}
		case slices.Contains([]string{"[", "sed", "systemctl"}, words[0]):
			// The node's own, in stage kubernetes_node of lab/tests/packages.sh.
		default:
			t.Fatalf("no test runs this command of the documentation: %s", command)
		}
	}
	for _, wanted := range []string{`(?m)^node/node-0 labeled$`, `(?m)^\S+ +node-0 +cpu\.ontime `,
		`(?m)^pod/control-loop created$`} {
		if !regexp.MustCompile(wanted).MatchString(said) {
			t.Fatalf("the commands of the documentation do not say %q: %s", wanted, said)
		}
	}
	_, err = cluster.kubectl("apply", "-f", "dra/manifests/examples/pinned.yaml")
	must(t, err)
	pods := cluster.decided(t, 1)
	node := cluster.nodeOf(pods[0])
	if node == nil {
		t.Fatalf("the pod is not placed: %s", pending(pods[0]))
	}
	claim := cluster.claimOf(t, pods[0])
	must(t, node.prepare(t.Context(), claim))
	held, err := node.held(t.Context())
	must(t, err)
	if wanted := map[string]int64{"dra-" + string(claim.UID): 300_000}; !maps.Equal(held, wanted) {
		t.Fatalf("the daemon holds %v, wanted %v", held, wanted)
	}
	cluster.remove(t, pods[0])
	cluster.nothingIsHeld()
}

// badClaimsAreRefused writes claims that the policy must refuse, by a reason that names the mistake.
func (cluster *cluster) badClaimsAreRefused(t *testing.T) {
	good := demand{vcpus: 2, budgetUs: 2_500, periodUs: 10_000}
	pod := metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: "owner", UID: "owner", Controller: ptr.To(true)}
	claims := cluster.client.ResourceV1().ResourceClaims(namespace)
	create := func(spec resourceapi.ResourceClaimSpec) error {
		template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: "bad"},
			Spec: resourceapi.ResourceClaimTemplateSpec{Spec: spec}}
		_, err := cluster.client.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), template,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		claim := &resourceapi.ResourceClaim{Spec: spec, ObjectMeta: metav1.ObjectMeta{Name: "bad",
			OwnerReferences: []metav1.OwnerReference{pod}}}
		_, other := claims.Create(t.Context(), claim, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if (err == nil) != (other == nil) {
			t.Errorf("a claim: %v, a template: %v", other, err)
		}
		return err
	}
	// A new policy takes a moment until the API server applies it.
	cluster.until("the policy is in force", func(context.Context) error {
		if create(spec(1, `{}`)) == nil {
			return fmt.Errorf("a claim without budget is accepted")
		}
		return nil
	})
	must(t, create(shared(good)))
	unowned := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "bad"}, Spec: shared(good)}
	_, err := claims.Create(t.Context(), unowned, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err == nil || !strings.Contains(err.Error(), "is for one pod: write a ResourceClaimTemplate") {
		t.Errorf("a claim that no pod owns: %v", err)
	}
	change := func(from, to string) resourceapi.ResourceClaimSpec {
		changed := strings.Replace(good.parameters(), from, to, 1)
		if changed == good.parameters() {
			t.Fatalf("%s has no %s", changed, from)
		}
		return spec(1_000_000_000, changed)
	}
	for reason, spec := range map[string]resourceapi.ResourceClaimSpec{
		"at least 500000":            spec(good.microcpus()-1, good.parameters()),
		"must be apiVersion":         change("cpu.ontime/v1", "cpu.ontime/v2"),
		"unknown parameter":          change(`"vcpus"`, `"cores"`),
		"budget must be a whole":     change("2500us", "2.5ms"),
		"budget must be more":        change("2500us", "0us"),
		"budget must not exceed":     change("2500us", "10001us"),
		"budget must not exceed ":    change("2500us", "999999999s"),
		"period must be a whole":     change(`"10000us"`, `10`),
		"period must be 500us":       change(`"10000us"`, `"0ms"`),
		"period must be 500us ":      change(`"10000us"`, `"999999999s"`),
		"vcpus must be":              change(`"vcpus":2`, `"vcpus":0`),
		"class must be rt":           change(`"vcpus":2`, `"class":"fastest"`),
		"level must be":              change(`"vcpus":2`, `"level":9`),
		"one opaque configuration":   {Devices: resourceapi.DeviceClaim{Requests: spec(1, `{}`).Devices.Requests}},
		"one request of classes":     twoRequests(spec(good.microcpus(), good.parameters())),
		"count must be 1":            counted(spec(good.microcpus(), good.parameters()), "ontime-shared", 2),
		"count must equal vcpus":     counted(spec(good.microcpus(), good.parameters()), "ontime-pinned", 3),
		"microcpus must be at least": withoutCapacity(spec(good.microcpus(), good.parameters())),
		"PerVcpu must be at least":   spec(good.microcpus(), good.parameters()),
		"allocationMode must be":     allOf(shared(demand{vcpus: 1, budgetUs: 1_000, periodUs: 10_000})),
		"not its name":               counted(shared(good), "my-shared", 1),
		"names other requests only":  configuredFor(shared(good), "other"),
		"firstAvailable cannot have": alternatives(shared(good)),
	} {
		if err := create(spec); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: %v", reason, err)
		}
	}
	must(t, create(counted(spec(250_000, good.parameters()), "ontime-pinned", 2)))
	must(t, create(configuredFor(shared(good), "cpu")))
	if t.Failed() {
		t.FailNow()
	}
}

// claimsAreForOnePod lets a second pod name the claim of a pod. It must stay Pending: kubelet would start it, because
// the claim is prepared.
func (cluster *cluster) claimsAreForOnePod(t *testing.T) {
	cluster.submit(t, "first", demand{vcpus: 1, budgetUs: 1_000, periodUs: 10_000})
	first := cluster.decided(t, 1)[0]
	claim, pods := cluster.claimOf(t, first), cluster.client.CoreV1().Pods(namespace)
	must(t, cluster.nodeOf(first).prepare(t.Context(), claim))
	second := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "second"}, Spec: corev1.PodSpec{
		Containers:     first.Spec.Containers,
		ResourceClaims: []corev1.PodResourceClaim{{Name: "cpu-time", ResourceClaimName: &claim.Name}}}}
	_, err := pods.Create(t.Context(), second, metav1.CreateOptions{})
	must(t, err)
	cluster.until("the second pod is refused", func(ctx context.Context) error {
		second, err := pods.Get(ctx, "second", metav1.GetOptions{})
		if err == nil && !strings.Contains(pending(second), "for one pod, and pod first has it") {
			err = fmt.Errorf("it is on node %q, its reason is %q", second.Spec.NodeName, pending(second))
		}
		return err
	})
	must(t, pods.Delete(t.Context(), "second", metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}))
	cluster.remove(t, first)
	cluster.nothingIsHeld()
}

// driversWriteTheirOwn writes slices as drivers: their policy lets them describe their own node only, also in another
// namespace than the manifests'.
func (cluster *cluster) driversWriteTheirOwn(t *testing.T) {
	const other = "other-system"
	// As a kustomization renames it.
	const renamed = "edge-" + account + "-2"
	for _, arguments := range [][]string{{"create", "namespace", other},
		{"--namespace", other, "create", "serviceaccount", account},
		{"--namespace", other, "create", "serviceaccount", renamed},
		{"create", "clusterrolebinding", "other-dra", "--clusterrole", account,
			"--serviceaccount", other + ":" + account, "--serviceaccount", other + ":" + renamed}} {
		_, err := cluster.kubectl(arguments...)
		must(t, err)
	}
	cluster.writesItsOwn(t, cluster.nodes[0].token)
	for _, name := range []string{account, renamed} {
		cluster.writesItsOwn(t, cluster.driverToken(other, name, cluster.nodes[0].name))
	}
}

// writesItsOwn is for a driver of the first node with this token.
func (cluster *cluster) writesItsOwn(t *testing.T, token string) {
	client, err := kubernetes.NewForConfig(cluster.access(cluster.config.Host, token))
	must(t, err)
	create := func(driver, node string) error {
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "own"}, Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, ResourceSliceCount: 1}}}
		_, err := client.ResourceV1().ResourceSlices().Create(t.Context(), slice,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	must(t, create("cpu.ontime", cluster.nodes[0].name))
	for driver, node := range map[string]string{"cpu.ontime": cluster.nodes[1].name, "other": cluster.nodes[0].name} {
		if err := create(driver, node); err == nil || !strings.Contains(err.Error(), "for the node on which it runs") {
			t.Fatalf("driver %s, node %s: %v", driver, node, err)
		}
	}
	event := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: "own"}}
	_, err = client.CoreV1().Events(metav1.NamespaceSystem).Create(t.Context(), event, metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) {
		t.Fatalf("a driver writes events of other namespaces than the nodes': %v", err)
	}
	_, err = client.CoreV1().Secrets(namespace).List(t.Context(), metav1.ListOptions{})
	if !apierrors.IsForbidden(err) {
		t.Fatalf("a driver reads secrets: %v", err)
	}
	_, err = client.CoreV1().Pods(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
	if !apierrors.IsForbidden(err) {
		t.Fatalf("a driver reads all pods: %v", err)
	}
}

// labelledPodsHaveTheirClass lets a driver follow the namespace to which a command of the documentation has bound its
// role, and another one, whose pods it may not read.
func (cluster *cluster) labelledPodsHaveTheirClass(t *testing.T) {
	node, pods := cluster.nodes[0], cluster.client.CoreV1().Pods(namespace)
	restart := func(command []string) {
		node.driver.kill()
		node.driver.command = command
		node.driver.restart()
	}
	before := node.driver.command
	restart(append(slices.Clone(before), "--class-namespaces", namespace+",unbound"))
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "labelled", Labels: map[string]string{"cpu.ontime/level": "3"}},
		Spec: corev1.PodSpec{NodeName: node.name, Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	pod, err := pods.Create(t.Context(), pod, metav1.CreateOptions{})
	must(t, err)
	holds := func(wanted map[string]int64) {
		cluster.until("the daemon has the pod's class", func(ctx context.Context) error {
			held, err := node.held(ctx)
			if err == nil && !maps.Equal(held, wanted) {
				err = fmt.Errorf("it holds %v, wanted %v", held, wanted)
			}
			return err
		})
	}
	holds(map[string]int64{"class-" + string(pod.UID): 0})
	cluster.until("the node's events name the namespace that is not read", func(context.Context) error {
		described, err := cluster.kubectl("describe", "node", node.name)
		if err == nil && !regexp.MustCompile(`PodsUnread .*namespaces: unbound\.`).MatchString(described) {
			err = fmt.Errorf("kubectl describe node says: %s", described)
		}
		return err
	})
	must(t, pods.Delete(t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}))
	restart(append(slices.Clone(before), "--class-namespaces", namespace))
	holds(map[string]int64{})
	restart(before)
}

func twoRequests(spec resourceapi.ResourceClaimSpec) resourceapi.ResourceClaimSpec {
	second := spec.Devices.Requests[0]
	second.Name = "second"
	spec.Devices.Requests = append(spec.Devices.Requests, second)
	return spec
}

func counted(spec resourceapi.ResourceClaimSpec, class string, count int64) resourceapi.ResourceClaimSpec {
	spec.Devices.Requests[0].Exactly.DeviceClassName = class
	spec.Devices.Requests[0].Exactly.AllocationMode = resourceapi.DeviceAllocationModeExactCount
	spec.Devices.Requests[0].Exactly.Count = count
	return spec
}

func allOf(spec resourceapi.ResourceClaimSpec) resourceapi.ResourceClaimSpec {
	spec.Devices.Requests[0].Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	return spec
}

// configuredFor adds a request for another class, and says for which request the parameters are.
func configuredFor(spec resourceapi.ResourceClaimSpec, request string) resourceapi.ResourceClaimSpec {
	spec.Devices.Requests = append(spec.Devices.Requests, resourceapi.DeviceRequest{Name: "other",
		Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "other"}})
	spec.Devices.Config[0].Requests = []string{request}
	return spec
}

// alternatives makes the only request one of two that the scheduler may choose from.
func alternatives(spec resourceapi.ResourceClaimSpec) resourceapi.ResourceClaimSpec {
	first := spec.Devices.Requests[0].Exactly
	spec.Devices.Requests[0] = resourceapi.DeviceRequest{Name: "cpu", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "first", DeviceClassName: first.DeviceClassName, Capacity: first.Capacity},
		{Name: "second", DeviceClassName: "other"}}}
	return spec
}

func withoutCapacity(spec resourceapi.ResourceClaimSpec) resourceapi.ResourceClaimSpec {
	spec.Devices.Requests[0].Exactly.Capacity = nil
	return spec
}

// placementsAreThoseOfPlan lets the scheduler place random sets of pods, and holds every answer against `ontime plan`.
// What it places, each daemon must admit.
func (cluster *cluster) placementsAreThoseOfPlan(t *testing.T) {
	seed := uint64(number("SEED", 1))
	random := rand.New(rand.NewPCG(seed, seed))
	placed, refused := 0, 0
	for round := range number("ROUNDS", 20) {
		demands := map[string]demand{}
		on := map[*node]map[string]demand{}
		for _, node := range cluster.nodes {
			on[node] = map[string]demand{}
		}
		var pods []*corev1.Pod
		for number := range 1 + random.IntN(12) {
			name := fmt.Sprintf("round-%d-%d", round, number)
			demands[name] = anyDemand(random, 2)
			cluster.submit(t, name, demands[name])
			pods = cluster.decided(t, len(demands))
			pod := pods[slices.IndexFunc(pods, func(pod *corev1.Pod) bool { return pod.Name == name })]
			if node := cluster.nodeOf(pod); node != nil {
				on[node][name] = demands[name]
				continue
			}
			// No pod ends, so a pod that is refused now fits nowhere later.
			for node, set := range on {
				with := maps.Clone(set)
				with[name] = demands[name]
				if cluster.plan(t, with) {
					t.Fatalf("seed %d, round %d: %s stays pending, but fits on %s beside %v", seed, round, name,
						node.name, set)
				}
			}
		}
		for node, set := range on {
			if !cluster.plan(t, set) {
				t.Fatalf("seed %d, round %d: the scheduler placed on %s what plan refuses: %v", seed, round, node.name, set)
			}
		}
		for _, pod := range pods {
			node := cluster.nodeOf(pod)
			if node != nil {
				placed++
				must(t, node.prepare(t.Context(), cluster.claimOf(t, pod)))
				continue
			}
			refused++
			if !strings.Contains(pending(pod), whyPending) {
				t.Fatalf("%s stays pending, but its reason is %q", pod.Name, pending(pod))
			}
			if refused == 1 {
				cluster.until("kubectl describe shows the reason", func(context.Context) error {
					out, err := cluster.kubectl("describe", "pod", pod.Name)
					if err == nil && !strings.Contains(out, whyPending) {
						err = fmt.Errorf("it shows %s", out)
					}
					return err
				})
			}
		}
		cluster.holdsExactly(t, pods, demands)
		for _, pod := range pods {
			cluster.remove(t, pod)
		}
		cluster.nothingIsHeld()
	}
	t.Logf("seed %d: %d pods placed, %d refused", seed, placed, refused)
	if placed == 0 || refused == 0 {
		t.Errorf("the sets were too small or too large to tell")
	}
}

// host begins a file for `ontime plan`, with nodes as these are but for the number of CPUs.
func host(cpus int) string {
	return fmt.Sprintf("[host]\ncpus = %d\n%s", cpus, reserve)
}

func (demand demand) tenant(name string) string {
	return fmt.Sprintf("[[tenant]]\nname = %q\nvcpus = %d\nbudget = \"%dus\"\nperiod = \"%dus\"\n", name, demand.vcpus,
		demand.budgetUs, demand.periodUs)
}

// plan asks `ontime plan` whether a node's set fits on a host of its size with the reserve of its daemon.
func (cluster *cluster) plan(t *testing.T, set map[string]demand) bool {
	t.Helper()
	text := host(runtime.NumCPU())
	for name, demand := range set {
		text += demand.tenant(name)
	}
	file := filepath.Join(cluster.dir, "plan.toml")
	must(t, os.WriteFile(file, []byte(text), 0o600))
	out, err := exec.Command(os.Getenv("ONTIME"), "plan", file).CombinedOutput()
	if err == nil {
		return true
	}
	if status, exited := err.(*exec.ExitError); exited && status.ExitCode() == 1 {
		return false
	}
	t.Fatalf("ontime plan: %v: %s\n%s", err, out, text)
	return false
}

// victims are the kinds of processes that the test kills.
var victims = []string{"driver", "daemon", "API server", "scheduler"}

// kill ends a process, of this node where each has its own, and starts it again.
func (cluster *cluster) kill(victim string, node *node) {
	switch victim {
	case "driver":
		node.driver.kill()
		node.driver.restart()
	case "daemon":
		node.daemon.Stop(syscall.SIGKILL)
		node.daemon.Restart()
	case "API server":
		cluster.apiserver.kill()
		cluster.apiserver.restart()
	case "scheduler":
		cluster.schedule.kill()
		cluster.schedule.restart()
	}
}

// killsAtEveryStepLeakNothing kills each kind of process while a pod takes each step of its life. When the step has
// been repeated until it succeeded, and the pod is gone, nothing is held after a look of the driver, not only when a
// lease has ended.
func (cluster *cluster) killsAtEveryStepLeakNothing(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 3))
	small := demand{vcpus: 1, budgetUs: 1_000, periodUs: 10_000}
	for kind, victim := range victims {
		for step := range lifeSteps {
			what := fmt.Sprintf("%s, step %d", victim, step)
			reached, ended := make(chan struct{}), make(chan error, 1)
			go func() {
				ended <- cluster.live(t.Context(), fmt.Sprintf("step-%d-%d", kind, step), small, func(now int) {
					if now == step {
						close(reached)
					}
				})
			}()
			select {
			case <-reached:
			case err := <-ended:
				if err != nil {
					t.Fatalf("%s: the pod's life ended early: %v", what, err)
				}
				// This machine was slow: both had happened.
				ended <- nil
			}
			time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
			if victim == "driver" || victim == "daemon" {
				for _, node := range cluster.nodes {
					cluster.kill(victim, node)
				}
			} else {
				cluster.kill(victim, nil)
			}
			if err := <-ended; err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			begin := time.Now()
			cluster.nothingIsReserved()
			if waited := time.Since(begin); waited > lease/2 {
				t.Fatalf("%s: CPU time was held for another %v", what, waited)
			}
			cluster.nothingIsHeld()
		}
	}
}

// killsLeakNothing kills a driver, a daemon, the API server or the scheduler while pods come and go, again and again.
func (cluster *cluster) killsLeakNothing(t *testing.T) {
	kills := number("KILLS", 12)
	random := rand.New(rand.NewPCG(2, 2))
	var pods sync.WaitGroup
	problems := make(chan error, 64)
	stop := make(chan struct{})
	for worker := range 4 {
		pods.Go(func() {
			for life := 0; ; life++ {
				select {
				case <-stop:
					return
				default:
				}
				name := fmt.Sprintf("life-%d-%d", worker, life)
				small := demand{vcpus: 1, budgetUs: 1_000, periodUs: 10_000}
				if err := cluster.live(t.Context(), name, small, func(int) {}); err != nil {
					problems <- fmt.Errorf("%s: %w", name, err)
					return
				}
			}
		})
	}
	for kill := range kills {
		time.Sleep(time.Duration(random.IntN(1500)) * time.Millisecond)
		node := cluster.nodes[random.IntN(len(cluster.nodes))]
		cluster.kill(victims[kill%len(victims)], node)
	}
	close(stop)
	pods.Wait()
	close(problems)
	for problem := range problems {
		t.Error(problem)
	}
	cluster.nothingIsHeld()
}

// lostPodsLeakNothing kills each kind of process while the driver prepares a pod's claim. Then the pod is gone, and
// kubelet calls no more, as after the loss of its state: only the driver can give the CPU time back.
func (cluster *cluster) lostPodsLeakNothing(t *testing.T) {
	random := rand.New(rand.NewPCG(4, 4))
	small := demand{vcpus: 1, budgetUs: 1_000, periodUs: 10_000}
	for number, victim := range append([]string{"nothing"}, victims...) {
		cluster.submit(t, fmt.Sprintf("lost-%d", number), small)
		pod := cluster.decided(t, 1)[0]
		node := cluster.nodeOf(pod)
		if node == nil {
			t.Fatalf("%s: the pod is not placed: %s", victim, pending(pod))
		}
		claim, answered := cluster.claimOf(t, pod), make(chan error, 1)
		go func() { answered <- node.prepare(t.Context(), claim) }()
		time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
		cluster.kill(victim, node)
		err := <-answered
		t.Logf("%s killed: kubelet's answer is %v", victim, err)
		cluster.until("the pod is deleted", func(ctx context.Context) error { return cluster.delete(ctx, pod) })
		cluster.nothingIsHeld()
	}
}

// otherKernelsAreRefused adds a node whose driver goes by its kernel, which is no real-time kernel. No pod is placed
// there, and the node's events say why. Where a class allows it, the driver refuses the claim with a reason, which
// kubelet writes to the pod's events.
func (cluster *cluster) otherKernelsAreRefused(t *testing.T) {
	if flag, _ := os.ReadFile("/sys/kernel/realtime"); strings.TrimSpace(string(flag)) == "1" {
		t.Log("not tested: this machine has a PREEMPT_RT kernel")
		return
	}
	others := cluster.nodes
	cluster.addNode("node-other-kernel")
	cluster.until("the node's events say why no pod is placed there", func(context.Context) error {
		for name, wanted := range map[string]bool{"node-other-kernel": true, others[0].name: false} {
			described, err := cluster.kubectl("describe", "node", name)
			if err != nil {
				return err
			}
			said := regexp.MustCompile(`(?m)^ +Warning +KernelNotRealTime .* ontime-dra +Node ` + name +
				` does not run a PREEMPT_RT kernel,.*linux-image-rt-amd64.*--any-kernel$`).MatchString(described)
			if said != wanted {
				return fmt.Errorf("kubectl describe node says: %s", described)
			}
		}
		return nil
	})
	for _, node := range others {
		_, err := cluster.kubectl("cordon", node.name)
		must(t, err)
	}
	const name = "other-kernel"
	cluster.submit(t, name, demand{vcpus: 1, budgetUs: 1_000, periodUs: 10_000})
	pod := cluster.decided(t, 1)[0]
	if cluster.nodeOf(pod) != nil || !strings.Contains(pending(pod), whyPending) {
		t.Fatalf("the pod is on %q, its reason is %q", pod.Spec.NodeName, pending(pod))
	}
	class, err := cluster.client.ResourceV1().DeviceClasses().Get(t.Context(), "ontime-shared", metav1.GetOptions{})
	must(t, err)
	class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: `device.driver == "cpu.ontime" && device.attributes["cpu.ontime"].kind == "shared"`}}}
	_, err = cluster.client.ResourceV1().DeviceClasses().Update(t.Context(), class, metav1.UpdateOptions{})
	must(t, err)
	var node *node
	cluster.until("the class without a selector for the kernel places the pod", func(ctx context.Context) error {
		if pod, err = cluster.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		if node = cluster.nodeOf(pod); node == nil {
			return fmt.Errorf("pending: %s", pending(pod))
		}
		return nil
	})
	err = node.prepare(t.Context(), cluster.claimOf(t, pod))
	if err == nil || !strings.Contains(err.Error(), "node node-other-kernel does not run a PREEMPT_RT kernel") {
		t.Fatalf("the claim is prepared: %v", err)
	}
	cluster.remove(t, pod)
	cluster.nothingIsHeld()
}

// lifeSteps is how many steps the life of a pod has.
const lifeSteps = 6

// live takes a pod through its life. Whatever is asked is asked again until it succeeds, as kubelet does. `begins` is
// called with the number of each step before it.
func (cluster *cluster) live(ctx context.Context, name string, demand demand, begins func(step int)) error {
	again := func(what string, do func() error) error {
		var err error
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
			if err = do(); err == nil {
				return nil
			}
		}
		return fmt.Errorf("%s: %w", what, err)
	}
	var pod *corev1.Pod
	var claim *resourceapi.ResourceClaim
	var on *node
	steps := [lifeSteps]struct {
		what string
		do   func() error
	}{
		{"create", func() error { return cluster.create(ctx, name, demand) }},
		{"place", func() (err error) {
			if pod, err = cluster.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
				return err
			}
			if on = cluster.nodeOf(pod); on == nil {
				return fmt.Errorf("pending: %s", pending(pod))
			}
			claim, err = cluster.claim(ctx, pod)
			return err
		}},
		{"prepare", func() error { return on.prepare(ctx, claim) }},
		{"look", func() error {
			held, err := on.held(ctx)
			if err == nil && held["dra-"+string(claim.UID)] != demand.microcpus() {
				err = fmt.Errorf("%s holds %v", on.name, held)
			}
			return err
		}},
		{"unprepare", func() error { return on.unprepare(ctx, claim) }},
		{"delete", func() error { return cluster.delete(ctx, pod) }},
	}
	for number, step := range steps {
		begins(number)
		if err := again(step.what, step.do); err != nil {
			return err
		}
	}
	return nil
}

// create makes a pod and the template of its claim. It may be called again after a failure.
func (cluster *cluster) create(ctx context.Context, name string, demand demand) error {
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: shared(demand)}}
	_, err := cluster.client.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, template, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{
			Claims: []corev1.ResourceClaim{{Name: "cpu-time"}}}}},
		ResourceClaims: []corev1.PodResourceClaim{{Name: "cpu-time", ResourceClaimTemplateName: ptr.To(name)}},
	}}
	_, err = cluster.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func (cluster *cluster) submit(t *testing.T, name string, demand demand) {
	t.Helper()
	must(t, cluster.create(t.Context(), name, demand))
}

// decided waits until the scheduler has placed or refused each of so many pods.
func (cluster *cluster) decided(t *testing.T, count int) []*corev1.Pod {
	t.Helper()
	var pods []*corev1.Pod
	cluster.until("every pod is placed or refused", func(ctx context.Context) error {
		list, err := cluster.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		pods = nil
		for index := range list.Items {
			pod := &list.Items[index]
			if pod.Spec.NodeName == "" && !strings.Contains(pending(pod), "nodes are available") {
				return fmt.Errorf("%s is undecided: %s", pod.Name, pending(pod))
			}
			pods = append(pods, pod)
		}
		if len(pods) != count {
			return fmt.Errorf("%d of %d pods", len(pods), count)
		}
		return nil
	})
	return pods
}

// whyPending is what the documentation says of a pod that does not fit.
const whyPending = "cannot allocate all claims"

// pending is the scheduler's reason, which kubectl describe shows.
func pending(pod *corev1.Pod) string {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			return condition.Message
		}
	}
	return ""
}

func (cluster *cluster) nodeOf(pod *corev1.Pod) *node {
	index := slices.IndexFunc(cluster.nodes, func(node *node) bool { return node.name == pod.Spec.NodeName })
	if index < 0 {
		return nil
	}
	return cluster.nodes[index]
}

// claim is the claim that a controller made for a pod.
func (cluster *cluster) claim(ctx context.Context, pod *corev1.Pod) (*resourceapi.ResourceClaim, error) {
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.ResourceClaimName != nil {
			return cluster.client.ResourceV1().ResourceClaims(namespace).Get(ctx, *status.ResourceClaimName,
				metav1.GetOptions{})
		}
	}
	return nil, fmt.Errorf("pod %s has no claim", pod.Name)
}

func (cluster *cluster) claimOf(t *testing.T, pod *corev1.Pod) *resourceapi.ResourceClaim {
	t.Helper()
	claim, err := cluster.claim(t.Context(), pod)
	must(t, err)
	return claim
}

// holdsExactly compares what the daemons hold with the placed pods.
func (cluster *cluster) holdsExactly(t *testing.T, pods []*corev1.Pod, demands map[string]demand) {
	t.Helper()
	for _, node := range cluster.nodes {
		wanted := map[string]int64{}
		for _, pod := range pods {
			if cluster.nodeOf(pod) == node {
				wanted["dra-"+string(cluster.claimOf(t, pod).UID)] = demands[pod.Name].microcpus()
			}
		}
		held, err := node.held(t.Context())
		must(t, err)
		if !maps.Equal(held, wanted) {
			t.Fatalf("%s holds %v, wanted %v", node.name, held, wanted)
		}
	}
}

// remove ends a pod as kubelet does: unprepare, then the pod goes for good.
func (cluster *cluster) remove(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	if node := cluster.nodeOf(pod); node != nil {
		must(t, node.unprepare(t.Context(), cluster.claimOf(t, pod)))
	}
	must(t, cluster.delete(t.Context(), pod))
}

// delete removes a pod and the template of its claim at once; controllers remove the claim.
func (cluster *cluster) delete(ctx context.Context, pod *corev1.Pod) error {
	now := metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}
	err := cluster.client.CoreV1().Pods(namespace).Delete(ctx, pod.Name, now)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	template := *pod.Spec.ResourceClaims[0].ResourceClaimTemplateName
	err = cluster.client.ResourceV1().ResourceClaimTemplates(namespace).Delete(ctx, template, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// nothingIsReserved waits until no daemon holds anything.
func (cluster *cluster) nothingIsReserved() {
	cluster.t.Helper()
	cluster.until("nothing is reserved", func(ctx context.Context) error {
		for _, node := range cluster.nodes {
			if held, err := node.held(ctx); err != nil || len(held) > 0 {
				return fmt.Errorf("%s holds %v (%v)", node.name, held, err)
			}
		}
		return nil
	})
}

// nothingIsHeld waits until no daemon holds anything and no claim is left.
func (cluster *cluster) nothingIsHeld() {
	cluster.t.Helper()
	cluster.nothingIsReserved()
	cluster.until("no claim is left", func(ctx context.Context) error {
		claims, err := cluster.client.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(claims.Items) > 0 {
			err = fmt.Errorf("%d claims are left", len(claims.Items))
		}
		return err
	})
}
