#!/bin/sh
# kubelet-cluster.sh: the clients' side of kubelet-node.sh, in the emulated host's /lab. It runs etcd and Kubernetes'
# control plane at 10.1.0.1, applies what docs/use/kubernetes.md applies (with kubelet-driver), then a pod with a VM
# (kubelet-vm.yaml), and one that the driver refuses (kubelet-refused.yaml). After a failure the file `failed` has the
# step, and `described` what kubectl knows.
set -eu
repository=$PWD/repository work=/run/control
exec > cluster.log 2>&1
export PATH="$work:$PWD/bin:$PATH" HOME="$work" KUBECONFIG="$PWD/kubeconfig"
step=start
ended() { # STATUS
    [ "$1" -ne 0 ] || return 0
    {
        kubectl describe node,pods,resourceclaims
        kubectl get resourceslices -o yaml
        for program in etcd kube-apiserver kube-scheduler kube-controller-manager; do
            echo "== the end of $program.log:"
            tail -n 10 "$work/$program.log"
        done
    } > described.new 2>&1 || true
    mv described.new described
    echo "$step" > failed
}
trap 'ended $?' EXIT
trap 'exit 130' INT TERM
within() { # SECONDS WHAT COMMAND...: until the command succeeds
    end=$(($(date +%s) + $1)) step=$2
    shift 2
    until "$@" > "$work/said" 2>&1; do
        [ "$(date +%s)" -lt "$end" ] || { cat "$work/said"; exit 1; }
        sleep 1
    done
    echo "$step"
}
starts() { # PROGRAM ARGUMENTS...
    program=$1
    "$@" > "$work/$program.log" 2>&1 &
}
running() { # POD FILE: waits for the pod, and writes its UID and its container's ID to the file
    within 3600 "pod $1 is Running" kubectl wait --timeout=60s --for=jsonpath='{.status.phase}'=Running "pod/$1"
    kubectl get pod "$1" -o jsonpath='{.metadata.uid} {.status.containerStatuses[0].containerID}{"\n"}' > "$2.new"
    mv "$2.new" "$2"
}
published() { kubectl get resourceslices -o jsonpath='{.items[*].spec.devices[*].name}' | grep -qw shared; }

# The node sets the machine's clock, and makes /etc/hosts.
until [ -e prepared ]; do sleep 0.1; done
step="the programs are in memory"
cp -r control "$work"
echo "administrator,administrator,1,system:masters" > "$work/tokens"
starts etcd --data-dir "$work/data" --unsafe-no-fsync
within 120 "etcd answers" busybox wget -q -O /dev/null http://127.0.0.1:2379/health
starts kube-apiserver --etcd-servers http://127.0.0.1:2379 --bind-address 10.1.0.1 --advertise-address 10.1.0.1 \
    --cert-dir "$work/certificates" --endpoint-reconciler-type none --token-auth-file "$work/tokens" \
    --authorization-mode RBAC --service-cluster-ip-range 10.96.0.0/24 --allow-privileged \
    --service-account-issuer https://kubernetes.default.svc --service-account-key-file "$work/key" \
    --service-account-signing-key-file "$work/key" --disable-admission-plugins TaintNodesByCondition
within 600 "the API server is ready" kubectl get --raw /readyz
starts kube-scheduler --kubeconfig "$KUBECONFIG" --leader-elect=false --secure-port=0
controllers=resourceclaim-controller,garbage-collector-controller,daemonset-controller
starts kube-controller-manager --kubeconfig "$KUBECONFIG" --leader-elect=false --secure-port=0 \
    --root-ca-file "$work/certificates/apiserver.crt" \
    --controllers="$controllers,serviceaccount-controller,root-ca-certificate-publisher-controller"
ip route add 10.9.0.0/24 via 10.1.0.9
within 60 "the manifests are applied" kubectl apply -k "$repository/lab/tests/kubelet-driver"
touch ready
within 3600 "the node is Ready" kubectl wait --timeout=60s --for=condition=Ready node/node-1
within 60 "the node is one of Ontime's" kubectl label node node-1 cpu.ontime/node=true
within 3600 "the driver's DaemonSet runs" kubectl -n ontime-system rollout status --timeout=60s daemonset/ontime-dra
within 1200 "the driver publishes the node's CPU time" published
within 60 "the pod is applied" kubectl apply -f "$repository/dra/manifests/examples/pod.yaml"
running control-loop pod
within 60 "the VM's pod is applied" kubectl apply -f "$repository/lab/tests/kubelet-vm.yaml"
running virt-launcher vm
within 3600 "the places are checked" test -e checked
within 3600 "kubelet and the driver have restarted" test -e restarted
step="no container has restarted"
restarts='{range .items[*]}{.status.phase} {.status.containerStatuses[0].restartCount} {end}'
[ "$(kubectl get pods -o "jsonpath=$restarts")" = "Running 0 Running 0 " ]
step="the driver's container has restarted once"
[ "$(kubectl -n ontime-system get pods -o "jsonpath=$restarts")" = "Running 1 " ]
within 600 "the pods are deleted" kubectl delete --ignore-not-found --grace-period=1 pod control-loop virt-launcher
within 3600 "their CPU time is free" test -e free
within 60 "a pod with two claims is applied" kubectl apply -f "$repository/lab/tests/kubelet-refused.yaml"
shows_reason() { kubectl describe pod two-claims | grep 'FailedPrepareDynamicResources.*can use only one'; }
within 3600 "kubectl describe shows the driver's reason" shows_reason
cat "$work/said"
touch refused
wait
