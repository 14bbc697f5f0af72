# In the emulated host: a libvirt VM, a plain QEMU VM and a container (systemd-nspawn) that already run are found,
# classified and placed. Tenants start and stop; libvirt's hook notifies the daemon.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime /etc/libvirt/hooks/qemu.d /run/box
box=/sys/fs/cgroup/machine.slice/systemd-nspawn@box.service
mkdir -p $box
cp /lab/hook /etc/libvirt/hooks/qemu.d/ontime
cat > /etc/ontime/tenants.toml << 'TOML'
[[tenant]]
name = "plain"
kind = "qemu"
class = "rt"
level = 1

[[tenant]]
name = "box"
kind = "container"
class = "rt"
level = 3
TOML
printf 'rescan-seconds = 3600\n' > /etc/ontime/daemon.toml
lab-libvirt up
lab-libvirt define lv rt rt 10.1.0.2 'class="rt" level="0" runtime-cap="0.8"'
for nic in rt bulk; do ip address add "10.$([ $nic = rt ] && echo 1 || echo 2).0.9/24" dev br-$nic; done
snapshot > /lab/before
lab-vm start plain rt bulk 10.2.0.2
lab-vm wait plain
daemon_starts

# Two more tenants start: only events notify the daemon.
virsh -q start lv
mount --bind / /run/box
# As systemd-nspawn@.service does, without systemd.
sh -c "echo \$\$ > $box/cgroup.procs; exec systemd-nspawn --quiet --keep-unit --register=no --link-journal=no --machine=box \
    --network-veth --volatile=overlay -D /run/box -- sleep 10000" > /lab/nspawn.log 2>&1 &
lab-vm wait lv
ping -q -c 200 -i 0.02 10.1.0.2 > /lab/ping-lv &
traffic=$!
ping -q -c 20 -i 0.02 10.2.0.2 > /lab/ping-plain || fail "the QEMU VM does not answer"
lv=$(cat /run/libvirt/qemu/lv.pid) plain=$(cat /run/lab-vm/plain.pid)
within 40 placed "$(thread "$lv" 'CPU 0/KVM')" "SCHED_FIFO 47"
within 40 placed "$(thread "$plain" 'CPU 0/KVM')" "SCHED_FIFO 42"
expect "libvirt's vhost" "SCHED_FIFO 48 " "$(place "$(thread "$lv" 'vhost-*')")"
expect "QEMU's vhost" "SCHED_FIFO 43 " "$(place "$(thread "$plain" 'vhost-*')")"
expect "libvirt's iothread" "SCHED_OTHER 0 " "$(place "$(thread "$lv" 'IO iothread1')")"
within 40 pgrep -x -f 'sleep 10000'
within 40 placed "$(pgrep -x -f 'sleep 10000')" "SCHED_FIFO 32"
expect "NAPI threading of rt0" 1 "$(cat /sys/class/net/rt0/threaded)"
for nic in rt0 bulk0; do
    [ -n "$(pgrep "^napi/$nic")" ] || fail "$nic has no NAPI thread"
done
for thread in $(pgrep '^napi/rt0'); do expect "NAPI of rt0" "SCHED_FIFO 49 " "$(place "$thread")"; done
ontime ps > /lab/ps
cat /lab/ps
row() { grep -Eq "$1" /lab/ps || fail "ontime ps has no row '$1'"; }
row '^lv +libvirt +rt0 +metadata'
row '^plain +qemu +rt1 +.*tenants.toml'
row '^box +container +rt3 +.*tenants.toml'
expect "vCPUs in ontime ps" 2 "$(grep -c ' vcpu0 ' /lab/ps)"
expect "vhost threads in ontime ps" 2 "$(grep -c ' vhost ' /lab/ps)"
expect "iothreads in ontime ps" 1 "$(grep -c ' iothread .*IO iothread1' /lab/ps)"
grep -q ' emulator .*qemu-system' /lab/ps || fail "no emulator thread in ontime ps"
ontime ps --json | grep -q '"runtime_cap": *0.8' || fail "the cap of the metadata is not known"
wait $traffic || fail "the libvirt VM does not answer"

# The hook, as libvirt calls it: it touches a file, which wakes the daemon.
touch -d @1 /run/ontime/poke
virsh -q destroy lv
[ "$(stat -c %Y /run/ontime/poke)" -gt 1 ] || fail "libvirt did not run the hook"
gone() { ! ontime ps --json | grep -q '"lv"'; }
within 40 gone
within 40 sh -c '. /lab/lib.sh; [ "$(metric "ontime_tenants{class=\"rt0\"}")" = 0 ]'
# Together with another event the hook would not be recorded as the reason of the pass.
within 40 sh -c '. /lab/lib.sh; touch /run/ontime/poke; [ "$(metric "ontime_passes_total{reason=\"hook\"}")" -gt 0 ]'

# The VM starts again, with other threads, and its class changes while it runs.
virsh -q start lv
lv=$(cat /run/libvirt/qemu/lv.pid)
within 40 placed "$(thread "$lv" 'CPU 0/KVM')" "SCHED_FIFO 47"
virsh -q metadata lv https://ontime.dev/xmlns/tenant/1 --key ontime --live --set '<tenant class="bulk"/>' > /dev/null
within 40 placed "$(thread "$lv" 'CPU 0/KVM')" "SCHED_OTHER 0"
virsh -q metadata lv https://ontime.dev/xmlns/tenant/1 --key ontime --live --set '<tenant class="rt" level="2"/>' > /dev/null
within 40 placed "$(thread "$lv" 'CPU 0/KVM')" "SCHED_FIFO 37"

# VMs start and end in quick succession, beside one that runs.
storm=0
while [ $storm -lt 5 ]; do
    virsh -q destroy lv
    virsh -q start lv
    lab-vm start storm idle bulk 10.2.0.7
    lab-vm stop storm
    storm=$((storm + 1))
done
lv=$(cat /run/libvirt/qemu/lv.pid)
within 40 placed "$(thread "$lv" 'CPU 0/KVM')" "SCHED_FIFO 47"
ping -q -c 20 -i 0.02 10.2.0.2 > /dev/null || fail "the VM beside the storm was hurt"
expect "threads placed that could not be" 0 "$(metric ontime_knob_failures_total)"

# A reset restores all, also the tenants that still run.
resets
expect "the vCPU after reset" "SCHED_OTHER 0 " "$(place "$(thread "$lv" 'CPU 0/KVM')")"
# Also processes that the container forked after it was placed.
for thread in $(cat $(find $box -name cgroup.threads)); do
    expect "the container after reset: $(cat "/proc/$thread/comm")" "SCHED_OTHER 0 " "$(place "$thread")"
done
kill "$daemon"
wait "$daemon" || fail "the daemon ended with $?"
virsh -q destroy lv
lab-vm stop plain
kill -9 "$(pgrep -x -f 'sleep 10000')" # the first process of a PID namespace heeds nothing less
within 40 sh -c '! ip link show ve-box'
snapshot > /lab/after
diff /lab/before /lab/after
