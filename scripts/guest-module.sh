#!/bin/sh
# guest-module.sh OUT [VERSION]: builds the guest module and its tests against stock Debian headers into OUT/VERSION/, one
# directory a kernel (6.12 and 7.2; cloud, rt and plain), in a Debian 13 user land of its own. Needs root (mmdebstrap).
# With VERSION (as uname -r prints it) only the module, for that kernel.
# The user land is kept in $ONTIME_GUEST_CACHE (/var/cache/ontime/guest), named by a digest of what it holds.
set -eu
out=${1:?guest-module.sh OUT [VERSION]: where the built modules go}
only=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
cache=${ONTIME_GUEST_CACHE:-/var/cache/ontime/guest}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
fail() { echo "guest module: $*" >&2; exit 3; }
[ "$(id -u)" = 0 ] || fail "run it as root: it makes a Debian 13 user land"
mkdir -p "$out" "$cache"
out=$(cd "$out" && pwd)

# The first Debian mirror of the system's apt configuration, asked by an apt of its own: the system's is left alone.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL) $(ORIGIN) $(CODENAME)' 2> /dev/null |
    awk '/ Debian / && $1 !~ /security/ {print $1; exit}')
[ -n "$mirror" ] || fail "no Debian mirror in the system's apt configuration; run 'apt-get update' first"
src() { echo "deb [signed-by=$keyring] $mirror $1 main"; }
work=$(mktemp -d)
# In the user land there is no such directory; DKMS fails without it.
unset TMPDIR
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial"
{ src trixie; src trixie-backports; } > "$work/sources.list"
own_apt() {
    tool=$1
    shift
    "$tool" -o Dir::State::lists="$work/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$work" \
        -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- -o APT::Sandbox::User=root "$@"
}
ask_mirror() {
    own_apt apt-get update > "$work/log" 2>&1 || { cat "$work/log" >&2; fail "cannot ask the mirror"; }
}
headers=${only:+ linux-headers-$only}
[ -n "$only" ] || ask_mirror
# By name, not by metapackage: backports' metapackage leaves a series while its kernels stay.
[ -n "$only" ] || for flavour in cloud-amd64 rt-amd64 amd64; do
    for series in 6.12 7.2; do
        package=$(own_apt apt-cache pkgnames "linux-headers-$series." | grep -E "^linux-headers-$series\.[^-]*-$flavour\$" |
            sort -V | tail -n 1)
        [ -n "$package" ] || fail "the mirror has no linux-headers-$series.*-$flavour in trixie or trixie-backports"
        headers="$headers $package"
    done
done

# What is in the user land decides its name, so that a new kernel on the mirror makes a new one. DKMS itself is only
# unpacked: what it depends on would bring a kernel along.
packages="gcc,make,libc6-dev,libelf1t64,kmod,python3-minimal$(printf ',%s' $headers)"
key=$(echo "$packages dkms" | sha256sum | cut -c1-16)
root=$cache/$key
exec 9> "$cache/$key.lock"
flock 9
if [ ! -e "$root/complete" ]; then
    if [ -n "$only" ]; then
        ask_mirror
        own_apt apt-cache show $headers > /dev/null 2>&1 ||
            fail "the mirror has no$headers any more: a newer kernel took its place; build the lab's images anew"
    fi
    echo "guest module: making a Debian 13 user land with$headers"
    rm -rf "$root"
    mkdir -p "$root"
    mmdebstrap --mode=root --variant=minbase --include="$packages" --aptopt='APT::Install-Recommends "0"' \
        --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --customize-hook='cd "$1/tmp" && chroot "$1" sh -c "cd /tmp && apt-get download dkms" && dpkg-deb -x dkms_*.deb "$1"' \
        trixie "$root/root.tar" "$(src trixie)" "$(src trixie-backports)" > "$root/log" 2>&1 || {
        tail -n 20 "$root/log" >&2
        fail "mmdebstrap failed; its log is $root/log"
    }
    mkdir "$root/tree"
    tar -C "$root/tree" -xf "$root/root.tar"
    rm "$root/root.tar"
    touch "$root/complete"
fi

# A copy of the sources in the user land; mounts only in a name space of their own, so that none stays behind.
rm -rf "$root/tree/build"
mkdir -p "$root/tree/build"
cp -a "$here/guest" "$root/tree/build/guest"
[ ! -d "$here/abi" ] || cp -a "$here/abi" "$root/tree/build/abi"
for package in $headers; do
    version=${package#linux-headers-}
    echo "guest module: $version"
    unshare --mount sh -ec '
        mount -t proc proc "$1/proc"
        chroot "$1" sh -ec "make -s -C /build/guest clean KVER=$2 && make -s -C /build/guest -j2 KVER=$2"' \
        sh "$root/tree" "$version" > "$work/log" 2>&1 || { cat "$work/log" >&2; fail "the build for $version failed"; }
    grep -v '^$' "$work/log" >&2 || true
    mkdir -p "$out/$version"
    cp "$root/tree/build/guest/"*.ko "$out/$version/"
done

[ -z "$only" ] || exit 0

# Packaging: what an administrator does on a guest, for the first of the kernels.
version=${headers# linux-headers-}
version=${version%% *}
echo "guest module: dkms, $version"
unshare --mount sh -ec '
    mount -t proc proc "$1/proc"
    chroot "$1" sh -ec "rm -rf /var/lib/dkms/ontime /usr/src/ontime-*; make -s -C /build/guest dkms
        tree=\$(cd /usr/src && echo ontime-*)
        dkms install ontime/\${tree#ontime-} -k $2 && dkms status ontime | grep -q installed
        dkms remove ontime/\${tree#ontime-} --all"' \
    sh "$root/tree" "$version" > "$work/log" 2>&1 || { cat "$work/log" >&2; fail "dkms failed for $version"; }

chroot "$root/tree" make -s -C /build/guest/tests
find "$root/tree/build/guest/tests" -maxdepth 1 -type f -perm /111 -exec cp {} "$out/" \;
