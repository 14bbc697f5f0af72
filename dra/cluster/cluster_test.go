// Package cluster tests the driver in a cluster of real parts: etcd, the API server, the scheduler and the controllers
// of Kubernetes, and for each node the driver and a daemon of Ontime. Only kubelet is played by the test, over gRPC.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"ontime/dra/daemontest"
)

const (
	namespace = "default"
	token     = "administrator"
	// account is the driver's service account, and the name of its role.
	account = "ontime-dra"
	lease   = 30 * time.Second
	// reserve is each daemon's sched.toml and a line of the file for `ontime plan`.
	reserve = "reserve = 0.05\n"
	// patience is how long the test waits for what must happen.
	patience = 3 * time.Minute
	// anyKernel is the driver's option for nodes whose kernel need not be a real-time kernel: nothing is timed here.
	anyKernel = "--any-kernel"
)

// process is a program that may be killed and started again.
type process struct {
	t       testing.TB
	log     string
	command []string
	running *exec.Cmd
}

func (cluster *cluster) start(log, program string, arguments ...string) *process {
	program = filepath.Join(cluster.programs, program)
	process := &process{t: cluster.t, log: filepath.Join(cluster.dir, log+".log"),
		command: append([]string{program}, arguments...)}
	cluster.t.Cleanup(func() {
		process.kill()
		if cluster.t.Failed() {
			text, _ := os.ReadFile(process.log)
			cluster.t.Logf("%s:\n%s", log, text[max(0, len(text)-4000):])
		}
	})
	process.restart()
	return process
}

func (process *process) restart() {
	process.t.Helper()
	log, err := os.OpenFile(process.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(process.t, err)
	defer log.Close()
	process.running = exec.Command(process.command[0], process.command[1:]...)
	process.running.Stdout, process.running.Stderr = log, log
	// The program ends with the test, however that ends.
	process.running.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(process.t, process.running.Start())
}

func (process *process) kill() {
	if process.running != nil {
		_ = process.running.Process.Kill()
		_ = process.running.Wait()
		process.running = nil
	}
}

// cluster is a control plane and its nodes.
type cluster struct {
	t                   testing.TB
	programs            string
	dir                 string
	config              *rest.Config
	client              kubernetes.Interface
	administrator       string
	apiserver, schedule *process
	nodes               []*node
}

// node is a daemon, a driver, and kubelet's part.
type node struct {
	name   string
	dir    string
	daemon *daemontest.Node
	driver *process
	// token is the driver's at the API server.
	token  string
	plugin drapb.DRAPluginClient
}

// newCluster starts a cluster. KUBERNETES names the directory of its programs (scripts/kubernetes-test.sh builds them).
func newCluster(t testing.TB, nodes int) *cluster {
	programs := os.Getenv("KUBERNETES")
	if programs == "" {
		t.Skip("KUBERNETES is not set: run make test-kubernetes")
	}
	// Short, because it becomes part of the paths of sockets.
	dir, err := os.MkdirTemp("", "dra")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cluster := &cluster{t: t, programs: programs, dir: dir}
	cluster.startControlPlane()
	_, err = cluster.kubectl("apply", "-k", "dra/manifests")
	must(t, err)
	for number := range nodes {
		cluster.addNode(fmt.Sprintf("node-%d", number), anyKernel)
	}
	return cluster
}

func (cluster *cluster) startControlPlane() {
	t := cluster.t
	client, peer, secure := freePort(t), freePort(t), freePort(t)
	etcd, peers := "http://127.0.0.1:"+client, "http://127.0.0.1:"+peer
	cluster.start("etcd", "etcd", "--data-dir", filepath.Join(cluster.dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", peers,
		"--initial-advertise-peer-urls", peers, "--initial-cluster", "default="+peers)
	tokens, key := filepath.Join(cluster.dir, "tokens"), filepath.Join(cluster.dir, "key")
	must(t, os.WriteFile(tokens, []byte(token+",administrator,1,system:masters\n"), 0o600))
	out, err := exec.Command("openssl", "genrsa", "-out", key, "2048").CombinedOutput()
	if err != nil {
		t.Fatalf("openssl: %v: %s", err, out)
	}
	cluster.apiserver = cluster.start("kube-apiserver", "kube-apiserver", "--etcd-servers", etcd,
		"--bind-address", "127.0.0.1", "--secure-port", secure, "--cert-dir", filepath.Join(cluster.dir, "certificates"),
		"--advertise-address", "127.0.0.1", "--endpoint-reconciler-type", "none",
		"--token-auth-file", tokens, "--authorization-mode", "RBAC", "--service-cluster-ip-range", "10.96.0.0/24",
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", key,
		"--service-account-signing-key-file", key,
		// No controller makes service accounts here, and none removes the taint of new nodes.
		"--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition")
	cluster.config = cluster.access("https://127.0.0.1:"+secure, token)
	cluster.client, err = kubernetes.NewForConfig(cluster.config)
	must(t, err)
	cluster.administrator = cluster.kubeconfig("administrator", token)
	cluster.until("the API server is ready", func(ctx context.Context) error {
		_, err := cluster.client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
	cluster.schedule = cluster.start("kube-scheduler", "kube-scheduler", "--kubeconfig", cluster.administrator,
		"--leader-elect=false", "--secure-port=0", "--kube-api-qps=500", "--kube-api-burst=500")
	cluster.start("kube-controller-manager", "kube-controller-manager", "--kubeconfig", cluster.administrator,
		"--leader-elect=false", "--secure-port=0", "--kube-api-qps=500", "--kube-api-burst=500",
		"--controllers=resourceclaim-controller,garbage-collector-controller")
}

// access is the configuration of a client with this token.
func (cluster *cluster) access(server, token string) *rest.Config {
	return &rest.Config{Host: server, BearerToken: token, QPS: 500, Burst: 500, Timeout: 30 * time.Second,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

// kubeconfig writes the file of a user.
func (cluster *cluster) kubeconfig(user, token string) string {
	file := filepath.Join(cluster.dir, user+".kubeconfig")
	must(cluster.t, os.WriteFile(file, fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: test
clusters: [{name: test, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: test, user: {token: %q}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
`, cluster.config.Host, token), 0o600))
	return file
}

// kubectl runs it as the administrator, in the repository's root as the documentation does, and returns what it prints.
func (cluster *cluster) kubectl(arguments ...string) (string, error) {
	command := exec.Command(filepath.Join(cluster.programs, "kubectl"), arguments...)
	command.Dir = filepath.Join("..", "..")
	command.Env = []string{"HOME=" + cluster.dir, "KUBECONFIG=" + cluster.administrator}
	out, err := command.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("kubectl %v: %w: %s", arguments, err, out)
	}
	return string(out), nil
}

// addNode adds a node with a daemon and a driver, which gets these options.
func (cluster *cluster) addNode(name string, options ...string) {
	t := cluster.t
	node := &node{name: name, dir: filepath.Join(cluster.dir, name), daemon: daemontest.Start(t, reserve)}
	must(t, os.MkdirAll(filepath.Join(node.dir, "plugins_registry"), 0o755))
	room := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64"),
		corev1.ResourceMemory: resource.MustParse("64Gi"), corev1.ResourcePods: resource.MustParse("1000")}
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Capacity: room, Allocatable: room,
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
	_, err := cluster.client.CoreV1().Nodes().Create(t.Context(), object, metav1.CreateOptions{})
	must(t, err)
	node.token = cluster.driverToken("ontime-system", account, name)
	options = append(options, "--node", name, "--kubeconfig", cluster.kubeconfig("driver-"+name, node.token),
		"--kubelet-dir", node.dir, "--daemon", node.daemon.Socket(), "--lease", lease.String(), "--interval", "1s",
		"--cdi-dir", filepath.Join(node.dir, "cdi"))
	node.driver = cluster.start("driver-"+name, "ontime-dra", options...)
	node.register(cluster)
	cluster.nodes = append(cluster.nodes, node)
	cluster.until("the node publishes its CPU time", func(ctx context.Context) error {
		if cluster.capacity(ctx, node) == 0 {
			return fmt.Errorf("no slice of %s has device shared", name)
		}
		return nil
	})
}

// driverToken is what kubelet gives to the driver's pod on a node: the token of the service account in rbac.yaml, which
// names the node.
func (cluster *cluster) driverToken(namespace, account, node string) string {
	t := cluster.t
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: account + "-" + node}, Spec: corev1.PodSpec{
		NodeName: node, ServiceAccountName: account, Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	pod, err := cluster.client.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	must(t, err)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name,
			UID: pod.UID}}}
	request, err = cluster.client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, request,
		metav1.CreateOptions{})
	must(t, err)
	return request.Status.Token
}

// register does what kubelet does when a plugin's socket appears.
func (node *node) register(cluster *cluster) {
	connection := dial(cluster.t, filepath.Join(node.dir, "plugins_registry", "cpu.ontime-reg.sock"))
	client := registerapi.NewRegistrationClient(connection)
	var info *registerapi.PluginInfo
	cluster.until("the driver registers", func(ctx context.Context) (err error) {
		info, err = client.GetInfo(ctx, &registerapi.InfoRequest{})
		return err
	})
	if info.Type != registerapi.DRAPlugin || info.Name != "cpu.ontime" {
		cluster.t.Fatalf("the driver registers as %v", info)
	}
	registered := &registerapi.RegistrationStatus{PluginRegistered: true}
	_, err := client.NotifyRegistrationStatus(cluster.t.Context(), registered)
	must(cluster.t, err)
	node.plugin = drapb.NewDRAPluginClient(dial(cluster.t, info.Endpoint))
}

func dial(t testing.TB, socket string) *grpc.ClientConn {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { _ = connection.Close() })
	return connection
}

// prepare is kubelet's call before a pod's containers start.
func (node *node) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	asked := &drapb.Claim{Namespace: claim.Namespace, Uid: string(claim.UID), Name: claim.Name}
	answer, err := node.plugin.NodePrepareResources(ctx,
		&drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{asked}})
	if err != nil {
		return err
	}
	result, found := answer.Claims[asked.Uid]
	if !found {
		return fmt.Errorf("no answer for claim %s", claim.Name)
	}
	if result.Error != "" {
		return errors.New(result.Error)
	}
	return nil
}

// unprepare is kubelet's call after a pod's containers have ended.
func (node *node) unprepare(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	asked := &drapb.Claim{Namespace: claim.Namespace, Uid: string(claim.UID), Name: claim.Name}
	answer, err := node.plugin.NodeUnprepareResources(ctx,
		&drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{asked}})
	if err != nil {
		return err
	}
	if result, found := answer.Claims[asked.Uid]; !found || result.Error != "" {
		return fmt.Errorf("claim %s: %v", claim.Name, result)
	}
	return nil
}

// capacity is what the node publishes for unpinned work, in millionths of a CPU; 0 if nothing.
func (cluster *cluster) capacity(ctx context.Context, node *node) int64 {
	slices, err := cluster.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + node.name})
	if err != nil {
		return 0
	}
	for _, slice := range slices.Items {
		for _, device := range slice.Spec.Devices {
			if device.Name == "shared" {
				value := device.Capacity["microcpus"].Value
				return value.Value()
			}
		}
	}
	return 0
}

// state is what a daemon says of its reservations.
type state struct {
	Requested []struct {
		Name      string `json:"name"`
		MicroCpus int64  `json:"micro_cpus"`
	} `json:"requested"`
	Vcpus    []struct{} `json:"vcpus"`
	Capacity struct {
		Other  int64            `json:"other_micro_cpus"`
		Pacers map[string]int64 `json:"pacers_micro_cpus"`
	} `json:"capacity"`
}

// ask sends a request for reservations to the node's daemon.
func (node *node) ask(ctx context.Context, method, name, body string, answer any) error {
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", node.daemon.Socket())
		}}}
	request, err := http.NewRequestWithContext(ctx, method, "http://ontime/v1/reservations"+name, strings.NewReader(body))
	if err != nil {
		return err
	}
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode >= http.StatusMultipleChoices {
		text, _ := io.ReadAll(response.Body)
		return fmt.Errorf("%s %s: %s", method, name, text)
	}
	if answer == nil {
		return nil
	}
	return json.NewDecoder(response.Body).Decode(answer)
}

// held is what the node's daemon holds by request: the name and millionths of each reservation.
func (node *node) held(ctx context.Context) (map[string]int64, error) {
	var state state
	if err := node.ask(ctx, http.MethodGet, "", "", &state); err != nil {
		return nil, err
	}
	held := map[string]int64{}
	for _, reservation := range state.Requested {
		held[reservation.Name] = reservation.MicroCpus
	}
	return held, nil
}

// until waits until something succeeds.
func (cluster *cluster) until(what string, done func(context.Context) error) {
	cluster.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(cluster.t.Context(), 20*time.Second)
		err := done(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			cluster.t.Fatalf("waited %v in vain until %s: %v", patience, what, err)
		}
	}
}

func freePort(t testing.TB) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	must(t, err)
	return port
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
