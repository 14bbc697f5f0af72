# In the emulated host, or in its image on this machine (ACCEL=tcg): outsourced.sh [CHANNELS [WAKE]]: boots the guest of
# /lab (disk.img, extra.cpio), whose sockets `ontime device` serves. The guest's output is in /lab/out. The script ends
# with the guest's status. It fails if the device process holds more than before the tests, or if a socket is left over.
# A first run of the VM is killed with sockets open (not with $ONE_RUN). In the second run the guest requests, by
# messages on its console, that the device process is stopped, killed and replaced, that its resources are counted, and
# that the network goes down and comes back.
set -eu
channels=${1:-0}
mkdir -p /etc/ontime /lab/out /run/outsourced
cat > /etc/ontime/sockets.toml << END
[vm.guest]
bind = ["tcp/0-65535", "udp/0-65535"]
reach = ["0.0.0.0/0", "::/0",
    "127.0.0.0/8", "::1/128", "169.254.0.0/16", "fe80::/10", "224.0.0.0/4", "ff00::/8", "255.255.255.255/32"]
sockets = 600
channels = $channels
wake = "${2:-idle}"
END
accel=${ACCEL:-kvm}
memory="memory-backend-memfd,id=ram,size=${GUEST_MB:-512}M,share=on"
cpu=qemu64,+x2apic,+rdrand,-cx16
# The lab's hosts back the guests' memory with huge pages.
[ "$accel" = tcg ] && cpu=max || memory=$memory,hugetlb=on,prealloc=on

start_device() {
    rm -f /run/ontime/device/guest/main.sock
    ontime device --vm guest --allow-root --allow-host-network >> /lab/out/device.log 2>&1 &
    device=$!
    for _ in $(seq 100); do [ -S /run/ontime/device/guest/main.sock ] && break; sleep 0.2; done
}
boot() { # MORE-KERNEL-PARAMETERS
    # All arguments that `ontime attach` prints except the memory: see $memory.
    devices=$(ontime attach guest | grep -E '^-(chardev|device)' | tr -d '\\\n')
    qemu-system-x86_64 -name guest=outsourced,debug-threads=on -m "${GUEST_MB:-512}" \
        -machine "q35,accel=$accel,memory-backend=ram" -object "$memory" -smp "${GUEST_CPUS:-1}" \
        -cpu $cpu -no-reboot -no-user-config -nodefaults -display none -qmp unix:/run/outsourced/qmp,server=on,wait=off \
        -kernel "$kernel" -initrd /run/outsourced/initrd \
        -append "console=ttyS0 quiet panic=-1 no_timer_check ${GUEST_APPEND:-} $1" \
        -drive file=/lab/disk.img,if=virtio,format=raw,readonly=on,file.locking=off \
        -drive file=/run/outsourced/results,if=virtio,format=raw \
        -serial file:/lab/out/console $devices >> /lab/out/qemu.log 2>&1 &
    vm=$!
    seconds=0
}
# Once a second while the VM runs.
tick() {
    sleep 1
    seconds=$((seconds + 1))
    [ $seconds -le "${GUEST_SECONDS:-3000}" ] && return
    echo "the guest is still up after $seconds s; its console:"
    tail -n 30 /lab/out/console
    kill -9 $vm $device
    exit 1
}
said() { grep -qs "$1" /lab/out/console; }
# The test cannot go on: what the VM and its device process have said. A guest that powered itself off has left its log.
gives_up() { # REASON
    echo "$1"
    tail -n 30 /lab/out/console /lab/out/qemu.log /lab/out/device.log || true
    tar -xOf /run/outsourced/results ./log 2> /dev/null | tail -n 30
    exit 1
}
# Resources of the device process while the guest has no socket: descriptors, sockets, anonymous memory (kB).
device_has() { # NAME, of the moment
    [ ! -e "/run/outsourced/$1" ] && said "RESTS-$1" || return 0
    descriptors=$(ls "/proc/$device/fd" | wc -l)
    memory=$(awk '/^RssAnon:/ {print $2}' "/proc/$device/status")
    sockets=$(ontime sockets --json guest | grep -c '"protocol"') || true
    ! said "GOES-ON-$1" || sockets="counted too late,"
    echo "$descriptors $sockets $memory" > "/run/outsourced/$1"
}
# The pages of its calls' buffers are touched over time: 8.5 MB for the main queues, and 0.5 MB for each channel.
growth=$((8704 + 512 * channels))
has_no_more() {
    [ -e /run/outsourced/before ] || return 0
    echo "the device process had (descriptors, sockets, kB) $(cat /run/outsourced/before), has $(cat /run/outsourced/after)"
    cat /run/outsourced/before /run/outsourced/after | awk -v growth=$growth '
        NF != 3 || $2 != 0 {bad = 1}
        NR == 1 {descriptors = $1; memory = $3}
        NR == 2 && ($1 != descriptors || $3 > memory + growth) {bad = 1}
        END {exit bad || NR != 2}'
}
# By inode: a socket is listed twice in these files if another one is created while they are read.
host_sockets() {
    awk 'FNR > 1 && $10 != 0 { print $10 }' /proc/net/tcp /proc/net/tcp6 /proc/net/udp /proc/net/udp6 | sort -u | wc -l
}

# As in the guest: a route for IPv6 multicast on the loopback. Also a route that exists only while the loopback is up.
ip -6 route add ff01::/16 dev lo
ip route replace 192.0.2.0/24 dev lo
# A kernel other than that of the lab's guests, unpacked or not.
kernel=$(ls /lab/vmlinu[xz] 2> /dev/null || true) initrd=/lab/initrd
[ -n "$kernel" ] || kernel=/boot/vmlinux-guest initrd=/boot/initrd-guest
cat "$initrd" /lab/extra.cpio > /run/outsourced/initrd
truncate -s 64M /run/outsourced/results
sockets_before=$(host_sockets)
first_run() {
    start_device
    boot ontime.first
    while kill -0 $vm 2> /dev/null && ! said FIRST-RUN; do tick; done
    said FIRST-RUN || gives_up "the VM ended before the first run had its sockets"
    [ "$(host_sockets)" -gt "$sockets_before" ] || gives_up "the first run has no sockets on the host"
    kill -9 $vm
    for _ in $(seq 100); do kill -0 $device 2> /dev/null || break; sleep 0.1; done
    ! kill -0 $device 2> /dev/null || { echo "the VM is gone, its device process is not"; exit 1; }
    [ "$(host_sockets)" = "$sockets_before" ] ||
        { echo "sockets of a VM that is gone"; cat /proc/net/tcp /proc/net/udp; exit 1; }
    mv /lab/out/console /lab/out/console-first
    echo "ok vm-killed"
}
[ -n "${ONE_RUN:-}" ] || first_run

start_device
boot ''
replaced= network=up paused= stopped= reserved= lost=
while kill -0 $vm 2> /dev/null; do
    tick
    device_has before
    device_has after
    # The number of sockets that stayed on the guest's own stack.
    if [ -z "$reserved" ] && said RESERVED; then
        reserved=$(ontime sockets guest | sed -n 's/.*stayed_local \([0-9]*\).*/\1/p')
        [ "${reserved:-0}" -ge 92 ] || { echo "FAILED: the host was not told of local sockets: $reserved"; lost=1; }
    fi
    # First shorter than the module's timeout, then until the guest has given up the device.
    if said "PAUSED$paused-NOW"; then
        paused=-RT$paused
        kill -STOP $device
        sleep 5
        kill -CONT $device
    fi
    if [ -z "$stopped" ] && said STOPPED-NOW; then
        stopped=now
        kill -STOP $device
    elif [ "$stopped" = now ] && said STOPPED-GONE; then
        stopped=done
        kill -CONT $device
    fi
    if [ -z "$replaced" ] && said DEVICE-NOW; then
        replaced=$seconds
        kill -9 $device
    fi
    # The network of the outsourced sockets: here the host's own.
    if [ $network = up ] && said NETWORK-DOWN; then
        network=down
        ip link set lo down
    elif [ $network = down ] && said NETWORK-UP; then
        network=again
        ip link set lo up
        ip route replace 192.0.2.0/24 dev lo
    fi
    # The guest must detect by itself that the device process is gone, before another one starts.
    if [ -n "$replaced" ] && [ "$replaced" != done ] && said DEVICE-GONE; then
        replaced=done
        start_device
        timeout 120 ontime attach --qmp /run/outsourced/qmp guest || echo "FAILED to replace the device"
    fi
done
tar -C /lab/out -xf /run/outsourced/results || gives_up "the guest has left no results"
status=$(cat /lab/out/status)
[ -z "$lost" ] || status=1
has_no_more || { echo "FAILED: the device process has kept something"; status=1; }
# The device process ends with QEMU.
for _ in $(seq 50); do kill -0 $device 2> /dev/null || break; sleep 0.2; done
! kill -0 $device 2> /dev/null || { echo "the device process stays"; kill $device; status=1; }
[ "$(host_sockets)" = "$sockets_before" ] ||
    { echo "sockets are left over"; cat /proc/net/tcp /proc/net/udp; status=1; }
exit "$status"
