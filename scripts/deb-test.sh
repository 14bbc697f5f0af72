#!/bin/bash
# deb-test.sh [SUITE...]: tests the packages of target/deb in new roots of Debian 12 (bookworm) and 13 (trixie):
# installation, the command, files and modes, upgrade, removal, purge, files left over; the Ansible role, cloud-init's
# file and the plugin for sos; the laboratory; the DKMS packages; lintian. It needs root, mmdebstrap and the mirror of
# the system's apt. No systemd runs in the roots. Packages built on Debian 13 do not install on Debian 12, so there it
# skips that suite.
# deb-test.sh build: builds the packages in a new root of Debian 13, by that Debian's own Rust and without a network,
# and compares their files with those of target/deb.
# deb-test.sh systemd [STAGE...]: tests package ontime in the emulated host, a Debian 13 with libvirt under systemd
# (lab/tests/packages.sh), and the RPM package if target/rpm has it. It needs `make release`; SECONDS_MAX (14400)
# bounds it, KERNEL (7.2-rt) is the host's. target/deb/systemd has what the stages said; after a failure also the
# console's log and the journal.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
out=$here/target/deb
fail() { echo "deb test: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "run it as root: it makes Debian roots"
for program in mmdebstrap debugfs ar; do
    command -v $program > /dev/null || fail "$program is missing; Debian: apt-get install mmdebstrap e2fsprogs binutils"
done
. "$here/scripts/debian.sh"
shopt -s nullglob
debs=("$out"/*.deb)
main=("$out"/ontime_*.deb)
[ ${#debs[@]} = 4 ] && [ ${#main[@]} = 1 ] || fail "target/deb has not the four packages; run 'make deb' first"
version=$(dpkg-deb -f "${main[0]}" Version)

work=$(mktemp -d -p "$out")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

fresh() { # SUITE PACKAGES: a Debian in $root, with the packages to be tried in /debs
    root=$work/$1
    rm -rf "$root"
    TMPDIR=$work mmdebstrap --mode=root --variant=minbase --include="$2" --aptopt='APT::Install-Recommends "0"' \
        --dpkgopt=force-unsafe-io "$1" "$root" "$(src "$1")" > "$work/log" 2>&1 ||
            { tail -n 20 "$work/log" >&2; fail "mmdebstrap $1 failed"; }
    mkdir "$root/debs"
    cp "${debs[@]}" "$root/debs"
}

inside() { # COMMAND...: in $root, with a /proc of its own
    unshare --mount --pid --fork --kill-child --mount-proc="$root/proc" chroot "$root" \
        env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
            "$@" < /dev/null
}

try() { # TEXT COMMAND...: fails with the text and what the command printed
    local text=$1
    shift
    inside "$@" > "$work/said" 2>&1 || { cat "$work/said" >&2; fail "$suite: $text"; }
}

everything() { # every file of $root that is not dpkg's own or a log
    (cd "$root" && find . -xdev \( -path ./proc -o -path ./sys -o -path ./dev -o -path ./tmp -o -path ./debs \
        -o -path ./var/lib/dpkg \
        -o -path ./var/lib/apt -o -path ./var/cache -o -path ./var/log \) -prune -o -print | sort)
}

file() { # MODE PATH: a file or directory of root's with this mode
    local found
    found=$(stat -c '%a %U:%G' "$root$2" 2>&1) || fail "$suite: $2 is missing"
    [ "$found" = "$1 root:root" ] || fail "$suite: $2 has $found, not $1 root:root"
}

the_program() {
    fresh "$suite" apt
    everything > "$work/before"
    try "apt install" apt-get install -y -o Dpkg::Use-Pty=0 "/debs/${main[0]##*/}"
    inside ontime --version > "$work/said"
    grep -q "^ontime [0-9.]* (.*, [0-9-]*)\$\|^ontime [0-9.]*\$" "$work/said" ||
        fail "$suite: ontime --version says $(cat "$work/said")"
    echo "$suite: installed: $(cat "$work/said")"
    try "ontime check" ontime check
    grep -q '^ok  */etc/ontime/daemon.toml$' "$work/said" || fail "$suite: ontime check says $(cat "$work/said")"
    file 755 /usr/bin/ontime
    local path
    for path in /usr/lib/systemd/system/ontimed.service /usr/lib/systemd/system/ontime-device@.service \
        /usr/lib/tmpfiles.d/ontime.conf \
        /etc/ontime/daemon.toml /usr/share/man/man1/ontime.1.gz /usr/share/man/man1/ontime-status.1.gz \
        /usr/share/man/man8/ontimed.8.gz \
        /usr/share/bash-completion/completions/ontime /usr/share/zsh/vendor-completions/_ontime \
        /usr/share/fish/vendor_completions.d/ontime.fish /usr/share/doc/ontime/reference/daemon.md \
        /usr/share/doc/ontime/design/sockets.md \
        /usr/share/doc/ontime/examples/plan/motivation.toml /usr/share/doc/ontime/CHANGELOG.md \
        /usr/share/doc/ontime/use/monitoring.md \
        /usr/share/doc/ontime/examples/prometheus/ontime.rules.yml /usr/share/doc/ontime/examples/grafana/ontime.json \
        /usr/lib/systemd/system/ontime-metrics.timer \
        /usr/share/doc/ontime/examples/ansible/roles/ontime/tasks/main.yml; do
        file 644 "$path"
    done
    file 755 /etc/libvirt/hooks/qemu.d/ontime
    local link
    grep -roE '\]\([^)#: ]+[)#]' --include='*.md' "$root/usr/share/doc/ontime" > "$work/links" ||
        fail "$suite: no page links to another"
    while read -r link; do
        path=${link#*"]("}
        [ -e "$(dirname "${link%%:*}")/${path%?}" ] || fail "$suite: this link leads nowhere: ${link#"$root"}"
    done < "$work/links"
    grep -q '^mode = "observe"$' "$root/etc/ontime/daemon.toml" || fail "$suite: a fresh installation does not observe"
    [ "$(inside dpkg-query -W -f '${Conffiles}' ontime | awk '{print $1}' | sort | xargs)" = \
        "/etc/libvirt/hooks/qemu.d/ontime /etc/ontime/daemon.toml" ] ||
            fail "$suite: conffiles: $(inside dpkg-query -W -f '${Conffiles}' ontime)"
    [ -L "$root/etc/systemd/system/multi-user.target.wants/ontimed.service" ] || fail "$suite: ontimed is not enabled"
    [ ! -e "$root/etc/systemd/system/timers.target.wants/ontime-metrics.timer" ] ||
        fail "$suite: ontime-metrics.timer is enabled"
    [ -z "$(inside dpkg --verify ontime)" ] || fail "$suite: $(inside dpkg --verify ontime)"

    # What the units wrote and what the administrator made for them.
    mkdir -p "$root/var/lib/prometheus/node-exporter" "$root/etc/systemd/system/ontime-device@web.service.d" \
        "$root/etc/systemd/system/ontimed.service.d" "$root/etc/systemd/system/timers.target.wants"
    : > "$root/var/lib/prometheus/node-exporter/ontime.prom"
    : > "$root/etc/systemd/system/ontimed.service.d/override.conf"
    ln -s /usr/lib/systemd/system/ontime-metrics.timer "$root/etc/systemd/system/timers.target.wants"

    # An upgrade keeps changed files and does not reset: the journal, here a damaged one, stays untouched.
    sed -i 's/^mode = .*/mode = "enforce"/' "$root/etc/ontime/daemon.toml"
    echo '[[tenant]]' > "$root/etc/ontime/tenants.toml"
    mkdir -p "$root/var/lib/ontime" "$root/run/ontime" "$root/etc/systemd/system/multi-user.target.wants"
    echo damaged > "$root/var/lib/ontime/originals"
    : > "$root/run/ontime/poke"
    ln -s /usr/lib/systemd/system/ontime-device@.service \
        "$root/etc/systemd/system/multi-user.target.wants/ontime-device@web.service"
    with_version "$version+newer" "$root/debs/newer.deb"
    try "upgrade" apt-get install -y -o Dpkg::Use-Pty=0 "/debs/newer.deb"
    ! grep -q 'original value' "$work/said" || fail "$suite: the upgrade gave settings back: $(cat "$work/said")"
    [ "$(cat "$root/var/lib/ontime/originals")" = damaged ] || fail "$suite: the upgrade changed the journal"
    grep -q '^mode = "enforce"$' "$root/etc/ontime/daemon.toml" ||
        fail "$suite: the upgrade changed a configuration file"

    try "remove" apt-get remove -y -o Dpkg::Use-Pty=0 ontime
    grep -q "ontime reset. ended with status 3" "$work/said" ||
        fail "$suite: removal did not say what failed: $(cat "$work/said")"
    grep -q "/var/lib/ontime/originals until the package is purged" "$work/said" ||
        fail "$suite: removal: $(cat "$work/said")"
    [ ! -e "$root/usr/bin/ontime" ] && [ -e "$root/etc/ontime/daemon.toml" ] &&
        [ -e "$root/var/lib/ontime/originals" ] ||
        fail "$suite: what removal leaves is not as it should be"
    rmdir "$root/var/lib/prometheus/node-exporter" "$root/var/lib/prometheus" ||
        fail "$suite: removal leaves metrics that node_exporter would serve"
    try "install again" apt-get install -y -o Dpkg::Use-Pty=0 "/debs/${main[0]##*/}"
    rm "$root/var/lib/ontime/originals"
    try "purge" apt-get purge -y -o Dpkg::Use-Pty=0 ontime
    everything > "$work/after"
    diff "$work/before" "$work/after" > "$work/said" || { cat "$work/said" >&2; fail "$suite: purge leaves something"; }
    echo "$suite: installed, upgraded, removed, installed again, purged: nothing is left"
}

automation() { # the Ansible role, twice and undone; cloud-init's file; the plugin for sos
    fresh "$suite" apt,ansible-core,python3-apt,cloud-init,sosreport,xz-utils
    everything > "$work/before"
    cp -r "$here/packaging/ansible" "$here/packaging/cloud-init" "$here/packaging/sos" "$root/debs"
    cat > "$root/debs/ansible/test.yml" << END
- hosts: localhost
  connection: local
  roles:
    - role: ontime
      ontime_deb: /debs/${main[0]##*/}
      ontime_mode: enforce
      ontime_method: vatc
      ontime_tenants: [{name: 'a "quoted" name', class: rt, level: 1, runtime_cap: 0.8}, {name: web, class: bulk}]
      ontime_reservations: [{name: 'a "quoted" name', budget: 2ms, period: 10ms}]
      ontime_metrics_port: 9745
END
    play() {
        try "ansible-playbook $*" ansible-playbook -i localhost, "$@" /debs/ansible/test.yml
        grep "^localhost" "$work/said" | xargs
    }
    play
    [ "$(inside ontime check | grep -c '^ok ')" = 5 ] || fail "$suite: the role's files: $(inside ontime check)"
    play
    grep -q 'changed=0 ' "$work/said" ||
        { cat "$work/said" >&2; fail "$suite: the role, applied again, changes something"; }
    try "sos report" sh -c 'cp /debs/sos/ontime.py /usr/lib/python3/dist-packages/sos/report/plugins/ &&
        sos report --batch -q -o ontime --tmp-dir /tmp && tar -tf "$(ls /tmp/sosreport-*.tar.?z)"'
    grep -q '/etc/ontime/daemon.conf.d/50-ansible.toml$' "$work/said" && grep -q 'ontime_check$' "$work/said" ||
        { cat "$work/said" >&2; fail "$suite: sos collects nothing of ontime"; }
    try "cloud-init schema" cloud-init schema --config-file /debs/cloud-init/ontime.yaml
    rm -rf "$work/etc" && cp -a "$root/etc/ontime" "$work/etc"
    # Later versions take --file behind the subcommand.
    try "cloud-init single" sh -c 'f=/debs/cloud-init/ontime.yaml w="--name write_files --frequency always"
        if cloud-init single --help | grep -q -e --file; then
            cloud-init single --file $f $w
        else
            cloud-init --file $f single $w
        fi'
    try "ontime check of cloud-init's files" ontime check
    grep -q '^ok .*daemon.conf.d/50-site.toml' "$work/said" || fail "$suite: cloud-init wrote no file: $(cat "$work/said")"
    rm -rf "$root"/etc/ontime "$root"/var/lib/cloud "$root"/run/cloud-init
    cp -a "$work/etc" "$root/etc/ontime"
    play -e ontime_state=absent
    rm -rf "$root"/usr/lib/python3/dist-packages/sos/report/plugins/ontime.py "$root"/root/.ansible
    play -e ontime_state=absent
    grep -q 'changed=0 ' "$work/said" || fail "$suite: the role, undone again, changes something"
    rm -rf "$root"/root/.ansible
    everything > "$work/after"
    diff "$work/before" "$work/after" | grep -v __pycache__ | grep '^[<>]' > "$work/said" &&
        { cat "$work/said" >&2; fail "$suite: the undone role leaves something"; }
    echo "$suite: the Ansible role applied, applied again without a change, undone; cloud-init and sos take their files"
}

with_version() { # VERSION FILE: the package with another version; its files stay compressed
    local tree=$work/version member
    rm -rf "$tree"
    mkdir "$tree"
    dpkg-deb -e "${main[0]}" "$tree/control"
    sed -i "s/^Version: .*/Version: $1/" "$tree/control/control"
    member=$(ar t "${main[0]}" | grep '^control\.tar')
    tar -C "$tree/control" --owner=root:0 --group=root:0 -caf "$tree/$member" .
    cp "${main[0]}" "$2"
    ar r "$2" "$tree/$member"
    rm -rf "$tree"
}

payload() { # FILE: a package of the same files in another folder, whose unit sleeps: what dpkg and systemd alone cost
    local tree=$work/payload scripts=$work/payload-scripts script unit
    mkdir -p "$tree/DEBIAN" "$tree/opt/payload" "$tree/usr/lib/systemd/system"
    dpkg-deb -x "${main[0]}" "$tree/opt/payload"
    dpkg-deb -f "${main[0]}" | sed 's/^Package: .*/Package: payload/' > "$tree/DEBIAN/control"
    # What debhelper adds for ontime's unit: it reads all units again, starts, stops and enables.
    dpkg-deb -e "${main[0]}" "$scripts"
    for script in postinst prerm postrm; do
        {
            printf '#!/bin/sh\nset -e\n'
            sed -n '/^# Automatically added by dh_installsystemd/,/^# End automatically added/p' "$scripts/$script" |
                sed 's/ontimed\.service/payload.service/g'
            echo 'exit 0'
        } > "$tree/DEBIAN/$script"
        chmod 755 "$tree/DEBIAN/$script"
        grep -q systemctl "$tree/DEBIAN/$script" || grep -q deb-systemd "$tree/DEBIAN/$script" ||
            fail "debhelper's part of ontime's $script was not found"
    done
    for unit in $(cat "$tree"/DEBIAN/p* | grep -o "[a-z-]*\.\(service\|timer\)" | sort -u); do
        [ "$unit" = payload.service ] || fail "payload has no unit $unit"
    done
    printf '[Unit]\nDescription=sleeps\n[Service]\nExecStart=/bin/sleep infinity\n[Install]\n%s\n' \
        'WantedBy=multi-user.target' > "$tree/usr/lib/systemd/system/payload.service"
    dpkg-deb --root-owner-group -z1 -b "$tree" "$1" > /dev/null
    rm -rf "$tree" "$scripts"
}

for_the_image() { # PACKAGE...: they, with the packages that they need there, in the emulated host's /lab/FIRST
    mkdir -p "$work/lab/files/$1"
    rm -f "$work"/archives/*.deb
    own_apt apt-get -o Dir::State::status="$work/status" install -y --download-only --no-install-recommends "$@" \
        > "$work/log" 2>&1 < /dev/null && cp "$work"/archives/*.deb "$work/lab/files/$1/" ||
            { tail -n 20 "$work/log" >&2; fail "cannot get package $*"; }
}

under_systemd() { # [STAGE...]
    local lab=$here/target/release/ontime-lab files=$work/lab/files image
    [ -x "$lab" ] && [ -x "$lab-tests" ] || fail "target/release/ontime-lab is missing; run 'make release' first"
    "$lab" images || fail "the lab has no images"
    image=$(ls -t "${ONTIME_LAB_CACHE:-/var/cache/ontime/lab}"/*/host.img | head -n 1)
    debugfs -R 'cat /var/lib/dpkg/status' "$image" > "$work/status" 2> /dev/null
    grep -q '^Package: libvirt-daemon-system$' "$work/status" || fail "$image has no list of packages with libvirt"
    mkdir -p "$files/debs"
    cp "${main[0]}" "$files/debs/"
    with_version "$version+newer" "$files/newer.deb"
    with_version 0.0.1 "$files/older.deb"
    payload "$files/payload.deb"
    cp "$here"/docs/use/{tutorial,kubernetes}.md "$here/lab/tests/packages.sh" "$files/"
    # What the image lacks.
    ask_mirror
    for_the_image rt-tests rtla
    for_the_image apparmor
    for_the_image tuned
    for_the_image ansible-core python3-apt
    cp -r "$here/packaging/ansible" "$files/"
    local rpms=("$here"/target/rpm/*/ontime-*.rpm)
    if [ ${#rpms[@]} = 1 ]; then
        for_the_image rpm
        cp "${rpms[0]}" "$files/ontime.rpm"
    fi
    cp "$lab-tests" "$files/ontime-lab-tests"
    local status=0
    rm -rf "$out/systemd"
    mkdir "$out/systemd"
    "$lab" run --kernel "${KERNEL:-7.2-rt}" --timeout "${SECONDS_MAX:-14400}" --silence 600 \
        --out "$work/lab" \
        --ontime "$here/lab/tests/systemd-init.sh" --append init=/usr/local/bin/ontime --append net.ifnames=0 \
        --append systemd.show_status=1 -- bash --posix /lab/packages.sh "$@" | tee "$out/systemd/stages" || status=$?
    if [ $status -ne 0 ]; then
        cp "$work"/lab/*.log "$out/systemd/" || true
        cp "$files/journal" "$files"/verify.* "$out/systemd/" 2> /dev/null || true
        fail "systemd: status $status; $out/systemd has the console's log and the journal"
    fi
    echo "deb test: passed (systemd)"
}

the_laboratory() { # it has the command's version, and the programs that build images; purge removes what it built
    # The roots have no network: what the package depends on is there before.
    local needed lab
    lab=$(cd "$out" && echo ontime-lab_*.deb)
    needed=$(dpkg-deb -f "$out/$lab" Depends | tr , '\n' | sed 's/^ *//; s/[ (|].*//; /^ontime$/d' | xargs | tr ' ' ,)
    fresh "$suite" "apt,$needed"
    try "apt install ontime-lab" apt-get install -y -o Dpkg::Use-Pty=0 "/debs/${main[0]##*/}" "/debs/$lab"
    inside ontime-lab --version > "$work/said"
    [ "$(sed 's/^ontime-lab/ontime/' "$work/said")" = "$(inside ontime --version)" ] ||
        fail "$suite: ontime-lab --version says $(cat "$work/said")"
    try "ontime-lab bench --help" ontime-lab bench --help
    file 755 /usr/bin/ontime-lab
    file 644 /usr/share/man/man8/ontime-lab.8.gz
    local program
    for program in busybox cc cpio ip mke2fs mmdebstrap modprobe pkill python3 unshare xz zstd; do
        try "package ontime-lab does not bring $program" sh -c "command -v $program"
    done
    mkdir -p "$root/var/cache/ontime/lab/image"
    try "purge of the laboratory" apt-get purge -y -o Dpkg::Use-Pty=0 ontime-lab
    (cd "$root" && find . -xdev \( -path ./debs -o -path ./var/log \) -prune -o -name 'ontime-lab*' -print \
        -o -path ./var/cache/ontime -print) > "$work/said"
    [ ! -s "$work/said" ] || { cat "$work/said" >&2; fail "$suite: purge leaves something of the laboratory"; }
    echo "$suite: the laboratory installed and purged"
}

the_modules_and_lintian() {
    fresh "$suite" apt,dkms,lintian
    everything > "$work/before"
    local module
    for module in guest napi; do
        try "apt install ontime-$module-dkms" apt-get install -y -o Dpkg::Use-Pty=0 \
            "/debs/$(cd "$out" && echo ontime-$module-dkms_*.deb)"
    done
    inside dkms status > "$work/said"
    grep -q '^ontime/' "$work/said" && grep -q '^ontime_napi/' "$work/said" ||
        fail "$suite: dkms status says $(cat "$work/said")"
    echo "$suite: $(xargs < "$work/said")"
    try "purge of the modules" apt-get purge -y -o Dpkg::Use-Pty=0 ontime-guest-dkms ontime-napi-dkms
    everything > "$work/after"
    diff "$work/before" "$work/after" > "$work/said" ||
        { cat "$work/said" >&2; fail "$suite: purge leaves something of the modules"; }
    local status=0 packages=() one
    for one in "${debs[@]}"; do packages+=("/debs/${one##*/}"); done
    inside lintian --allow-root --fail-on error,warning --tag-display-limit 0 "${packages[@]}" > "$out/lintian-$suite" 2>&1 ||
        status=$?
    cat "$out/lintian-$suite"
    ! grep -q '^Syntax: ' "$out/lintian-$suite" || fail "$suite: lintian looked at nothing"
    [ $status = 0 ] || fail "$suite: lintian found errors or warnings"
    echo "$suite: lintian $(inside lintian --version | awk '{print $2}'):" \
        "$(grep -c '^E:' "$out/lintian-$suite") errors, $(grep -c '^W:' "$out/lintian-$suite") warnings"
}

files_of() { # PACKAGE: mode and path of each file
    dpkg-deb -c "$1" | awk '$1 !~ /^d/ {print $1, $6}' | sort
}

build_on_trixie() {
    local package there
    suite=trixie
    fresh $suite apt,build-essential,cargo,rustc,debhelper,dh-dkms,libclang-dev,pkg-config
    mkdir -p "$root/build" "$root/root/.cargo"
    tar -C "$here" --exclude=target --exclude=./.git -c . | tar -C "$root/build" -x
    (cd "$here" && cargo vendor --locked --respect-source-config "$root/vendor") 2> "$work/log" |
        sed "s,\"$root/vendor\",\"/vendor\"," > "$root/root/.cargo/config.toml" ||
            { tail -n 20 "$work/log" >&2; fail "cargo could not copy the libraries"; }
    try "make deb" env CARGO_NET_OFFLINE=true make -C /build deb
    for package in "${debs[@]}"; do
        there=("$root/build/target/deb/$(dpkg-deb -f "$package" Package)"_*.deb)
        [ ${#there[@]} = 1 ] || fail "$suite: make deb built ${#there[@]} packages $(dpkg-deb -f "$package" Package)"
        diff <(files_of "$package") <(files_of "${there[0]}") > "$work/said" ||
            { cat "$work/said" >&2; fail "$suite: package ${there[0]##*/} has other files than ${package##*/}"; }
    done
    echo "$suite: built by $(inside rustc --version): the same files in ${#debs[@]} packages"
}

if [ "${1:-}" = build ]; then
    build_on_trixie
    exit
fi
if [ "${1:-}" = systemd ]; then
    shift
    under_systemd "$@"
    exit
fi
. /etc/os-release
suites=${*:-$([ "$VERSION_ID" = 13 ] || echo bookworm) trixie}
for suite in $suites; do
    the_program
    automation
    the_laboratory
    the_modules_and_lintian
    rm -rf "${root:?}"
done
echo "deb test: passed ($(xargs <<< "$suites"))"
