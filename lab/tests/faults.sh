# Changes of links, drivers, queues, sysctls and of the daemon itself under traffic. Sourced by path.sh; the daemon runs
# with rescan-seconds = 1 and has applied.
napi_placed() { # NIC 'PLACE' [FORMER-NAME]: it is threaded, and every one of its threads is there
    # A thread keeps the name that the NIC had when the daemon made it threaded.
    threads=$(pgrep "^napi/($1|${3:-$1})-")
    [ "$(cat "/sys/class/net/$1/threaded")" = 1 ] && [ -n "$threads" ] || return 1
    for napi in $threads; do placed "$napi" "$2" || return 1; done
}
echo "== ifdown, ifup, rename under traffic"
for nic in rt0 bulk0; do
    ip link set $nic down
    sleep 0.2
    ip link set $nic up
done
within 40 napi_placed rt0 "SCHED_FIFO 49"
within 40 napi_placed bulk0 "SCHED_OTHER 0"
ip link set bulk0 down
ip link set bulk0 name wan0
ip link set wan0 up
renamed() { ontime status --all | grep -q '^ok *napi-threaded *wan0 '; }
within 40 renamed
ip link set wan0 down
ip link set wan0 name bulk0
ip link set bulk0 up
within 40 napi_placed bulk0 "SCHED_OTHER 0"
flows

echo "== driver unbound and bound under traffic"
device=$(basename "$(readlink -f /sys/class/net/rt0/device)")
driver=$(readlink -f "/sys/bus/pci/devices/$device/driver")
echo "$device" > "$driver/unbind"
sleep 0.5
echo "$device" > "$driver/bind"
within 10 test -e "/sys/bus/pci/devices/$device/net"
new=$(ls "/sys/bus/pci/devices/$device/net")
[ "$new" = rt0 ] || ip link set "$new" name rt0
ip link set rt0 master br-rt up
within 40 napi_placed rt0 "SCHED_FIFO 49" "$new"

echo "== given back while an interface is down"
# On an interface that is down the kernel would never finish ending the NAPI threads, and every program that uses an
# interface would block after that.
ip link set bulk0 down
status=0
ontime reset > /lab/reset 2>&1 || status=$?
[ $status -eq 1 ] && grep -q 'bulk0 is down' /lab/reset ||
    fail "reset of an interface that is down: status $status: $(cat /lab/reset)"
expect "threading of an interface that is down" 1 "$(cat /sys/class/net/bulk0/threaded)"
ip link set bulk0 up
resets
expect "threading of an interface that is up again" 0 "$(cat /sys/class/net/bulk0/threaded)"
# An interface that is down when Ontime is applied becomes threaded only when it comes up, so that a reset before that
# is possible.
ip link set bulk0 down
ontime apply > /dev/null
expect "threading of an interface that is down" 0 "$(cat /sys/class/net/bulk0/threaded)"
ip link set bulk0 up
within 40 napi_placed bulk0 "SCHED_OTHER 0"
flows 40

echo "== queues"
ip link add q0 numrxqueues 4 numtxqueues 4 type veth peer name q1
ethtool -K q0 gro on
ethtool -L q0 rx 1 tx 1
ip link set q1 up
ip link set q0 up
queues() { [ "$(pgrep -c '^napi/q0')" = "$1" ] && napi_placed q0 "SCHED_OTHER 0"; }
within 40 queues 1
ethtool -L q0 rx 4 tx 4
within 40 queues 4
ethtool -L q0 rx 2 tx 2
within 40 queues 2
ip link del q0

echo "== a sysctl behind the daemon's back"
drifted=$(metric ontime_drift_total)
echo 64 > /proc/sys/net/core/skb_defer_max
within 40 grep -qx 0 /proc/sys/net/core/skb_defer_max
more_drift() { [ "$(metric ontime_drift_total)" -gt "$drifted" ]; }
within 40 more_drift
grep -q 'skb_defer_max was changed to 64 by another program' $log || fail "the log does not say so"

echo "== a full disk"
kill $daemon
wait $daemon || true
resets
mkdir -p /run/small
mount -t tmpfs -o size=64k tmpfs /run/small
head -c 1M /dev/zero > /run/small/filler 2> /dev/null || true
daemon_starts --state-dir /run/small
full() { ontime status | grep -q 'No space left on device'; }
within 10 full
expect "the RT vCPU where originals cannot be kept" "SCHED_OTHER 0 " "$(place "$rt_vcpu")"
expect "skb_defer_max where originals cannot be kept" "$(sed -n 's|^/proc/sys/net/core/skb_defer_max ||p' /lab/before)" \
    "$(cat /proc/sys/net/core/skb_defer_max)"
rm /run/small/filler
within 10 placed "$rt_vcpu" "SCHED_FIFO 47"
resets
kill $daemon
wait $daemon || true

echo "== killed while it applies, and while it resets"
for delay in 0.02 0.1 0.3; do
    daemon_starts
    resets
    ontime apply > /dev/null 2>&1 &
    asked=$!
    sleep $delay
    daemon_dies
    within 30 is_over $asked
    daemon_starts
    within 5 placed "$rt_vcpu" "SCHED_FIFO 47"
    ontime reset > /dev/null 2>&1 &
    asked=$!
    sleep $delay
    daemon_dies
    # A client that finds no daemon any more resets by itself.
    within 30 is_over $asked
    resets
    expect "the RT vCPU after kill -9 and reset" "SCHED_OTHER 0 " "$(place "$rt_vcpu")"
done
flows
! grep 'thread .* (ontime) of process' $log || fail "the guardian of a killed daemon was taken for a stranger"
