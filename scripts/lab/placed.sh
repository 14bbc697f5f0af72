# In the emulated host: a real VM on real KVM is found and placed, the daemon is killed, everything is given back.
set -eu
mkdir -p /etc/ontime
printf '[[tenant]]\nname = "rt"\nclass = "rt"\nlevel = 0\n' > /etc/ontime/tenants.toml
snapshot() { # every knob that the daemon may touch
    for task in /proc/[0-9]*/task/[0-9]*; do
        name=$(cat "$task/comm" 2> /dev/null) || continue
        case $name in
        irq/* | napi/* | ksoftirqd/* | ktimers/* | rcuc/* | backlog_napi/* | vhost-* | CPU*) ;;
        *) continue ;;
        esac
        echo "$name $(chrt -p "${task##*/}" 2> /dev/null | sed 's/pid [0-9]*//' | tr '\n' ' ')"
    done | sort
    for file in /sys/class/net/*/threaded /proc/sys/net/core/skb_defer_max /proc/sys/kernel/sched_rt_runtime_us \
        /sys/module/kvm/parameters/halt_poll_ns /sys/kernel/debug/sched/*_server/cpu*/runtime; do
        [ -e "$file" ] && echo "$file $(cat "$file" 2> /dev/null)"
    done
    true
}
place() { chrt -p "$1" | sed -n 's/.*policy: //p; s/.*priority: //p' | tr '\n' ' '; }
expect() { # WHAT WANTED ACTUAL
    [ "$2" = "$3" ] || { echo "$1: wanted '$2', found '$3'"; cat /lab/daemon.log; exit 1; }
}

lab-vm start rt paused rt 10.1.0.2
snapshot > /lab/before
ontime daemon > /lab/daemon.log 2>&1 &
daemon=$!
for _ in $(seq 100); do ontime status > /dev/null 2>&1 && break; sleep 0.1; done
ontime status > /lab/status 2>&1 || true
ontime ps
vm=$(cat /run/lab-vm/rt.pid)
grep -q '^CPU' /proc/$vm/task/*/comm && grep -q '^vhost-' /proc/$vm/task/*/comm || { echo "the VM has no vCPU or vhost thread"; exit 1; }
for task in /proc/$vm/task/*; do
    case $(cat "$task/comm") in
    CPU*) expect "vCPU" "SCHED_FIFO 47 " "$(place "${task##*/}")" ;;
    vhost-*) expect "vhost" "SCHED_FIFO 48 " "$(place "${task##*/}")" ;;
    esac
done
expect "NAPI threading of rt0" 1 "$(cat /sys/class/net/rt0/threaded)"
expect "NAPI threading of bulk0" 1 "$(cat /sys/class/net/bulk0/threaded)"
[ -n "$(pgrep '^napi/rt0')" ] || { echo "rt0 has no NAPI thread"; exit 1; }
for thread in $(pgrep '^napi/rt0'); do expect "NAPI of rt0" "SCHED_FIFO 49 " "$(place "$thread")"; done
expect "skb_defer_max" 0 "$(cat /proc/sys/net/core/skb_defer_max)"
# Changed behind its back: noticed and put right at the next look.
echo 64 > /proc/sys/net/core/skb_defer_max
ontime apply > /dev/null || true
expect "skb_defer_max after a change by hand" 0 "$(cat /proc/sys/net/core/skb_defer_max)"
kill -9 $daemon
sleep 1
kill -0 "$vm"
ontime reset
snapshot > /lab/after
diff /lab/before /lab/after
ontime doctor > /lab/doctor || true
grep -qi kvm /lab/doctor
