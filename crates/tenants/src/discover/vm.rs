//! One VM: from its process to a tenant.

use std::collections::BTreeSet;

use super::{Finder, Found, main_thread};
use crate::class::Class;
use crate::container;
use crate::host::Process;
use crate::libvirt::Domain;
use crate::model::{Kind, ThreadRole, Vnic};
use crate::problem::ProblemKind;
use crate::proc::{Stat, printable};
use crate::qmp::VcpuThreads;
use crate::rules::{Namer, Verdict};
use crate::thread::ThreadId;
use crate::vmm::{self, QemuArguments, Vmm};
use crate::vnic;

/// A process that is a VM, and what its command line says.
pub(super) struct VmProcess<'a> {
    process: &'a Process,
    vmm: Vmm,
    domain: Option<&'a Domain>,
    line: Vec<String>,
    arguments: QemuArguments,
}

impl<'a> VmProcess<'a> {
    /// Whether a process is a VM. `domain` is the libvirt domain that claims its number.
    pub(super) fn of(finder: &Finder<'_>, process: &'a Process, domain: Option<&'a Domain>) -> Option<Self> {
        let by_name = Vmm::of_executable(&process.executable);
        if by_name.is_none() && domain.is_none() {
            return None;
        }
        let line = finder.sources.arguments(process.pid);
        let arguments = vmm::qemu_arguments(&line);
        // After a crash of libvirt its files may name a process number that somebody else has now.
        let domain = domain.filter(|domain| {
            arguments.name.as_deref() == Some(&domain.name)
                || (arguments.uuid.is_some() && arguments.uuid == domain.uuid)
        });
        let vmm = by_name.or(domain.map(|_| Vmm::Qemu))?;
        let arguments = if vmm == Vmm::Qemu { arguments } else { QemuArguments::default() };
        Some(Self { process, vmm, domain, line, arguments })
    }

    fn name(&self) -> String {
        let given = || self.arguments.name.clone().or_else(|| vmm::other_name(&self.line));
        match self.domain {
            Some(domain) => domain.name.clone(),
            None => given()
                .filter(|name| !name.is_empty())
                .map_or_else(|| format!("vm-{}", self.process.pid), |name| printable(name.as_bytes())),
        }
    }

    fn uuid(&self) -> Option<String> {
        let uuid = self.domain.map_or(self.arguments.uuid.as_ref(), |domain| domain.uuid.as_ref())?;
        Some(printable(uuid.as_bytes()))
    }

    fn kind(&self) -> Kind {
        match (self.domain, self.vmm) {
            (Some(_), _) => Kind::Libvirt,
            (None, Vmm::Qemu) => Kind::Qemu,
            (None, Vmm::Other(_)) => Kind::Vmm,
        }
    }

    /// Its own cgroup: libvirt's scope, or where it is the only process.
    fn own_cgroup(&self, alone: bool) -> Option<String> {
        let path = self.process.cgroup.as_deref()?;
        match container::libvirt_scope(path) {
            Some(scope) => Some(scope.to_owned()),
            None => (alone && path != "/").then(|| path.to_owned()),
        }
    }
}

impl Finder<'_> {
    /// Takes a VM in; `alone` says that no other process is in its cgroup.
    pub(super) fn vm(&mut self, vm: &VmProcess<'_>, alone: bool) {
        let pid = vm.process.pid;
        let stats = self.sources.threads(pid);
        let Some(process) = main_thread(pid, &stats) else { return };
        let cgroup = vm.process.cgroup.clone();
        let owner = match vm.domain {
            Some(_) => 0,
            // Where the owner cannot be read, it must not count as root.
            None => self.sources.owner(pid).unwrap_or(u32::MAX),
        };
        let contained = vm.domain.is_none() && cgroup.as_deref().is_some_and(|path| container::of_path(path).is_some());
        let found = Found {
            name: vm.name(),
            uuid: vm.uuid(),
            kind: vm.kind(),
            owner,
            namer: if contained { Namer::Container } else { Namer::User(owner) },
            process,
            cgroup,
            own_cgroup: vm.own_cgroup(alone),
        };
        let metadata = vm.domain.and_then(|domain| self.metadata(domain));
        let decision = self.decide(&found, metadata);
        if decision.class != Class::Bulk && vm.vmm == Vmm::Qemu {
            for delay in vmm::delays(&vm.line) {
                self.problem(&found.name, ProblemKind::Delay(delay));
            }
        }
        let roles = self.roles(&found.name, process, vm, &stats, decision.class);
        let threads = stats.iter().zip(roles).map(|(stat, role)| self.thread(pid, stat, role, vm.domain)).collect();
        let vnics = self.vnics(&found.name, vm);
        self.tenants.push(found.into_tenant(decision, threads, vnics));
    }

    fn metadata(&mut self, domain: &Domain) -> Option<Verdict> {
        match domain.metadata.clone()? {
            Ok(verdict) => Some(verdict),
            Err(what) => {
                self.problem(&domain.name, ProblemKind::BadMetadata(what));
                None
            }
        }
    }

    /// What each thread does: by its name, and where names do not tell the vCPUs, by other means.
    fn roles(
        &mut self,
        name: &str,
        process: ThreadId,
        vm: &VmProcess<'_>,
        stats: &[Stat],
        class: Class,
    ) -> Vec<ThreadRole> {
        let mut roles: Vec<ThreadRole> = stats.iter().map(|stat| vm.vmm.role(stat)).collect();
        let by_name = |role: &ThreadRole| matches!(role, ThreadRole::Vcpu(_));
        let vcpus = match vm.domain.map(|domain| &domain.vcpu_tids) {
            // libvirt learnt them from QEMU at start: a thread that names itself so later is none.
            Some(recorded) if !recorded.is_empty() => recorded.clone(),
            _ if roles.iter().any(by_name) => return unique_vcpus(roles),
            Some(_) => return roles,
            None => self.unnamed_vcpus(name, process, vm, stats, class),
        };
        for (stat, role) in stats.iter().zip(roles.iter_mut()) {
            match vcpus.get(&stat.tid).filter(|_| stat.tid != process.tid) {
                Some(number) => *role = ThreadRole::Vcpu(*number),
                None if by_name(role) => *role = ThreadRole::Emulator,
                None => {}
            }
        }
        roles
    }

    /// By the monitor, where it matters; else by the time that threads ran a guest.
    fn unnamed_vcpus(
        &mut self,
        name: &str,
        process: ThreadId,
        vm: &VmProcess<'_>,
        stats: &[Stat],
        class: Class,
    ) -> VcpuThreads {
        // A bulk VM's vCPUs are left alone, so nobody's monitor is bothered for them. That also keeps users' processes, which are
        // bulk unless the administrator says otherwise, from holding discovery up.
        // A QEMU with its main and RCU threads only has not made its vCPUs yet.
        let mut why = None;
        if class != Class::Bulk && stats.len() > 2 {
            let alive: Vec<i32> = stats.iter().map(|stat| stat.tid).collect();
            let answer = match (vm.vmm, self.sources.live) {
                (Vmm::Qemu, true) => self.sources.monitors.vcpus(process, &alive, &vm.arguments.qmp_sockets),
                _ => Err("no thread has a vCPU's name".to_owned()),
            };
            match answer {
                Ok(vcpus) => return vcpus,
                Err(error) => why = Some(error),
            }
        }
        let mut ran_guest: Vec<i32> =
            stats.iter().filter(|stat| stat.guest_time > 0 && stat.tid != process.tid).map(|stat| stat.tid).collect();
        // QEMU makes them in the order of their numbers.
        ran_guest.sort_unstable();
        if let Some(why) = why {
            let told = format!("{why}; taken by guest time: {} threads, idle ones may be missing", ran_guest.len());
            self.problem(name, ProblemKind::VcpusUnnamed { vmm: vm.vmm, why: told });
        }
        ran_guest.into_iter().zip(0..).collect()
    }

    fn vnics(&mut self, name: &str, vm: &VmProcess<'_>) -> Vec<Vnic> {
        let pid = vm.process.pid;
        let (interfaces, is_here) = match vm.domain.and_then(|domain| domain.interfaces.clone()) {
            Some(interfaces) => (interfaces, true),
            None => {
                let open = vnic::of_open_files(&self.sources.process_dir(pid), &self.network);
                // In a namespace of its own anybody may name interfaces like the host's.
                let is_here = self.sources.own_network(pid).is_none();
                (open.unwrap_or_else(|_| vm.arguments.interfaces.clone()), is_here)
            }
        };
        let (here, elsewhere): (Vec<_>, Vec<_>) =
            interfaces.into_iter().partition(|ifname| is_here && self.network.has(ifname));
        for ifname in elsewhere {
            self.problem(name, ProblemKind::VnicElsewhere(printable(ifname.as_bytes())));
        }
        here.iter().map(|ifname| self.network.vnic(ifname)).collect()
    }
}

/// A VM has one thread for each vCPU number. A QEMU that a guest has taken over could name others alike, to have more threads
/// at real-time priority than its caps count.
fn unique_vcpus(mut roles: Vec<ThreadRole>) -> Vec<ThreadRole> {
    let mut seen = BTreeSet::new();
    for role in &mut roles {
        if matches!(role, ThreadRole::Vcpu(number) if !seen.insert(*number)) {
            *role = ThreadRole::Emulator;
        }
    }
    roles
}
