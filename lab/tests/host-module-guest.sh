# In the guest of debug-test.sh: the host module with interfaces of netdevsim, which have a device and NAPI instances, as
# a NIC has: weight and polling threads under traffic, while an interface goes down and up, moves to another network
# namespace or ends, and while the module is unloaded.
set -eu
fail() { echo "FAILED: $*"; exit 1; }
expect() { [ "$2" = "$3" ] || fail "$1: wanted '$2', found '$3'"; } # WHAT WANTED ACTUAL
bus=/sys/bus/netdevsim
weight=/sys/class/net/a/ontime/napi_weight polls=/sys/class/net/a/ontime/busy_poll
threads() { pgrep -c '^napi-poll/a' || true; }

ip netns add peer
exec 3< /proc/self/ns/net 4< /run/netns/peer
cat > /tmp/server.py << 'PYTHON'
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("0.0.0.0", 7))
while True:
    data, asker = sock.recvfrom(2000)
    try:
        sock.sendto(data, asker)
    except OSError:  # its interface is gone
        pass
PYTHON
cat > /tmp/ask.py << 'PYTHON'
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(0.5)
for number in range(int(sys.argv[1])):
    data = b"%d" % number
    for _ in range(200):
        try:
            sock.sendto(data, ("10.9.0.2", 7))
            while sock.recv(2000) != data:
                pass
            break
        except OSError:  # too late, or no route
            time.sleep(0.05)
    else:
        sys.exit(f"request {number}: no answer")
PYTHON
ip netns exec peer python3 /tmp/server.py &
server=$!
trap 'status=$?; [ $status -eq 0 ] || echo "ended with $status"; kill $server' EXIT
asks() { python3 /tmp/ask.py "$1" || fail "after: $2"; } # COUNT WHAT

# Two linked interfaces with two queues each: `a` here, `b` in namespace peer.
make() {
    for number in 1 2; do echo "$number 1 2" > $bus/new_device; done
    ip link set "$(ls $bus/devices/netdevsim1/net)" name a
    ip link set "$(ls $bus/devices/netdevsim2/net)" name b
    ip link set dev b netns peer
    echo "3:$(cat /sys/class/net/a/ifindex) 4:$(ip -n peer -o link show b | cut -d : -f 1)" > $bus/link_device
    ip addr add 10.9.0.1/24 dev a
    ip -n peer addr add 10.9.0.2/24 dev b
    ip link set dev a up
    ip -n peer link set dev b up
    asks 5 "two interfaces are linked"
}
end() { for number in 1 2; do echo $number > $bus/del_device; done; }

insmod /lab/ontime_napi.ko
make
expect "weight at first" default "$(cat $weight)"
echo 4 > $weight
expect "weight" 4 "$(cat $weight)"
asks 50 "the weight is 4"
echo 1 > $polls
expect "threads" 2 "$(threads)"
asks 50 "threads poll"
for _ in $(seq 30); do echo 0 > $polls; echo 1 > $polls; echo default > $weight; echo 8 > $weight; done
asks 50 "both were set 30 times"
for _ in $(seq 5); do
    python3 /tmp/ask.py 50 &
    asker=$!
    ip link set dev a down
    expect "threads while it is down" 0 "$(threads)"
    ip link set dev a up
    wait $asker || fail "requests are lost while it goes down and up"
done
expect "threads after ifup" 2 "$(threads)"
expect "weight after ifup" 8 "$(cat $weight)"

# A setting ends with the interface's move, and with the interface, also while others read and write its files.
ip link set dev a netns peer
expect "polled in another namespace" 0 "$(ip netns exec peer cat $polls)"
expect "threads after the move" 0 "$(threads)"
end
for _ in $(seq 5); do
    make
    echo 1 > $polls
    while cat $weight $polls; do :; done > /dev/null 2>&1 &
    reader=$!
    while echo 3 > $weight; do :; done 2> /dev/null &
    writer=$!
    while echo 0 > $polls && echo 1 > $polls; do :; done 2> /dev/null &
    toggler=$!
    asks 20 "its files are read and written"
    end
    wait $reader || true
    wait $writer || true
    wait $toggler || true
    expect "threads of an interface that is gone" 0 "$(threads)"
done

# The module goes while its threads poll.
for _ in $(seq 5); do
    make
    echo 2 > $weight
    echo 1 > $polls
    python3 /tmp/ask.py 50 &
    asker=$!
    rmmod ontime_napi
    expect "threads after the module" 0 "$(threads)"
    wait $asker || fail "requests are lost while the module goes"
    insmod /lab/ontime_napi.ko
    end
done
grep '\[ontime_napi\]' /proc/kallsyms > out/symbols
rmmod ontime_napi
