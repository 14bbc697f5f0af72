# In the emulated host: methods vatc, prio and fq_codel on a shared NIC with real VMs; a reset restores everything.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
printf '[[tenant]]\nname = "rt"\nclass = "rt"\nlevel = 0\n' > /etc/ontime/tenants.toml
root() { tc qdisc show dev "$1" | sed -n 's/^qdisc \([a-z_]*\) .*root.*/\1/p'; }
vhost() {
    for task in /proc/"$(cat "/run/lab-vm/$1.pid")"/task/*; do case $(cat "$task/comm") in vhost-*) echo "${task##*/}" ;; esac; done
}

LAB_VM_MB=128 lab-vm start rt paused rt 10.1.0.2
LAB_VM_MB=128 lab-vm start bulk paused rt 10.1.0.3
tc qdisc show > /lab/before
before=$(root rt0)
daemon_starts
for method in prio fq_codel; do
    applies $method
    for nic in rt0 t-rt t-bulk; do expect "$method: root qdisc of $nic" $method "$(root $nic)"; done
    expect "$method: the RT VM's vhost thread" "SCHED_OTHER 0 " "$(place "$(vhost rt)")"
done
applies prio
tc filter show dev rt0 egress | grep -q 'priority :6\|priority 6\|prio' ||
    fail "no filter gives RT packets the first band"
applies vatc
expect "vatc: root qdisc of rt0" "$before" "$(root rt0)"
expect "vatc: the RT VM's vhost thread" "SCHED_FIFO 48 " "$(place "$(vhost rt)")"
# The NIC has one transmit queue. So a thread that sends on it for a bulk tenant is above all non-real-time threads.
expect "vatc: the bulk VM's vhost thread" "SCHED_FIFO 1 " "$(place "$(vhost bulk)")"
for thread in $(pgrep '^napi/rt0'); do expect "vatc: receive thread of the shared NIC" "SCHED_FIFO 49 " "$(place "$thread")"; done
applies prio
expect "prio after vatc: the bulk VM's vhost thread" "SCHED_OTHER 0 " "$(place "$(vhost bulk)")"
resets
tc qdisc show > /lab/after
diff /lab/before /lab/after || fail "not all qdiscs are as before"
# A qdisc that an administrator configured is not replaced.
tc qdisc add dev rt0 root handle 1: pfifo limit 500
ontime apply --method prio > /lab/refused || true
expect "the administrator's qdisc" pfifo "$(root rt0)"
grep -q 'pfifo 1: was set by the administrator' /lab/refused || fail "no finding says that the administrator's qdisc stays"
resets
