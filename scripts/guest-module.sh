#!/bin/sh
# guest-module.sh OUT [VERSION]: builds the guest module and its tests against stock Debian headers into OUT/VERSION/,
# one directory a kernel (6.12 and 7.2; cloud, rt and plain), in a Debian 13 user land of its own (kernel-headers.sh).
# Needs root. With VERSION (as uname -r prints it) only the module, for that kernel.
set -eu
out=${1:?guest-module.sh OUT [VERSION]: where the built modules go}
only=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/build-module.sh"
land ${only:-6.12-cloud-amd64 7.2-cloud-amd64 6.12-rt-amd64 7.2-rt-amd64 6.12-amd64 7.2-amd64}
copy guest abi
for version in $versions; do build guest "$version"; done

[ -z "$only" ] || exit 0

dkms guest "${versions%% *}"
programs
