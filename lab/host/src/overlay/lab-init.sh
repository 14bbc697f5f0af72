#!/bin/sh
# The emulated host's first process: mounts, modules, the two NICs under bridges, then the lab's agent.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
for dir in /run /tmp /var/lib/ontime; do mkdir -p $dir; mount -t tmpfs tmpfs $dir; done
mkdir -p /dev/pts /dev/shm /run/lock
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
mount -t cgroup2 cgroup2 /sys/fs/cgroup
read -r cmdline < /proc/cmdline
clients=
case $cmdline in *ontime.clients=*)
    clients=${cmdline##*ontime.clients=}
    clients=${clients%% *}
    ;;
esac
modprobe -a e1000e virtio_net virtio_console kvm_amd tun vhost_net bridge macvtap 9pnet_virtio 9p 2> /dev/null
hostname lab
ip link set lo up
for address in /sys/class/net/*/address; do
    nic=${address%/address}
    nic=${nic##*/}
    case $(cat "$address") in
    52:54:00:00:00:01) ip link set "$nic" down; ip link set "$nic" name rt0 ;;
    52:54:00:00:00:02) ip link set "$nic" down; ip link set "$nic" name bulk0 ;;
    52:54:00:00:00:11) ip link set "$nic" down; ip link set "$nic" name rt ;;
    52:54:00:00:00:12) ip link set "$nic" down; ip link set "$nic" name bulk ;;
    esac
done
if [ -n "$clients" ]; then
    ip netns add clients
    ip netns exec clients sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
    ip -n clients link set lo up
    for nic in rt:10.1.0.1 bulk:10.2.0.1; do
        ip link set "${nic%:*}" netns clients
        ip -n clients address add "${nic#*:}/24" dev "${nic%:*}"
        # As many buffers as the NIC can have: frames that the clients miss are no loss of the host.
        ip netns exec clients ethtool -G "${nic%:*}" rx 4096
        ip -n clients link set "${nic%:*}" up
    done
    for irq in $(sed -nE 's/^ *([0-9]+):.* (rt|bulk)(-.*)?$/\1/p' /proc/interrupts); do
        echo "$clients" > "/proc/irq/$irq/smp_affinity_list"
    done
fi
for kind in rt bulk; do
    ip link add "br-$kind" type bridge mcast_snooping 0
    ip link set "br-$kind" up
    [ -e "/sys/class/net/${kind}0" ] && ip link set "${kind}0" master "br-$kind" up
done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 lab /lab
cd /lab || exit 1
case $cmdline in
*ontime.shell*) setsid -c bash -l < /dev/ttyS0 > /dev/ttyS0 2>&1 ;;
*) ontime-lab agent || echo "LAB-FAILED: the agent ended with $?" > /dev/console ;;
esac
umount /lab
echo o > /proc/sysrq-trigger
# No program can be read once the disk is off, and a first process that ends is a panic.
while :; do :; done
