#!/bin/sh
# Tests that need a host of their own: lab-test.sh ONTIME. Each is a function; output is kept and shown on failure.
set -u
ontime=$1
work=$(mktemp -d)
passed=0 failed=0

check() { # NAME COMMAND...
    name=$1
    shift
    echo "lab test $name ..."
    if "$@" > "$work/log" 2>&1; then
        passed=$((passed + 1))
        echo "lab test $name ok"
    else
        failed=$((failed + 1))
        echo "lab test $name FAILED ($?)"
        tail -n 40 "$work/log"
    fi
}

status_and_files_come_back() {
    "$ontime" lab run --out "$work/files" -- sh -c 'uname -v | grep -q PREEMPT_RT && echo kept > /lab/kept; exit 7'
    [ $? -eq 7 ] && [ "$(cat "$work/files/files/kept")" = kept ] && [ -s "$work/files/console.log" ]
}

nothing_stays_behind() {
    "$ontime" lab run --out "$work/killed" -- sleep 600 &
    first=$!
    for _ in $(seq 300); do [ -S "$work/killed/agent.sock" ] && break; sleep 0.1; done
    sleep 3
    kill -9 $first
    wait $first
    for _ in $(seq 50); do
        pgrep -f "$work/killed" > /dev/null || return 0
        sleep 0.1
    done
    echo "processes of the killed lab still run:"
    pgrep -af "$work/killed"
    return 1
}

a_panic_is_told() {
    "$ontime" lab run --out "$work/panic" -- sh -c 'echo c > /proc/sysrq-trigger'
    [ $? -eq 125 ] && grep -q 'Kernel panic' "$work/panic/console.log"
}

too_long_is_told() {
    "$ontime" lab run --timeout 3 -- sleep 600
    [ $? -eq 124 ]
}

kernels_boot() {
    for kernel in 7.2 6.12-rt; do
        "$ontime" lab run --kernel $kernel -- uname -r > "$work/release" || return 1
        grep -q "^${kernel%-rt}" "$work/release" || return 1
    done
}

real_clock_has_two_cpus() {
    [ "$("$ontime" lab run --clock real --cpus 2 -- nproc)" = 2 ]
}

host_is_placed_and_given_back() {
    "$ontime" lab run -- sh -c "$(cat "$(dirname "$0")/lab/placed.sh")"
}

check status_and_files_come_back status_and_files_come_back
check a_panic_is_told a_panic_is_told
check too_long_is_told too_long_is_told
check nothing_stays_behind nothing_stays_behind
check kernels_boot kernels_boot
check real_clock_has_two_cpus real_clock_has_two_cpus
check host_is_placed_and_given_back host_is_placed_and_given_back
rm -rf "$work"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
