# In the emulated host: an RT VM with outsourced sockets whose server always has a request to answer. The thread of its
# device process that owns the server's socket is held to the VM's runtime cap, as its vCPU is, and leaves the rest of
# the CPU to housekeeping.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
printf '[vm.rt]\nbind = ["udp/11111"]\nreach = ["10.1.0.0/24"]\nchannels = 1\nwake = "idle"\npriority = 48\n' > /etc/ontime/sockets.toml
printf '[nic.rt0]\nclass = "rt"\n' > /etc/ontime/host.toml
cap() { printf '[[tenant]]\nname = "rt"\nclass = "rt"\nruntime-cap = %s\n' "$1" > /etc/ontime/tenants.toml; }
cap 0.9
lab-vm start rt rt sockets:rt 10.1.0.2
lab-vm wait rt
daemon_starts
touch /lab/ask
sh -c 'while :; do :; done' &
housekeeping=$!
# The thread is named and placed at its server's first call.
shown() { ontime ps | grep -q ' device .*ontime-sock/1 .*FIFO 48 '; }
within 60 shown
sock=$(ontime ps | awk '/ontime-sock\/1/ {for (i = 1; i <= NF; i++) if ($i == "ontime-sock/1") print $(i + 1)}')
ran() { awk '{print int($1 / 1000000)}' "/proc/$1/schedstat"; } # ms on a CPU
measured() { # NAME: shares in 5 s, percent
    start=$(uptime_ms) sock_ran=$(ran "$sock") work_ran=$(ran $housekeeping)
    sleep 5
    took=$(($(uptime_ms) - start))
    sock_share=$((($(ran "$sock") - sock_ran) * 100 / took)) work_share=$((($(ran $housekeeping) - work_ran) * 100 / took))
    echo "figures: $1: the socket thread $sock_share % of the CPU, housekeeping $work_share %"
}
busy() { measured "looking"; [ $sock_share -ge 15 ]; }
within 60 busy
measured "cap 90"
free_share=$sock_share free_work=$work_share
cap 0.05
kill -HUP "$daemon"
reloaded() { [ "$(metric 'ontime_passes_total{reason="reload"')" -ge 1 ]; }
within 60 reloaded
measured "cap 5"
[ $sock_share -le 10 ] && [ $sock_share -lt $free_share ] || fail "the socket thread's share is not its cap"
[ $work_share -gt $free_work ] || fail "nobody has what it leaves"
rm /lab/ask
kill $housekeeping
resets
within 10 placed "$sock" "SCHED_FIFO 48"
kill "$daemon"
wait "$daemon" || fail "the daemon ended with $?"
