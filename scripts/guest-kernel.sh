#!/bin/sh
# guest-kernel.sh FLAVOUR SERIES: a stock Debian kernel for the guest that tests outsourced sockets, other than the
# lab's own: FLAVOUR cloud, rt or plain, SERIES 6.12 or 7.2. Prints a directory with vmlinux (unpacked, as the lab's
# guests enter it), initrd and version. Kept in $ONTIME_GUEST_CACHE (/var/cache/ontime/guest), named by the kernel's
# version.
set -eu
flavour=${1:?guest-kernel.sh FLAVOUR SERIES} series=${2:?guest-kernel.sh FLAVOUR SERIES}
here=$(cd "$(dirname "$0")/.." && pwd)
recipe=$here/lab/host/src/recipe
cache=${ONTIME_GUEST_CACHE:-/var/cache/ontime/guest}
fail() { echo "guest kernel: $*" >&2; exit 3; }
case $flavour in
cloud | rt) suffix=$flavour-amd64 ;;
plain) suffix=amd64 ;;
*) fail "'$flavour' is not one of cloud, rt, plain" ;;
esac
. "$(dirname "$0")/debian.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
mkdir -p "$cache"
ask_mirror
image=$(newest image "$series" "$suffix")
version=${image#linux-image-}
out=$cache/kernel-$version
exec 9> "$out.lock"
flock 9
[ ! -e "$out/complete" ] || { echo "$out"; exit 0; }
echo "guest kernel: $version" >&2
rm -rf "$out"
mkdir -p "$out" "$work/debs" "$work/root" "$work/tree/bin" "$work/tree/proc" "$work/tree/sys" "$work/tree/dev" "$work/tree/root"

packages=$image
for part in binary modules base; do
    ! own_apt apt-cache show "linux-$part-$version" > /dev/null 2>&1 || packages="$packages linux-$part-$version"
done
(cd "$work/debs" && own_apt apt-get download $packages > "$work/log" 2>&1) ||
    { cat "$work/log" >&2; fail "cannot get $packages"; }
for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$work/root"; done
[ -e "$work/root/lib" ] || ln -s usr/lib "$work/root/lib"
vmlinuz=$work/root/boot/vmlinuz-$version
[ -f "$vmlinuz" ] || vmlinuz=$work/root/usr/lib/modules/$version/vmlinuz
python3 "$recipe/unpack-kernel.py" "$vmlinuz" "$out/vmlinux"
depmod -b "$work/root" "$version"

# As the lab's own: modules for the disk, then the first process that the test brings along.
cp "$(command -v busybox)" "$work/tree/bin/busybox"
modprobe -d "$work/root" -S "$version" --show-depends -a virtio_pci virtio_blk ext4 |
    awk '$1 == "insmod" && !seen[$2]++ {print $2}' |
    while read -r module; do
        name=$(basename "$module" .xz)
        xz -dc "$module" > "$work/tree/$name"
        echo "$name" >> "$work/tree/modules"
    done
(cd "$work/tree" && find . | cpio -o -H newc --quiet) > "$out/initrd"
echo "$version" > "$out/version"
touch "$out/complete"
echo "$out"
