#!/bin/sh
# kubelet-test.sh ONTIME PROGRAMS: a node with the full kubelet, Debian's containerd and runc in the emulated host, and
# a control plane on its clients' CPU, all in virtual time. The driver runs there as its DaemonSet. After `kubectl
# apply`, a pod with CPU time and a VM in a pod get their places (lab/tests/kubelet-node.sh). kubernetes-test.sh has
# built PROGRAMS. $KUBELET_TEST_KEEP: a directory for all logs. Needs root, the lab's images, busybox-static, openssl,
# podman and, the first time, Debian's packages.
set -eu
ontime=$(realpath "$1") programs=$(realpath "$2")
cd "$(dirname "$0")/.."
busybox=$(command -v busybox) || { echo "kubelet-test: apt-get install busybox-static" >&2; exit 3; }
command -v podman > /dev/null || { echo "kubelet-test: apt-get install --no-install-recommends podman" >&2; exit 3; }
debian=$programs/debian
if [ ! -e "$debian/complete" ]; then
    rm -rf "$debian"
    mkdir -p "$debian"
    (
        cd "$debian"
        apt-get -q download containerd runc containernetworking-plugins
        for package in *.deb; do dpkg-deb -x "$package" .; done
        touch complete
    )
fi
work=$(mktemp -d /var/tmp/ontime-kubelet-XXXXXX)
ended() { # STATUS
    for name in bin cni control image.tar; do rm -rf "$work/out/files/$name"; done
    rm -rf "$work/images"
    if [ -n "${KUBELET_TEST_KEEP-}" ]; then
        mkdir -p "$KUBELET_TEST_KEEP" && cp -r "$work/out/." "$KUBELET_TEST_KEEP"
    fi
    case $1 in
    0 | 130) rm -rf "$work" ;;
    *) echo "kubelet-test: its logs: $work/out/files" >&2 ;;
    esac
}
trap 'ended $?' EXIT
trap 'exit 130' INT TERM
files=$work/out/files
mkdir -p "$files/bin" "$files/cni" "$files/control"
cp "$programs/kubelet" "$debian/usr/bin/containerd" "$debian/usr/bin/containerd-shim-runc-v2" "$debian/usr/bin/ctr" \
    "$debian/usr/sbin/runc" "$files/bin"
cp -L "$busybox" "$files/bin/busybox"
for plugin in bridge host-local loopback; do cp "$debian/usr/lib/cni/$plugin" "$files/cni"; done
for program in etcd kube-apiserver kube-controller-manager kube-scheduler kubectl; do
    cp "$programs/$program" "$files/control"
done
openssl genrsa -out "$files/control/key" 2048 2> /dev/null
mkdir "$files/repository"
cp -r --parents dra/manifests lab/tests/kubelet-* "$files/repository"

# The driver's image, as docs/use/kubernetes.md builds it, and that of the pods' containers and their pause containers.
images() { podman --root "$work/images/root" --runroot "$work/images/run" --storage-driver vfs "$@"; }
build=$(sed -n 's/^ *podman \(build .*\) target$/\1/p' docs/use/kubernetes.md | sed s/REGISTRY/registry.example/)
[ -n "$build" ] || { echo "kubelet-test: docs/use/kubernetes.md has no command that builds the image" >&2; exit 1; }
# shellcheck disable=SC2086
images $build -q "$programs"
images build -q -f - -t registry.example/control-loop:1 -t registry.example/pause:1 "$files/bin" << 'FILE'
FROM scratch
COPY busybox /bin/busybox
CMD ["/bin/busybox", "sleep", "1000000"]
FILE
images save -q -m -o "$files/image.tar" registry.example/ontime-dra:1 registry.example/control-loop:1 \
    registry.example/pause:1

cat > "$files/kubeconfig" << 'FILE'
apiVersion: v1
kind: Config
current-context: lab
clusters: [{name: lab, cluster: {server: "https://10.1.0.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: lab, user: {token: administrator}}]
contexts: [{name: lab, context: {cluster: lab, user: lab}}]
FILE
date +%s > "$files/now"
# At 1 ns an instruction, as fast as a CPU of today: what is measured takes the time of instructions.
"$ontime-lab" run --instruction 1 --out "$work/out" --memory 10240 --timeout "${TIMEOUT:-7200}" --silence 600 \
    --client "exec sh repository/lab/tests/kubelet-cluster.sh" -- sh repository/lab/tests/kubelet-node.sh
