# In the emulated host: an RT server that answers, and a flood of small packets on the other NIC. `ontime trace` reports
# the inversions under `vanilla`, and none under `partitioned`. The script also checks its cost, that nothing of it is
# left, and its messages when it cannot trace. The server is a process in a cgroup of its own, or a VM if $vm is set
# (trace-vm.sh). trace-client.sh is the clients' side.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
seconds=${SECONDS_EACH:-5}
for nic in rt bulk; do ip address add "10.$([ $nic = rt ] && echo 1 || echo 2).0.9/24" dev br-$nic; done
if [ -n "${vm:-}" ]; then
    printf '[[tenant]]\nname = "rt"\nclass = "rt"\nlevel = 0\n' > /etc/ontime/tenants.toml
    lab-vm start rt rt rt 10.1.0.2
    lab-vm wait rt
    tenant="--vm rt" name=rt address=10.1.0.2
else
    printf '[[tenant]]\ncgroup = "/plc.scope"\nclass = "rt"\nlevel = 0\n' > /etc/ontime/tenants.toml
    printf '[nic.rt0]\ntenants = ["plc.scope"]\n' > /etc/ontime/host.toml
    mkdir -p /sys/fs/cgroup/plc.scope
    sh -c 'echo $$ > /sys/fs/cgroup/plc.scope/cgroup.procs; exec perl -MIO::Socket::INET -e "
        my \$s = IO::Socket::INET->new(LocalPort => 11111, Proto => q(udp)) or die;
        while (defined(my \$from = \$s->recv(my \$data, 1500))) { \$s->send(\$data, 0, \$from) }"' &
    tenant="--container plc.scope" name=plc.scope address=10.1.0.9
fi
echo $address > /lab/address
daemon_starts
received() { cat /sys/class/net/bulk0/statistics/rx_packets; }
flooded() { # a thousand packets more
    [ $(($(received) - flooded_from)) -gt 1000 ]
}
traced() { # METHOD: what trace says of ten seconds under flood
    applies "$1"
    flooded_from=$(received)
    touch /lab/flood /lab/ask
    within 60 flooded
    from=$(received)
    # The floor: a wake-up and its switch, with their records, take 40 to 50 us of instructions here, and a kernel
    # section takes up to 90. The flood stops because under vanilla it would leave no CPU time to write the report.
    { sleep $((seconds + 1)); rm /lab/flood; } &
    ontime trace $tenant --floor 100 --duration "$seconds" --json "/lab/$1.json" --html "/lab/$1.html" --perfetto "/lab/$1.pftrace" \
        > "/lab/$1.txt" || fail "trace under $1 ended with $?"
    echo "figures: $1: $(($(received) - from)) packets of flood in $seconds s"
    cat "/lab/$1.txt"
    requests=$(sed -n 's/.*: \([0-9,]*\) requests$/\1/p' "/lab/$1.txt" | tr -d ,)
    [ "${requests:-0}" -ge 10 ] || fail "only ${requests:-no} requests were put together under $1"
}

echo "== vanilla: inversions by name"
traced vanilla
grep -q 'NAPI of bulk0' /lab/vanilla.txt || fail "nobody is said to have been in bulk0's NAPI"
grep -q 'cure \[napi-threaded\]' /lab/vanilla.txt || fail "the cure is not named"

echo "== partitioned: none"
traced partitioned
# Each reply must be matched with its own request, also where other packets (ARP) arrive while the server is awake.
median=$(awk '/^  in all/ {gsub(",", ""); print int($5)}' /lab/partitioned.txt)
[ "$median" -lt 2000 ] || fail "half of the requests took $median us and more under partitioned: not their own replies"
# Ontime's cap watcher has the highest priority on purpose, but is reported too.
grep -E '^ +[0-9,]+ x, max' /lab/partitioned.txt | grep -v 'behind ontime-cap ' && fail "an inversion under partitioned"
for file in json html pftrace; do [ -s "/lab/partitioned.$file" ] || fail "no $file"; done

echo "== nothing is left behind, also when killed"
[ -z "$(ls /sys/kernel/tracing/instances)" ] || fail "an instance stays: $(ls /sys/kernel/tracing/instances)"
ontime trace $tenant > /lab/killed.txt 2>&1 &
trace=$!
within 40 sh -c 'ls /sys/kernel/tracing/instances | grep -q ontime-trace'
kill -9 $trace
within 40 sh -c '[ -z "$(ls /sys/kernel/tracing/instances)" ]'

echo "== a flood of events and small rings: the loss is told"
# The reader is stopped until the kernel has counted lost records, so that records are lost however fast the machine is.
# It is stopped only once it reads requests: before that no event is enabled, and nothing would be lost.
counted() { grep -qh "^$1: [1-9]" /sys/kernel/tracing/instances/ontime-trace-*/per_cpu/cpu*/stats; } # WHAT
touch /lab/flood
ontime trace $tenant --duration 600 --ring 64 > /lab/lossy.txt &
trace=$!
within 40 counted 'read events'
sleep 3
kill -STOP $trace
within 120 counted overrun
kill -CONT $trace
sleep 1
kill -INT $trace
wait $trace || fail "trace with small rings ended with $?"
grep -q '^LOST at least' /lab/lossy.txt || fail "nothing was lost, or it was not told: $(cat /lab/lossy.txt)"

echo "== break"
status=0
ontime trace $tenant --duration 60 --break 1 > /lab/broken.txt || status=$?
expect "status of --break" 1 $status
grep -q "a request of $name took" /lab/broken.txt || fail "the request that broke is not shown"
rm /lab/flood /lab/ask

if [ -z "${vm:-}" ]; then
    echo "== the cost, at the answers"
    # The requests come from a namespace beside the bridge, on the emulated clock, without the flood.
    ip netns add ask
    ip link add v-ask master br-rt type veth peer name ask netns ask
    ip -n ask address add 10.1.0.50/24 dev ask
    ip -n ask link set ask up
    ip link set v-ask up
    answers() { # minimum and median round trip, us, of 500
        /run/measures ip netns exec ask chrt -f 40 perl -MIO::Socket::INET -e '
            # perl-base has no Time::HiRes: clock_gettime(CLOCK_MONOTONIC) by its number on x86-64.
            sub now { syscall(228, 1, my $time = "\0" x 16); my ($s, $ns) = unpack("qq", $time); 1e6 * $s + $ns / 1e3 }
            my $s = IO::Socket::INET->new(PeerAddr => "10.1.0.9:11111", Proto => "udp") or die;
            for (1 .. 520) {
                my $from = now();
                $s->send("x" x 32);
                $s->recv(my $data, 100);
                push @us, now() - $from if $_ > 20;
                select(undef, undef, undef, 0.002);
            }
            @us = sort { $a <=> $b } @us;
            printf "%.1f %.1f\n", $us[0], $us[250];'
    }
    sleep 1
    without=$(answers)
    for mode in "" --segments-only; do
        ontime trace $tenant --nic v-ask --duration 60 $mode > /lab/cost.txt &
        trace=$!
        within 40 sh -c 'ls /sys/kernel/tracing/instances | grep -q ontime-trace'
        sleep 1
        with=$(answers)
        kill -INT $trace
        wait $trace
        echo "figures: minimum and median of 500 round trips, us: $without without trace, $with with trace $mode; $(sed -n 's/.*; \(a probe costs.*\)/\1/p' /lab/cost.txt)"
    done
fi

echo "== what cannot be traced is said"
status=0
ontime trace --vm nobody 2> /lab/said || status=$?
expect "status of an unknown VM" 64 $status
grep -q 'there is no VM nobody; there are: ' /lab/said || fail "said: $(cat /lab/said)"
ontime trace --nic nowhere 2> /lab/said && fail "traced a NIC that is not there"
grep -q 'there is no interface nowhere' /lab/said || fail "said: $(cat /lab/said)"
