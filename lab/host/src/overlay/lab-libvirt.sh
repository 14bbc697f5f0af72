#!/bin/sh
# lab-libvirt up: libvirt's daemon as Debian packages it, without systemd.
# lab-libvirt define NAME ROLE NET ADDRESS ATTRIBUTES: a domain with vhost-net, an iothread and Ontime's class in its metadata,
# such as 'class="rt" level="0"'. Roles as lab-vm's; `virsh start`, `lab-vm wait`, `virsh destroy` do the rest.
set -eu
verb=${1:?lab-libvirt up|define}

up() {
    mkdir -p /dev/hugepages /run/libvirt /run/lab-vm
    mountpoint -q /dev/hugepages || mount -t hugetlbfs hugetlbfs /dev/hugepages
    # What systemd and udev would have done.
    [ -s /etc/machine-id ] || tr -d - < /proc/sys/kernel/random/uuid > /etc/machine-id
    chown root:kvm /dev/kvm
    chmod 660 /dev/kvm
    # Neither polkit nor AppArmor's parser nor virtlogd runs here.
    printf 'auth_unix_ro = "none"\nauth_unix_rw = "none"\n' > /etc/libvirt/libvirtd.conf
    printf 'security_driver = "none"\nstdio_handler = "file"\n' > /etc/libvirt/qemu.conf
    libvirtd -d
    for _ in $(seq 100); do
        virsh -q version > /dev/null 2>&1 && return
        sleep 0.1
    done
    echo "lab-libvirt: libvirtd does not answer" >&2
    exit 1
}

domain() { # NAME ROLE NET ADDRESS ATTRIBUTES
    cat << XML
<domain type="kvm">
  <name>$1</name>
  <metadata><ontime:tenant xmlns:ontime="https://ontime.dev/xmlns/tenant/1" $5/></metadata>
  <memory unit="MiB">192</memory>
  <memoryBacking><hugepages/><source type="memfd"/><access mode="shared"/></memoryBacking>
  <vcpu>1</vcpu>
  <iothreads>1</iothreads>
  <os>
    <type arch="x86_64" machine="q35">hvm</type>
    <kernel>/boot/vmlinux-guest</kernel>
    <initrd>/boot/initrd-guest</initrd>
    <cmdline>console=ttyS0 quiet panic=-1 ontime.root=/dev/vda ontime.ro init=/sbin/lab-guest-init ontime.ip=$4 ontime.role=$2</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode="custom" match="exact" check="none">
    <model fallback="forbid">qemu64</model>
    <feature policy="require" name="x2apic"/>
    <feature policy="require" name="rdrand"/>
    <feature policy="disable" name="cx16"/>
  </cpu>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type="block" device="disk">
      <driver name="qemu" type="raw" iothread="1"/>
      <source dev="/dev/vdb"/>
      <target dev="vda" bus="virtio"/>
      <readonly/>
      <shareable/>
    </disk>
    <interface type="bridge">
      <source bridge="br-$3"/>
      <target dev="t-$1"/>
      <model type="virtio"/>
      <driver name="vhost"/>
      <rom enabled="no"/>
    </interface>
    <serial type="file"><source path="/run/lab-vm/$1.log"/></serial>
    <memballoon model="none"/>
    <video><model type="none"/></video>
  </devices>
</domain>
XML
}

case $verb in
up) up ;;
define)
    domain "$2" "$3" "$4" "$5" "$6" > "/run/lab-vm/$2.xml"
    virsh -q define "/run/lab-vm/$2.xml"
    # For lab-vm, which waits by these.
    ln -sf "/run/libvirt/qemu/$2.pid" "/run/lab-vm/$2.pid"
    ;;
*)
    echo "lab-libvirt: '$verb' is not one of up, define" >&2
    exit 2
    ;;
esac
