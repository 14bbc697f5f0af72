#!/bin/sh
# lab-vm start NAME ROLE NET ADDRESS: an ordinary QEMU VM with a vhost-net NIC on the bridge br-NET (rt or bulk).
# With NET sockets:rt or sockets:bulk it has no NIC: the module of /lab/module.cpio makes its sockets those of `ontime device`,
# which has the table [vm.NAME] of sockets.toml and a network namespace on that network's NIC (lab-netns).
# With NET none it has no NIC; `ontime device` serves its deadline tasks, and its console takes commands (`tell`).
# ROLE: rt, bulk, spin, idle, or paused (its threads are there, its vCPU does not run); or one whose first process /lab/role-ROLE.cpio brings.
# Words of /lab/append-NAME go to its kernel's command line.
# lab-vm wait NAME: until its server is up; fails where the VM ends before, or is not up in LAB_VM_SECONDS (90) of this host. lab-vm stop NAME. lab-vm log NAME.
# lab-vm tell NAME COMMAND: has the first process of a guest without a NIC do it; returns when that has begun.
set -eu
dir=/run/lab-vm
verb=${1:?lab-vm start|wait|stop|log|tell NAME}
serial=
name=${2:?lab-vm: a NAME}

boot() { # ROLE ADDRESS INITRD WORD OPTIONS...: WORD is one more for the guest's kernel
    role=$1 address=$2 initrd=$3 word=$4
    shift 4
    [ ! -e "/lab/append-$name" ] || word="$word $(tr '\n' ' ' < "/lab/append-$name")"
    rm -f "$dir/$name.log"
    qemu-system-x86_64 -name "guest=$name,debug-threads=on" -m "${LAB_VM_MB:-192}" -machine q35,accel=kvm,memory-backend=ram,hpet=off \
        -object "memory-backend-memfd,id=ram,size=${LAB_VM_MB:-192}M,hugetlb=on,share=on,prealloc=on" -smp "${LAB_VM_CPUS:-1}" \
        -cpu qemu64,+x2apic,+rdrand,-cx16 -no-reboot -no-user-config -nodefaults -display none \
        -kernel /boot/vmlinux-guest -initrd "$initrd" \
        -append "console=ttyS0 quiet panic=-1 ontime.root=/dev/vda ontime.ro init=/sbin/lab-guest-init ontime.ip=$address ontime.role=$role $word" \
        -drive file=/dev/vdb,if=virtio,format=raw,readonly=on,file.locking=off \
        "$@" \
        -qmp "unix:$dir/$name.qmp,server=on,wait=off" ${serial:--serial "file:$dir/$name.log"} -pidfile "$dir/$name.pid" -D "$dir/$name.err" -d guest_errors \
        -daemonize $([ "$role" != paused ] || echo -S)
}

initrd_of() { # ROLE
    initrd=/boot/initrd-guest word=
    [ -e "/lab/role-$1.cpio" ] || return 0
    initrd=$dir/$name.initrd word="rdinit=/with-role init=/dev/role"
    cat /boot/initrd-guest "/lab/role-$1.cpio" > "$initrd"
}

device() { # OPTIONS...: the VM's device process, and its sockets
    rm -rf "/run/ontime/device/$name"
    setsid ontime device --vm "$name" --allow-root "$@" > "$dir/$name.device" 2>&1 < /dev/null &
    for _ in $(seq 100); do [ -S "/run/ontime/device/$name/status.sock" ] && break; sleep 0.1; done
}

on_bridge() { # ROLE NET ADDRESS
    [ ! -e "/sys/class/net/t-$name" ] || ip link del "t-$name"
    ip tuntap add "t-$name" mode tap vnet_hdr
    ip link set "t-$name" master "br-$2" up
    initrd_of "$1"
    boot "$1" "$3" "$initrd" "$word" -netdev "tap,id=net0,ifname=t-$name,script=no,downscript=no,vhost=on" \
        -device "virtio-net-pci,netdev=net0,mac=52:54:00:01:$(printf %02x "${3##*.}"):$(printf %02x ${#2}),romfile="
}

outsourced() { # ROLE NET ADDRESS
    lab-netns up "$name" "$2" "$3"
    device --netns "$name"
    initrd_of "$1"
    cat "$initrd" /lab/module.cpio > "$dir/$name.sockets"
    boot "$1" "$3" "$dir/$name.sockets" "$word rdinit=/with-module" $(attachment)
}

# All but the memory, which is shared as it is.
attachment() { ontime attach "$name" | grep -E '^-(chardev|device)' | tr -d '\\\n'; }

alone() { # ROLE
    device --allow-host-network
    initrd_of "$1"
    serial="-chardev socket,id=console,path=$dir/$name.console,server=on,wait=off,logfile=$dir/$name.log -serial chardev:console"
    boot "$1" none "$initrd" "$word" $(attachment)
}

case $verb in
start)
    mkdir -p "$dir"
    case $4 in
    sockets:*) outsourced "$3" "${4#sockets:}" "$5" ;;
    none) alone "$3" ;;
    *) on_bridge "$3" "$4" "$5" ;;
    esac
    ;;
wait)
    for _ in $(seq "${LAB_VM_SECONDS:-90}"); do
        ! grep -q LAB-GUEST-UP "$dir/$name.log" || exit 0
        kill -0 "$(cat "$dir/$name.pid")" 2> /dev/null || break
        sleep 1
    done
    echo "lab-vm: $name ended or hung while it booted; what QEMU and its console said:" >&2
    for said in err log device; do [ ! -e "$dir/$name.$said" ] || tail -n 20 "$dir/$name.$said" >&2; done
    exit 1
    ;;
stop)
    # A QEMU that has ended takes its pid file along.
    if pid=$(cat "$dir/$name.pid" 2> /dev/null); then
        while kill -9 "$pid" 2> /dev/null; do sleep 0.05; done
        rm -f "$dir/$name.pid"
    fi
    if [ -e "/run/netns/$name" ]; then lab-netns down "$name"; elif [ -e "/sys/class/net/t-$name" ]; then ip link del "t-$name"; fi
    ;;
log) cat "$dir/$name.log" ;;
tell)
    shift 2
    exec perl -MIO::Socket::UNIX -e '
        my ($path, $line) = @ARGV;
        my $console = IO::Socket::UNIX->new(Peer => $path) or die "$path: $!\n";
        print $console "$line\n";
        $console->flush;
        # What it has not taken yet goes with the connection.
        while (<$console>) { exit 0 if /TOLD/ }
        die "its console ended\n"' "$dir/$name.console" "$*"
    ;;
*)
    echo "lab-vm: '$verb' is not one of start, wait, stop, log, tell" >&2
    exit 2
    ;;
esac
