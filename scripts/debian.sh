# debian.sh: what scripts that take packages from Debian have in common; to be sourced. It needs `fail MESSAGE`, which
# ends the script.
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
# The first Debian mirror of the system's apt configuration, deb822 or one-line.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL) $(ORIGIN) $(CODENAME)' 2> /dev/null |
    awk '/ Debian / && $1 !~ /security/ {print $1; exit}')
[ -n "$mirror" ] || fail "no Debian mirror in the system's apt configuration; run 'apt-get update' first"
# A proxy of the system's apt: mmdebstrap reads the environment alone.
eval "$(apt-config shell http_proxy Acquire::http::Proxy https_proxy Acquire::https::Proxy)"
export http_proxy https_proxy

src() { # SUITE: its line for apt
    echo "deb [signed-by=$keyring] $mirror $1 main"
}

# TOOL ARGUMENT...: an apt in $work of its own, which is left when the script ends: the system's is left alone
own_apt() {
    tool=$1
    shift
    "$tool" -o Dir::State::lists="$work/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$work" \
        -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- -o APT::Sandbox::User=root "$@"
}

ask_mirror() { # once: own_apt knows trixie and trixie-backports from then on
    [ ! -e "$work/asked" ] || return 0
    mkdir -p "$work/lists/partial" "$work/archives/partial"
    { src trixie; src trixie-backports; } > "$work/sources.list"
    own_apt apt-get update > "$work/log" 2>&1 || { cat "$work/log" >&2; fail "cannot ask the mirror"; }
    touch "$work/asked"
}

# KIND SERIES FLAVOUR: the newest package of a kernel. By name, not by metapackage: backports' leaves a series while its
# kernels stay
newest() {
    package=$(own_apt apt-cache pkgnames "linux-$1-$2." | grep -E "^linux-$1-$2\.[^-]*-$3\$" | sort -V | tail -n 1)
    [ -n "$package" ] || fail "the mirror has no linux-$1-$2.*-$3 in trixie or trixie-backports"
    echo "$package"
}
