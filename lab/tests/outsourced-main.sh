#!/bin/sh
# In the guest: runs /lab/test.sh, writes its output in /lab/out to the second disk as a tar, and powers off.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/lab
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /dev/pts /lab/out
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up
# IPv6 multicast has no route on the loopback by default.
ip -6 route add ff01::/16 dev lo
hostname guest 2> /dev/null
cd /lab
# On a kernel with kmemleak (debug-kernel.sh): memory that nothing refers to. An object counts if it is older than 5 s
# and has not changed between two searches. What the kernel itself has lost before the test does not count.
leaks=/sys/kernel/debug/kmemleak
mount -t debugfs debugfs /sys/kernel/debug 2> /dev/null
search() {
    for _ in 1 2 3; do
        sleep 6
        echo scan > $leaks
    done
}
[ ! -e $leaks ] || grep -q ontime.first /proc/cmdline || { search && echo clear > $leaks; }
sh /lab/test.sh > /lab/out/log 2>&1
echo $? > /lab/out/status
[ ! -e $leaks ] || { search && cat $leaks > /lab/out/kmemleak; }
dmesg > /lab/out/dmesg
tar -C /lab/out -cf /dev/vdb .
sync
echo o > /proc/sysrq-trigger
while :; do :; done
