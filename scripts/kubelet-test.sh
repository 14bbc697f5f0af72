#!/bin/sh
# kubelet-test.sh ONTIME PROGRAMS: a node with the full kubelet, Debian's containerd and runc in the emulated host, and
# a control plane beside it. After `kubectl apply`, a pod with CPU time and a VM in a pod get their places
# (lab/tests/kubelet-node.sh). kubernetes-test.sh has built PROGRAMS. $KUBELET_TEST_KEEP: a directory for all logs.
# Needs root, the lab's images, busybox-static, openssl and, the first time, Debian's packages.
set -eu
ontime=$(realpath "$1") programs=$(realpath "$2")
cd "$(dirname "$0")/.."
busybox=$(command -v busybox) || { echo "kubelet-test: apt-get install busybox-static" >&2; exit 3; }
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
    rm -rf "$work/out/files/bin" "$work/out/files/cni" "$work/out/files/image.tar" "$work/image"
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
files=$work/out/files image=$work/image
mkdir -p "$files/bin" "$files/cni" "$image/root/bin"
cp "$programs/kubelet" "$programs/ontime-dra" "$debian/usr/bin/containerd" "$debian/usr/bin/containerd-shim-runc-v2" \
    "$debian/usr/bin/ctr" "$debian/usr/sbin/runc" "$files/bin"
cp -L "$busybox" "$files/bin/busybox"
for plugin in bridge host-local loopback; do cp "$debian/usr/lib/cni/$plugin" "$files/cni"; done

# The image of the pods' containers and of their pause container, in the format of `docker save`.
cp -L "$busybox" "$image/root/bin/busybox"
tar -C "$image/root" -cf "$image/layer.tar" .
layer=$(sha256sum < "$image/layer.tar" | cut -d ' ' -f 1)
cat > "$image/config.json" << FILE
{"architecture": "amd64", "os": "linux", "config": {"Cmd": ["/bin/busybox", "sleep", "1000000"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]}}
FILE
cat > "$image/manifest.json" << 'FILE'
[{"Config": "config.json", "RepoTags": ["registry.example/control-loop:1", "registry.example/pause:1"],
  "Layers": ["layer.tar"]}]
FILE
tar -C "$image" -cf "$files/image.tar" manifest.json config.json layer.tar

cat > "$files/kubeconfig" << 'FILE'
apiVersion: v1
kind: Config
current-context: lab
clusters: [{name: lab, cluster: {server: "https://10.1.0.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: lab, user: {token: administrator}}]
contexts: [{name: lab, context: {cluster: lab, user: lab}}]
FILE
cp lab/tests/kubelet-node.sh "$files"
# The driver's arguments are the DaemonSet's.
sed -n 's/^ *args: \[\(.*\)\]$/\1/p' dra/manifests/daemonset.yaml | tr -d ',' > "$files/daemonset.args"
[ -s "$files/daemonset.args" ] || { echo "kubelet-test: no args: [...] in the DaemonSet's manifest" >&2; exit 1; }
date +%s > "$files/now"
# At 1 ns an instruction, as fast as a CPU of today: what is measured takes the time of instructions.
"$ontime-lab" run --instruction 1 --out "$work/out" --memory 6144 --timeout "${TIMEOUT:-7200}" --silence 600 \
    --client "exec sh '$PWD/lab/tests/kubelet-cluster.sh' '$programs' '$PWD'" -- sh /lab/kubelet-node.sh
