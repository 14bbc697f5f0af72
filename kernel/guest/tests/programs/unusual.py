# SPDX-License-Identifier: GPL-2.0-or-later
"""What conform leaves out: SIGIO, the error queue, multicast of IPv6. Prints what it saw, the same on both stacks."""
import errno
import fcntl
import os
import select
import signal
import socket
import struct

LIMIT = 60
IP_RECVERR, IPV6_RECVERR = 11, 25


def name_of(error):
    return errno.errorcode.get(error, str(error))


def outcome(call):
    try:
        return call()
    except OSError as error:
        return name_of(error.errno)


def pair_of_streams():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def pair_of_datagrams():
    one, two = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    for sock in (one, two):
        sock.bind(("127.0.0.1", 0))
    one.connect(two.getsockname())
    return one, two


def signals(kind, pair):
    """An arrival is told by a signal to whom F_SETOWN says; to nobody once O_ASYNC is off."""
    sender, receiver = pair()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
    fcntl.fcntl(receiver, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(receiver, fcntl.F_GETFL)
    fcntl.fcntl(receiver, fcntl.F_SETFL, flags | os.O_ASYNC)
    sender.send(b"x")
    told = signal.sigtimedwait({signal.SIGIO}, LIMIT)
    print("SIGIO", kind, told is not None, receiver.recv(10))
    fcntl.fcntl(receiver, fcntl.F_SETFL, flags)
    while signal.sigtimedwait({signal.SIGIO}, 0.2):
        pass
    sender.send(b"y")
    print("SIGIO off", kind, receiver.recv(10), signal.sigtimedwait({signal.SIGIO}, 0.2) is None)


def refused(family, host, level, option):
    """What ICMP says stands in the error queue, with what was sent; the error is told by poll and by the next call."""
    unbound = socket.socket(family, socket.SOCK_DGRAM)
    unbound.bind((host, 0))
    gone = unbound.getsockname()
    unbound.close()
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.setsockopt(level, option, 1)
    print("error queue, empty", outcome(lambda: sock.recvmsg(10, 100, socket.MSG_ERRQUEUE)))
    sock.sendto(b"to nobody", gone)
    poll = select.poll()
    poll.register(sock, 0)
    print("POLLERR", [events for _, events in poll.poll(LIMIT * 1000)] == [select.POLLERR])
    data, control, flags, address = sock.recvmsg(100, 512, socket.MSG_ERRQUEUE)
    print("error queue", data, bool(flags & socket.MSG_ERRQUEUE), address[:2] == gone[:2])
    for what, which, value in control:
        code, origin, kind, detail = struct.unpack_from("=IBBB", value)
        print("extended error", (what, which) == (level, option), name_of(code), origin, kind, detail)
    print("error queue, read", outcome(lambda: sock.recvmsg(10, 100, socket.MSG_ERRQUEUE)))
    sock.close()


def multicast():
    group = "ff01::7a"
    lo = socket.if_nametoindex("lo")
    receiver = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    receiver.bind(("::", 0))
    port = receiver.getsockname()[1]
    member = socket.inet_pton(socket.AF_INET6, group) + struct.pack("@I", lo)
    receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
    sender = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, lo)
    receiver.settimeout(LIMIT)
    print("multicast sent", outcome(lambda: sender.sendto(b"all", (group, port))))
    print("multicast", receiver.recv(100))
    receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_LEAVE_GROUP, member)
    receiver.settimeout(0.5)
    print("multicast sent", outcome(lambda: sender.sendto(b"nobody", (group, port))))
    try:
        print("multicast, left", receiver.recv(100))
    except TimeoutError:
        print("multicast, left: nothing")
    print("left twice", outcome(lambda: receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_LEAVE_GROUP, member)))


def shared_ports():
    """SO_REUSEPORT shares a port among sockets of one user."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        for family, any_host, host in ((socket.AF_INET, "0.0.0.0", "127.0.0.1"), (socket.AF_INET6, "::", "::1")):

            def bound(user, name, reuse=1):
                os.seteuid(user)
                sock = socket.socket(family, kind)
                os.seteuid(0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
                sock.bind(name)
                return sock

            first = bound(1000, (host, 0))
            port = first.getsockname()[1]
            for user in (1001, 0, 1000):
                for name in (host, any_host):
                    print("shared port", kind, user, name, outcome(lambda: bound(user, (name, port)).close()))
            print("shared port, without asking", kind, outcome(lambda: bound(1000, (host, port), 0).close()))
            print("bound twice", kind, outcome(lambda: first.bind((host, 0))))
            first.close()
            print("free again", kind, outcome(lambda: bound(1001, (host, port)).close()))


SHARE = (socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
REUSE = (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def made_by(user, family, kind, *options):
    os.seteuid(user)
    sock = socket.socket(family, kind)
    os.seteuid(0)
    for option in options:
        sock.setsockopt(*option)
    return sock


def bound_by(user, family, kind, name, *options):
    sock = made_by(user, family, kind, *options)
    sock.bind(name)
    return sock


def names_of_two_users():
    """Which names sockets of two users may have at once."""

    def second(what, family, kind, host, *options):
        said = outcome(lambda: bound_by(1001, family, kind, (host, port), *options).close())
        print("names of two users,", what, kind, host, said)

    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        for only in (0, 1):
            first = bound_by(1000, socket.AF_INET6, kind, ("::", 0), SHARE,
                             (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only))
            port = first.getsockname()[1]
            for host in ("0.0.0.0", "127.0.0.1"):
                second(f":: only {only}", socket.AF_INET, kind, host, SHARE)
            first.close()
        first = bound_by(1000, socket.AF_INET, kind, ("0.0.0.0", 0), SHARE)
        port = first.getsockname()[1]
        for host in ("::1", "::"):
            second("0.0.0.0", socket.AF_INET6, kind, host, SHARE)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        second("not shared any more", socket.AF_INET, kind, "127.0.0.1", SHARE)
        first.close()
    first = bound_by(1000, socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0), SHARE, REUSE)
    port = first.getsockname()[1]
    second("SO_REUSEADDR of both", socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1", SHARE, REUSE)
    second("SO_REUSEADDR of one", socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1", SHARE)
    first.close()
    first = made_by(1000, socket.AF_INET, socket.SOCK_STREAM, SHARE)
    first.listen()
    port = first.getsockname()[1]
    second("listens without a name", socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1", SHARE)
    first.close()


signals("stream", pair_of_streams)
signals("datagram", pair_of_datagrams)
refused(socket.AF_INET, "127.0.0.1", socket.IPPROTO_IP, IP_RECVERR)
refused(socket.AF_INET6, "::1", socket.IPPROTO_IPV6, IPV6_RECVERR)
multicast()
shared_ports()
names_of_two_users()
print("end")
