#!/bin/sh
# lab-netns up NAME NET ADDRESS: a network namespace with a macvlan on the NIC of NET (rt or bulk), which leaves its bridge
# for that: from the NIC's NAPI thread straight into the namespace's own stack. Its hardware address is that of a VM of that
# address (lab-vm), so that clients need not ask again.
# lab-netns nat NAME NET ADDRESS: the same as containers have it by default: the NIC leaves its bridge and has ADDRESS itself, the namespace is
# 172.17.0.2 behind a veth pair and a bridge of its own, and addresses are translated.
# lab-netns down NAME: the NIC is the bridge's again.
set -eu
verb=${1:?lab-netns up|nat|down NAME}
name=${2:?lab-netns: a NAME}

# nftables' commands, by its library: Debian's 7.2 translates addresses for nftables alone (it has no xt_nat), and the image has no nft(8). The
# guests' disk has a Python that can call it.
nft() {
    mkdir -p /run/guest
    flock /run/guest.lock sh -c 'mountpoint -q /run/guest || mount -o ro /dev/vdb /run/guest'
    LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu:/run/guest/usr/lib/x86_64-linux-gnu PYTHONHOME=/run/guest/usr /run/guest/usr/bin/python3 -c '
import ctypes, sys
nft = ctypes.CDLL("libnftables.so.1")
nft.nft_ctx_new.restype = ctypes.c_void_p
sys.exit(nft.nft_run_cmd_from_buffer(ctypes.c_void_p(nft.nft_ctx_new(0)), sys.argv[1].encode()) != 0)' "$1"
}

case $verb in
up)
    nic=${3}0
    ip netns add "$name"
    ip link set "$nic" nomaster
    ip link add link "$nic" name "m-$3" address "52:54:00:01:$(printf %02x "${4##*.}"):$(printf %02x ${#3})" netns "$name" \
        type macvlan mode private
    ip -n "$name" link set lo up
    ip -n "$name" addr add "$4/24" dev "m-$3"
    ip -n "$name" link set "m-$3" up
    ;;
nat)
    nic=${3}0
    ip netns add "$name"
    ip link set "$nic" nomaster
    ip link set "$nic" address "52:54:00:01:$(printf %02x "${4##*.}"):$(printf %02x ${#3})"
    ip addr add "$4/24" dev "$nic"
    ip link add "n-$name" type bridge
    ip addr add 172.17.0.1/16 dev "n-$name"
    ip link set "n-$name" up
    ip link add "v-$name" master "n-$name" type veth peer name eth0 netns "$name"
    ip link set "v-$name" up
    ip -n "$name" link set lo up
    ip -n "$name" addr add 172.17.0.2/16 dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" route add default via 172.17.0.1
    echo 1 > /proc/sys/net/ipv4/ip_forward
    nft "table ip n-$name {
        chain pre { type nat hook prerouting priority dstnat; ip daddr $4 meta l4proto udp dnat to 172.17.0.2; }
        chain post { type nat hook postrouting priority srcnat; ip saddr 172.17.0.0/16 oifname != \"n-$name\" masquerade; }
    }"
    ;;
down)
    if [ -e "/sys/class/net/n-$name" ]; then
        nft "table ip n-$name; delete table ip n-$name"
        ip link del "n-$name"
        for net in rt:01 bulk:02; do
            nic=${net%:*}0
            [ -z "$(ip -4 -brief addr show dev "$nic" | awk '{print $3}')" ] && continue
            ip addr flush dev "$nic"
            ip link set "$nic" address "52:54:00:00:00:${net#*:}"
            ip link set "$nic" master "br-${net%:*}" up
        done
    fi
    for net in rt bulk; do
        ! ip -n "$name" link del "m-$net" 2> /dev/null || ip link set "${net}0" master "br-$net" up
    done
    ip netns del "$name"
    ;;
*)
    echo "lab-netns: '$verb' is not one of up, nat, down" >&2
    exit 2
    ;;
esac
