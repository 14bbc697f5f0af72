# In the guest: compares outsourced sockets (the module) with the guest's own stack, and runs unmodified programs on
# outsourced sockets. Parameters in /lab/args: channels=N; wake=idle or interrupt; cycles=N: number of processes killed
# (1000); slow=N: on a kernel that checks itself, durations and limits of time are N times as long (1); limit=S: time
# limit of each check (600 times that); only=NAME,NAME: run only these checks; pairs=N: one in N of the pairs of
# operations in a state of a socket (9).
failed=0
word() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /lab/args; }
SLOW=$(word slow)
export SLOW=${SLOW:-1}
limit=$(word limit)
limit=${limit:-$((600 * SLOW))}
only=$(word only)
cycles=$(word cycles)

# The first run of the VM is killed with sockets open.
if grep -q ontime.first /proc/cmdline; then
    insmod /lab/ontime.ko || exit 1
    python3 -c '
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
print("FIRST-RUN", file=open("/dev/console", "w"))
time.sleep(10000)'
    exit 1
fi

check() { # NAME COMMAND...
    name=$1
    shift
    case ,$only, in ,, | *,"$name",*) ;; *) return ;; esac
    ("$@") > "out/$name.log" 2>&1 &
    job=$!
    (sleep "$limit" && echo "too long" >> "out/$name.log" && kill -9 $job) &
    dog=$!
    wait $job
    status=$?
    kill $dog 2> /dev/null
    # Without the module every test would pass on the guest's own stack.
    [ -d /sys/module/ontime ] || status="the module is gone"
    [ "$status" = 0 ] && echo "ok $name" | tee /dev/console && return
    echo "FAILED $name ($status)"
    tail -n 20 "out/$name.log"
    failed=1
}
steer() { echo "$1" > /sys/module/ontime/parameters/steer; }
python() { python3 "/lab/$1.py"; }

same_calls() {
    steer none
    ./conform > out/own
    steer all
    ./conform > out/outsourced
    steer all
    tail -n 1 out/own | grep -q end && diff out/own out/outsourced
}
# Every operation in every state of a socket, and options with values of odd lengths: on the main queues, and on the
# channel if there is one.
same_edges() {
    for mode in none all; do
        steer $mode
        ./conform edges lengths > out/edges-$mode
    done
    tail -n 1 out/edges-none | grep -q end && diff out/edges-none out/edges-all || return 1
    grep -q 'channels=[1-9]' /lab/args || return 0
    taskset -c 0 chrt -f 40 ./conform edges lengths > out/edges-rt
    diff out/edges-none out/edges-rt
}

# Two operations one after the other, in every state. Several run at the same time: where one differs, it runs again
# alone, and so slowly that no report is late.
compare_pairs() { # NAME: of the files
    for mode in none all; do
        steer $mode
        ./conform pairs > "out/$1-$mode" || return 1
    done
    tail -n 1 "out/$1-none" | grep -q end && diff "out/$1-none" "out/$1-all" > "out/$1-differ"
}
same_pairs() {
    PAIRS=$(word pairs)
    export PAIRS
    compare_pairs pairs || {
        sed -n 's/^[<>] pair \([0-9]*\) .*/\1/p' out/pairs-differ | sort -un > out/pairs-again
        [ -s out/pairs-again ] || return 1
        PAIRS_ONLY=out/pairs-again
        export PAIRS_ONLY
        compare_pairs pairs-alone || { cat out/pairs-alone-differ; return 1; }
    }
    grep -c '^pair' out/pairs-all
}

# What conform does not cover, compared in the same way.
unusual() {
    for mode in none all; do
        steer $mode
        python3 /lab/unusual.py > "out/unusual-$mode" || return 1
    done
    tail -n 1 out/unusual-none | grep -q end && diff out/unusual-none out/unusual-all
}

# Corners of the kernel, also on a channel.
seldom() {
    for mode in none all; do
        steer $mode
        python3 /lab/seldom.py > "out/seldom-$mode" || return 1
    done
    tail -n 1 out/seldom-none | grep -q end && diff out/seldom-none out/seldom-all || return 1
    grep -q 'channels=[1-9]' /lab/args || return 0
    taskset -c 0 chrt -f 40 python3 /lab/seldom.py > out/seldom-rt
    diff out/seldom-none out/seldom-rt
}

# Small messages on streams, at a real-time priority on the vCPU that has a channel: outsourced sockets receive them
# before the program calls recv.
received_ahead() {
    for mode in none all; do
        steer $mode
        taskset -c 0 chrt -f 40 python3 /lab/ahead.py > "out/ahead-$mode" || return 1
    done
    tail -n 1 out/ahead-none | grep -q end && diff out/ahead-none out/ahead-all
}

# Guarantees for sockets on a channel: busy sockets get its places for receiving ahead, and a thread that computes at a
# lower priority does not delay a receiver.
on_channel() {
    grep -q 'channels=[1-9]' /lab/args || return 0
    python "$1"
}

# The same calls at a real-time priority: the sockets are on the vCPU's channel. With wake=idle the channel ends halts
# and causes no interrupt.
channel_interrupts() {
    device=$(dmesg | sed -n 's/.*ontime \(virtio[0-9]*\): channel 1:.*/\1/p' | tail -n 1)
    awk -v name="$device-config" '$NF == name {for (i = 2; $i ~ /^[0-9]+$/; i++) n += $i} END {print n + 0}' /proc/interrupts
}
rt_channel() {
    grep -q 'channels=[1-9]' /lab/args || return 0
    before=$(channel_interrupts)
    taskset -c 0 chrt -f 40 ./conform > out/outsourced-rt
    after=$(channel_interrupts)
    echo "interrupts of the channel: $before before, $after after"
    diff out/own out/outsourced-rt || return 1
    if grep -q 'wake=interrupt' /lab/args; then
        [ "$after" -gt "$before" ]
    else
        cat /sys/devices/system/cpu/cpuidle/current_driver
        [ "$(cat /sys/devices/system/cpu/cpuidle/current_driver)" = ontime ] && [ "$after" = "$before" ]
    fi
}

# Which sockets are outsourced and which are not, by the number of the module's sockets in use.
in_use() { awk '/^ONTIME/ {n += $3} END {print n + 0}' /proc/net/protocols; }
steering() {
    cat /proc/net/protocols | grep ONTIME
    steer none
    python3 -c 'import socket; socket.socket().bind(("127.0.0.1", 5001)); print("own")' || return 1
    steer all
    mkdir -p /sys/fs/cgroup/in/below /sys/fs/cgroup/out
    steer cgroup
    echo /in > /sys/module/ontime/parameters/cgroups
    for group in in in/below out; do
        (echo 0 > /sys/fs/cgroup/$group/cgroup.procs
         python3 -c 'import socket; s = socket.socket(); print(open("/proc/net/tcp").read().count(":1389") if not s.bind(("127.0.0.1", 5001)) and not s.listen() else 0)') > "out/steer-${group##*/}"
    done
    steer all
    # A listener of the guest's own stack is in the guest's table, an outsourced one is not.
    [ "$(cat out/steer-in) $(cat out/steer-below) $(cat out/steer-out)" = "0 0 1" ]
}

# A socket is outsourced whichever call creates it. A socket that cannot be outsourced is counted, and the log names its
# program.
bypassed() { awk -v why="$1" 'index($0, why) {print $1}' /sys/module/ontime/parameters/bypassed; }
every_way() {
    for mode in none all; do
        steer $mode
        ./conform whose > out/whose-$mode || return 1
    done
    cat out/whose-all
    [ "$(grep -c ': own$' out/whose-none) $(grep -c ': outsourced$' out/whose-all)" = "6 6" ] || return 1
    before=$(bypassed 'not served')
    python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132)' 2> /dev/null
    [ "$(bypassed 'not served')" -gt "$before" ] && dmesg | grep 'ontime: python3.*protocol 132 stays'
}

# BPF programs attached to a control group would not see the operations of outsourced sockets. In such a group, and
# below it, sockets stay on the guest's own stack.
filtered_groups_stay() {
    mkdir -p /sys/fs/cgroup/filtered/below
    ./conform filtered /sys/fs/cgroup/filtered || return 1
    before=$(bypassed 'BPF')
    for group in filtered filtered/below; do
        (echo 0 > /sys/fs/cgroup/$group/cgroup.procs && ./conform whose) > out/whose-filtered
        [ "$(grep -c ': own$' out/whose-filtered)" = 6 ] || { cat out/whose-filtered; return 1; }
    done
    (echo 0 > /sys/fs/cgroup/filtered/cgroup.procs && python3 -c 'import socket; socket.socket(proto=253)') 2>&1 |
        grep 'Protocol not supported' || return 1
    [ "$(bypassed 'BPF')" -gt "$before" ]
}

# Sockets in another network namespace stay on the guest's own stack, also where a program names the protocol of
# outsourced sockets. Control groups listed in `cgroups` are an exception.
own_namespace_stays() {
    unshare -n sh -c 'ip link set lo up; python3 -c "
import errno, itertools, socket
s = socket.socket(); s.bind((\"127.0.0.1\", 5001)); s.listen()
assert open(\"/proc/net/tcp\").read().count(\":1389\") == 1
for of in itertools.product((socket.AF_INET, socket.AF_INET6), (socket.SOCK_STREAM, socket.SOCK_DGRAM)):
    try:
        socket.socket(*of, 253)
    except OSError as error:
        assert error.errno == errno.EPROTONOSUPPORT, error
    else:
        raise AssertionError(\"protocol 253 leaves the network namespace\")"' || return 1
    mkdir -p /sys/fs/cgroup/leaves
    steer cgroup
    echo /leaves > /sys/module/ontime/parameters/cgroups
    # No interface is up in this namespace: only the host's stack has the address.
    (echo 0 > /sys/fs/cgroup/leaves/cgroup.procs
     unshare -n python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); socket.create_connection(s.getsockname())')
    status=$?
    # The port belongs to the VM: root of a container has no right to it.
    [ "$(echo 0 > /sys/fs/cgroup/leaves/cgroup.procs; unshare -n ./conform low-port; unshare -Urn ./conform low-port)" = " low port: 0
 low port: EACCES" ] || status=1
    steer all
    # Nor has root of a user namespace a right to options that need a capability: priority, forced buffers, mark.
    unshare -Ur python3 -c "
import errno, itertools, socket
sockets = [socket.socket(type=kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
assert sum(int(line.split()[2]) for line in open('/proc/net/protocols') if line.startswith('ONTIME')) >= 2
for s, option in itertools.product(sockets, (12, 32, 33, 36)):
    try:
        s.setsockopt(socket.SOL_SOCKET, option, 7)
    except OSError as error:
        assert error.errno == errno.EPERM, (option, error)
    else:
        raise AssertionError(option)" || status=1
    return $status
}

# ontime-ss shows outsourced sockets as ss shows the guest's own: to every user, but not in another network namespace.
seen() {
    steer none
    python3 /lab/sees.py ss > out/seen-none || return 1
    steer all
    python3 /lab/sees.py /lab/ontime-ss > out/seen-all || return 1
    [ "$(grep -c :51 out/seen-none)" -gt 30 ] && diff out/seen-none out/seen-all || return 1
    RAW=1 python3 /lab/sees.py /lab/ontime-ss > out/seen-raw
    grep '^tcp LISTEN 2 7 127.0.0.1:5101 0.0.0.0:\*' out/seen-raw && grep '^tcp LISTEN 0 5 \[::\]:5107 \[::\]:\*' out/seen-raw &&
        grep '^tcp LISTEN 0 5 \*:5106 \*:\*' out/seen-raw || return 1
    python3 -c '
import socket, subprocess
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(300)]
for sock in sockets: sock.bind(("127.0.0.1", 0))
def lines(*words): return subprocess.run([*words], stdout=subprocess.PIPE, check=True).stdout.count(b"udp UNCONN")
nobody = "setpriv", "--reuid=65534", "--clear-groups"
assert lines("cat", "/proc/net/ontime") == 300
assert lines(*nobody, "cat", "/proc/net/ontime") == 300
assert lines("unshare", "-n", "cat", "/proc/net/ontime") == 0
for sock in sockets[::2]: sock.close()
assert lines("dd", "if=/proc/net/ontime", "bs=100") == 150'
}

# The VM's last sockets are reserved for root: another user gets sockets of the guest's own stack, and the guest reports
# to the host how many sockets stayed there.
reserved() {
    echo 100 > /sys/module/ontime/parameters/reserve
    before=$(bypassed 'kept for root')
    mkfifo go
    setpriv --reuid=65534 --clear-groups python3 /lab/reserve.py 589 < go > out/reserve &
    job=$!
    exec 4> go
    for _ in $(seq $((600 * SLOW))); do grep -q made out/reserve && break; sleep 0.1; done
    [ "$(in_use)" = 500 ] && [ "$(($(bypassed 'kept for root') - before))" = 91 ] || { in_use; bypassed 'kept for root'; return 1; }
    python3 -c 'import socket; s = [socket.socket() for _ in range(90)]; print(open("/proc/net/protocols").read())' |
        awk '/^ONTIME/ {n += $3} END {exit n != 590}' || return 1
    # One more for another reason. The module reports the number with its next heartbeat. Then the host reads it
    # (outsourced.sh).
    python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132)' 2> /dev/null
    sleep 8
    echo RESERVED > /dev/console
    sleep 3
    echo >&4
    for _ in $(seq $((100 * SLOW))); do grep -q accepted out/reserve && break; sleep 0.1; done
    exec 4>&-
    wait $job && grep -q accepted out/reserve || return 1
    echo 32 > /sys/module/ontime/parameters/reserve
    [ "$(in_use)" = 0 ]
}

not_while_open() {
    [ "$(in_use)" = 0 ] || return 1
    python3 -c 'import socket, time; s = socket.socket(); time.sleep(600)' &
    for _ in $(seq $((100 * SLOW))); do [ "$(in_use)" = 1 ] && break; sleep 0.1; done
    ! rmmod ontime && [ "$(in_use)" = 1 ] && kill $! && ! wait $! && [ "$(in_use)" = 0 ]
}

# A server that runs until it is killed, and a client.
against() { # SERVER-COMMAND CLIENT-COMMAND...
    sh -c "exec $1" &
    server=$!
    shift
    sleep $((2 * SLOW))
    "$@"
    status=$?
    kill $server
    wait $server
    return $status
}
outsourced() { # PROTOCOL PORT: nobody of the guest's own stack is there
    ! grep -q ":$(printf %04X "$2") " "/proc/net/$1"
}

memcached_client() {
    outsourced tcp 11211 && python3 -c '
import socket
s = socket.create_connection(("127.0.0.1", 11211)); f = s.makefile("rwb")
for i in range(50):
    value = bytes([i]) * 1024
    f.write(b"set k%d 0 0 1024\r\n" % i + value + b"\r\n"); f.flush(); assert f.readline() == b"STORED\r\n"
    f.write(b"get k%d\r\n" % i); f.flush(); assert f.readline() == b"VALUE k%d 0 1024\r\n" % i
    assert f.read(1026)[:-2] == value and f.readline() == b"END\r\n"
' && memccapable -h 127.0.0.1 -p 11211 2>&1
}
memcached_serves() { against 'memcached -u root -l 127.0.0.1 -p 11211' memcached_client; }

nginx_serves() {
    mkdir -p /run/nginx /tmp/www
    head -c 3000000 /dev/urandom > /tmp/www/large
    head -c 1000 /tmp/www/large > /tmp/www/small
    printf 'user root; pid /run/nginx.pid; error_log stderr; events {}\nhttp { access_log off; client_body_temp_path /tmp/b; proxy_temp_path /tmp/p; fastcgi_temp_path /tmp/f; uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s; sendfile on; server { listen 127.0.0.1:8080; listen [::1]:8080; root /tmp/www; } }\n' > /tmp/nginx.conf
    nginx -c /tmp/nginx.conf || return 1
    nginx_client
    status=$?
    # A process that is left over has sockets, which other checks would count.
    nginx -c /tmp/nginx.conf -s quit
    return $status
}
nginx_client() {
    outsourced tcp 8080 || return 1
    for address in 127.0.0.1 '[::1]'; do
        curl -sS --noproxy '*' -o /tmp/got "http://$address:8080/large" && cmp /tmp/got /tmp/www/large || return 1
    done
    for file in small large; do
        wrk -t 1 -c 8 -d $((5 * SLOW)) --timeout $((60 * SLOW))s "http://127.0.0.1:8080/$file" > out/wrk
        cat out/wrk
        ! grep -E 'Socket errors|Non-2xx' out/wrk && [ "$(awk '/requests in/ {print $1}' out/wrk)" -gt 0 ] || return 1
    done
}

# Go's net/http on both sides, raw system calls and its own poller.
go_client() {
    outsourced tcp6 8081 && curl -sS --retry 60 --retry-delay 1 --retry-connrefused --noproxy '*' -o /tmp/got http://127.0.0.1:8081/large && cmp /tmp/got /tmp/www/large || return 1
    hey -n 200 -c 8 -t 0 http://127.0.0.1:8081/small > out/hey
    cat out/hey
    grep -q '\[200\].*200 responses' out/hey
}
go_serves() {
    mkdir -p /tmp/www
    head -c 3000000 /dev/urandom > /tmp/www/large
    head -c 1000 /tmp/www/large > /tmp/www/small
    against 'caddy file-server --root /tmp/www --listen :8081' go_client
}

# SIPp calls SIPp through Kamailio, over UDP.
sip_client() {
    outsourced udp 5060 || return 1
    sipp -sn uas -i 127.0.0.1 -p 5070 -nostdin > out/uas.log 2>&1 &
    callee=$!
    # Calls that arrive before Kamailio is up are sent again.
    timeout $((200 * SLOW)) sipp -sn uac -i 127.0.0.1 -p 5080 -rsa 127.0.0.1:5060 127.0.0.1:5070 -m 20 -r 2 -nostdin > out/uac.log 2>&1
    status=$?
    kill $callee
    wait $callee
    grep -E 'Successful|Failed' out/uac.log
    return $status
}
kamailio_relays() {
    printf '#!KAMAILIO\ndebug=1\nlog_stderror=yes\nchildren=1\nlisten=udp:127.0.0.1:5060\nmpath="/usr/lib/x86_64-linux-gnu/kamailio/modules/"\nloadmodule "tm.so"\nloadmodule "sl.so"\nloadmodule "rr.so"\nloadmodule "pv.so"\nrequest_route { loose_route(); if (method == "INVITE") record_route(); t_relay(); }\n' > /tmp/kamailio.cfg
    against 'kamailio -f /tmp/kamailio.cfg -DD -E -m 32 -M 4 -u root' sip_client
}

iperf_runs() {
    iperf3 -s -1 -B 127.0.0.1 > out/iperf-server.log 2>&1 &
    sleep "$SLOW"
    outsourced tcp 5201 && timeout $((100 * SLOW)) iperf3 -c 127.0.0.1 -t 2 "$@" || return 1
    wait $!
}

# While the guest has no socket, the host measures what the device process holds. NAME: before, after.
rests() { # NAME
    echo "RESTS-$1" > /dev/console
    sleep 15
    echo "GOES-ON-$1" > /dev/console
}

# Processes killed while they wait, connect or receive leave nothing. The host checks its own side.
killed() {
    for round in $(seq "${1:-30}"); do
        timeout -s KILL $((SLOW - 1)).$((round % 9 + 1)) python3 /lab/busy.py
    done
    sleep "$SLOW"
    [ "$(in_use)" = 0 ]
}

# What the kernel reports. Data races (KCSAN), most of which are the kernel's own, are judged later (debug-reports.py).
reports() { dmesg | grep -v 'BUG: KCSAN' | grep -E 'WARNING|BUG|Oops|blocked for more than'; }

# The vCPU of a real-time server goes offline and comes back, where there is more than one vCPU.
vcpu_offline() {
    [ "$(nproc)" -gt 1 ] || { echo "one vCPU: nothing to take offline"; return 0; }
    python3 /lab/offline.py && ! reports
}

# The device process is replaced by another one, or stopped for long and continued. Each waiting call ends with an
# error, and later calls work again.
device_replaced() { python3 /lab/restart.py DEVICE; }

insmod /lab/ontime.ko || exit 1
check same-calls same_calls
check same-edges same_edges
check same-pairs same_pairs
check rt-channel rt_channel
check unusual unusual
check seldom seldom
check received-ahead received_ahead
check many-connections on_channel many
check beside-a-spinner on_channel spinner
check steering steering
check every-way every_way
check filtered-groups-stay filtered_groups_stay
check own-namespace-stays own_namespace_stays
check seen seen
check reserved reserved
check not-while-open not_while_open
check what-others-got-wrong python others
check asyncio python asyncio_echo
check udp python udp_echo
check memcached memcached_serves
check nginx nginx_serves
check go go_serves
check kamailio kamailio_relays
check iperf-tcp iperf_runs
check iperf-tcp-reverse iperf_runs -R
check iperf-udp iperf_runs -u -b 20M
check iperf-udp-reverse iperf_runs -u -b 20M -R
rests before
check killed killed 20
check network-down python3 /lab/network.py
check vcpu-offline vcpu_offline
check faults python3 /lab/faults.py "${cycles:-1000}"
rests after
check device-paused python3 /lab/paused.py PAUSED
# With its sockets on the channel.
check device-paused-rt taskset -c 0 chrt -f 40 python3 /lab/paused.py PAUSED-RT
test_socket() {
    for mode in none all; do
        steer $mode
        timeout "$((limit / 2))" python3 -m test -v test_socket > "out/test_socket-$mode.log" 2>&1
    done
    timed=
    [ "$SLOW" = 1 ] || timed=/lab/timed
    python3 /lab/compare.py out/test_socket-none.log out/test_socket-all.log /lab/differ $timed
}
limit=$((limit * 4)) check test_socket test_socket
# The devices are unbound from the module while sockets are open and calls wait, and bound again.
device_unbound() {
    for round in 1 2 3; do
        python3 /lab/restart.py UNBOUND || return 1
    done
    sleep "$SLOW"
    [ "$(in_use)" = 0 ] && ! reports
}
check device-unbound device_unbound
check device-stopped python3 /lab/restart.py STOPPED
check device-replaced device_replaced
# For reports of memory that the module leaves behind.
grep '\[ontime\]' /proc/kallsyms > out/symbols
rmmod ontime || { echo "FAILED to unload"; failed=1; }
exit $failed
