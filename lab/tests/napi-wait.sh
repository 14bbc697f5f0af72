# In the emulated host, 6.12 with PREEMPT_RT, method partitioned, with a flood of small packets to bulk0 from outside:
# the time in which a thread at FIFO 47 sends a datagram through rt0, by the weight of bulk0's NAPI. The thread waits
# for the poll under way, because both take the CPU's softirq lock. On the virtual clock: instructions of 4 ns each. No
# VM takes part.
set -eu
. /lab/lib.sh
insmod /lab/ontime_napi.ko
ip addr add 10.1.0.9/24 dev br-rt
ip addr add 10.2.0.9/24 dev br-bulk
mkdir -p /etc/ontime
printf 'without = ["napi-weight"]\n[nic.rt0]\nclass = "rt"\n' > /etc/ontime/host.toml
daemon_starts
within 40 sh -c '[ "$(cat /sys/class/net/bulk0/threaded)" = 1 ]'
ping -q -c 2 10.1.0.1 > /dev/null || fail "no answer outside"
cat > /lab/send.pl <<'PERL'
use Socket;
sub now { my $at = "\0" x 16; syscall(228, 1, $at); my ($s, $ns) = unpack "qq", $at; $s * 1e6 + $ns / 1e3 }
socket(my $socket, PF_INET, SOCK_DGRAM, 0) or die;
my ($to, @took) = pack_sockaddr_in(9, inet_aton("10.1.0.1"));
for (1 .. $ARGV[0]) {
    select undef, undef, undef, 0.001 + ($_ * 7919 % 1000) / 1e6;
    my $from = now;
    send $socket, "x" x 14, 0, $to or die "send: $!";
    push @took, now() - $from;
}
@took = sort { $a <=> $b } @took;
printf "%.0f %.0f %.0f\n", $took[$#took / 2], $took[$#took * 0.99], $took[-1];
PERL
count=${COUNT:-300}
packets() { cat /sys/class/net/bulk0/statistics/rx_packets; }
measure() { # NAME
    start=$(uptime_ms) packets=$(packets)
    took=$(/run/measures chrt -f 47 perl /lab/send.pl "$count") || fail "$1: sending failed"
    rate=$((($(packets) - packets) * 1000 / ($(uptime_ms) - start)))
    echo "figures: $1: $count sends, p50/p99/max $(echo "$took" | tr ' ' /) us; bulk0 took $rate packets a second"
}
perl -e 'print 1' > /dev/null
measure "no flood"
touch /lab/flood
within 40 sh -c "[ \$(cat /sys/class/net/bulk0/statistics/rx_packets) -gt $(($(packets) + 2000)) ]"
for weight in default 16 8 4 2; do
    echo $weight > /sys/class/net/bulk0/ontime/napi_weight
    measure "weight $weight"
    case $weight in default) long=${took##* } ;; 4) short=${took##* } ;; esac
done
rm /lab/flood
kill $daemon
wait $daemon || fail "the daemon ended with $?"
# A poll of 4 packets instead of 64, with the same time for the rest of the path.
[ "$short" -lt "$long" ] || fail "with polls of 4 packets the slowest takes $short us, with the driver's $long us"
