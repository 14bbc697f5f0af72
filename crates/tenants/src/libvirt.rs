//! libvirt's live state, read from its files. libvirt itself is never called.
//!
//! Input: `/run/libvirt/qemu/NAME.xml`, which libvirt writes for every running domain and rewrites at every change.
//! Output: a [`Domain`]. Source: libvirt `src/conf/domain_conf.c` (`virDomainObjFormat`), `docs/formatdomain.rst`.

use std::collections::BTreeMap;
use std::time::SystemTime;

use roxmltree::{Document, Node, ParsingOptions};

use crate::class::{Class, Level, Policy};
use crate::cpus::CpuSet;
use crate::model::{LibvirtTuning, ThreadRole};
use crate::proc::printable;
use crate::rules::{RuntimeCap, Verdict};

/// The namespace of Ontime's element in a domain's `<metadata>`.
pub(crate) const METADATA_NAMESPACE: &str = "https://ontime.dev/xmlns/tenant/1";

/// More nodes than any domain has: a limit for malformed files.
const NODES_MAX: u32 = 200_000;

/// A domain's live status file.
#[derive(Debug, Clone, PartialEq)]
pub struct Domain {
    /// The domain's name.
    pub name: String,
    /// The domain's UUID, as in the file.
    pub uuid: Option<String>,
    /// Its QEMU process number.
    pub pid: i32,
    /// Ontime's `<metadata>`: absent, valid, or an error text.
    pub metadata: Option<Result<Verdict, String>>,
    /// vCPU numbers by thread number, as QEMU reported them to libvirt.
    pub vcpu_tids: BTreeMap<i32, u32>,
    /// The host's interfaces of its virtual NICs. `None` if only its `.pid` file could be read.
    pub interfaces: Option<Vec<String>>,
    /// The user of its QEMU, if the file has it (`<seclabel model='dac'>`).
    pub user: Option<u32>,
    /// Modification time of the file.
    pub written: Option<SystemTime>,
    tuning: Tuning,
}

/// `<cputune>` by thread kind.
#[derive(Debug, Clone, PartialEq, Default)]
struct Tuning {
    vcpus: BTreeMap<u32, LibvirtTuning>,
    iothreads: BTreeMap<u32, LibvirtTuning>,
    emulator: LibvirtTuning,
}

impl Domain {
    /// A domain of which only the `NAME.pid` file is known.
    pub fn of_pid_file(name: &str, text: &str) -> Option<Self> {
        let pid = text.trim().parse().ok().filter(|pid| *pid > 0)?;
        Some(Self {
            name: printable(name.as_bytes()),
            uuid: None,
            pid,
            metadata: None,
            vcpu_tids: BTreeMap::new(),
            interfaces: None,
            user: None,
            written: None,
            tuning: Tuning::default(),
        })
    }

    /// Sets the modification time of the file.
    pub(crate) fn written_at(mut self, time: Option<SystemTime>) -> Self {
        self.written = time;
        self
    }

    /// Whether the status file itself was read.
    pub fn is_whole(&self) -> bool {
        self.interfaces.is_some()
    }

    /// The `<cputune>` settings of a thread. vhost threads are in the emulator's cgroup and share its pinning.
    pub fn tuning(&self, role: ThreadRole, comm: &str) -> LibvirtTuning {
        let found = match role {
            ThreadRole::Vcpu(number) => self.tuning.vcpus.get(&number),
            ThreadRole::Iothread => iothread_number(comm).and_then(|number| self.tuning.iothreads.get(&number)),
            ThreadRole::Emulator => Some(&self.tuning.emulator),
            ThreadRole::Vhost => {
                return LibvirtTuning { sched: None, cpus: self.tuning.emulator.cpus.clone() };
            }
            ThreadRole::KvmPit | ThreadRole::Container | ThreadRole::Device => None,
        };
        found.cloned().unwrap_or_default()
    }
}

/// libvirt names iothread objects `iothreadN`; QEMU names their threads `IO iothreadN`.
fn iothread_number(comm: &str) -> Option<u32> {
    comm.strip_prefix("IO iothread")?.parse().ok()
}

/// Parses a live status file.
///
/// # Errors
/// A sentence about the fault in the text.
pub fn parse_status(text: &str) -> Result<Domain, String> {
    let options = ParsingOptions { nodes_limit: NODES_MAX, ..ParsingOptions::default() };
    // The parser's message quotes the text, so make it printable.
    let document = Document::parse_with_options(text, options)
        .map_err(|error| format!("not well-formed: {}", printable(error.to_string().as_bytes())))?;
    let status = document.root_element();
    if !status.has_tag_name("domstatus") {
        return Err(format!("its root is <{}>, not <domstatus>", printable(status.tag_name().name().as_bytes())));
    }
    let domain = child(status, "domain").ok_or("it has no <domain>")?;
    let name = text_of(domain, "name").ok_or("its <domain> has no <name>")?;
    let pid = status.attribute("pid").and_then(|pid| pid.parse().ok()).filter(|pid| *pid > 0);
    Ok(Domain {
        name,
        uuid: text_of(domain, "uuid").map(|uuid| uuid.to_ascii_lowercase()),
        pid: pid.ok_or("its <domstatus> has no `pid`")?,
        metadata: metadata(domain),
        vcpu_tids: vcpu_tids(status),
        interfaces: Some(interfaces(domain)),
        user: user(domain),
        written: None,
        tuning: child(domain, "cputune").map(tuning).unwrap_or_default(),
    })
}

fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn text_of(node: Node<'_, '_>, name: &str) -> Option<String> {
    let text = child(node, name)?.text()?.trim();
    (!text.is_empty()).then(|| printable(text.as_bytes()))
}

fn number<T: std::str::FromStr>(node: Node<'_, '_>, attribute: &str) -> Option<T> {
    node.attribute(attribute)?.parse().ok()
}

fn vcpu_tids(status: Node<'_, '_>) -> BTreeMap<i32, u32> {
    let vcpus = child(status, "vcpus").into_iter().flat_map(|vcpus| vcpus.children());
    vcpus.filter_map(|vcpu| Some((number(vcpu, "pid")?, number(vcpu, "id")?))).collect()
}

fn interfaces(domain: Node<'_, '_>) -> Vec<String> {
    let devices = child(domain, "devices").into_iter().flat_map(|devices| devices.children());
    devices
        .filter(|device| device.has_tag_name("interface") && !is_vhost_user(*device))
        .filter_map(|interface| child(interface, "target")?.attribute("dev"))
        .map(|dev| printable(dev.as_bytes()))
        .collect()
}

/// The target of a vhost-user interface is a port of a user space switch (Open vSwitch with DPDK, VPP), not a kernel
/// interface. For an interface of a libvirt network, `<actual>` has the real type.
fn is_vhost_user(interface: Node<'_, '_>) -> bool {
    let kind = child(interface, "actual").unwrap_or(interface).attribute("type");
    kind == Some("vhostuser")
}

/// libvirt writes numbers with a plus sign: `+64055:+64055`.
fn user(domain: Node<'_, '_>) -> Option<u32> {
    let labels =
        domain.children().filter(|node| node.has_tag_name("seclabel") && node.attribute("model") == Some("dac"));
    labels.filter_map(|label| text_of(label, "label")).find_map(|label| {
        let (user, _) = label.split_once(':')?;
        user.strip_prefix('+')?.parse().ok()
    })
}

fn tuning(cputune: Node<'_, '_>) -> Tuning {
    let mut tuning = Tuning::default();
    for node in cputune.children().filter(Node::is_element) {
        let cpus = || node.attribute("cpuset").map(|cpus| printable(cpus.as_bytes()));
        let listed =
            |attribute| node.attribute(attribute).and_then(|list| list.parse::<CpuSet>().ok()).unwrap_or_default();
        match node.tag_name().name() {
            "vcpupin" => {
                if let Some(vcpu) = number(node, "vcpu") {
                    tuning.vcpus.entry(vcpu).or_default().cpus = cpus();
                }
            }
            "iothreadpin" => {
                if let Some(iothread) = number(node, "iothread") {
                    tuning.iothreads.entry(iothread).or_default().cpus = cpus();
                }
            }
            "emulatorpin" => tuning.emulator.cpus = cpus(),
            "vcpusched" => {
                for vcpu in listed("vcpus").iter() {
                    tuning.vcpus.entry(vcpu).or_default().sched = sched(node);
                }
            }
            "iothreadsched" => {
                for iothread in listed("iothreads").iter() {
                    tuning.iothreads.entry(iothread).or_default().sched = sched(node);
                }
            }
            "emulatorsched" => tuning.emulator.sched = sched(node),
            _ => {}
        }
    }
    tuning
}

fn sched(node: Node<'_, '_>) -> Option<Policy> {
    let priority = || number::<u8>(node, "priority").filter(|priority| (1..=99).contains(priority));
    match node.attribute("scheduler")? {
        "fifo" => Some(Policy::Fifo(priority()?)),
        "rr" => Some(Policy::Rr(priority()?)),
        "batch" => Some(Policy::Batch { nice: 0 }),
        "idle" => Some(Policy::Idle),
        _ => None,
    }
}

/// Ontime's element, `<ontime:tenant class="rt" level="0" runtime-cap="0.8"/>`.
fn metadata(domain: Node<'_, '_>) -> Option<Result<Verdict, String>> {
    let element = child(domain, "metadata")?
        .children()
        .find(|node| node.is_element() && node.tag_name().namespace() == Some(METADATA_NAMESPACE))?;
    Some(verdict(element))
}

fn verdict(element: Node<'_, '_>) -> Result<Verdict, String> {
    let element_name = element.tag_name().name();
    if element_name != "tenant" {
        return Err(format!("<{}> is not known; allowed is <tenant>", printable(element_name.as_bytes())));
    }
    if let Some(inner) = element.children().find(Node::is_element) {
        return Err(format!(
            "<{}> inside <tenant> is not allowed; remove it",
            printable(inner.tag_name().name().as_bytes())
        ));
    }
    let (mut class, mut level, mut cap) = (None, None, None);
    for attribute in element.attributes() {
        let value = printable(attribute.value().as_bytes());
        match attribute.name() {
            "class" => class = Some(value),
            "level" => level = Some(parse_level(&value)?),
            "runtime-cap" => cap = Some(parse_cap(&value)?),
            other => {
                let other = printable(other.as_bytes());
                return Err(format!("attribute `{other}` is not known; allowed are `class`, `level`, `runtime-cap`"));
            }
        }
    }
    match class.as_deref() {
        Some("rt") => Ok(Verdict { class: Class::Rt(level.unwrap_or(Level::HIGHEST)), runtime_cap: cap }),
        Some("bulk") if level.is_none() && cap.is_none() => Ok(Verdict { class: Class::Bulk, runtime_cap: None }),
        Some("bulk") => {
            Err("`level` and `runtime-cap` are for class=\"rt\" only; remove them, or set class=\"rt\"".to_owned())
        }
        Some(other) => Err(format!("class `{other}` is not known; allowed are `rt` and `bulk`")),
        None => Err("`class` is missing; allowed are `rt` and `bulk`".to_owned()),
    }
}

fn parse_level(value: &str) -> Result<Level, String> {
    let number: i64 =
        value.parse().map_err(|_| format!("level `{value}` is not a number from 0 (most urgent) to {}", Level::MAX))?;
    Level::try_from(number)
}

fn parse_cap(value: &str) -> Result<RuntimeCap, String> {
    let number: f64 = value
        .parse()
        .map_err(|_| format!("runtime-cap `{value}` is not a fraction of one CPU from {} to 1", RuntimeCap::LEAST))?;
    RuntimeCap::try_from(number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STATUS: &str = r#"<!-- WARNING: THIS IS AN AUTO-GENERATED FILE. -->
<domstatus state='running' reason='booted' pid='4242'>
  <monitor path='/var/lib/libvirt/qemu/domain-1-rt1/monitor.sock' type='unix'/>
  <vcpus><vcpu id='0' pid='4250'/><vcpu id='1' pid='4251'/><vcpu id='x' pid='1'/></vcpus>
  <domain type='kvm' id='1'>
    <name>rt1</name>
    <uuid>3F1C9A52-0d52-4c1b-9e0a-6f4b7f1d2c33</uuid>
    <metadata>
      <other:thing xmlns:other="http://example.org/1" class="x"/>
      <ontime:tenant xmlns:ontime="https://ontime.dev/xmlns/tenant/1" class="rt" level="2" runtime-cap="0.8"/>
    </metadata>
    <cputune>
      <vcpupin vcpu='0' cpuset='1'/>
      <vcpupin vcpu='1' cpuset='2-4,^3'/>
      <emulatorpin cpuset='0'/>
      <iothreadpin iothread='1' cpuset='5'/>
      <vcpusched vcpus='0-2,^1' scheduler='fifo' priority='50'/>
      <iothreadsched iothreads='1' scheduler='batch'/>
    </cputune>
    <devices>
      <interface type='bridge'><source bridge='br0'/><target dev='vnet0'/></interface>
      <interface type='direct'><target dev='macvtap3'/></interface>
      <interface type='user'/>
    </devices>
  </domain>
</domstatus>"#;

    fn with_metadata(element: &str) -> Result<Verdict, String> {
        let start = STATUS.find("<ontime:tenant").unwrap();
        let end = start + STATUS[start..].find("/>").unwrap() + 2;
        parse_status(&format!("{}{element}{}", &STATUS[..start], &STATUS[end..])).unwrap().metadata.unwrap()
    }

    #[test]
    fn a_status_file_is_read_whole() {
        let domain = parse_status(STATUS).unwrap();
        assert_eq!((domain.name.as_str(), domain.pid), ("rt1", 4242));
        assert_eq!(domain.uuid.as_deref(), Some("3f1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33"));
        assert_eq!(domain.vcpu_tids, BTreeMap::from([(4250, 0), (4251, 1)]));
        assert_eq!(domain.interfaces.as_deref().unwrap(), ["vnet0", "macvtap3"]);
        let verdict = domain.metadata.clone().unwrap().unwrap();
        assert_eq!(verdict.class, Class::Rt(Level::try_from(2u8).unwrap()));
        assert_eq!(verdict.runtime_cap.map(RuntimeCap::get), Some(0.8));

        let vcpu0 = domain.tuning(ThreadRole::Vcpu(0), "CPU 0/KVM");
        assert_eq!((vcpu0.sched, vcpu0.cpus.as_deref()), (Some(Policy::Fifo(50)), Some("1")));
        let vcpu1 = domain.tuning(ThreadRole::Vcpu(1), "CPU 1/KVM");
        assert_eq!((vcpu1.sched, vcpu1.cpus.as_deref()), (None, Some("2-4,^3")));
        let iothread = domain.tuning(ThreadRole::Iothread, "IO iothread1");
        assert_eq!((iothread.sched, iothread.cpus.as_deref()), (Some(Policy::Batch { nice: 0 }), Some("5")));
        assert_eq!(domain.tuning(ThreadRole::Vhost, "vhost-4242").cpus.as_deref(), Some("0"));
        assert_eq!(domain.tuning(ThreadRole::KvmPit, "kvm-pit/4242"), LibvirtTuning::default());
    }

    #[test]
    fn an_interface_that_is_passed_through_has_no_name_here_and_hides_no_other() {
        let text = "<domstatus state='running' pid='77'><vcpus><vcpu id='0' pid='81'/></vcpus><domain type='kvm'>\
                    <name>weld</name><resource><partition>/machine/rt</partition></resource>\
                    <cputune><vcpusched vcpus='0' scheduler='rr' priority='9'/></cputune><devices>\
                    <interface type='hostdev' managed='yes'><source><address type='pci' domain='0x0000' bus='0x5e' \
                    slot='0x02' function='0x3'/></source><alias name='hostdev0'/></interface>\
                    <interface type='network'><source network='vfs'/><actual type='hostdev'/></interface>\
                    <interface type='bridge'><target dev='vnet7'/></interface></devices></domain></domstatus>";
        let domain = parse_status(text).unwrap();
        assert_eq!(domain.interfaces.as_deref().unwrap(), ["vnet7"]);
        assert_eq!(domain.tuning(ThreadRole::Vcpu(0), "CPU 0/KVM").sched, Some(Policy::Rr(9)));
        let alone = parse_status(&text.replace("<target dev='vnet7'/>", "")).unwrap();
        assert!(alone.is_whole() && alone.interfaces.as_deref().unwrap().is_empty());
    }

    #[test]
    fn bad_metadata_says_what_is_wrong_and_what_is_allowed() {
        let element =
            |attributes: &str| format!(r#"<o:tenant xmlns:o="https://ontime.dev/xmlns/tenant/1" {attributes}/>"#);
        for (attributes, expected) in [
            ("", "`class` is missing; allowed are `rt` and `bulk`"),
            ("class='fast'", "class `fast` is not known; allowed are `rt` and `bulk`"),
            ("class='rt' level='9'", "level 9 is not one of 0 (most urgent) to 8"),
            ("class='rt' level='-1'", "level -1 is not one of"),
            ("class='rt' level='top'", "level `top` is not a number"),
            ("class='rt' runtime-cap='80%'", "runtime-cap `80%` is not a fraction"),
            ("class='rt' runtime-cap='NaN'", "runtime-cap NaN is not a fraction"),
            ("class='rt' runtime-cap='0'", "runtime-cap 0 is not a fraction"),
            (
                "class='rt' runtime-cap='0.0000009'",
                "runtime-cap 0.0000009 is not a fraction of one CPU from 0.000001 to 1",
            ),
            ("class='bulk' level='1'", "for class=\"rt\" only"),
            ("class='rt' prio='1'", "attribute `prio` is not known; allowed are `class`, `level`, `runtime-cap`"),
        ] {
            let error = with_metadata(&element(attributes)).unwrap_err();
            assert!(error.contains(expected), "{attributes}: {error}");
        }
        assert_eq!(with_metadata(&element("class='bulk'")).unwrap().class, Class::Bulk);
        assert_eq!(with_metadata(&element("class='rt'")).unwrap().class, Class::Rt(Level::HIGHEST));
    }

    #[test]
    fn texts_that_are_no_status_are_refused_by_what_is_wrong() {
        for (text, expected) in [
            ("", "not well-formed"),
            ("<domstatus", "not well-formed"),
            ("<domain/>", "its root is <domain>"),
            ("<domstatus pid='1'/>", "no <domain>"),
            ("<domstatus pid='1'><domain/></domstatus>", "no <name>"),
            ("<domstatus><domain><name>a</name></domain></domstatus>", "no `pid`"),
            ("<domstatus pid='-4'><domain><name>a</name></domain></domstatus>", "no `pid`"),
            ("<!DOCTYPE x [<!ENTITY a 'b'>]><domstatus/>", "not well-formed"),
        ] {
            let error = parse_status(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    /// Found by fuzzing (`libvirt`): the message contained the text's control characters.
    #[test]
    fn a_refusal_is_fit_for_a_terminal() {
        for text in ["<do\u{1b}[2J x='1'/>", "<a \u{9b}2J/>", "<do\0\0\u{1}\0tus p='7'/>"] {
            let error = parse_status(text).unwrap_err();
            assert!(!error.contains(char::is_control), "{error:?}");
        }
    }

    #[test]
    fn deep_nesting_does_not_overflow_the_stack() {
        let depth = 50_000;
        let _ = parse_status(&format!("{}{}", "<a>".repeat(depth), "</a>".repeat(depth)));
        let inside = format!("{}{}</name>", "<a>".repeat(depth), "</a>".repeat(depth));
        let _ = parse_status(&STATUS.replace("</name>", &inside));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,300}") {
            let _ = parse_status(&text);
        }

        #[test]
        fn no_damage_to_a_good_text_makes_it_panic(
            at in 0..STATUS.len(),
            cut in 0..40usize,
            put in "[<>'\"&;/a0]{0,3}",
        ) {
            let mut bytes = STATUS.as_bytes().to_vec();
            let end = (at + cut).min(bytes.len());
            bytes.splice(at..end, put.bytes());
            let _ = parse_status(&String::from_utf8_lossy(&bytes));
        }
    }
}
