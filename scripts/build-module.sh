# What building a kernel module in a user land of its own takes; sourced, with $here (scripts) and $out.
work=$(mktemp -d)
# In the user land there is no such directory; DKMS fails without it.
unset TMPDIR
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
fail() { echo "${0##*/}: $*" >&2; exit 3; }

land() { # KERNEL...: sets root and versions
    "$here/kernel-headers.sh" "$@" > "$work/land"
    root=$(head -n 1 "$work/land")/tree
    versions=$(tail -n +2 "$work/land" | xargs)
    exec 9> "${root%/tree}.lock"
    flock 9
    mkdir -p "$out"
    out=$(cd "$out" && pwd)
}

copy() { # FOLDER...: of the repository's kernel/, into the user land
    rm -rf "$root/build"
    mkdir -p "$root/build"
    for folder in "$@"; do cp -a "$here/../kernel/$folder" "$root/build/$folder"; done
}

inside() { # SCRIPT ARGUMENT...: mounts only in a name space of their own, so that none stays behind
    unshare --mount sh -ec 'mount -t proc proc "$1/proc"; root=$1; shift; chroot "$root" sh -ec "$@"' sh "$root" "$@"
}

build() { # FOLDER VERSION
    echo "${0##*/}: $2"
    inside 'make -s -C "/build/$1" clean KVER=$2 && make -s -C "/build/$1" -j2 KVER=$2' sh "$1" "$2" > "$work/log" 2>&1 ||
        { cat "$work/log" >&2; fail "the build for $2 failed"; }
    grep -v '^$' "$work/log" >&2 || true
    mkdir -p "$out/$2"
    cp "$root/build/$1/"*.ko "$out/$2/"
}

programs() { # the guest's tests
    chroot "$root" make -s -C /build/guest/tests
    find "$root/build/guest/tests" -maxdepth 1 -type f -perm /111 -exec cp {} "$out/" \;
}

dkms() { # FOLDER VERSION: packaging, as an administrator does it
    echo "${0##*/}: dkms, $2"
    name=$(sed -n 's/^PACKAGE_NAME="\(.*\)"/\1/p' "$here/../kernel/$1/dkms.conf")
    inside 'rm -rf "/var/lib/dkms/$3" "/usr/src/$3"-[0-9]*; make -s -C "/build/$1" dkms
        tree=$(cd /usr/src && echo "$3"-[0-9]*)
        dkms install "$3/${tree#"$3"-}" -k "$2" && dkms status "$3" | grep -q installed
        dkms remove "$3/${tree#"$3"-}" --all' sh "$1" "$2" "$name" > "$work/log" 2>&1 ||
        { cat "$work/log" >&2; fail "dkms failed for $2"; }
}
