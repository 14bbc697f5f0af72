#!/usr/bin/env bash
# Draws the Grafana dashboard as it is shipped, by the libraries that Grafana publishes under Apache-2.0, from a real
# Prometheus that scrapes a real daemon with real VMs: dashboard.sh ONTIME PICTURE. It fails if Prometheus refuses a
# query, a panel has no data, or Grafana's libraries do not know a unit or a setting. Grafana's server, under the AGPL,
# is not used. Needs root, Node.js 20.19, npm, Chromium, QEMU and Prometheus; ends with 3 without them (8 minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
ontime=$(realpath "$1") picture=$(realpath "$2") seconds=${SECONDS_SHOWN:-240}
PATH=$PWD/target/prometheus/usr/bin:$PATH
missing() { echo "dashboard: $* is missing; Debian: apt-get install npm chromium qemu-system-x86" >&2; exit 3; }
for program in node npm chromium qemu-system-x86_64 prometheus ip chrt; do
    command -v $program > /dev/null || missing $program
done
node -e '[a, b] = process.versions.node.split("."); process.exit(a > 20 || a == 20 && b >= 19 ? 0 : 1)' ||
    missing "Node.js 20.19 or newer"
[ "$(id -u)" = 0 ] || missing root

page=$PWD/target/dashboard
mkdir -p "$page"
cp scripts/grafana/page/* scripts/grafana/page/.npmrc "$page"
(
    cd "$page"
    cmp -s package-lock.json installed || npm ci --no-audit --no-fund --loglevel=error
    cp package-lock.json installed
    node_modules/.bin/vite build --logLevel error
)

# The daemon has directories, a simulated debugfs and a network namespace of its own, as in crates/ontime/tests.
work=$(mktemp -d)
netns=ontime-$$-dashboard
inside=(ip netns exec "$netns")
directories=(--run-dir "$work/run" --state-dir "$work/state" --config-dir "$work/etc" --debugfs "$work/debug")
pids=()
finish() {
    [ -z "${daemon:-}" ] || "${inside[@]}" "$ontime" reset "${directories[@]}" > /dev/null || true
    [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2> /dev/null || true
    wait
    ip netns delete "$netns" || true
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
ip netns add "$netns"
ip -n "$netns" link set lo up
mkdir -p "$work"/{run,state,etc/daemon.conf.d,debug}
for cpu in $(seq 0 $(($(nproc --all) - 1))); do
    mkdir -p "$work/debug/sched/fair_server/cpu$cpu"
    echo 50000000 > "$work/debug/sched/fair_server/cpu$cpu/runtime"
    echo 1000000000 > "$work/debug/sched/fair_server/cpu$cpu/period"
done
cat > "$work/etc/tenants.toml" << 'END'
[[tenant]]
name = "plc-1"
class = "rt"

[[tenant]]
name = "plc-2"
class = "rt"
runtime-cap = 0.2

[[tenant]]
name = "hmi"
class = "rt"
END
printf '[[reservation]]\nname = "plc-1"\nbudget = "4ms"\nperiod = "20ms"\n' > "$work/etc/sched.toml"
# Caps are for the tenants here, not for other real-time threads of this machine.
printf '[metrics]\nport = 9745\n[cap]\nuncapped = ["/"]\n' > "$work/etc/daemon.conf.d/metrics.toml"
{
    echo 'global: {scrape_interval: 2s}'
    echo 'scrape_configs:'
    sed 's/^/  /' packaging/prometheus/scrape.yml
} > "$work/prometheus.yml"

# A guest that counts down from a number, then halts until the next tick of its timer (18.2 a second), or never halts:
# sti; 1: mov $ROUNDS, %ecx; loop . (32 bits); hlt or nop; jmp 1b
guest() { # NAME, ROUNDS as four bytes, HLT or NOP
    {
        printf "\xfb\x66\xb9$2\x67\xe2\xfd$3\xeb\xf4"
        head -c 497 /dev/zero
        printf '\x55\xaa'
    } > "$work/$1.img"
    qemu-system-x86_64 -accel tcg -m 32 -nodefaults -display none -no-user-config -name "guest=$1,debug-threads=on" \
        -boot a -drive "file=$work/$1.img,format=raw,if=floppy" < /dev/null > "$work/$1.log" 2>&1 &
    pids+=($!)
}
guest plc-1 '\x00\x00\x20\x00' '\xf4'
guest plc-2 '\x00\x00\x80\x00' '\xf4'
guest hmi '\x00\x00\x20\x00' '\xf4'
guest web '\x00\x00\x20\x00' '\x90'
vcpu() { grep -ls '^CPU 0/' /proc/"$1"/task/*/comm | cut -d / -f 5; }
sleep 3
"${inside[@]}" "$ontime" daemon "${directories[@]}" > "$page/daemon.log" 2>&1 &
daemon=$!
pids+=($daemon)
"${inside[@]}" prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/tsdb" \
    --web.listen-address=127.0.0.1:9090 2> "$page/prometheus.log" &
pids+=($!)

# For the picture another program changes a vCPU's policy three times, and the configuration is reloaded.
echo "dashboard: collecting for $seconds s"
for quarter in 1 2 3 4; do
    sleep $((seconds / 4))
    kill -0 $daemon || { tail -n 20 "$page/daemon.log" >&2; exit 1; }
    if [ $quarter = 2 ]; then
        echo '# changed' >> "$work/etc/tenants.toml"
        "${inside[@]}" "$ontime" reload "${directories[@]}"
    fi
    if [ $quarter != 4 ]; then
        chrt --other --pid 0 "$(vcpu "${pids[2]}")"
        touch "$work/run/poke"
    fi
done
cd "$page"
dashboard=$OLDPWD/packaging/grafana/ontime.json
draw() { "${inside[@]}" node picture.mjs "$1" http://127.0.0.1:9090 2 "${seconds}s" "$2"; }
draw "$dashboard" picture.png
# Each of these mistakes is found: a unit, a setting, a query, a variable, a metric, a panel's type.
for mistake in percentunit/percents lineWidth/lineBreadth rate/rat '$instance/$host' ontime_tenants/ontime_tenant \
    stat/clock; do
    sed "s/${mistake/\$/\\$}/" "$dashboard" > mistake.json
    ! draw mistake.json mistake.png > mistake.log 2>&1 && grep -q '^dashboard: ' mistake.log ||
        { echo "dashboard: a mistake is not found: $mistake" >&2; exit 1; }
done
cp picture.png "$picture"
echo "dashboard: $picture"
