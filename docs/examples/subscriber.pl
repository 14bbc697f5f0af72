#!/usr/bin/perl
# A subscriber of Sampled Values (IEC 61850-9-2) that answers: every frame of their Ethernet type goes back to its
# publisher with what it brought, as a protection relay's answer would. In the RT VM, as root: chrt --fifo 50 perl
# subscriber.pl eth0
use strict;
use warnings;
my $nic = shift or die "usage: subscriber.pl INTERFACE\n";
my ($index, $own) = map { open(my $file, "<", "/sys/class/net/$nic/$_") or die "$nic: $_: $!\n"; local $/; <$file> } qw(ifindex address);
$own = pack("H12", $own =~ tr/0-9a-f//cdr);
# AF_PACKET, SOCK_RAW, the type in network byte order (packet(7)).
my $type = unpack("S", pack("n", 0x88ba));
socket(my $socket, 17, 3, $type) or die "socket: $!\n";
# SOL_SOCKET, SO_RCVBUFFORCE: 4 MiB, about two seconds of frames, so that none is lost where the host lets the
# subscriber wait.
setsockopt($socket, 1, 33, pack("i", 4 << 20)) or die "receive buffer: $!\n";
bind($socket, pack("S S i S C C a8", 17, $type, $index, 0, 0, 0, "")) or die "bind: $!\n";
# SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_MR_MULTICAST: the group that the publisher sends to.
setsockopt($socket, 263, 1, pack("i S S H16", $index, 0, 6, "010ccd0400010000")) or die "membership: $!\n";
syswrite(STDOUT, "answering at $nic\n");
while (1) {
    defined(recv($socket, my $frame, 2048, 0)) or next;
    substr($frame, 0, 12) = substr($frame, 6, 6) . $own;
    send($socket, $frame, 0);
}
