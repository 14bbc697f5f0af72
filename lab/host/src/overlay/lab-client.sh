#!/bin/sh
# lab-client COMMAND...: runs a command at the clients' side: in their namespace, on their CPU, in the host's time. A
# program that the host does not have is that of the guests' disk.
set -eu
read -r cmdline < /proc/cmdline
case $cmdline in
*ontime.clients=*) cpu=${cmdline##*ontime.clients=} ;;
*) echo "lab-client: there is no clients' CPU: start the host on the virtual clock, with clients inside" >&2; exit 3 ;;
esac
if ! command -v "$1" > /dev/null; then
    mkdir -p /run/guest
    # One at a time: a second mount would be refused, or hide the first one's files.
    (
        flock 9
        mountpoint -q /run/guest || mount -o ro /dev/vdb /run/guest
        for dir in tmp run; do mountpoint -q "/run/guest/$dir" || mount -t tmpfs tmpfs "/run/guest/$dir"; done
    ) 9> /run/guest.lock
    set -- chroot /run/guest "$@"
fi
exec ip netns exec clients taskset -c "${cpu%% *}" "$@"
