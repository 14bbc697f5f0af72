#!/bin/busybox sh
# Mounts the disk that ontime.root names and goes on from there; brings along what the lab put into /overlay.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
while read -r module; do /bin/busybox insmod "/$module"; done < /modules
read -r cmdline < /proc/cmdline
options=rw
for word in $cmdline; do
    case $word in
    ontime.root=*) root=${word#*=} ;;
    ontime.ro) options=ro ;;
    init=*) init=${word#*=} ;;
    esac
done
tries=0
while [ ! -b "$root" ] && [ "$tries" -lt 500 ]; do
    tries=$((tries + 1))
    /bin/busybox usleep 10000
done
/bin/busybox mount -t ext4 -o "$options" "$root" /root || {
    echo "LAB-FAILED: cannot mount $root" > /dev/console
    /bin/busybox poweroff -f
}
for file in /overlay/*; do [ -f "$file" ] && /bin/busybox cp "$file" /root/usr/local/bin/; done
for dir in dev proc sys; do /bin/busybox mount -o move "/$dir" "/root/$dir"; done
exec /bin/busybox switch_root /root "$init"
