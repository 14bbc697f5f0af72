# The clients' side of device-cap.sh: asks the RT server as often as two thousand times a second of this machine while there is a file 'flood', without
# waiting for answers.
flood=
while sleep 0.2; do
    if [ -e flood ] && ! kill -0 "$flood" 2> /dev/null; then
        sockperf throughput -i 10.1.0.2 -p 11111 -m 14 --mps 2000 -t 86400 > flood.log 2>&1 &
        flood=$!
    fi
    if [ ! -e flood ] && [ -n "$flood" ]; then kill -9 "$flood"; flood=; fi
done
