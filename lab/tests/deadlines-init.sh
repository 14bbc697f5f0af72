#!/bin/busybox sh
# First process of the guest with deadline tasks: executes each line that arrives on its console.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mkdir -p /bin /tmp
/bin/busybox --install -s /bin
export PATH=/bin
while read -r module; do insmod "/$module"; done < /modules
insmod /lab/ontime.ko
stty -F /dev/ttyS0 raw -echo
# The module attaches in the background.
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    dmesg | grep -q 'ontime: SCHED_DEADLINE is guaranteed' && echo HOOKED > /dev/ttyS0 && break
    sleep 1
done
exec sh -c 'echo GUEST-UP; while read -r line; do eval "$line"; done' < /dev/ttyS0 > /dev/ttyS0 2>&1
