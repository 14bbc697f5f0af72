#!/bin/sh
# rpm.sh: builds the RPM package of this tree in target/rpm, on Fedora, RHEL or, to try the spec, Debian (package rpm).
# The kernel modules are not packaged: `make -C kernel/guest dkms`, `make -C kernel/host dkms`.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
fail() { echo "rpm: $*" >&2; exit 3; }
cd "$here"
command -v rpmbuild > /dev/null ||
    fail "rpmbuild is missing; Fedora and RHEL: dnf install rpm-build; Debian: apt-get install rpm"
# Options of the calling make are for this tree, not for the makes below.
unset MAKEFLAGS MFLAGS MAKELEVEL

out=$here/target/rpm
rm -rf "$out"
mkdir -p "$out"
make dist
SOURCE_DATE_EPOCH=$(scripts/version.sh epoch)
export SOURCE_DATE_EPOCH
# rpmbuild fails if a file is installed that the spec does not list, or the reverse.
rpmbuild -bb --define "_topdir $out/build" --define "_rpmdir $out" --define "ontime_source $here" \
    --define "ontime_version $(scripts/version.sh deb)" packaging/rpm/ontime.spec > "$out/build.log" 2>&1 || {
    tail -n 40 "$out/build.log" >&2
    fail "rpmbuild failed; its log is $out/build.log"
}
rm -rf "$out/build"
find "$out" -name '*.rpm' -exec ls -l {} +
