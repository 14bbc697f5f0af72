# The clients' side of path.sh: floods the bulk VM while a file 'flood' exists, sends requests to the RT VM while a file
# 'ask' exists, and writes the counters of this side's kernel to 'counters': retransmitted segments, and those that the
# receiver reported as duplicates.
flood= ask=
count() { # TABLE NAME, of /proc/net/snmp or netstat
    awk -v table="$1:" -v name="$2" '$1 == table && !at {for (i = 2; i <= NF; i++) if ($i == name) at = i; next}
        $1 == table {print $at; exit}' "$3"
}
while sleep 0.2; do
    if [ -e flood ] && ! kill -0 "$flood" 2> /dev/null; then
        iperf3 -c 10.2.0.2 -t 86400 -i 0 -P 4 --connect-timeout 30000 > flood.log 2>&1 &
        flood=$!
    fi
    if [ ! -e flood ] && [ -n "$flood" ]; then kill -INT "$flood"; wait "$flood"; flood=; fi
    if [ -e ask ] && [ -z "$ask" ]; then
        sockperf ping-pong -i 10.1.0.2 -p 11111 --mps 2 -t 86400 > ask.log 2>&1 &
        ask=$!
    fi
    if [ ! -e ask ] && [ -n "$ask" ]; then kill -INT "$ask"; wait "$ask"; ask=; touch asked; fi
    echo "$(count Tcp RetransSegs /proc/net/snmp) $(count TcpExt TCPDSACKRecvSegs /proc/net/netstat)" > counters.new
    mv counters.new counters
done
