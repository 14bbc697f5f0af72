# In the emulated host, 6.12 with PREEMPT_RT: the host module alone, then rule napi-weight, compared with the budget of
# each poll in the kernel's own tracepoint. The traffic is pings to the client's side.
set -eu
. /lab/lib.sh
weight() { cat "/sys/class/net/$1/ontime/napi_weight"; }
trace=/sys/kernel/tracing
budget() { # NIC: the largest of its rounds' budgets while packets come
    echo > $trace/trace
    echo 1 > $trace/events/napi/napi_poll/enable
    ping -q -c 3 -i 0.2 -I "$2" 10.2.0.1 > /dev/null || fail "no answer by $1"
    echo 0 > $trace/events/napi/napi_poll/enable
    sed -n "s/.*for device $1 .*budget //p" $trace/trace | sort -n | tail -n 1
}
refused() { # VALUE
    ! env echo "$1" 2> /lab/refused > /sys/class/net/bulk0/ontime/napi_weight || fail "napi_weight took '$1'"
    grep -q "$2" /lab/refused || fail "'$1': wanted '$2', found '$(cat /lab/refused)'"
}
ip addr add 10.2.0.9/24 dev br-bulk
within 20 ping -q -c 1 -W 1 10.2.0.1 # its link may not be up yet
expect "budget before the module" 64 "$(budget bulk0 br-bulk)"

insmod /lab/ontime_napi.ko
expect "weight at first" default "$(weight bulk0)"
[ -e /sys/class/net/br-rt/ontime/napi_weight ] || fail "a bridge has no file"
echo 4 > /sys/class/net/bulk0/ontime/napi_weight
expect "weight set" 4 "$(weight bulk0)"
expect "the kernel's budget" 4 "$(budget bulk0 br-bulk)"
expect "another NIC's weight" default "$(weight rt0)"
for value in 0 65 -1; do refused $value 'Numerical result'; done
for value in four '' 4x; do refused "$value" 'Invalid argument'; done
! setpriv --bounding-set -net_admin --inh-caps -net_admin sh -c 'echo 8 > /sys/class/net/bulk0/ontime/napi_weight' 2> /dev/null ||
    fail "the weight was set without CAP_NET_ADMIN"
echo 64 > /sys/class/net/bulk0/ontime/napi_weight
expect "the driver's own, as a limit" 64 "$(budget bulk0 br-bulk)"
echo 8 > /sys/class/net/bulk0/ontime/napi_weight
ip link set bulk0 down
expect "weight while it is down" 8 "$(weight bulk0)"
ip link set bulk0 up
within 10 ping -q -c 1 -W 1 10.2.0.1
expect "budget after ifdown and ifup" 8 "$(budget bulk0 br-bulk)"
echo default > /sys/class/net/bulk0/ontime/napi_weight
expect "budget of the driver again" 64 "$(budget bulk0 br-bulk)"

# NAPI instances that are added later get the weight too. It ends with the interface, or when that moves to another
# namespace.
ip netns add away
ip link add v0 type veth peer name v1
echo 2 > /sys/class/net/v0/ontime/napi_weight
ethtool -K v0 gro on
ip link set v0 up
expect "weight of instances made since" 2 "$(weight v0)"
ip link set v0 netns away
expect "weight in another namespace" default "$(ip netns exec away cat /sys/class/net/v0/ontime/napi_weight)"
echo 2 > /sys/class/net/v1/ontime/napi_weight
ip link del v1
for _ in $(seq 5); do
    ip link add v0 type veth peer name v1
    while cat /sys/class/net/v0/ontime/napi_weight; do :; done > /dev/null 2>&1 &
    reader=$!
    while echo 3 > /sys/class/net/v1/ontime/napi_weight; do :; done 2> /dev/null &
    writer=$!
    ip link del v0
    wait $reader || true
    wait $writer || true
done
echo 4 > /sys/class/net/bulk0/ontime/napi_weight
rmmod ontime_napi
[ ! -e /sys/class/net/bulk0/ontime ] || fail "a file outlives the module"
expect "budget after the module" 64 "$(budget bulk0 br-bulk)"

# The rule: reported while the module is missing, applied while it is loaded, undone by a reset.
row() { # WORD: what `ontime doctor` says of the rule has it
    ontime doctor --json > /lab/doctor.json || true
    perl -0777 -ne 'print $1 if /\{[^{}]*"id":\s*"napi-weight"([^{}]*)/' /lab/doctor.json > /lab/row
    grep -q "$1" /lab/row || fail "doctor: wanted '$1', found '$(cat /lab/row)'"
}
mkdir -p /etc/ontime
printf '[nic.rt0]\nclass = "rt"\n' > /etc/ontime/host.toml
row 'modprobe ontime_napi'
insmod /lab/ontime_napi.ko
row 'bulk0 ontime/napi_weight: default, wanted 4'
printf 'rescan-seconds = 1\n' > /etc/ontime/daemon.toml
daemon_starts
weighs() { [ "$(weight "$1")" = "$2" ]; }
within 40 weighs bulk0 4
expect "the RT NIC's weight" default "$(weight rt0)"
expect "the backlog's weight" 4 "$(cat /proc/sys/net/core/dev_weight)"
row '"state": *"ok"'
ontime net status bulk0 | grep -q 'napi_weight' || fail "net status does not show it"
echo default > /sys/class/net/bulk0/ontime/napi_weight
within 40 weighs bulk0 4
ip link set bulk0 down
ip link set bulk0 up
within 40 weighs bulk0 4
# Unloaded and loaded again while applied.
rmmod ontime_napi
row 'modprobe ontime_napi'
insmod /lab/ontime_napi.ko
within 40 weighs bulk0 4
expect "the kernel's budget under the rule" 4 "$(budget bulk0 br-bulk)"
resets
expect "weight after reset" default "$(weight bulk0)"
expect "the backlog's weight after reset" 64 "$(cat /proc/sys/net/core/dev_weight)"
kill $daemon
wait $daemon || fail "the daemon ended with $?"
rmmod ontime_napi
! dmesg | grep -E 'BUG:|WARNING:|Oops|INFO: task' || fail "the kernel complains"
