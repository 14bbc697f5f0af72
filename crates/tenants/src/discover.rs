//! Finding tenants.
//!
//! In: a host ([`Sources`]) and its [`Rules`]. Out: a [`Discovery`]: every tenant with its threads and class, and every
//! problem on the way. One odd or vanishing process never spoils the rest.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use crate::class::Class;
use crate::conflict;
use crate::container::{self, Names};
use crate::host::{KernelThread, Process, Processes, Sources};
use crate::libvirt::{self, Domain};
use crate::model::{ClassSource, Kind, LibvirtTuning, Tenant, TenantThread, ThreadRole, Vnic};
use crate::problem::{Problem, ProblemKind};
use crate::proc::{Stat, printable};
use crate::rules::{Rules, Subject, Verdict};
use crate::thread::ThreadId;
use crate::vmm::{self, QemuArguments, Vmm};
use crate::vnic::{self, Network};

/// What runs on the host at one moment.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Discovery {
    /// VMs first, then containers; each by name.
    pub tenants: Vec<Tenant>,
    /// What could not be read or works against the table.
    pub problems: Vec<Problem>,
}

/// Finds all tenants of a host. Never fails as a whole.
pub fn discover(sources: &Sources, rules: &Rules) -> Discovery {
    let mut found = Finder {
        sources,
        rules,
        network: Network::at(&sources.net),
        names: Names::below(&sources.runtimes),
        tenants: Vec::new(),
        problems: Vec::new(),
    };
    found.run();
    let Finder { mut tenants, mut problems, .. } = found;
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
    Discovery { tenants, problems }
}

struct Finder<'a> {
    sources: &'a Sources,
    rules: &'a Rules,
    network: Network,
    names: Names,
    tenants: Vec<Tenant>,
    problems: Vec<Problem>,
}

/// What is known of a tenant before its class is.
struct Found {
    name: String,
    uuid: Option<String>,
    kind: Kind,
    owner: u32,
    process: ThreadId,
    /// Where its processes are.
    cgroup: Option<String>,
    /// Whether that cgroup is its alone, and which part of the path.
    own_cgroup: Option<String>,
    metadata: Option<Verdict>,
    threads: Vec<TenantThread>,
    vnics: Vec<Vnic>,
}

impl Finder<'_> {
    fn run(&mut self) {
        let processes = match Processes::read(self.sources) {
            Ok(processes) => processes,
            Err(error) => {
                return self
                    .problem(self.sources.proc.display().to_string(), ProblemKind::Unreadable(error.to_string()));
            }
        };
        if processes.denied > 0 {
            let what = format!("{} processes may not be looked into; tenants may be missing", processes.denied);
            self.problem("/proc", ProblemKind::Unreadable(what));
        }
        let domains = self.domains();
        let mut shared: HashMap<&str, usize> = HashMap::new();
        for cgroup in processes.user.iter().filter_map(|process| process.cgroup.as_deref()) {
            *shared.entry(cgroup).or_default() += 1;
        }
        let mut rest = Vec::new();
        for process in &processes.user {
            let domain = domains.get(&process.pid).filter(|domain| self.is_domain(process, domain));
            match Vmm::of_executable(&process.executable).or(domain.map(|_| Vmm::Qemu)) {
                Some(vmm) => {
                    let alone = process.cgroup.as_deref().is_some_and(|cgroup| shared.get(cgroup) == Some(&1));
                    self.vm(process, vmm, domain, alone);
                }
                None => rest.push(process),
            }
        }
        self.stale(&domains);
        self.containers(&rest);
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
                let subject = self.sources.libvirt.display().to_string();
                self.problem(subject, ProblemKind::Unreadable(error.to_string()));
                return domains;
            }
        };
        for path in
            entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "xml"))
        {
            match std::fs::read_to_string(&path) {
                Ok(text) => match libvirt::parse_status(&text) {
                    Ok(domain) => {
                        domains.insert(domain.pid, domain);
                    }
                    Err(what) => self.problem(path.display().to_string(), ProblemKind::BadStatus(what)),
                },
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => self.problem(path.display().to_string(), ProblemKind::Unreadable(error.to_string())),
            }
        }
        domains
    }

    /// After a crash of libvirt its files may name a process number that somebody else has now.
    fn is_domain(&self, process: &Process, domain: &Domain) -> bool {
        let arguments = vmm::qemu_arguments(&self.sources.arguments(process.pid));
        arguments.name.as_deref() == Some(&domain.name) || (arguments.uuid.is_some() && arguments.uuid == domain.uuid)
    }

    fn stale(&mut self, domains: &BTreeMap<i32, Domain>) {
        for (pid, domain) in domains {
            let runs = |tenant: &Tenant| tenant.kind == Kind::Libvirt && tenant.process.pid == *pid;
            if !self.tenants.iter().any(runs) {
                self.problem(&domain.name, ProblemKind::StaleDomain(*pid));
            }
        }
    }

    fn vm(&mut self, process: &Process, vmm: Vmm, domain: Option<&Domain>, alone: bool) {
        let stats = self.sources.threads(process.pid);
        let Some(id) = main_thread(process.pid, &stats) else { return };
        let line = self.sources.arguments(process.pid);
        let arguments = if vmm == Vmm::Qemu { vmm::qemu_arguments(&line) } else { QemuArguments::default() };
        let name = match domain {
            Some(domain) => domain.name.clone(),
            None => arguments
                .name
                .clone()
                .or_else(|| vmm::other_name(&line))
                .filter(|name| !name.is_empty())
                .map_or_else(|| format!("vm-{}", process.pid), |name| printable(name.as_bytes())),
        };
        let kind = match (domain, vmm) {
            (Some(_), _) => Kind::Libvirt,
            (None, Vmm::Qemu) => Kind::Qemu,
            (None, Vmm::Other(_)) => Kind::Vmm,
        };
        // Where the owner cannot be read, it must not count as root.
        let owner = if domain.is_some() { 0 } else { self.sources.owner(process.pid).unwrap_or(u32::MAX) };
        let roles = self.roles(&name, id, vmm, &stats, domain, &arguments);
        let threads =
            stats.iter().zip(roles).map(|(stat, role)| self.thread(process.pid, stat, role, domain)).collect();
        let cgroup = process.cgroup.clone();
        let own_cgroup = cgroup.as_deref().and_then(|path| match container::libvirt_scope(path) {
            Some(scope) => Some(scope.to_owned()),
            None => (alone && path != "/").then(|| path.to_owned()),
        });
        let metadata = domain.and_then(|domain| self.metadata(domain));
        let vnics = self.vnics(&name, process.pid, domain, &arguments);
        self.finish(Found {
            uuid: domain
                .map_or(arguments.uuid.clone(), |domain| domain.uuid.clone())
                .map(|uuid| printable(uuid.as_bytes())),
            metadata,
            vnics,
            name,
            kind,
            owner,
            process: id,
            cgroup,
            own_cgroup,
            threads,
        });
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

    /// What each thread does: by its name; where names do not tell the vCPUs, by libvirt's record or QEMU's monitor.
    fn roles(
        &mut self,
        name: &str,
        id: ThreadId,
        vmm: Vmm,
        stats: &[Stat],
        domain: Option<&Domain>,
        arguments: &QemuArguments,
    ) -> Vec<ThreadRole> {
        let mut roles: Vec<ThreadRole> = stats.iter().map(|stat| vmm.role(stat)).collect();
        // A QEMU with its main and RCU threads only has not made its vCPUs yet.
        if roles.iter().any(|role| matches!(role, ThreadRole::Vcpu(_))) || stats.len() < 3 {
            return roles;
        }
        let vcpus = match domain {
            Some(domain) => domain.vcpu_tids.clone(),
            None if vmm == Vmm::Qemu && self.sources.live => {
                let alive: Vec<i32> = stats.iter().map(|stat| stat.tid).collect();
                match self.sources.monitors.vcpus(id, &alive, &arguments.qmp_sockets) {
                    Ok(vcpus) => vcpus,
                    Err(why) => {
                        self.problem(name, ProblemKind::VcpusUnnamed(why));
                        return roles;
                    }
                }
            }
            None => {
                self.problem(name, ProblemKind::VcpusUnnamed("no thread has a vCPU's name".to_owned()));
                return roles;
            }
        };
        for (stat, role) in stats.iter().zip(roles.iter_mut()) {
            if let Some(number) = vcpus.get(&stat.tid).filter(|_| stat.tid != id.tid) {
                *role = ThreadRole::Vcpu(*number);
            }
        }
        roles
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

    fn vnics(&mut self, name: &str, pid: i32, domain: Option<&Domain>, arguments: &QemuArguments) -> Vec<Vnic> {
        let interfaces = match domain {
            Some(domain) => domain.interfaces.clone(),
            None => vnic::of_open_files(&self.sources.process_dir(pid), &self.network)
                .unwrap_or_else(|_| arguments.interfaces.clone()),
        };
        let (here, elsewhere): (Vec<_>, Vec<_>) = interfaces.into_iter().partition(|ifname| self.network.has(ifname));
        for ifname in elsewhere {
            self.problem(name, ProblemKind::VnicElsewhere(printable(ifname.as_bytes())));
        }
        here.iter().map(|ifname| self.network.vnic(ifname)).collect()
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
        for process in processes.iter().filter(|process| process.pid != 1) {
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
        self.finish(Found {
            name,
            uuid: None,
            kind: Kind::Container,
            owner: container::owner_of_path(&cgroup),
            process,
            own_cgroup: Some(cgroup.clone()),
            cgroup: Some(cgroup),
            metadata: None,
            threads,
            vnics: Vec::new(),
        });
    }

    /// Decides the class.
    fn finish(&mut self, found: Found) {
        let subject = Subject {
            name: &found.name,
            uuid: found.uuid.as_deref(),
            cgroup: found.cgroup.as_deref(),
            kind: found.kind,
            owner: found.owner,
        };
        let decision = self.rules.decide(&subject, found.metadata);
        if let (Some(rule), Class::Bulk, ClassSource::Default) = (decision.withheld, decision.class, &decision.source) {
            self.problem(&found.name, ProblemKind::RuleWithheld { rule, owner: found.owner });
        }
        self.tenants.push(Tenant {
            name: found.name,
            uuid: found.uuid,
            kind: found.kind,
            owner: found.owner,
            process: found.process,
            cgroup: found.own_cgroup,
            class: decision.class,
            class_source: decision.source,
            runtime_cap: decision.runtime_cap,
            threads: found.threads,
            vnics: found.vnics,
        });
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
