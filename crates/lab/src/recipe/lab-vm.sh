#!/bin/sh
# lab-vm start NAME ROLE NET ADDRESS: an ordinary QEMU VM with a vhost-net NIC on the bridge br-NET (rt or bulk).
# lab-vm wait NAME: until its server is up. lab-vm stop NAME. lab-vm log NAME.
set -eu
dir=/run/lab-vm
verb=${1:?lab-vm start|wait|stop|log NAME}
name=${2:?lab-vm: a NAME}
case $verb in
start)
    role=$3 net=$4 address=$5
    mkdir -p "$dir"
    number=${address##*.}
    tap=t-$name
    ip tuntap add "$tap" mode tap vnet_hdr
    ip link set "$tap" master "br-$net" up
    qemu-system-x86_64 -name "guest=$name,debug-threads=on" -machine q35,accel=kvm -m "${LAB_VM_MB:-192}" -smp "${LAB_VM_CPUS:-1}" \
        -cpu qemu64,+x2apic \
        -no-user-config -nodefaults -display none -kernel /boot/vmlinux-guest -initrd /boot/initrd-guest \
        -append "console=ttyS0 quiet panic=-1 ontime.root=/dev/vda ontime.ro init=/sbin/lab-guest-init ontime.ip=$address ontime.role=$role" \
        -drive file=/dev/vdb,if=virtio,format=raw,readonly=on,file.locking=off \
        -netdev "tap,id=net0,ifname=$tap,script=no,downscript=no,vhost=on" \
        -device "virtio-net-pci,netdev=net0,mac=52:54:00:01:$(printf %02x "$number"):$(printf %02x ${#net}),romfile=" \
        -qmp "unix:$dir/$name.qmp,server=on,wait=off" -serial "file:$dir/$name.log" -pidfile "$dir/$name.pid" -daemonize
    ;;
wait)
    tries=0
    until grep -q LAB-GUEST-UP "$dir/$name.log"; do
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || {
            echo "lab-vm: $name did not come up in 60 s; its console:" >&2
            tail -n 20 "$dir/$name.log" >&2
            exit 1
        }
        sleep 0.1
    done
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
