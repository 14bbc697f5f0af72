#!/bin/sh
# A cluster of real parts: builds etcd and Kubernetes from their Go modules (the first time: half an hour on two cores),
# then tests the DRA driver with real daemons. kubernetes-test.sh ONTIME [kubelet]: with this word it builds kubelet as
# well, and runs kubelet-test.sh instead.
# The scheduler's placements of ROUNDS (20) random sets of pods, and its allocator's of SETS (10,000) and, with pinned
# work, of PINNED_SETS (2,000), are held against `ontime plan`; each kind of process is killed at each step of a pod's
# life, then KILLS (12) at any time; SEED (1). All of it must end within TEST_TIMEOUT (15m); more rounds or sets need
# longer.
set -eu
ontime=$(realpath "$1")
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "kubernetes-test: run it as root: it starts daemons and makes namespaces" >&2; exit 3; }
command -v openssl > /dev/null || {
    echo "kubernetes-test: openssl is missing: apt-get install openssl" >&2
    exit 3
}
command -v qemu-system-x86_64 > /dev/null || {
    echo "kubernetes-test: QEMU is missing: apt-get install qemu-system-x86" >&2
    exit 3
}
programs=$PWD/target/kubernetes
mkdir -p "$programs"
# With the same flags for all, packages are compiled once.
export CGO_ENABLED=0 GOFLAGS="${GOFLAGS-} -trimpath"
# MODULE PACKAGE [FLAG...]: gets what the package is built from. One of its many downloads may fail.
gets() {
    module=$1 package=$2 tries=1
    shift 2
    until scripts/go.sh "$module" list "$@" -deps "$package" > /dev/null; do
        # 3: Go is too old.
        [ $? -ne 3 ] && [ "$tries" -lt 10 ] || exit 1
        tries=$((tries + 1))
        sleep 10
    done
}
build() { # MODULE PROGRAM PACKAGE
    gets "$1" "$3"
    scripts/go.sh "$1" build -ldflags '-s -w' -o "$programs/$2" "$3"
}
build dra/cluster etcd go.etcd.io/etcd/server/v3
for program in kube-apiserver kube-controller-manager kube-scheduler kubectl; do
    build dra/cluster $program k8s.io/kubernetes/cmd/$program
done
build dra ontime-dra .
if [ "${2-}" = kubelet ]; then
    # The modules that kubelet needs besides are of the versions in Kubernetes' own go.mod.
    cp dra/cluster/go.mod "$programs/kubelet.mod"
    cp dra/cluster/go.sum "$programs/kubelet.sum"
    version=$(sed -n 's|.*k8s.io/kubernetes \(v[0-9.]*\).*|\1|p' dra/cluster/go.mod | head -n 1)
    gets dra/cluster k8s.io/kubernetes/cmd/kubelet -modfile="$programs/kubelet.mod" -mod=mod
    scripts/go.sh dra/cluster build -modfile="$programs/kubelet.mod" -mod=mod -o "$programs/kubelet" \
        -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" k8s.io/kubernetes/cmd/kubelet
    exec scripts/kubelet-test.sh "$ontime" "$programs"
fi
ONTIME=$ontime KUBERNETES=$programs scripts/go.sh dra/cluster test -count=1 -timeout "${TEST_TIMEOUT:-15m}" -v ./...
