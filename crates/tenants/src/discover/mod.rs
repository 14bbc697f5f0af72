//! Finding tenants.
//!
//! In: a host ([`Sources`]) and its [`Rules`]. Out: a [`Discovery`]: every tenant with its threads and class, and every
//! problem on the way. One odd or vanishing process never spoils the rest.

mod vm;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use serde::Serialize;

use self::vm::VmProcess;
use crate::conflict;
use crate::container::{self, Names};
use crate::devices;
use crate::files;
use crate::host::{KernelThread, Process, Processes, Sources};
use crate::libvirt::{self, Domain};
use crate::model::{Attached, ClassSource, Kind, LibvirtTuning, Tenant, TenantThread, ThreadRole, Vnic};
use crate::peers::{self, Peers};
use crate::problem::{Problem, ProblemKind};
use crate::proc::{Stat, printable};
use crate::rules::{Decision, Namer, Rules, Subject, Verdict};
use crate::thread::ThreadId;
use crate::vmm;
use crate::vnic::Network;

/// What runs on the host at one moment.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Discovery {
    /// VMs first, then containers; each by name.
    pub tenants: Vec<Tenant>,
    /// What could not be read or works against the table.
    pub problems: Vec<Problem>,
    /// Why tenants or threads that are there may be missing: the look failed, not they.
    pub incomplete: Option<String>,
}

/// Finds all tenants of a host. Never fails as a whole.
pub fn discover(sources: &Sources, rules: &Rules) -> Discovery {
    // Of an earlier look, which has told it.
    files::exhausted();
    let mut found = Finder {
        sources,
        rules,
        network: Network::at(&sources.net),
        names: Names::below(&sources.runtimes),
        peers: None,
        standing: HashMap::new(),
        tenants: Vec::new(),
        problems: Vec::new(),
        unlisted: None,
    };
    found.run();
    let Finder { mut tenants, mut problems, unlisted, .. } = found;
    tenants.sort_by(|a, b| {
        (a.kind == Kind::Container, &a.name, a.process).cmp(&(b.kind == Kind::Container, &b.name, b.process))
    });
    for (one, next) in tenants.iter().zip(tenants.iter().skip(1)) {
        if one.name == next.name {
            problems.push(Problem::new(&next.name, ProblemKind::SameName));
        }
    }
    let conflicts = conflict::conflicts(&tenants, &rules.table());
    problems
        .extend(conflicts.into_iter().map(|(tenant, conflict)| Problem::new(tenant, ProblemKind::Conflict(conflict))));
    let incomplete = unlisted.or_else(|| files::exhausted().map(|error| format!("/proc: {error}")));
    Discovery { tenants, problems, incomplete }
}

struct Finder<'a> {
    sources: &'a Sources,
    rules: &'a Rules,
    network: Network,
    names: Names,
    /// Read when the first container asks; `None` inside where the kernel refused.
    peers: Option<Option<Peers>>,
    /// What stands on the host's interfaces, by network namespace: containers of a pod share theirs.
    standing: HashMap<PathBuf, Vec<Attached>>,
    tenants: Vec<Tenant>,
    problems: Vec<Problem>,
    /// Why processes could not be listed.
    unlisted: Option<String>,
}

/// What is known of a tenant before its class is.
struct Found {
    name: String,
    uuid: Option<String>,
    kind: Kind,
    owner: u32,
    namer: Namer,
    process: ThreadId,
    /// Where its processes are.
    cgroup: Option<String>,
    /// The part of that which is its alone.
    own_cgroup: Option<String>,
}

impl Found {
    fn into_tenant(self, decision: Decision, threads: Vec<TenantThread>, vnics: Vec<Vnic>) -> Tenant {
        Tenant {
            name: self.name,
            uuid: self.uuid,
            kind: self.kind,
            owner: self.owner,
            process: self.process,
            cgroup: self.own_cgroup,
            class: decision.class,
            class_source: decision.source,
            runtime_cap: decision.runtime_cap,
            threads,
            vnics,
            attached: Vec::new(),
        }
    }
}

impl Finder<'_> {
    fn run(&mut self) {
        let processes = match Processes::read(self.sources) {
            Ok(processes) => processes,
            Err(error) => {
                let subject = self.sources.proc.display().to_string();
                self.unlisted = Some(format!("{subject}: {error}"));
                return self.problem(subject, ProblemKind::Unreadable(error.to_string()));
            }
        };
        if processes.denied > 0 {
            let these = if processes.denied == 1 { "1 process" } else { &format!("{} processes", processes.denied) };
            let what = format!("{these} may not be looked into; tenants may be missing");
            self.problem("/proc", ProblemKind::Unreadable(what));
        }
        let domains = self.domains();
        let mut shared: HashMap<&str, usize> = HashMap::new();
        for cgroup in processes.user.iter().filter_map(|process| process.cgroup.as_deref()) {
            *shared.entry(cgroup).or_default() += 1;
        }
        let mut rest = Vec::new();
        for process in &processes.user {
            match VmProcess::of(self, process, domains.get(&process.pid)) {
                Some(vm) => {
                    let alone = process.cgroup.as_deref().is_some_and(|cgroup| shared.get(cgroup) == Some(&1));
                    self.vm(&vm, alone);
                }
                None => rest.push(process),
            }
        }
        self.stale(&domains);
        self.containers(&rest);
        self.devices(&rest);
        self.kernel_threads(processes.kernel);
    }

    fn problem(&mut self, subject: impl Into<String>, kind: ProblemKind) {
        self.problems.push(Problem::new(subject, kind));
    }

    /// libvirt's domains by process number.
    fn domains(&mut self) -> BTreeMap<i32, Domain> {
        let mut domains = BTreeMap::new();
        let entries = match std::fs::read_dir(&self.sources.libvirt) {
            Ok(entries) => entries,
            // No libvirt here, or not running yet.
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
            match (std::fs::read_to_string(&path), ending) {
                (Ok(text), "xml") => match libvirt::parse_status(&text) {
                    Ok(domain) => drop(domains.insert(domain.pid, domain)),
                    Err(what) => self.problem(path.display().to_string(), ProblemKind::BadStatus(what)),
                },
                (Ok(text), _) => {
                    let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                    by_pid_file.extend(Domain::of_pid_file(&name, &text));
                }
                (Err(error), _) if error.kind() == std::io::ErrorKind::NotFound => {}
                (Err(error), _) => {
                    files::note(&error);
                    self.problem(path.display().to_string(), ProblemKind::Unreadable(error.to_string()));
                }
            }
        }
        // A VM whose status file is damaged or not written yet is still libvirt's. Helpers have such files too; they are told
        // by their command line later.
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

    fn thread(&self, pid: i32, stat: &Stat, role: ThreadRole, domain: Option<&Domain>) -> TenantThread {
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

    fn containers(&mut self, processes: &[&Process]) {
        let mut members: BTreeMap<String, (Option<container::Identity>, Vec<&Process>)> = BTreeMap::new();
        let mut known: HashMap<&str, Option<(String, Option<container::Identity>)>> = HashMap::new();
        for process in processes {
            let Some(path) = process.cgroup.as_deref() else { continue };
            let place = known.entry(path).or_insert_with(|| self.container_of(path));
            if let Some((cgroup, identity)) = place.clone() {
                members.entry(cgroup).or_insert_with(|| (identity, Vec::new())).1.push(process);
            }
        }
        for (cgroup, (identity, processes)) in members {
            self.container(cgroup, identity, &processes);
        }
    }

    /// A container by its cgroup's form, or the topmost cgroup that a rule names.
    fn container_of(&self, path: &str) -> Option<(String, Option<container::Identity>)> {
        if let Some(container) = container::of_path(path) {
            return Some((container.cgroup, Some(container.id)));
        }
        if container::libvirt_scope(path).is_some() {
            return None;
        }
        ancestors(path).find(|part| self.rules.names_cgroup(part)).map(|part| (part.to_owned(), None))
    }

    fn container(&mut self, cgroup: String, identity: Option<container::Identity>, processes: &[&Process]) {
        let mut threads = Vec::new();
        let mut first: Option<ThreadId> = None;
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        for process in processes.iter().filter(|process| process.pid != 1 && process.pid != own) {
            let stats = self.sources.threads(process.pid);
            let Some(id) = main_thread(process.pid, &stats) else { continue };
            first = Some(first.filter(|first| (first.start_time, first.pid) <= (id.start_time, id.pid)).unwrap_or(id));
            threads.extend(stats.iter().map(|stat| self.thread(process.pid, stat, ThreadRole::Container, None)));
        }
        let Some(process) = first else { return };
        let name = match &identity {
            Some(identity) => self.names.name(identity),
            None => cgroup.rsplit('/').next().unwrap_or(&cgroup).to_owned(),
        };
        let owner = container::owner_of_path(&cgroup);
        let found = Found {
            name,
            uuid: None,
            kind: Kind::Container,
            owner,
            namer: Namer::User(owner),
            process,
            own_cgroup: Some(cgroup.clone()),
            cgroup: Some(cgroup),
        };
        let decision = self.decide(&found, None);
        let vnics = self.container_vnics(process.pid);
        let attached = self.attached(process);
        self.tenants.push(Tenant { attached, ..found.into_tenant(decision, threads, vnics) });
    }

    /// The host's ends of a container's veth pairs. Where the kernel does not tell, there are none.
    fn container_vnics(&mut self, pid: i32) -> Vec<Vnic> {
        if !self.sources.live {
            return Vec::new();
        }
        let peers = self.peers.get_or_insert_with(|| Peers::read().inspect_err(files::note).ok());
        let names = peers.as_ref().map(|peers| peers.of_process(pid)).unwrap_or_default();
        names.iter().map(|name| self.network.vnic(name)).collect()
    }

    /// The interfaces in a container's own network namespace that stand on the host's. Where they cannot be asked for, there are none.
    fn attached(&mut self, process: ThreadId) -> Vec<Attached> {
        let Some(namespace) = self.sources.own_network(process.pid) else { return Vec::new() };
        let known = self.standing.entry(namespace).or_insert_with(|| {
            let standing = peers::standing(process).inspect_err(files::note).unwrap_or_default();
            let attached = standing.into_iter().filter_map(|own| {
                let lower = self.network.vnic(self.network.name_of(own.on)?).lower;
                Some(Attached { name: printable(own.name.as_bytes()), mac: own.mac, lower })
            });
            attached.collect()
        });
        known.clone()
    }

    fn decide(&mut self, found: &Found, metadata: Option<Verdict>) -> Decision {
        let subject = Subject {
            name: &found.name,
            uuid: found.uuid.as_deref(),
            cgroup: found.cgroup.as_deref(),
            kind: found.kind,
            owner: found.owner,
            namer: found.namer,
        };
        let decision = self.rules.decide(&subject, metadata);
        if let (Some(rule), ClassSource::Default) = (&decision.withheld, &decision.source) {
            let kind = ProblemKind::RuleWithheld { rule: rule.clone(), namer: found.namer };
            self.problem(&found.name, kind);
        }
        decision
    }

    /// Gives the threads of device processes to the one VM that they serve. Not those that another user's session, or a container, started: every
    /// event of a tenant's process causes a look at the host.
    fn devices(&mut self, processes: &[&Process]) {
        let known = self.sources.devices.known();
        for (process, vm) in &known {
            if self.sources.identity(process.pid) == Some(*process) {
                self.serve(process.pid, vm, None);
            } else if !self.sources.process_dir(process.pid).exists() {
                self.sources.devices.forget(*process);
            }
        }
        for process in processes.iter().filter(|process| vmm::may_serve(&process.executable)) {
            let cgroup = process.cgroup.as_deref().unwrap_or("/");
            let Some(id) = self.sources.identity(process.pid).filter(|_| container::of_path(cgroup).is_none()) else {
                continue;
            };
            if known.iter().any(|(process, _)| *process == id) {
                continue;
            }
            let arguments = self.sources.arguments(process.pid);
            // A unit may have been told to serve another VM: its name counts where there is such a VM.
            let says = [devices::by_unit(cgroup), vmm::served(&arguments)];
            let user = Some(container::owner_of_path(cgroup));
            if let Some(vm) = says.into_iter().flatten().find(|vm| self.serve(process.pid, vm, user)) {
                self.sources.devices.note(id, vm);
            }
        }
    }

    /// Gives a device process's threads to the one VM of this name, if this user may.
    fn serve(&mut self, pid: i32, vm: &str, user: Option<u32>) -> bool {
        let serves = |tenant: &&mut Tenant| tenant.kind != Kind::Container && tenant.name == vm;
        let may = |tenant: &Tenant| user.is_none_or(|user| user == 0 || user == tenant.owner);
        let threads: Vec<TenantThread> =
            self.sources.threads(pid).iter().map(|stat| self.thread(pid, stat, ThreadRole::Device, None)).collect();
        let mut named = self.tenants.iter_mut().filter(serves);
        match (named.next(), named.next()) {
            (Some(tenant), None) if may(tenant) => {
                tenant.threads.extend(threads);
                true
            }
            _ => false,
        }
    }

    /// Gives kernel threads to the VM they work for: by its process number, else by one of its threads'.
    fn kernel_threads(&mut self, kernel: Vec<KernelThread>) {
        for KernelThread { stat, role, works_for } in kernel {
            let thread = self.thread(stat.tid, &stat, role, None);
            let is_vm = |tenant: &&mut Tenant| tenant.kind != Kind::Container;
            let by_process = self.tenants.iter_mut().filter(is_vm).find(|tenant| tenant.process.pid == works_for);
            let tenant = match by_process {
                Some(tenant) => Some(tenant),
                None => self
                    .tenants
                    .iter_mut()
                    .filter(is_vm)
                    .find(|tenant| tenant.threads.iter().any(|one| one.id.tid == works_for)),
            };
            if let Some(tenant) = tenant {
                tenant.threads.push(thread);
            }
        }
    }
}

fn main_thread(pid: i32, stats: &[Stat]) -> Option<ThreadId> {
    let main = stats.iter().find(|stat| stat.tid == pid)?;
    Some(ThreadId { pid, tid: pid, start_time: main.start_time })
}

/// A cgroup's path and its parents', topmost first, without the root.
pub(crate) fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    let ends = path.char_indices().filter(|(at, c)| *c == '/' && *at > 0).map(|(at, _)| at);
    ends.chain(std::iter::once(path.len())).filter_map(|end| path.get(..end)).filter(|part| part.len() > 1)
}
