# In the emulated host, a Debian 13 with libvirt and systemd (systemd-init.sh): what an operator does on the first day,
# beside a libvirt VM. packages.sh [STAGE...]: only these stages, and those that they need. Stages compare the output of
# commands with the tutorial. /lab has the package (debs), the same with a newer and an older version (newer.deb,
# older.deb), its files in another folder with a unit that sleeps (payload.deb), rt-tests, two pages of docs,
# Ansible's role (ansible), and a directory of packages each for apparmor, tuned and ansible-core; perhaps ontime.rpm
# and the packages of rpm (rpm).
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 LAB_VM_SECONDS=300
said=/run/said now=boot ran= failed=
: > $said
ends='status=$?; [ $status -eq 0 ] || [ -z "$now" ] || echo "stage $now ended with $status at: ${BASH_COMMAND:-}"'
trap "$ends; journalctl --no-pager -b > /lab/journal 2> /dev/null || true" EXIT

wrong() { # WHAT: the stage goes on, but has failed
    echo "FAILED in stage $now: $*"
    failed="$failed $now"
}
fail() { # WHAT: ends the stage
    echo "FAILED in stage $now: $*"
    echo "what the last command said:"
    tail -n 30 $said
    systemctl --no-pager --failed --plain --no-legend || true
    journalctl --no-pager -u ontimed -n 20 || true
    exit 1
}
expect() { [ "$2" = "$3" ] || fail "$1: wanted '$2', found '$3'"; } # WHAT WANTED ACTUAL
uptime_ms() { read -r up rest < /proc/uptime; whole=${up%.*}; echo $((whole * 1000 + 1${up#*.} * 10 - 1000)); }
# SECONDS COMMAND...: until it succeeds, on the host's clock. A pass of the daemon may take seconds there, beside VMs at
# real-time priority on one CPU, and the daemon pauses for three seconds after it.
within() {
    end=$(($(uptime_ms) + $1 * 1000))
    shift
    until "$@" > /dev/null 2>&1; do
        [ "$(uptime_ms)" -lt "$end" ] || fail "not in time: $*"
        sleep 0.1
    done
}
# TID: 'SCHED_FIFO 47 '
place() { chrt -p "$1" | sed -n 's/|SCHED_RESET_ON_FORK//; s/.*policy: //p; s/.*priority: //p' | tr '\n' ' '; }
placed() { [ "$(place "$1")" = "$2 " ]; }
# PID PATTERN
thread() { for task in /proc/"$1"/task/*; do case $(cat "$task/comm") in $2) echo "${task##*/}" ;; esac; done; }
tries() { # STATUSES COMMAND...: the command ends with one of these; $said has its output
    allowed=$1 status=0
    shift
    "$@" > $said 2>&1 < /dev/null || status=$?
    case " $allowed " in *" $status "*) ;; *) fail "$* ended with $status, not one of: $allowed" ;; esac
}
# COMMAND: $said has every line that the tutorial shows after "# COMMAND", in this order. Numbers may be others, a
# verdict too, and "..." stands for anything.
shows() {
    perl -e '
        my ($command, $said) = @ARGV;
        open(my $page, "<", "/lab/tutorial.md") or die "tutorial.md: $!\n";
        my ($seen, @shown) = (0);
        while (<$page>) {
            chomp;
            if ($_ eq "# $command") { $seen = 1; next }
            next unless $seen;
            last if /^(```|# )/;
            push @shown, $_ if /[^. ]/;
        }
        die "the tutorial shows no output of it\n" unless @shown;
        open(my $output, "<", $said) or die "$said: $!\n";
        my @lines = <$output>;
        my $at = 0;
        for my $line (@shown) {
            my @words = map {
                my $word = quotemeta;
                $word =~ s/\\\.\\\.\\\./.*/;
                $word =~ s/\d(?:\d|\\[-.,])*/[\\d.,-]+/g;
                $word =~ s/^(?:FAIL|pass)$/(?:FAIL|pass)/;
                $word
            } split(" ", $line);
            my $pattern = join("\\s+", @words);
            $at++ while $at < @lines && $lines[$at] !~ /^\s*$pattern/;
            die "the tutorial shows a line that is not there, or not in this place: $line\n" if $at == @lines;
            $at++;
        }' "$1" $said 2> /run/compared && return
    wrong "$1: $(cat /run/compared); it said:"
    cat $said
}

needs() { # STAGE: the one before
    case $1 in
    boot) ;;
    vm) echo boot ;;
    install_package) echo vm ;;
    declare_vm) echo install_package ;;
    doctor | dry_run | enforce) echo declare_vm ;;
    ansible_role | rpm_package) echo purge ;;
    *) echo enforce ;;
    esac
}
run() { # STAGE...: those that have not run, each after what it needs
    local stage
    for stage in "$@"; do
        case " $ran " in *" $stage "*) continue ;; esac
        run $(needs "$stage")
        ran="$ran $stage" now=$stage
        echo "stage $stage ($(cut -d. -f1 /proc/uptime) s on the emulated clock)"
        case $stage in
        boot | vm | install_package | declare_vm | enforce | purge) "$stage" ;;
        *)
            # No other stage needs this one: the test goes on after a failure.
            set +e
            (
                set -e
                trap "$ends; kill \$(jobs -p) 2> /dev/null || true" EXIT
                failed=
                "$stage"
                [ -z "$failed" ]
            )
            [ $? -eq 0 ] || failed="$failed $stage"
            set -e
            ;;
        esac
    done
}

# Every file, but those that other programs write while they run.
everything() {
    (cd / && find . -xdev \( -path ./lab -o -path ./tmp -o -path ./root -o -path ./var/cache -o -path ./var/log \
        -o -path ./var/tmp -o -path ./var/spool -o -path ./var/lib/dpkg -o -path ./var/lib/apt \
        -o -path ./var/lib/libvirt -o -path ./var/lib/systemd/timers -o -path ./etc/libvirt/qemu \
        -o -path ./etc/apparmor.d/libvirt \) -prune -o -print) | LC_ALL=C sort
}
# What a stage installs besides Ontime, between these two, is not what purge leaves.
begin_others() { everything > /run/files-one; }
end_others() {
    everything > /run/files-two
    LC_ALL=C comm -13 /run/files-one /run/files-two >> /run/files-before
    LC_ALL=C sort -o /run/files-before /run/files-before
}
# DIRECTORY: unpacks its packages, of programs in Python. dpkg would compile them, which takes minutes here.
unpack() {
    for package in /lab/"$1"/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x --warning=no-timestamp -C / --keep-directory-symlink
    done
}
snapshot() { # every knob that the daemon may touch, by name, of threads that are there before and after
    for task in /proc/[0-9]*/task/[0-9]*; do
        name=$(cat "$task/comm" 2> /dev/null) || continue
        case $name in
        irq/* | irq_work/* | napi/* | ksoftirqd/* | ktimers/* | rcuc/* | backlog_napi/* | vhost-* | CPU* | kvm-pit* | qemu-system*) ;;
        *) continue ;;
        esac
        # A thread's time slice is the kernel's of the day when its policy was set.
        policy=$(chrt -p "${task##*/}" 2> /dev/null | sed "s/pid [0-9]*//; /runtime parameter/d" | tr '\n' ' ')
        echo "$name $policy$(taskset -p "${task##*/}" 2> /dev/null | sed 's/.*mask//')"
    done | sort
    for file in /sys/class/net/*/threaded /sys/class/net/*/queues/tx-*/xps_cpus /proc/sys/net/core/skb_defer_max \
        /proc/sys/net/core/dev_weight /proc/irq/default_smp_affinity \
        /proc/sys/kernel/sched_rt_runtime_us /sys/module/kvm/parameters/halt_poll_ns /proc/irq/*/smp_affinity_list \
        /sys/kernel/debug/sched/*_server/cpu*/runtime; do
        [ -e "$file" ] && echo "$file $(cat "$file" 2> /dev/null)"
    done
    for nic in /sys/class/net/*; do tc qdisc show dev "${nic##*/}" | sed "s/^/${nic##*/} /; s/ qdisc \([a-z_]*\) [0-9a-f]*:/ \1/"; done
    for nic in /sys/class/net/*; do
        for side in ingress egress; do tc filter show dev "${nic##*/}" $side 2> /dev/null | sed "s/^/${nic##*/} $side /"; done
        ethtool -c "${nic##*/}" 2> /dev/null | sed -n "s/^rx-usecs:/${nic##*/} rx-usecs/p"
    done
    true
}
# The knobs of the host itself: VMs start again during this test.
knobs() { snapshot | grep -v -E '^(CPU|vhost-|qemu-system|kvm-pit)|/t-|^t-'; }
pid_of() { cat "/run/libvirt/qemu/$1.pid"; } # VM
vcpu_of() { thread "$(pid_of "$1")" 'CPU 0/KVM'; } # VM
reserved() { # of the VM with reserved CPU time: thread, budget and period
    ontime top --once --json --interval 0.1 | tr '{' '\n' | grep '"vm":"res-1"' |
        grep -o '"\(tid\|budget_us\|period_us\)":[0-9.]*' | sort | xargs
}
vcpu_place() { # as the tutorial says; but where another VM has reserved CPU time, vCPUs come after that one's
    if [ -z "$(reserved)" ]; then echo SCHED_FIFO 47; else echo SCHED_FIFO 46; fi
}
has_places() { # VM
    placed "$(vcpu_of "$1")" "$(vcpu_place)" && placed "$(thread "$(pid_of "$1")" 'vhost-*')" "SCHED_FIFO 48" &&
        placed "$(pid_of "$1")" "SCHED_FIFO 3"
}
label() { tr -d '\0' < "/proc/$1/attr/current"; } # PID: AppArmor's

define() { # NAME ROLE ADDRESS [ATTRIBUTES]: a libvirt domain, with this metadata for Ontime if it is given
    lab-libvirt define "$1" "$2" rt "$3" "${4:-}" > /dev/null
    virsh -q undefine "$1"
    # Not each file of huge pages has a name that AppArmor's profiles know.
    sed -i 's|<hugepages/>||' "/run/lab-vm/$1.xml"
    [ -n "${4:-}" ] || sed -i '/<metadata>/d' "/run/lab-vm/$1.xml"
    virsh -q define "/run/lab-vm/$1.xml"
}
start() { # NAME: until its guest is up
    rm -f "/run/lab-vm/$1.log"
    tries 0 virsh -q start "$1"
    lab-vm wait "$1" > $said 2>&1 || fail "VM $1 does not boot"
}

# Requests to the VM from a client above every other thread, so that only the VM's path can delay an answer.
client() { exec /run/measures chrt -f 60 ping -i 0.02 "$@" 10.1.0.2; }
beside_requests() { # FILE COMMAND...: the command beside such requests; FILE has what the client says of the answers
    client > "$1" &
    asking=$!
    shift
    tries 0 "$@"
    kill -ALRM $asking
    wait $asking || true
}
# FILE: number of requests without an answer, p99 and the slowest answer, us
answers_of() {
    missing=$(awk '/packets transmitted/ {print $1 - $4}' "$1")
    sed -n 's/.* time=\([0-9.]*\) ms$/\1/p' "$1" | sort -n | awk -v missing="${missing:-all}" '{us[NR] = int($1 * 1000)}
        END {at = int(NR * 0.99 + 0.99); print missing, us[at] + 0, us[NR] + 0}'
}
# WHAT BEFORE DURING: the answers in file DURING are no later than those in BEFORE. One of more requests is slower by
# chance: twice as late, and 1,000 us.
no_later() {
    read -r before_missing before_p99 before << END
$(answers_of "$2")
END
    read -r missing p99 slowest << END
$(answers_of "$3")
END
    echo "figures: answers without $1: p99 $before_p99 us, slowest $before us; beside it: $p99 us, $slowest us"
    # The last request may be on its way.
    case $before_missing$missing in 00 | 01 | 10 | 11) ;; *)
        wrong "requests without an answer: $before_missing without $1, $missing beside it" ;;
    esac
    [ "$before" -gt 0 ] && [ "$slowest" -gt 0 ] || wrong "ping measured nothing: $(tail -n 5 "$2" "$3")"
    [ "$p99" -le $((2 * before_p99 + 1000)) ] || wrong "$1 delays answers: p99"
    [ "$slowest" -le $((2 * before + 1000)) ] || wrong "$1 delays answers: the slowest"
}

boot() {
    expect "the first process" systemd "$(cat /proc/1/comm)"
    echo "the system is $(timeout 600 systemctl is-system-running --wait || true)"
    systemctl --no-pager --failed --plain --no-legend
    # The lab's images leave out documentation.
    rm -f /etc/dpkg/dpkg.cfg.d/99mmdebstrap
    # /run/measures COMMAND...: runs COMMAND in a control group whose real-time threads need no cap.
    mkdir -p /sys/fs/cgroup/measures
    printf '[cap]\nuncapped = ["/measures"]\n' > /run/measures.toml
    printf '#!/bin/sh\necho $$ > /sys/fs/cgroup/measures/cgroup.procs && exec "$@"\n' > /run/measures
    chmod +x /run/measures
}

vm() {
    # One NIC, as in the tutorial, and VMs on a bridge. The clients' side has eth1 and eth3.
    echo 1 > /sys/class/net/eth2/device/remove
    ip link add br-rt type bridge mcast_snooping 0
    ip link set br-rt up
    ip link set eth0 master br-rt up
    ip address add 10.1.0.9/24 dev br-rt
    mkdir -p /run/lab-vm
    define plc-1 rt 10.1.0.2
    start plc-1
    tries 0 ping -q -c 5 -i 0.2 10.1.0.2
}

install_package() {
    everything > /run/files-before
    knobs > /run/knobs-before
    beside_requests /run/payload-installed apt install -y /lab/payload.deb
    tries 0 apt purge -y payload
    cd /lab/debs
    beside_requests /run/installed apt install -y ./ontime_*.deb
    shows 'apt install ./target/deb/ontime_*.deb'
    grep -q '^ontime: libvirt runs the hook .* from its next start on' $said || wrong "nothing is said of libvirt's hook"
    no_later "the installation" /run/payload-installed /run/installed
    expect "ontimed" "active enabled" "$(systemctl is-active ontimed) $(systemctl is-enabled ontimed)"
    tries 0 ontime --version
    cat $said
    tries "0 1 2" ontime status
    grep -q 'observing: nothing is set' $said || fail "a fresh installation does not observe"
    knobs > /run/knobs
    diff /run/knobs-before /run/knobs > $said || fail "a fresh installation changed the host"
}

declare_vm() {
    tries 0 ontime ps
    shows 'ontime ps'
    awk '/^```toml/ {inside = 1; next} /^```/ {inside = 0} inside' /lab/tutorial.md > /etc/ontime/tenants.toml
    tries 0 ontime check
    shows 'ontime check'
    tries "0 1 2" ontime reload
    grep -q '^method partitioned: [1-9][0-9]* changes would be made, ' $said || fail "the reload did not take the file"
    tries 0 ontime ps
    grep -q '^plc-1 *libvirt *rt0 ' $said && grep -q 'OTHER (wanted FIFO 47)' $said ||
        fail "ontime ps does not show what the declared VM will have"
}

doctor() {
    tries "1 2" ontime doctor
    shows 'ontime doctor'
}

dry_run() {
    tries "0 1 2" ontime apply --dry-run
    shows 'ontime apply --dry-run'
    knobs > /run/knobs
    diff /run/knobs-before /run/knobs > $said || fail "a dry run changed the host"
}

enforce() {
    command=$(sed -n 's/^# \(sed -i .*\)/\1/p' /lab/tutorial.md)
    eval "$command"
    tries "0 1 2" ontime reload
    within 40 has_places plc-1
    tries "0 1 2" ontime apply
    shows 'ontime apply'
    ontime status || true
}

verify() {
    # As `apt install rt-tests rtla` does from Debian's mirror. The image may have one of them.
    grep -qx '# apt install rt-tests rtla' /lab/tutorial.md || wrong "the tutorial does not install what verify runs"
    begin_others
    tries 0 apt install -y --no-install-recommends /lab/rt-tests/*.deb
    end_others
    tries "0 1" ontime verify --duration 5 --json /lab/verify.json --html /lab/verify.html
    shows 'ontime verify'
    cat $said
    grep -q '^kernel .* (PREEMPT_RT), ' $said || wrong "verify does not know the kernel"
    grep -q '"schema_version"' /lab/verify.json && grep -q '</html>' /lab/verify.html || wrong "verify wrote no result"
    # Requests from the clients' side, which come in by the NIC. 3: some events were lost.
    while :; do lab-client timeout 30 /lab/ontime-lab-tests program trace_names_the_inversions ask 10.1.0.2; done &
    asks=$!
    tries "0 1 3" ontime verify --test request --duration 15 --limits iec61850 --html /lab/requests.html
    kill $asks
    cat $said
    grep -q '^request  *plc-1  *[1-9]' $said || wrong "no request to the VM was measured"
}

# Thread, policy and priority of every thread of both VMs.
places() {
    for name in plc-1 res-1; do chrt -a -p "$(pid_of $name)" 2> /dev/null; done | awk '
        /policy:/ {tid = $2; sub(/.s$/, "", tid); policy = $NF; sub(/[|]SCHED_RESET_ON_FORK/, "", policy)}
        /priority:/ {print tid, policy, $NF}'
}
is_reserved() { case $(reserved) in *'period_us:20000'*) ;; *) false ;; esac; }
still_reserved() { [ "$(reserved)" = "$(cat /run/reserved)" ]; }

# Beside bulk work that uses all of the CPU, with and without the upgrade.
upgrade() {
    mkdir -p /etc/ontime/daemon.conf.d
    cp /run/measures.toml /etc/ontime/daemon.conf.d/
    printf '[[reservation]]\nname = "res-1"\nbudget = "2ms"\nperiod = "20ms"\n' > /etc/ontime/sched.toml
    define res-1 idle 10.1.0.3 'class="rt" level="1"'
    start res-1
    tries "0 1 2" ontime reload
    within 60 is_reserved
    reserved > /run/reserved
    echo "reserved: $(cat /run/reserved)"
    sh -c 'while :; do gzip -c /usr/bin/perl > /dev/null; done' &
    bulk=$!
    (client -c 500) > /run/quiet || fail "the VM does not answer beside bulk work"
    vcpu=$(vcpu_of plc-1) daemon=$(systemctl show -p MainPID --value ontimed)
    # A pacer moves the vCPU that has reserved CPU time from place to place.
    places | grep ' SCHED_FIFO ' | grep -v "^$(vcpu_of res-1) " > /run/placed
    client > /run/upgraded &
    asking=$!
    while :; do places; sleep 0.1; done > /run/places &
    watching=$!
    tries 0 apt install -y /lab/newer.deb
    # Also the first seconds of the new daemon.
    sleep 3
    kill -ALRM $asking
    wait $asking || true
    kill $watching $bulk
    expect "version" "$(dpkg-deb -f /lab/newer.deb Version)" "$(dpkg-query -W -f '${Version}' ontime)"
    expect "ontimed" active "$(systemctl is-active ontimed)"
    [ "$(systemctl show -p MainPID --value ontimed)" != "$daemon" ] || fail "the former daemon still runs"
    [ "$(grep -c "^$vcpu " /run/places)" -gt 5 ] || fail "the VM was not looked at: $(xargs < /run/places)"
    expect "place of the VM's vCPU before the upgrade" "$vcpu SCHED_FIFO 46" "$(grep "^$vcpu " /run/placed)"
    # vCPU, vhost and the monitor's main thread of one VM, and the latter two of the other.
    [ "$(grep -c . /run/placed)" -ge 5 ] || fail "threads with a place before the upgrade: $(cat /run/placed)"
    awk 'NR == FNR {place[$1] = $2 " " $3; next} ($1 in place) && place[$1] != ($2 " " $3)' /run/placed /run/places |
        sort -u > $said
    [ ! -s $said ] || fail "threads had other places during the upgrade than before: $(xargs < /run/placed)"
    within 40 still_reserved
    has_places plc-1 || fail "the VM lost its places"
    no_later "the upgrade" /run/quiet /run/upgraded
}

downgrade() {
    tries 0 apt install -y --allow-downgrades /lab/older.deb
    expect "version" "$(dpkg-deb -f /lab/older.deb Version)" "$(dpkg-query -W -f '${Version}' ontime)"
    expect "ontimed" active "$(systemctl is-active ontimed)"
    within 40 has_places plc-1
    [ ! -e /run/reserved ] || within 40 still_reserved

    # With a journal of a later version's format, the daemon says why it does not start.
    systemctl stop ontimed
    cp -p /var/lib/ontime/originals /run/originals
    sed -i '1s/"format":[0-9]*/"format":99/' /var/lib/ontime/originals
    tries 1 systemctl start ontimed
    # It would be started again and again.
    systemctl stop ontimed
    journalctl --no-pager -b -u ontimed -n 50 > $said
    grep -q 'written in this boot by another version of Ontime (its format is 99, ' $said ||
        fail "the log does not say why the daemon refuses the journal"
    cp -p /run/originals /var/lib/ontime/originals
    rm /run/originals
    systemctl reset-failed ontimed
    tries 0 systemctl start ontimed
    within 40 has_places plc-1
    [ ! -e /run/reserved ] || within 40 still_reserved
}

scraped() { # as Prometheus does; the image has no curl
    (
        exec 7<> /dev/tcp/127.0.0.1/9745
        printf 'GET /metrics HTTP/1.1\r\nhost: ontime\r\nconnection: close\r\n\r\n' >&7
        timeout 60 cat <&7
    ) > $said 2>&1 && grep -q '^ontime_build_info{' $said
}
# What the units' sandboxes allow: metrics by TCP and in a file, the log of changes, and the report.
monitoring() {
    metrics=/etc/ontime/daemon.conf.d/metrics.toml collector=/var/lib/prometheus/node-exporter
    # The directories are node_exporter's; the file stays until the package is removed.
    begin_others
    mkdir -p $collector
    end_others
    mkdir -p ${metrics%/*}
    printf '[metrics]\nport = 9745\n' > $metrics
    tries "0 1 2" ontime reload
    within 60 scraped
    tries 0 systemctl enable --now ontime-metrics.timer
    within 120 grep -q '^ontime_build_info{' $collector/ontime.prom
    expect "mode of the collector's file" 644 "$(stat -c %a $collector/ontime.prom)"
    tries 0 journalctl --no-pager -b -u ontimed -g '^ontime '
    grep -qF "$(ontime --version): mode observe, method partitioned (default)" $said ||
        fail "the log does not say how the daemon started"
    tries 0 journalctl --no-pager -b -u ontimed -g '^knob'
    grep -q 'knob policy of thread [0-9]* (CPU 0/KVM): OTHER -> FIFO 47 (vcpu-place)$' $said ||
        fail "the log does not have the change of the vCPU's policy"
    tries 0 ontime report --output /run/report.tar
    mkdir /run/report
    tar -xf /run/report.tar -C /run/report
    grep -q 'knob policy of thread' /run/report/ontime-report/log.txt || fail "the report has no log"
    grep -q '^ActiveState=active$' /run/report/ontime-report/unit.txt || fail "the report has no unit"
    tries 0 systemctl disable --now ontime-metrics.timer
    rm -r /run/report /run/report.tar $metrics
    tries "0 1 2" ontime reload
}

# The package's example of a real-time domain starts as it is, but for its name: it finds an empty disk.
example() {
    sed 's/plc-1/plc-2/' /usr/share/doc/ontime/examples/libvirt/examples/rt-vm.xml > /run/plc-2.xml
    mkdir -p /var/lib/libvirt/images
    qemu-img create -q -f qcow2 /var/lib/libvirt/images/plc-2.qcow2 64M
    ip link add eth1 type dummy
    ip link set eth1 up
    tries 0 virt-xml-validate /run/plc-2.xml domain
    tries 0 virsh define /run/plc-2.xml
    tries 0 virsh start plc-2
    within 40 placed "$(vcpu_of plc-2)" "$(vcpu_place)"
    virsh -q destroy plc-2
    virsh -q undefine plc-2
    rm /var/lib/libvirt/images/plc-2.qcow2
    ip link del eth1
    # The metadata of the bulk VM's example, in a VM that starts.
    define web-1 idle 10.1.0.4
    virsh -q undefine web-1
    sed -n '/^<metadata>/,/^<.metadata>/p' /usr/share/doc/ontime/examples/libvirt/examples/bulk-vm.xml > /run/metadata
    sed -i '/<name>/r /run/metadata' /run/lab-vm/web-1.xml
    tries 0 virsh define /run/lab-vm/web-1.xml
    start web-1
    tries 0 ontime ps
    grep -q '^web-1 *libvirt *bulk *metadata ' $said || wrong "the example's metadata is not read: $(cat $said)"
    virsh -q destroy web-1
    virsh -q undefine web-1
}

# The commands of docs/use/kubernetes.md that prepare a node; then all of it but the reserve can be given out. They
# leave a sched.toml as it is.
kubernetes_node() {
    [ ! -e /etc/ontime/sched.toml ] || mv /etc/ontime/sched.toml /run/sched.toml
    sed -n '/^1\./,/^2\./s/^       //p' /lab/kubernetes.md > /run/node-commands
    [ -s /run/node-commands ] || fail "kubernetes.md has no commands for a node"
    tries 0 sh -e /run/node-commands
    within 60 offers_cpu_time 949996
    echo 'reserve = 0.1 # own' > /etc/ontime/sched.toml
    tries 0 sh -e /run/node-commands
    expect "an administrator's sched.toml" 'reserve = 0.1 # own' "$(cat /etc/ontime/sched.toml)"
    within 60 offers_cpu_time 899996
    rm /etc/ontime/sched.toml
    [ ! -e /run/sched.toml ] || mv /run/sched.toml /etc/ontime/
    tries 0 systemctl reload ontimed
}
offers_cpu_time() { # MICROCPUS: of each CPU
    ontime top --once --json --interval 0.1 | tr -d ' \n' | grep -q '"off":null,.*"unpinned_micro_cpus_per_cpu":'"$1"','
}

# The package's profile of tuned does what it says, and changes nothing that Ontime sets.
tuned_profile() {
    begin_others
    unpack tuned
    profiles=/etc/tuned
    [ ! -d /usr/lib/tuned/profiles ] || profiles=/etc/tuned/profiles
    mkdir -p $profiles
    cp -r /usr/share/doc/ontime/examples/tuned/ontime-host $profiles/
    knobs > /run/knobs-enforced
    # Python compiles first what the daemon imports.
    mkdir -p /run/systemd/system/tuned.service.d
    printf '[Service]\nTimeoutStartSec=10min\n' > /run/systemd/system/tuned.service.d/slow.conf
    systemctl daemon-reload
    [ ! -e /usr/lib/tmpfiles.d/tuned.conf ] || tries 0 systemd-tmpfiles --create /usr/lib/tmpfiles.d/tuned.conf
    tries 0 systemctl reload-or-restart dbus
    tries 0 systemctl start tuned
    tries 0 tuned-adm profile ontime-host
    tries 0 tuned-adm active
    grep -q 'ontime-host' $said || fail "the profile is not active"
    settings=$(awk -F= '/^\[/ {inside = $0 == "[sysctl]"; next} inside && NF == 2' $profiles/ontime-host/tuned.conf)
    [ -n "$settings" ] || fail "the profile has no sysctl"
    # A real-time kernel has neither kernel.numa_balancing nor transparent huge pages.
    missing=
    for setting in $settings; do
        if [ -e "/proc/sys/$(echo "${setting%=*}" | tr . /)" ]; then
            expect "${setting%=*}" "${setting#*=}" "$(sysctl -n "${setting%=*}")"
        else
            missing="$missing${setting%=*} "
        fi
    done
    case $missing in '' | 'kernel.numa_balancing ') ;; *) fail "this kernel has no $missing" ;; esac
    expect "merging of equal pages" 2 "$(cat /sys/kernel/mm/ksm/run)"
    huge=/sys/kernel/mm/transparent_hugepage/enabled
    [ ! -e $huge ] || grep -q '\[never\]' $huge || fail "transparent huge pages are on"
    knobs > /run/knobs
    diff /run/knobs-enforced /run/knobs > $said || fail "tuned changed what Ontime sets"
    has_places plc-1 || fail "the VM lost its places"
    tries 0 tuned-adm off
    tries 0 systemctl stop tuned
    rm -r $profiles/ontime-host
    end_others
}

# libvirt's profiles in force: an ordinary VM has its places and libvirt's hook tells of it; a VM with outsourced
# sockets starts only with the package's lines.
apparmor() {
    begin_others
    tries 0 dpkg -i /lab/apparmor/*.deb
    end_others
    tries 0 systemctl restart apparmor
    # VMs that started before the profiles.
    for name in $(virsh list --name); do virsh -q destroy "$name"; done
    tries 0 systemctl restart libvirtd
    libvirtd=$(systemctl show -p MainPID --value libvirtd)
    expect "AppArmor's label of libvirtd" "libvirtd (enforce)" "$(label "$libvirtd")"
    touch -d @1 /run/ontime/poke
    start plc-1
    label "$(pid_of plc-1)" | grep -q '^libvirt-.* (enforce)$' ||
        fail "QEMU runs without a profile in force: $(label "$(pid_of plc-1)")"
    [ "$(stat -c %Y /run/ontime/poke)" -gt 1 ] || wrong "libvirt did not run the hook"
    within 40 has_places plc-1

    # Its device process is that of the unit, with its sandbox.
    ip netns add ontime-web
    ip -n ontime-web link set lo up
    printf '[vm.web]\nchannels = 1\n' > /etc/ontime/sockets.toml
    tries 0 systemctl start ontime-device@web
    within 30 test -S /run/ontime/device/web/channel1.sock
    tries 0 ontime attach --libvirt web
    {
        sed -e 's|<domain type="kvm">|<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">|' \
            -e 's/plc-1/web/g' -e '/<\/domain>/d' /run/lab-vm/plc-1.xml
        sed -n '/<qemu:commandline>/,$p' $said
        echo '</domain>'
    } > /run/web.xml
    tries 0 virsh -q define /run/web.xml
    # Not every kernel asks AppArmor when QEMU connects: Linux 7.2 does not with these profiles.
    if virsh -q start --paused web > $said 2>&1; then
        tries 0 virsh -q destroy web
    else
        grep -q 'Permission denied' $said || fail "without its lines QEMU failed otherwise"
        journalctl --no-pager -b | grep 'apparmor="DENIED".*/run/ontime/device/web/' ||
            fail "the kernel's log has no refusal by AppArmor"
    fi
    lines=/etc/apparmor.d/abstractions/libvirt-qemu.d/ontime
    install -D -m 644 /usr/share/doc/ontime/examples/apparmor/libvirt-qemu $lines
    tries 0 virsh -q start --paused web
    label "$(pid_of web)" | grep -q '^libvirt-.* (enforce)$' || fail "QEMU with outsourced sockets has no profile"
    tries 0 ontime sockets web
    virsh -q destroy web
    virsh -q undefine web
    systemctl stop ontime-device@web
    ip netns del ontime-web
    rm $lines
    rmdir "${lines%/*}" 2> /dev/null || true
}

no_process() { ! pgrep -l '^ontime' | grep -v ' ontime-lab$'; } # of the package
purge() {
    cd /
    for name in $(virsh list --name); do [ "$name" = plc-1 ] || virsh -q destroy "$name"; done
    [ -e /run/libvirt/qemu/plc-1.pid ] || start plc-1
    beside_requests /run/purged apt purge -y ontime
    shows 'apt purge ontime'
    # The VM's threads are ordinary ones, as from the moment in which the removal has taken their places.
    tries 0 apt install -y /lab/payload.deb
    beside_requests /run/payload-purged apt purge -y payload
    no_later "the removal" /run/payload-purged /run/purged
    expect "units" "" "$(systemctl list-unit-files --no-legend 'ontime*')"
    within 20 no_process
    placed "$(vcpu_of plc-1)" "SCHED_OTHER 0" || fail "a vCPU kept its place"
    knobs > /run/knobs
    diff /run/knobs-before /run/knobs > $said || fail "purge left settings"
    everything > /run/files
    # A directory with something in it holds files of others, or is listed by its own.
    LC_ALL=C comm -13 /run/files-before /run/files | while read -r left; do
        [ -d "/$left" ] && [ -n "$(ls -A "/$left")" ] || echo "$left"
    done > $said
    [ ! -s $said ] || fail "purge left files"
    [ ! -e /run/ontime ] || fail "purge left /run/ontime: $(find /run/ontime | xargs)"
    tries 0 ping -q -c 5 -i 0.2 10.1.0.2
}

play() { tries 0 ansible-playbook -i localhost, "$@" /run/role.yml; } # ARGUMENTS...
daemon_of() { systemctl show -p MainPID --value ontimed; }
# The role starts the daemon, which takes a change without a new start; applied again it changes nothing; undone it
# leaves nothing.
ansible_role() {
    unpack ansible-core
    export ANSIBLE_ROLES_PATH=/lab/ansible/roles
    cat > /run/role.yml << END
- hosts: localhost
  connection: local
  roles:
    - role: ontime
      ontime_deb: $(echo /lab/debs/ontime_*.deb)
      ontime_mode: enforce
      ontime_tenants: [{name: plc-1, class: rt}]
END
    play
    expect "ontimed" "active enabled" "$(systemctl is-active ontimed) $(systemctl is-enabled ontimed)"
    within 40 has_places plc-1
    daemon=$(daemon_of)
    play
    grep -q 'changed=0 ' $said || fail "the role, applied again, changes something"
    play -e '{"ontime_tenants": []}'
    within 40 placed "$(vcpu_of plc-1)" "SCHED_OTHER 0"
    expect "the daemon's process after changes" "$daemon" "$(daemon_of)"
    play
    within 40 has_places plc-1
    play -e ontime_state=absent
    expect "units" "" "$(systemctl list-unit-files --no-legend 'ontime*')"
    placed "$(vcpu_of plc-1)" "SCHED_OTHER 0" || fail "a vCPU kept its place"
    knobs > /run/knobs
    diff /run/knobs-before /run/knobs > $said || fail "the undone role left settings"
    for left in /etc/ontime /var/lib/ontime /run/ontime /var/cache/ontime-ansible.deb; do
        [ ! -e $left ] || fail "the undone role left $left"
    done
    play -e ontime_state=absent
    grep -q 'changed=0 ' $said || fail "the role, undone again, changes something"
}

# Debian's rpm may ask for one more option. It does not know what dpkg has installed.
by_rpm() { # ARGUMENTS...
    status=0
    rpm "$@" > $said 2>&1 || status=$?
    if [ $status -ne 0 ] && grep -q -e --force-debian $said; then
        status=0
        rpm --force-debian "$@" > $said 2>&1 || status=$?
    fi
    [ $status -eq 0 ] || fail "rpm $* ended with $status"
}

# The scripts of the RPM package.
rpm_package() {
    [ -e /lab/ontime.rpm ] || { echo "SKIPPED: stage rpm_package needs target/rpm (make rpm)"; return 0; }
    tries 0 dpkg -i /lab/rpm/*.deb
    by_rpm -i --nodeps /lab/ontime.rpm
    tries 0 systemctl enable --now ontimed
    tries "0 1 2" ontime status
    grep -q 'observing: nothing is set' $said || fail "a fresh installation does not observe"
    printf '[[tenant]]\nname = "plc-1"\nclass = "rt"\n' > /etc/ontime/tenants.toml
    sed -i 's/^mode = .*/mode = "enforce"/' /etc/ontime/daemon.toml
    tries 0 systemctl reload ontimed
    within 40 has_places plc-1
    # An instance that the administrator enabled, and the metrics of the package's timer.
    instance=/etc/systemd/system/multi-user.target.wants/ontime-device@web.service
    ln -s /usr/lib/systemd/system/ontime-device@.service $instance
    metrics=/var/lib/prometheus/node-exporter/ontime.prom
    mkdir -p ${metrics%/*}
    : > $metrics
    by_rpm -e ontime
    [ ! -L $instance ] && [ ! -e $metrics ] || fail "removal of the RPM package left a link or metrics"
    expect "ontimed" inactive "$(systemctl is-active ontimed || true)"
    placed "$(vcpu_of plc-1)" "SCHED_OTHER 0" || fail "a vCPU kept its place"
    knobs > /run/knobs
    diff /run/knobs-before /run/knobs > $said || fail "removal of the RPM package left settings"
    expect "units" "" "$(systemctl list-unit-files --no-legend 'ontime*')"
    [ ! -e /var/lib/ontime ] && [ ! -e /run/ontime ] || fail "removal of the RPM package left state"
}

stages="boot vm install_package declare_vm doctor dry_run enforce verify"
stages="$stages upgrade downgrade monitoring example kubernetes_node tuned_profile apparmor purge"
stages="$stages ansible_role rpm_package"
for stage in "$@"; do
    case " $stages " in *" $stage "*) ;; *) fail "no stage '$stage'; there are: $stages" ;; esac
done
run ${*:-$stages}
now=
[ -z "$failed" ] || { echo "stages that failed:$failed" && exit 1; }
echo "passed:$ran"
