# In the emulated host, method interrupt-context: two RT VMs of one level. One spins, the other receives requests. A
# vCPU with a pending interrupt is raised above the other, which keeps its priority and its cap. kill -9, a restart and
# a reset leave no raised vCPU and no trace instance; the reset restores every policy. The latency of a request is
# measured by `ontime-lab bench xen-arm --beside rt`.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
printf '[[tenant]]\nname = "%s"\nclass = "rt"\nruntime-cap = 0.5\n' rt spin > /etc/ontime/tenants.toml
LAB_VM_MB=128 lab-vm start rt rt rt 10.1.0.2
lab-vm wait rt
LAB_VM_MB=128 lab-vm start spin spin rt 10.1.0.3
lab-vm wait spin
spinner=$(cat /run/lab-vm/spin.pid)
rt=$(thread "$(cat /run/lab-vm/rt.pid)" 'CPU 0/KVM') spin=$(thread "$spinner" 'CPU 0/KVM')
kill -STOP "$spinner"
ip addr add 10.1.0.1/24 dev br-rt
snapshot > /lab/before
daemon_starts
ontime apply --method interrupt-context > /lab/applied || { cat /lab/applied; fail "apply: $?"; }
instances() { ls /sys/kernel/tracing/instances 2> /dev/null | grep -c '^ontime-daemon-' || true; }
expect "trace instances" 1 "$(instances)"
for teller in $(pgrep '^irq_work/'); do expect "place of irq_work" "SCHED_FIFO 55 " "$(place "$teller")"; done
ontime status | grep 'interrupt-context:' && fail "interrupts cannot be followed"

# A request raises the vCPU. Only vhost and the threads that move packets have higher priorities.
raised() { metric 'ontime_boosts_total{domain="rt"'; }
ask() {
    /run/measures chrt -f 60 ping -q -i 0.02 -c "$1" -W 2 10.1.0.2 > /lab/ping || { cat /lab/ping; fail "no answer"; }
}
ask 20
[ "$(raised)" -ge 1 ] || fail "20 requests have put it ahead $(raised) times"
# The spinning VM may use CPU time beyond its cap that no other thread uses. So another thread spins.
sh -c 'while :; do :; done' &
hog=$!
kill -CONT "$spinner"
before=$(uptime_ms) ran=$(awk '{print int($1 / 1000000)}' "/proc/$spin/schedstat")
ask 50
took=$(($(uptime_ms) - before))
share=$((($(awk '{print int($1 / 1000000)}' "/proc/$spin/schedstat") - ran) * 100 / took))
echo "figures: the spinning VM had $share % of the CPU (cap 50) while the other was asked 50 times in $took ms; put ahead $(raised) times"
kill $hog
[ $share -le 55 ] || fail "the spinning VM has more than its cap"
standing() { case $(place "$spin") in "SCHED_FIFO 46 " | "SCHED_IDLE 0 ") ;; *) return 1 ;; esac; }
for _ in 1 2 3 4 5; do standing || fail "the spinning VM stands at $(place "$spin")"; done

# The daemon's death leaves no raised vCPU, no probe, and no thread that spins at real-time priority on the only CPU.
daemon_dies
gone() { [ "$(instances)" = 0 ]; }
within 40 gone
kill -STOP "$spinner"
expect "the vCPU that was asked, after kill -9" "SCHED_FIFO 46 " "$(place "$rt")"
expect "the vCPU that spins, after kill -9" "SCHED_OTHER 0 " "$(place "$spin")"
daemon_starts
ontime apply --method interrupt-context > /lab/applied || fail "apply after kill -9: $?"
ask 20
[ "$(raised)" -ge 1 ] || fail "nothing is told after a restart"

# A vCPU without another one of its level is not raised: its interrupts are not traced.
lab-vm stop spin
settled() { [ "$(ontime ps | grep -c 'CPU 0/KVM')" = 1 ]; }
within 20 settled
ontime apply --method interrupt-context > /lab/applied || fail "apply for one VM: $?"
before=$(raised)
ask 20
expect "times put ahead while alone" "$before" "$(raised)"

# Another method, and a reset.
ontime apply --method partitioned > /lab/applied || fail "apply partitioned: $?"
within 10 gone
expect "the other under partitioned" "SCHED_FIFO 47 " "$(place "$rt")"
ontime apply --method interrupt-context > /lab/applied || fail "apply: $?"
resets
within 10 gone
snapshot > /lab/after
vcpus() { grep -e 'CPU 0/KVM' -e irq_work "$1" | sort -u; }
expect "vCPUs after the reset" "$(vcpus /lab/before)" "$(vcpus /lab/after)"
kill $daemon
wait $daemon || fail "the daemon ended with $?"
