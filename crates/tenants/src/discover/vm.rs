//! A VM: from its process to a tenant.

use std::collections::{BTreeMap, BTreeSet};

use super::{Finder, Found};
use crate::budget::{Account, Item};
use crate::class::Class;
use crate::container::{self, Container, Identity, Machine, ancestors};
use crate::host::Process;
use crate::libvirt::Domain;
use crate::model::{Kind, ThreadRole, Vnic};
use crate::problem::ProblemKind;
use crate::proc::{Stat, printable};
use crate::qmp::VcpuThreads;
use crate::rules::{Namer, Verdict};
use crate::text::counted;
use crate::thread::ThreadId;
use crate::vmm::{self, NameMatch, QemuArguments, Vmm};
use crate::{tap, vnic};

/// A process that is a VM's monitor, and its command line.
pub(super) struct VmProcess<'a> {
    pub(super) process: &'a Process,
    pub(super) vmm: Vmm,
    domain: Option<&'a Domain>,
    /// The cgroup that was created for it.
    scope: Option<String>,
    /// Name and unit of the machine that machined has recorded for it.
    machine: Option<(String, String)>,
    /// The cgroup of the container around it.
    pub(super) container: Option<String>,
    account: Account,
    line: Vec<String>,
    arguments: QemuArguments,
    /// The name on its command line.
    given_name: Option<String>,
}

impl<'a> VmProcess<'a> {
    /// Checks whether a process is a VM's monitor. `domain` is the libvirt domain with this process number.
    pub(super) fn of(finder: &mut Finder<'_>, process: &'a Process, domain: Option<&'a Domain>) -> Option<Self> {
        let named = Vmm::of_executable(&process.executable);
        let path = process.cgroup.as_deref().unwrap_or("/");
        let scope = finder.vm_scope(path, matches!(named, Some((_, NameMatch::Sure))));
        let container = match scope {
            Some(_) => None,
            None => finder.container_at(path).map(|container| container.cgroup),
        };
        if named.is_none() && domain.is_none() && (container.is_some() || !finder.may_run_a_guest(process)) {
            return None;
        }
        let account = match domain {
            Some(_) => Account::System,
            None => finder.account(process, container.as_deref()),
        };
        if !finder.budget.admits(&account) {
            return None;
        }
        let line = finder.arguments(process.pid, &account);
        // Xen's device model: Xen runs the guest.
        let is_xens = line.iter().any(|word| matches!(word.as_str(), "-xen-domid" | "--xen-domid"));
        if is_xens || vmm::has_no_machine(&line) {
            return None;
        }
        let arguments = vmm::qemu_arguments(&line);
        let domain = domain.filter(|domain| finder.is_domains(process, domain, &arguments, container.is_some()));
        let vmm = match (named, domain) {
            (Some((vmm, NameMatch::Sure)), _) => vmm,
            (_, Some(_)) => Vmm::Qemu,
            (named, None) => finder.monitor_by_its_guest(process.pid, &account, named.map(|(vmm, _)| vmm))?,
        };
        let arguments = match vmm {
            Vmm::Qemu => arguments,
            Vmm::Other(_) => QemuArguments { uuid: vmm::other_uuid(&line), ..QemuArguments::default() },
        };
        // QEMU's `-name` may have no name (`-name debug-threads=on`).
        let is_read = vmm == Vmm::Qemu && line.iter().any(|word| matches!(word.as_str(), "-name" | "--name"));
        let other_name = || vmm::other_name(&line).filter(|_| !is_read);
        let given_name = arguments.name.clone().or_else(other_name);
        let machine = if container.is_none() { finder.machine_around(path) } else { None };
        Some(Self { process, vmm, domain, scope, machine, container, account, line, arguments, given_name })
    }

    /// Whether its command line says that it is the VM of the pod sandbox with this identifier: `-name sandbox-ID`, or
    /// a file in a directory of that name (Kata Containers: `virtcontainers/qemu.go`; `/run/vc/vm/ID/clh-api.sock`).
    fn is_of_sandbox(&self, id: &str) -> bool {
        let named = |name: &String| name.strip_prefix("sandbox-") == Some(id);
        self.given_name.as_ref().is_some_and(named) || self.line.iter().any(|word| word.split('/').any(|at| at == id))
    }

    /// `instance`: of its unit, which is its alone.
    fn name(&self, instance: Option<String>) -> String {
        match self.domain {
            Some(domain) => domain.name.clone(),
            None => self
                .given_name
                .as_ref()
                .filter(|name| !name.is_empty())
                .map(|name| printable(name.as_bytes()))
                .or_else(|| self.machine_name())
                .or(instance)
                .unwrap_or_else(|| format!("vm-{}", self.process.pid)),
        }
    }

    /// The name in machined's record, or the one from which its unit's name was made. libvirt puts driver and number
    /// before the name that it records.
    fn machine_name(&self) -> Option<String> {
        let derived = || container::name_of_scope(self.scope.as_deref()?);
        let is_libvirts = self.scope.as_deref().is_some_and(|scope| container::libvirt_scope(scope).is_some());
        let recorded = self.machine.as_ref().filter(|_| !is_libvirts).map(|(name, _)| name.clone());
        recorded.or_else(derived)
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

    /// The VM's own cgroup: the scope created for it, or its cgroup if no other process is in it.
    fn own_cgroup(&self, alone: bool) -> Option<String> {
        let path = self.process.cgroup.as_deref()?;
        let made_for_it = self.scope.as_ref().or(self.machine.as_ref().map(|(_, unit)| unit));
        made_for_it.cloned().or_else(|| (alone && path != "/").then(|| path.to_owned()))
    }
}

impl Finder<'_> {
    /// The cgroup that was created for the VM whose monitor is at this path. machined knows whether a machine is a VM
    /// or a container; without its record the cgroups below the machine's unit tell: a container's processes are in
    /// `payload`, or in their own manager's units. `is_sure`: the process at this path is a monitor by its program's
    /// name.
    fn vm_scope(&mut self, path: &str, is_sure: bool) -> Option<String> {
        if let Some(scope) = container::vm_scope(path) {
            let is_containers = self.machine_of(scope).is_some_and(|machine| machine.is_vm == Some(false));
            return (!is_containers).then(|| scope.to_owned());
        }
        let Container { cgroup, id: Identity::Machine { .. } } = container::of_path(path)? else { return None };
        let child = path.get(cgroup.len()..)?.split('/').nth(1)?;
        let is_plain = !matches!(child, "payload" | "supervisor") && !child.contains('.');
        let is_vm = self.machine_of(&cgroup).and_then(|machine| machine.is_vm);
        is_vm.unwrap_or(is_sure && is_plain && self.sources.cgroup_owner(path, true) == 0).then_some(cgroup)
    }

    /// The machine for which machined, which is root's, has recorded this unit.
    pub(super) fn machine_of(&mut self, unit: &str) -> Option<Machine> {
        // Users name any number of units below their slices.
        let machine = match container::owner_of_path(unit) {
            0 => self.names.machine(unit.rsplit('/').next()?)?,
            _ => return None,
        };
        (self.sources.cgroup_owner(unit, false) == 0).then_some(machine)
    }

    /// Name and unit of the innermost machine around a monitor that machined has recorded and does not call a
    /// container. Units inside a container were named there.
    fn machine_around(&mut self, path: &str) -> Option<(String, String)> {
        let outermost = container::of_path(path).map_or(path.len(), |container| container.cgroup.len());
        let units = ancestors(path).filter(|part| part.len() <= outermost && container::is_unit(part));
        let recorded = units.filter_map(|unit| Some((self.machine_of(unit)?, unit)));
        let (machine, unit) = recorded.filter(|(machine, _)| machine.is_vm != Some(false)).last()?;
        Some((machine.name, unit.to_owned()))
    }

    /// Whether a process is the domain's QEMU, and not another process that got its number after a crash of libvirt.
    /// The process must have the domain's name or UUID on its command line and run as the domain's user. In addition it
    /// must be in a cgroup that libvirt created, or be outside users' cgroups and containers and older than the status
    /// file.
    fn is_domains(&self, process: &Process, domain: &Domain, arguments: &QemuArguments, contained: bool) -> bool {
        let called_so = arguments.name.as_deref() == Some(&domain.name)
            || (arguments.uuid.is_some() && arguments.uuid == domain.uuid);
        if !called_so || domain.user.is_some_and(|user| self.sources.owner(process.pid) != Some(user)) {
            return false;
        }
        let path = process.cgroup.as_deref().unwrap_or("/");
        if let Some(scope) = container::libvirt_scope(path) {
            return self.sources.cgroup_owner(scope, false) == 0;
        }
        let systems = !contained && self.sources.cgroup_owner(path, true) == 0;
        let started_later = || {
            let process = self.sources.identity(process.pid)?;
            self.sources.started_after(process, domain.written?)
        };
        systems && started_later() != Some(true)
    }

    /// Whether a process outside containers may be a monitor, whatever its program's name: it has run a guest, or it is
    /// new and has a vCPU among its first threads.
    fn may_run_a_guest(&mut self, process: &Process) -> bool {
        let pid = process.pid;
        let (has_run, is_new) = self.sources.has_run_a_guest(pid, self.uptime);
        if has_run || !is_new {
            return has_run;
        }
        let account = self.account(process, None);
        let limit = self.budget.allowed(&account, Item::NewThreads);
        let stats = if limit > 0 { self.sources.threads(pid, limit).0 } else { Vec::new() };
        // What is not read is no problem: it is no VM, or one that is found later.
        self.budget.charge(&account, Item::NewThreads, stats.len(), true);
        stats.iter().any(|stat| stat.guest_time > 0 || vmm::vcpu_number(&stat.comm).is_some())
    }

    /// The monitor of a process whose program's name is not conclusive: it must have threads with vCPU names (if the
    /// name is likely), or descriptors of KVM.
    fn monitor_by_its_guest(&mut self, pid: i32, account: &Account, likely: Option<Vmm>) -> Option<Vmm> {
        let stats = self.threads(pid, account);
        let by_threads = likely.is_some() && stats.iter().any(|stat| vmm::vcpu_number(&stat.comm).is_some());
        if !by_threads && !self.holds_kvm(pid, account) {
            return None;
        }
        Some(likely.unwrap_or_else(|| Vmm::of_threads(stats.iter().map(|stat| stat.comm.as_str()))))
    }

    fn holds_kvm(&mut self, pid: i32, account: &Account) -> bool {
        let limit = self.budget.allowed(account, Item::Descriptors);
        let Ok(open) = vnic::open_files(&self.sources.living_dir(pid), limit) else { return false };
        self.budget.charge(account, Item::Descriptors, open.looked_at, open.whole);
        open.targets.iter().any(|(_, target)| target.starts_with("anon_inode:kvm-v"))
    }

    /// Adds a VM as a tenant. `alone`: no other process is in its cgroup. `monitors`: the processes that are VMs.
    /// Returns false if it is only a helper that a monitor forked.
    pub(super) fn vm(&mut self, vm: &VmProcess<'_>, alone: bool, monitors: &BTreeMap<i32, Vmm>) -> bool {
        let pid = vm.process.pid;
        let Some(main) = self.sources.main_thread(pid) else { return true };
        if vm.domain.is_none() && monitors.get(&main.ppid) == Some(&vm.vmm) {
            let stats = self.threads(pid, &vm.account);
            if !stats.iter().any(|stat| matches!(vm.vmm.role(stat), ThreadRole::Vcpu(_))) {
                return false;
            }
        }
        let process = ThreadId { pid, tid: pid, start_time: main.start_time };
        let cgroup = vm.process.cgroup.clone();
        let owner = match vm.domain {
            Some(_) => 0,
            // If the owner cannot be read, it must not count as root.
            None => self.sources.owner(pid).unwrap_or(u32::MAX),
        };
        let cgroup_owner = match (&vm.container, vm.domain) {
            (Some(container), None) => self.sources.cgroup_owner(container, false),
            (None, None) => self.sources.cgroup_owner(cgroup.as_deref().unwrap_or("/"), true),
            (_, Some(_)) => 0,
        };
        let contained = vm.domain.is_none() && vm.container.is_some();
        let named_inside = contained || vm.domain.is_none() && owner == 0 && self.is_confined(vm.process);
        let sandbox = self.sandbox_of(vm);
        // A user may have chosen the name of the user's unit.
        let unit = cgroup.as_deref().filter(|_| alone && !contained && cgroup_owner == 0);
        let instance = || unit.and_then(container::instance_of);
        let found = Found {
            name: sandbox.as_ref().map_or_else(|| vm.name(instance()), |(name, _)| name.clone()),
            namespace: None,
            uuid: vm.uuid(),
            kind: vm.kind(),
            owner,
            namer: if named_inside && sandbox.is_none() { Namer::Container } else { Namer::User(owner) },
            cgroup_owner,
            cgroup,
            own_cgroup: sandbox.map(|(_, cgroup)| cgroup).or_else(|| vm.own_cgroup(alone)),
            beside_vm: false,
            in_pod_of_vm: true,
        };
        let metadata = vm.domain.and_then(|domain| self.metadata(domain));
        let decision = self.decide(&found, metadata);
        if decision.class != Class::Bulk && vm.vmm == Vmm::Qemu {
            for delay in vmm::delays(&vm.line) {
                self.problem(&found.name, ProblemKind::Delay(delay));
            }
        }
        let account = if decision.class == Class::Bulk { vm.account.clone() } else { Account::System };
        let stats = self.threads(pid, &account);
        let roles = self.roles(&found.name, process, vm, &stats, decision.class);
        let threads =
            stats.iter().zip(roles).map(|(stat, role)| self.tenant_thread(pid, stat, role, vm.domain)).collect();
        let is_whole = self.unclear.is_none();
        let vnics = if is_whole { self.vnics(&found.name, process, vm, &account) } else { Vec::new() };
        let attached = if vm.domain.is_some() || !is_whole { Vec::new() } else { self.attached(process, &account) };
        self.take_in(found, process, decision, threads, vnics, attached);
        true
    }

    /// The name and cgroup of the pod sandbox whose VM this is, if a runtime of the system has recorded it. Kata starts
    /// the monitor outside the pod's PID namespace, which no process inside a pod can do.
    fn sandbox_of(&mut self, vm: &VmProcess<'_>) -> Option<(String, String)> {
        let path = vm.process.cgroup.as_deref().filter(|_| vm.domain.is_none() && vm.container.is_some())?;
        let Container { cgroup, id } = container::of_path(path)?;
        let is_its = vm.is_of_sandbox(id.id()?) && self.sources.has_one_number(vm.process.pid);
        let is_systems = is_its && self.sources.cgroup_owner(&cgroup, false) == 0;
        Some((self.names.recorded(&id).filter(|_| is_systems)?, cgroup))
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

    /// The role of each thread: by its name, or by other means if the names do not identify the vCPUs.
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
            // libvirt got the numbers from QEMU at the start: a thread that takes a vCPU's name later is not one.
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

    /// The vCPUs according to the monitor if the VM is RT, else the threads that have run a guest.
    fn unnamed_vcpus(
        &mut self,
        name: &str,
        process: ThreadId,
        vm: &VmProcess<'_>,
        stats: &[Stat],
        class: Class,
    ) -> VcpuThreads {
        // Ontime does not change a bulk VM's vCPUs, so their monitors are not contacted. This also keeps users'
        // processes, which are bulk unless the administrator says otherwise, from delaying discovery. A QEMU with only
        // its main and RCU threads has not created its vCPUs yet.
        if let Some(unclear) = &mut self.unclear {
            unclear.insert(process.pid);
            return VcpuThreads::new();
        }
        let mut why = None;
        if class != Class::Bulk && stats.len() > 2 {
            let answer = match (vm.vmm, self.sources.live) {
                (Vmm::Qemu, true) => self.ask_monitor(process, vm, stats),
                _ => Err("no thread has a vCPU's name".to_owned()),
            };
            match answer {
                Ok(vcpus) => return vcpus,
                Err(error) => why = Some(error),
            }
        }
        let mut ran_guest: Vec<i32> =
            stats.iter().filter(|stat| stat.guest_time > 0 && stat.tid != process.tid).map(|stat| stat.tid).collect();
        // QEMU creates vCPU threads in the order of their numbers.
        ran_guest.sort_unstable();
        if let Some(why) = why {
            let taken = counted(ran_guest.len(), "thread");
            let told = format!("{why}; taken by guest time: {taken}, idle ones may be missing");
            self.problem(name, ProblemKind::VcpusUnnamed { vmm: vm.vmm, why: told });
        }
        ran_guest.into_iter().zip(0..).collect()
    }

    /// QEMU identifies its threads by their numbers in its own PID namespace.
    fn ask_monitor(&self, process: ThreadId, vm: &VmProcess<'_>, stats: &[Stat]) -> Result<VcpuThreads, String> {
        let number = |stat: &Stat| (self.sources.inner_thread(process.pid, stat.tid), stat.tid);
        let numbers: BTreeMap<i32, i32> = stats.iter().map(number).collect();
        let alive: Vec<i32> = numbers.keys().copied().collect();
        let vcpus = self.sources.monitors.vcpus(process, &vm.account, &alive, &vm.arguments.qmp_sockets)?;
        Ok(vcpus.into_iter().filter_map(|(inner, vcpu)| Some((*numbers.get(&inner)?, vcpu))).collect())
    }

    /// The VM's own interfaces here. In another network namespace (KubeVirt's or Kata's pod) they are joined to the end
    /// of a pair in a way that is not visible from here: there, those of the pair's ends that are here.
    fn vnics(&mut self, name: &str, process: ThreadId, vm: &VmProcess<'_>, account: &Account) -> Vec<Vnic> {
        let pid = process.pid;
        let (interfaces, is_here) = match vm.domain.and_then(|domain| domain.interfaces.clone()) {
            Some(interfaces) => (interfaces.into_iter().map(|name| (name, true)).collect(), true),
            None => {
                let limit = self.budget.allowed(account, Item::Descriptors);
                let open = vnic::open_files(&self.sources.living_dir(pid), limit);
                // In its own network namespace, a process may give interfaces the names of the host's interfaces.
                let is_here = self.sources.own_network(pid).is_none();
                // A user's process may have been given a tap of another namespace.
                let is_checked = self.sources.live && is_here && vm.account != Account::System;
                let tap_is_here = |fd: &str| {
                    !is_checked || fd.parse().is_ok_and(|number| tap::is_here(process, number).unwrap_or(false))
                };
                let interfaces = open.map(|open| {
                    self.budget.charge(account, Item::Descriptors, open.looked_at, open.whole);
                    open.interfaces(&self.network, tap_is_here)
                });
                let given = || vm.arguments.interfaces.iter().map(|name| (name.clone(), true)).collect();
                (interfaces.unwrap_or_else(|_| given()), is_here)
            }
        };
        let (here, elsewhere): (Vec<_>, Vec<_>) =
            interfaces.into_iter().partition(|(ifname, found)| is_here && *found && self.network.has(ifname));
        for (ifname, _) in elsewhere {
            self.problem(name, ProblemKind::VnicElsewhere(printable(ifname.as_bytes())));
        }
        if !is_here {
            return self.host_ends(process);
        }
        here.iter().map(|(ifname, _)| self.network.vnic(ifname)).collect()
    }
}

/// Keeps one thread per vCPU number. A QEMU that a guest has taken over could give more threads vCPU names, to have
/// more threads at real-time priority than its caps count.
fn unique_vcpus(mut roles: Vec<ThreadRole>) -> Vec<ThreadRole> {
    let mut seen = BTreeSet::new();
    for role in &mut roles {
        if matches!(role, ThreadRole::Vcpu(number) if !seen.insert(*number)) {
            *role = ThreadRole::Emulator;
        }
    }
    roles
}
