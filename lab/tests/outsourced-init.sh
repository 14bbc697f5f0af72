#!/bin/busybox sh
# First process of the guest that tests outsourced sockets: a read-only disk, and the test's files in /lab.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
while read -r module; do /bin/busybox insmod "/$module"; done < /modules
tries=0
while [ ! -b /dev/vda ] && [ "$tries" -lt 500 ]; do
    tries=$((tries + 1))
    /bin/busybox usleep 10000
done
/bin/busybox mount -t ext4 -o ro /dev/vda /root || {
    echo "OUTSOURCED-FAILED: no disk" > /dev/console
    /bin/busybox poweroff -f
}
/bin/busybox mount -t tmpfs tmpfs /root/lab
/bin/busybox cp -a /lab/. /root/lab/
for dir in dev proc sys; do /bin/busybox mount -o move "/$dir" "/root/$dir"; done
exec /bin/busybox switch_root /root /lab/main.sh
