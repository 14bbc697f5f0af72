#!/bin/sh
# The emulated host's first process for lab/tests/packages.sh: does what systemd does not, and then becomes systemd.
# The lab installs it in place of the program under test, /usr/local/bin/ontime, because that program comes from a
# package here.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
rm /usr/local/bin/ontime
[ -s /etc/machine-id ] || tr -d - < /proc/sys/kernel/random/uuid > /etc/machine-id
modprobe -a e1000e virtio_console kvm_amd tun vhost_net bridge 9pnet_virtio 9p 2> /dev/null
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 lab /lab

units=/etc/systemd/system
# The clients' side, as lab-init makes it.
cat > /usr/local/sbin/lab-clients << 'SCRIPT'
#!/bin/sh -e
read -r cmdline < /proc/cmdline
clients=${cmdline##*ontime.clients=}
clients=${clients%% *}
ip netns add clients
ip -n clients link set lo up
for side in rt:52:54:00:00:00:11:10.1.0.1 bulk:52:54:00:00:00:12:10.2.0.1; do
    name=${side%%:*} address=${side##*:} mac=${side#*:}
    nic=$(grep -l "^${mac%:*}$" /sys/class/net/*/address | cut -d / -f 5)
    ip link set "$nic" down
    ip link set "$nic" name "$name" netns clients
    ip -n clients address add "$address/24" dev "$name"
    ip -n clients link set "$name" up
done
for irq in $(sed -nE 's/^ *([0-9]+):.* (rt|bulk)(-.*)?$/\1/p' /proc/interrupts); do
    echo "$clients" > "/proc/irq/$irq/smp_affinity_list"
done
SCRIPT
chmod +x /usr/local/sbin/lab-clients
cat > $units/lab-agent.service << 'UNIT'
[Unit]
Description=Runs the lab's commands

[Service]
ExecStartPre=/usr/local/sbin/lab-clients
ExecStart=/usr/local/bin/ontime-lab agent
ExecStopPost=/bin/sh -c 'echo o > /proc/sysrq-trigger'
WorkingDirectory=/lab
Environment=HOME=/root
UNIT
mkdir -p $units/multi-user.target.wants
ln -s ../lab-agent.service $units/multi-user.target.wants/
# There is no mirror to ask, and no terminal.
for unit in apt-daily.timer apt-daily-upgrade.timer getty@tty1.service serial-getty@ttyS0.service; do
    ln -sf /dev/null $units/$unit
done
exec /usr/lib/systemd/systemd
