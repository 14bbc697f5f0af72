# The clients' side of device-cap.sh and pending-device.sh: while a file 'ask' exists, eight clients of the RT server
# send requests. Each sends its next request as soon as it has its answer, so the host always has work, however fast
# this machine is, and never more than eight packets. Where the file holds a number greater than 0, there is one client,
# which waits that many seconds between an answer and its next request.
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
