# In the emulated host, 6.12 with PREEMPT_RT, two CPUs: first the polling threads of the host module alone, then method
# busypoll with them. That NIC has no receive interrupt and no NET_RX softirq, the rest of the host continues to work,
# and a reset, ifdown or rmmod restores everything.
set -eu
. /lab/lib.sh
file=/sys/class/net/rt0/ontime/busy_poll
interrupts() { awk '/rt0-rx/ {sum += $2 + $3} END {print sum + 0}' /proc/interrupts; }
threads() { pgrep -c '^napi-poll/rt0' || true; }
knobs() { cat /sys/class/net/rt0/napi_defer_hard_irqs /sys/class/net/rt0/gro_flush_timeout; }
traffic() {
    ping -q -c "$1" -i 0.02 10.2.0.1 > /lab/ping 2>&1 && ping -q -c "$1" -i 0.02 -I br-rt 10.1.0.1 > /lab/ping 2>&1 || fail "no reply: $(cat /lab/ping)"
}
ip addr add 10.1.0.9/24 dev br-rt
ip addr add 10.2.0.9/24 dev br-bulk
# A link is up some seconds after its interface.
within 30 ping -q -c 1 -w 1 10.2.0.1
within 30 ping -q -c 1 -w 1 -I br-rt 10.1.0.1
before=$(interrupts)
traffic 50
[ $(($(interrupts) - before)) -ge 25 ] ||
    fail "fifty packets raised $(($(interrupts) - before)) interrupts; this test counts the wrong ones"
own=$(knobs)

insmod /lab/ontime_napi.ko
expect "polled at first" 0 "$(cat $file)"
! echo 1 2> /lab/refused > /sys/class/net/br-rt/ontime/busy_poll || fail "a bridge is polled"
for value in 2x -1 ''; do ! env echo "$value" 2> /dev/null > $file || fail "busy_poll took '$value'"; done
! setpriv --bounding-set -net_admin --inh-caps -net_admin sh -c "echo 1 > $file" 2> /dev/null ||
    fail "it was set without CAP_NET_ADMIN"
echo 1 > $file
expect "polled" 1 "$(cat $file)"
[ "$(threads)" -ge 1 ] || fail "no thread polls"
traffic 3
before=$(interrupts)
traffic 50
echo "figures: the module's threads: $(($(interrupts) - before)) receive interrupts for 50 replies"
# If a thread gets no CPU time for 4 ms, because of this host or of the machine, its interrupt is enabled.
[ $(($(interrupts) - before)) -le 10 ] || fail "$(($(interrupts) - before)) receive interrupts while it is polled"
# Removing a tracer waits for every task, also for one that never sleeps.
mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
tracer=/sys/kernel/tracing/instances/away
mkdir $tracer
echo vfs_read > $tracer/set_ftrace_filter
echo function > $tracer/current_tracer
{ echo nop > $tracer/current_tracer; touch /run/away; } &
within 30 [ -e /run/away ]
rmdir $tracer
# ifdown and ifup, also in quick succession; then the module is unloaded while it polls.
ip link set rt0 down
expect "threads while it is down" 0 "$(threads)"
ip link set rt0 up
[ "$(threads)" -ge 1 ] || fail "no thread polls after ifup"
within 10 ping -q -c 1 -W 1 -I br-rt 10.1.0.1
for _ in $(seq 20); do echo 0 > $file; echo 1 > $file; done
traffic 10
rmmod ontime_napi
expect "threads after the module" 0 "$(threads)"
expect "deferral after the module" "$own" "$(knobs)"
traffic 10

# Method busypoll with the module.
mkdir -p /etc/ontime
printf '[nic.rt0]\nclass = "rt"\npoll_cpu = 1\n' > /etc/ontime/host.toml
daemon_starts
ontime apply --method busypoll > /lab/applied 2>&1 || true
grep -q 'modprobe ontime_napi' /lab/applied || fail "nobody says that the module is missing: $(cat /lab/applied)"
resets
insmod /lab/ontime_napi.ko
ontime apply --method busypoll > /lab/applied 2>&1 || true
polls() { [ "$(cat $file)" = 1 ]; }
within 40 polls
thread=$(pgrep '^napi-poll/rt0' | head -n 1)
within 10 placed "$thread" "SCHED_FIFO 1"
expect "its CPU" 1 "$(taskset -cp "$thread" | sed 's/.*: //')"
traffic 3
before=$(interrupts)
traffic 50
echo "figures: busypoll on 6.12: $(($(interrupts) - before)) receive interrupts for 50 replies"
[ $(($(interrupts) - before)) -le 10 ] || fail "$(($(interrupts) - before)) receive interrupts under busypoll"
timeout 100 taskset -c 1 sh -c 'sleep 0.1; cat /proc/stat > /dev/null' ||
    fail "bulk work on the CPU that polls starves ($?)"
timeout 100 sh -c 'ip link add d0 type bridge && ip link del d0' || fail "RCU or workqueues starve ($?)"
! dmesg | grep -qi 'rcu.*stall' || fail "RCU stalled"
resets
expect "polled after reset" 0 "$(cat $file)"
expect "threads after reset" 0 "$(threads)"
expect "deferral after reset" "$own" "$(knobs)"
kill $daemon
wait $daemon || fail "the daemon ended with $?"
rmmod ontime_napi
! dmesg | grep -E 'BUG:|WARNING:|Oops|INFO: task' || fail "the kernel complains"
