#!/bin/sh
# test.sh OUT IMAGES CPU TURN EMULATOR...: the emulator's self-test: boots the images' 7.2-rt with test.c as its only
# program on 1, 2, 4 and 8 CPUs of model CPU with turns of TURN instructions, on 2 of them twice. Refuses the emulator
# where a figure is out of its bounds or the two runs differ. OUT/N.txt holds the figures, OUT/refused the reason.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1 images=$2 model=$3 turn=$4
shift 4
work=$out/work
beside=
# A job of a script ignores the terminal's interrupt: what it runs is ended from here.
trap '[ -z "$beside" ] || pkill -KILL -P "$beside" || true; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
fail() { echo "$*" > "$out/refused"; exit 3; }
rm -rf "$work"
mkdir -p "$work/tree/dev"

# Its kernel's KVM, from the host's disk, in the order to load it.
version=$(cat "$images/version-7.2-rt")
of_disk() { debugfs -R "cat /usr/lib/modules/$version/$1" "$images/host.img" 2> "$work/log"; }
number=0
for module in $(of_disk modules.dep | sed -n 's|^\([^:]*/kvm-amd\.ko\.xz\): *\(.*\)|\2 \1|p' | xargs -n 1 | awk '
    { line[NR] = $0 } END { for (i = NR - 1; i > 0; i--) print line[i]; print line[NR] }'); do
    of_disk "$module" | xz -dc > "$work/tree/$number.ko"
    number=$((number + 1))
done
[ $number -gt 0 ] || fail "the images have no KVM for $version: $(cat "$work/log")"
cc -O2 -Wall -Wextra -static -pthread -o "$work/tree/init" "$here/test.c"
(cd "$work/tree" && find . | cpio -o -H newc --quiet) > "$work/initrd"

run() { # NAME CPUS EMULATOR...: in namespaces that end with their first process
    name=$1 cpus=$2
    shift 2
    words="console=ttyS0 quiet panic=-1 rdinit=/init setcpuid=constant_tsc tsc=reliable no_timer_check"
    unshare --net --pid --fork --kill-child timeout 900 "$@" -nodefaults -no-user-config -no-reboot \
        -machine q35 -cpu "$model" -m 512 -smp "$cpus" -accel tcg,thread=single -icount "shift=0,sleep=off,turn=$turn" \
        -rtc base=2026-01-01,clock=vm -seed 1 -kernel "$images/vmlinuz-7.2-rt" -initrd "$work/initrd" \
        -append "$words mitigations=off nokaslr" -display none -serial "file:$out/$name.txt" < /dev/null > "$work/$name.log" 2>&1 ||
        echo "FAIL the emulator ended with status $?: $(tail -n 3 "$work/$name.log")" >> "$out/$name.txt"
}

# Two at a time, the longest first. Each ends by itself, or after 15 minutes.
run 8 8 "$@" &
beside=$!
run 4 4 "$@"
run 2 2 "$@"
run 2-again 2 "$@"
run 1 1 "$@"
wait
beside=

for name in 1 2 2-again 4 8; do
    sed -i 's/\r$//' "$out/$name.txt"
    grep -q '^self-test: end' "$out/$name.txt" || echo "FAIL it did not come to its end" >> "$out/$name.txt"
    ! grep '^FAIL' "$out/$name.txt" > "$work/bad" ||
        fail "its self-test fails with ${name%-again} CPUs: $(cat "$work/bad")"
done
cmp "$out/2.txt" "$out/2-again.txt" > "$work/bad" 2>&1 || fail "two runs of its self-test differ: $(cat "$work/bad")"
