//! Problems that discovery reports, with remedies.

use std::fmt;

use serde::{Serialize, Serializer, ser::SerializeStruct};

use crate::conflict::Conflict;
use crate::rules::Namer;
use crate::text::counted;
use crate::vmm::{Delay, Vmm};

/// A problem that an administrator should know about. Discovery continues.
///
/// Serialises as `{subject, kind, message, remedy}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The tenant, process or file.
    pub subject: String,
    /// What is wrong with the subject.
    pub kind: ProblemKind,
}

/// Kinds of problems.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProblemKind {
    /// A file or process cannot be read.
    Unreadable(String),
    /// A libvirt status file exists, but its QEMU process does not.
    StaleDomain(i32),
    /// A libvirt status file is invalid.
    BadStatus(String),
    /// Ontime's `<metadata>` of a domain is invalid. The domain is treated as if it had none.
    BadMetadata(String),
    /// A VM's vCPU threads cannot be identified.
    VcpusUnnamed {
        /// The program that runs the VM.
        vmm: Vmm,
        /// Why its threads could not be told apart.
        why: String,
    },
    /// An RT rule (`FILE:LINE`) matches only a name that an unprivileged user chose.
    RuleWithheld {
        /// The user or container that chose the name.
        rule: String,
        /// Who chose.
        namer: Namer,
    },
    /// An interface of the VM is not in the host's network namespace.
    VnicElsewhere(String),
    /// An RT VM's QEMU has options that delay its guest's requests.
    Delay(Delay),
    /// Two tenants have the same name.
    SameName,
    /// An unprivileged tenant uses the name of a root tenant and is renamed in Ontime's output.
    NameTaken(String),
    /// No running tenant fits an RT rule, an override, or a bulk rule before an RT rule.
    RuleUnused {
        /// What no tenant does, or how the nearest one fails the rule.
        what: String,
        /// Containers whose name no runtime has recorded, if no tenant fits the rule's `name`.
        unnamed: Vec<Unnamed>,
    },
    /// Containers of an unknown runtime without a recorded name.
    RuntimeUnknown,
    /// A container that root started in this cgroup, which is not known as a container's.
    NoOwnCgroup(String),
    /// Number of processes in containers that are only in cgroup v1 hierarchies.
    CgroupV1(usize),
    /// A container runtime's record is not used, and why.
    RecordUnread(String),
    /// Some data was not read completely because of the limits per user or container.
    NotRead(String),
    /// Settings that conflict with the priority table.
    Conflict(Conflict),
}

/// A container whose name is unknown.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unnamed {
    /// The first digits of its identifier, which replace its name.
    pub digits: String,
    /// Its user. Only root's records are read.
    pub user: u32,
}

impl fmt::Display for Unnamed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.user {
            0 => f.write_str(&self.digits),
            user => write!(f, "{} of user {user}", self.digits),
        }
    }
}

impl Problem {
    pub(crate) fn new(subject: impl Into<String>, kind: ProblemKind) -> Self {
        Self { subject: subject.into(), kind }
    }

    /// Whether tenants may be missing because of it.
    pub fn hides_tenants(&self) -> bool {
        matches!(self.kind, ProblemKind::Unreadable(_) | ProblemKind::CgroupV1(_) | ProblemKind::NoOwnCgroup(_))
    }

    /// What the administrator can do about it.
    pub fn remedy(&self) -> String {
        match &self.kind {
            // Do not advise root to become root.
            ProblemKind::Unreadable(_) if rustix::process::geteuid().is_root() => {
                "this is root without CAP_SYS_PTRACE or CAP_DAC_OVERRIDE: run it on the host, not in a container"
                    .to_owned()
            }
            ProblemKind::Unreadable(_) => "run as root, on the host and not in a container".to_owned(),
            ProblemKind::StaleDomain(_) => {
                "wait a moment; if it stays, libvirt has lost track of the domain: systemctl restart libvirtd (or \
                 virtqemud)"
                    .to_owned()
            }
            ProblemKind::BadStatus(_) => "check the file; libvirt rewrites it when the domain changes".to_owned(),
            ProblemKind::BadMetadata(_) => {
                "correct it with `virsh metadata DOMAIN https://ontime.dev/xmlns/tenant/1 --edit --live --config`"
                    .to_owned()
            }
            ProblemKind::VcpusUnnamed { vmm, .. } => vmm.naming(),
            ProblemKind::RuleWithheld { namer: Namer::User(user), .. } => {
                format!("add `user = {user}` to the rule, if this user may have real-time priority")
            }
            ProblemKind::RuleWithheld { namer: Namer::Container, .. } => {
                "add the container's `cgroup` to the rule, if what runs in there may have real-time priority".to_owned()
            }
            ProblemKind::VnicElsewhere(_) => {
                "nothing, if that is meant; else move the interface here: its path elsewhere is not covered".to_owned()
            }
            ProblemKind::Delay(delay) => delay.remedy(),
            ProblemKind::SameName => {
                "give them different names: metrics and rules go by name (for pods of one name, a rule may say \
                 NAMESPACE/POD/CONTAINER)"
                    .to_owned()
            }
            ProblemKind::NameTaken(_) => "give it another name".to_owned(),
            ProblemKind::RuleUnused { unnamed, .. } if unnamed.is_empty() => {
                "start the tenant, or correct the rule: `ontime ps --json` has names, kinds, UUIDs and cgroups"
                    .to_owned()
            }
            ProblemKind::RuleUnused { unnamed, .. } => {
                let own = "if it means one of these, give the rule its `cgroup` (`ontime ps --json`) or these digits \
                           for `name`";
                match unnamed.iter().find(|container| container.user != 0) {
                    Some(Unnamed { user, .. }) => format!(
                        "{own}; a user's container takes `user = {user}` as well, and can be started in a slice to be \
                         named by (docker run --cgroup-parent=NAME.slice)"
                    ),
                    None => own.to_owned(),
                }
            }
            ProblemKind::RuntimeUnknown => {
                "give rules for it by `cgroup`, or by the first 12 digits of its identifier as `name`".to_owned()
            }
            ProblemKind::NoOwnCgroup(cgroup) => {
                let own = "start it with a cgroup of its own (podman without --cgroups=disabled, LXC without \
                           lxc.cgroup.dir.container)";
                // A rule for the root would be one for every process.
                let by_rule = "; where nothing else runs in this cgroup, a rule may name it instead (`cgroup`)";
                format!("{own}{}", if cgroup == "/" { "" } else { by_rule })
            }
            ProblemKind::CgroupV1(_) => {
                "boot with cgroup v2 alone (systemd.unified_cgroup_hierarchy=1 on the kernel's command line)".to_owned()
            }
            ProblemKind::RecordUnread(_) => {
                "remove containers that are no longer needed, if the file is too large (podman container prune), or \
                 restart the runtime, which writes it anew; until then give rules for these containers by `cgroup`"
                    .to_owned()
            }
            ProblemKind::NotRead(_) => {
                "end processes that are not needed, or spread them over several users or containers: each has a quota \
                 of its own"
                    .to_owned()
            }
            ProblemKind::Conflict(conflict) => conflict.remedy().to_owned(),
        }
    }

    /// The kind as a machine-readable word.
    pub fn word(&self) -> &'static str {
        match &self.kind {
            ProblemKind::Unreadable(_) => "unreadable",
            ProblemKind::StaleDomain(_) => "stale-domain",
            ProblemKind::BadStatus(_) => "bad-status",
            ProblemKind::BadMetadata(_) => "bad-metadata",
            ProblemKind::VcpusUnnamed { .. } => "vcpus-unnamed",
            ProblemKind::RuleWithheld { .. } => "rule-withheld",
            ProblemKind::VnicElsewhere(_) => "vnic-elsewhere",
            ProblemKind::Delay(_) => "vmm-settings",
            ProblemKind::SameName => "same-name",
            ProblemKind::NameTaken(_) => "name-taken",
            ProblemKind::RuleUnused { .. } => "rule-unused",
            ProblemKind::RuntimeUnknown => "runtime-unknown",
            ProblemKind::NoOwnCgroup(_) => "no-own-cgroup",
            ProblemKind::CgroupV1(_) => "cgroup-v1",
            ProblemKind::RecordUnread(_) => "record-unread",
            ProblemKind::NotRead(_) => "not-read",
            ProblemKind::Conflict(Conflict::AbovePath { .. }) => "above-path",
            ProblemKind::Conflict(Conflict::BelowKernel { .. }) => "below-kernel",
            ProblemKind::Conflict(Conflict::BulkAtRealTime { .. }) => "bulk-at-real-time",
            ProblemKind::Conflict(Conflict::VhostApart { .. }) => "vhost-apart",
            ProblemKind::Conflict(Conflict::SharedCpu { .. }) => "shared-cpu",
        }
    }

    /// The message without the subject.
    pub fn message(&self) -> String {
        match &self.kind {
            ProblemKind::Unreadable(what) => what.clone(),
            ProblemKind::StaleDomain(pid) => {
                format!(
                    "libvirt's file says that process {pid} runs it, which is no QEMU of that name that libvirt \
                     started: another program, another user's, one in a container, or one that was started after the \
                     file was written"
                )
            }
            ProblemKind::BadStatus(what) => format!("not a libvirt status file: {what}"),
            ProblemKind::BadMetadata(what) => format!("its Ontime metadata is not used: {what}"),
            ProblemKind::VcpusUnnamed { why, .. } => format!("its vCPU threads cannot be told from the others: {why}"),
            ProblemKind::RuleWithheld { rule, namer } => {
                let who = match namer {
                    Namer::User(user) => format!("user {user}"),
                    Namer::Container => "a process in a container".to_owned(),
                };
                format!("rule {rule} is not applied: it matches only a name that {who} chose")
            }
            ProblemKind::VnicElsewhere(ifname) => format!("its interface `{ifname}` is not in this network namespace"),
            ProblemKind::Delay(delay) => delay.to_string(),
            ProblemKind::SameName => "another tenant has the same name".to_owned(),
            ProblemKind::NameTaken(name) => {
                format!("its name is `{name}`, as that of a tenant that root started; Ontime shows it under another")
            }
            ProblemKind::RuleUnused { what, unnamed } => {
                let (users, systems): (Vec<&Unnamed>, Vec<&Unnamed>) =
                    unnamed.iter().partition(|container| container.user != 0);
                let mut said = format!("no tenant that runs {what}");
                if !systems.is_empty() {
                    said += &format!("; no runtime has a name on record for {}", listed(&systems));
                }
                if !users.is_empty() {
                    let whose = listed(&users);
                    said += &format!("; names are not known of {whose}: what users' runtimes record is not read");
                }
                said
            }
            ProblemKind::RuntimeUnknown => {
                "a container, by the identifier in its cgroup's path, whose runtime is unknown".to_owned()
            }
            ProblemKind::NoOwnCgroup(cgroup) => format!(
                "this container is no tenant: its program runs in cgroup {cgroup}, which no form identifies as a \
                 container's and no rule names"
            ),
            ProblemKind::CgroupV1(count) => {
                let (these, are) = (counted(*count, "process"), if *count == 1 { "is" } else { "are" });
                format!(
                    "{these} {are} in containers by cgroup v1 alone, which is not read: these containers are not found"
                )
            }
            ProblemKind::RecordUnread(why) => format!(
                "a container runtime's record that is not used: {why}; containers that it names have the first digits \
                 of their identifiers for names"
            ),
            ProblemKind::NotRead(what) => {
                format!("not read whole: {what}; virtual NICs and threads of these may be missing")
            }
            ProblemKind::Conflict(conflict) => conflict.to_string(),
        }
    }
}

/// The first few names, and how many more there are.
fn listed(names: &[&Unnamed]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<String> = names.iter().take(SHOWN).map(ToString::to_string).collect();
    let shown = shown.join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.subject, self.message(), self.remedy())
    }
}

impl Serialize for Problem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("Problem", 4)?;
        out.serialize_field("subject", &self.subject)?;
        out.serialize_field("kind", self.word())?;
        out.serialize_field("message", &self.message())?;
        out.serialize_field("remedy", &self.remedy())?;
        out.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind after this one. A kind of its own has to be entered here.
    fn after(kind: &ProblemKind) -> Option<ProblemKind> {
        use crate::class::Policy;
        let (thread, policy) = ("CPU 3/KVM".to_owned(), Policy::Fifo(80));
        let user = |user| Unnamed { digits: "0123456789ab".to_owned(), user };
        let unused = |unnamed| ProblemKind::RuleUnused { what: "has a name like `plc-*`".to_owned(), unnamed };
        let above = |by_libvirt| {
            let (thread, limit) = (thread.clone(), Policy::Fifo(50));
            ProblemKind::Conflict(Conflict::AbovePath { thread, policy, limit, by_libvirt })
        };
        Some(match kind {
            ProblemKind::Unreadable(_) => ProblemKind::StaleDomain(812),
            ProblemKind::StaleDomain(_) => ProblemKind::BadStatus("it has no element <domstatus>".to_owned()),
            ProblemKind::BadStatus(_) => ProblemKind::BadMetadata("it has no class `fast`".to_owned()),
            ProblemKind::BadMetadata(_) => {
                ProblemKind::VcpusUnnamed { vmm: Vmm::Qemu, why: "QEMU closed the connection".to_owned() }
            }
            ProblemKind::VcpusUnnamed { vmm: Vmm::Qemu, why } => {
                let (vmm, _) = Vmm::of_executable("/usr/bin/firecracker").unwrap();
                ProblemKind::VcpusUnnamed { vmm, why: why.clone() }
            }
            ProblemKind::VcpusUnnamed { .. } => {
                ProblemKind::RuleWithheld { rule: "tenants.toml:4".to_owned(), namer: Namer::User(1000) }
            }
            ProblemKind::RuleWithheld { rule, namer: Namer::User(_) } => {
                ProblemKind::RuleWithheld { rule: rule.clone(), namer: Namer::Container }
            }
            ProblemKind::RuleWithheld { .. } => ProblemKind::VnicElsewhere("tap7".to_owned()),
            ProblemKind::VnicElsewhere(_) => ProblemKind::Delay(Delay::NoIrqchip),
            ProblemKind::Delay(Delay::NoIrqchip) => ProblemKind::Delay(Delay::NoVectors("virtio-net-pci".to_owned())),
            ProblemKind::Delay(Delay::NoVectors(device)) => ProblemKind::Delay(Delay::NoDoorbell(device.clone())),
            ProblemKind::Delay(Delay::NoDoorbell(_)) => ProblemKind::Delay(Delay::HiddenIdle),
            ProblemKind::Delay(Delay::HiddenIdle) => ProblemKind::SameName,
            ProblemKind::SameName => ProblemKind::NameTaken("plc".to_owned()),
            ProblemKind::NameTaken(_) => unused(Vec::new()),
            ProblemKind::RuleUnused { unnamed, .. } if unnamed.is_empty() => unused(vec![user(0)]),
            ProblemKind::RuleUnused { unnamed, .. } if unnamed.len() == 1 => unused(vec![user(0), user(1000)]),
            ProblemKind::RuleUnused { .. } => ProblemKind::RuntimeUnknown,
            ProblemKind::RuntimeUnknown => ProblemKind::NoOwnCgroup("/plc".to_owned()),
            ProblemKind::NoOwnCgroup(_) => ProblemKind::CgroupV1(2),
            ProblemKind::CgroupV1(_) => ProblemKind::RecordUnread("it has 7 MiB, of which 4 may be read".to_owned()),
            ProblemKind::RecordUnread(_) => ProblemKind::NotRead("9000 threads of 2 processes".to_owned()),
            ProblemKind::NotRead(_) => above(true),
            ProblemKind::Conflict(Conflict::AbovePath { by_libvirt: true, .. }) => above(false),
            ProblemKind::Conflict(Conflict::AbovePath { .. }) => {
                ProblemKind::Conflict(Conflict::BelowKernel { thread, policy })
            }
            ProblemKind::Conflict(Conflict::BelowKernel { .. }) => {
                ProblemKind::Conflict(Conflict::BulkAtRealTime { thread, policy })
            }
            ProblemKind::Conflict(Conflict::BulkAtRealTime { .. }) => {
                let (vhost, vhost_cpus, vcpu_cpus) = ("vhost-812".to_owned(), "0-1".to_owned(), "2-3".to_owned());
                ProblemKind::Conflict(Conflict::VhostApart { vhost, vhost_cpus, vcpu_cpus })
            }
            ProblemKind::Conflict(Conflict::VhostApart { .. }) => {
                ProblemKind::Conflict(Conflict::SharedCpu { cpu: 3, other: "plc-2".to_owned() })
            }
            ProblemKind::Conflict(Conflict::SharedCpu { .. }) => return None,
        })
    }

    /// The remedy is an instruction, and neither part has a word that names no thing.
    #[test]
    fn every_problem_names_its_thing_the_cause_and_what_to_do() {
        const ORDERS: [&str; 20] = [
            "add", "boot", "check", "correct", "end", "give", "let", "nothing", "pin", "remove", "run", "start",
            "take", "this", "wait", "write", "move", "free", "set", "if",
        ];
        let first = ProblemKind::Unreadable("Permission denied".to_owned());
        let mut words = std::collections::BTreeSet::new();
        for kind in std::iter::successors(Some(first), after) {
            let problem = Problem::new("web", kind);
            words.insert(problem.word());
            let (message, remedy) = (problem.message(), problem.remedy());
            assert!(problem.to_string().starts_with("web: ") && message.len() > 10, "{problem}");
            let first = remedy.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap();
            assert!(ORDERS.contains(&first) && remedy.len() > 10, "{problem}");
            let text = problem.to_string();
            assert!(!["anybody", "somebody", "nobody", "whoever"].iter().any(|word| text.contains(word)), "{text}");
        }
        assert_eq!(words.len(), 21, "{words:?}");
    }

    #[test]
    fn a_rule_is_no_remedy_for_a_container_in_the_root() {
        for (cgroup, by_rule) in [("/", false), ("/user.slice/user-0.slice/session-7.scope", true)] {
            let remedy = Problem::new("web", ProblemKind::NoOwnCgroup(cgroup.to_owned())).remedy();
            assert!(remedy.starts_with("start it with a cgroup of its own (podman"), "{remedy}");
            assert_eq!(remedy.contains("where nothing else runs in this cgroup, a rule"), by_rule, "{remedy}");
        }
    }

    #[test]
    fn root_is_not_told_to_become_root() {
        let remedy = Problem::new("/proc", ProblemKind::Unreadable("denied".to_owned())).remedy();
        assert_eq!(remedy.starts_with("run as root"), !rustix::process::geteuid().is_root(), "{remedy}");
        assert!(remedy.contains("on the host"), "{remedy}");
    }
}
