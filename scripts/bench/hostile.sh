#!/bin/sh
# Measures by how much 100 hostile processes delay the placement of a new RT VM: hostile.sh ONTIME [ROUNDS]. ROUNDS (40)
# times without them, and as often beside them, a process with a VM's threads (no guest runs in it) starts, touches the
# file that libvirt's hook touches, and waits until its vCPUs have real-time priority. The hostile processes belong to
# an ordinary user. Each is called kvm, has the VM's name, 19,900 descriptors, 200 threads with vCPUs' names, and 100 KB
# of command line. All this, and a separate daemon, is in namespaces that end with this script. There are no process
# events in these, so only the hook and the daemon's look every 5 s tell of a new VM.
set -eu
. "$(dirname "$0")/daemon.sh"
rounds=${2:-40}
processes=100
user=65534

fail() { # WHAT
    echo "hostile: $1; the daemon's log ends:" >&2
    tail -n 20 "$work/log" >&2
    exit 1
}

# Starts VMs, one after the other, and writes the sorted times until they have their place, in ms. Prints the name, the
# median, the worst, and the mean time of a discovery.
place() { # NAME FILE
    sum=$(metric ontime_discover_seconds_sum) count=$(metric ontime_discover_seconds_count)
    for _ in $(seq "$rounds"); do
        ONTIME_BENCH_POKE=$work/run/poke "$work/qemu-system-x86_64" -name guest=web,debug-threads=on || break
        sleep 1
    done | awk '{printf "%.1f\n", $1 / 1000}' | sort -n > "$2"
    [ "$(wc -l < "$2")" = "$rounds" ] || fail "a VM was not placed"
    looked="$sum $count $(metric ontime_discover_seconds_sum) $(metric ontime_discover_seconds_count)"
    awk -v name="$1" -v looked="$looked" '{all[NR] = $1} END {
        split(looked, of)
        look = (of[3] - of[1]) / (of[4] - of[2]) * 1000
        printf "%-22s %12.1f %12.1f %20.1f\n", name, all[int((NR + 1) / 2)], all[NR], look
    }' "$2"
}

# Ordinary users may go through this directory to the program, and not list it.
chmod 711 "$work"
cc -O2 -pthread -o "$work/kvm" "$here/hostile.c"
chmod 755 "$work/kvm"
printf '[[tenant]]\nname = "web"\nclass = "rt"\n' > "$work/etc/tenants.toml"
start_daemon
echo "from the hook to the place of the last vCPU, ms, real clock; $rounds VMs each; $(nproc) CPUs, load average" \
    "$(cut -d ' ' -f 1 /proc/loadavg)"
printf '%-22s %12s %12s %20s\n' "" median worst "a discovery, mean"
place "without" "$work/without"

mkfifo "$work/ready"
long=$(head -c 100000 /dev/zero | tr '\0' x)
for _ in $(seq $processes); do
    prlimit --nofile=20000:20000 setpriv --reuid $user --regid $user --clear-groups \
        "$work/kvm" -name web -append "$long" > "$work/ready" &
done
[ "$(timeout 120 head -c $processes "$work/ready" | wc -c)" = $processes ] || fail "not all hostile processes started"
found=0
for _ in $(seq 20); do
    touch "$work/run/poke"
    sleep 1
    found=$(ontime ps 2> /dev/null | grep -c ' qemu ') || true
    [ "$found" != $processes ] || break
done
[ "$found" = $processes ] || fail "the daemon found $found hostile processes of $processes"
place "$processes hostile processes" "$work/beside"
[ "$(ps -L -u $user -o cls= | grep -c FF)" = 0 ] || fail "a hostile thread has real-time priority"

awk 'FNR == NR {without[FNR] = $1; next} {beside[FNR] = $1} END {
    middle = int((FNR + 1) / 2)
    usual = without[middle]
    printf "the delay: median %.1f ms (ratio %.2f), ", beside[middle] - usual, beside[middle] / usual
    printf "worst beside them less median without %.1f ms (aim: at most 100 ms)\n", beside[FNR] - usual
}' "$work/without" "$work/beside"
echo "reading charged to the user of the hostile processes:" \
    "$(metric "ontime_discover_account_seconds_total{account=\"user $user\"}") s"
