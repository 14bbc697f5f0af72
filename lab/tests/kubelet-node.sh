#!/bin/sh
# In the emulated host (cgroup v2, PREEMPT_RT): a node with the daemon, Debian's containerd and runc, and kubelet. The
# control plane is at the clients' side (kubelet-cluster.sh), which applies the driver's DaemonSet, a pod with CPU time
# and one that runs a VM, and says in /lab/pod and /lab/vm which containers run. The trace must show that their threads
# get their places within LIMIT_MS (50) of their start. They must keep places and CPU time while kubelet and the driver
# restart. Then deleted pods must leave nothing reserved, and a claim that the driver refuses must show its reason. /lab
# has bin, cni, image.tar, kubeconfig and the time.
set -eu
export PATH=/run/node/bin:$PATH
limit=${LIMIT_MS:-50} failed='' pids=''
starts() { # LOG PROGRAM ARGUMENTS...
    log=$1
    shift
    "$@" >> "/lab/$log.log" 2>&1 &
    pids="$pids $!"
}
uptime_s() { cut -d. -f1 /proc/uptime; }
ended() { # STATUS
    [ "$1" -ne 0 ] || return 0
    for log in /lab/daemon.log /lab/containerd.log /var/log/pods/ontime-system_*/ontime-dra/*.log /lab/kubelet.log; do
        echo "== the end of $log:"
        tail -n 25 "$log" 2> /dev/null || true
    done
    [ ! -e /lab/described ] || cat /lab/described
}
trap 'ended $?' EXIT
within() { # SECONDS WHAT COMMAND...: until the command succeeds
    end=$(($(uptime_s) + $1)) what=$2
    shift 2
    until "$@"; do
        for pid in $pids; do
            kill -0 "$pid" 2> /dev/null || { echo "FAILED: a program has ended before: $what"; exit 1; }
        done
        [ ! -e /lab/failed ] || { echo "FAILED: the control plane has ended at: $(cat /lab/failed)"; exit 1; }
        [ "$(uptime_s)" -lt "$end" ] || { echo "FAILED: not in time: $what"; exit 1; }
        sleep 0.5
    done
    echo "$what ($(uptime_s) s on the emulated clock)"
}
answers() { "$@" > /dev/null 2>&1; }
shows_method() { ontime status 2> /dev/null | grep -q ^method; }

date -s "@$(cat /lab/now)" > /dev/null
mkdir -p /run/node/net.d /etc/ontime /var/lib/kubelet/plugins_registry
cp -r /lab/bin /lab/cni /run/node/
ip address add 10.1.0.9/24 dev br-rt
ip route add default via 10.1.0.1
modprobe -a overlay veth || true
mount --make-rshared /
echo "nameserver 10.1.0.1" > /run/node/resolv.conf
echo "reserve = 0.05" > /etc/ontime/sched.toml
[ -e /etc/hosts ] || echo "127.0.0.1 localhost" > /etc/hosts
touch /lab/prepared
cat > /run/node/net.d/pods.conflist << 'FILE'
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
   "ipam": {"type": "host-local", "subnet": "10.9.0.0/24"}}]}
FILE
cat > /run/node/containerd.toml << 'FILE'
version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "registry.example/pause:1"
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/run/node/cni"
conf_dir = "/run/node/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
FILE
cat > /run/node/kubelet.yaml << 'FILE'
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
resolvConf: /run/node/resolv.conf
makeIPTablesUtilChains: false
failSwapOn: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: "1Mi", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%"}
FILE

ip tuntap add t-plc mode tap vnet_hdr
ip link set t-plc master br-rt up

trace=/sys/kernel/tracing/instances/node
mkdir $trace
echo 16384 > $trace/buffer_size_kb
# sched_setattr(pid, attr): the wrapper's argument is the caller's registers, of which di and si have the two.
echo 'p:place __x64_sys_sched_setattr pid=+112(%di):u32 policy=+u4(+104(%di)):u32 priority=+u20(+104(%di)):u32' \
    >> /sys/kernel/tracing/kprobe_events
for event in sched/sched_process_exec task/task_newtask kprobes/place; do
    echo 1 > $trace/events/$event/enable
done

starts daemon ontime daemon
within 120 "the daemon answers" shows_method
starts containerd containerd --config /run/node/containerd.toml
within 300 "containerd answers" answers ctr version
ctr --namespace k8s.io images import /lab/image.tar
within 1800 "the control plane answers" test -e /lab/ready
kubelet_runs() {
    starts kubelet kubelet --config /run/node/kubelet.yaml --kubeconfig /lab/kubeconfig --hostname-override node-1 \
        --node-ip 10.1.0.9 --cert-dir /run/node/pki --v=2
    kubelet=$!
}
ends() { # PID: ends a program as its service would be stopped, and waits for its end
    pids=$(echo "$pids" | sed "s/ $1\b//")
    kill "$1"
    wait "$1" || true
}
kubelet_runs

first() { # PATTERN: the time of the first such line of the trace, s
    awk -v pattern="$1" '$0 ~ pattern {
        for (word = 1; word <= NF; word++) if ($word ~ /^[0-9]+[.][0-9]+:$/) { sub(/:$/, "", $word); print $word; exit }
    }' /run/node/trace
}
is_fifo() { chrt -p "$1" | tr '\n' ' ' | grep -Eq "SCHED_FIFO.* priority: (${2:-[0-9]+}) "; }
# WHAT TID PRIORITY PATTERN: the thread is at FIFO PRIORITY (47 or 46: planned or entitled to its CPU time), and got
# this place soon after the trace's first line with the pattern. Other places of the thread do not count.
check() {
    within 30 "$1 is at FIFO $3" is_fifo "$2" "$3"
    cat $trace/trace > /run/node/trace
    start=$(first "$4") got=$(first " place: .* pid=$2 policy=1 priority=($3)$")
    [ -n "$start" ] && [ -n "$got" ] || { echo "FAILED: no start ($start) or place ($got) in the trace: $4"; exit 1; }
    delay=$(awk "BEGIN { print ($got - $start) * 1000 }")
    echo "figures: $1: its place $delay ms after its start; $(chrt -p "$2" | tr '\n' ' ')"
    if awk "BEGIN { exit !($delay > $limit) }"; then
        echo "FAILED: more than $limit ms"
        failed=yes
    fi
}
container() { # FILE: the first process of the container that the file names
    read -r uid id < "$1"
    head -n 1 /sys/fs/cgroup/kubepods/*/pod"$uid"/"${id#*://}"/cgroup.procs
}

within 3600 "the pod is Running" test -e /lab/pod
main=$(container /lab/pod)
check "the pod's program" "$main" "47|46" "sched_process_exec: filename=/bin/busybox pid=$main "
ontime top --once --interval 0.1 | grep '^requested: dra-.*bound'

within 3600 "the VM's pod is Running" test -e /lab/vm
main=$(container /lab/vm)
thread() { tid=$(grep -l "^$1" /proc/"$main"/task/*/comm | head -n 1 | cut -d/ -f5) && [ -n "$tid" ]; }
for place in "CPU 0/KVM:47|46" vhost-:48; do
    name=${place%:*}
    within 60 "the VM has a thread $name" thread "$name"
    check "the VM's thread $name" "$tid" "${place#*:}" "task_newtask: pid=$tid "
done
# The main thread has the class's place of a VM's monitor, as that of a libvirt VM.
within 30 "the VM's main thread has its place" is_fifo "$main" 3
echo "main thread: $(chrt -p "$main" | tr '\n' ' ')"
requested() { ontime top --once --interval 0.1 > /run/node/top && grep '^requested: dra-' /run/node/top; }
requested
touch /lab/checked

# kubelet and the driver restart while the pods run: containers, places and reservations stay. The driver's lease is
# 30 s, so after 60 s only a driver that knows its claims again has kept them.
state() {
    requested | sed 's/, [0-9]* s left$//' | sort
    for file in /lab/pod /lab/vm; do
        main=$(container "$file")
        # A thread that has used its runtime cap is at SCHED_IDLE until its next period.
        within 30 "process $main has its place" is_fifo "$main" > /dev/null
        echo "$main $(chrt -p "$main" | tr '\n' ' ')"
    done
}
as_before() { # WHAT
    sleep 60
    state > /run/node/after
    if ! cmp /run/node/before /run/node/after; then
        echo "FAILED: after a restart of $1 another state than before:"
        cat /run/node/before /run/node/after
        exit 1
    fi
    echo "after a restart of $1 the places and the reservations are as before"
}
state > /run/node/before
ends "$kubelet"
kubelet_runs
within 600 "the new kubelet answers" answers busybox wget -q -O /dev/null http://127.0.0.1:10248/healthz
as_before kubelet
driver=$(pgrep -x ontime-dra)
kill -KILL "$driver"
new_driver() { now=$(pgrep -x ontime-dra) && [ "$now" != "$driver" ]; }
within 600 "kubelet has started the driver again" new_driver
as_before "the driver"
touch /lab/restarted

# The control plane deletes both pods.
nothing_requested() { ontime top --once --interval 0.1 > /run/node/top && ! grep -q '^requested: dra-' /run/node/top; }
within 1200 "the pods' CPU time is free" nothing_requested
touch /lab/free
within 1800 "kubectl describe shows why the driver refuses a claim" test -e /lab/refused
[ -z "$failed" ]
