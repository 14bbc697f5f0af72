//! Discovery of tenants.
//!
//! Input: a host ([`Sources`]) and its [`Rules`]. Output: a [`Discovery`] with every tenant, its threads and class, and
//! all problems. A strange or vanishing process never affects the others.

mod newcomers;
mod vm;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use serde::Serialize;

pub use self::newcomers::newcomers;
use self::vm::VmProcess;
use crate::budget::{Account, Budget, Costs, Item};
use crate::class::Class;
use crate::conflict;
use crate::container::{self, Container, Identity, Names, ancestors};
use crate::devices::{self, Served};
use crate::files;
use crate::host::{KernelThread, Process, Processes, Sources};
use crate::libvirt::{self, Domain};
use crate::model::{Attached, ClassSource, Kind, LibvirtTuning, Tenant, TenantThread, ThreadRole, Vnic};
use crate::peers::{self, Peers};
use crate::problem::{Problem, ProblemKind, Unnamed};
use crate::proc::{Stat, printable};
use crate::rules::{Decision, Namer, Rules, Subject, Unused, Verdict};
use crate::text::counted;
use crate::thread::ThreadId;
use crate::vmm::{self, Vmm};
use crate::vnic::Network;

/// The tenants of the host at one moment.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Discovery {
    /// VMs first, then containers; each by name.
    pub tenants: Vec<Tenant>,
    /// What could not be read, and conflicts with the priority table.
    pub problems: Vec<Problem>,
    /// Why existing tenants or threads may be missing: reading failed although they may still run.
    pub incomplete: Option<String>,
    /// The host's container daemons (processes), which tell where the names of containers are.
    #[serde(skip)]
    pub runtimes: BTreeSet<i32>,
    /// Time spent reading, per account.
    #[serde(skip)]
    pub costs: Costs,
}

/// Finds all tenants of a host. Individual failures become problems; the call never fails.
pub fn discover(sources: &Sources, rules: &Rules) -> Discovery {
    discover_between(sources, rules, &mut || ())
}

/// As [`discover`], and calls `between` before it reads the threads or arguments of each process, and after every few
/// processes of which it reads less. What `between` changes on the host may be missing in the result.
pub fn discover_between(sources: &Sources, rules: &Rules, between: &mut dyn FnMut()) -> Discovery {
    // Clears an error that an earlier pass has already reported.
    files::exhausted();
    let mut found = Finder::new(sources, rules, between);
    match Processes::read(sources, found.between) {
        Ok(processes) => found.run(processes),
        Err(error) => {
            let subject = sources.proc.display().to_string();
            found.unlisted = Some(format!("{subject}: {error}"));
            found.problem(subject, ProblemKind::Unreadable(error.to_string()));
        }
    }
    let costs = found.budget.costs();
    let Finder { mut tenants, mut problems, unlisted, runtimes, .. } = found;
    sort(&mut tenants);
    let pairs = tenants.iter().zip(tenants.iter().skip(1)).filter(|(one, next)| one.name == next.name);
    let shared: BTreeSet<&str> = pairs.map(|(one, _)| one.name.as_str()).collect();
    problems.extend(shared.into_iter().map(|name| Problem::new(name, ProblemKind::SameName)));
    let conflicts = conflict::conflicts(&tenants, &rules.table());
    problems
        .extend(conflicts.into_iter().map(|(tenant, conflict)| Problem::new(tenant, ProblemKind::Conflict(conflict))));
    let incomplete = unlisted.or_else(|| files::exhausted().map(|error| format!("/proc: {error}")));
    Discovery { tenants, problems, incomplete, runtimes, costs }
}

fn sort(tenants: &mut [Tenant]) {
    tenants.sort_by(|a, b| {
        (a.kind == Kind::Container, &a.name, a.process).cmp(&(b.kind == Kind::Container, &b.name, b.process))
    });
}

/// Reservations, device processes and metrics refer to names. So a VM that an unprivileged user started may not use the
/// name of a tenant that root started. `taken`: names that tenants of root's have beside these.
fn keep_names_of_roots_tenants(tenants: &mut [Tenant], taken: &BTreeSet<String>) -> Vec<Problem> {
    let (by_root, others): (Vec<_>, Vec<_>) = tenants.iter_mut().partition(|tenant| tenant.namer == Namer::User(0));
    let by_root: BTreeSet<&str> = by_root.iter().map(|tenant| tenant.name.as_str()).collect();
    let is_taken = |name: &str| by_root.contains(name) || taken.contains(name);
    let mut problems = Vec::new();
    for vm in others.into_iter().filter(|tenant| tenant.kind != Kind::Container && is_taken(&tenant.name)) {
        let called = format!("vm-{}", vm.process.pid);
        let name = std::mem::replace(&mut vm.name, called.clone());
        problems.push(Problem::new(called, ProblemKind::NameTaken(name)));
    }
    problems
}

struct Finder<'a> {
    sources: &'a Sources,
    /// The host's, seconds.
    uptime: Option<u64>,
    rules: &'a Rules,
    network: Network,
    names: Names,
    /// Read when the first container needs it. The inner `None`: the kernel refused.
    peers: Option<Option<Peers>>,
    /// Interfaces on top of the host's interfaces, by network namespace: containers of a pod share theirs.
    standing: HashMap<PathBuf, Vec<Attached>>,
    budget: Budget,
    /// Monitors of containers, conmon's and LXC's, outside containers, each with its user and its arguments.
    monitors: HashMap<i32, (u32, Vec<String>)>,
    /// Cgroups of Podman pods that are known by the conmon of a container.
    pods: BTreeSet<String>,
    /// Cgroups of single-program containers that contain a VM's monitor.
    of_vms: BTreeSet<String>,
    /// UIDs of Kubernetes pods that contain a VM's monitor.
    pods_of_vms: BTreeSet<String>,
    /// Names that tenants of root's have which are not read again.
    taken: BTreeSet<String>,
    /// Containers whose name no runtime has recorded.
    unnamed: Vec<Unnamed>,
    tenants: Vec<Tenant>,
    /// What the rules were asked about, for each tenant.
    decided: Vec<Found>,
    problems: Vec<Problem>,
    /// Why the processes could not be listed.
    unlisted: Option<String>,
    /// The host's container daemons.
    runtimes: BTreeSet<i32>,
    between: &'a mut dyn FnMut(),
    /// In a look at some processes only: VMs of which such a look does not tell enough. None: a whole discovery.
    unclear: Option<BTreeSet<i32>>,
}

/// Properties of a tenant before its class is decided.
struct Found {
    name: String,
    /// The Kubernetes namespace of its pod. Read only if a rule has one.
    namespace: Option<String>,
    uuid: Option<String>,
    kind: Kind,
    owner: u32,
    namer: Namer,
    /// The cgroup of its processes.
    cgroup: Option<String>,
    /// The user who chose the cgroup's path.
    cgroup_owner: u32,
    /// The cgroup that belongs to this tenant alone.
    own_cgroup: Option<String>,
    /// All its processes run beside a VM's monitor in the same container.
    beside_vm: bool,
    /// A VM runs in its pod.
    in_pod_of_vm: bool,
}

impl Found {
    fn subject(&self) -> Subject<'_> {
        Subject {
            name: &self.name,
            namespace: self.namespace.as_deref(),
            uuid: self.uuid.as_deref(),
            cgroup: self.cgroup.as_deref(),
            cgroup_owner: self.cgroup_owner,
            kind: self.kind,
            owner: self.owner,
            namer: self.namer,
            beside_vm: self.beside_vm,
            in_pod_of_vm: self.in_pod_of_vm,
        }
    }
}

impl<'a> Finder<'a> {
    fn new(sources: &'a Sources, rules: &'a Rules, between: &'a mut dyn FnMut()) -> Self {
        Self {
            sources,
            uptime: sources.uptime(),
            rules,
            network: Network::at(&sources.net),
            names: Names::below(&sources.runtimes),
            peers: None,
            standing: HashMap::new(),
            budget: Budget::default(),
            monitors: HashMap::new(),
            pods: BTreeSet::new(),
            of_vms: BTreeSet::new(),
            pods_of_vms: BTreeSet::new(),
            taken: BTreeSet::new(),
            unnamed: Vec::new(),
            tenants: Vec::new(),
            decided: Vec::new(),
            problems: Vec::new(),
            unlisted: None,
            runtimes: BTreeSet::new(),
            between,
            unclear: None,
        }
    }
}

impl Finder<'_> {
    fn run(&mut self, processes: Processes) {
        if processes.denied > 0 {
            let these = counted(processes.denied, "process");
            let what = format!("{these} may not be looked into; tenants may be missing");
            self.problem("/proc", ProblemKind::Unreadable(what));
        }
        let v1 = processes.user.iter().filter_map(|process| process.v1_container.as_deref());
        if let Some(first) = v1.clone().next() {
            self.problem(first, ProblemKind::CgroupV1(v1.count()));
        }
        self.pods = self.pods(&processes.user);
        self.runtimes(&processes.user);
        let domains = self.domains();
        let starting = domains.iter().filter(|(_, domain)| !domain.is_whole()).map(|(pid, _)| *pid);
        self.unclear.iter_mut().for_each(|unclear| unclear.extend(starting.clone()));
        let mut shared: HashMap<&str, usize> = HashMap::new();
        for cgroup in processes.user.iter().filter_map(|process| process.cgroup.as_deref()) {
            *shared.entry(cgroup).or_default() += 1;
        }
        let (mut vms, mut rest) = (Vec::new(), Vec::new());
        for process in &processes.user {
            match VmProcess::of(self, process, domains.get(&process.pid)) {
                Some(vm) => vms.push(vm),
                None => rest.push(process),
            }
        }
        let monitors: BTreeMap<i32, Vmm> = vms.iter().map(|vm| (vm.process.pid, vm.vmm)).collect();
        for vm in &vms {
            let alone = self.unclear.is_none()
                && vm.process.cgroup.as_deref().is_some_and(|cgroup| shared.get(cgroup) == Some(&1));
            if !self.vm(vm, alone, &monitors) {
                rest.push(vm.process);
            }
        }
        self.stale(&domains);
        // Processes beside a monitor in a unit (swtpm, virtiofsd, passt) are helpers of the VM. Processes beside a
        // monitor in a single-program container belong to the VM. Containers of LXC and nspawn run whole systems, so
        // they stay tenants.
        let around = |vm: &VmProcess<'_>| container::innermost(vm.process.cgroup.as_deref()?);
        let of_program = vms.iter().filter_map(around).filter(|container| container.id.id().is_some());
        self.of_vms = of_program.map(|container| container.cgroup).collect();
        let by_system = vms.iter().filter_map(|vm| vm.container.as_deref());
        let by_system = by_system.filter(|container| self.sources.cgroup_owner(container, false) == 0);
        self.pods_of_vms = by_system.filter_map(container::pod_of).collect();
        let outside = || vms.iter().filter(|vm| vm.container.is_none()).filter_map(|vm| vm.process.cgroup.as_deref());
        let of_vms = outside().filter(|path| *path != "/").map(str::to_owned).collect();
        let units = outside().filter_map(container::unit_of).filter(|unit| self.sources.cgroup_owner(unit, true) == 0);
        let units = units.map(str::to_owned).collect();
        self.containers(&rest, of_vms, &units);
        self.containers_without_own_cgroup(&rest);
        self.problems.extend(keep_names_of_roots_tenants(&mut self.tenants, &self.taken));
        self.devices(&rest);
        self.kernel_threads(processes.kernel);
        if processes.denied == 0 {
            self.unused_rules();
        }
        let unread: Vec<Problem> = self
            .budget
            .unread()
            .map(|(account, what)| Problem::new(account.to_string(), ProblemKind::NotRead(what)))
            .collect();
        self.problems.extend(unread);
        for (path, why) in self.names.unread() {
            self.problem(path.display().to_string(), ProblemKind::RecordUnread(why));
        }
    }

    /// Adds a tenant.
    fn take_in(
        &mut self,
        found: Found,
        process: ThreadId,
        decision: Decision,
        threads: Vec<TenantThread>,
        vnics: Vec<Vnic>,
        attached: Vec<Attached>,
    ) {
        self.tenants.push(Tenant {
            name: found.name.clone(),
            uuid: found.uuid.clone(),
            kind: found.kind,
            owner: found.owner,
            namer: found.namer,
            process,
            cgroup: found.own_cgroup.clone(),
            class: decision.class,
            class_source: decision.source,
            runtime_cap: decision.runtime_cap,
            threads,
            vnics,
            attached,
        });
        self.decided.push(found);
    }

    fn unused_rules(&mut self) {
        self.unnamed.sort();
        let subjects: Vec<Subject<'_>> = self.decided.iter().map(Found::subject).collect();
        for Unused { place, what, by_name } in self.rules.unused(&subjects) {
            let unnamed = if by_name { self.unnamed.clone() } else { Vec::new() };
            self.problem(place, ProblemKind::RuleUnused { what, unnamed });
        }
    }

    /// The account to which reading a process in this container, or in none, is charged. In a user's slice, which no
    /// process of that user can leave, subordinate user numbers are that user's, too.
    fn account(&self, process: &Process, container: Option<&str>) -> Account {
        match container.map(|cgroup| (cgroup, self.sources.cgroup_owner(cgroup, false))) {
            Some((cgroup, 0)) => Account::Container(cgroup.to_owned()),
            Some((_, user)) => Account::User(user),
            None => match self.sources.owner(process.pid).unwrap_or(u32::MAX) {
                0 if self.is_confined(process) => {
                    let path = process.v1_container.clone().or_else(|| process.cgroup.clone());
                    Account::Container(path.unwrap_or_default())
                }
                0 => Account::System,
                user => {
                    let of_slice = container::owner_of_path(process.cgroup.as_deref().unwrap_or("/"));
                    Account::User(if of_slice == 0 { user } else { of_slice })
                }
            },
        }
    }

    /// Whether a process outside of all known containers' cgroups is in a container all the same: in one of cgroup v1,
    /// or in one without a cgroup of its own, which its PID namespace tells. Its root is not the host's administrator.
    fn is_confined(&self, process: &Process) -> bool {
        process.v1_container.is_some() || !self.sources.has_one_number(process.pid)
    }

    fn arguments(&mut self, pid: i32, account: &Account) -> Vec<String> {
        (self.between)();
        let limit = self.budget.allowed(account, Item::CommandLine);
        let (arguments, bytes) = self.sources.arguments(pid, limit);
        self.budget.charge(account, Item::CommandLine, bytes, bytes < limit);
        arguments
    }

    fn threads(&mut self, pid: i32, account: &Account) -> Vec<Stat> {
        (self.between)();
        let (stats, whole) = self.sources.threads(pid, self.budget.allowed(account, Item::Threads));
        self.budget.charge(account, Item::Threads, stats.len(), whole);
        stats
    }

    fn problem(&mut self, subject: impl Into<String>, kind: ProblemKind) {
        self.problems.push(Problem::new(subject, kind));
    }

    /// libvirt's domains by process number.
    fn domains(&mut self) -> BTreeMap<i32, Domain> {
        let mut domains = BTreeMap::new();
        let entries = match std::fs::read_dir(&self.sources.libvirt) {
            Ok(entries) => entries,
            // libvirt is not installed or does not run yet.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return domains,
            Err(error) => {
                files::note(&error);
                let subject = self.sources.libvirt.display().to_string();
                self.problem(subject, ProblemKind::Unreadable(error.to_string()));
                return domains;
            }
        };
        let mut by_pid_file = Vec::new();
        for path in entries.flatten().map(|entry| entry.path()) {
            let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
            if !matches!(ending, "xml" | "pid") {
                continue;
            }
            let written = std::fs::metadata(&path).and_then(|file| file.modified()).ok();
            match (std::fs::read_to_string(&path), ending) {
                (Ok(text), "xml") => match libvirt::parse_status(&text) {
                    Ok(domain) => drop(domains.insert(domain.pid, domain.written_at(written))),
                    Err(what) => self.problem(path.display().to_string(), ProblemKind::BadStatus(what)),
                },
                (Ok(text), _) => {
                    let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                    by_pid_file.extend(Domain::of_pid_file(&name, &text).map(|domain| domain.written_at(written)));
                }
                (Err(error), _) if error.kind() == std::io::ErrorKind::NotFound => {}
                (Err(error), _) => {
                    files::note(&error);
                    self.problem(path.display().to_string(), ProblemKind::Unreadable(error.to_string()));
                }
            }
        }
        // A VM whose status file is damaged or not written yet is still libvirt's. Helpers have such files, too; their
        // command lines tell them apart later.
        for domain in by_pid_file {
            domains.entry(domain.pid).or_insert(domain);
        }
        domains
    }

    fn stale(&mut self, domains: &BTreeMap<i32, Domain>) {
        for (pid, domain) in domains {
            let runs = |tenant: &Tenant| tenant.kind == Kind::Libvirt && tenant.process.pid == *pid;
            if domain.is_whole() && !self.tenants.iter().any(runs) {
                self.problem(&domain.name, ProblemKind::StaleDomain(*pid));
            }
        }
    }

    fn tenant_thread(&self, pid: i32, stat: &Stat, role: ThreadRole, domain: Option<&Domain>) -> TenantThread {
        TenantThread {
            id: ThreadId { pid, tid: stat.tid, start_time: stat.start_time },
            role,
            comm: stat.comm.clone(),
            policy: self.sources.policy(stat),
            affinity: self.sources.affinity(pid, stat.tid),
            last_cpu: stat.last_cpu,
            libvirt: domain.map_or_else(LibvirtTuning::default, |domain| domain.tuning(role, &stat.comm)),
        }
    }

    /// The container on a path.
    fn container_at(&mut self, path: &str) -> Option<Container> {
        let Some(outer) = container::of_path(path) else {
            // A user may have chosen the name of a task.
            let task = self.names.task(path).filter(|task| self.sources.cgroup_owner(&task.cgroup, false) == 0);
            return task.or_else(|| self.recorded_container(path));
        };
        let is_pod = |found: &mut Self| {
            found.pods.contains(&outer.cgroup)
                || found.names.is_pod(&outer.id) && found.sources.cgroup_owner(&outer.cgroup, false) == 0
        };
        if is_pod(self) {
            let inner = container::of_path(path.get(outer.cgroup.len()..)?)?;
            return Some(Container { cgroup: outer.cgroup + &inner.cgroup, id: inner.id });
        }
        Some(outer)
    }

    /// Podman pods without an infra container: the conmon of each container runs in the pod's cgroup and in the host's
    /// PID namespace, as the user who made the cgroup. No program in a container is there.
    fn pods(&self, processes: &[Process]) -> BTreeSet<String> {
        let conmons = processes.iter().filter(|process| vmm::file_name(&process.executable) == Some("conmon"));
        let pods = conmons.filter_map(|process| {
            let pod = container::pod_of_conmon(process.cgroup.as_deref()?)?;
            let is_makers = self.sources.owner(process.pid) == Some(self.sources.cgroup_owner(pod, false));
            (is_makers && self.sources.has_one_number(process.pid)).then(|| pod.to_owned())
        });
        pods.collect()
    }

    /// The container in a unit of any name for which machined has a record.
    fn recorded_container(&mut self, path: &str) -> Option<Container> {
        let mut units = ancestors(path).filter(|part| container::is_unit(part));
        let (unit, machine) = units.find_map(|unit| Some((unit, self.machine_of(unit)?)))?;
        let name = unit.rsplit('/').next()?.to_owned();
        let id = Identity::Machine { unit: name, name: machine.name };
        (machine.is_vm == Some(false) && !container::is_monitors(path))
            .then(|| Container { cgroup: unit.to_owned(), id })
    }

    /// Reads the arguments of conmon processes and of LXC's monitors. A process inside a container is ignored, because
    /// it may use any name.
    fn container_monitors(&mut self, processes: &[&Process]) {
        for process in processes {
            let cgroup = process.cgroup.as_deref().unwrap_or("/");
            let is_conmon = vmm::file_name(&process.executable) == Some("conmon");
            let is_lxcs = vmm::file_name(&process.executable) == Some("lxc-start")
                || cgroup.split('/').any(|component| component.starts_with("lxc.monitor"));
            if !(is_conmon || is_lxcs) || self.container_at(cgroup).is_some() || self.is_confined(process) {
                continue;
            }
            let account = self.account(process, None);
            let arguments = self.arguments(process.pid, &account);
            // The cgroup's name is its user's choice.
            let user = match self.sources.cgroup_owner(cgroup, true) {
                0 => self.sources.owner(process.pid).unwrap_or(u32::MAX),
                user => user,
            };
            if is_conmon && user == 0 {
                self.names.started("conmon", &arguments);
            }
            self.monitors.insert(process.pid, (user, arguments));
        }
    }

    /// Tells of containers that are no tenants: root's monitor has started their programs in a cgroup that is not known
    /// as a container's. Those in cgroup v1 are told already.
    fn containers_without_own_cgroup(&mut self, processes: &[&Process]) {
        let of_root = self.monitors.iter().filter(|(_, (user, _))| *user == 0);
        let named = |(pid, (_, arguments)): (&i32, &(u32, Vec<String>))| {
            Some((*pid, container::started_by_monitor(arguments)?))
        };
        let started: Vec<(i32, String)> = of_root.filter_map(named).collect();
        if started.is_empty() {
            return;
        }
        let programs: HashMap<i32, &Process> = processes.iter().map(|process| (process.pid, *process)).collect();
        let vms: BTreeSet<i32> = self.vms().map(|vm| vm.process.pid).collect();
        let by_rule: BTreeSet<String> = self.tenants.iter().filter_map(|tenant| tenant.cgroup.clone()).collect();
        let mut lost = BTreeMap::new();
        for (monitor, name) in started {
            let children = self.sources.children(monitor);
            let own: Vec<&Process> = children.iter().filter_map(|pid| programs.get(pid).copied()).collect();
            let is_in_v1 = own.iter().any(|process| process.v1_container.is_some());
            let mut paths = own.iter().filter_map(|process| process.cgroup.as_deref());
            let is_known =
                |path: &str| ancestors(path).any(|part| by_rule.contains(part)) || self.container_at(path).is_some();
            if is_in_v1 || children.iter().any(|pid| vms.contains(pid)) || paths.any(is_known) {
                continue;
            }
            let starter = programs.get(&monitor);
            let program = starter.and_then(|starter| own.iter().find(|process| self.is_inside(process, starter)));
            lost.extend(program.and_then(|program| Some((name, program.cgroup.clone()?))));
        }
        for (name, cgroup) in lost {
            self.problem(name, ProblemKind::NoOwnCgroup(cgroup));
        }
    }

    /// Whether a child of a container's monitor runs in the container, which has mounts of its own. The runtime
    /// (of any program's name) and hooks do not. Before it is moved to its cgroup, the container's first
    /// process has the program of LXC's monitor, which cloned it.
    fn is_inside(&self, child: &Process, monitor: &Process) -> bool {
        child.executable != monitor.executable
            && !child.cgroup.as_deref().is_some_and(container::is_monitors)
            && self.sources.have_other_mounts(child.pid, monitor.pid)
            // Not moved since the snapshot.
            && self.sources.cgroup(child.pid) == child.cgroup
    }

    /// The arguments of the monitors that have started processes of a container, if they are root's or of the user who
    /// made the container. The container's first process is its monitor's child.
    fn monitors_of(&self, owner: u32, processes: &[&Process]) -> impl Iterator<Item = &[String]> {
        let probed = processes.iter().take(if self.monitors.is_empty() { 0 } else { PROBED });
        let parents = probed.filter_map(|process| self.sources.main_thread(process.pid));
        let known = parents.filter_map(|stat| self.monitors.get(&stat.ppid));
        known.filter(move |(user, _)| *user == 0 || *user == owner).map(|(_, arguments)| arguments.as_slice())
    }

    /// The name that conmon was given for the container of these processes.
    fn name_by_conmon(&self, id: &str, owner: u32, processes: &[&Process]) -> Option<String> {
        let mut started = self.monitors_of(owner, processes).filter_map(container::started_by_conmon);
        started.find(|(started, _)| started == id).map(|(_, name)| name)
    }

    /// The name that LXC's monitor has for the container of these processes.
    fn name_by_lxc(&self, component: &str, cgroup: &str, processes: &[&Process]) -> Option<String> {
        let owner = self.sources.cgroup_owner(cgroup, false);
        let mut said = self.monitors_of(owner, processes);
        said.find_map(|arguments| container::started_by_lxc(arguments, component)).map(str::to_owned)
    }

    /// Reads from the host's container daemons where they keep their state.
    fn runtimes(&mut self, processes: &[Process]) {
        for process in processes {
            let Some(program) = vmm::file_name(&process.executable) else { continue };
            let is_shim = program.starts_with("containerd-shim");
            if !is_shim && !matches!(program, "dockerd" | "containerd" | "crio" | "podman") {
                continue;
            }
            let cgroup = process.cgroup.as_deref().unwrap_or("/");
            let contained = self.container_at(cgroup).is_some() || self.is_confined(process);
            if contained || self.sources.owner(process.pid) != Some(0) || self.sources.cgroup_owner(cgroup, true) != 0 {
                continue;
            }
            if let Some(file) = matches!(program, "crio" | "podman").then(|| self.storage_conf(process.pid)).flatten() {
                self.names.configured_storage(&file);
            }
            if !is_shim {
                self.runtimes.insert(process.pid);
                let arguments = self.arguments(process.pid, &Account::System);
                self.names.started(program, &arguments);
            } else if let Ok(directory) = std::fs::read_link(self.sources.process_dir(process.pid).join("cwd")) {
                self.names.started_shim(&directory);
            }
        }
    }

    /// The configuration of its storage that is in a process's environment.
    fn storage_conf(&self, pid: i32) -> Option<String> {
        let environment = self.sources.read(pid, "environ")?;
        let variables = environment.split(|byte| *byte == 0).filter_map(|one| std::str::from_utf8(one).ok());
        let mut values = variables.filter_map(|one| one.strip_prefix(container::STORAGE_CONF)?.strip_prefix('='));
        values.next().map(str::to_owned)
    }

    /// `vms` are the monitors' own cgroups, `units` the units around them.
    fn containers(&mut self, processes: &[&Process], mut vms: BTreeSet<String>, units: &BTreeSet<String>) {
        self.container_monitors(processes);
        vms.extend(self.tenants.iter().filter_map(|vm| vm.cgroup.clone()));
        let mut members: BTreeMap<String, (Option<Identity>, Vec<&Process>)> = BTreeMap::new();
        let mut known: HashMap<&str, Option<(String, Option<Identity>)>> = HashMap::new();
        for process in processes {
            let Some(path) = process.cgroup.as_deref() else { continue };
            // libvirt's monitor of a container, and systemd-nspawn's where it has no cgroup of its own, is in the
            // container's cgroup but outside its PID namespace.
            let is_beside = matches!(vmm::file_name(&process.executable), Some("libvirt_lxc" | "systemd-nspawn"));
            if is_beside && self.sources.has_one_number(process.pid) {
                continue;
            }
            let place = known.entry(path).or_insert_with(|| self.container_of(path, &vms, units));
            // A container's monitor outside of the container gets nothing by a rule for its cgroup.
            let is_monitor = vmm::file_name(&process.executable).is_some_and(container::is_monitor_program);
            if let Some((cgroup, identity)) = place.clone().filter(|(_, identity)| identity.is_some() || !is_monitor) {
                members.entry(cgroup).or_insert_with(|| (identity, Vec::new())).1.push(process);
            }
        }
        let lxc = members.iter().filter(|(_, (identity, _))| matches!(identity, Some(Identity::Lxc(_))));
        let lxc: BTreeSet<String> = lxc.map(|(cgroup, _)| cgroup.clone()).collect();
        for (cgroup, (identity, processes)) in members {
            let identity = match identity {
                Some(Identity::Lxc(name)) => Some(match self.name_by_lxc(&name, &cgroup, &processes) {
                    Some(name) => Identity::Name(name),
                    // The name without its number belongs to another container.
                    None if container::without_number(&cgroup).is_some_and(|other| lxc.contains(other)) => {
                        Identity::Name(name)
                    }
                    None => Identity::Lxc(name),
                }),
                identity => identity,
            };
            self.container(cgroup, identity, &processes);
        }
    }

    /// The container on a path, by the cgroup's form, or else the topmost cgroup that a rule names. None for processes
    /// beside a monitor in a VM's cgroup or unit, and for a container's monitor.
    fn container_of(
        &mut self,
        path: &str,
        vms: &BTreeSet<String>,
        units: &BTreeSet<String>,
    ) -> Option<(String, Option<Identity>)> {
        // A slice contains more than the VM.
        let of_vm = |part: &str| vms.contains(part) && (part == path || !part.ends_with(".slice"));
        if container::libvirt_scope(path).is_some() || ancestors(path).any(of_vm) {
            return None;
        }
        if let Some(container) = self.container_at(path) {
            return Some((container.cgroup, Some(container.id)));
        }
        if container::is_monitors(path) || ancestors(path).any(|part| units.contains(part)) {
            return None;
        }
        ancestors(path).find(|part| self.rules.names_cgroup(part)).map(|part| (part.to_owned(), None))
    }

    fn container(&mut self, cgroup: String, identity: Option<Identity>, processes: &[&Process]) {
        // The owner of the directory may move processes into a cgroup that only a rule names. In a container's cgroup,
        // the runtime does that.
        let owner = self.sources.cgroup_owner(&cgroup, identity.is_none());
        let of_root = identity.as_ref().filter(|_| owner == 0 && self.rules.name_namespaces());
        let found = Found {
            name: self.container_name(&cgroup, identity.as_ref(), owner, processes),
            namespace: of_root.and_then(|identity| self.names.namespace(identity)),
            uuid: None,
            kind: Kind::Container,
            owner,
            namer: Namer::User(owner),
            cgroup_owner: owner,
            own_cgroup: Some(cgroup.clone()),
            cgroup: Some(cgroup.clone()),
            beside_vm: processes.iter().all(|process| self.is_beside_vm(process)),
            in_pod_of_vm: container::pod_of(&cgroup).is_some_and(|pod| self.pods_of_vms.contains(&pod)),
        };
        let (decision, withheld) = self.decision(&found, None);
        let account = match (decision.class, owner) {
            (Class::Rt(_), _) => Account::System,
            (Class::Bulk, 0) => Account::Container(cgroup.clone()),
            (Class::Bulk, user) => Account::User(user),
        };
        let mut threads = Vec::new();
        // The first process, and a thread of it that lives.
        let mut first: Option<(ThreadId, ThreadId)> = None;
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        for process in processes.iter().filter(|process| process.pid != 1 && process.pid != own) {
            let stats = self.threads(process.pid, &account);
            let Some((id, living)) = self.identity(process.pid, &stats) else { continue };
            let is_earlier =
                |(first, _): &(ThreadId, ThreadId)| (first.start_time, first.pid) <= (id.start_time, id.pid);
            first = first.filter(is_earlier).or(Some((id, living)));
            threads.extend(stats.iter().map(|stat| self.tenant_thread(process.pid, stat, ThreadRole::Container, None)));
        }
        let Some((process, living)) = first else { return };
        self.problems.extend(withheld);
        let recorded = identity.as_ref().and_then(Identity::id).map(short);
        if recorded.as_ref() == Some(&found.name) {
            self.unnamed.extend(recorded.map(|digits| Unnamed { digits, user: owner }));
            if matches!(identity, Some(Identity::Unknown(_))) {
                self.problem(&cgroup, ProblemKind::RuntimeUnknown);
            }
        }
        let (vnics, attached) = match self.unclear {
            Some(_) => Default::default(),
            None => (self.host_ends(living), self.attached(living, &account)),
        };
        self.take_in(found, process, decision, threads, vnics, attached);
    }

    /// A process's identity and a thread of it that lives: the main thread, unless it has ended.
    fn identity(&self, pid: i32, living: &[Stat]) -> Option<(ThreadId, ThreadId)> {
        let first = living.first()?;
        let thread = ThreadId { pid, tid: first.tid, start_time: first.start_time };
        let process = if first.tid == pid { thread } else { self.sources.identity(pid)? };
        Some((process, thread))
    }

    /// Whether a process is in the same container as a VM's monitor.
    fn is_beside_vm(&self, process: &Process) -> bool {
        let path = process.cgroup.as_deref().unwrap_or("/");
        !self.of_vms.is_empty() && ancestors(path).any(|part| self.of_vms.contains(part))
    }

    /// A container's name: as recorded by the runtime or passed to conmon, else the first digits of its identifier.
    fn container_name(
        &mut self,
        cgroup: &str,
        identity: Option<&Identity>,
        owner: u32,
        processes: &[&Process],
    ) -> String {
        let Some(identity) = identity else { return cgroup.rsplit('/').next().unwrap_or(cgroup).to_owned() };
        match identity.id() {
            Some(id) => {
                // A user may have chosen the identifier of another container.
                let recorded = (owner == 0).then(|| self.names.recorded(identity)).flatten();
                recorded.or_else(|| self.name_by_conmon(id, owner, processes)).unwrap_or_else(|| short(id))
            }
            None => self.names.recorded(identity).unwrap_or_else(|| cgroup.to_owned()),
        }
    }

    /// The host's ends of veth pairs that lead into a thread's network namespace. Empty if the kernel refuses the
    /// request.
    fn host_ends(&mut self, thread: ThreadId) -> Vec<Vnic> {
        if !self.sources.live {
            return Vec::new();
        }
        let peers = self.peers.get_or_insert_with(|| Peers::read().inspect_err(files::note).ok());
        let names = peers.as_ref().map(|peers| peers.of_thread(thread.tid)).unwrap_or_default();
        names.iter().map(|name| self.network.vnic(name)).collect()
    }

    /// The interfaces in a tenant's own network namespace that are on top of the host's interfaces. Empty if they
    /// cannot be read.
    fn attached(&mut self, thread: ThreadId, account: &Account) -> Vec<Attached> {
        let Some(namespace) = self.sources.own_network(thread.pid) else { return Vec::new() };
        let known = self.standing.entry(namespace).or_insert_with(|| {
            let limit = self.budget.allowed(account, Item::Links);
            let (looked_at, whole, standing) =
                peers::standing(thread, limit).inspect_err(files::note).unwrap_or((0, true, Vec::new()));
            self.budget.charge(account, Item::Links, looked_at, whole);
            let attached = standing.into_iter().filter_map(|own| {
                let Vnic { lower, below, .. } = self.network.vnic(self.network.name_of(own.on)?);
                Some(Attached { name: printable(own.name.as_bytes()), mac: own.mac, lower, below })
            });
            attached.collect()
        });
        known.clone()
    }

    fn decide(&mut self, found: &Found, metadata: Option<Verdict>) -> Decision {
        let (decision, withheld) = self.decision(found, metadata);
        self.problems.extend(withheld);
        decision
    }

    /// A tenant's class, and a problem if a rule was withheld.
    fn decision(&self, found: &Found, metadata: Option<Verdict>) -> (Decision, Option<Problem>) {
        let decision = self.rules.decide(&found.subject(), metadata);
        let rule = decision.withheld.clone().filter(|_| decision.source == ClassSource::Default);
        let withheld =
            rule.map(|rule| Problem::new(&found.name, ProblemKind::RuleWithheld { rule, namer: found.namer }));
        (decision, withheld)
    }

    /// Assigns the threads of device processes to the VM that each one serves. Ignores processes started in another
    /// user's session or in a container: every event of a tenant's process causes a discovery.
    fn devices(&mut self, processes: &[&Process]) {
        let known = self.sources.devices.known();
        for (process, served) in &known {
            if self.sources.identity(process.pid) == Some(*process) {
                self.serve(process.pid, &served.vm, served.user);
            } else if !self.sources.process_dir(process.pid).exists() {
                self.sources.devices.forget(*process);
            }
        }
        for process in processes.iter().filter(|process| vmm::may_serve(&process.executable)) {
            let cgroup = process.cgroup.as_deref().unwrap_or("/");
            let contained = self.container_at(cgroup).is_some() || self.is_confined(process);
            let Some(id) = self.sources.identity(process.pid).filter(|_| !contained) else { continue };
            if known.iter().any(|(process, _)| *process == id) {
                continue;
            }
            // A device process of the system may serve any VM: root's, or one in a device process's unit. Other
            // services' accounts are users.
            let user = match self.sources.cgroup_owner(cgroup, true) {
                0 if devices::by_unit(cgroup).is_some() => 0,
                0 => self.sources.owner(process.pid).unwrap_or(u32::MAX),
                user => user,
            };
            let user = Some(user).filter(|user| *user != 0);
            let account = user.map_or_else(|| self.account(process, None), Account::User);
            let arguments = self.arguments(process.pid, &account);
            // A unit may be configured to serve another VM: the VM in the unit's name counts only if it exists.
            let says = [devices::by_unit(cgroup), vmm::served(&arguments)];
            if let Some(vm) = says.into_iter().flatten().find(|vm| self.serve(process.pid, vm, user)) {
                self.sources.devices.note(id, Served { vm: vm.to_owned(), user });
            }
        }
    }

    /// Assigns a device process's threads to the VM of this name, and of this user if given. Among several such VMs,
    /// those started by root come first, then the oldest one. So a user who starts another VM of that name cannot take
    /// a thread out of a VM's runtime cap.
    fn serve(&mut self, pid: i32, vm: &str, user: Option<u32>) -> bool {
        let serves = |tenant: &&Tenant| tenant.kind != Kind::Container && tenant.name == vm;
        let may = |tenant: &&Tenant| user.is_none_or(|user| user == tenant.owner);
        let order = |tenant: &&Tenant| (tenant.namer != Namer::User(0), tenant.process.start_time, tenant.process);
        let Some(vm) = self.tenants.iter().filter(serves).filter(may).min_by_key(order).map(|vm| vm.process) else {
            return false;
        };
        let stats = self.threads(pid, &user.map_or(Account::System, Account::User));
        let threads: Vec<TenantThread> =
            stats.iter().map(|stat| self.tenant_thread(pid, stat, ThreadRole::Device, None)).collect();
        self.tenants
            .iter_mut()
            .filter(|tenant| tenant.process == vm)
            .for_each(|tenant| tenant.threads.extend(threads.clone()));
        true
    }

    /// Assigns kernel threads to the VM for which they work. A look at some processes does not see a VM's other timers,
    /// so it assigns none.
    fn kernel_threads(&mut self, kernel: Vec<KernelThread>) {
        let (timers, others): (Vec<_>, Vec<_>) =
            kernel.into_iter().partition(|thread| thread.role == ThreadRole::KvmPit);
        for KernelThread { stat, role, works_for } in others {
            // A process that had the number before may have made an older one.
            let vm = self.vm_of_thread(works_for).filter(|vm| vm.start_time <= stat.start_time);
            self.assign(vm, &stat, role);
        }
        if timers.is_empty() || self.unclear.is_some() {
            return;
        }
        let inner = self.inner_numbers();
        let mut by_vm: BTreeMap<ThreadId, Vec<Stat>> = BTreeMap::new();
        for KernelThread { stat, works_for, .. } in timers {
            if let Some(vm) = inner.get(&works_for).and_then(|vms| made_by(vms, &stat)) {
                by_vm.entry(vm).or_default().push(stat);
            }
        }
        for (vm, timers) in by_vm {
            if let Some(timer) = timer_of_vm(timers) {
                self.assign(Some(vm), &timer, ThreadRole::KvmPit);
            }
        }
    }

    fn assign(&mut self, vm: Option<ThreadId>, stat: &Stat, role: ThreadRole) {
        let thread = self.tenant_thread(stat.tid, stat, role, None);
        if let Some(tenant) = vm.and_then(|vm| self.tenants.iter_mut().find(|tenant| tenant.process == vm)) {
            tenant.threads.push(thread);
        }
    }

    fn vms(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.iter().filter(|tenant| tenant.kind != Kind::Container)
    }

    /// VMs by their monitors' process numbers in their own PID namespaces, which KVM uses in its timer thread's name
    /// (`arch/x86/kvm/i8254.c`, `pid_vnr`).
    fn inner_numbers(&self) -> HashMap<i32, Vec<ThreadId>> {
        let mut by_number: HashMap<i32, Vec<ThreadId>> = HashMap::new();
        for vm in self.vms() {
            by_number.entry(self.sources.inner_process(vm.process.pid)).or_default().push(vm.process);
        }
        by_number
    }

    /// The VM with this process number, or else with this thread number.
    fn vm_of_thread(&self, number: i32) -> Option<ThreadId> {
        let by_process = self.vms().find(|vm| vm.process.pid == number);
        let by_thread = || self.vms().find(|vm| vm.threads.iter().any(|thread| thread.id.tid == number));
        by_process.or_else(by_thread).map(|vm| vm.process)
    }
}

/// Which of the VMs with the same inner process number created a kernel thread. Monitors create it when they start, so
/// this is the last VM that was started before the thread.
fn made_by(vms: &[ThreadId], kernel: &Stat) -> Option<ThreadId> {
    let before = vms.iter().filter(|vm| vm.start_time <= kernel.start_time);
    before.max_by_key(|vm| vm.start_time).copied()
}

/// The time from a VM's timer thread to another one of that name which cannot be the VM's, clock ticks of 10 ms.
const TIMERS_APART: u64 = 6_000;

/// The timer of a VM among threads that have its number. Any process that may use KVM can make a timer, and can have
/// this number in a PID namespace of its own. A VM has one timer, which its monitor creates when it starts: the first.
/// With another one soon after, either may be the VM's, and none is taken.
fn timer_of_vm(mut timers: Vec<Stat>) -> Option<Stat> {
    timers.sort_by_key(|timer| timer.start_time);
    let mut timers = timers.into_iter();
    let first = timers.next()?;
    let is_sole = timers.next().is_none_or(|next| next.start_time - first.start_time >= TIMERS_APART);
    is_sole.then_some(first)
}

/// How many processes of a container are checked for their parent. The process that the monitor started is among the
/// first, unless the host's process numbers have wrapped around.
const PROBED: usize = 64;

/// Name of a container without a recorded name.
fn short(id: &str) -> String {
    id.chars().take(12).collect()
}
