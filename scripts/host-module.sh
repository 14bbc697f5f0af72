#!/bin/sh
# host-module.sh OUT [VERSION]: builds the host module against stock Debian headers into OUT/VERSION/, for the kernels
# that need it (6.12 with PREEMPT_RT), and installs and removes it by DKMS, in a Debian 13 user land of its own
# (kernel-headers.sh). Needs root. With VERSION (as uname -r prints it) it is only built, for that kernel.
set -eu
out=${1:?host-module.sh OUT [VERSION]: where the built module goes}
only=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/build-module.sh"
land ${only:-6.12-rt-amd64}
copy host
for version in $versions; do build host "$version"; done
[ -n "$only" ] || dkms host "${versions%% *}"
