#!/bin/sh
# guest-image.sh: the disk of the guest that tests outsourced sockets: Debian 13 with what its tests run, unmodified.
# Prints where it is; kept in $ONTIME_GUEST_CACHE (/var/cache/ontime/guest), named by a digest of its packages.
# $GUEST_PACKAGES: further packages, separated by commas.
set -eu
packages=busybox-static,ca-certificates,caddy,curl,hey,iperf3,iproute2,kamailio,kmod,libmemcached-tools,libpython3.13-testsuite,memcached,nginx-light,procps,python3,sip-tester,sockperf,wrk${GUEST_PACKAGES:+,$GUEST_PACKAGES}
cache=${ONTIME_GUEST_CACHE:-/var/cache/ontime/guest}
fail() { echo "guest image: $*" >&2; exit 3; }
[ "$(id -u)" = 0 ] || fail "run it as root: it makes a Debian 13 user land"
. "$(dirname "$0")/debian.sh"
image=$cache/image-$(echo "$packages" | sha256sum | cut -c1-16)
mkdir -p "$cache"
exec 9> "$image.lock"
flock 9
if [ ! -e "$image.img" ]; then
    echo "guest image: making it" >&2
    rm -rf "$image.work"
    mkdir -p "$image.work/tree"
    mmdebstrap --mode=root --variant=minbase --include="$packages" --aptopt='APT::Install-Recommends "0"' \
        --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' trixie "$image.work/root.tar" \
        "$(src trixie)" > "$image.work/log" 2>&1 || {
        tail -n 20 "$image.work/log" >&2
        fail "mmdebstrap failed; its log is $image.work/log"
    }
    tar -C "$image.work/tree" -xf "$image.work/root.tar"
    rm "$image.work/root.tar"
    mkdir -p "$image.work/tree/lab" "$image.work/tree/usr/lib/modules"
    # What is free takes no room.
    truncate -s 2000M "$image.work/disk"
    mke2fs -q -t ext4 -O ^has_journal -d "$image.work/tree" "$image.work/disk"
    mv "$image.work/disk" "$image.img"
    rm -rf "$image.work"
fi
echo "$image.img"
