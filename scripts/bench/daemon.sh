# The benchmarks here begin with this file and their own arguments, ONTIME first. It moves the script into namespaces
# that end with it, builds a program with a VM's threads ($work/qemu-system-x86_64), and gives the script a separate
# daemon with directories of its own (start_daemon). At the end of the script the daemon's settings are reset.
# shellcheck shell=sh
: "${1:?$(basename "$0") ONTIME}"
[ "${ONTIME_BENCH_INSIDE:-}" = yes ] ||
    exec env ONTIME_BENCH_INSIDE=yes unshare --net --mount --pid --fork --kill-child --mount-proc "$0" "$@"
ontime=$1
here=$(dirname "$0")
work=$(mktemp -d)
daemon=
directories="--run-dir $work/run --state-dir $work/state --config-dir $work/etc --debugfs $work/debug"
# Ctrl-C ends the daemon too. A reset beside a daemon that is ending would get no answer; after it, it reads the
# journal.
ends() {
    [ -z "$daemon" ] || kill "$daemon" || true
    [ -z "$daemon" ] || wait "$daemon" || true
    [ -z "$daemon" ] || ontime reset > /dev/null || true
    rm -rf "$work"
}
trap 'ends 2> /dev/null' EXIT
trap 'exit 130' INT TERM
mount -t sysfs sysfs /sys
mkdir -p "$work/run" "$work/state" "$work/etc" "$work/debug"
printf 'rescan-seconds = 3600\n' > "$work/etc/daemon.toml"
cc -O2 -pthread -o "$work/qemu-system-x86_64" "$here/vm.c"

ontime() { # COMMAND [ARGUMENT...]
    # shellcheck disable=SC2086 # directories are words
    "$ontime" "$@" $directories
}

# Starts the daemon, whose process number is $daemon, and waits for the end of its first pass.
start_daemon() {
    # Not by the function, so that the number is the daemon's and not a shell's.
    # shellcheck disable=SC2086
    "$ontime" daemon $directories 2> "$work/log" &
    daemon=$!
    for _ in $(seq 200); do
        ! ontime metrics > /dev/null 2>&1 || return 0
        sleep 0.1
    done
    echo "$(basename "$0"): the daemon does not answer; its log:" >&2
    tail -n 20 "$work/log" >&2
    exit 1
}

metric() { # NAME
    ontime metrics | sed -n "s/^$1 //p"
}
