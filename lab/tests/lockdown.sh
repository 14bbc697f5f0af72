# In the emulated host under kernel lockdown: debugfs is denied. This is reported, the kernel's protections stay on, and
# the rest is applied.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
grep -q '\[integrity\]' /sys/kernel/security/lockdown || mount -t securityfs securityfs /sys/kernel/security
grep -q '\[integrity\]' /sys/kernel/security/lockdown || fail "this host is not locked down"
snapshot > /lab/before
ontime doctor --json > /lab/doctor || true
tr -d '\n' < /lab/doctor | grep -q '"id": "lockdown"[^}]*"state": "warning"[^}]*debugfs is denied' ||
    fail "doctor does not say so: $(cat /lab/doctor)"
daemon_starts
ontime status > /lab/status || true
grep -qi lockdown /lab/status || fail "status does not say why protections stay on: $(cat /lab/status)"
grep -q 'kernel protections on' /lab/status || fail "protections are said to be off"
expect "NAPI threading of rt0" 1 "$(cat /sys/class/net/rt0/threaded)"
resets
kill $daemon
wait $daemon || fail "the daemon ended with $?"
snapshot > /lab/after
diff /lab/before /lab/after
