# bootstrap.sh: what the builds of images and emulator have in common; to be sourced. It needs $work, and $log for what
# the tools say. $hook: one more option of mmdebstrap.
bootstrap() { # SUITE TARGET PACKAGES SOURCE...: unpacks a Debian with these packages into TARGET
    suite=$1 target=$2 packages=$3
    shift 3
    # In namespaces that end with their first process, and its files below $work: nothing is left of one that is killed.
    TMPDIR=$work unshare --pid --mount --mount-proc --fork --kill-child mmdebstrap --mode=root --variant=minbase \
        --include="$packages" ${hook:+"$hook"} --aptopt='APT::Install-Recommends "0"' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$target.tar" "$@" >> "$log" 2>&1 &&
        mkdir -p "$target" && tar -C "$target" -xf "$target.tar" && rm "$target.tar"
}

packages_of() { # FILE: its packages, as mmdebstrap takes them
    sed -e 's/#.*//' "$1" | xargs | tr ' ' ,
}
