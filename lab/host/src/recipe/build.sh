#!/bin/sh
# Builds the lab's images into $1 from Debian's packages, with the mirror that the system's apt uses.
# Prints one line a step; what the tools say goes to $1/build.log.
set -eu
out=$1
recipe=$(cd "$(dirname "$0")" && pwd)
work=$out/work
log=$out/build.log
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mkdir -p "$work"
: > "$log"

step() { echo "lab images: $*"; echo "== $*" >> "$log"; }

# The first Debian mirror of the system's apt configuration, deb822 or one-line.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL) $(ORIGIN) $(CODENAME)' 2>/dev/null |
    awk '/ Debian / && $1 !~ /security/ {print $1; exit}')
[ -n "$mirror" ] || {
    echo "lab images: no Debian mirror in the system's apt configuration; run 'apt-get update' first" >&2
    exit 3
}
# A proxy of the system's apt: mmdebstrap reads the environment alone.
eval "$(apt-config shell http_proxy Acquire::http::Proxy https_proxy Acquire::https::Proxy)"
export http_proxy https_proxy
src() { echo "deb [signed-by=$keyring] $mirror $1 main"; }

bootstrap() { # SUITE TARGET PACKAGES SOURCE...
    suite=$1 target=$2 packages=$3
    shift 3
    # In namespaces that end with their first process, and its files below $work: nothing is left of one that is killed.
    TMPDIR=$work unshare --pid --mount --mount-proc --fork --kill-child mmdebstrap --mode=root --variant=minbase --include="$packages" \
        --setup-hook='mkdir -p "$1/etc/apt/preferences.d"; cp '"$recipe"'/backports.pref "$1/etc/apt/preferences.d/ontime-lab"' \
        --aptopt='APT::Install-Recommends "0"' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$target.tar" "$@" >> "$log" 2>&1
    mkdir -p "$target"
    tar -C "$target" -xf "$target.tar"
    rm "$target.tar"
}

# An apt of its own for kernels, so that the system's is left alone.
apt_dir=$work/apt
mkdir -p "$apt_dir/lists/partial" "$apt_dir/cache/archives/partial"
{ src trixie; src trixie-backports; } > "$apt_dir/sources.list"
own_apt() {
    tool=$1
    shift
    "$tool" -o Dir::State::lists="$apt_dir/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$apt_dir/cache" \
        -o Dir::Etc::SourceList="$apt_dir/sources.list" -o Dir::Etc::SourceParts=- -o APT::Sandbox::User=root "$@"
}

kernel() { # LABEL FLAVOUR SERIES ROOT: unpacks the newest kernel of the series, its modules into ROOT
    # By name, not by metapackage: backports' metapackage leaves a series while its kernels stay.
    image=$(own_apt apt-cache pkgnames "linux-image-$3." | grep -E "^linux-image-$3\.[^-]*-$2\$" | sort -V | tail -n 1)
    [ -n "$image" ] || { echo "lab images: the mirror has no linux-image-$3.*-$2 in trixie or trixie-backports" >&2; exit 3; }
    version=${image#linux-image-}
    packages=$image
    for part in binary modules base; do
        own_apt apt-cache show "linux-$part-$version" > /dev/null 2>&1 && packages="$packages linux-$part-$version"
    done
    (cd "$work" && mkdir -p "debs-$1" && cd "debs-$1" && own_apt apt-get download $packages >> "$log" 2>&1 &&
        for deb in *.deb; do dpkg-deb -x "$deb" ../kernel-"$1"; done)
    cp -a "$work/kernel-$1/usr/lib/modules/$version" "$4/usr/lib/modules/"
    vmlinuz=$work/kernel-$1/boot/vmlinuz-$version
    [ -f "$vmlinuz" ] || vmlinuz=$work/kernel-$1/usr/lib/modules/$version/vmlinuz
    cp "$vmlinuz" "$out/vmlinuz-$1"
    chroot "$4" depmod "$version" 2>> "$log"
    echo "$version" > "$out/version-$1"
    rm -rf "$work/debs-$1" "$work/kernel-$1"
}

initrd() { # LABEL ROOT MODULE...: a first user land that mounts the disk, and no more
    label=$1 root=$2
    shift 2
    version=$(cat "$out/version-$label")
    tree=$work/initrd-$label
    mkdir -p "$tree/bin" "$tree/proc" "$tree/sys" "$tree/dev" "$tree/root" "$tree/overlay"
    cp "$(command -v busybox)" "$tree/bin/busybox"
    cp "$recipe/initrd-init.sh" "$tree/init"
    chmod 755 "$tree/init"
    chroot "$root" modprobe -S "$version" --show-depends -a "$@" 2>> "$log" | awk '$1 == "insmod" && !seen[$2]++ {print $2}' |
        while read -r module; do
            name=$(basename "$module" .xz)
            xz -dc "$root$module" > "$tree/$name"
            echo "$name" >> "$tree/modules"
        done
    (cd "$tree" && find . | cpio -o -H newc --quiet) > "$out/initrd-$label"
    rm -rf "$tree"
}

disk() { # ROOT IMAGE SIZE
    rm -f "$2"
    truncate -s "$3" "$2"
    mke2fs -q -t ext4 -O ^has_journal -E lazy_itable_init=1 -d "$1" "$2" >> "$log" 2>&1
}

packages_of() { sed -e 's/#.*//' "$recipe/$1.packages" | xargs | tr ' ' ,; }

step "1/4 user lands: the host's (Debian 13 with QEMU from backports and libvirt), the guests'"
# At once: each waits for the network and the disk half of its time.
jobs=
# Jobs of a script ignore the terminal's interrupt: what they run is ended from here.
stop() { for job in $jobs; do pkill -KILL -P "$job" || true; done; }
trap stop EXIT
trap 'exit 130' INT TERM
bootstrap trixie "$work/host" "$(packages_of host)" "$(src trixie)" "$(src trixie-backports)" &
jobs=$!
bootstrap trixie "$work/guest" "$(packages_of guest)" "$(src trixie)" &
jobs="$jobs $!"
for job in $jobs; do wait "$job"; done
jobs=
mkdir -p "$work/host/usr/lib/modules" "$work/guest/usr/lib/modules"

step "2/4 kernels (7.2-rt, 7.2, 6.12-rt; the guests' 6.12)"
own_apt apt-get update >> "$log" 2>&1
kernel 7.2-rt rt-amd64 7.2 "$work/host"
kernel 7.2 amd64 7.2 "$work/host"
kernel 6.12-rt rt-amd64 6.12 "$work/host"
kernel guest cloud-amd64 6.12 "$work/guest"

step "3/4 boot files"
for label in 7.2-rt 7.2 6.12-rt; do initrd "$label" "$work/host" virtio_pci virtio_blk ext4; done
initrd guest "$work/guest" virtio_pci virtio_blk ext4

step "4/4 disks"
install -m 755 "$recipe/guest-init.sh" "$work/guest/sbin/lab-guest-init"
install -m 644 "$recipe/kamailio.cfg" "$work/guest/etc/kamailio/lab.cfg"
mkdir -p "$work/host/lab" "$work/host/boot"
# A guest's kernel is handed over unpacked (its ELF image, entered by PVH): unpacking is a third of an emulated boot.
python3 "$recipe/unpack-kernel.py" "$out/vmlinuz-guest" "$work/host/boot/vmlinux-guest" 2>> "$log"
cp "$out/initrd-guest" "$work/host/boot/initrd-guest"
disk "$work/guest" "$out/guest.img" 600M
disk "$work/host" "$out/host.img" 4G
rm -rf "$work" "$out/initrd-guest" "$out/vmlinuz-guest"
