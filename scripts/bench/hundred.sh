#!/bin/sh
# Measures the daemon's cost with 100 VMs and 64 queues: hundred.sh ONTIME [SECONDS]. Real processes with QEMU's name,
# arguments and thread names (no guest runs in them), a veth pair with 64 queues, and a separate daemon, all in
# namespaces that end with this script. Prints the time of a discovery, of a pass that places everything, and of a pass
# that finds everything in place, and the daemon's CPU time in SECONDS (60) without changes.
set -eu
[ "${ONTIME_BENCH_INSIDE:-}" = yes ] ||
    exec env ONTIME_BENCH_INSIDE=yes unshare --net --mount --pid --fork --kill-child --mount-proc "$0" "$@"
ontime=$1
here=$(dirname "$0")
seconds=${2:-60}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
mount -t sysfs sysfs /sys
mkdir -p "$work/run" "$work/state" "$work/etc" "$work/debug"
printf '[[tenant]]\nname = "vm*0"\nclass = "rt"\n' > "$work/etc/tenants.toml"
printf 'rescan-seconds = 3600\n' > "$work/etc/daemon.toml"

# A process with a VM's threads: 4 vCPUs, an iothread, a worker.
cc -O2 -pthread -o "$work/qemu-system-x86_64" "$here/vm.c"
for number in $(seq 100); do
    "$work/qemu-system-x86_64" -name "guest=vm$number,debug-threads=on" &
done
for _ in $(seq 600); do
    [ "$(cat /proc/[0-9]*/task/[0-9]*/comm 2> /dev/null | grep -c '^CPU ./KVM')" -lt 400 ] || break
    sleep 0.1
done
ip link set lo up
ip link add q0 numtxqueues 64 numrxqueues 64 type veth peer name q1
ethtool -K q0 gro on
ethtool -L q0 rx 64 tx 64
ip link set q1 up
ip link set q0 up

ontime() {
    verb=$1; shift; "$ontime" "$verb" --run-dir "$work/run" --state-dir "$work/state" --config-dir "$work/etc" --debugfs "$work/debug" "$@"
}
ontime daemon 2> "$work/log" &
daemon=$!
for _ in $(seq 200); do
    status=0
    ontime status > "$work/status" 2>&1 || status=$?
    [ $status -gt 2 ] || break
    sleep 0.1
done
last_pass() { ontime status | sed -n 's/.*the last took \([0-9.]*\) ms.*/\1/p'; }
metric() { # NAME
    perl -MIO::Socket::UNIX -e 'my $s = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die "no daemon: $!";
        print $s "GET /metrics HTTP/1.0\r\n\r\n"; while (<$s>) { print "$1\n" if /^\Q$ARGV[1]\E (\S+)$/ }' "$work/run/ontime.sock" "$1"
}
[ "$(ontime ps | grep -c ' qemu ')" = 100 ] || { echo "hundred: not 100 VMs were found"; ontime ps | head; exit 1; }
echo "the first pass, which places 10 RT VMs and threads 64 queues: $(last_pass) ms"
for _ in $(seq 5); do
    ontime reset > /dev/null
    ontime apply > /dev/null || true
    echo "a pass after a reset: $(last_pass) ms"
done
before=$(metric ontime_discover_seconds_sum) count=$(metric ontime_discover_seconds_count)
for _ in $(seq 20); do
    ontime apply > /dev/null || true
    last_pass
done | sort -n | awk '{all[NR] = $1} END {print "a pass that finds all in place, of " NR ": least " all[1] " ms, median " all[int((NR + 1) / 2)] " ms"}'
echo "$(metric ontime_discover_seconds_sum) $before $(metric ontime_discover_seconds_count) $count" |
    awk '{printf "discovering, mean of %d: %.1f ms\n", $3 - $4, ($1 - $2) / ($3 - $4) * 1000}'
sleep 2
ran=$(cat /proc/$daemon/task/*/schedstat | awk '{sum += $1} END {print sum}')
sleep "$seconds"
after=$(cat /proc/$daemon/task/*/schedstat | awk '{sum += $1} END {print sum}')
echo "the daemon's CPU time in $seconds s of idleness: $(echo "$after $ran" | awk '{printf "%.2f ms", ($1 - $2) / 1e6}')"
ontime reset > /dev/null
kill $daemon
wait $daemon || true
