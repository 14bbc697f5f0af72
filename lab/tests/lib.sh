# Functions that the tests in the emulated host share; sourced. Each test works in /lab, which holds its files. A trap
# prints where a test ended, because `set -e` prints nothing. The daemon's log is in /run: a write to /lab is a call to
# the emulator, and a process that is killed during the call waits for its reply.
log=/run/daemon.log
trap 'status=$?; [ $status -eq 0 ] || echo "ended with $status at: ${BASH_COMMAND:-}"; [ ! -e $log ] || cp $log /lab/' EXIT
fail() {
    echo "FAILED: $*"
    [ ! -e $log ] || tail -n 20 $log
    blocked
    timeout 5 cat /proc/loadavg
    metrics 2> /dev/null | grep '^ontime_pass'
    exit 1
}
blocked() { # threads in uninterruptible sleep, and where in the kernel
    for task in $(ps -eLo tid,stat | awk '$2 ~ /^D/ {print $1}'); do
        ps -Lo tid,pid,stat,args -q "$task" | tail -n 1
        head -n 8 "/proc/$task/stack"
    done
}
expect() { [ "$2" = "$3" ] || fail "$1: wanted '$2', found '$3'"; } # WHAT WANTED ACTUAL
within() { # SECONDS COMMAND...: until it succeeds, on the host's clock. A pass may take seconds
    # there, beside VMs at real-time priority on one CPU, and the daemon pauses for three seconds after it. The tenants'
    # watcher rescans after 60 s. With a debug kernel in the guest it is $SLOW times as long.
    end=$(($(uptime_ms) + $1 * 1000 * ${SLOW:-1}))
    shift
    until "$@" > /dev/null 2>&1; do
        [ "$(uptime_ms)" -lt "$end" ] || fail "not in time: $*"
        sleep 0.1
    done
}
uptime_ms() { read -r up rest < /proc/uptime; whole=${up%.*}; echo $((whole * 1000 + 1${up#*.} * 10 - 1000)); }
# TID: 'SCHED_FIFO 47 '
place() { chrt -p "$1" | sed -n 's/|SCHED_RESET_ON_FORK//; s/.*policy: //p; s/.*priority: //p' | tr '\n' ' '; }
placed() { [ "$(place "$1")" = "$2 " ]; }
# PID PATTERN
thread() { for task in /proc/"$1"/task/*; do case $(cat "$task/comm") in $2) echo "${task##*/}" ;; esac; done; }
# /run/measures COMMAND...: runs COMMAND in a cgroup whose real-time threads need no cap, for clients and measurements
# beside the daemon.
mkdir -p /sys/fs/cgroup/measures /etc/ontime/daemon.conf.d
printf '[cap]\nuncapped = ["/measures"]\n' > /etc/ontime/daemon.conf.d/measures.toml
printf '#!/bin/sh\necho $$ > /sys/fs/cgroup/measures/cgroup.procs && exec "$@"\n' > /run/measures
chmod +x /run/measures
daemon_starts() {
    ontime daemon "$@" >> $log 2>&1 &
    daemon=$!
    within 60 answers
}
answers() { status=0; timeout 10 ontime status || status=$?; [ $status -le 2 ]; } # 2: a critical finding
daemon_dies() { # by SIGKILL
    kill -9 "$daemon"
    within 30 is_over "$daemon"
    wait "$daemon" || true
}
is_over() { case $(ps -o stat= -q "$1") in '' | Z*) ;; *) false ;; esac; } # PID: it has ended
# METHOD, with any findings
applies() { ontime apply --method "$1" > /lab/applied 2>&1 || [ $? -le 2 ] || fail "$1 was not applied: $(cat /lab/applied)"; }
resets() { ontime reset > /lab/reset 2>&1 || fail "reset: $(cat /lab/reset)"; }
snapshot() { # every knob that the daemon may touch, by name, of threads that are there before and after
    for task in /proc/[0-9]*/task/[0-9]*; do
        name=$(cat "$task/comm" 2> /dev/null) || continue
        case $name in
        irq/* | irq_work/* | napi/* | ksoftirqd/* | ktimers/* | rcuc/* | backlog_napi/* | vhost-* | CPU* | kvm-pit* | qemu-system*) ;;
        *) continue ;;
        esac
        echo "$name $(chrt -p "${task##*/}" 2> /dev/null | sed 's/pid [0-9]*//' | tr '\n' ' ')$(taskset -p "${task##*/}" 2> /dev/null | sed 's/.*mask//')"
    done | sort
    for file in /sys/class/net/*/threaded /sys/class/net/*/queues/tx-*/xps_cpus /proc/sys/net/core/skb_defer_max \
        /proc/sys/net/core/dev_weight /proc/irq/default_smp_affinity \
        /proc/sys/kernel/sched_rt_runtime_us /sys/module/kvm/parameters/halt_poll_ns /proc/irq/*/smp_affinity_list \
        /sys/kernel/debug/sched/*_server/cpu*/runtime; do
        [ -e "$file" ] && echo "$file $(cat "$file" 2> /dev/null)"
    done
    for nic in /sys/class/net/*; do tc qdisc show dev "${nic##*/}" | sed "s/^/${nic##*/} /; s/ qdisc \([a-z_]*\) [0-9a-f]*:/ \1/"; done
    for nic in /sys/class/net/*; do
        for side in ingress egress; do tc filter show dev "${nic##*/}" $side 2> /dev/null | sed "s/^/${nic##*/} $side /"; done
        ethtool -c "${nic##*/}" 2> /dev/null | sed -n "s/^rx-usecs:/${nic##*/} rx-usecs/p"
    done
    true
}
metrics() { # the daemon's
    timeout 30 perl -MIO::Socket::UNIX -e '
        my $s = IO::Socket::UNIX->new(Peer => "/run/ontime/ontime.sock") or die "no daemon: $!";
        print $s "GET /metrics HTTP/1.0\r\n\r\n";
        print while <$s>'
}
metric() { # NAME: the daemon's metrics that begin so, added up
    metrics | perl -ne 'BEGIN { $name = shift; $sum = 0 } $sum += $1 if /^\Q$name\E.* (\S+)$/; END { print "$sum\n" if $. }' "$1"
}
