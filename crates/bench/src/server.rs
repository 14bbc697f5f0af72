//! Where the RT server of Access'18's experiments runs: in a VM with a NIC, in one with outsourced sockets, or on the
//! host.
//!
//! One at a time, always at the same address and with the same program: the guests' own, of the guests' disk. A VM
//! without a NIC and a host process are in a network namespace with a macvlan on the RT NIC, which leaves its bridge
//! meanwhile (`lab-netns`): the shortest path that a namespace of its own allows, and the same for both.

use std::net::Ipv4Addr;

use ontime_lab::images::Images;
use ontime_lab::module::{self, GUEST};
use ontime_lab::role::{LOADED, SAMPLED_VALUES};

use crate::host::{Ground, Host, MeasureError, RT_VM, Site, Vm, boot_vm};

/// The server's address on the RT network: that of [`RT_VM`].
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
/// A container's own address behind address translation (`lab-netns nat`).
const NAT_ADDRESS: &str = "172.17.0.2";
/// The name of the VM, and of what stands in its place.
const NAME: &str = RT_VM.name;
/// Files of `/etc/ontime`: the RT NIC is RT, also while it is in a namespace where no tenant of the host's own is seen
/// to use it.
pub const CONFIG: [(&str, &str); 1] = [("host.toml", "[nic.rt0]\nclass = \"rt\"\nlevel = 0\n")];

/// How a guest with outsourced sockets is woken (Access'18, III-C).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Its halt ends, and its idle loop looks at the queues.
    Idle,
    /// By an interrupt, for comparison.
    Interrupt,
}

/// Where the server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In an ordinary VM: virtio-net, vhost-net, the bridge.
    Vm,
    /// In a VM whose sockets are those of `ontime device`.
    Outsourced(Wake),
    /// On the host, at the place of a vCPU: what no VM can be better than.
    Process,
    /// In a cgroup and a network namespace of its own, where Ontime places it.
    Container(Net),
}

/// A container's way to the RT NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Net {
    /// A veth pair to a bridge, and address translation, as Docker does.
    Nat,
    /// A macvlan.
    Macvlan,
}

/// A server program and the port that it answers.
#[derive(Debug, Clone, Copy)]
pub struct Server {
    /// The guest's role (`lab-vm`).
    pub role: &'static str,
    /// Its command line on the host; it runs in the guests' file system.
    pub command: &'static str,
    /// What the device's policy lets it bind.
    pub bind: &'static str,
    /// Its port: the program's own default.
    pub port: u16,
}

/// `sockperf server`, UDP.
pub const SOCKPERF: Server =
    Server { role: "rt", command: "sockperf server -i 10.1.0.2 -p 11111", bind: "udp/11111", port: 11_111 };
/// memcached, TCP; a thread for requests, as there is a vCPU.
pub const MEMCACHED: Server = Server {
    role: "memcached",
    command: "memcached -u root -l 10.1.0.2 -p 11211 -t 1",
    bind: "tcp/11211",
    port: 11_211,
};
/// Kamailio, UDP, as a proxy that relays calls (`lab/src/recipe/kamailio.cfg`).
pub const KAMAILIO: Server = Server {
    role: "kamailio",
    command: "kamailio -f /etc/kamailio/lab.cfg -l udp:10.1.0.2:5060 -DD -E -m 32 -M 4",
    bind: "udp/5060",
    port: 5_060,
};

/// `sockperf server`, UDP, in a VM with a CPU load of its own (`ontime_lab::role`); in a VM only.
pub const LOADED_SOCKPERF: Server = Server { role: LOADED.name, ..SOCKPERF };

/// What answers Sampled Values (`ontime_lab::role`): raw frames, in a VM only.
pub const SUBSCRIBER: Server = Server { role: SAMPLED_VALUES.name, command: "", bind: "", port: 0 };

/// The server and where it runs now.
#[derive(Debug)]
pub struct Seat {
    server: Server,
    place: Option<Place>,
}

impl Seat {
    /// Nowhere yet. Where `outsourced`, the guest module is built, if it is missing, and given to the host.
    pub fn new(
        server: Server,
        ground: &Ground<'_>,
        outsourced: bool,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, MeasureError> {
        match ground {
            Ground::Emulated(site, images) if outsourced => bring_module(site, images, progress)?,
            Ground::Emulated(..) | Ground::Real(_) => {}
        }
        Ok(Self { server, place: None })
    }

    /// Where it runs now.
    pub fn place(&self) -> Option<Place> {
        self.place
    }

    /// Has the server run there, and nowhere else. On a real host it runs in its owner's VM and is left alone.
    pub fn put(&mut self, host: &mut Host, place: Place, progress: &mut dyn FnMut(&str)) -> Result<(), MeasureError> {
        if self.place == Some(place) || (place == Place::Vm && host.target().is_some()) {
            return Ok(());
        }
        // Any other place is one that the experiment makes.
        host.lab()?;
        self.place = None;
        vacate(host, NAME)?;
        let Vm { address, .. } = RT_VM;
        let Server { role, bind, .. } = self.server;
        let vm = |net| Vm { role, net, ..RT_VM };
        match place {
            Place::Vm => boot_vm(host.lab()?, &vm("rt"), progress)?,
            Place::Outsourced(wake) => {
                Sockets { vm: NAME, bind, reach: "10.1.0.0/24", channels: 1, wake }.write(host)?;
                boot_vm(host.lab()?, &vm("sockets:rt"), progress)?;
            }
            Place::Process => {
                progress("starting the server on the host itself");
                host.shell(&format!("lab-netns up {NAME} rt {address}"))?;
                let join = "mkdir -p /sys/fs/cgroup/trusted && echo $$ > /sys/fs/cgroup/trusted/cgroup.procs";
                self.run_in_namespace(host, address, &format!("{join} && exec chrt --fifo 47"))?;
            }
            Place::Container(net) => {
                progress("starting the server in a container");
                let (verb, own) = match net {
                    Net::Nat => ("nat", NAT_ADDRESS),
                    Net::Macvlan => ("up", address),
                };
                host.shell(&format!("lab-netns {verb} {NAME} rt {address}"))?;
                let join = "mkdir -p /sys/fs/cgroup/rt.scope && echo $$ > /sys/fs/cgroup/rt.scope/cgroup.procs && exec";
                self.run_in_namespace(host, own, join)?;
            }
        }
        self.place = Some(place);
        Ok(())
    }

    /// The server in the namespace that stands by now, at `address` there; `place` is what the shell does for it first.
    /// As in a guest (`recipe/guest-init.sh`), the disk is read-only with /tmp and /run in memory: Kamailio does not
    /// start without its directory in /run.
    fn run_in_namespace(&self, host: &mut Host, address: &str, place: &str) -> Result<(), MeasureError> {
        let command = self.server.command.replace(RT_VM.address, address);
        host.shell(&format!(
            "mkdir -p /run/guest && {{ mountpoint -q /run/guest || mount -o ro /dev/vdb /run/guest; }} && \
             for dir in tmp run; do mountpoint -q /run/guest/$dir || mount -t tmpfs tmpfs /run/guest/$dir || exit; \
             done && {{ setsid sh -c '{place} ip netns exec {NAME} chroot /run/guest {command}' \
             > /lab/process.log 2>&1 < /dev/null & echo $! > /run/{NAME}.pid; }}"
        ))?;
        Ok(())
    }
}

/// Gives the host the guest module; before it boots. Built first where it is missing.
pub fn bring_module(site: &Site, images: &Images, progress: &mut dyn FnMut(&str)) -> Result<(), MeasureError> {
    let module = GUEST.ready(&images.guest_version()?, progress)?;
    Ok(module::write_archive(&module, &site.dir.join("files/module.cpio"))?)
}

/// Ends a VM of this name, or a process in its place; also what a failed attempt left behind.
pub fn vacate(host: &mut Host, name: &str) -> Result<(), MeasureError> {
    host.shell(&format!(
        "[ ! -e /run/{name}.pid ] || {{ kill $(cat /run/{name}.pid); rm /run/{name}.pid; }}; \
         lab-vm stop {name} 2> /dev/null; [ ! -e /run/netns/{name} ] || lab-netns down {name}"
    ))?;
    Ok(())
}

/// What a VM's device process may do for it.
#[derive(Debug, Clone, Copy)]
pub struct Sockets {
    /// The VM.
    pub vm: &'static str,
    /// The one port it may bind.
    pub bind: &'static str,
    /// The network it may reach.
    pub reach: &'static str,
    /// RT channels, at level 0's place.
    pub channels: u32,
    /// How they wake.
    pub wake: Wake,
}

impl Sockets {
    /// Writes its table; a device process reads it when it starts.
    pub fn write(&self, host: &mut Host) -> Result<(), MeasureError> {
        host.shell(&format!("echo '{}' > /etc/ontime/sockets.toml", self.table()))?;
        Ok(())
    }

    fn table(&self) -> String {
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
