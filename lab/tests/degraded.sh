# In the emulated host, 6.12 with PREEMPT_RT: missing kernel features are reported, the rest is applied and reset.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
uname -r
case $(uname -r) in 6.12*) ;; *) fail "this is no 6.12" ;; esac
# Before 6.17 the kernel keeps the threads of a NAPI that is no longer threaded; they sleep.
knobs() { snapshot | grep -v '^napi/'; }
knobs > /lab/before
status=0
ontime doctor --json > /lab/doctor || status=$?
[ $status -eq 1 ] || [ $status -eq 2 ] || fail "ontime doctor ended with $status"
tr -d '\n' < /lab/doctor | grep -q '"id": "kernel"[^}]*6\.18' ||
    fail "doctor does not say what 6.18 would bring: $(cat /lab/doctor)"
daemon_starts
expect "NAPI threading of rt0" 1 "$(cat /sys/class/net/rt0/threaded)"
resets
kill $daemon
wait $daemon || fail "the daemon ended with $?"
knobs > /lab/after
diff /lab/before /lab/after
