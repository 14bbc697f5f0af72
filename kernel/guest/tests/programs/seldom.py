# SPDX-License-Identifier: GPL-2.0-or-later
"""Calls whose result depends on a corner of the kernel. Prints what it saw, the same on both stacks and on channels."""
import array
import ctypes
import errno
import faulthandler
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time

LIMIT = 60
FIONREAD, TIOCOUTQ = 0x541B, 0x5411
SOL_UDP, UDP_CORK, MSG_PROBE = 17, 1, 0x10
SO_BINDTOIFINDEX, SO_BUF_LOCK, SO_TXREHASH, SO_TIMESTAMPING, SO_TIMESTAMPING_NEW = 62, 72, 74, 37, 65
libc = ctypes.CDLL(None, use_errno=True)


def outcome(call, *arguments):
    try:
        return call(*arguments)
    except TimeoutError:
        return "ETIMEDOUT"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


def stream():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def datagrams():
    receiver, sender = (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2))
    receiver.bind(("127.0.0.1", 0))
    sender.connect(receiver.getsockname())
    return sender, receiver


def timeouts(sock, option, seconds):
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


def later(call, *arguments):
    thread = threading.Timer(0.3, call, arguments)
    thread.start()
    return thread


def queued(sock, request=FIONREAD):
    return struct.unpack("@i", fcntl.ioctl(sock, request, b"\0" * 4))[0]


def settle(sock, count):
    """Until so many bytes have arrived. poll would say nothing: SO_RCVLOWAT is above that."""
    end = time.monotonic() + LIMIT
    while queued(sock) < count and time.monotonic() < end:
        time.sleep(0.01)


def sendfile():
    """What is held back at the end of the file is sent, unless the application holds it back itself."""
    for kind, pair in (("stream", stream), ("datagram", datagrams)):
        sender, receiver = pair()
        level, cork = (socket.IPPROTO_TCP, socket.TCP_CORK) if kind == "stream" else (SOL_UDP, UDP_CORK)
        receiver.settimeout(LIMIT)
        with tempfile.TemporaryFile() as file:
            file.write(b"z" * 100)
            file.flush()
            print("sendfile", kind, os.sendfile(sender.fileno(), file.fileno(), 0, 1 << 20), len(receiver.recv(999)))
            sender.setsockopt(level, cork, 1)
            print("corked", kind, os.sendfile(sender.fileno(), file.fileno(), 0, 1 << 20))
            if kind == "datagram":
                receiver.settimeout(0.3)
                print("held back", kind, outcome(receiver.recv, 999))
            sender.setsockopt(level, cork, 0)
            receiver.settimeout(LIMIT)
            print("sent", kind, len(receiver.recv(999)))
            print("again", kind, os.sendfile(sender.fileno(), file.fileno(), 0, 1 << 20), len(receiver.recv(999)))


def cut_short():
    """A send that another thread's shutdown cuts short leaves no error."""
    sender, receiver = stream()
    sent = []
    thread = threading.Thread(target=lambda: sent.append(outcome(sender.send, bytes(64 << 20))))
    thread.start()
    # The send waits when nothing was added for a while.
    before, now = None, 0
    while now != before or not now:
        time.sleep(0.5)
        before, now = now, queued(receiver) + queued(sender, TIOCOUTQ)
    sender.shutdown(socket.SHUT_WR)
    thread.join()
    print("cut short", 0 < sent[0] < 64 << 20, sender.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    receiver.send(b"q")
    print("and receives", sender.recv(5))


def urgent_datagrams():
    sender, receiver = datagrams()
    thread = later(sender.send, b"late")
    print("MSG_OOB of a datagram", outcome(receiver.recv, 9, socket.MSG_OOB))
    thread.join()
    print("nothing", outcome(receiver.recv, 9, socket.MSG_OOB | socket.MSG_DONTWAIT))


def second_connect():
    """To a listener whose queue is full, so that the attempts go on."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    queued = socket.create_connection(listener.getsockname())
    sock = socket.socket()
    timeouts(sock, socket.SO_SNDTIMEO, 0.2)
    print("connect", [outcome(sock.connect, listener.getsockname()) for _ in range(3)])
    queued.close()


def control_messages():
    descriptor = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))
    foreign = (12345, 1, b"abcd")
    ttl = (socket.IPPROTO_IP, socket.IP_TTL, struct.pack("@i", 5))
    wrong = (socket.IPPROTO_IP, 12345, b"abcd")
    unknown = (socket.SOL_SOCKET, 12345, b"abcd")
    other_family = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS, struct.pack("@i", 5))
    for kind, pair in (("stream", stream), ("datagram", datagrams)):
        sender, receiver = pair()
        for name, messages in (("descriptor", [descriptor]), ("foreign", [foreign]), ("TTL", [ttl]),
                               ("both", [foreign, ttl, descriptor]), ("wrong", [wrong]), ("unknown", [unknown]),
                               ("other family", [other_family]), ("hidden", [foreign, unknown])):
            print("control", kind, name, outcome(sender.sendmsg, [b"x"], messages))
    # A tail that is shorter than a header, and a message longer than the buffer.
    sender, _ = datagrams()
    data = ctypes.create_string_buffer(b"x")
    iov = (ctypes.c_size_t * 2)(ctypes.addressof(data), 1)
    good = struct.pack("@Qiiii", 20, 0, socket.IP_TTL, 5, 0)
    long = struct.pack("@Qiii", 64, 0, socket.IP_TTL, 5)
    for name, bytes_ in (("tail", good + b"\1" * 12), ("short", b"\1" * 12), ("long", long)):
        control = ctypes.create_string_buffer(bytes_, len(bytes_))
        message = (ctypes.c_size_t * 7)(0, 0, ctypes.addressof(iov), 1, ctypes.addressof(control), len(bytes_), 0)
        result = libc.sendmsg(sender.fileno(), message, 0)
        print("control,", name, result if result >= 0 else errno.errorcode[ctypes.get_errno()])


def room_signals():
    """SIGIO for a connection that stands, and for room after a send that had none; not for each send."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
    listener = socket.create_server(("127.0.0.1", 0))

    def watched(sock):
        sock.setblocking(False)
        fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)

    def told(limit):
        count = signal.sigtimedwait({signal.SIGIO}, limit) is not None
        while signal.sigtimedwait({signal.SIGIO}, 0.2):
            pass
        return count

    for asked in (False, True):
        sock = socket.socket()
        if asked:
            poll = select.poll()
            poll.register(sock, 0)
            print("unconnected", poll.poll(0) != [])
        watched(sock)
        sock.connect_ex(listener.getsockname())
        print("SIGIO for a connection", told(LIMIT))
    other, _ = listener.accept()
    other.close()
    other, _ = listener.accept()
    print("sent", sock.send(b"x"), "SIGIO", told(0.3))
    try:
        while True:
            sock.send(bytes(1 << 16))
    except BlockingIOError:
        print("full")
    while signal.sigtimedwait({signal.SIGIO}, 0.2):
        pass
    other.settimeout(0.5)
    while outcome(other.recv, 1 << 20) != "ETIMEDOUT":
        pass
    print("SIGIO for room", told(LIMIT))
    sock.close()
    sender, receiver = datagrams()
    watched(sender)
    print("datagram", sender.send(b"x"), receiver.recv(5), "SIGIO", told(0.3))


def edges():
    """Edge-triggered: the same room to send is told once."""
    one, two = stream()
    epoll = select.epoll()
    epoll.register(one, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
    print("edge, room", epoll.poll(LIMIT) == [(one.fileno(), select.EPOLLOUT)], epoll.poll(0.3))
    two.send(b"abc")
    print("edge, data", epoll.poll(LIMIT) == [(one.fileno(), select.EPOLLIN | select.EPOLLOUT)], one.recv(9))
    print("edge, nothing new", epoll.poll(0.3))
    sock = socket.socket()
    sock.setblocking(False)
    listener = socket.create_server(("127.0.0.1", 0))
    epoll = select.epoll()
    epoll.register(sock, select.EPOLLOUT | select.EPOLLET)
    print("edge, unconnected", epoll.poll(LIMIT) == [(sock.fileno(), select.EPOLLOUT | select.EPOLLHUP)])
    sock.connect_ex(listener.getsockname())
    print("edge, connected", epoll.poll(LIMIT) == [(sock.fileno(), select.EPOLLOUT)], epoll.poll(0.3))


def edge_writer():
    """A writer that waits for edges only is told of room after each send that found none."""
    one, two = stream()
    one.setblocking(False)
    size, received = 20 << 20, []

    def read():
        left = size
        while left:
            left -= len(two.recv(min(left, 1 << 16)))
        received.append(size)

    thread = threading.Thread(target=read, daemon=True)
    epoll = select.epoll()
    epoll.register(one, select.EPOLLOUT | select.EPOLLET)
    thread.start()
    left, block = size, bytes(1 << 17)
    while left:
        try:
            left -= one.send(block[:left])
        except BlockingIOError:
            if not epoll.poll(LIMIT):
                print("edge, hangs with bytes left")
                return
    thread.join(LIMIT)
    print("edge, written", received == [size])


def bad_room():
    """A receive of all bytes to a bad address fails at the first one."""
    one, two = stream()
    timeouts(one, socket.SO_RCVTIMEO, LIMIT)
    two.send(b"0123456789")
    settle(one, 10)
    for flags in (0, socket.MSG_WAITALL, socket.MSG_WAITALL | socket.MSG_PEEK):
        begin = time.monotonic()
        result = libc.recv(one.fileno(), ctypes.c_void_p(8), ctypes.c_size_t(4096), flags)
        print("bad address", flags, result if result >= 0 else errno.errorcode[ctypes.get_errno()],
              time.monotonic() - begin < LIMIT / 2)
    print("and takes", one.recv(4096))


def inherited():
    listener = socket.socket()
    number = [("SO_MAX_PACING_RATE", 47, 123456), ("SO_TIMESTAMPING", SO_TIMESTAMPING, 24), ("SO_RXQ_OVFL", 40, 1),
              ("SO_BUF_LOCK", SO_BUF_LOCK, 3), ("SO_NO_CHECK", 11, 1), ("SO_BUSY_POLL", 46, 1),
              ("SO_PREFER_BUSY_POLL", 69, 1), ("SO_BUSY_POLL_BUDGET", 70, 3), ("SO_TXREHASH", SO_TXREHASH, 0),
              ("SO_SELECT_ERR_QUEUE", 45, 1), ("SO_PEEK_OFF", 42, 3), ("SO_DEBUG", 1, 1), ("SO_RCVLOWAT", 18, 7)]
    for name, option, value in number:
        print("set", name, outcome(listener.setsockopt, socket.SOL_SOCKET, option, value))
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client = socket.create_connection(listener.getsockname())
    child, _ = listener.accept()
    for name, option, _ in number:
        print("child", name, outcome(child.getsockopt, socket.SOL_SOCKET, option))
    client.close()


def peeks():
    one, two = stream()
    timeouts(one, socket.SO_RCVTIMEO, LIMIT)
    flags = socket.MSG_PEEK | socket.MSG_WAITALL
    for _ in range(2):
        two.send(b"ab")
        thread = later(two.send, b"cd")
        print("peek for all", one.recv(4, flags), one.recv(4, flags))
        thread.join()
        timeouts(one, socket.SO_RCVTIMEO, 0.3)
        print("peek in vain", one.recv(9, flags), one.recv(9, flags | socket.MSG_DONTWAIT))
        timeouts(one, socket.SO_RCVTIMEO, LIMIT)
        print("taken", one.recv(9))
    two.send(b"ef")
    thread = later(two.close)
    print("peek up to the end", one.recv(9, flags), one.recv(9, flags))
    thread.join()


def low_water():
    one, two = stream()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 10)
    timeouts(one, socket.SO_RCVTIMEO, LIMIT)
    two.send(b"12345")
    settle(one, 5)
    print("less is asked for", one.recv(4))
    thread = later(two.send, b"abcdefghijkl")
    print("enough", one.recv(100))
    thread.join()
    timeouts(one, socket.SO_RCVTIMEO, 0.3)
    two.send(b"67")
    settle(one, 2)
    print("peek, not enough", one.recv(100, socket.MSG_PEEK), one.recv(1, socket.MSG_PEEK))
    print("not enough", one.recv(100), outcome(one.recv, 100))
    thread = later(two.send, b"xyz")
    timeouts(one, socket.SO_RCVTIMEO, 3)
    print("not enough, late", one.recv(100))
    thread.join()
    two.send(b"89")
    settle(one, 2)
    timeouts(one, socket.SO_RCVTIMEO, LIMIT)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    print("signal", one.recv(100))
    thread = later(two.close)
    print("end", one.recv(100))
    thread.join()
    # The limit is half the buffer.
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 30000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 2 ** 31 - 1)
    print("limited", sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 0)
    print("none", sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))


def options():
    for family, kind in ((2, 1), (2, 2), (10, 1), (10, 2)):
        sock = socket.socket(family, kind)

        def get(level, option, size=4):
            return outcome(sock.getsockopt, level, option, size)

        device = socket.SO_BINDTODEVICE
        unbound = [outcome(sock.setsockopt, 1, device, name) for name in (b"", b"\0", b"\0\0\0\0")]
        print(family, kind, "SO_BINDTODEVICE", unbound,
              outcome(sock.setsockopt, 1, SO_BINDTOIFINDEX, 0), outcome(sock.setsockopt, 1, SO_BINDTOIFINDEX, -1))
        print(family, kind, "empty", get(0, 4), get(6, 31), [get(41, option) for option in (54, 55, 57, 59)])
        print(family, kind, "zero", [get(0, option) for option in (3, 15, 18, 19, 22)], get(0, 15, 1), get(41, 75, 2),
              get(41, 78))
        for value in (0x10, 0x08, 0x02, 0):
            print(family, kind, "IP_TOS", outcome(sock.setsockopt, 0, 1, value), get(0, 1), get(1, 12))
        for set_, read in ((SO_TIMESTAMPING_NEW,) * 2, (SO_TIMESTAMPING, SO_TIMESTAMPING_NEW), (SO_TIMESTAMPING,) * 2):
            print(family, kind, "SO_TIMESTAMPING", outcome(sock.setsockopt, 1, set_, 24), get(1, read))
        sock.setsockopt(1, socket.SO_SNDBUF, 30000)
        locked = get(1, SO_BUF_LOCK)
        sock.setsockopt(1, socket.SO_RCVBUF, 30000)
        print(family, kind, "SO_BUF_LOCK", locked, get(1, SO_BUF_LOCK))
        # A length that runs into a page that cannot be read.
        memory = mmap.mmap(-1, 8192)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        libc.mprotect(ctypes.c_void_p(start + 4096), 4096, 0)
        for there in (4, 2, 0):
            memory[4092:4096] = struct.pack("@i", 1)
            # The last ones are structures; a stream refuses to join a group without reading the value.
            for level, option in [(1, socket.SO_KEEPALIVE), (0, 12), (6, socket.TCP_NODELAY), (1, socket.SO_LINGER),
                                  (1, socket.SO_RCVTIMEO)] + [(0, socket.IP_ADD_MEMBERSHIP)] * (kind == 2):
                result = libc.setsockopt(sock.fileno(), level, option, ctypes.c_void_p(start + 4096 - there), 64)
                print(family, kind, "unreadable", level, option, there, result if result >= 0 else
                      errno.errorcode[ctypes.get_errno()])
    sock = socket.socket(type=socket.SOCK_DGRAM)
    here = socket.inet_aton("127.0.0.1")
    for group in ("198.51.100.7", "127.0.0.1", "0.0.0.0"):
        for option in (socket.IP_ADD_MEMBERSHIP, socket.IP_DROP_MEMBERSHIP):
            value = socket.inet_aton(group) + here
            print("no group", group, option, outcome(sock.setsockopt, socket.IPPROTO_IP, option, value))


def probe():
    sender, receiver = datagrams()
    print("probe", sender.send(b"probe", MSG_PROBE), sender.send(b"real"), receiver.recv(9))
    one, two = stream()
    print("probe of a stream", one.send(b"bytes", MSG_PROBE), two.recv(9))


# What hangs is a difference too.
faulthandler.dump_traceback_later(150, exit=True)
sys.stdout.reconfigure(line_buffering=True)
for test in (sendfile, cut_short, urgent_datagrams, second_connect, control_messages, room_signals, edges, edge_writer,
             inherited, bad_room, peeks, low_water, options, probe):
    print("---", test.__name__)
    test()
faulthandler.cancel_dump_traceback_later()
print("end")
