#!/bin/sh
# build.sh OUT: builds the lab's emulator: Debian 12's QEMU from source, with the patches beside this script. Refuses a
# source of another version than the patches were checked with. OUT/bin, OUT/lib (loader and libraries) and OUT/share
# (firmware) run on any distribution. Prints one line a step; what the tools say goes to OUT/build.log.
set -eu
out=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$out/work
log=$out/build.log
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/source"
: > "$log"
step() { echo "lab emulator: $*"; echo "== $*" >> "$log"; }
# The caller shows the log's end.
fail() { echo "$*" >> "$log"; exit 3; }
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
. "$here/debian.sh"
. "$here/bootstrap.sh"

step "1/3 QEMU's source, and a Debian 12 to build it in"
wanted=$(cat "$here/version")
src bookworm | sed 's/^deb /deb-src /' > "$work/sources.list"
own_apt apt-get update >> "$log" 2>&1 || fail "cannot ask the mirror for Debian 12's sources"
found=$(own_apt apt-cache showsrc qemu 2>> "$log" | sed -n 's/^Version: //p' | sort -V | tail -n 1)
[ "$found" = "$wanted" ] || fail "Debian 12's QEMU source is ${found:-missing on the mirror}. The lab's patches were
checked with $wanted and no other: another source may give other figures. Install a newer Ontime.
To check the new source yourself: see what Debian changed, write its version into lab/host/src/emulator/version,
build, and compare the figures of \`ontime bench\`."
(cd "$work/source" && own_apt apt-get source --download-only "qemu=$wanted" >> "$log" 2>&1) ||
    fail "cannot get QEMU's source"
bootstrap bookworm "$work/root" "$(packages_of "$here/packages")" "$(src bookworm)" || fail "cannot make a Debian 12"
root=$work/root
mkdir "$root/build"
cp "$work"/source/* "$root/build/"
cp -r "$here/patches" "$here/devices.mak" "$root/build/"

step "2/3 building it ($(nproc) at a time)"
cat > "$root/build/build.sh" <<'END'
set -eu
cd /build
dpkg-source --no-check -x *.dsc qemu
cd qemu
for patch in ../patches/*.patch; do patch -p1 --fuzz=0 --no-backup-if-mismatch < "$patch"; done
cp ../devices.mak configs/devices/x86_64-softmmu/lab.mak
mkdir out
cd out
# TCG for x86-64 alone, 9p (virtfs) for the lab's directory; taps are always there.
../configure --target-list=x86_64-softmmu --with-devices-x86_64=lab --without-default-devices \
    --without-default-features --enable-system --enable-tcg --enable-virtfs --enable-attr --enable-cap-ng \
    --enable-fdt=system --disable-tools --disable-docs --disable-install-blobs --disable-debug-info
ninja -j "$(nproc)" qemu-system-x86_64
strip qemu-system-x86_64
END
unshare --pid --fork --kill-child chroot "$root" sh /build/build.sh >> "$log" 2>&1 || fail "QEMU cannot be built"

step "3/3 its libraries and firmware"
mkdir -p "$out/bin" "$out/lib" "$out/share"
cp "$root/build/qemu/out/qemu-system-x86_64" "$out/bin/"
for library in $(chroot "$root" ldd /build/qemu/out/qemu-system-x86_64 | grep -o '/[^ ]*'); do
    cp -L "$root$library" "$out/lib/"
done
for firmware in seabios/bios-256k.bin qemu/kvmvapic.bin qemu/linuxboot_dma.bin; do
    cp "$root/usr/share/$firmware" "$out/share/"
done
