#!/bin/sh
# A guest's first process: its address, then the server that ontime.role names, unmodified from Debian.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
modprobe virtio_net
read -r cmdline < /proc/cmdline
for word in $cmdline; do
    case $word in
    ontime.ip=*) address=${word#*=} ;;
    ontime.role=*) role=${word#*=} ;;
    esac
done
ip link set lo up
ip link set eth0 up
ip addr add "$address/24" dev eth0
echo "LAB-GUEST-UP $role $address" > /dev/console
case $role in
rt) exec chrt --fifo 50 sockperf server -i "$address" -p 11111 > /dev/console 2>&1 ;;
memcached) exec chrt --fifo 50 memcached -u root -l "$address" -p 11211 -t 1 > /dev/console 2>&1 ;;
kamailio) exec chrt --fifo 50 kamailio -f /etc/kamailio/lab.cfg -l "udp:$address:5060" -DD -E -m 32 -M 4 > /dev/console 2>&1 ;;
bulk) exec iperf3 -s > /dev/null 2>&1 ;;
spin) exec chrt --fifo 50 sh -c 'while :; do :; done' ;;
idle) exec sleep 100000000 ;;
*) echo "LAB-GUEST-FAILED: no role '$role'" > /dev/console; exec sleep 100000000 ;;
esac
