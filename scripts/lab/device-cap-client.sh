# The clients' side of device-cap.sh and pending-device.sh: eight clients of the RT server while there is a file 'ask',
# each of which asks again as soon as it has its answer. So the host has always something to do, however fast this
# machine is, and never more than eight packets of it. Where the file holds a number, it is one client, which asks again
# so many seconds later.
ask=
while sleep 0.2; do
    if [ -e ask ] && ! kill -0 "$ask" 2> /dev/null; then
        python3 -c '
import select, socket, struct, sys, time
gap = float(sys.argv[1] or 0)
clients = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(1 if gap else 8)]
def ask(client):
    try:
        # Number, flags (a client, wants an answer), length.
        client.send(struct.pack("!QHI", 1, 3, 14))
    except OSError:
        pass
for client in clients:
    client.connect(("10.1.0.2", 11111))
    client.setblocking(False)
while True:
    ready, _, _ = select.select(clients, [], [], 1)
    # After a second without an answer one may be lost.
    for client in ready or clients:
        try:
            client.recv(100)
        except OSError:
            pass
        time.sleep(gap)
        ask(client)' "$(cat ask)" > ask.log 2>&1 &
        ask=$!
    fi
    if [ ! -e ask ] && [ -n "$ask" ]; then kill -9 "$ask"; ask=; fi
done
