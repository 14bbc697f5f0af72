#!/bin/sh
# version.sh [deb|epoch]: the version of this tree with the commit and its date, as `ontime --version` prints it; as a
# Debian package has it; the commit's time, in seconds. Without git: the version alone, and SOURCE_DATE_EPOCH or the
# time of the newer of Cargo.toml and CHANGELOG.md.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# Only this tree's own git: a tarball may have been unpacked within another repository.
commit=
if [ -e .git ] && epoch=$(git log -1 --format=%ct 2> /dev/null); then
    commit=$(git describe --always --dirty --abbrev=9 --exclude='*')
else
    epoch=${SOURCE_DATE_EPOCH:-$(stat -c %Y Cargo.toml CHANGELOG.md | sort -n | tail -n 1)}
fi
case ${1:-} in
epoch) echo "$epoch" ;;
deb)
    # An unreleased state is older than the release, and newer than an earlier commit's.
    if grep -q "^## \[$version\] - [0-9]" CHANGELOG.md; then
        echo "$version"
    else
        echo "$version~$(date -u -d "@$epoch" +%Y%m%d%H%M%S)${commit:+.$(echo "$commit" | tr - +)}"
    fi
    ;;
'') echo "$version${commit:+ ($commit, $(date -u -d "@$epoch" +%Y-%m-%d))}" ;;
*)
    echo "version.sh [deb|epoch]" >&2
    exit 2
    ;;
esac
