#!/bin/sh
# kernel-headers.sh KERNEL...: a Debian 13 user land with a compiler, DKMS and these kernels' headers. KERNEL is a
# version, as uname -r prints it, or a series and flavour (6.12-rt-amd64), of which the mirror's newest is taken. Prints
# the user land's directory (its root is TREE below it), then the kernels' versions, a line each. Needs root
# (mmdebstrap). Kept in $ONTIME_GUEST_CACHE (/var/cache/ontime/guest), named by a digest of what it holds; `flock
# DIRECTORY.lock` before building in it. $MORE_PACKAGES: packages beside these, separated by commas.
set -eu
[ $# -gt 0 ] || { echo "kernel-headers.sh KERNEL..." >&2; exit 2; }
cache=${ONTIME_GUEST_CACHE:-/var/cache/ontime/guest}
fail() { echo "kernel headers: $*" >&2; exit 3; }
[ "$(id -u)" = 0 ] || fail "run it as root: it makes a Debian 13 user land"
mkdir -p "$cache"

. "$(dirname "$0")/debian.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
headers=
for kernel in "$@"; do
    case $kernel in
    *[0-9].*[0-9].*[0-9]*-*) headers="$headers linux-headers-$kernel" ;;
    *-*)
        ask_mirror
        package=$(newest headers "${kernel%%-*}" "${kernel#*-}")
        headers="$headers $package"
        ;;
    *) fail "'$kernel' is neither a version nor a series and flavour" ;;
    esac
done

# What is in the user land decides its name, so that a new kernel on the mirror makes a new one. DKMS itself is only
# unpacked: what it depends on would bring a kernel along.
packages="gcc,make,libc6-dev,libelf1t64,kmod,python3-minimal${MORE_PACKAGES:+,$MORE_PACKAGES}$(printf ',%s' $headers)"
key=$(echo "$packages dkms" | sha256sum | cut -c1-16)
root=$cache/$key
exec 9> "$cache/$key.lock"
flock 9
if [ ! -e "$root/complete" ]; then
    ask_mirror
    for package in $headers; do
        own_apt apt-cache show "$package" > /dev/null 2>&1 ||
            fail "the mirror has no $package any more: a newer kernel took its place; build the lab's images anew"
    done
    echo "kernel headers: making a Debian 13 user land with$headers" >&2
    rm -rf "$root"
    mkdir -p "$root"
    # Without a certificate or the system's lists in the user land, only this side can ask every kind of mirror.
    (cd "$work" && own_apt apt-get download dkms) > "$root/log" 2>&1 || {
        tail -n 20 "$root/log" >&2
        fail "the mirror gives no dkms"
    }
    # The user land is made where it stays: /tmp may be memory.
    TMPDIR=$root mmdebstrap --mode=root --variant=minbase --include="$packages" --aptopt='APT::Install-Recommends "0"' \
        --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --customize-hook="dpkg-deb -x $work/dkms_*.deb \"\$1\"" \
        trixie "$root/root.tar" "$(src trixie)" "$(src trixie-backports)" >> "$root/log" 2>&1 || {
        tail -n 20 "$root/log" >&2
        fail "mmdebstrap failed; its log is $root/log"
    }
    mkdir "$root/tree"
    tar -C "$root/tree" -xf "$root/root.tar"
    rm "$root/root.tar"
    touch "$root/complete"
fi
echo "$root"
for package in $headers; do echo "${package#linux-headers-}"; done
