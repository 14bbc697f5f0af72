# In the emulated host: containers that Podman creates with crun, one RT and one bulk, from an image made here of
# /lab/busybox. The RT container is found by its name. Its process, and a process that is started in it later by exec,
# are placed, and both ends of its veth pair hand packets over by the receiver's NAPI. The bulk container is left
# unchanged. Both answer, and a reset restores everything.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
printf '[[tenant]]\nname = "plc"\nkind = "container"\nclass = "rt"\nlevel = 0\n' > /etc/ontime/tenants.toml
ip address add 10.1.0.1/24 dev br-rt

# An image with busybox. No registry is used.
install -D -m 755 /lab/busybox /run/image/bin/busybox
tar -C /run/image -c . | podman import --quiet - lab-image
start() { # NAME ADDRESS: behind a veth pair on br-rt, as a network plugin makes it
    ip netns add "$1"
    ip link add "v-$1" master br-rt type veth peer name eth0 netns "$1"
    ip link set "v-$1" up
    ip -n "$1" address add "$2/24" dev eth0
    ip -n "$1" link set eth0 up
    podman run --detach --quiet --name "$1" --runtime crun --cgroup-manager cgroupfs --network "ns:/run/netns/$1" lab-image \
        /bin/busybox sleep 10000 > /dev/null
    podman inspect --format '{{.State.Pid}}' "$1"
}
offload() { ethtool -k "$1" | sed -n "s/^$2: \([a-z]*\).*/\1/p"; } # NIC WHICH
within_ns() { nsenter -t "$plc" -n ethtool -k eth0 | sed -n "s/^$1: \([a-z]*\).*/\1/p"; }

hog=$(start hog 10.1.0.8)
snapshot > /lab/before
daemon_starts
plc=$(start plc 10.1.0.9)
cat "/proc/$plc/cgroup"
within 40 placed "$plc" "SCHED_FIFO 47"
podman exec --detach plc /bin/busybox sleep 20000
within 40 pgrep -x -f '/bin/busybox sleep 20000'
within 40 placed "$(pgrep -x -f '/bin/busybox sleep 20000')" "SCHED_FIFO 47"
expect "the bulk container" "SCHED_OTHER 0 " "$(place "$hog")"
ontime ps | tee /lab/ps
grep -Eq '^plc +container +rt0 +.*tenants.toml' /lab/ps || fail "ontime ps has no container plc"
grep -Eq '^hog +container +bulk ' /lab/ps || fail "ontime ps has no container hog"
within 40 sh -c '[ "$(ethtool -k v-plc | sed -n "s/^generic-receive-offload: \([a-z]*\).*/\1/p")" = on ]'
expect "TSO of v-plc" off "$(offload v-plc tcp-segmentation-offload)"
expect "GRO of the far end" on "$(within_ns generic-receive-offload)"
expect "TSO of the far end" off "$(within_ns tcp-segmentation-offload)"
expect "GRO of v-hog" off "$(offload v-hog generic-receive-offload)"
within 40 pgrep '^napi/v-plc'
for thread in $(pgrep '^napi/v-plc'); do expect "NAPI of v-plc" "SCHED_FIFO 49 " "$(place "$thread")"; done
for address in 10.1.0.8 10.1.0.9; do ping -q -c 20 -i 0.02 $address || fail "$address does not answer"; done

# After a restart the container has another process, which is placed again. A removed container is no tenant.
podman restart --time 0 plc > /dev/null
plc=$(podman inspect --format '{{.State.Pid}}' plc)
within 40 placed "$plc" "SCHED_FIFO 47"
podman rm --force --time 0 plc > /dev/null
within 40 sh -c "! ontime ps --json | grep -q '\"plc\"'"

resets
ip link del v-plc
snapshot > /lab/after
diff /lab/before /lab/after || fail "not as it was"
podman rm --force --time 0 hog > /dev/null
kill $daemon
wait $daemon || fail "the daemon ended with $?"
