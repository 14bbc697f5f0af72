# In the emulated host: two RT levels, each VM on a NIC of its own. Every thread of a VM's path has its level's
# priority, and interrupt threads of disks and consoles are below. A rule that is switched off restores what it set.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
printf '[[tenant]]\nname = "rt"\nclass = "rt"\nlevel = 0\n[[tenant]]\nname = "rt1"\nclass = "rt"\nlevel = 1\n' > /etc/ontime/tenants.toml
threads() { # VM: its vCPU and vhost threads as NAME TID
    for task in /proc/"$(cat "/run/lab-vm/$1.pid")"/task/*; do
        case $(cat "$task/comm") in CPU*) echo "vcpu ${task##*/}" ;; vhost-*) echo "vhost ${task##*/}" ;; esac
    done
}
irqs() { # NIC: its interrupt threads
    for thread in $(pgrep "^irq/"); do grep -q -- "-$1" "/proc/$thread/comm" && echo "$thread"; done
    true
}
devices() { # interrupt threads of devices that are no NIC, as the kernel's own place, or its second half's
    for thread in $(pgrep "^irq/"); do grep -qE -- '-(rt0|bulk0)' "/proc/$thread/comm" || echo "$thread"; done
}
devices_are() { # POLICY PRIORITY [NICE]: what a thread's nice value would be means nothing while it is SCHED_FIFO
    for thread in $devices; do
        expect "place of $(cat "/proc/$thread/comm")" "$1 $2 " "$(place "$thread")"
        [ -z "${3:-}" ] || expect "nice value of $(cat "/proc/$thread/comm")" "$3" "$(awk '{print $19}' "/proc/$thread/stat")"
    done
}

LAB_VM_MB=128 lab-vm start rt paused rt 10.1.0.2
LAB_VM_MB=128 lab-vm start rt1 paused bulk 10.2.0.2
ontime net status > /lab/before 2>&1 && fail "nothing is applied, and net status calls that well"
devices=$(for thread in $(devices); do [ "$(place "$thread")" != "SCHED_FIFO 50 " ] || echo "$thread"; done)
[ "$(echo "$devices" | wc -w)" -ge 2 ] || fail "a disk and a console have no interrupt threads at FIFO 50: '$devices'"
daemon_starts
ontime net status rt0 bulk0
for level in 0 1; do
    case $level in 0) vm=rt nic=rt0 ;; 1) vm=rt1 nic=bulk0 ;; esac
    down=$((5 * level))
    [ -n "$(pgrep "^napi/$nic")" ] && [ -n "$(threads $vm)" ] || fail "level $level has no threads"
    for thread in $(pgrep "^napi/$nic"); do expect "NAPI of $nic" "SCHED_FIFO $((49 - down)) " "$(place "$thread")"; done
    threads $vm | while read -r role tid; do
        case $role in vcpu) below=3 ;; vhost) below=2 ;; esac
        expect "$role of $vm" "SCHED_FIFO $((50 - down - below)) " "$(place "$tid")"
    done
    for thread in $(irqs $nic); do expect "interrupt of $nic" "SCHED_FIFO $((50 - down)) " "$(place "$thread")"; done
done
devices_are SCHED_OTHER 0 -20
dd if=/dev/vdb of=/dev/null bs=4k count=100 iflag=direct 2> /dev/null || fail "the disk does not answer"
# Switched off: the former values are restored, there is a finding, and the doctor reports it.
printf 'without = ["device-irq"]\n' > /etc/ontime/host.toml
kill -HUP $daemon
sleep 1
devices_are SCHED_FIFO 50
ontime status | grep -q 'rule device-irq is switched off'
ontime doctor --json | tr -d '\n' | grep -q '"id": "device-irq"[^}]*"state": "warning"[^}]*wanted OTHER nice -20' ||
    { ontime doctor --all; exit 1; }
# One NIC for both levels: its threads have the priority of the higher level.
printf '[nic.bulk0]\nclass = "bulk"\n[nic.rt0]\ntenants = ["rt1"]\n[nic.nowhere]\nclass = "rt"\n' > /etc/ontime/host.toml
kill -HUP $daemon
sleep 1
expect "class of bulk0" bulk "$(ontime net status bulk0 | sed -n 's/^bulk0  \([a-z0-9]*\) .*/\1/p')"
ontime net status rt0 | grep -q 'rt0  rt0 (used by rt, rt1)'
ontime status | grep -q 'nowhere.*host-config'
devices_are SCHED_OTHER 0 -20
# A VM on a macvtap: QEMU, whose vCPU never runs here, has a descriptor of the interface's character device.
ip link add v0 type veth peer name v1
ip link add link v0 name mv0 type macvtap mode bridge
qemu-system-x86_64 -name guest=onmacvtap -S -display none -no-user-config -nodefaults -m 16 -netdev tap,id=n,fd=3 \
    -device virtio-net-pci,netdev=n,romfile= 3<> "/dev/tap$(cat /sys/class/net/mv0/ifindex)" > /run/onmacvtap.log 2>&1 &
onmacvtap=$!
on_mv0() { ontime ps --json | tr -d ' \n' | grep -q '"name":"onmacvtap".*"nics":\[{"name":"mv0"'; }
within 30 on_mv0
kill $onmacvtap
resets
devices_are SCHED_FIFO 50
