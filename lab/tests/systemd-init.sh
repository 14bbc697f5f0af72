#!/bin/sh
# The emulated host's first process for lab/tests/packages.sh: does what systemd does not, and then becomes systemd.
# The lab installs it in place of the program under test, /usr/local/bin/ontime, because that program comes from a
# package here.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
rm /usr/local/bin/ontime
# While a CPU halts, the virtual clock jumps, and systemd's time limits would pass at once. Later a unit does this.
chrt --idle 0 /usr/local/sbin/lab-spin &
[ -s /etc/machine-id ] || tr -d - < /proc/sys/kernel/random/uuid > /etc/machine-id
modprobe -a e1000e virtio_console kvm_amd tun vhost_net bridge 9pnet_virtio 9p 2> /dev/null
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 lab /lab

units=/etc/systemd/system
# As a control group of its own: within a group, SCHED_IDLE counts only against the group's other threads.
cat > $units/lab-spin.service << 'UNIT'
[Unit]
Description=Keeps the emulated CPU from halting
DefaultDependencies=no

[Service]
Slice=-.slice
CPUWeight=idle
CPUSchedulingPolicy=idle
ExecStartPre=-/usr/bin/pkill -x lab-spin
ExecStart=/usr/local/sbin/lab-spin
UNIT
cat > $units/lab-agent.service << 'UNIT'
[Unit]
Description=Runs the lab's commands

[Service]
ExecStart=/usr/local/bin/ontime-lab agent
ExecStopPost=/bin/sh -c 'echo o > /proc/sysrq-trigger'
WorkingDirectory=/lab
Environment=HOME=/root
UNIT
mkdir -p $units/multi-user.target.wants $units/sysinit.target.wants
ln -s ../lab-agent.service $units/multi-user.target.wants/
ln -s ../lab-spin.service $units/sysinit.target.wants/
# There is no mirror to ask, and no terminal.
for unit in apt-daily.timer apt-daily-upgrade.timer getty@tty1.service serial-getty@ttyS0.service; do
    ln -sf /dev/null $units/$unit
done
exec /usr/lib/systemd/systemd
