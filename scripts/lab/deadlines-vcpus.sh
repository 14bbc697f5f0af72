# In the emulated host, with two CPUs: deadline tasks of a guest with two vCPUs. Best fit, and all anew where bandwidth is fragmented; what they fork,
# leave, or hold when the module is unloaded is given back; a device process that is replaced is told everything again.
set -eu
. /lab/lib.sh
. /lab/deadlines-guest.sh
printf '[[reservation]]\nname = "plc"\nbudget = "0.5ms"\nperiod = "20ms"\ndeadlines = 0.9\n' > /etc/ontime/sched.toml

hold() { # NAME RUNTIME [POLICY]: a task that holds so many us in 20 ms; what it says
    guest "/lab/rta ${3:-deadline} $2 20000 0 0 > /tmp/$1 & echo \$! > /tmp/$1.pid; sleep 1; cat /tmp/$1"
}
vcpus() { guest "sed -n 's/^Cpus_allowed_list:.//p' /proc/\$(cat /tmp/$1.pid)/status"; } # NAME
policy() { guest "sed 's/.*) //' /proc/$1/stat" | cut -d' ' -f39; } # PID, as in the guest
ends() { guest "kill -9 \$(cat /tmp/$1.pid)" > /dev/null; } # NAME
# What the host holds for the guest's tasks: us of vCPU 0 and 1.
held() {
    ontime top --once --json --interval 0.1 | sed 's/{"vm":/\n&/g' |
        sed -n 's/.*"vm":"plc".*"vcpu":\([01]\),.*"guest":\(null\|{"budget_us":\([0-9]*\)\).*/\1 0\3/p' | sort | cut -d' ' -f2 | tr '\n' ' '
}
holds() { held > /lab/held; [ "$(cat /lab/held)" = "0$1 0$2 " ]; } # US US
fits() { [ "$(hold "$@")" = holds ] || fail "$*: $(guest "cat /tmp/$1")"; }
on() { now=$(vcpus "$1"); [ "$now" = "$2" ] || fail "$1 is on vCPU $now, not on $2"; } # NAME VCPUS

boot 2
grep -q HOOKED /lab/console || fail "the module does not take deadline tasks"
daemon_starts
within 60 holds '' ''

# Best fit: on the fullest vCPU that has room, and the other only then.
fits a 10000; fits b 8000; fits c 6000; fits d 6000
on a 0; on b 0; on c 1; on d 1
within 60 holds 18000 12000
# A CPU is left over in all, but neither vCPU has room for 12 ms of 20: all are placed anew, the largest first.
ends a
within 60 holds 8000 12000
fits e 12000
on e 0; on b 1; on c 0; on d 1
within 60 holds 18000 14000
said=$(hold f 6000)
[ "$said" = "refused: EBUSY" ] || fail "6 ms more than fit: $said"
within 60 holds 18000 14000

# What a task forks is no deadline task and may run anywhere; a task that leaves gives back what it held.
ends e
within 60 holds 6000 14000
said=$(hold f 4000 forks)
child=${said#holds, child }
[ "$child" != "$said" ] || fail "forks: $said"
within 60 holds 6000 18000
on f 1
# It may run anywhere as soon as the module's worker has come to it.
spread() { [ "$(guest "sed -n 's/^Cpus_allowed_list:.//p' /proc/$child/status")" = 0-1 ]; }
within 60 spread
[ "$(policy "$child")" = 0 ] || fail "the child of a deadline task has policy $(policy "$child")"
f=$(guest 'cat /tmp/f.pid')
[ "$(policy "$f")" = 6 ] || fail "a deadline task has policy $(policy "$f")"
guest "/lab/rta leave $f" > /dev/null
within 60 holds 6000 14000
on f 0-1
guest "kill -9 $child" > /dev/null
ends f

# A device process that is replaced while they run is told what they hold.
kill -9 $device
wait $device 2> /dev/null || true
device_starts
timeout 120 ontime attach --qmp /run/vm/qmp plc || fail "the device is not replaced"
within 120 holds 6000 14000
fits g 4000
on g 1
within 60 holds 6000 18000

# Without the module they go on, without a guarantee; with it the host is asked again.
guest 'rmmod ontime && echo unloaded' | grep -q unloaded || fail "the module does not go"
within 60 holds '' ''
on g 0-1
g=$(guest 'cat /tmp/g.pid')
[ "$(policy "$g")" = 6 ] || fail "without the module a deadline task has policy $(policy "$g")"
guest 'insmod /lab/ontime.ko && echo loaded' | grep -q loaded || fail "the module does not come back"
hooked() { [ "$(guest "dmesg | grep -c 'SCHED_DEADLINE is guaranteed'")" = 2 ]; }
within 60 hooked
# Of a deadline task from before, the host takes what its kernel then refuses (less than 1,024 ns): it is as before, and may ask again.
said=$(guest "/lab/rta change $g 1 20000")
[ "$said" = "refused: Invalid argument" ] || fail "1 us of 20 ms: $said"
within 60 holds '' ''
on g 0-1
[ "$(policy "$g")" = 6 ] || fail "a deadline task whose change was refused has policy $(policy "$g")"
fits h 4000
within 60 holds 4000 ''
said=$(guest "/lab/rta change $g 6000 20000")
[ "$said" = changed ] || fail "6 ms of 20 for a deadline task from before: $said"
on g 0
within 60 holds 10000 ''
for task in b c d g h; do ends $task; done
within 60 holds '' ''
kill $vm
kill $daemon
wait $daemon || fail "the daemon ended with $?"
echo "figures: placed by best fit, anew, forked, left, with a new device, without the module: as asked"
