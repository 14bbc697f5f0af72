# In the emulated host, with two CPUs: deadline tasks of a guest with two vCPUs. They are placed by best fit, and all of
# them are placed again where the free bandwidth is fragmented. Bandwidth is released when a task forks a child without
# a guarantee, leaves SCHED_DEADLINE, or when the module is unloaded. A replaced device process gets the complete state
# again. A task that is moved takes its bandwidth along.
set -eu
. /lab/lib.sh
. /lab/deadlines-guest.sh
printf '[[reservation]]\nname = "plc"\nbudget = "0.5ms"\nperiod = "20ms"\ndeadlines = 0.9\n' > /etc/ontime/sched.toml

# 0: offline, 1: online
vcpu1() { guest "echo $1 > /sys/devices/system/cpu/cpu1/online && echo set" | grep -q set || fail "vCPU 1 does not go to $1"; }
hold() { # NAME RUNTIME [POLICY]: a task that holds so many us in 20 ms; what it says, however long that takes
    guest "rm -f /tmp/$1; /lab/rta ${3:-deadline} $2 20000 0 0 > /tmp/$1 & echo \$! > /tmp/$1.pid; \
        until [ -s /tmp/$1 ] || ! kill -0 \$! 2> /dev/null; do sleep 0.1; done; cat /tmp/$1"
}
# NAME RUNTIME: a task with jobs of 10 us
runs() { guest "/lab/rta deadline $2 20000 10 1000000 > /tmp/$1 & echo \$! > /tmp/$1.pid" > /dev/null; }
vcpus() { guest "sed -n 's/^Cpus_allowed_list:.//p' /proc/\$(cat /tmp/$1.pid)/status"; } # NAME
policy() { guest "sed 's/.*) //' /proc/$1/stat" | cut -d' ' -f39; } # PID, as in the guest
ends() { guest "kill -9 \$(cat /tmp/$1.pid)" > /dev/null; } # NAME
# What the host reserves for the guest's tasks: us of vCPU 0 and of vCPU 1.
held() {
    ontime top --once --json --interval 0.1 | sed 's/{"vm":/\n&/g' |
        sed -n 's/.*"vm":"plc".*"vcpu":\([01]\),.*"guest":\(null\|{"budget_us":\([0-9]*\)\).*/\1 0\3/p' | sort | cut -d' ' -f2 | tr '\n' ' '
}
holds() { held > /lab/held; [ "$(cat /lab/held)" = "0$1 0$2 " ]; } # US US
fits() { [ "$(hold "$@")" = holds ] || fail "$*: $(guest "cat /tmp/$1")"; }
is_on() { [ "$(vcpus "$1")" = "$2" ]; } # NAME VCPUS
on() { now=$(vcpus "$1"); [ "$now" = "$2" ] || fail "$1 is on vCPU $now, not on $2"; } # NAME VCPUS

boot 2
grep -q HOOKED /lab/console || fail "the module does not take deadline tasks"
daemon_starts
within 60 holds '' ''

# Best fit: the fullest vCPU that has room. The other vCPU is used only when that one is full.
fits a 10000; runs b 8000; within 60 is_on b 0; runs c 6000; within 60 is_on c 1; fits d 6000
on a 0; on d 1
within 60 holds 18000 12000
# The free bandwidth suffices in total, but neither vCPU has room for 12 ms of 20: all tasks are placed again, the
# largest first.
ends a
within 60 holds 8000 12000
fits e 12000
on e 0; on b 1; on c 0; on d 1
within 60 holds 18000 14000
said=$(hold f 6000)
[ "$said" = "refused: EBUSY" ] || fail "6 ms more than fit: $said"
within 60 holds 18000 14000

# A task whose affinity another process widens is pinned to one vCPU again.
guest "taskset -p 3 \$(cat /tmp/c.pid)" > /lab/said || fail "taskset: $(cat /lab/said)"
within 60 is_on c 0
holds 18000 14000 || fail "the host holds $(cat /lab/held) for a task whose affinity was lifted"
# Tasks of a vCPU that goes offline move to another vCPU with their bandwidth, and stay there. (The kernel takes a CPU
# offline only where its deadline tasks fit on the others.)
ends e
ends d
within 60 holds 6000 8000
# The same for a task that sleeps on that vCPU.
fits s 2000
on s 1
vcpu1 0
within 60 holds 16000 ''
within 60 is_on b 0
vcpu1 1
# A task that leaves SCHED_DEADLINE gets its former affinity again.
guest "/lab/rta leave \$(cat /tmp/s.pid)" > /dev/null
on s 0-1
ends s
within 60 holds 14000 ''
runs d 6000
within 60 is_on d 1
within 60 holds 14000 6000
ends b
within 60 holds 6000 6000
# Without a daemon that admits them, the tasks continue without a guarantee until a daemon runs again.
kill $daemon
wait $daemon || fail "the daemon ended with $?"
vcpu1 0
lost() { [ "$(guest "dmesg | grep -c 'it has no guarantee'")" = 1 ]; }
within 60 lost
[ "$(policy "$(guest 'cat /tmp/d.pid')")" = 6 ] || fail "a deadline task without a guarantee is none any more"
daemon_starts
within 120 holds 12000 ''
within 60 is_on d 0
vcpu1 1
fits b 8000
on b 1
within 60 holds 12000 8000

# The child of a deadline task is no deadline task and may run anywhere. A task that leaves SCHED_DEADLINE releases its
# bandwidth.
said=$(hold f 4000 forks)
child=${said#holds, child }
[ "$child" != "$said" ] || fail "forks: $said"
within 60 holds 16000 8000
on f 0
# The module's worker widens the child's affinity, so this takes a moment.
spread() { [ "$(guest "sed -n 's/^Cpus_allowed_list:.//p' /proc/$child/status")" = 0-1 ]; }
within 60 spread
[ "$(policy "$child")" = 0 ] || fail "the child of a deadline task has policy $(policy "$child")"
f=$(guest 'cat /tmp/f.pid')
[ "$(policy "$f")" = 6 ] || fail "a deadline task has policy $(policy "$f")"
guest "/lab/rta leave $f" > /dev/null
within 60 holds 12000 8000
on f 0-1
guest "kill -9 $child" > /dev/null
ends f

# A device process that is replaced while the tasks run gets the bandwidth that they hold.
kill -9 $device
wait $device 2> /dev/null || true
device_starts
timeout 120 ontime attach --qmp /run/vm/qmp plc || fail "the device is not replaced"
within 120 holds 12000 8000
fits g 4000
on g 0
within 60 holds 16000 8000

# Without the module the tasks continue without a guarantee. With the module loaded again, new tasks are admitted by the
# host.
guest 'rmmod ontime && echo unloaded' | grep -q unloaded || fail "the module does not go"
within 60 holds '' ''
on g 0-1
g=$(guest 'cat /tmp/g.pid')
[ "$(policy "$g")" = 6 ] || fail "without the module a deadline task has policy $(policy "$g")"
guest 'insmod /lab/ontime.ko && echo loaded' | grep -q loaded || fail "the module does not come back"
hooked() { [ "$(guest "dmesg | grep -c 'SCHED_DEADLINE is guaranteed'")" = 2 ]; }
within 60 hooked
# The host accepts a new runtime of a deadline task from before, but the guest's kernel refuses it (less than 1,024 ns).
# The task stays as it was, and may ask again.
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
keeps_reports
kill $vm
kill $daemon
wait $daemon || fail "the daemon ended with $?"
echo "figures: placed by best fit, anew, forked, left, with a new device, without the module: as asked"
