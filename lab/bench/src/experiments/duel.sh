#!/bin/sh
# A guest's first process, in place of the one on its disk: an RT server (`sockperf server`) and a subscriber of Sampled
# Values (IEC 61850-9-2) that answers every frame, both at FIFO 50.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs tmpfs /run
modprobe -a virtio_net af_packet
read -r cmdline < /proc/cmdline
for word in $cmdline; do case $word in ontime.ip=*) address=${word#*=} ;; esac; done
ip link set lo up
ip link set eth0 up
ip addr add "$address/24" dev eth0
chrt --fifo 50 perl /dev/role-subscriber.pl eth0 > /dev/console 2>&1 &
echo "LAB-GUEST-UP servers $address" > /dev/console
exec chrt --fifo 50 sockperf server -i "$address" -p 11111 > /dev/console 2>&1
