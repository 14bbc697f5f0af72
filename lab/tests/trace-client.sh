# The clients' side of trace.sh: sends requests to the RT server while a file 'ask' exists, and floods the bulk NIC with
# small packets while a file 'flood' exists. Its requests are those of sockperf (the VM's server is sockperf's), but it
# sleeps between them where sockperf would spin.
flood= ask=
while sleep 0.2; do
    if [ -e flood ] && ! kill -0 "$flood" 2> /dev/null; then
        sockperf throughput -i 10.2.0.9 -p 9 -m 14 -t 86400 > flood.log 2>&1 &
        flood=$!
    fi
    if [ ! -e flood ] && [ -n "$flood" ]; then kill -9 "$flood"; flood=; fi
    if [ -e ask ] && ! kill -0 "$ask" 2> /dev/null; then
        python3 -c '
import socket, struct, sys, time
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.connect((sys.argv[1], 11111))
server.settimeout(2)
number = 0
while True:
    number += 1
    try:
        # Number, flags (a client, wants an answer), length.
        server.send(struct.pack("!QHI", number, 3, 32).ljust(32, b"x"))
        while struct.unpack_from("!Q", server.recv(100))[0] != number:
            pass
    except OSError:
        pass
    time.sleep(0.03)' "$(cat address)" > ask.log 2>&1 &
        ask=$!
    fi
    if [ ! -e ask ] && [ -n "$ask" ]; then kill -9 "$ask"; ask=; fi
done
