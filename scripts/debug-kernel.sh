#!/bin/sh
# debug-kernel.sh BUILD [FLAVOUR [SERIES]]: a guest's kernel that finds errors in modules, built from Debian's source,
# and both modules for it. BUILD: a file of scripts/debug-kernel, kasan or kcsan. FLAVOUR: cloud (default), rt or plain,
# SERIES: 6.12 (default) or 7.2, whose configuration it has, but without modules. Prints a directory with vmlinuz,
# initrd and version, and by version the modules, as guest-test.sh takes them. The host module is for 6.12 alone. $JOBS:
# compilers at a time (2). It needs root, and keeps all in $ONTIME_GUEST_CACHE (/var/cache/ontime/guest). The compiler
# is Debian 13's, GCC 14: KCSAN needs GCC 11 or Clang 11, KASAN GCC 8.3.
set -eu
build=${1:?debug-kernel.sh BUILD [FLAVOUR [SERIES]]} flavour=${2:-cloud} series=${3:-6.12}
here=$(cd "$(dirname "$0")" && pwd)
options=$here/debug-kernel
name=debug-$build-$flavour-$series
out=${ONTIME_GUEST_CACHE:-/var/cache/ontime/guest}/$name
# Standard output has the directory alone.
exec 3>&1 >&2
. "$here/build-module.sh"
[ -f "$options/$build.config" ] || fail "there is no $options/$build.config; BUILD is kasan or kcsan"
case $flavour in
cloud | rt) suffix=$flavour-amd64 ;;
plain) suffix=amd64 ;;
*) fail "'$flavour' is not one of cloud, rt, plain" ;;
esac
export MORE_PACKAGES=linux-source-$series,bc,bison,flex,libelf-dev,libssl-dev,lz4
land "$series-$suffix"
headers=$root/usr/src/linux-headers-$versions
source=/usr/src/linux-source-$series
tree=/usr/src/$name

# Debian's configuration with these options; what it has as modules is left out.
configuration() {
    cat "$options/base.config" "$options/$build.config" > "$work/options"
    echo "CONFIG_LOCALVERSION=\"-$name\"" >> "$work/options"
    # Linux's own PREEMPT_RT: what Debian's rt kernels of 6.12 have beyond it is not in the package of the source.
    [ "$flavour" != rt ] || echo CONFIG_PREEMPT_RT=y >> "$work/options"
    awk '{name = $1 == "#" ? $2 : $1; sub(/=.*/, "", name)}
        NR == FNR {if (name ~ /^CONFIG_/) asked[name] = $0; next}
        name in asked {next}
        /=m$/ {$0 = "# " name " is not set"}
        {print}
        END {for (name in asked) print asked[name]}' "$work/options" "$headers/.config"
}

# The kernel's build drops an option without a word if another one that it depends on is missing.
dropped() { # prints such options
    grep '^CONFIG_' "$work/options" | grep -vxF -f "$root$tree/.config" || true
    sed -n 's/^# \(CONFIG_[^ ]*\) is not set$/^\1=/p' "$work/options" | grep -f - "$root$tree/.config" || true
}

make_kernel() {
    if [ ! -e "$root$source/complete" ]; then
        echo "debug kernel: unpacking $source"
        rm -rf "$root$source"
        mkdir "$root$source"
        tar -C "$root$source" --strip-components=1 -xf "$root$source.tar.xz"
        touch "$root$source/complete"
    fi
    inside 'make -C "$1" O="$2" olddefconfig' sh "$source" "$tree" > "$work/log" 2>&1 || {
        cat "$work/log"
        fail "the configuration failed"
    }
    lost=$(dropped)
    [ -z "$lost" ] || fail "the kernel's configuration did not take:
$lost"
    echo "debug kernel: $name, compiling"
    {
        inside 'make -C "$1" O="$2" -j"$3" bzImage modules' sh "$source" "$tree" "${JOBS:-2}" && touch "$work/compiled"
    } 2>&1 | tee "$work/log" | awk '/^  CC/ && ++files % 100 == 0 {print "debug kernel: " files " files"; fflush()}'
    [ -e "$work/compiled" ] || {
        grep -n 'error:\|Error [0-9]' "$work/log" | head -n 20
        tail -n 20 "$work/log"
        fail "the kernel could not be built"
    }
    cp "$root$tree/arch/x86/boot/bzImage" "$out/vmlinuz"
    cp "$root$tree/include/config/kernel.release" "$out/version"
    # The disk's drivers are in the kernel. The first process comes with the test.
    mkdir -p "$work/initrd/bin" "$work/initrd/proc" "$work/initrd/sys" "$work/initrd/dev" "$work/initrd/root"
    cp "$(command -v busybox)" "$work/initrd/bin/busybox"
    : > "$work/initrd/modules"
    (cd "$work/initrd" && find . | cpio -o -H newc --quiet) > "$out/initrd"
}

mkdir -p "$root$tree"
configuration > "$work/config"
key=$(cat "$root$source.tar.xz" "$work/config" | sha256sum)
if [ "$(cat "$root$tree/complete" 2> /dev/null)" != "$key" ] || [ ! -e "$out/version" ]; then
    rm -rf "$root$tree" "$out"
    mkdir -p "$root$tree" "$out"
    cp "$work/config" "$root$tree/.config"
    make_kernel
    echo "$key" > "$root$tree/complete"
fi

# The modules, as guest-module.sh and host-module.sh build them.
version=$(cat "$out/version")
mkdir -p "$root/usr/lib/modules/$version"
ln -sfn "$tree" "$root/usr/lib/modules/$version/build"
copy guest host abi
build guest "$version"
[ "$series" != 6.12 ] || build host "$version"
programs
echo "$out" >&3
