//! Data that processes on the host influence: `/proc`, command lines, cgroups, monitors, libvirt's files.

use std::fmt::Write;

use ontime_tenants::Policy;
use ontime_tenants::container::{self, Container, Identity};
use ontime_tenants::libvirt::{self, Domain};
use ontime_tenants::proc::{self, Stat};
use ontime_tenants::{CpuSet, ThreadRole, qmp, vmm};

/// Whether the text is fit for a terminal and a log.
fn is_plain(text: &str) -> bool {
    !text.contains(char::is_control)
}

/// The files of `/proc` from which tenants are read. Input: any of them.
///
/// Property: names and paths are fit for a terminal and bounded; a parsed stat line, cgroup or CPU list is the same
/// after writing and parsing it again; a uid is the one in the line.
pub fn proc(data: &[u8]) {
    if let Some(stat) = proc::parse_stat(data) {
        assert!(is_plain(&stat.comm) && stat.comm.chars().count() <= 255);
        assert_eq!(proc::parse_stat(stat_line(&stat).as_bytes()), Some(stat));
    }
    if let Some(path) = proc::parse_cgroup(data) {
        assert!(path.starts_with('/') && is_plain(&path) && path.chars().count() <= 4096);
        let again = proc::parse_cgroup(format!("0::{path}\n").as_bytes());
        assert!(path.ends_with(" (deleted)") || again.as_deref() == Some(&path));
    }
    let old = proc::parse_cgroup_v1(data);
    assert!(old.len() <= data.len() && old.iter().all(|path| path.len() > 1 && is_plain(path)));
    if let Some((real, effective)) = proc::parse_uids(data) {
        let line = format!("Uid:\t{real}\t{effective}\t0\t0\n");
        assert_eq!(proc::parse_uids(line.as_bytes()), Some((real, effective)));
    }
    if let Some(pid) = proc::parse_inner_pid(data) {
        assert_eq!(proc::parse_inner_pid(format!("NSpid:\t1\t{pid}\n").as_bytes()), Some(pid));
    }
    if let Some(value) = proc::status_value(data, "iff") {
        assert!(!value.contains('\n') && value.trim() == value);
    }
    let _ = (proc::parse_boot_time(data), proc::parse_schedstat(data));
    if let Ok(cpus) = String::from_utf8_lossy(data).parse::<CpuSet>() {
        assert_eq!(cpus.to_string().parse(), Ok(cpus.clone()));
        assert!(cpus.iter().all(|cpu| cpu <= ontime_tenants::cpus::CPU_MAX));
    }
}

/// A stat line as the kernel writes it (`fs/proc/array.c`).
fn stat_line(stat: &Stat) -> String {
    let (number, nice, priority) = match stat.policy {
        Policy::Other { nice } => (0, nice, 0),
        Policy::Fifo(priority) => (1, 0, priority),
        Policy::Rr(priority) => (2, 0, priority),
        Policy::Batch { nice } => (3, nice, 0),
        Policy::Idle => (5, 0, 0),
        Policy::Deadline { .. } => (6, 0, 0),
        Policy::Ext { nice } => (7, nice, 0),
    };
    let Stat { tid, comm, state, ppid, flags, start_time, last_cpu, guest_time, .. } = stat;
    format!(
        "{tid} ({comm}) {state} {ppid} 0 0 0 0 {flags} 0 0 0 0 0 0 0 0 0 {nice} 0 0 {start_time} 0 0 0 0 0 0 0 0 0 0 0 \
         0 0 0 0 0 {last_cpu} {priority} {number} 0 {guest_time} 0\n"
    )
}

/// A command line from `/proc/PID/cmdline`. Input: the arguments, with a zero byte after each.
///
/// Property: parsed values come from the arguments: no name, path or interface is longer than all arguments, and at
/// most one comes from each argument. The messages about delaying options are fit for a log.
pub fn cmdline(data: &[u8]) {
    let arguments = proc::parse_cmdline(data);
    assert!(arguments.len() <= data.len() && arguments.iter().all(|argument| !argument.contains('\0')));
    let length: usize = arguments.iter().map(String::len).sum();
    let said = vmm::qemu_arguments(&arguments);
    for text in said.name.iter().chain(&said.uuid).chain(&said.qmp_sockets).chain(&said.interfaces) {
        // A letter may need more bytes in lower case.
        assert!(text.len() <= 2 * length);
    }
    assert!(said.qmp_sockets.len() + said.interfaces.len() <= arguments.len());
    assert!(said.qmp_sockets.iter().all(|path| !path.is_empty()));
    for delay in vmm::delays(&arguments) {
        assert!(is_plain(&delay.to_string()) && is_plain(&delay.remedy()), "{delay:?}");
    }
    if let Some(name) = vmm::other_name(&arguments) {
        assert!(arguments.iter().any(|argument| argument.ends_with(&name)));
    }
    if let Some(name) = vmm::served(&arguments) {
        assert!(arguments.iter().skip(1).any(|argument| argument.ends_with(name)));
    }
    for argument in &arguments {
        let _ = (vmm::Vmm::of_executable(argument), vmm::may_serve(argument));
        if let Some(number) = vmm::vcpu_number(argument) {
            let digits = argument.bytes().any(|byte| byte.is_ascii_digit());
            assert!(digits || number == 0);
        }
        if let Some((role, number)) = vmm::kernel_thread(argument) {
            assert!(matches!(role, ThreadRole::Vhost | ThreadRole::KvmPit));
            assert!(argument.ends_with(&number.unsigned_abs().to_string()) || argument.contains(['+', '0']));
        }
    }
}

/// The path of a cgroup. Input: `/proc/PID/cgroup`, or the path alone, to which a slash is prepended.
///
/// Property: a container's cgroup is a prefix of the path that ends at a component's end. Components below the first
/// directory inside the container, whose names the container chooses, have no effect. Identifiers are hexadecimal,
/// names are fit for a terminal. The owner of a user's slice is the user in the slice's name.
pub fn cgroup(data: &[u8]) {
    let whole =
        proc::parse_cgroup(data).unwrap_or_else(|| format!("/{}", proc::printable(data).trim_start_matches('/')));
    let path = whole.as_str();
    if let Some(found) = container::of_path(path) {
        ends_at_component(path, &found.cgroup);
        named(&found);
        let inside = path.strip_prefix(&found.cgroup).unwrap();
        let first = inside.split('/').nth(1).map_or(String::new(), |child| format!("/{child}"));
        let id = "0123456789abcdef".repeat(4);
        for forged in [format!("/docker-{id}.scope"), "/machine-x.scope/payload".to_owned(), "/lxc/101".to_owned()] {
            // Without a first directory, the forged one would be the first.
            let first = if first.is_empty() { "/init" } else { &first };
            let again = container::of_path(&format!("{}{first}{forged}", found.cgroup));
            if !inside.is_empty() {
                assert_eq!(again.as_ref(), Some(&found), "{path} and {forged}");
            }
        }
        if let Some(scope) = container::vm_scope(path) {
            assert!(found.cgroup.starts_with(scope), "a VM's scope inside of a container: {path}");
        }
    }
    if let Some(scope) = container::vm_scope(path) {
        ends_at_component(path, scope);
    }
    if let Some(scope) = container::libvirt_scope(path) {
        assert_eq!(container::vm_scope(path), Some(scope));
    }
    let owner = container::owner_of_path(path);
    assert!(owner == 0 || path.starts_with("/user.slice/user-"));
    assert_eq!(container::owner_of_path(&format!("/user.slice/user-1000.slice{path}")), 1000);
}

fn ends_at_component(path: &str, part: &str) {
    let rest = path.strip_prefix(part).expect("a part of the path");
    assert!(rest.is_empty() || rest.starts_with('/'), "{part} of {path}");
}

fn named(container: &Container) {
    match &container.id {
        Identity::Id(id) if id.len() == 25 => assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric())),
        Identity::Id(id) | Identity::Unknown(id) => {
            assert!((12..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
            assert_eq!(container.id.id(), Some(id.as_str()));
        }
        Identity::Name(name) | Identity::Lxc(name) => assert!(is_plain(name)),
        Identity::Machine { unit, name } => assert!(is_plain(name) && !unit.contains('/')),
    }
}

/// libvirt's live status file. Input: the XML.
///
/// Property: parsed values are fit for a terminal and within range; they are the same after writing and parsing a
/// status file with them; error messages are fit for a log.
pub fn libvirt(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let domain = match libvirt::parse_status(&text) {
        Ok(domain) => domain,
        Err(why) => return assert!(is_plain(&why), "{why:?}"),
    };
    assert!(domain.pid > 0 && !domain.name.is_empty() && domain.is_whole());
    let interfaces = domain.interfaces.iter().flatten();
    let uuid = domain.uuid.iter();
    assert!(interfaces.chain(uuid).chain([&domain.name]).all(|text| is_plain(text) && text.chars().count() <= 765));
    if let Some(verdict) = &domain.metadata {
        match verdict {
            Ok(verdict) => assert!(verdict.runtime_cap.is_none_or(|cap| cap.get() > 0.0 && cap.get() <= 1.0)),
            Err(why) => assert!(is_plain(why), "{why:?}"),
        }
    }
    let roles = (0..4).map(ThreadRole::Vcpu).chain([ThreadRole::Iothread, ThreadRole::Emulator, ThreadRole::Vhost]);
    for tuning in roles.map(|role| domain.tuning(role, "IO iothread1")) {
        if let Some(Policy::Fifo(priority) | Policy::Rr(priority)) = tuning.sched {
            assert!((1..=99).contains(&priority));
        }
        assert!(tuning.cpus.is_none_or(|cpus| is_plain(&cpus)));
    }
    let again = libvirt::parse_status(&status(&domain)).expect("its own status file");
    // A name is truncated at its end and parsed without white space there.
    assert_eq!(again.name, domain.name.trim());
    assert_eq!((again.pid, &again.vcpu_tids, again.user), (domain.pid, &domain.vcpu_tids, domain.user));
    assert_eq!(again.interfaces, domain.interfaces);
    let pid_file = Domain::of_pid_file(&domain.name, &domain.pid.to_string()).expect("a pid");
    assert_eq!((pid_file.pid, pid_file.is_whole()), (domain.pid, false));
}

fn status(domain: &Domain) -> String {
    let escaped =
        |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;");
    let mut xml = format!("<domstatus pid='{}'><vcpus>", domain.pid);
    for (tid, vcpu) in &domain.vcpu_tids {
        write!(xml, "<vcpu id='{vcpu}' pid='{tid}'/>").unwrap();
    }
    write!(xml, "</vcpus><domain><name>{}</name><devices>", escaped(&domain.name)).unwrap();
    for interface in domain.interfaces.iter().flatten() {
        write!(xml, "<interface type='bridge'><target dev='{}'/></interface>", escaped(interface)).unwrap();
    }
    xml += "</devices>";
    if let Some(user) = domain.user {
        write!(xml, "<seclabel model='dac'><label>+{user}:+{user}</label></seclabel>").unwrap();
    }
    xml + "</domain></domstatus>"
}

/// A monitor's answers on its QMP socket. Input: all bytes that it sends.
///
/// Property: only the two commands are sent, in order; parsed vCPUs are the same if a monitor answers with just these.
pub fn qmp(data: &[u8]) {
    let mut said = Vec::new();
    let found = qmp::converse(data, |command| {
        said.push(command.to_owned());
        Ok(())
    });
    let all = ["{\"execute\":\"qmp_capabilities\"}\n", "{\"execute\":\"query-cpus-fast\"}\n"];
    assert!(said.len() <= all.len() && said.iter().zip(all).all(|(one, other)| one == other), "{said:?}");
    let Ok(vcpus) = found else { return };
    assert_eq!(said.len(), all.len());
    let cpus: Vec<String> =
        vcpus.iter().map(|(tid, vcpu)| format!("{{\"thread-id\":{tid},\"cpu-index\":{vcpu}}}")).collect();
    let script = format!("{{\"QMP\":{{}}}}\n{{\"return\":{{}}}}\n{{\"return\":[{}]}}\n", cpus.join(","));
    assert_eq!(qmp::converse(script.as_bytes(), |_| Ok(())).expect("its own answer"), vcpus);
}
