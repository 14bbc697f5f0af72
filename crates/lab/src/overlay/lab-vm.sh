#!/bin/sh
# lab-vm start NAME ROLE NET ADDRESS: an ordinary QEMU VM with a vhost-net NIC on the bridge br-NET (rt or bulk).
# lab-vm wait NAME: until its server is up. lab-vm stop NAME. lab-vm log NAME.
set -eu
dir=/run/lab-vm
verb=${1:?lab-vm start|wait|stop|log NAME}
name=${2:?lab-vm: a NAME}

boot() { # ROLE NET ADDRESS
    number=${3##*.}
    rm -f "$dir/$name.log"
    qemu-system-x86_64 -name "guest=$name,debug-threads=on" -m "${LAB_VM_MB:-192}" -machine q35,accel=kvm,memory-backend=ram \
        -object "memory-backend-memfd,id=ram,size=${LAB_VM_MB:-192}M,hugetlb=on,share=on,prealloc=on" -smp "${LAB_VM_CPUS:-1}" \
        -cpu qemu64,+x2apic -no-reboot -no-user-config -nodefaults -display none \
        -kernel /boot/vmlinux-guest -initrd /boot/initrd-guest \
        -append "console=ttyS0 quiet panic=-1 ontime.root=/dev/vda ontime.ro init=/sbin/lab-guest-init ontime.ip=$3 ontime.role=$1" \
        -drive file=/dev/vdb,if=virtio,format=raw,readonly=on,file.locking=off \
        -netdev "tap,id=net0,ifname=t-$name,script=no,downscript=no,vhost=on" \
        -device "virtio-net-pci,netdev=net0,mac=52:54:00:01:$(printf %02x "$number"):$(printf %02x ${#2}),romfile=" \
        -qmp "unix:$dir/$name.qmp,server=on,wait=off" -serial "file:$dir/$name.log" -pidfile "$dir/$name.pid" -daemonize
}

# 0: its server is up. 1: its process has ended. 2: neither, in time.
up() {
    tries=0
    until grep -q LAB-GUEST-UP "$dir/$name.log"; do
        kill -0 "$(cat "$dir/$name.pid")" 2> /dev/null || return 1
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || return 2
        sleep 0.1
    done
}

case $verb in
start)
    mkdir -p "$dir"
    ip tuntap add "t-$name" mode tap vnet_hdr
    ip link set "t-$name" master "br-$4" up
    echo "$3 $4 $5" > "$dir/$name.args"
    boot "$3" "$4" "$5"
    ;;
wait)
    # Under emulated SVM a guest's kernel panics in about one boot of ten: it is started again, and that is said.
    for boots in 2 3 4 5; do
        status=0
        up || status=$?
        [ "$status" -ne 0 ] || exit 0
        echo "lab-vm: $name did not come up ($(tail -n 1 "$dir/$name.log" | tr -d '\r')); boot $boots"
        kill -9 "$(cat "$dir/$name.pid")" 2> /dev/null || true
        while ip link show "t-$name" | grep -q LOWER_UP; do sleep 0.05; done
        read -r role net address < "$dir/$name.args"
        boot "$role" "$net" "$address"
    done
    up && exit 0
    echo "lab-vm: $name does not come up; its console:" >&2
    tail -n 20 "$dir/$name.log" >&2
    exit 1
    ;;
stop)
    kill "$(cat "$dir/$name.pid")"
    while [ -e "$dir/$name.pid" ]; do sleep 0.05; done
    ip link del "t-$name"
    ;;
log) cat "$dir/$name.log" ;;
*)
    echo "lab-vm: '$verb' is not one of start, wait, stop, log" >&2
    exit 2
    ;;
esac
