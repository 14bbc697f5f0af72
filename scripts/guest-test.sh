#!/bin/sh
# guest-test.sh ONTIME [MODULES [CHANNELS [WORDS]]]: boots a guest with the module in the lab, its sockets served by
# `ontime device` on the emulated host, and runs lab/tests/outsourced-test.sh in it. MODULES: what guest-module.sh
# built (built if it is not there; without MODULES, built anew).
# CHANNELS: 0, or 1 for a real-time channel. WORDS: wake=idle (default) or
# wake=interrupt, and those of outsourced-test.sh. With the word `direct` the guest has two CPUs and is emulated on this
# machine, where the device process runs as well: without KVM, so that channels can only interrupt, but many times
# faster. $GUEST_KERNEL: another kernel than the lab's guests have, as guest-kernel.sh takes it ("rt 7.2"), or the
# directory that it printed. $GUEST_TEST: another script to run in the guest, in one run of the VM, with the files of
# the directory $GUEST_FILES. $GUEST_TEST_KEEP: a directory for what the guest left. $GUEST_MB: its memory (512), and
# $GUEST_APPEND: words for its kernel's command line, both with `direct`. It needs root, and the lab's image.
set -eu
ontime=$(realpath "${1:?guest-test.sh ONTIME [MODULES [CHANNELS [WORDS]]]}")
here=$(cd "$(dirname "$0")" && pwd)
modules=${2:-$here/../target/guest}
channels=${3:-0}
words=${4:-wake=idle}
wake=idle
case $words in *wake=interrupt* | *direct*) wake=interrupt ;; esac
work=$(mktemp -d)
# After a failure the logs and consoles stay, without what each run makes again.
ended() { # STATUS
    case $1 in
    0 | 130) rm -rf "$work" ;;
    *)
        (cd "$work" && rm -rf tree out/files/disk.img out/files/extra.cpio out/files/vmlinux out/files/initrd)
        echo "guest test: its files: $work" >&2
        ;;
    esac
}
trap 'ended $?' EXIT
trap 'exit 130' INT TERM
# What an earlier run built is of the sources and the kernels of that time.
[ $# -ge 2 ] || rm -rf "$modules"
ls "$modules"/*/ontime.ko > /dev/null 2>&1 || "$here/guest-module.sh" "$modules"
disk=$("$here/guest-image.sh")

tree=$work/tree
files=$work/out/files
mkdir -p "$tree/lab" "$files"
install -m 755 "$here/../lab/tests/outsourced-init.sh" "$tree/init"
install -m 755 "$here/../lab/tests/outsourced-main.sh" "$tree/lab/main.sh"
install -m 755 "${GUEST_TEST:-$here/../lab/tests/outsourced-test.sh}" "$tree/lab/test.sh"
if [ -n "${GUEST_TEST:-}" ]; then
    cp -a "$GUEST_FILES/." "$tree/lab/"
else
    cp "$here"/../kernel/guest/tests/programs/* "$here/../kernel/guest/ontime-ss" "$modules/conform" "$tree/lab/"
fi
export ONE_RUN="${GUEST_TEST:+1}"
if [ -n "${GUEST_KERNEL:-}" ]; then
    case $GUEST_KERNEL in
    /*) kernel=$GUEST_KERNEL ;;
    *) kernel=$("$here/guest-kernel.sh" $GUEST_KERNEL) ;;
    esac
    cp "$kernel"/vmlinu[xz] "$kernel/initrd" "$files/"
    cp "$modules/$(cat "$kernel/version")/ontime.ko" "$tree/lab/"
else
    # The lab's guests have Debian 13's own cloud kernel.
    cp "$modules"/6.12*-cloud-amd64/ontime.ko "$tree/lab/"
fi
echo "$words wake=$wake channels=$channels" > "$tree/lab/args"
(cd "$tree" && find . | cpio -o -H newc --quiet) > "$files/extra.cpio"
cp --reflink=auto "$disk" "$files/disk.img"
cp "$here/../lab/tests/outsourced.sh" "$files/"

# The lab's image with this machine's kernel and clock, in namespaces that end with this script. Writes to the image are
# discarded.
direct() {
    image=$(ls -t "${ONTIME_LAB_CACHE:-/var/cache/ontime/lab}"/*/host.img 2> /dev/null | head -n 1)
    [ -n "$image" ] || { echo "guest test: no lab image; run \`ontime-lab run -- true\` once" >&2; return 3; }
    unshare --net --mount --pid --fork --kill-child --propagation private sh -ec '
        image=$1 work=$2 ontime=$3
        shift 3
        # In the image there is no such directory.
        unset TMPDIR
        ip link set lo up
        mkdir "$work/lower" "$work/upper" "$work/root"
        mount -o ro,loop,noload "$image" "$work/lower"
        mount -t tmpfs upper "$work/upper"
        mkdir "$work/upper/files" "$work/upper/work"
        mount -t overlay -o "lowerdir=$work/lower,upperdir=$work/upper/files,workdir=$work/upper/work" root "$work/root"
        mkdir -p "$work/root/lab" "$work/root/run"
        mount -t tmpfs run "$work/root/run"
        mount -t proc proc "$work/root/proc"
        mount --rbind /dev "$work/root/dev"
        mount --bind "$work/out/files" "$work/root/lab"
        cp "$ontime" "$work/root/usr/local/bin/ontime"
        ACCEL=tcg GUEST_CPUS=2 GUEST_MB="${GUEST_MB:-512}" exec chroot "$work/root" sh /lab/outsourced.sh "$@"' \
        sh "$image" "$work" "$ontime" "$channels" "$wake"
}
status=0
case $words in
*direct*) direct || status=$? ;;
*)
    "$ontime-lab" run --timeout "${GUEST_TEST_SECONDS:-7200}" --silence 1200 --out "$work/out" -- \
        env GUEST_SECONDS="${GUEST_TEST_SECONDS:-7200}" ONE_RUN="$ONE_RUN" sh /lab/outsourced.sh "$channels" "$wake" ||
            status=$?
    ;;
esac
cat "$files/out/log" 2> /dev/null || true
[ -z "${GUEST_TEST_KEEP:-}" ] || cp -a "$files/out" "$GUEST_TEST_KEEP"
exit $status
