# In the emulated host: an RT VM that answers requests and a bulk VM that is flooded run on while Ontime is applied and
# reset CYCLES times, killed, and left without disk space, and while links, drivers, queues and sysctls change.
# client.sh is the clients' side.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
cat > /etc/ontime/tenants.toml << 'TOML'
[[tenant]]
name = "rt"
class = "rt"
level = 0
TOML
printf 'rescan-seconds = 1\n' > /etc/ontime/daemon.toml
lab-vm start rt rt rt 10.1.0.2
lab-vm wait rt
lab-vm start bulk1 bulk bulk 10.2.0.2
lab-vm wait bulk1
ip address add 10.1.0.9/24 dev br-rt
. /lab/traffic.sh
snapshot > /lab/before
touch /lab/flood /lab/ask
flows
daemon_starts
within 40 placed "$rt_vcpu" "SCHED_FIFO 47"
. /lab/cycles.sh
. /lab/faults.sh

echo "== every knob is what it was"
rm /lab/flood
snapshot > /lab/after
diff /lab/before /lab/after
