# In the emulated host with two CPUs: a CPU goes offline and comes back while vCPUs are paced. The reservation that fits
# on one CPU is kept. The other is refused, the report names its VM, and the VM continues to run. Both are enforced
# again when the CPU is back. This is repeated ten times at arbitrary moments, and once with the daemon killed
# meanwhile. Bulk work continues, and a reset restores every policy.
set -eu
. /lab/lib.sh
cpu=/sys/devices/system/cpu/cpu1/online
mkdir -p /etc/ontime
for vm in a b; do
    # When its reservation is refused, a VM spins at real-time priority under its cap. This script needs CPU time as
    # well.
    printf '[[tenant]]\nname = "%s"\nclass = "rt"\nruntime-cap = 0.2\n' $vm >> /etc/ontime/tenants.toml
    LAB_VM_MB=128 lab-vm start $vm spin rt "10.1.0.$([ $vm = a ] && echo 2 || echo 3)"
    lab-vm wait $vm
    eval "pid_$vm=$(cat /run/lab-vm/$vm.pid)"
    eval "vcpu_$vm=$(thread "$(cat /run/lab-vm/$vm.pid)" 'CPU 0/KVM')"
    kill -STOP "$(cat /run/lab-vm/$vm.pid)" # it would only make the rest slow
done
reserve() { printf '[[reservation]]\nname = "%s"\nbudget = "%s"\nperiod = "20ms"\n' "$1" "$2"; }
# Most of both CPUs is left for the daemon and for this script.
{ echo 'reserve = 0.8'; reserve a 2ms; reserve b 3ms; } > /etc/ontime/sched.toml
snapshot > /lab/before
look() { ontime top --once --json --interval 0.1; }
stands() { look | tr '{' '\n' | grep "\"vm\":\"$1\"" | grep -q '"period_us":20000'; } # VM
both() { stands a && stands b; }
one() {
    look > /lab/look && grep -q '"cpus":\[0\]' /lab/look && { stands a || stands b; } && ontime top --once --interval 0.1 | grep -q '^refused: '
}
ran() { cut -d' ' -f1 "/proc/$1/schedstat"; } # TID: ns so far

nice -n 19 sh -c 'while :; do :; done' &
bulk=$!
kill -CONT "$pid_a" "$pid_b"
daemon_starts
within 240 both
look | grep -q '"cpus":\[0,1\]' || fail "not both CPUs: $(look)"

echo 0 > $cpu
within 240 one
ontime top --once --interval 0.1
before_a=$(ran "$vcpu_a") before_b=$(ran "$vcpu_b") before_bulk=$(ran $bulk)
sleep 5
a=$((($(ran "$vcpu_a") - before_a) / 1000000)) b=$((($(ran "$vcpu_b") - before_b) / 1000000)) bulk_ms=$((($(ran $bulk) - before_bulk) / 1000000))
echo "one CPU: a ran $a ms, b $b ms, bulk $bulk_ms ms of 5,000"
[ "$a" -gt 0 ] && [ "$b" -gt 0 ] && [ "$bulk_ms" -gt 0 ] || fail "somebody starves on one CPU"
echo 1 > $cpu
within 240 both

# At arbitrary moments of a slice, and faster than the daemon checks the CPUs.
for pause in 0.01 0.3 0.07 1.1 0 0.5 0.02 2 0.15 0.003; do
    echo 0 > $cpu
    sleep $pause
    echo 1 > $cpu
    sleep $pause
    ontime status > /dev/null || [ $? -le 2 ] || fail "the daemon is gone"
done
within 240 both
kill -0 $daemon || fail "the daemon is gone"

# The daemon and its pacers die while their CPU is offline.
echo 0 > $cpu
daemon_dies
for vm in a b; do eval "within 60 placed \$vcpu_$vm 'SCHED_OTHER 0'"; done
daemon_starts
within 240 one
echo 1 > $cpu
within 240 both

kill $bulk
resets
kill -STOP "$pid_a" "$pid_b"
vcpus() { grep 'CPU 0/KVM' "$1" | sort -u; }
snapshot > /lab/after
expect "vCPUs after the reset" "$(vcpus /lab/before)" "$(vcpus /lab/after)"
kill $daemon
wait $daemon || fail "the daemon ended with $?"
