# In the emulated host: a spinning VM of class rt is held to its cap while the kernel's protections are off, and leaves
# the rest of the CPU to housekeeping and to a bulk VM, each of which could use all of it.
set -eu
. /lab/lib.sh
mkdir -p /etc/ontime
printf '[[tenant]]\nname = "spin"\nclass = "rt"\nruntime-cap = 0.5\n' > /etc/ontime/tenants.toml
lab-vm start spin spin rt 10.1.0.2
lab-vm wait spin
spinner=$(cat /run/lab-vm/spin.pid)
kill -STOP "$spinner" # it would only make the other one boot slowly
lab-vm start busy spin bulk 10.2.0.2
lab-vm wait busy
spin=$(thread "$spinner" 'CPU 0/KVM') busy=$(thread "$(cat /run/lab-vm/busy.pid)" 'CPU 0/KVM')
daemon_starts
sh -c 'while :; do :; done' &
housekeeping=$!
# The longest delay of a thread at FIFO 1, below the guest, as the kernel's own threads at FIFO 1 and 2 are: printed in
# us when it ends.
/run/measures perl -e '
    my $most = 0;
    sub now { my $t = pack("qq", 0, 0); syscall(228, 1, $t); my ($s, $n) = unpack("qq", $t); $s * 1000000000 + $n }
    $SIG{TERM} = sub { printf "%d\n", $most / 1000; exit };
    my $priority = pack("i", 1);
    syscall(144, 0, 1, $priority) and die "chrt: $!";
    my $at = now();
    while (1) {
        $at += 1000000;
        my $until = pack("qq", int($at / 1000000000), $at % 1000000000);
        syscall(230, 1, 1, $until, 0);
        my $late = now() - $at;
        $most = $late if $late > $most;
        $at += $late;
    }' > /lab/gap &
gap=$!
sleep 1
kill -CONT "$spinner"
paused() { ontime status --json | tr -d ' \n' | grep -q '"protections_off":true.*"of":"spin"[^}]*"pauses":[1-9]'; }
within 10 paused
kill $gap
wait $gap || true
gap=$(cat /lab/gap)
ran() { awk '{print int($1 / 1000000)}' "/proc/$1/schedstat"; } # ms on a CPU
start=$(uptime_ms) spin_ran=$(ran "$spin") work_ran=$(ran $housekeeping) busy_ran=$(ran "$busy")
ontime status | grep -q 'kernel protections off' || fail "protections are on"
sleep 3
ontime status | grep -q 'kernel protections off' || fail "protections came on"
took=$(($(uptime_ms) - start))
spin_share=$((($(ran "$spin") - spin_ran) * 100 / took))
work_share=$((($(ran $housekeeping) - work_ran) * 100 / took))
busy_share=$((($(ran "$busy") - busy_ran) * 100 / took))
kill $housekeeping

# With another cap, another level and no class: the spinning vCPU is held at every moment of the change. Otherwise no
# other thread would ever run again.
reloads=0
reloaded() { [ "$(metric 'ontime_passes_total{reason="reload"')" -ge $reloads ]; }
for change in 'class = "rt"\nruntime-cap = 0.4' 'class = "rt"\nlevel = 1\nruntime-cap = 0.4' 'class = "bulk"' 'class = "rt"\nruntime-cap = 0.5'; do
    printf "[[tenant]]\\nname = \"spin\"\\n$change\\n" > /etc/ontime/tenants.toml
    kill -HUP $daemon
    reloads=$((reloads + 1))
    within 10 reloaded
    case $change in
    *bulk*) within 10 placed "$spin" "SCHED_OTHER 0" ;;
    *) within 10 paused ;;
    esac
done
stalls=$(dmesg | grep -c 'rcu:.*stall' || true)
echo "figures: a spinning RT VM $spin_share % of the CPU (cap 50), housekeeping $work_share %, a busy bulk VM $busy_share %; who is below it waited for $gap us at the most, $stalls RCU stalls"
[ "$gap" -le 10000 ] || fail "a thread below it waited for $gap us"
[ "$stalls" = 0 ] || fail "RCU stalls: $(dmesg | grep 'rcu:.*stall')"
# The share is below the cap by the time that the cap watcher itself takes at the emulated CPU's speed.
[ $spin_share -le 55 ] && [ $spin_share -ge 25 ] || fail "the spinning VM's share is not its cap"
[ $work_share -ge 12 ] && [ $busy_share -ge 12 ] || fail "the others have no share"

# After the daemon's death nothing enforces the cap. Beside a thread that spins at real-time priority this kernel's
# timers and RCU grace periods would stall, even with its fair server. So the vCPU runs at SCHED_OTHER until the next
# daemon.
daemon_dies
within 10 placed "$spin" "SCHED_OTHER 0"
# The same where the daemon dies in the middle of a pass: when it has just placed that vCPU, and when a reset has just
# restored the protections. The process that kills it uses timers that no real-time thread delays. If the vCPU still
# spins at real-time priority after 5 s, that process resets its policy.
killed_when() { # placed | protected
    /run/measures chrt -f 60 perl -e '
        my ($when, $thread, $daemon) = @ARGV;
        sub fifo { (syscall(145, $thread + 0) & 0xff) == 1 }
        sub protected { open my $f, "<", "/sys/kernel/debug/sched/fair_server/cpu0/runtime" or die $!; <$f> > 0 }
        my $left = 100000;
        until ($when eq "placed" ? fifo() : protected()) { select undef, undef, undef, 0.0002; $left-- or exit 3 }
        kill 9, $daemon;
        for (1 .. 5000) { select undef, undef, undef, 0.001; fifo() or exit 0 }
        my $priority = pack "i", 0;
        syscall 144, $thread + 0, 0, $priority;
        exit 2' "$1" "$spin" "$daemon" &
    killer=$!
}
ontime daemon >> $log 2>&1 &
daemon=$!
killed_when placed
wait $killer || fail "killed in its first pass: $?; 2: the vCPU went on spinning, uncapped"
daemon_starts
within 10 paused
within 10 sh -c 'ontime status | grep -q "kernel protections off"'
killed_when protected
ontime reset > /dev/null 2>&1 || true
wait $killer || fail "killed in a reset: $?; 2: the vCPU went on spinning, uncapped"
daemon_starts
within 10 paused
kill $daemon
wait $daemon || fail "the daemon ended with $?"
placed "$spin" "SCHED_OTHER 0" || fail "the spinning VM keeps its place when the daemon has ended"
daemon_starts
within 10 paused

resets
placed "$spin" "SCHED_OTHER 0" || fail "the spinning VM keeps its place after reset"
grep -qx 0 /sys/kernel/debug/sched/fair_server/cpu0/runtime && fail "protections are off after reset"
kill $daemon
wait $daemon || fail "the daemon ended with $?"
