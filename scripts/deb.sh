#!/bin/sh
# deb.sh: builds the Debian packages of this tree in target/deb: ontime, ontime-lab, ontime-guest-dkms,
# ontime-napi-dkms. As root it installs the Debian packages that the build needs; it never installs those of the lab.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
fail() { echo "deb: $*" >&2; exit 3; }
cd "$here"
[ "$(dpkg --print-architecture 2> /dev/null)" = amd64 ] || fail "this is no Debian for amd64"
cargo --version 2> /dev/null | awk '{split($2, v, "."); exit !(v[1] > 1 || v[2] >= 85)}' ||
    fail "Rust 1.85 or newer is needed. Debian 13: apt-get install cargo. Debian 12: rustup, from https://rustup.rs"
# Options of the calling make are for this tree, not for the makes below.
unset MAKEFLAGS MFLAGS MAKELEVEL

# debhelper works in a copy: this tree is not changed.
out=$here/target/deb
tree=$out/tree
rm -rf "$out"
mkdir -p "$tree"
cp -r packaging/debian "$tree/debian"
cp kernel/guest/dkms.conf "$tree/debian/ontime-guest-dkms.dkms"
cp kernel/host/dkms.conf "$tree/debian/ontime-napi-dkms.dkms"
SOURCE_DATE_EPOCH=$(scripts/version.sh epoch)
export SOURCE_DATE_EPOCH
cat > "$tree/debian/changelog" << END
ontime ($(scripts/version.sh deb)) unstable; urgency=medium

  * $(scripts/version.sh): see CHANGELOG.md of package ontime.

 -- $(sed -n 's/^Maintainer: //p' packaging/debian/control)  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
END

if ! command -v dpkg-checkbuilddeps > /dev/null || ! (cd "$tree" && dpkg-checkbuilddeps > /dev/null 2>&1); then
    [ "$(id -u)" = 0 ] || fail "packages are missing; as root: apt-get build-dep $tree"
    echo "deb: installing what the build needs"
    { apt-get update && apt-get build-dep -y --no-install-recommends "$tree"; } > "$out/apt.log" 2>&1 < /dev/null || {
        tail -n 20 "$out/apt.log" >&2
        fail "apt-get could not install what the build needs"
    }
fi

make dist dist-lab
export ONTIME_SOURCE="$here"
(cd "$tree" && dpkg-buildpackage --build=binary --no-sign) > "$out/build.log" 2>&1 || {
    tail -n 40 "$out/build.log" >&2
    fail "dpkg-buildpackage failed; its log is $out/build.log"
}
ls -l "$out"/*.deb
