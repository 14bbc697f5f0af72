#!/bin/sh
# lab-netns up NAME NET ADDRESS: a network namespace with a macvlan on the NIC of NET (rt or bulk), which leaves its bridge
# for that: from the NIC's NAPI thread straight into the namespace's own stack. Its hardware address is that of a VM of that
# address (lab-vm), so that clients need not ask again.
# lab-netns down NAME: the NIC is the bridge's again.
set -eu
verb=${1:?lab-netns up|down NAME}
name=${2:?lab-netns: a NAME}

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
down)
    for net in rt bulk; do
        ! ip -n "$name" link del "m-$net" 2> /dev/null || ip link set "${net}0" master "br-$net" up
    done
    ip netns del "$name"
    ;;
*)
    echo "lab-netns: '$verb' is not one of up, down" >&2
    exit 2
    ;;
esac
