# In the guest: public test suites on the guest's own stack and on outsourced sockets. In /lab/args: suite=NAME,NAME;
# channels=N.
word() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /lab/args; }
insmod /lab/ontime.ko || exit 1
# As on the host (outsourced.sh).
ip route replace 192.0.2.0/24 dev lo
before=$(awk '{print $1}' /sys/module/ontime/parameters/bypassed | xargs)
prefix=
# A real-time thread on the vCPU that has the channel.
grep -q 'channels=[1-9]' /lab/args && prefix='taskset -c 0 chrt -f 40'
# Without the module every test would pass on the guest's own stack.
python3 -c '
import socket
with socket.socket():
    used = {line.split()[0]: line.split()[2] for line in open("/proc/net/protocols")}
    assert used["ONTIME"] == "1", "not outsourced"' || exit 1
python3 /lab/run.py "$(word suite)" out /lab/conformance-known.txt $prefix
status=$?
echo "sockets that stayed local, before $before:"
cat /sys/module/ontime/parameters/bypassed
# Data races and memory leaks are judged later (debug-reports.py).
if dmesg | grep -vE 'BUG: KCSAN|kmemleak: ' | grep -E 'WARNING|BUG|Oops|refcount|leak'; then status=1; fi
left=$(awk '/^ONTIME/ {n += $3} END {print n + 0}' /proc/net/protocols)
[ "$left" = 0 ] || { echo "$left sockets are left over"; status=1; }
grep '\[ontime\]' /proc/kallsyms > out/symbols
rmmod ontime || { echo "FAILED to unload"; status=1; }
exit $status
