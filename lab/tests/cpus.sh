# In the emulated host: several CPUs on the virtual clock. Each gets its share and has its idle process, and VMs run on
# all of them.
set -eu
. /lab/lib.sh
cpus=$(nproc)
expect "CPUs with an idle process" "$(seq 0 $((cpus - 1)) | xargs)" \
    "$(for pid in $(pgrep -x lab-spin); do taskset -cp "$pid" | sed 's/.*: //'; done | sort -n | xargs)"
expect "clock source" tsc "$(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"

# The loops that a process on each CPU completes in a second of the host's time, all at once.
for cpu in $(seq 0 $((cpus - 1))); do
    taskset -c "$cpu" bash -c 'end=$((${EPOCHREALTIME/./} + 1000000)) n=0
        while [ "${EPOCHREALTIME/./}" -lt "$end" ]; do n=$((n + 1)); done; echo $n' > "/tmp/did-$cpu" &
done
wait
echo "figures: rounds of each CPU: $(cat /tmp/did-* | xargs)"
cat /tmp/did-* | sort -n | awk '{ n[NR] = $1 } END { exit !(NR > 1 && n[1] > 0.8 * n[NR]) }' ||
    fail "CPUs are unlike: $(cat /tmp/did-* | xargs)"

# A VM on each CPU, all at once.
for cpu in $(seq 0 $((cpus - 1))); do
    LAB_VM_MB=128 taskset -c "$cpu" lab-vm start "vm$cpu" idle rt "10.1.0.$((11 + cpu))"
done
for cpu in $(seq 0 $((cpus - 1))); do
    lab-vm wait "vm$cpu"
    lab-vm stop "vm$cpu"
done
dmesg | grep -iE '\<stall|lockup|clocksource:.*unstable|hung task' && fail "the kernel complains"
true
