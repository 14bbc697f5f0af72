# In the emulated host: the clients' side on a CPU of its own. It reaches VMs on both networks, on the host's clock.
# None of the host's threads is on its CPU, and its work moves none of the host's interrupts.
set -eu
. /lab/lib.sh
clients=$(($(nproc --all) - 1))
expect "CPUs of the host's processes" "0-$((clients - 1))" "$(taskset -cp $$ | sed 's/.*: //; s/^0$/0-0/')"
expect "the clients' own CPU" "$clients" "$(lab-client sh -c 'taskset -cp $$' | sed 's/.*: //')"
expect "the clients' addresses" "10.1.0.1/24 10.2.0.1/24" \
    "$(lab-client ip -4 -o address show | awk '$2 != "lo" { print $4 }' | xargs)"

LAB_VM_MB=128 lab-vm start rt rt rt 10.1.0.2
LAB_VM_MB=128 lab-vm start bulk bulk bulk 10.2.0.2
lab-vm wait rt
lab-vm wait bulk
on_the_other_side() { # interrupts of the host's NICs on the clients' CPU, and of the clients' on the host's
    awk -v clients="$clients" '/ (rt|bulk)0?(-|$)/ {
        for (cpu = 0; cpu <= clients; cpu++)
            if (($NF ~ /^(rt|bulk)0/) == (cpu == clients)) n += $(cpu + 2)
    } END { print n + 0 }' /proc/interrupts
}
before=$(on_the_other_side)
config='{"server": "10.1.0.2:11111", "message_bytes": 16, "min_gap_us": 1000, "max_gap_us": 2000,
    "normal_gaps": false, "timeout_us": 1000000, "requests": 50, "give_up_after": 5, "seed": 1, "captures": [],
    "scale": 1.0}'
order="{\"requests\": $config}"
lab-client ontime-lab client "$order"
status=0
lab-client ontime-lab client "${order/11111/9}" 2> /lab/said || status=$?
[ $status -ne 0 ] && grep -q '10.1.0.2:9 did not answer 5 requests' /lab/said ||
    fail "a port that nobody answers: $status, $(cat /lab/said)"
lab-vm stop rt
LAB_VM_MB=128 lab-vm start rt memcached rt 10.1.0.2
lab-vm wait rt
traffic='"traffic": {"key_bytes": 64, "value_bytes": 1024, "set_of": 10, "gaps_us": [1000, 10000],
    "normal_gaps": false, "late_ns": null}'
lab-client ontime-lab client "{\"store\": {\"server\": \"10.1.0.2:11211\", $traffic}}"
lab-client ontime-lab client "{\"memcached\": {\"config\": ${config/11111/11211}, $traffic, \"connections\": 4}}"
rate=$(lab-client iperf3 -c 10.2.0.2 -t 1 -i 0 | awk '/receiver/ { print $7, $8 }')
echo "figures: TCP to a bulk VM for a second: $rate"
# A vector moves at its first interrupt, which still arrives on the former CPU.
astray=$(($(on_the_other_side) - before))
[ $astray -le 6 ] || fail "$astray interrupts on the other side's CPU: $(grep -E ' (rt|bulk)' /proc/interrupts)"
own='client-spin|ontime-lab|iperf3|lab-client'
of_kernel='cpuhp|migration|idle_inject|ksoftirqd|kworker|irq\/|rcu|ktimers|irq_work|backlog_napi|napi'
strangers=$(ps -eLo psr,comm | awk -v clients="$clients" "\$1 == clients && \$2 !~ /^($own|$of_kernel)/")
[ -z "$strangers" ] || fail "on the clients' CPU: $strangers"
lab-vm stop rt
lab-vm stop bulk
