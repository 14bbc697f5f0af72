# For scripts in the emulated host (after lib.sh): the VM plc, class rt. Its guest has the module and requests the CPU
# time of its deadline tasks from the host. /lab/extra.cpio contains deadlines-init.sh, the module and the application
# (kernel/guest/tests/rta.c) for the lab's guest.
mkdir -p /etc/ontime /run/vm
printf '[[tenant]]\nname = "plc"\nclass = "rt"\n' > /etc/ontime/tenants.toml
printf '[vm.plc]\ndeadlines = true\n' > /etc/ontime/sockets.toml
cat /boot/initrd-guest /lab/extra.cpio > /run/vm/initrd

device_starts() {
    rm -rf /run/ontime/device/plc
    ontime device --vm plc --allow-root --allow-host-network >> /lab/device.log 2>&1 &
    device=$!
    within 40 test -S /run/ontime/device/plc/deadlines.sock
}
boot() { # VCPUS
    rm -rf /run/vm/console.*
    mkfifo /run/vm/console.in /run/vm/console.out
    device_starts
    : > /lab/console
    cat /run/vm/console.out >> /lab/console &
    qemu-system-x86_64 -name guest=plc,debug-threads=on -m 128 -machine q35,accel=kvm,memory-backend=ram,hpet=off \
        -object memory-backend-memfd,id=ram,size=128M,hugetlb=on,share=on,prealloc=on -smp $1 \
        -cpu qemu64,+x2apic,+rdrand,-cx16 -no-reboot -no-user-config -nodefaults -display none \
        -kernel /boot/vmlinux-guest -initrd /run/vm/initrd -append "console=ttyS0 quiet panic=-1 no_timer_check" \
        -qmp unix:/run/vm/qmp,server=on,wait=off -serial pipe:/run/vm/console $(ontime attach plc | grep -E '^-(chardev|device)' | tr -d '\\\n') >> /lab/qemu.log 2>&1 &
    vm=$!
    exec 3> /run/vm/console.in
    for _ in $(seq 120); do ! grep -q GUEST-UP /lab/console || break; sleep 1; done
    grep -q GUEST-UP /lab/console ||
        { tail -n 30 /lab/console /lab/qemu.log /lab/device.log; fail "the guest does not boot"; }
}
guest() { # COMMAND...: runs it in the guest; what it said
    asked=$(uptime_ms)
    echo "echo ASK-$asked; $*; echo; echo ASKED-$asked" >&3
    for _ in $(seq 600); do ! tr -d '\r' < /lab/console | grep -qx "ASKED-$asked" || break; sleep 0.2; done
    tr -d '\r' < /lab/console | sed -n "/^ASK-$asked\$/,/^ASKED-$asked\$/p" | grep -v -e '^ASK' -e '^$' -e '^\[' || true
}
reserves() { ontime top --once --json --interval 0.1 | grep -q "$1"; } # TEXT
