#!/bin/sh
# debug-test.sh ONTIME: the tests of both modules on kernels that find errors in them (debug-kernel.sh), in guests that
# this machine emulates: `guest` (guest-test.sh), `conformance` (conformance.sh) and on 6.12 `host` (the host module's,
# lab/tests/host-module-guest.sh); and `deadlines` in a guest of the emulated host (`ontime-lab-tests`). It fails if a
# test fails, or if a kernel reports what kernel/guest/tests/debug-known.txt does not explain. Which kernels: $BUILDS
# (kasan kcsan), $FLAVOURS (cloud rt), $SERIES (6.12); which of the tests: $TESTS (all), $SUITE (ci) of the conformance
# tests, $KILLS (200) killed processes. Such a kernel is slow: limits of time are $SLOW (6) times as long. Logs stay in
# target/debug-kernels. It needs root, and the lab's image.
set -eu
ontime=$(realpath "${1:?debug-test.sh ONTIME}")
here=$(cd "$(dirname "$0")" && pwd)
logs=$here/../target/debug-kernels
slow=${SLOW:-6} series=${SERIES:-6.12}
seconds=$((7200 * slow))
# KASAN goes on after its first report. With preemption everywhere more orders of events occur. Debian's watchdog is too
# impatient for an emulated CPU.
export GUEST_APPEND="nokaslr loglevel=5 kasan_multi_shot preempt=full watchdog_thresh=60" GUEST_MB=2048
export GUEST_SECONDS=$seconds GUEST_TEST_SECONDS=$seconds
mkdir -p "$logs"
failed=0

run() { # TEST: on $kernel, with its result in $logs/$name
    name=$build-$flavour-$1
    echo "debug test: $name"
    rm -rf "$logs/$name" "$logs/$name.log"
    began=$(date +%s)
    status=0
    "test_$1" > "$logs/$name.log" 2>&1 || status=$?
    [ $status -eq 0 ] || { failed=1; tail -n 40 "$logs/$name.log"; }
    known=$here/../kernel/guest/tests/debug-known.txt
    python3 "$here/debug-reports.py" "$known" "$logs/$name" > "$logs/$name.reports" ||
        failed=1
    cat "$logs/$name.reports"
    echo "debug test: $name ended with $status after $(($(date +%s) - began)) s"
}
test_guest() {
    GUEST_KERNEL=$kernel GUEST_TEST_KEEP=$logs/$name \
        "$here/guest-test.sh" "$ontime" "$kernel" 1 "direct slow=$slow cycles=${KILLS:-200}"
}
test_conformance() {
    KERNEL=$kernel MODULES=$kernel "$here/conformance.sh" "$ontime" "${SUITE:-ci}" || status=$?
    cp -a "$here/../target/conformance/out" "$logs/$name"
    return $status
}
test_host() {
    GUEST_KERNEL=$kernel GUEST_TEST_KEEP=$logs/$name GUEST_TEST=$here/../lab/tests/host-module-guest.sh \
        GUEST_FILES=$kernel/$(cat "$kernel/version") "$here/guest-test.sh" "$ontime" "$kernel" 0 direct
}
test_deadlines() {
    GUEST_KERNEL=$kernel GUEST_TEST_KEEP=$logs/$name SLOW=$slow GUEST_MB=1024 \
        "$ontime-lab-tests" deadline_tasks_have_their_vcpus
}

for build in ${BUILDS:-kasan kcsan}; do
    for flavour in ${FLAVOURS:-cloud rt}; do
        kernel=$("$here/debug-kernel.sh" "$build" "$flavour" "$series")
        for test in ${TESTS:-guest conformance host deadlines}; do
            [ "$test" = host ] && [ "$series" != 6.12 ] || run "$test"
        done
    done
done
exit $failed
