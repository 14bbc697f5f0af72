#!/bin/sh
# prometheus.sh: Debian's Prometheus and promtool, unpacked into target/prometheus for the tests of monitoring, where
# they are not installed. Installing the package would start a server; nothing is installed here.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
out=$here/target/prometheus
{ command -v promtool && command -v prometheus; } > /dev/null && exit 0
[ -x "$out/usr/bin/promtool" ] && [ -x "$out/usr/bin/prometheus" ] && exit 0
fail() { echo "prometheus: $*; tests of monitoring that need it will be skipped" >&2; exit 0; }
command -v dpkg-deb > /dev/null || fail "this is no Debian, and no promtool is installed"
mkdir -p "$here/target"
work=$(mktemp -d -p "$here/target")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
echo "prometheus: fetching Debian's package (20 MB)"
(cd "$work" && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; }) \
    > "$work/log" 2>&1 || {
    tail -n 5 "$work/log" >&2
    fail "apt-get could not fetch package prometheus"
}
dpkg-deb -x "$work"/prometheus_*.deb "$work/root"
mkdir -p "$out/usr/bin"
mv "$work/root/usr/bin/promtool" "$work/root/usr/bin/prometheus" "$out/usr/bin"
