//! The file that describes a real host and its client (docs/results/hardware.md).

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use serde::Deserialize;

use super::HardwareError;

/// A host, its tenants, and the client's NICs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// `here`, or the host's name for ssh: `root@192.0.2.10`.
    pub host: String,
    /// The command on that host.
    #[serde(default = "ontime")]
    pub ontime: String,
    /// The client.
    #[serde(default)]
    pub client: Client,
    /// The network of the RT tenant.
    pub rt: Rt,
    /// The network of the bulk tenants. Without it there is no flood.
    pub bulk: Option<Network>,
}

/// The client's place and time stamps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Client {
    /// Network namespace of the client, if both ends of the cable are in one machine.
    pub namespace: Option<String>,
    /// Source of the time stamps.
    pub stamps: Stamps,
}

/// Source of frames' time stamps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stamps {
    /// The kernel's, taken when a frame is passed to the driver and when the driver passes it on. They include the
    /// client's own interrupt.
    #[default]
    Kernel,
    /// The NIC's, for received frames. Both directions have them only at a mirror port or tap.
    Nic,
}

/// The RT tenant.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rt {
    /// Name in `ontime ps`.
    pub tenant: String,
    /// Address of the server. Sampled Values have no such address; for them the port is ignored.
    pub server: SocketAddr,
    /// The client's NIC.
    pub nic: String,
    /// The NIC at a mirror port or tap of this network. Without it, the client's NIC is the monitor.
    pub monitor: Option<String>,
}

/// Bulk tenants.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// The client's NIC; for `vatc` that of the RT tenant.
    pub nic: String,
    /// Names in `ontime ps`, and addresses on which `iperf3 -s` runs.
    pub tenants: BTreeMap<String, IpAddr>,
}

fn ontime() -> String {
    "ontime".to_owned()
}

impl Site {
    /// Reads and checks a site's file.
    pub fn read(path: &Path) -> Result<Self, HardwareError> {
        let wrong = |what: String| HardwareError::Site { path: path.to_owned(), what };
        let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let site: Self = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        site.check().map_err(wrong)?;
        Ok(site)
    }

    fn check(&self) -> Result<(), String> {
        if self.host.is_empty() || self.host.starts_with('-') {
            return Err(format!("host '{}' is neither \"here\" nor an address for ssh", self.host));
        }
        let own_monitor = self.rt.monitor.as_ref().is_none_or(|monitor| *monitor == self.rt.nic);
        if self.client.stamps == Stamps::Nic && own_monitor {
            return Err(format!(
                "stamps = \"nic\" takes a monitor under [rt], a NIC that receives both ways from a mirror port or tap: \
                 {} stamps only what it receives, and requests it sends",
                self.rt.nic
            ));
        }
        if self.bulk.as_ref().is_some_and(|bulk| bulk.tenants.is_empty()) {
            return Err("[bulk] names no tenant; without bulk tenants leave it out".to_owned());
        }
        Ok(())
    }

    /// The NIC that captures the RT network.
    pub fn monitor(&self) -> &str {
        self.rt.monitor.as_deref().unwrap_or(&self.rt.nic)
    }

    /// Whether the host is this machine.
    pub fn is_here(&self) -> bool {
        self.host == "here"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        host = "root@192.0.2.10"
        [rt]
        tenant = "plc"
        server = "198.51.100.2:11111"
        nic = "eth1"
        [bulk]
        nic = "eth2"
        tenants = { bulk1 = "203.0.113.2" }
    "#;

    fn read(text: &str) -> Result<Site, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("site.toml");
        fs::write(&path, text).unwrap();
        Site::read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn a_site_has_defaults() {
        let site = read(GOOD).unwrap();
        assert_eq!((site.ontime.as_str(), site.monitor(), site.is_here()), ("ontime", "eth1", false));
        assert_eq!(site.client, Client { namespace: None, stamps: Stamps::Kernel });
    }

    #[test]
    fn the_file_of_the_documentation_is_read() {
        let page = include_str!("../../../../docs/results/hardware.md");
        let (_, rest) = page.split_once("```toml\n").unwrap();
        let site = read(rest.split_once("```").unwrap().0).unwrap();
        assert_eq!((site.host.as_str(), &site.ontime, site.monitor()), ("root@192.0.2.10", &ontime(), "enp5s0"));
        assert_eq!(site.bulk.unwrap().tenants.len(), 2);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (from, to, word) in [
            ("nic = \"eth1\"", "nics = \"eth1\"", "nics"),
            ("198.51.100.2:11111", "198.51.100.2", "server"),
            ("root@192.0.2.10", "-oProxyCommand=x", "ssh"),
            ("{ bulk1 = \"203.0.113.2\" }", "{}", "no tenant"),
            ("[rt]", "[client]\nstamps = \"nic\"\n[rt]", "mirror port"),
            ("[rt]", "[client]\nstamps = \"gps\"\n[rt]", "gps"),
        ] {
            let said = read(&GOOD.replace(from, to)).unwrap_err();
            assert!(said.contains(word), "{said}");
        }
        assert!(Site::read(Path::new("/nowhere/site.toml")).unwrap_err().to_string().contains("/nowhere/site.toml"));
    }
}
