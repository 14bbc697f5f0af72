#!/bin/sh
# Measures the daemon's cost with 100 VMs and 64 queues: hundred.sh ONTIME [SECONDS]. Real processes with QEMU's name,
# arguments and thread names (no guest runs in them), a veth pair with 64 queues, and a separate daemon, all in
# namespaces that end with this script. Prints the time of a discovery, of a pass that places everything, and of a pass
# that finds everything in place, and the daemon's CPU time in SECONDS (60) without changes.
set -eu
. "$(dirname "$0")/daemon.sh"
seconds=${2:-60}
printf '[[tenant]]\nname = "vm*0"\nclass = "rt"\n' > "$work/etc/tenants.toml"

# A process with a VM's threads: 4 vCPUs, an iothread, a worker.
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

start_daemon
last_pass() { ontime status | sed -n 's/.*the last took \([0-9.]*\) ms.*/\1/p'; }
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
done | sort -n | awk '{all[NR] = $1} END {
    printf "a pass that finds all in place, of %d: least %s ms, median %s ms\n", NR, all[1], all[int((NR + 1) / 2)]
}'
echo "$(metric ontime_discover_seconds_sum) $before $(metric ontime_discover_seconds_count) $count" |
    awk '{printf "discovering, mean of %d: %.1f ms\n", $3 - $4, ($1 - $2) / ($3 - $4) * 1000}'
sleep 2
ran() { cat /proc/$daemon/task/*/schedstat | awk '{sum += $1} END {print sum}'; }
before=$(ran)
sleep "$seconds"
echo "the daemon's CPU time in $seconds s of idleness: $(echo "$(ran) $before" |
    awk '{printf "%.2f ms", ($1 - $2) / 1e6}')"
