# For scripts in the emulated host (after lib.sh): the VM plc, class rt. Its guest has the module and requests the CPU
# time of its deadline tasks from the host. /lab/extra.cpio contains deadlines-init.sh, the module and the application
# (kernel/guest/tests/rta.c) for the lab's guest. If /lab has a debug kernel (vmlinuz and initrd), the guest has that,
# with $GUEST_MB of memory and $GUEST_APPEND on its command line.
mkdir -p /etc/ontime /run/vm
printf '[[tenant]]\nname = "plc"\nclass = "rt"\n' > /etc/ontime/tenants.toml
printf '[vm.plc]\ndeadlines = true\n' > /etc/ontime/sockets.toml
kernel=/boot/vmlinux-guest initrd=/boot/initrd-guest memory=128 pages=hugetlb=on,prealloc=on
if [ -e /lab/vmlinuz ]; then
    kernel=/lab/vmlinuz initrd=/lab/initrd memory=$GUEST_MB pages=hugetlb=off
fi
cat "$initrd" /lab/extra.cpio > /run/vm/initrd

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
    qemu-system-x86_64 -name guest=plc,debug-threads=on -m "$memory" \
        -machine q35,accel=kvm,memory-backend=ram,hpet=off \
        -object "memory-backend-memfd,id=ram,size=${memory}M,share=on,$pages" -smp $1 \
        -cpu qemu64,+x2apic,+rdrand,-cx16 -no-reboot -no-user-config -nodefaults -display none \
        -kernel "$kernel" -initrd /run/vm/initrd \
        -append "console=ttyS0 quiet panic=-1 no_timer_check ${GUEST_APPEND:-}" \
        -qmp unix:/run/vm/qmp,server=on,wait=off -serial pipe:/run/vm/console $(ontime attach plc | grep -E '^-(chardev|device)' | tr -d '\\\n') >> /lab/qemu.log 2>&1 &
    vm=$!
    exec 3> /run/vm/console.in
    for _ in $(seq $((120 * ${SLOW:-1}))); do ! grep -q GUEST-UP /lab/console || break; sleep 1; done
    grep -q GUEST-UP /lab/console ||
        { tail -n 30 /lab/console /lab/qemu.log /lab/device.log; fail "the guest does not boot"; }
}
guest() { # COMMAND...: runs it in the guest; what it said
    asked=$(uptime_ms)
    echo "echo ASK-$asked; $*; echo; echo ASKED-$asked" >&3
    for _ in $(seq $((600 * ${SLOW:-1}))); do
        ! tr -d '\r' < /lab/console | grep -qx "ASKED-$asked" || break
        sleep 0.2
    done
    tr -d '\r' < /lab/console | sed -n "/^ASK-$asked\$/,/^ASKED-$asked\$/p" | grep -v -e '^ASK' -e '^$' -e '^\[' || true
}
reserves() { ontime top --once --json --interval 0.1 | grep -q "$1"; } # TEXT
# For debug-reports.py: a debug kernel's log, and the memory that nothing refers to (as in outsourced-main.sh).
keeps_reports() {
    [ -e /lab/vmlinuz ] || return 0
    guest 'mount -t debugfs debugfs /sys/kernel/debug; cd /sys/kernel/debug' > /dev/null
    guest '[ ! -e kmemleak ] || for _ in 1 2 3; do sleep 6; echo scan > kmemleak; done' > /dev/null
    guest '[ ! -e kmemleak ] || cat kmemleak' > /lab/kmemleak
    guest "dmesg | sed 's/^/ /'" > /lab/dmesg
}
