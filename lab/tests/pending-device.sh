# In the emulated host, method interrupt-context: an RT VM with outsourced sockets beside a spinning VM of its level. An
# interrupt that its device process makes pending raises its vCPU, as one from vhost does. When requests never stop,
# housekeeping still gets its share.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
printf '[vm.rt]\nbind = ["udp/11111"]\nreach = ["10.1.0.0/24"]\nchannels = 1\nwake = "interrupt"\npriority = 48\n' > /etc/ontime/sockets.toml
printf '[nic.rt0]\nclass = "rt"\n' > /etc/ontime/host.toml
printf '[[tenant]]\nname = "%s"\nclass = "rt"\nruntime-cap = 0.4\n' rt spin > /etc/ontime/tenants.toml
lab-vm start rt rt sockets:rt 10.1.0.2
lab-vm wait rt
LAB_VM_MB=128 lab-vm start spin spin rt 10.1.0.3
lab-vm wait spin
daemon_starts
ontime apply --method interrupt-context > /lab/applied || { cat /lab/applied; fail "apply: $?"; }
ontime status | grep 'interrupt-context:' && fail "interrupts cannot be followed"
raised() { metric 'ontime_boosts_total{domain="rt"'; }

# One request at a time.
quiet=$(raised)
sleep 2
quiet=$(($(raised) - quiet))
echo 0.05 > /lab/asks && mv /lab/asks /lab/ask
before=$(raised)
enough() { [ $(($(raised) - before)) -ge $((10 + 10 * quiet)) ]; }
within 60 enough
rm /lab/ask
echo "figures: put ahead $quiet times in 2 s without a question, $(($(raised) - before)) times while asked"

# Without a pause: eight clients, each of which sends its next request as soon as it has its answer. A process at FIFO
# 60 measures this, because the shell itself is part of housekeeping.
sh -c 'while :; do :; done' &
housekeeping=$!
/run/measures chrt -f 60 sh -c '
    ran() { read -r ran rest < /proc/'$housekeeping'/schedstat; echo $((ran / 10000000)); }
    echo 0 > /lab/asks && mv /lab/asks /lab/ask
    sleep 6
    before=$(ran)
    sleep 4
    echo $(($(ran) - before)) > /run/part
    rm /lab/ask'
kill $housekeeping
part=$(($(cat /run/part) / 4))
echo "figures: housekeeping had $part % of the CPU while the VM was asked without a pause"
[ $part -ge 3 ] || fail "housekeeping starves"
kill "$daemon"
wait "$daemon" || fail "the daemon ended with $?"
