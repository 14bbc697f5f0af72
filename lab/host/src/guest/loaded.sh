#!/bin/sh
# A guest's first process, in place of the one on its disk: an RT server (`sockperf server`, FIFO 50) and, at normal priority, a CPU load of so
# many percent of this CPU as a datagram to port 11112 says ("40"; answered by "load 40"). Source: Xen-ARM (APSys'11), section 3.2.
#
# The load is work, not time: the loop is measured once, so that what others take of the CPU is not counted as the guest's own.
# In each period of 10 ms it does its share and sleeps until the next; where it could not, the next begins at once and nothing is made up for.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs tmpfs /run
modprobe virtio_net
read -r cmdline < /proc/cmdline
for word in $cmdline; do case $word in ontime.ip=*) address=${word#*=} ;; esac; done
ip link set lo up
ip link set eth0 up
ip addr add "$address/24" dev eth0
perl -e '
    use strict;
    my ($period, $turns, $percent) = (10_000_000, 200, 0);
    # clock_gettime(CLOCK_MONOTONIC), ns.
    sub now { my $t = pack("qq", 0, 0); syscall(228, 1, $t); my ($s, $n) = unpack("qq", $t); $s * 1_000_000_000 + $n }
    sub work { my $x = 1; $x = $x * 3 & 0xffff for 1 .. $turns; $x }
    my $piece = 1e9;
    for (1 .. 300) { my $at = now(); work(); my $took = now() - $at; $piece = $took if $took < $piece }
    # AF_INET, SOCK_DGRAM; any address, port 11112.
    socket(my $socket, 2, 2, 17) or die "socket: $!";
    bind($socket, pack("S n a4 x8", 2, 11112, "\0\0\0\0")) or die "bind: $!";
    my $at = now();
    while (1) {
        # MSG_DONTWAIT
        while (my $from = recv($socket, my $said, 16, 0x40)) {
            $percent = $1 if $said =~ /^(\d{1,3})$/;
            send($socket, "load $percent", 0, $from);
        }
        work() for 1 .. int($period * $percent / 100 / $piece);
        $at += $period;
        my $now = now();
        if ($at < $now) { $at = $now; next }
        # clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME)
        my $until = pack("qq", int($at / 1_000_000_000), $at % 1_000_000_000);
        syscall(230, 1, 1, $until, 0);
    }' > /dev/console 2>&1 &
echo "LAB-GUEST-UP loaded $address" > /dev/console
exec chrt --fifo 50 sockperf server -i "$address" -p 11111 > /dev/console 2>&1
