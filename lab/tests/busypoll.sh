# In the emulated host, with two CPUs: method busypoll polls the RT NIC without interrupts or softirqs, the rest of the
# host continues to work, and a reset undoes it.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
printf '[nic.rt0]\nclass = "rt"\npoll_cpu = 1\n' > /etc/ontime/host.toml
interrupts() { awk '/rt0-rx/ {sum += $2 + $3} END {print sum + 0}' /proc/interrupts; }
softirqs() { awk '/NET_RX/ {print $2 + $3}' /proc/softirqs; }
cat > /run/ping <<'PERL'
# ping COUNT: that many ICMP echo requests to the world outside, 10 ms apart; prints how many replies came.
use Socket;
socket(my $s, PF_INET, SOCK_RAW, 1) or die "socket: $!";
my ($replies, $id) = (0, $$ & 0xffff);
for my $n (1 .. $ARGV[0]) {
    my $sum = 0x0800 + $id + ($n & 0xffff);
    $sum = ($sum & 0xffff) + ($sum >> 16) while $sum > 0xffff;
    send($s, pack("CCnnn", 8, 0, ~$sum & 0xffff, $id, $n & 0xffff), 0, sockaddr_in(0, inet_aton("10.1.0.1"))) or die "send: $!";
    for (my $left = 1; $left > 0;) {
        vec(my $ready = "", fileno($s), 1) = 1;
        (my $found, $left) = select($ready, undef, undef, $left);
        last if !$found;
        recv($s, my $answer, 1500, 0);
        my ($type, undef, undef, $of, $number) = unpack("x20CCnnn", $answer);
        if ($type == 0 && $of == $id && $number == ($n & 0xffff)) { $replies++; last }
    }
    select(undef, undef, undef, 0.01);
}
print "$replies of $ARGV[0] replies\n";
exit($replies < $ARGV[0] * 0.9);
PERL
traffic() { perl /run/ping "$1" > /lab/ping 2>&1 || fail "no reply: $(cat /lab/ping)"; }

ip addr add 10.1.0.9/24 dev br-rt
perl /run/ping 10 > /dev/null || true
snapshot > /lab/before
daemon_starts
perl /run/ping 10 > /dev/null || true
before=$(interrupts)
traffic 100
[ $(($(interrupts) - before)) -ge 50 ] ||
    fail "partitioned: a hundred packets raised $(($(interrupts) - before)) interrupts; this test counts the wrong ones"

ontime apply --method busypoll || fail "busypoll was not applied"
perl /run/ping 10 > /dev/null || true
before=$(interrupts) soft=$(softirqs)
traffic 100
echo "figures: busypoll: $(($(interrupts) - before)) interrupts, $(($(softirqs) - soft)) NET_RX softirqs for 100 replies; $(cat /lab/ping)"
expect "receive interrupts while polling" 0 $(($(interrupts) - before))
expect "NET_RX softirqs while polling" 0 $(($(softirqs) - soft))
for thread in $(pgrep '^napi/rt0'); do
    expect "CPU of the polling thread" 1 "$(taskset -cp "$thread" | sed 's/.*: //')"
    # The cap watcher pauses it briefly now and then.
    within 10 placed "$thread" "SCHED_FIFO 1"
done
# Timers, RCU, workqueues and bulk work continue, also on the CPU that polls.
from=$(uptime_ms)
timeout 100 taskset -c 1 sh -c 'sleep 0.1; cat /proc/stat > /dev/null' ||
    fail "bulk work on the CPU that polls starves ($?)"
timeout 100 sh -c 'ip link add d0 type bridge && ip link del d0' || fail "RCU or workqueues starve ($?)"
echo "figures: busypoll: bulk work on the CPU that polls and an interface made and removed took $(($(uptime_ms) - from)) ms"
! dmesg | grep -qi 'rcu.*stall' || fail "RCU stalled"
ontime net status rt0 | grep -q 'other threads may run on CPU 1' || fail "nobody says that its CPU is not isolated"

# Adaptive: the thread sleeps without traffic, polls with it, and sleeps again. The time saved is reported, and a reset
# undoes everything.
printf '[nic.rt0]\nclass = "rt"\npoll_cpu = 1\n[busypoll]\nadaptive = true\nlinger_ms = 2000\n' > /etc/ontime/host.toml
kill -HUP $daemon
becomes() { within 60 sh -c "ontime status | grep -q '^polling *rt0 $1:'"; }
becomes rests
perl /run/ping 100000 > /dev/null &
ping=$!
becomes polls
sleep 0.5
before=$(interrupts)
sleep 0.3
expect "receive interrupts while it polls adaptively" 0 $(($(interrupts) - before))
kill $ping
becomes rests
ontime status | sed -n 's/^polling */figures: adaptive: /p'
resets
snapshot > /lab/after
diff /lab/before /lab/after || fail "not all is as before"
