#!/bin/sh
# lab-test.sh ONTIME [TEST...]: tests in the emulated host, by the program `ontime-lab-tests` beside ONTIME; its --help
# has the rest.
set -eu
ontime=${1:?lab-test.sh ONTIME [TEST...]}
shift
exec "$ontime-lab-tests" --ontime "$ontime" "$@"
