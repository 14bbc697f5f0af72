# In the emulated host: an unmodified application in a VM sets SCHED_DEADLINE in its kernel and gets its CPU time from
# the host, beside bulk work that uses all remaining time. Without SCHED_DEADLINE it misses deadlines. A request that
# does not fit is refused: EBUSY in the guest. An application or a VM that is killed releases its bandwidth. After kill
# -9 of the daemon the next one keeps the guarantees.
set -eu
. /lab/lib.sh
. /lab/deadlines-guest.sh
# 1 ms for the VM without deadline tasks, and half of the CPU for its deadline tasks.
printf '[[reservation]]\nname = "plc"\nbudget = "1ms"\nperiod = "20ms"\ndeadlines = 0.5\n' > /etc/ontime/sched.toml
missed() { echo "$1" | sed -n 's/.*missed \([0-9]*\).*/\1/p'; }

# The application reserves 6 ms in 20 ms and uses 5 ms. Four bulk threads spin as well.
boot 1
grep -q HOOKED /lab/console || fail "the module does not take deadline tasks"
hogs=
for _ in 1 2 3 4; do sh -c 'while :; do :; done' & hogs="$hogs $!"; done
none=$(guest /lab/rta deadline 6000 20000 5000 10)
echo "no daemon: $none"
[ "$none" = "refused: EBUSY" ] || fail "a guarantee that nobody gives: $none"
daemon_starts
within 30 reserves '"vm":"plc"'
without=$(guest /lab/rta other 6000 20000 5000 50)
with=$(guest /lab/rta deadline 6000 20000 5000 300)
[ -n "$(missed "$without")" ] && [ -n "$(missed "$with")" ] || fail "without: $without; with: $with"
echo "figures: 5 ms each 20 ms beside 4 bulk threads: without SCHED_DEADLINE $without us; with $with us"
[ "$(missed "$without")" -ge 25 ] || fail "it makes its deadlines without a reservation: $without"
[ "$(missed "$with")" = 0 ] || fail "deadlines missed: $with"
within 40 reserves '"guest":null'

# A deadline below 100 us is refused as invalid, not for lack of bandwidth.
short=$(guest /lab/rta deadline 20 50 10 10)
[ "$short" = "refused: Invalid argument" ] || fail "20 us of 50: $short"

# First more than is allowed. Then as much as is allowed, held by a task: a second task is refused until the first one
# is killed.
much=$(guest /lab/rta deadline 14000 20000 1000 10)
[ "$much" = "refused: EBUSY" ] || fail "14 ms of 20: $much"
guest "/lab/rta deadline 6000 20000 0 0 > /tmp/held & echo \$! > /tmp/pid; sleep 1; cat /tmp/held" > /lab/said
grep -q holds /lab/said || { cat /lab/said; fail "6 ms of 20 are not given"; }
within 40 reserves '"guest":{"budget_us":6000.0,"period_us":20000.0}'
second=$(guest /lab/rta deadline 6000 20000 1000 10)
[ "$second" = "refused: EBUSY" ] || fail "6 ms more: $second"

echo "metrics: admitted $(metric ontime_deadlines_admitted), refused $(metric ontime_deadlines_refused)"
[ "$(metric ontime_deadlines_refused | cut -d. -f1)" -ge 2 ] || fail "refusals are not counted"

# The next daemon keeps the guarantee.
daemon_dies
daemon_starts
within 30 reserves '"guest":{"budget_us":6000.0,"period_us":20000.0}'
guest 'kill -9 $(cat /tmp/pid)' > /lab/said
within 40 reserves '"guest":null'
again=$(guest /lab/rta deadline 6000 20000 1000 10)
[ "$(missed "$again")" = 0 ] || fail "after its holder was killed: $again"

# With deadline_spare set, the host reserves that bandwidth before any task needs it. A task that fits into it is
# admitted and meets its deadlines. A guarantee takes precedence over spare bandwidth.
spare=/sys/module/ontime/parameters/deadline_spare
guest "echo 3000/20000 > $spare" > /dev/null
within 40 reserves '"guest":{"budget_us":3000.0,"period_us":20000.0}'
fits=$(guest /lab/rta deadline 2000 20000 1000 100)
[ "$(missed "$fits")" = 0 ] || fail "deadlines missed by one that fits into what is spare: $fits"
guest "/lab/rta deadline 2000 20000 0 0 > /tmp/held & echo \$! > /tmp/pid" > /dev/null
within 40 reserves '"guest":{"budget_us":5000.0,"period_us":20000.0}'
guest 'kill -9 $(cat /tmp/pid)' > /dev/null
guest "/lab/rta deadline 9000 20000 0 0 > /tmp/held & echo \$! > /tmp/pid; sleep 1; cat /tmp/held" > /lab/said
grep -q holds /lab/said || { cat /lab/said; fail "9 ms of 20 are not given for the sake of what is spare"; }
within 40 reserves '"guest":{"budget_us":9000.0,"period_us":20000.0}'
guest 'kill -9 $(cat /tmp/pid)' > /dev/null
within 40 reserves '"guest":{"budget_us":3000.0,"period_us":20000.0}'
for bad in 5/4 1/2/3 x 1/99 -1/20000; do
    guest "echo $bad > $spare && echo taken" | grep -q taken && fail "deadline_spare takes $bad"
done
[ "$(guest "cat $spare")" = 3000/20000 ] || fail "deadline_spare is $(guest "cat $spare")"
guest "echo 0 > $spare" > /dev/null
within 40 reserves '"guest":null'

# A task that the guest's kernel itself makes an ordinary one (SysRq n) gives back what it held, though it runs on.
guest "/lab/rta deadline 6000 20000 0 0 > /tmp/held & echo \$! > /tmp/pid" > /dev/null
within 40 reserves '"guest":{"budget_us":6000.0,"period_us":20000.0}'
guest 'echo n > /proc/sysrq-trigger' > /dev/null
within 40 reserves '"guest":null'
[ "$(guest 'cut -d" " -f41 /proc/$(cat /tmp/pid)/stat')" = 0 ] || fail "SysRq n leaves a deadline task"
guest 'kill -9 $(cat /tmp/pid)' > /dev/null

# A VM that is killed releases its bandwidth.
guest "/lab/rta deadline 6000 20000 0 0 & sleep 1" > /dev/null
within 40 reserves '"guest":{"budget_us":6000.0'
kill -9 $vm
within 40 sh -c "! ontime top --once --json --interval 0.1 | grep -q '\"vm\":\"plc\"'"
for _ in $(seq 100); do kill -0 $device 2> /dev/null || break; sleep 0.1; done
! kill -0 $device 2> /dev/null || fail "the VM is gone, its device process is not"
kill $hogs
resets
kill $daemon
wait $daemon || fail "the daemon ended with $?"
