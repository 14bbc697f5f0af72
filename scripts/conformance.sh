#!/bin/sh
# conformance.sh ONTIME [SUITE]: public test suites (CPython's, Perl's, libuv's, Go's, Node's, Ruby's, Redis') in one
# guest, on its own stack and on outsourced sockets. Prints a table with every difference by name, and fails where a
# difference has no reason in kernel/guest/tests/conformance-known.txt. SUITE: ci (at most 5 minutes on a free machine),
# default, all, or names of suites separated by commas (kernel/guest/tests/conformance/run.py lists them).
# $KERNEL: the guest's kernel as guest-kernel.sh takes it ("cloud 7.2"), a directory that it has made, or "lab" (that of
# the lab's guests). $MODULES: what guest-module.sh built (built if not given). $CHANNELS: 1 for sockets on a real-time
# channel (0). The guest has two vCPUs and is emulated on this machine. With $LAB it runs in the emulated host with KVM,
# 4 to 20 times slower, where a channel can wake the idle loop ($WAKE: interrupt, idle). Logs stay in
# target/conformance. It needs root, and the lab's image.
set -eu
ontime=$(realpath "${1:?conformance.sh ONTIME [SUITE]}")
suite=${2:-default}
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../target/conformance
cache=${ONTIME_GUEST_CACHE:-/var/cache/ontime/guest}
fail() { echo "conformance: $*" >&2; exit 3; }
work=$(mktemp -d)
trap 'status=$?; [ $status -eq 0 ] || tail -n 20 "$work/made" >&2 2> /dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# Creates $cache/conformance-NAME with the function make_NAME, once. No package installs these tests; they are only in
# the sources.
made() { # NAME
    dir=$cache/conformance-$1
    exec 9> "$dir.lock"
    flock 9
    if [ ! -e "$dir" ]; then
        echo "conformance: making the tests of $1"
        rm -rf "$dir.part"
        mkdir -p "$dir.part"
        "make_$1" "$dir.part" > "$work/made" 2>&1
        mv "$dir.part" "$dir"
    fi
    exec 9>&-
    : > "$work/made"
    cp -a "$dir" "$work/files/$1"
}
source_of() { # PACKAGE DIR: Debian 13's, as published by its authors
    . "$here/debian.sh"
    ask_mirror
    src trixie | sed 's/^deb /deb-src /' >> "$work/sources.list"
    own_apt apt-get update
    (cd "$work" && own_apt apt-get source --tar-only --download-only "$1")
    mkdir -p "$2"
    tar -C "$2" --strip-components=1 -xf "$(ls "$work/$1"_*.orig.tar.*z)"
}
# From the source of the guest's own Perl, with its socket modules.
make_perl() {
    source_of perl "$work/perl"
    (cd "$work/perl" && cp -a --parents t/test.pl t/charset_tools.pl t/loc_tools.pl t/lib/common.pl t/io/socket*.t \
        dist/IO/t cpan/Socket/t cpan/IO-Socket-IP/t "$1")
    # The tests are for the installed Perl, not for a newly built one.
    sed -i 's/^sub set_up_inc *{/& return;/' "$1/t/test.pl"
}
make_libuv() {
    source_of libuv1 "$work/libuv"
    cmake -S "$work/libuv" -B "$work/libuv/build" -DCMAKE_BUILD_TYPE=Release
    cmake --build "$work/libuv/build" --target uv_run_tests_a -j 2
    cp -a "$work/libuv/build/uv_run_tests_a" "$work/libuv/test" "$1"
}
# From this machine's Go.
make_go() {
    export CGO_ENABLED=0 GOTOOLCHAIN=local
    for package in net net/http net/rpc net/smtp; do
        name=$(echo $package | tr / -)
        cp -a "$(go env GOROOT)/src/$package" "$1/$name"
        go test -C "$(go env GOROOT)/src/$package" -c -ldflags '-s -w' -o "$1/$name.test" .
    done
}

# The tests of the guest's own Node, with the files that they send.
make_node() {
    source_of nodejs "$work/node"
    mkdir -p "$1/test/fixtures"
    (cd "$work/node/test" && cp -a --parents common parallel/test-dgram-*.js parallel/test-net-*.js \
        $(ls sequential/test-dgram-*.js sequential/test-net-*.js) fixtures/keys "$1/test")
    find "$work/node/test/fixtures" -maxdepth 1 -type f -exec cp -a {} "$1/test/fixtures" \;
}
# Of the guest's own Ruby, with the test library of its source.
make_ruby() {
    source_of ruby3.3 "$work/ruby"
    (cd "$work/ruby" && cp -a --parents tool/lib test/socket "$1")
}
# Of the guest's own Redis, whose programs they expect below src.
make_redis() {
    source_of redis "$work/redis"
    mkdir "$1/src"
    cp -a "$work/redis/tests" "$1"
    rm -rf "$1/tests/modules"
    for program in server cli benchmark check-aof check-rdb; do
        ln -s "/usr/bin/redis-$program" "$1/src/"
    done
}

mkdir -p "$cache" "$work/files"
# Further packages of the guest's disk, for the chosen suites.
GUEST_PACKAGES=
for tool in perl:perl cmake:libuv go:go tar:node tar:ruby tar:redis; do
    case $suite in ci) [ $tool = perl:perl ] || continue ;; default | all | *"${tool#*:}"*) ;; *) continue ;; esac
    if command -v "${tool%:*}" > /dev/null; then
        made "${tool#*:}"
        case $tool in
        *:node) GUEST_PACKAGES=$GUEST_PACKAGES,nodejs ;;
        *:ruby) GUEST_PACKAGES=$GUEST_PACKAGES,ruby ;;
        *:redis) GUEST_PACKAGES=$GUEST_PACKAGES,redis-server,tcl ;;
        esac
    else
        echo "conformance: there is no ${tool%:*} here, so the tests of ${tool#*:} are left out"
    fi
done
export GUEST_PACKAGES=${GUEST_PACKAGES#,}
kernel=
case ${KERNEL:=cloud 7.2} in
lab) version=$(ls -td "${ONTIME_LAB_CACHE:-/var/cache/ontime/lab}"/*/version-guest | head -n 1) ;;
/*) kernel=$KERNEL version=$kernel/version ;;
*)
    kernel=$("$here/guest-kernel.sh" $KERNEL)
    version=$kernel/version
    ;;
esac
[ -n "$version" ] || fail "there is no lab image; run 'ontime-lab images' once"
version=$(cat "$version")
modules=${MODULES:-$work/modules}
[ -n "${MODULES:-}" ] || "$here/guest-module.sh" "$modules" "$version"
cp "$here/../kernel/guest/tests/conformance/run.py" "$here/../kernel/guest/tests/conformance-known.txt" "$work/files/"
rm -rf "$out"
mkdir -p "$out"
words="suite=$suite wake=${WAKE:-interrupt}"
[ -n "${LAB:-}" ] || words="direct $words"
began=$(date +%s)
status=0
seconds=${GUEST_TEST_SECONDS:-14400}
GUEST_TEST_SECONDS=$seconds GUEST_SECONDS=$seconds GUEST_KERNEL=$kernel \
    GUEST_TEST=$here/../lab/tests/conformance-test.sh GUEST_FILES=$work/files GUEST_TEST_KEEP=$out \
    "$here/guest-test.sh" "$ontime" "$modules" "${CHANNELS:-0}" "$words" || status=$?
echo "conformance: kernel $version, channels ${CHANNELS:-0}, $(($(date +%s) - began)) s; logs: $out"
exit $status
