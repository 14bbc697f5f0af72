#!/bin/sh
# Runs `go ARGUMENT...` in DIRECTORY, if Go is as new as dra/go.mod says. go.sh DIRECTORY ARGUMENT...
set -eu
cd "$(dirname "$0")/.."
wanted=$(sed -n 's/^go //p' dra/go.mod)
[ -x /usr/local/go/bin/go ] && PATH=$PATH:/usr/local/go/bin
have=$(cd / && go env GOVERSION 2> /dev/null) || have=
have=${have#go}
oldest=$(printf '%s\n' "$wanted" "${have:-0}" | sort -V | head -n 1)
if [ "$oldest" != "$wanted" ]; then
    echo "dra: Go $wanted or newer is needed for Ontime's Kubernetes driver, this machine has ${have:-none}:" >&2
    echo "dra: install it to /usr/local/go, or put it into PATH; everything else of Ontime is built without Go" >&2
    exit 3
fi
cd "$1"
shift
exec go "$@"
