#!/usr/bin/env bash
# What `make test` leaves out, part by part: thorough.sh ONTIME. A part that fails keeps none of the others from
# running. The last lines tell of each part how it went and how long it took, and name the tests that failed. The output
# of part NAME is kept in target/test/thorough-NAME.log.
set -uo pipefail
ontime=$1
here=$(dirname "$0")
logs=$here/../target/test
mkdir -p "$logs"
summary='' failed=0

part() { # NAME COMMAND...
    name=$1 log=$logs/thorough-$1.log
    shift
    echo "thorough: $name ..."
    began=$(date +%s)
    "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    result=passed
    [ "$status" -eq 0 ] || result="FAILED (status $status)" failed=1
    line="thorough: $name $result, $(($(date +%s) - began)) s"
    echo "$line"
    tests=$(sed -n 's/^test \(.*\) \.\.\. FAILED$/  failed: \1/p; s/^lab test \([^ ]*\) FAILED.*/  failed: \1/p
        s/^FAILED in stage \([^:]*\):.*/  failed: stage \1/p' "$log")
    summary+="$line"$'\n'${tests:+$tests$'\n'}
}

# Needed by the lab's test of back end sched_ext.
part sched-ext "${MAKE:-make}" --no-print-directory sched-ext
part real-speed cargo test --workspace --no-fail-fast -- --ignored real_speed
part plans cargo test --release -p ontime-sched --lib -- --ignored in_10_000_sets
part images "$ontime-lab" images
part lab "$ontime-lab-tests" by-name
part systemd "${MAKE:-make}" --no-print-directory systemd-test
# On this kernel AppArmor's profile of libvirt refuses the device's sockets, unless the lines of the page are there.
part apparmor env KERNEL=6.12-rt "${MAKE:-make}" --no-print-directory systemd-test STAGES=apparmor
part kubernetes "${MAKE:-make}" --no-print-directory dra-test test-kubernetes test-kubelet
printf '%s' "$summary"
exit "$failed"
