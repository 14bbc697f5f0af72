# In the emulated host: an RT VM whose vCPU leaves its guest for a device of QEMU's, four threads that never idle, and a
# tool that sends QEMU a query fifty times a second, as monitoring does. Rule vmm-place prevents the vCPU from waiting
# for QEMU's main thread while that waits for the four. vmm-init.sh is the guest's first process.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
printf '[[tenant]]\nname = "rt"\nclass = "rt"\nlevel = 0\n' > /etc/ontime/tenants.toml
lab-vm start rt reads rt 10.1.0.2
lab-vm wait rt
main=$(cat /run/lab-vm/rt.pid)
snapshot > /lab/before
for _ in 1 2 3 4; do sh -c 'while :; do :; done' & done
perl -MIO::Socket::UNIX -e '
    my $qmp = IO::Socket::UNIX->new(Peer => "/run/lab-vm/rt.qmp") or die "QMP: $!";
    $qmp->autoflush;
    <$qmp>;
    for (my $ask = "qmp_capabilities"; ; $ask = "query-blockstats") {
        print $qmp "{\"execute\":\"$ask\"}\n";
        <$qmp> // die "QMP ended";
        select(undef, undef, undef, 0.02);
    }' &
monitor=$!
daemon_starts

reads() { grep -c '^READ' /run/lab-vm/rt.log; }
measured() { # NAME: 1,200 readings, but for those that were under way
    from=$(reads)
    within 300 sh -c "[ \$(grep -c '^READ' /run/lab-vm/rt.log) -ge $((from + 4)) ]"
    grep '^READ' /run/lab-vm/rt.log | tail -n 3 | tr -d '\r' | awk -v name="$1" '
        {p99 = $5 > p99 ? $5 : p99; max = $7 > max ? $7 : max; p50 = $3}
        END {print "figures: " name ": p50 " p50 ", worst p99 of 3 x 400 " p99 ", slowest " max " us"; print max > "/lab/slowest"}'
    slowest=$(cat /lab/slowest)
}
within 40 placed "$main" "SCHED_FIFO 3"
measured "vmm-place"
with=$slowest
printf 'without = ["vmm-place"]\n' > /etc/ontime/host.toml
kill -HUP "$daemon"
within 40 placed "$main" "SCHED_OTHER 0"
measured "without"
kill -0 $monitor || fail "the tool that asks has ended"
[ "$slowest" -gt $((2 * with)) ] ||
    fail "the slowest reading took $slowest us without the rule, $with with it: the rule makes no difference"

rm /etc/ontime/host.toml
kill -HUP "$daemon"
within 40 placed "$main" "SCHED_FIFO 3"
# Threads that the main thread starts do not inherit its policy.
expect "threads of QEMU with the place of its main thread" 1 "$(for task in /proc/"$main"/task/*; do place "${task##*/}"; echo; done | grep -c '^SCHED_FIFO 3 ')"
resets
expect "QEMU's main thread after reset" "SCHED_OTHER 0 " "$(place "$main")"
snapshot > /lab/after
diff /lab/before /lab/after
