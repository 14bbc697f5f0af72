#!/bin/sh
# Tests that need a host of their own: lab-test.sh ONTIME [TEST... | by-name]. Each test is a function; its output is
# kept, and shown if it fails. $CYCLES: how often path.sh applies and resets under traffic (3), with instructions of
# $INSTRUCTION ns (4). $KILLS: number of processes that guest_sockets_are_the_hosts kills (100).
set -u
ontime=$1
shift
wanted=$*
here=$(dirname "$0")
work=$(mktemp -d)
# $RESULTS: a file for one line per test, "ok NAME" or "failed NAME". The output of a failed test is kept beside it as
# NAME.log. A failed test shows the last lines of its output from the emulated host, and its files are kept.
passed=0 failed=0
trap 'rm -rf "$work"; exit 130' INT TERM

check() { # NAME
    echo "lab test $1 ..."
    began=$(date +%s)
    if "$1" > "$work/log" 2>&1; then
        passed=$((passed + 1))
        [ -z "${RESULTS:-}" ] || echo "ok $1" >> "$RESULTS"
        echo "lab test $1 ok ($(($(date +%s) - began)) s)"
        grep '^figures: ' "$work/log"
    else
        status=$?
        failed=$((failed + 1))
        find "$work" -name daemon.log -exec echo "the daemon's last words:" \; -exec tail -n 5 {} \; >> "$work/log"
        # The emulated host's, and that of a guest that guest-test.sh has booted.
        find "$work" \( -name console.log -o -path '*/out/console' \) -exec echo "its console: {}" \; >> "$work/log"
        if [ -n "${RESULTS:-}" ]; then
            echo "failed $1" >> "$RESULTS"
            cp "$work/log" "$(dirname "$RESULTS")/$1.log"
        fi
        echo "lab test $1 FAILED (status $status, $(($(date +%s) - began)) s)"
        tail -n 60 "$work/log"
    fi
}

status_and_files_come_back() {
    "$ontime-lab" run --out "$work/files" -- sh -c 'uname -v | grep -q PREEMPT_RT && echo kept > /lab/kept; exit 7'
    [ $? -eq 7 ] && [ "$(cat "$work/files/files/kept")" = kept ] && [ -s "$work/files/console.log" ]
}

# Runs a lab in $work/$1, and sends it a signal when it is up.
signalled() { # NAME SIGNAL
    mkdir -p "$work/$1"
    TMPDIR=$work/$1 "$ontime-lab" run -- sleep 600 &
    first=$!
    for _ in $(seq 300); do ls "$work/$1"/*/agent.sock > /dev/null 2>&1 && break; sleep 0.1; done
    sleep 3
    kill "-$2" $first
    status=0
    wait $first || status=$?
}

# A lab that is killed leaves its directory, which the next lab removes.
nothing_stays_behind() {
    lsns -n -t net -o NS > "$work/namespaces"
    signalled killed KILL
    for _ in $(seq 50); do
        pgrep -f "$work/killed" > /dev/null || break
        sleep 0.1
    done
    ! pgrep -af "$work/killed" || return 1
    lsns -n -t net -o NS | diff "$work/namespaces" - || return 1
    [ -n "$(ls "$work/killed")" ] && touch -d '2 minutes ago' "$work"/killed/* && signalled killed INT
    [ $status -eq 130 ] && [ -z "$(ls "$work/killed")" ] && ! pgrep -af "$work/killed" &&
        lsns -n -t net -o NS | diff "$work/namespaces" -
}

an_interrupted_lab_leaves_nothing() {
    signalled interrupted TERM
    [ $status -eq 143 ] && [ -z "$(ls "$work/interrupted")" ] && ! pgrep -f "$work/interrupted"
}

a_panic_is_told() {
    "$ontime-lab" run --out "$work/panic" -- sh -c 'echo c > /proc/sysrq-trigger'
    [ $? -eq 125 ] && grep -q 'Kernel panic' "$work/panic/console.log"
}

too_long_is_told() {
    mkdir "$work/long"
    TMPDIR=$work/long "$ontime-lab" run --timeout 3 -- sleep 600
    [ $? -eq 124 ] && [ -z "$(ls "$work/long")" ]
}

# In the emulated host: scripts/lab/NAME.sh, with the files that those scripts share in /lab. It runs in bash, which
# provides the command at which it ended.
inside() { # NAME OPTIONS...
    name=$1
    shift
    mkdir -p "$work/$name/files"
    cp "$here"/lab/*.sh "$work/$name/files/"
    cp "$here/../packaging/libvirt/hooks/qemu.d/ontime" "$work/$name/files/hook"
    "$ontime-lab" run --silence 600 --out "$work/$name" "$@" -- env "CYCLES=${CYCLES:-3}" \
        "BACKEND=${BACKEND:-paced}" "SLOW=${SLOW:-1}" "GUEST_MB=${GUEST_MB:-}" "GUEST_APPEND=${GUEST_APPEND:-}" \
        bash --posix "/lab/$name.sh"
}

kernels_boot_and_an_old_one_is_said() {
    "$ontime-lab" run --kernel 7.2 --out "$work/plain" -- uname -r > "$work/release" || return 1
    grep -q '^7.2' "$work/release" || return 1
    inside degraded --kernel 6.12-rt
}

lockdown_is_said() { inside lockdown --append lockdown=integrity; }

cpus_take_turns_on_the_virtual_clock() {
    for cpus in 0 9; do
        "$ontime-lab" run --cpus $cpus -- true 2> "$work/said"
        [ $? -eq 64 ] && grep -q "cpus $cpus: 1 to 8 CPUs" "$work/said" || return 1
    done
    inside cpus --cpus 2
}
clients_have_a_cpu_of_the_hosts_time() { inside clients --client-cpu; }
real_clock_has_two_cpus() {
    [ "$("$ontime-lab" run --clock real --cpus 2 --out "$work/two" -- nproc)" = 2 ]
}

a_hang_is_told() {
    "$ontime-lab" run --silence 60 --out "$work/hung" -- sh -c 'touch up; sleep 600' 2> "$work/said" &
    first=$!
    for _ in $(seq 1200); do [ -e "$work/hung/files/up" ] && break; sleep 0.1; done
    # Seen from outside, a stopped emulator looks like a host that hangs.
    pkill -STOP -f "$work/hung/agent.sock"
    status=0
    wait $first || status=$?
    cat "$work/said"
    [ $status -eq 125 ] && grep -q 'hangs: no sign of life for 60 s' "$work/said" && ! pgrep -f "$work/hung/agent.sock"
}

# The module is built for all its kernels, then runs in a guest, its RT sockets on a channel that can wake the vCPU.
guest_sockets_are_the_hosts() {
    # A second in the lab takes 4 to 20 s of the machine's time. A thousand processes are killed only in the guest that
    # this machine emulates directly.
    "$here/guest-module.sh" "$work/modules" &&
        TMPDIR=$work "$here/guest-test.sh" "$ontime" "$work/modules" 1 "wake=idle cycles=${KILLS:-100}"
}

# The smallest set of public test suites, in a guest that this machine emulates directly.
public_suites_agree() {
    KERNEL=lab TMPDIR=$work "$here/conformance.sh" "$ontime" ci || return 1
    awk '$1 == "total" { print "figures: " $4 " of " $2 " tests pass on outsourced sockets, " $3 " on the guest'"'"'s own" }' \
        "$work/log"
}

# The host module is built for the emulated host's kernel.
polls_are_short_on_an_old_kernel() { inside napi-weight --kernel 6.12-rt --host-module; }
a_send_waits_for_short_polls_only() {
    inside napi-wait --kernel 6.12-rt --host-module --client 'sh napi-wait-client.sh'
}
rt_queues_are_polled_on_an_old_kernel() { inside host-poll --kernel 6.12-rt --host-module --cpus 2; }
levels_have_their_places() { inside levels; }
# The crate's test, as cargo builds it, on a kernel whose process namespaces number their processes separately. With one
# CPU no thread would end while another places it.
a_reused_thread_number_is_not_left_changed() {
    # Built as `make test` builds it: for one crate alone, cargo would rebuild its libraries with fewer features.
    test=$(cargo test -q --manifest-path "$here/../Cargo.toml" --workspace --no-run --message-format json |
        sed -n 's/.*"executable":"\([^"]*reuse[^"]*\)".*/\1/p' | tail -n 1)
    mkdir -p "$work/reuse/files" && cp "$test" "$work/reuse/files/reuse" || return 1
    "$ontime-lab" run --clock real --cpus 2 --out "$work/reuse" -- /lab/reuse --nocapture > "$work/reuse.said"
    status=$?
    cat "$work/reuse.said"
    [ $status -eq 0 ] && sed -n 's/.*\(placed [1-9]\)/figures: \1/p' "$work/reuse.said" | grep .
}
busypoll_takes_no_interrupts() { inside busypoll --cpus 2; }
qdiscs_are_set_and_given_back() { inside qdiscs; }
tenants_are_found_placed_and_followed() { inside tenants; }
a_podman_container_has_its_place() {
    mkdir -p "$work/podman/files" && cp "$(command -v busybox)" "$work/podman/files/" && inside podman
}
a_spinning_vm_leaves_the_rest() { inside cap; }
# First its functions, then the benefit: beside a computing VM of the same level, a request waits under partitioned, but
# not under interrupt-context.
who_has_something_pending_goes_first() {
    inside pending || return 1
    grep '^figures: ' "$work/log"
    "$ontime-lab" bench xen-arm --method partitioned,interrupt-context --cpu-load 20 --beside rt --requests 30 --silence 900 \
        --json "$work/pending.json" || return 1
    perl -0777 -ne '
        my %max = /"method": "(\w[^"]*)".*?"latency_us": \{.*?"max": ([\d.]+)/gs;
        my ($waits, $first) = @max{"partitioned-20-rt", "interrupt-context-20-rt"};
        print "figures: slowest of 30 beside a VM of its level that computes: partitioned $waits us, interrupt-context $first us\n";
        exit !($waits > 1000 && $first < 500)' "$work/pending.json"
}
reserved_cpu_time_is_kept() { inside reservations; }
# The binary is that of `make sched-ext`.
reserved_cpu_time_is_kept_by_sched_ext() { BACKEND=sched_ext inside reservations; }
a_cpu_may_go_and_come() { inside hotplug --cpus 2; }
# The module and the application are built for the lab's guests. $GUEST_KERNEL: a directory of debug-kernel.sh instead;
# $GUEST_TEST_KEEP: a directory for what the test left.
with_deadlines() { # NAME OPTIONS...: as `inside`
    files=$work/$1/files tree=$work/$1/tree
    mkdir -p "$files" "$tree/lab"
    if [ -n "${GUEST_KERNEL:-}" ]; then
        cp "$GUEST_KERNEL/vmlinuz" "$GUEST_KERNEL/initrd" "$files/" &&
            cp "$GUEST_KERNEL/$(cat "$GUEST_KERNEL/version")/ontime.ko" "$tree/lab/" || return 3
    else
        version=$(cat "$(ls -td "${ONTIME_LAB_CACHE:-/var/cache/ontime/lab}"/*/version-guest | head -n 1)") || return 3
        "$here/guest-module.sh" "$work/modules" "$version" || return 3
        cp "$work/modules/$version/ontime.ko" "$tree/lab/"
    fi
    install -m 755 "$here/lab/deadlines-init.sh" "$tree/init"
    ${CC:-cc} -O2 -static -o "$tree/lab/rta" "$here/../guest/tests/rta.c" || return 3
    (cd "$tree" && find . | cpio -o -H newc --quiet) > "$files/extra.cpio"
    inside "$@" --timeout $((1800 * ${SLOW:-1}))
    status=$?
    [ -z "${GUEST_TEST_KEEP:-}" ] || cp -a "$files" "$GUEST_TEST_KEEP"
    return $status
}
deadlines_of_a_guest_are_kept() { with_deadlines deadlines; }
deadline_tasks_have_their_vcpus() { with_deadlines deadlines-vcpus --cpus 2; }
# The guest's first process is provided as in `ontime_lab::role`.
a_vcpu_does_not_wait_for_its_vmm() {
    files=$work/vmm/files tree=$work/vmm/tree
    mkdir -p "$files" "$tree"
    install -m 755 "$here/lab/vmm-init.sh" "$tree/role"
    printf '%s\n' '#!/bin/busybox sh' "/bin/busybox sed -i 's|^exec .*switch_root|/bin/busybox cp /role* /root/dev/; &|' /init" 'exec /init' > "$tree/with-role"
    chmod 755 "$tree/with-role"
    (cd "$tree" && printf 'role\nwith-role\n' | cpio -o -H newc --quiet) > "$files/role-reads.cpio"
    inside vmm
}
a_device_process_is_capped() { inside device-cap --guest-module --client 'sh device-cap-client.sh'; }
what_a_device_process_makes_pending_goes_first() {
    inside pending-device --guest-module --client 'sh device-cap-client.sh'
}
trace_names_the_inversions() { inside trace --client 'sh trace-client.sh'; }
trace_follows_a_vm() { inside trace-vm --client 'sh trace-client.sh'; }
path_holds_under_traffic_and_faults() {
    inside path --instruction "${INSTRUCTION:-4}" --timeout $((1800 + 60 * ${CYCLES:-3})) --client 'sh client.sh'
}

# Each test of a list in a process of its own, COUNT at a time; all results go to one file.
lanes() { # COUNT TEST...
    count=$1
    shift
    printf '%s\n' "$@" | xargs -P "$count" -n 1 sh "$0" "$ontime"
}

# The first one alone, because it counts the machine's network namespaces; then two at a time, on two cores, the longest
# first.
everyday() {
    lanes 1 nothing_stays_behind
    alone=$?
    lanes 2 tenants_are_found_placed_and_followed path_holds_under_traffic_and_faults public_suites_agree \
        a_vcpu_does_not_wait_for_its_vmm a_device_process_is_capped \
        what_a_device_process_makes_pending_goes_first a_spinning_vm_leaves_the_rest \
        kernels_boot_and_an_old_one_is_said a_podman_container_has_its_place a_hang_is_told \
        levels_have_their_places a_reused_thread_number_is_not_left_changed lockdown_is_said \
        qdiscs_are_set_and_given_back status_and_files_come_back too_long_is_told a_panic_is_told \
        real_clock_has_two_cpus an_interrupted_lab_leaves_nothing && [ $alone -eq 0 ]
}

# By name only (`make thorough`: about an hour), because they are long or need a build of their own:
# reserved_cpu_time_is_kept_by_sched_ext needs the binary of `make sched-ext`. All have the virtual clock. Where several
# emulated CPUs run side by side (real clock), a host with guests may hang by the emulator's fault (CONTRIBUTING.md).
by_name() {
    lanes 2 guest_sockets_are_the_hosts trace_names_the_inversions trace_follows_a_vm \
        reserved_cpu_time_is_kept_by_sched_ext who_has_something_pending_goes_first a_cpu_may_go_and_come \
        deadline_tasks_have_their_vcpus reserved_cpu_time_is_kept polls_are_short_on_an_old_kernel \
        deadlines_of_a_guest_are_kept cpus_take_turns_on_the_virtual_clock clients_have_a_cpu_of_the_hosts_time \
        busypoll_takes_no_interrupts a_send_waits_for_short_polls_only rt_queues_are_polled_on_an_old_kernel
}

if [ -z "$wanted" ] || [ "$wanted" = by-name ]; then
    export RESULTS="${RESULTS:-$work/results}"
    : > "$RESULTS"
    if [ -z "$wanted" ]; then everyday; else by_name; fi
    status=$?
    echo "emulated host: $(grep -c '^ok ' "$RESULTS") tests passed, $(grep -c '^failed ' "$RESULTS") failed"
    rm -rf "$work"
    exit $status
fi
for test in $wanted; do
    check "$test"
done
[ -n "${RESULTS:-}" ] || echo "$passed passed, $failed failed"
# Files that a message names are kept.
if [ "$failed" -gt 0 ]; then
    echo "their files: $work"
    exit 1
fi
rm -rf "$work"
