# SPDX-License-Identifier: GPL-2.0-or-later
"""Small messages of streams and datagrams, received ahead on outsourced sockets of real-time threads: what the application sees is the same as
on the guest's own stack. Prints what each step gave; the outputs are compared."""
import array
import errno
import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time

HERE = "127.0.0.1"
BUFFER = 16384
SO_TIMESTAMP = 29
IP_PKTINFO = 8


def pair():
    with socket.create_server((HERE, 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server = listener.accept()[0]
    for each in (client, server):
        each.settimeout(60)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client, server


def warm(client, server, count=12):
    """So many small requests and answers: from then on the next request is received ahead."""
    for number in range(count):
        message = b"request %d" % number
        client.sendall(message)
        assert server.recv(BUFFER) == message
        server.sendall(message)
        assert client.recv(BUFFER) == message
    return client, server


def unread(sock):
    number = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, number)
    return number[0]


def readable(sock, seconds=60):
    return bool(select.select([sock], [], [], seconds)[0])


def say(*what):
    print(*what, flush=True)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno] if error.errno else type(error).__name__


def peeks_and_counts():
    client, server = warm(*pair())
    client.sendall(b"0123456789")
    say(readable(server), unread(server), server.recv(4, socket.MSG_PEEK), unread(server))
    say(server.recv(4), unread(server), server.recv(3, socket.MSG_PEEK), server.recv(BUFFER), unread(server))
    # A header of which the second half comes later is seen whole, however much of it was there before.
    client.sendall(b"head")
    say(readable(server), server.recv(BUFFER, socket.MSG_PEEK))
    client.sendall(b"er")
    while len(server.recv(BUFFER, socket.MSG_PEEK)) < 6:
        pass
    say(server.recv(BUFFER, socket.MSG_PEEK), unread(server))
    received = b""
    while len(received) < 6:
        received += server.recv(BUFFER)
    say(received, readable(server, 0), unread(server))


def nothing_is_nothing():
    client, server = warm(*pair())
    server.setblocking(False)
    say(outcome(server.recv, BUFFER), outcome(server.recv, BUFFER, socket.MSG_PEEK), readable(server, 0))
    client.sendall(b"one")
    say(readable(server), server.recv(BUFFER), outcome(server.recv, BUFFER), readable(server, 0))
    server.settimeout(0.05)
    say(outcome(server.recv, BUFFER))
    server.settimeout(60)
    client.sendall(b"two")
    say(server.recv(BUFFER))


def parts_and_wholes():
    client, server = warm(*pair())
    client.sendall(b"a" * 5)
    say(readable(server))
    server.settimeout(None)
    late = threading.Timer(0.05, client.sendall, [b"b" * 5])
    late.start()
    say(server.recv(10, socket.MSG_WAITALL))
    late.join()
    server.settimeout(60)
    client.sendall(b"cdefgh")
    say(readable(server), server.recv_into(bytearray(2)), server.recv(0), server.recv(2), server.recv(2))
    client.sendall(b"forgotten and read")
    say(readable(server), server.recv(14, socket.MSG_TRUNC) != b"", server.recv(BUFFER))
    client.sendall(b"to drop ")
    say(readable(server))
    late = threading.Timer(0.05, client.sendall, [b"with this, not that"])
    late.start()
    server.settimeout(None)
    say(len(server.recv(17, socket.MSG_TRUNC | socket.MSG_WAITALL)), server.recv(BUFFER))
    late.join()
    server.settimeout(60)
    client.sendall(b"scattered")
    buffers = [bytearray(4), bytearray(20)]
    say(server.recvmsg_into(buffers)[0], bytes(buffers[0]), bytes(buffers[1][:5]))


def large_ones_come_whole():
    client, server = warm(*pair())
    for size in (1535, 1536, 1537, 4000, 300000, 3, 70000):
        data = os.urandom(size)
        sender = threading.Thread(target=client.sendall, args=[data])
        sender.start()
        received = b""
        while len(received) < size:
            received += server.recv(BUFFER)
        sender.join()
        say(size, received == data, readable(server, 0))
        warm(client, server)


def ends():
    client, server = warm(*pair())
    client.close()
    say(readable(server), server.recv(BUFFER), server.recv(BUFFER), unread(server))
    client, server = warm(*pair())
    client.sendall(b"last")
    client.shutdown(socket.SHUT_WR)
    say(server.recv(BUFFER), server.recv(BUFFER), server.send(b"still"), client.recv(BUFFER))
    client, server = warm(*pair())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    say(readable(server), outcome(server.recv, BUFFER), outcome(server.recv, BUFFER))
    client, server = warm(*pair())
    server.shutdown(socket.SHUT_RD)
    say(server.recv(BUFFER), server.recv(BUFFER))
    # Closed with bytes that nobody read: a reset. Closed without: an end.
    client, server = warm(*pair())
    client.sendall(b"unread")
    say(readable(server))
    server.close()
    say(outcome(client.recv, BUFFER))
    client, server = warm(*pair())
    server.close()
    say(outcome(client.recv, BUFFER))


def edges_and_levels():
    for mode in (0, select.EPOLLET):
        client, server = warm(*pair())
        server.setblocking(False)
        with select.epoll() as poller:
            poller.register(server, select.EPOLLIN | mode)
            say(poller.poll(0))
            for number in range(20):
                client.sendall(b"%d" % number)
                found = poller.poll(60)
                say(len(found), found[0][1], server.recv(BUFFER), outcome(server.recv, BUFFER), poller.poll(0))
                server.sendall(b"answer")
                assert client.recv(BUFFER) == b"answer"
            client.sendall(b"left")
            say(len(poller.poll(60)), len(poller.poll(0)), server.recv(BUFFER), poller.poll(0))
            client.close()
            say(poller.poll(60)[0][1] & select.EPOLLIN, server.recv(BUFFER))


def urgent():
    client, server = warm(*pair())
    client.send(b"!", socket.MSG_OOB)
    with select.epoll() as poller:
        poller.register(server, select.EPOLLPRI)
        say(bool(poller.poll(60)))
        # With a time-out, Python would wait for what is not urgent first.
        server.settimeout(None)
        say(server.recv(1, socket.MSG_OOB))
    warm(client, server)
    say("usual")


def options_of_receiving():
    client, server = warm(*pair())
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 4)
    server.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, 1)
    # What was posted before comes as it was asked for then; after it the options hold.
    client.sendall(b"once")
    say(server.recv(BUFFER))
    client.sendall(b"ab")
    say(readable(server, 0.05))
    client.sendall(b"cd")
    data, control, _, _ = server.recvmsg(BUFFER, 200)
    say(readable(server, 0), data, [each[:2] for each in control])


def many_readers():
    client, server = warm(*pair())
    taken, lock = [], threading.Lock()

    def reader():
        while True:
            data = server.recv(1)
            if not data:
                return
            with lock:
                taken.append(data)

    readers = [threading.Thread(target=reader) for _ in range(4)]
    for each in readers:
        each.start()
    for number in range(200):
        client.sendall(bytes([number]))
    client.shutdown(socket.SHUT_WR)
    for each in readers:
        each.join(120)
    say(len(taken), sorted(taken) == [bytes([number]) for number in range(200)])


def two_wait_and_one_goes_away():
    """Two threads wait in receives, without a time-out. The one that has received makes no more calls: the other gets what
    comes next, whether or not the first one has posted a receive for it, and whether or not the client's calls ring the
    doorbell of the server's channel."""
    for size in (10, 1536, 4000):
        for usual in (False, True):
            got, ready, over = [], threading.Event(), threading.Event()
            listener = socket.create_server((HERE, 0))

            def receives(server):
                got.append(server.recv(BUFFER))
                over.wait(60)

            def sends():
                if usual:
                    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
                client = socket.create_connection(listener.getsockname())
                for _ in range(12):
                    client.sendall(b"request")
                    client.recv(BUFFER)
                ready.wait(60)
                for number in range(2):
                    client.sendall(b"%d" % number * size)
                    limit = time.monotonic() + 60
                    while len(got) <= number and time.monotonic() < limit:
                        time.sleep(0.01)
                say(size, usual, len(got))
                over.set()
                client.close()

            sender = threading.Thread(target=sends)
            sender.start()
            server = listener.accept()[0]
            for _ in range(12):
                server.recv(BUFFER)
                server.sendall(b"answer")
            receivers = [threading.Thread(target=receives, args=[server], daemon=True) for _ in range(2)]
            for each in receivers:
                each.start()
            time.sleep(0.1)
            ready.set()
            for each in (sender, *receivers):
                each.join(120)
            server.close()
            listener.close()


def passed_on():
    client, server = warm(*pair())
    copy = server.dup()
    client.sendall(b"x")
    say(readable(copy), copy.recv(BUFFER), readable(server, 0))
    client.sendall(b"y")
    child = os.fork()
    if child == 0:
        os._exit(0 if server.recv(BUFFER) == b"y" else 1)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    server.close()
    client.sendall(b"z")
    say(copy.recv(BUFFER))
    copy.close()
    say(outcome(client.recv, BUFFER))


def datagrams(count=12):
    """A client and a server; the server has found so many small datagrams there already: from then on the next is received ahead."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((HERE, 0))
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.connect(server.getsockname())
    for each in (client, server):
        each.settimeout(60)
    for number in range(count):
        client.send(b"request %d" % number)
    for number in range(count):
        message, sender = server.recvfrom(BUFFER)
        assert message == b"request %d" % number and sender == client.getsockname()
        server.sendto(message, sender)
        assert client.recv(BUFFER) == message
    return client, server


def datagrams_keep_their_borders():
    client, server = datagrams()
    # Three at once: the first was received ahead, or is when it is asked for.
    for message in (b"0123456789", b"", b"abc"):
        client.send(message)
    say(readable(server), unread(server), server.recv(4, socket.MSG_PEEK), server.recv(4, socket.MSG_PEEK | socket.MSG_TRUNC))
    data, control, flags, sender = server.recvmsg(4)
    say(data, control, flags == socket.MSG_TRUNC, sender == client.getsockname())
    say(readable(server), unread(server), server.recvfrom(BUFFER)[1] == client.getsockname(), readable(server), unread(server))
    say(server.recv(BUFFER), readable(server, 0), unread(server))
    client.send(b"whole length")
    say(readable(server), len(server.recv(3)))
    client.send(b"scattered")
    buffers = [bytearray(4), bytearray(20)]
    length, _, flags, sender = server.recvmsg_into(buffers)
    say(length, flags, bytes(buffers[0]), bytes(buffers[1][:5]), sender == client.getsockname())
    client.send(b"one")
    client.send(b"two")
    say(server.recv(0), server.recv(BUFFER), readable(server, 0))


def no_datagram_is_none():
    client, server = datagrams()
    server.setblocking(False)
    say(outcome(server.recv, BUFFER), outcome(server.recv, BUFFER, socket.MSG_PEEK), readable(server, 0))
    client.send(b"one")
    say(readable(server), server.recv(BUFFER), outcome(server.recv, BUFFER), readable(server, 0))
    server.settimeout(0.05)
    say(outcome(server.recv, BUFFER))
    server.settimeout(60)
    late = threading.Timer(0.05, client.send, [b"late"])
    late.start()
    say(server.recv(BUFFER))
    late.join()


def queued_datagrams_come_at_once():
    for count in (0, 12):
        client, server = datagrams(count)
        for number in range(40):
            client.send(b"%d" % number)
        time.sleep(0.2)
        server.setblocking(False)
        say(count, [outcome(server.recv, BUFFER) for _ in range(41)])


def large_datagrams_come_whole():
    client, server = datagrams()
    for size in (1535, 1536, 1537, 9000, 65507, 3, 40000):
        data = os.urandom(size)
        client.send(data)
        say(size, server.recv(65536) == data, readable(server, 0))
        for _ in range(6):
            client.send(b"small")
        say([server.recv(BUFFER) for _ in range(6)])


def errors_of_datagrams():
    client, server = datagrams()
    # From the server's side: its answers go to a port that nobody has any more.
    server.connect(client.getsockname())
    for _ in range(6):
        client.send(b"small")
    say([server.recv(BUFFER) for _ in range(6)])
    client.close()
    say(server.send(b"to nobody"), bool(select.select([server], [], [], 60)[0]))
    say(outcome(server.recv, BUFFER))
    server.setblocking(False)
    say(outcome(server.recv, BUFFER))
    server.send(b"to nobody")
    poller = select.poll()
    poller.register(server, 0)
    say(poller.poll(60000)[0][1] == select.POLLERR, outcome(server.send, b"again"))


def edges_of_datagrams():
    for mode in (0, select.EPOLLET):
        client, server = datagrams()
        server.setblocking(False)
        with select.epoll() as poller:
            poller.register(server, select.EPOLLIN | mode)
            say(poller.poll(0))
            for number in range(20):
                client.send(b"%d" % number)
                found = poller.poll(60)
                data, sender = server.recvfrom(BUFFER)
                say(len(found), found[0][1], data, outcome(server.recv, BUFFER), poller.poll(0))
                server.sendto(b"answer", sender)
                assert client.recv(BUFFER) == b"answer"
            client.send(b"left")
            say(len(poller.poll(60)), len(poller.poll(0)), server.recv(BUFFER), poller.poll(0))


def options_of_datagrams():
    client, server = datagrams()
    server.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, 1)
    server.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
    # What was posted before comes as it was asked for then; after it the options hold.
    client.send(b"once")
    say(server.recv(BUFFER))
    for _ in range(3):
        client.send(b"stamped")
        data, control, _, _ = server.recvmsg(BUFFER, 200)
        say(data, sorted(each[:2] for each in control))


def many_receivers():
    client, server = datagrams()
    taken, lock = [], threading.Lock()

    def receiver():
        while True:
            data = server.recv(BUFFER)
            if data == b"end":
                return
            with lock:
                taken.append(data)

    receivers = [threading.Thread(target=receiver) for _ in range(4)]
    for each in receivers:
        each.start()
    for number in range(200):
        client.send(bytes([number]))
    while len(taken) < 200:
        time.sleep(0.01)
    # One that is busy with what it has keeps nobody else from what comes.
    for _ in receivers:
        client.send(b"end")
    for each in receivers:
        each.join(120)
    say(len(taken), sorted(taken) == [bytes([number]) for number in range(200)])


def one_is_busy_and_another_free():
    client, server = datagrams()
    busy, done = threading.Event(), threading.Event()
    got = []

    def takes_its_time():
        server.recv(BUFFER)
        busy.set()
        done.wait(60)

    slow = threading.Thread(target=takes_its_time)
    slow.start()
    client.send(b"slow")
    busy.wait(60)
    quick = threading.Thread(target=lambda: [got.append(server.recv(BUFFER)) for _ in range(3)])
    quick.start()
    for number in range(3):
        client.send(b"quick %d" % number)
    quick.join(60)
    say(quick.is_alive(), got)
    done.set()
    slow.join()


for test in (peeks_and_counts, nothing_is_nothing, parts_and_wholes, large_ones_come_whole, ends, edges_and_levels, urgent,
             options_of_receiving, many_readers, two_wait_and_one_goes_away, passed_on, datagrams_keep_their_borders,
             no_datagram_is_none, queued_datagrams_come_at_once, large_datagrams_come_whole, errors_of_datagrams,
             edges_of_datagrams, options_of_datagrams, many_receivers, one_is_busy_and_another_free):
    say("--", test.__name__)
    test()
say("end")
