//! The place of the RT server in Access'18's experiments: a VM with a NIC, a VM with outsourced sockets, or the host.
//!
//! One server runs at a time, always at the same address and from the same program, which is on the guests' disk. A VM
//! without a NIC and a host process are in a network namespace with a macvlan on the RT NIC, which leaves its bridge
//! meanwhile (`lab-netns`). This is the shortest path for a separate namespace, and the same for both.

use std::net::Ipv4Addr;

use ontime_lab::images::Images;
use ontime_lab::module::{self, GUEST};
use ontime_lab::role::{LOADED, SAMPLED_VALUES};

use crate::error::MeasureError;
use crate::host::{Host, PlannedHost, RT_VM, Site, Vm, boot_vm};
use crate::progress::progress;

/// The server's address on the RT network: that of [`RT_VM`].
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
/// A container's own address behind NAT (`lab-netns nat`).
const NAT_ADDRESS: &str = "172.17.0.2";
/// The name of the VM, and of the process in its place.
const NAME: &str = RT_VM.name;
/// Files for `/etc/ontime`: the RT NIC has class RT, also while it is in a namespace and no tenant of the host seems to
/// use it.
pub(crate) const CONFIG: [(&str, &str); 1] = [("host.toml", "[nic.rt0]\nclass = \"rt\"\nlevel = 0\n")];

/// How a guest with outsourced sockets is woken up (Access'18, III-C).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// Its halt ends, and its idle loop checks the queues.
    Idle,
    /// By an interrupt, for comparison.
    Interrupt,
}

/// Place of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerPlace {
    /// In an ordinary VM: virtio-net, vhost-net, the bridge.
    Vm,
    /// In a VM whose sockets are those of `ontime device`.
    Outsourced(Wake),
    /// On the host, with the priority of a vCPU: the limit for any VM.
    Process,
    /// In its own cgroup and network namespace, placed by Ontime.
    Container(Net),
}

/// A container's way to the RT NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Net {
    /// A veth pair to a bridge, and NAT, as in Docker.
    Nat,
    Macvlan,
}

/// A server program and its port.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Server {
    /// The guest's role (`lab-vm`).
    pub role: &'static str,
    /// The command line on the host. It runs in the guests' file system.
    pub command: &'static str,
    /// The port that the device's policy lets it bind.
    pub bind: &'static str,
    /// The port: the program's default.
    pub port: u16,
}

/// `sockperf server`, UDP.
pub(crate) const SOCKPERF: Server =
    Server { role: "rt", command: "sockperf server -i 10.1.0.2 -p 11111", bind: "udp/11111", port: 11_111 };
/// memcached, TCP; one thread for requests, as there is one vCPU.
pub(crate) const MEMCACHED: Server = Server {
    role: "memcached",
    command: "memcached -u root -l 10.1.0.2 -p 11211 -t 1",
    bind: "tcp/11211",
    port: 11_211,
};
/// Kamailio, UDP, as a proxy that relays calls (`lab/host/src/recipe/kamailio.cfg`).
pub(crate) const KAMAILIO: Server = Server {
    role: "kamailio",
    command: "kamailio -f /etc/kamailio/lab.cfg -l udp:10.1.0.2:5060 -DD -E -m 32 -M 4",
    bind: "udp/5060",
    port: 5_060,
};

/// `sockperf server`, UDP, in a VM with its own CPU load (`ontime_lab::role`); in a VM only.
pub(crate) const LOADED_SOCKPERF: Server = Server { role: LOADED.name, ..SOCKPERF };

/// The subscriber of Sampled Values (`ontime_lab::role`): raw frames, in a VM only.
pub(crate) const SUBSCRIBER: Server = Server { role: SAMPLED_VALUES.name, command: "", bind: "", port: 0 };

/// The server and its present place.
#[derive(Debug)]
pub(crate) struct PlacedServer {
    server: Server,
    place: Option<ServerPlace>,
}

impl PlacedServer {
    /// No place yet. If `outsourced`, the guest module is built, if missing, and copied to the host's files.
    pub(crate) fn new(server: Server, ground: &PlannedHost<'_>, outsourced: bool) -> Result<Self, MeasureError> {
        match ground {
            PlannedHost::Emulated(site, images) if outsourced => bring_module(site, images)?,
            PlannedHost::Emulated(..) | PlannedHost::Real(_) => {}
        }
        Ok(Self { server, place: None })
    }

    /// The present place.
    pub(crate) fn place(&self) -> Option<ServerPlace> {
        self.place
    }

    /// Runs the server at this place, and nowhere else. On a real host the server runs in its owner's VM and is not
    /// changed.
    pub(crate) fn put(&mut self, host: &mut Host, place: ServerPlace) -> Result<(), MeasureError> {
        if self.place == Some(place) || (place == ServerPlace::Vm && host.target().is_some()) {
            return Ok(());
        }
        // Every other place is set up by the experiment.
        host.lab()?;
        self.place = None;
        stop_server(host, NAME)?;
        let Vm { address, .. } = RT_VM;
        let Server { role, bind, .. } = self.server;
        let vm = |net| Vm { role, net, ..RT_VM };
        match place {
            ServerPlace::Vm => boot_vm(host.lab()?, &vm("rt"))?,
            ServerPlace::Outsourced(wake) => {
                Sockets { vm: NAME, bind, reach: "10.1.0.0/24", channels: 1, wake }.write(host)?;
                boot_vm(host.lab()?, &vm("sockets:rt"))?;
            }
            ServerPlace::Process => {
                progress("starting the server on the host itself");
                host.shell(&format!("lab-netns up {NAME} rt {address}"))?;
                let join = "mkdir -p /sys/fs/cgroup/trusted && echo $$ > /sys/fs/cgroup/trusted/cgroup.procs";
                run_in_namespace(host, NAME, self.server.command, &format!("{join} && exec chrt --fifo 47"))?;
            }
            ServerPlace::Container(net) => {
                progress("starting the server in a container");
                contain(host, (NAME, address), net, self.server.command)?;
            }
        }
        self.place = Some(place);
        Ok(())
    }
}

/// Starts a server in a container with this name and address on the RT network: in cgroup `/NAME.scope` and a network
/// namespace of its own. `command` is a [`Server::command`].
pub(crate) fn contain(
    host: &mut Host,
    (name, address): (&str, &str),
    net: Net,
    command: &str,
) -> Result<(), MeasureError> {
    let (verb, own) = match net {
        Net::Nat => ("nat", NAT_ADDRESS),
        Net::Macvlan => ("up", address),
    };
    host.shell(&format!("lab-netns {verb} {name} rt {address}"))?;
    let cgroup = format!("/sys/fs/cgroup/{name}.scope");
    let join = format!("mkdir -p {cgroup} && echo $$ > {cgroup}/cgroup.procs && exec");
    run_in_namespace(host, name, &command.replace(RT_VM.address, own), &join)
}

/// Runs a server's command in the existing namespace `name`. `place` is a shell command for its priority, which runs
/// first. As in a guest (`recipe/guest-init.sh`), the disk is read-only, and /tmp and /run are in memory: Kamailio does
/// not start without its directory in /run.
fn run_in_namespace(host: &mut Host, name: &str, command: &str, place: &str) -> Result<(), MeasureError> {
    host.shell(&format!(
        "mkdir -p /run/guest && {{ mountpoint -q /run/guest || mount -o ro /dev/vdb /run/guest; }} && \
         for dir in tmp run; do mountpoint -q /run/guest/$dir || mount -t tmpfs tmpfs /run/guest/$dir || exit; \
         done && {{ setsid sh -c '{place} ip netns exec {name} chroot /run/guest {command}' \
         > /lab/process.log 2>&1 < /dev/null & echo $! > /run/{name}.pid; }}"
    ))?;
    Ok(())
}

/// Copies the guest module to the host's files, before it boots. Builds it first if it is missing.
pub(crate) fn bring_module(site: &Site, images: &Images) -> Result<(), MeasureError> {
    let module = GUEST.ready(&images.guest_version()?, &mut |line| progress(line))?;
    Ok(module::write_archive(&module, &site.dir.join("files/module.cpio"))?)
}

/// Ends a VM with this name, or the process in its place, and removes what a failed attempt left behind.
pub(crate) fn stop_server(host: &mut Host, name: &str) -> Result<(), MeasureError> {
    host.shell(&format!(
        "[ ! -e /run/{name}.pid ] || {{ kill $(cat /run/{name}.pid); rm /run/{name}.pid; }}; \
         lab-vm stop {name} 2> /dev/null; [ ! -e /run/netns/{name} ] || lab-netns down {name}"
    ))?;
    Ok(())
}

/// The policy of a VM's device process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sockets<'a> {
    pub vm: &'a str,
    /// The single port that it may bind.
    pub bind: &'static str,
    /// The network that it may reach.
    pub reach: &'static str,
    /// Number of RT channels, with level 0's priority.
    pub channels: u32,
    /// How the channels wake the guest up.
    pub wake: Wake,
}

impl Sockets<'_> {
    /// Writes the policy's table. A device process reads it when it starts.
    pub(crate) fn write(&self, host: &mut Host) -> Result<(), MeasureError> {
        host.shell(&format!("echo '{}' > /etc/ontime/sockets.toml", self.table()))?;
        Ok(())
    }

    /// The table of `sockets.toml`.
    pub(crate) fn table(&self) -> String {
        let Self { vm, bind, reach, channels, wake } = self;
        let wake = if *wake == Wake::Idle { "idle" } else { "interrupt" };
        format!(
            "[vm.{vm}]\nbind = [\"{bind}\"]\nreach = [\"{reach}\"]\nchannels = {channels}\nwake = \"{wake}\"\npriority \
             = 48\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_where_the_vm_is() {
        assert_eq!(RT_VM.address, ADDRESS.to_string());
        for server in [SOCKPERF, MEMCACHED, KAMAILIO] {
            assert!(server.command.contains(RT_VM.address), "{}", server.command);
        }
        assert_eq!(RT_VM.role, SOCKPERF.role);
    }
}
