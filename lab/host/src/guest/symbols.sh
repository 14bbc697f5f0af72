#!/bin/sh
# A guest's first process, before the one on its disk: once the RT server is up, what its addresses mean goes to 10.1.0.1, TCP port 11113:
# text symbols as /proc/kallsyms has them, then for each process "process PID NAME" and its executable lines of maps, then "end".
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
perl -e '
    use strict;
    my $socket;
    sub words { my ($file) = @_; open(my $in, "<", $file) or return ""; my $all = join "", <$in>; chomp $all; $all }
    for (1 .. 300) {
        last if grep { words($_) eq "sockperf" } glob "/proc/[0-9]*/comm";
        select(undef, undef, undef, 0.1);
    }
    for (1 .. 100) {
        # AF_INET, SOCK_STREAM, TCP
        socket($socket, 2, 1, 6) or die "socket: $!";
        last if connect($socket, pack("S n C4 x8", 2, 11113, 10, 1, 0, 1));
        select(undef, undef, undef, 0.1);
    }
    open(my $symbols, "<", "/proc/kallsyms") or die "kallsyms: $!";
    my $text = "";
    while (<$symbols>) { $text .= $_ if / [tTwW] / }
    for my $maps (glob "/proc/[0-9]*/maps") {
        my ($pid) = $maps =~ /(\d+)/;
        my @lines = grep { / ..x/ } split(/^/, words($maps) . "\n") or next;
        $text .= "process $pid " . words("/proc/$pid/comm") . "\n" . join("", @lines);
    }
    $text .= "end\n";
    while (length $text) {
        my $sent = syswrite($socket, $text, 16384) or die "send: $!";
        substr($text, 0, $sent) = "";
    }
    close $socket' > /dev/console 2>&1 &
exec /sbin/lab-guest-init
