#!/bin/sh
# Installs the Debian packages that building, testing and the lab need, and those given as arguments, and prints what
# else is missing. setup.sh [PACKAGE...]
set -eu
[ "$(id -u)" = 0 ] || { echo "setup: run it as root: it installs packages, and the lab makes namespaces" >&2; exit 3; }
. /etc/os-release
case ${ID:-}:${VERSION_ID:-} in
debian:12 | debian:13) ;;
*) echo "setup: made for Debian 12 and 13; this is ${PRETTY_NAME:-unknown}, going on all the same" ;;
esac

# Packages for the build, the lab's images, clients of a real host, and the programs that tests run.
packages="gcc libc6-dev linux-libc-dev libclang-dev pkg-config make
    mmdebstrap debian-archive-keyring busybox-static cpio zstd xz-utils e2fsprogs python3-minimal kmod
    iproute2 iperf3 procps util-linux ethtool
    curl memcached openssh-client qemu-system-x86 sip-tester sockperf tcpdump systemd $*"
missing=
for package in $packages; do
    dpkg-query -W -f '${Status}\n' "$package" 2> /dev/null | grep -q '^install ok installed$' ||
        missing="$missing $package"
done
if [ -n "$missing" ]; then
    echo "setup: installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    trap 'exit 130' INT TERM
    apt-get update > "$log" 2>&1 && apt-get install -y --no-install-recommends $missing >> "$log" 2>&1 || {
        tail -n 20 "$log" >&2
        echo "setup: apt-get could not install$missing: is there a network, and a mirror in /etc/apt?" >&2
        exit 3
    }
fi

if ! command -v cargo > /dev/null || ! cargo --version | awk '{split($2, v, "."); exit !(v[1] > 1 || v[2] >= 85)}'; then
    echo "setup: Rust 1.85 or newer is needed ($(cargo --version 2> /dev/null || echo 'no cargo found'))." >&2
    echo "setup: Debian 13: apt-get install cargo rustc. Debian 12: rustup, from https://rustup.rs" >&2
    exit 3
fi
