# Traffic of a running RT VM 'rt' and a running bulk VM 'bulk1', and its results; sourced after lib.sh.
rt=$(cat /run/lab-vm/rt.pid) bulk=$(cat /run/lab-vm/bulk1.pid)
rt_vcpu=$(thread "$rt" 'CPU 0/KVM') bulk_vcpu=$(thread "$bulk" 'CPU 0/KVM')
received() { cat /sys/class/net/t-bulk1/statistics/tx_bytes; }
flows() { # [SECONDS]: the flood goes on: 200 kB more within 10 s
    flows_from=$(received)
    within "${1:-10}" sh -c "[ \$(cat /sys/class/net/t-bulk1/statistics/tx_bytes) -gt $((flows_from + 200000)) ]"
}
lost() { read -r again known < /lab/counters; echo $((again - known)); }
incidents() { # what a NIC's reset, or a packet that was dropped, would leave
    for nic in rt0 bulk0; do
        echo "$nic carrier changes $(cat /sys/class/net/$nic/carrier_changes)"
        for counter in rx_errors tx_errors tx_dropped rx_missed_errors rx_over_errors; do
            echo "$nic $counter $(cat /sys/class/net/$nic/statistics/$counter)"
        done
        ethtool -S $nic | grep -Ei 'reset|restart|timeout|hang' || true
    done
    dmesg | grep -Eci 'reset adapter|netdev watchdog|hang|NIC Link is' || true
}
window() { # NAME COMMAND...: the flood's rate, segments lost and the RT VM's answers while it runs
    name=$1
    shift
    lost_before=$(lost) bytes_before=$(received) start=$(uptime_ms)
    /run/measures chrt -f 40 ping -q -i 0.01 10.1.0.2 > "/lab/ping-$name" 2>&1 &
    ping=$!
    "$@" || fail "$name: '$*' ended with $?"
    kill -INT $ping
    wait $ping || fail "$name: the RT VM did not answer: $(cat "/lab/ping-$name")"
    took=$(($(uptime_ms) - start)) bytes=$(($(received) - bytes_before))
    sleep 0.3 # until the clients' side has counted
    lost=$(($(lost) - lost_before))
    segments=$((bytes / 1448)) rate=$((bytes * 8 / took / 1000))
    # "250 packets transmitted, 250 received, ...", "rtt min/avg/max/mdev = 0.1/0.2/0.3/0.0 ms"
    asked=$(awk '/packets transmitted/ {print $1}' "/lab/ping-$name")
    unanswered=$(awk '/packets transmitted/ {print $1 - $4}' "/lab/ping-$name")
    slowest=$(awk -F/ '/^rtt/ {print int($6 * 1000)}' "/lab/ping-$name") # us
    echo "figures: $name: $took ms, bulk $rate Mbit/s, $lost of $segments segments lost; $asked asked, $unanswered unanswered, slowest $slowest us"
}
