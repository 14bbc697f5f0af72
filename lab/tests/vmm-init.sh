#!/bin/sh
# A guest's first process (src/cases/vmm.rs): at FIFO 50, every 3 to 7 ms, it reads from a device that its VM monitor
# emulates, so that the vCPU leaves the guest and takes the monitor's lock. It prints the times of 400 reads, in us.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t sysfs sysfs /sys 2> /dev/null
echo "LAB-GUEST-UP reads" > /dev/console
exec chrt --fifo 50 perl -e '
    use strict;
    $| = 1;
    # clock_gettime(CLOCK_MONOTONIC), ns.
    sub now { my $t = pack("qq", 0, 0); syscall(228, 1, $t); my ($s, $n) = unpack("qq", $t); $s * 1_000_000_000 + $n }
    open(my $device, "<:raw", "/sys/bus/pci/devices/0000:00:00.0/config") or die "the host bridge: $!";
    while (1) {
        my @took;
        for (1 .. 400) {
            my $at = now();
            sysseek($device, 0, 0) && sysread($device, my $word, 4) == 4 or die "reading: $!";
            push @took, (now() - $at) / 1000;
            select(undef, undef, undef, 0.003 + rand(0.004));
        }
        @took = sort { $a <=> $b } @took;
        printf "READ p50 %d p99 %d max %d\n", @took[200, 396, 399];
    }' > /dev/console 2>&1
