#!/bin/sh
# lab-vm start NAME ROLE NET ADDRESS: an ordinary QEMU VM with a vhost-net NIC on the bridge br-NET (rt or bulk).
# ROLE: rt, bulk, spin, idle, or paused (its threads are there, its vCPU does not run).
# lab-vm wait NAME: until its server is up; fails where the VM ends before. lab-vm stop NAME. lab-vm log NAME.
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
        -qmp "unix:$dir/$name.qmp,server=on,wait=off" -serial "file:$dir/$name.log" -pidfile "$dir/$name.pid" -daemonize $([ "$1" != paused ] || echo -S)
}

case $verb in
start)
    mkdir -p "$dir"
    [ ! -e "/sys/class/net/t-$name" ] || ip link del "t-$name"
    ip tuntap add "t-$name" mode tap vnet_hdr
    ip link set "t-$name" master "br-$4" up
    boot "$3" "$4" "$5"
    ;;
wait)
    # Seldom: each look preempts the guest, and the emulated SVM fails guests that are preempted often.
    until grep -q LAB-GUEST-UP "$dir/$name.log"; do
        kill -0 "$(cat "$dir/$name.pid")" 2> /dev/null || {
            echo "lab-vm: $name ended while it booted; its console:" >&2
            tail -n 20 "$dir/$name.log" >&2
            exit 1
        }
        sleep 1
    done
    ;;
stop)
    # A QEMU that has ended takes its pid file along.
    if pid=$(cat "$dir/$name.pid" 2> /dev/null); then
        while kill -9 "$pid" 2> /dev/null; do sleep 0.05; done
        rm -f "$dir/$name.pid"
    fi
    ip link del "t-$name"
    ;;
log) cat "$dir/$name.log" ;;
*)
    echo "lab-vm: '$verb' is not one of start, wait, stop, log" >&2
    exit 2
    ;;
esac
