//! Containers, identified by their cgroup's path.
//!
//! Input: cgroup v2 paths, and the runtimes' state files for names. Output: a [`Container`] per path. No runtime's
//! daemon is contacted. docs/use/tenants.md lists the layouts.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Component, Path, PathBuf};

use globset::Glob;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::files;
use crate::proc::printable;

/// The largest state file that is read, bytes.
const STATE_MAX: u64 = 4 << 20;
/// Digits of a container identifier (a hash of random data, as all OCI managers use).
const ID_LENGTH: usize = 64;

/// A container as identified by its cgroup's path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// The path of the container's own cgroup.
    pub cgroup: String,
    /// The name or identifier in that path.
    pub id: Identity,
}

/// A container's identity in its cgroup's path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The container's name (libvirt's LXC driver, runc, crun).
    Name(String),
    /// The name of an LXC container's cgroup: the container's name, or, if a cgroup of that name was left over from an
    /// earlier start, the name and a number (`web-1`).
    Lxc(String),
    /// A machine of systemd-machined.
    Machine {
        /// Its unit, under which machined records the name.
        unit: String,
        /// The name from which systemd derives the unit's name.
        name: String,
    },
    /// A runtime's identifier: hexadecimal, 12 to 64 digits.
    Id(String),
    /// A 64-digit identifier in a layout of an unknown runtime.
    Unknown(String),
}

impl Identity {
    /// The runtime's identifier, if any.
    pub fn id(&self) -> Option<&str> {
        match self {
            Identity::Id(id) | Identity::Unknown(id) => Some(id),
            Identity::Name(_) | Identity::Lxc(_) | Identity::Machine { .. } => None,
        }
    }
}

/// From conmon's arguments: the identifier of the container that it has started, and the name that Podman or CRI-O
/// passed. This also gives names of containers that no storage records (`podman run --rootfs`, another user's).
pub(crate) fn started_by_conmon(arguments: &[String]) -> Option<(String, String)> {
    let name = option(arguments, &["-n", "--name"]).filter(|name| !name.is_empty())?;
    Some((hex_id(option(arguments, &["-c", "--cid"])?)?, given_name(name)))
}

/// The Podman pod to whose containers a conmon in this cgroup belongs, where the pod has a parent of its own and its
/// cgroups are directories: `PARENT/POD/conmon`.
pub(crate) fn pod_of_conmon(path: &str) -> Option<&str> {
    let pod = path.strip_suffix("/conmon")?;
    let is_pod = |found: Container| found.cgroup == pod && matches!(found.id, Identity::Unknown(_));
    of_path(pod).is_some_and(is_pod).then_some(pod)
}

/// The title of LXC's monitor: `[lxc monitor] PATH NAME`.
const LXC_TITLE: &str = "[lxc monitor] ";

/// From the arguments of LXC's monitor: the name of the container that it has started in a cgroup of this name, which
/// is the container's or has a number after it (`cgfsng_payload_create`).
pub(crate) fn started_by_lxc<'a>(arguments: &[String], cgroup: &'a str) -> Option<&'a str> {
    let title = arguments.first()?.strip_prefix(LXC_TITLE)?;
    let is_its = |name: &&str| title.strip_suffix(*name).is_some_and(|before| before.ends_with(' '));
    [Some(cgroup), without_number(cgroup)].into_iter().flatten().find(is_its)
}

/// From the arguments of conmon or of LXC's monitor: the name of the container that it has started.
pub(crate) fn started_by_monitor(arguments: &[String]) -> Option<String> {
    let by_lxc = || {
        let name = arguments.first()?.strip_prefix(LXC_TITLE)?.rsplit(' ').next()?;
        (!name.is_empty()).then(|| printable(name.as_bytes()))
    };
    started_by_conmon(arguments).map(|(_, name)| name).or_else(by_lxc)
}

/// The value of the first of these options in a program's arguments: `--name VALUE` or `--name=VALUE`.
fn option<'a>(arguments: &'a [String], names: &[&str]) -> Option<&'a str> {
    arguments.iter().enumerate().skip(1).find_map(|(at, word)| match word.split_once('=') {
        Some((option, value)) if names.contains(&option) => Some(value),
        _ if names.contains(&word.as_str()) => arguments.get(at + 1).map(String::as_str),
        _ => None,
    })
}

/// A name as shown to users. For a pod's container, which CRI-O and cri-dockerd call
/// `k8s_CONTAINER_POD_NAMESPACE_UID_ATTEMPT`: POD/CONTAINER, as with containerd.
fn given_name(name: &str) -> String {
    let name = match of_kubelet(name) {
        Some(("POD", pod, _)) => pod.to_owned(),
        Some((container, pod, _)) => format!("{pod}/{container}"),
        None => name.to_owned(),
    };
    printable(name.as_bytes())
}

/// Container, pod and namespace in a name of the kubelet's form.
fn of_kubelet(name: &str) -> Option<(&str, &str, &str)> {
    let parts: Vec<&str> = name.strip_prefix("k8s_")?.split('_').collect();
    match parts.as_slice() {
        [container, pod, namespace, _, _] => Some((container, pod, namespace)),
        _ => None,
    }
}

/// Prefixes of runtimes before an identifier, in names of scopes and directories.
const RUNTIMES: [&str; 6] = ["libpod", "libpod-payload", "docker", "crio", "cri-containerd", "nerdctl"];

/// Low-level runtimes without a manager: a name chosen by the runtime's user follows.
const LOW_LEVEL: [&str; 3] = ["runc", "crun", "youki"];

/// Directories of the cgroupfs driver with children that are named by a plain identifier. (Kubernetes has `podUID`.)
const PARENTS: [&str; 6] = ["docker", "buildkit", "k8s.io", "default", "moby", "kata_overhead"];

/// The outermost container on a path.
pub fn of_path(path: &str) -> Option<Container> {
    let mut parent = "";
    let mut end = 0;
    let mut components = path.split('/').skip(1).peekable();
    while let Some(component) = components.next() {
        end += 1 + component.len();
        if let Some(id) = identity(parent, component, components.peek().copied()) {
            return Some(Container { cgroup: path.get(..end)?.to_owned(), id });
        }
        parent = component;
    }
    None
}

/// The innermost container on a path.
pub(crate) fn innermost(path: &str) -> Option<Container> {
    let mut found = of_path(path)?;
    while let Some(inner) = path.get(found.cgroup.len()..).and_then(of_path) {
        found = Container { cgroup: found.cgroup + &inner.cgroup, id: inner.id };
    }
    Some(found)
}

/// The UID of the Kubernetes pod around the outermost container on a path, which the kubelet writes as
/// `kubepods-...-podUID.slice` with `_` for `-`, or as `podUID` below `kubepods`. What is deeper was named inside the
/// container.
pub(crate) fn pod_of(path: &str) -> Option<String> {
    let container = of_path(path)?.cgroup;
    let mut in_kubepods = false;
    for component in container.split('/') {
        // runc's form SLICE:PREFIX:NAME has the slice in the container's own name.
        let slice = component.split(':').next().and_then(|part| part.strip_suffix(".slice"));
        if let Some((before, uid)) = slice.and_then(|slice| slice.rsplit_once("-pod")) {
            if !uid.is_empty() && before.split('-').any(|word| word == "kubepods") {
                return Some(uid.replace('_', "-"));
            }
        }
        let uid = component.strip_prefix("pod").filter(|uid| in_kubepods && !uid.is_empty());
        if let Some(uid) = uid {
            return Some(uid.to_owned());
        }
        in_kubepods |= component == "kubepods";
    }
    None
}

fn identity(parent: &str, component: &str, child: Option<&str>) -> Option<Identity> {
    if let Some(unit) = component.strip_suffix(".service") {
        return service(component, unit, child);
    }
    if let Some(unit) = component.strip_suffix(".scope") {
        if let Some(machine) = unit.strip_prefix("machine-") {
            return machine_scope(component, &unescape(machine), child);
        }
        // systemd-nspawn --keep-unit, in a scope of systemd-run. A container may make a cgroup of that name below its
        // own scope.
        let is_containers = unit.rsplit_once('-').is_some_and(|(_, id)| hex_id(id).is_some());
        if child == Some("payload") && !is_containers {
            return Some(Identity::Machine { unit: component.to_owned(), name: unescape(unit) });
        }
    }
    if let Some(machine) = component.strip_suffix(".libvirt-lxc") {
        // Without systemd: /machine/lxc-PID-NAME.libvirt-lxc, before libvirt 1.2 NAME.libvirt-lxc.
        return Some(Identity::Name(libvirt_lxc(machine).unwrap_or_else(|| printable(machine.as_bytes()))));
    }
    // Below a directory of any name (`lxc.cgroup.dir`).
    if component.starts_with("lxc.monitor") || component == "lxc.pivot" {
        return None;
    }
    if let Some(name) = component.strip_prefix("lxc.payload.") {
        return Some(Identity::Lxc(printable(name.as_bytes())));
    }
    if matches!(parent, "lxc" | "lxc.payload") {
        return Some(Identity::Lxc(printable(component.as_bytes())));
    }
    // With the cgroupfs driver, runc and crun use systemd's form SLICE:PREFIX:NAME as a directory's name.
    let colons = component.rsplit_once(':').and_then(|(rest, name)| {
        let (slice, prefix) = rest.rsplit_once(':')?;
        (slice.is_empty() || slice.ends_with(".slice")).then_some((prefix, name))
    });
    let is_scope = component.ends_with(".scope");
    let unit = component.strip_suffix(".scope").unwrap_or(component);
    let (prefix, id) = colons.or_else(|| unit.rsplit_once('-')).unwrap_or(("", unit));
    if is_helper(prefix) {
        return None;
    }
    if RUNTIMES.contains(&prefix) {
        return hex_id(id).or_else(|| build_step(id).filter(|_| prefix == "docker")).map(Identity::Id);
    }
    let by_user = LOW_LEVEL.iter().find_map(|runtime| unit.strip_prefix(runtime)?.strip_prefix('-'));
    if let Some(name) = by_user.filter(|_| is_scope).or(colons.map(|(_, name)| name)) {
        return Some(hex_id(name).map_or_else(|| Identity::Name(unescape(name)), Identity::Id));
    }
    if let Some(id) = build_step(id).filter(|_| parent == "buildkit") {
        return Some(Identity::Id(id));
    }
    // The cgroupfs driver: /docker/ID, /kubepods/.../podUID/ID. A Podman pod is not a container but contains some.
    let whole = prefix.is_empty();
    let known = whole && (PARENTS.contains(&parent) || parent.starts_with("pod"));
    match hex_id(unit.get(unit.len().saturating_sub(ID_LENGTH)..).unwrap_or(unit)) {
        _ if whole && parent == "libpod_parent" => None,
        // Firecracker's jailer: /PROGRAM/ID, for the VM alone.
        _ if parent.starts_with("firecracker") => None,
        Some(id) if known && (id.len() == ID_LENGTH || parent == "docker") && id.len() == unit.len() => {
            Some(Identity::Id(id))
        }
        Some(id) if id.len() == ID_LENGTH && ends_word(unit.get(..unit.len() - ID_LENGTH)?) => {
            Some(Identity::Unknown(id))
        }
        _ => None,
    }
}

/// Whether the text before an identifier ends at a word boundary and is not a helper's.
fn ends_word(before: &str) -> bool {
    !is_helper(before) && before.chars().next_back().is_none_or(|last| !last.is_ascii_alphanumeric())
}

/// Container monitors have their container's identifier in the name of a cgroup outside of the container.
fn is_helper(prefix: &str) -> bool {
    prefix.contains("conmon")
}

/// Whether a path leads to a container's monitor, which is beside the container: conmon, LXC's monitor, systemd-nspawn.
/// (systemd-nspawn, and Podman in a service, use the name `supervisor` below their unit.)
pub(crate) fn is_monitors(path: &str) -> bool {
    let parents = std::iter::once("").chain(path.split('/'));
    path.split('/').zip(parents).any(|(component, parent)| {
        let scope = component.strip_suffix(".scope");
        let named = scope.unwrap_or(component).rsplit_once('-');
        named.is_some_and(|(prefix, id)| is_helper(prefix) && (scope.is_some() || hex_id(id).is_some()))
            // Podman with cgroupfs: all of them together.
            || component == "conmon"
            || component.starts_with("lxc.monitor")
            || (component == "supervisor" && is_unit(parent))
    })
}

/// Whether a program's file name is that of a container's monitor, which some managers leave in any cgroup
/// (`podman --cgroups=no-conmon`, `lxc-start -F`).
pub(crate) fn is_monitor_program(name: &str) -> bool {
    let names = ["conmon", "conmonrs", "systemd-nspawn", "lxc-start", "libvirt_lxc"];
    names.contains(&name) || name.starts_with("containerd-shim")
}

/// Whether a cgroup belongs to a systemd service or scope.
pub fn is_unit(path: &str) -> bool {
    [".service", ".scope"].iter().any(|kind| path.ends_with(kind))
}

/// The innermost unit around a cgroup, or the cgroup itself if it is a unit. A user's manager does not count: it
/// contains all of the user's units.
pub(crate) fn unit_of(path: &str) -> Option<&str> {
    let is_manager = |unit: &str| unit.rsplit('/').next().is_some_and(|name| name.starts_with("user@"));
    ancestors(path).filter(|part| is_unit(part) && !is_manager(part)).last()
}

/// systemd-nspawn in a service: recognised by its template's name, or by the cgroups that it creates below any service
/// (`--keep-unit`).
fn service(component: &str, unit: &str, child: Option<&str>) -> Option<Identity> {
    let is_nspawn = unit.starts_with("systemd-nspawn@") && child != Some("supervisor");
    let name = unit.rsplit_once('@').map_or(unit, |(_, instance)| instance);
    (is_nspawn || child == Some("payload"))
        .then(|| Identity::Machine { unit: component.to_owned(), name: unescape(name) })
}

/// A scope created by machined. VMs have such scopes, too: a process below `libvirt` or directly in the scope may be a
/// VM's monitor, which the caller decides ([`vm_scope`]).
fn machine_scope(component: &str, machine: &str, child: Option<&str>) -> Option<Identity> {
    // systemd-nspawn puts itself and the container there. Its containers may have any name.
    match child {
        Some("supervisor") => return None,
        Some("payload") => {}
        _ if is_libvirt_vm(machine) => return None,
        _ => {
            if let Some(name) = libvirt_lxc(machine) {
                return Some(Identity::Name(name));
            }
        }
    }
    Some(Identity::Machine { unit: component.to_owned(), name: machine.to_owned() })
}

/// The name in libvirt's machine name, DRIVER-NUMBER-NAME.
fn libvirt_lxc(machine: &str) -> Option<String> {
    let (number, name) = machine.strip_prefix("lxc-")?.split_once('-')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && !name.is_empty()).then(|| printable(name.as_bytes()))
}

/// The VM's name in libvirt's machine name, DRIVER-NUMBER-NAME, with `embed-HASH-` before the number if the driver is
/// inside another program (`virDomainDriverGenerateMachineName`).
fn libvirt_vm(machine: &str) -> Option<&str> {
    let rest = machine.strip_prefix("qemu-").or_else(|| machine.strip_prefix("ch-"))?;
    let embedded = rest.strip_prefix("embed-").and_then(|rest| rest.split_once('-'));
    let (number, name) = embedded.map_or(rest, |(_, rest)| rest).split_once('-')?;
    (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(name)
}

fn is_libvirt_vm(machine: &str) -> bool {
    libvirt_vm(machine).is_some()
}

/// The cgroup that was created for the VM whose monitor is at this path: libvirt's scope, systemd-vmspawn's unit, or a
/// machined scope that directly contains the monitor, not below a container's `payload`.
pub fn vm_scope(path: &str) -> Option<&str> {
    let (mut parent, mut end) = ("", 0);
    let mut components = path.split('/').skip(1).peekable();
    while let Some(component) = components.next() {
        end += 1 + component.len();
        let child = components.peek().copied();
        let machine = component.strip_suffix(".scope").and_then(|unit| unit.strip_prefix("machine-")).map(unescape);
        let is_vms = match machine {
            // The cgroups of systemd-nspawn, whose containers may have any name.
            Some(_) if matches!(child, Some("payload" | "supervisor")) => false,
            Some(machine) if is_libvirt_vm(&machine) => true,
            Some(machine) => libvirt_lxc(&machine).is_none() && child.is_none_or(|child| child == "libvirt"),
            None => component.ends_with(".libvirt-qemu") || vmspawns(component).is_some(),
        };
        if is_vms {
            return path.get(..end);
        }
        // Deeper path components were named inside the container. A cgroup may be one by its own name alone.
        if identity(parent, component, child).is_some() || identity(parent, component, None).is_some() {
            return None;
        }
        parent = component;
    }
    None
}

/// The machine's name in a scope that [`vm_scope`] found. libvirt puts driver and number before the name and may
/// shorten it (`virDomainGenerateMachineName`).
pub(crate) fn name_of_scope(scope: &str) -> Option<String> {
    let name = scope.rsplit('/').next()?;
    if let Some(instance) = vmspawns(name) {
        return Some(unescape(instance)).filter(|name| !name.is_empty());
    }
    let machine = match name.strip_suffix(".libvirt-qemu") {
        Some(machine) => machine.to_owned(),
        None => unescape(name.strip_prefix("machine-")?.strip_suffix(".scope")?),
    };
    let own = libvirt_vm(&machine).unwrap_or(&machine);
    (!own.is_empty()).then(|| own.to_owned())
}

/// The instance name of a template unit's service (`microvm@NAME.service`), if this is its cgroup.
pub(crate) fn instance_of(path: &str) -> Option<String> {
    let (_, instance) = path.rsplit('/').next()?.strip_suffix(".service")?.split_once('@')?;
    Some(unescape(instance)).filter(|name| !name.is_empty())
}

/// The instance name of systemd's template unit for VMs.
fn vmspawns(component: &str) -> Option<&str> {
    component.strip_prefix("systemd-vmspawn@")?.strip_suffix(".service")
}

/// A cgroup's path and its parents', topmost first, without the root.
pub(crate) fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    let ends = path.char_indices().filter(|(at, c)| *c == '/' && *at > 0).map(|(at, _)| at);
    ends.chain(std::iter::once(path.len())).filter_map(|end| path.get(..end)).filter(|part| part.len() > 1)
}

/// The libvirt cgroup of a VM that contains this path.
pub fn libvirt_scope(path: &str) -> Option<&str> {
    let scope = vm_scope(path)?;
    let name = scope.rsplit('/').next()?;
    let machine = name.strip_suffix(".scope").and_then(|unit| unit.strip_prefix("machine-")).map(unescape);
    let is_libvirts = machine.map_or_else(|| name.ends_with(".libvirt-qemu"), |machine| is_libvirt_vm(&machine));
    is_libvirts.then_some(scope)
}

/// The name of libvirt's VM whose cgroup contains this path, if that is another VM than `vm`.
pub fn other_libvirt_vm(path: &str, vm: &str) -> Option<String> {
    let scope = libvirt_scope(path)?;
    let name = name_of_scope(scope).unwrap_or_default();
    let machine = machine_name(vm);
    let is_cut = unescape(scope.rsplit('/').next()?).len() >= "machine-.scope".len() + CUT;
    let is_shortened = is_cut && machine.starts_with(&name);
    (name != vm && name != machine && !is_shortened).then_some(name)
}

/// libvirt cuts names of machines (`qemu-NUMBER-NAME`) at 64 characters, and drops separators at the end.
const CUT: usize = 62;

/// Whether libvirt may give VMs of these names one name in their cgroups, beside a number.
pub fn share_a_machine_name(one: &str, other: &str) -> bool {
    let kept = |vm: &str| machine_name(vm).chars().take(KEPT).collect::<String>();
    kept(one) == kept(other)
}

/// The characters of a name that libvirt keeps whatever the number is.
const KEPT: usize = CUT - "qemu-4294967295-".len();

/// A VM's name in its machine's name (`virDomainMachineNameAppendValid`).
fn machine_name(vm: &str) -> String {
    let mut name = String::new();
    let mut skips = true;
    for c in vm.chars() {
        let separates = matches!(c, '.' | '-');
        if c.is_ascii_alphanumeric() || separates && !skips {
            name.push(c);
        }
        skips = separates;
    }
    name.truncate(name.trim_end_matches(['.', '-']).len());
    name
}

/// The user whose slice contains a path. That user has created and named what is below it.
pub fn owner_of_path(path: &str) -> u32 {
    let user = path.strip_prefix("/user.slice/user-").and_then(|rest| rest.split_once(".slice"));
    user.and_then(|(number, _)| number.parse().ok()).unwrap_or(0)
}

/// The identifier of an image's build step, by BuildKit (`identity.NewID`).
fn build_step(text: &str) -> Option<String> {
    let is_one = text.len() == 25 && text.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_lowercase());
    is_one.then(|| text.to_owned())
}

fn hex_id(text: &str) -> Option<String> {
    let hex = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (hex && (12..=ID_LENGTH).contains(&text.len())).then(|| text.to_owned())
}

/// Decodes systemd's `\x2d` escapes for characters that unit names may not contain.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let escaped = (*first == b'\\')
            .then(|| tail.strip_prefix(b"x")?.get(..2))
            .flatten()
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        match escaped {
            Some(byte) => {
                bytes.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    printable(&bytes)
}

/// Container names from the runtimes' state on disk.
///
/// Only directories that only root may write are read. Names of users' rootless containers come from conmon
/// ([`started_by_conmon`]).
#[derive(Debug)]
pub struct Names {
    root: PathBuf,
    docker: Vec<PathBuf>,
    containerd: Vec<PathBuf>,
    storage: Vec<PathBuf>,
    lxc: Vec<PathBuf>,
    records: Records,
    /// Docker's state directories for containers with a user namespace, read once.
    remapped: Option<Vec<PathBuf>>,
    /// The directories of containerd's namespaces, including those of Kubernetes and nerdctl, read once.
    namespaces: Option<Vec<PathBuf>>,
    /// From `containers/storage`, read once: name by identifier.
    stored: Option<HashMap<String, String>>,
    /// machined's records by unit, each read once.
    machines: HashMap<String, Option<Machine>>,
}

/// A machine that systemd-machined has recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// The name that machined knows it by.
    pub name: String,
    /// Whether it is a VM and no container, if the record says so.
    pub is_vm: Option<bool>,
}

/// Docker's default state directories; `data-root` in its configuration changes them. The last one is the snap's.
const DOCKER: [&str; 2] = ["/var/lib/docker", "/var/snap/docker/common/var-lib-docker"];
/// containerd's state directories: a distribution's or a manual installation's, Bottlerocket's for host containers,
/// those of k3s and RKE2, k0s, MicroK8s, and Docker's own.
const CONTAINERD: [&str; 6] = [
    "/run/containerd",
    "/run/host-containerd",
    "/run/k3s/containerd",
    "/run/k0s/containerd",
    "/var/snap/microk8s/common/run/containerd",
    "/run/docker/containerd/daemon",
];
/// State of Podman, Buildah and CRI-O; the second one is for containers that do not survive a reboot.
const STORAGE: [&str; 2] = ["/var/lib/containers/storage", "/run/containers/storage"];
/// containerd's directory of tasks below its state directory: one for each namespace, with one for each task.
const TASKS: &str = "io.containerd.runtime.v2.task";
/// Most files of containerd's configuration that are read.
const IMPORTS: usize = 64;
/// Dashes in a scope's name behind which the name of a container is searched.
const DASHES: usize = 8;
/// Scopes on a path, from the top, that may be a task's: each dash costs a look into each namespace. Those below were
/// named in the container.
const SCOPES: usize = 2;
/// Names the configuration file of the storage of Podman, Buildah and CRI-O, in the environment of these programs.
pub(crate) const STORAGE_CONF: &str = "CONTAINERS_STORAGE_CONF";
/// Where LXC, Incus and LXD have a directory per container.
const LXC: [&str; 4] =
    ["/var/lib/lxc", "/var/lib/incus/containers", "/var/lib/lxd/containers", "/var/snap/lxd/common/lxd/containers"];

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(rename = "data-root", alias = "graph")]
    data_root: Option<String>,
}

#[derive(Deserialize)]
struct ContainerdConfig {
    state: Option<String>,
    /// Files that are read behind this one; a `*` stands for a part of a name.
    #[serde(default)]
    imports: Vec<PathBuf>,
}

#[derive(Deserialize)]
struct StorageConfig {
    storage: StorageRoots,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct StorageRoots {
    graphroot: Option<String>,
    runroot: Option<String>,
}

impl StorageConfig {
    fn roots(self) -> impl Iterator<Item = String> {
        [self.storage.graphroot, self.storage.runroot].into_iter().flatten()
    }
}

#[derive(Deserialize)]
struct CrioConfig {
    crio: CrioRoots,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct CrioRoots {
    root: Option<String>,
    runroot: Option<String>,
}

impl CrioConfig {
    fn roots(self) -> impl Iterator<Item = String> {
        [self.crio.root, self.crio.runroot].into_iter().flatten()
    }
}

#[derive(Deserialize)]
struct DockerState {
    #[serde(rename = "Name")]
    name: String,
}

#[derive(Deserialize)]
struct OciState {
    #[serde(default)]
    annotations: Option<HashMap<String, String>>,
}

#[derive(Deserialize)]
struct StoredContainer {
    id: String,
    #[serde(default)]
    names: Option<Vec<String>>,
}

/// Reads runtimes' records and configurations. Keeps why a record that exists is not used.
#[derive(Debug, Default)]
struct Records(RefCell<BTreeMap<PathBuf, String>>);

impl Records {
    fn bytes(&self, path: &Path) -> Option<Vec<u8>> {
        let size = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?.len();
        if size > STATE_MAX {
            let (size, most) = (size.div_ceil(1 << 20), STATE_MAX >> 20);
            self.0.borrow_mut().insert(path.to_owned(), format!("it has {size} MiB, of which {most} may be read"));
            return None;
        }
        let read = std::fs::read(path).inspect_err(|error| {
            files::note(error);
            if error.kind() != io::ErrorKind::NotFound {
                self.0.borrow_mut().insert(path.to_owned(), format!("it cannot be read: {error}"));
            }
        });
        read.ok()
    }

    fn json<T: DeserializeOwned>(&self, path: &Path) -> Option<T> {
        let read = serde_json::from_slice(&self.bytes(path)?).inspect_err(|error| {
            let why = format!("it is damaged in line {}, column {}", error.line(), error.column());
            self.0.borrow_mut().insert(path.to_owned(), why);
        });
        read.ok()
    }

    /// A daemon's configuration. No container is named there, and the daemon itself tells what is wrong with it.
    fn settings<T: DeserializeOwned>(&self, path: &Path) -> Option<T> {
        serde_json::from_slice(&self.bytes(path)?).ok()
    }

    fn toml<T: DeserializeOwned>(&self, path: &Path) -> Option<T> {
        toml::from_str(std::str::from_utf8(&self.bytes(path)?).ok()?).ok()
    }

    /// containerd's state directories by its configuration and the files that it imports
    /// (`cmd/containerd/server/config/config.go`, `LoadConfig`): the last one counts, so that comes first.
    fn containerd(&self, root: &Path, file: &Path) -> Vec<String> {
        let (mut states, mut files, mut next) = (Vec::new(), vec![file.to_owned()], 0);
        while let Some(file) = files.get(next).cloned() {
            next += 1;
            let Some(config) = self.toml::<ContainerdConfig>(&file) else { continue };
            states.extend(config.state);
            for import in config.imports {
                let beside = file.parent().unwrap_or(root);
                let import = import.strip_prefix("/").map_or_else(|_| beside.join(&import), |path| root.join(path));
                let new = expand(&import).into_iter().filter(|path| !files.contains(path)).collect::<Vec<_>>();
                files.extend(new.into_iter().take(IMPORTS.saturating_sub(files.len())));
            }
        }
        states.reverse();
        states
    }
}

impl Names {
    /// The runtimes' state below a root directory (`/` on a real host), at the configured and the default locations.
    pub fn below(root: &Path) -> Self {
        let at = |path: &str| root.join(path.trim_start_matches('/'));
        let records = Records::default();
        let docker: Option<DockerConfig> = records.settings(&at("etc/docker/daemon.json"));
        let containerd = records.containerd(root, &at("etc/containerd/config.toml"));
        let storage = ["usr/share/containers/storage.conf", "etc/containers/storage.conf"]
            .into_iter()
            .flat_map(|file| std::iter::once(at(file)).chain(subdirectories(&at(&format!("{file}.d")))))
            .chain(std::env::var(STORAGE_CONF).ok().map(|file| at(&file)))
            .filter_map(|file| records.toml::<StorageConfig>(&file))
            .flat_map(StorageConfig::roots);
        let crio = std::iter::once(at("etc/crio/crio.conf")).chain(subdirectories(&at("etc/crio/crio.conf.d")));
        let crio = crio.filter_map(|file| records.toml::<CrioConfig>(&file)).flat_map(CrioConfig::roots);
        let storage: Vec<String> = storage.chain(crio).collect();
        let lxc = records.bytes(&at("etc/lxc/lxc.conf")).unwrap_or_default();
        let lxc = String::from_utf8_lossy(&lxc);
        let lxc = lxc.lines().filter_map(|line| line.split_once('='));
        let lxc = lxc.filter(|(key, _)| key.trim() == "lxc.lxcpath").map(|(_, path)| path.trim().to_owned());
        let places = |configured: Vec<String>, usual: &[&str]| {
            let mut places: Vec<PathBuf> =
                configured.iter().map(String::as_str).chain(usual.iter().copied()).map(at).collect();
            places.dedup();
            places
        };
        Self {
            root: root.to_owned(),
            lxc: places(lxc.collect(), &LXC),
            remapped: None,
            docker: places(docker.and_then(|config| config.data_root).into_iter().collect(), &DOCKER),
            containerd: places(containerd, &CONTAINERD),
            storage: places(storage, &STORAGE),
            records,
            namespaces: None,
            stored: None,
            machines: HashMap::new(),
        }
    }

    /// Adds containerd's state directory, as told by the directory in which a task's shim runs:
    /// `STATE/io.containerd.runtime.v2.task/NAMESPACE/ID`. (containerd may be a part of another program.)
    pub(crate) fn started_shim(&mut self, directory: &Path) {
        let Some(state) = directory.ancestors().nth(3).filter(|state| state.is_absolute()) else { return };
        let is_task = |path: &Path| path.file_name().is_some_and(|name| name == TASKS);
        if directory.ancestors().nth(2).is_some_and(is_task) {
            let state = self.root.join(state.strip_prefix("/").unwrap_or(state));
            if !self.containerd.contains(&state) {
                self.containerd.push(state);
                self.namespaces = None;
            }
        }
    }

    /// Adds the state directories from the command line of a runtime's daemon, or of a container's monitor.
    pub fn started(&mut self, program: &str, arguments: &[String]) {
        let given = |names: &[&str]| option(arguments, names).map(str::to_owned);
        let file = given(&["--config-file", "--config", "-c"]).filter(|file| file.starts_with('/'));
        let file = file.map(|file| self.root.join(file.trim_start_matches('/')));
        let (places, found): (_, Vec<String>) = match program {
            "dockerd" => {
                let in_file = || self.records.settings::<DockerConfig>(file.as_deref()?)?.data_root;
                let place = given(&["--data-root", "--graph", "-g"]).or_else(in_file);
                (&mut self.docker, place.into_iter().collect())
            }
            "containerd" => {
                let in_files = || file.map(|file| self.records.containerd(&self.root, &file)).unwrap_or_default();
                let found = given(&["--state"]).map_or_else(in_files, |state| vec![state]);
                (&mut self.containerd, found)
            }
            "crio" => {
                let in_file = file.and_then(|file| self.records.toml::<CrioConfig>(&file));
                let in_file = in_file.into_iter().flat_map(CrioConfig::roots);
                let places = [given(&["--root"]), given(&["--runroot"])].into_iter().flatten().chain(in_file);
                (&mut self.storage, places.collect())
            }
            "conmon" => {
                let bundle = given(&["--bundle", "-b"]).unwrap_or_default();
                (&mut self.storage, storage_of(Path::new(&bundle)).into_iter().collect())
            }
            _ => return,
        };
        for place in found.into_iter().filter(|place| place.starts_with('/')) {
            let place = self.root.join(place.trim_start_matches('/'));
            if !places.contains(&place) {
                places.insert(0, place);
                (self.namespaces, self.remapped, self.stored) = (None, None, None);
            }
        }
    }

    /// Adds the directories of a configuration of `containers/storage`.
    pub(crate) fn configured_storage(&mut self, file: &str) {
        let at = |path: &str| self.root.join(path.trim_start_matches('/'));
        let roots = self.records.toml::<StorageConfig>(&at(file)).into_iter().flat_map(StorageConfig::roots);
        let roots = roots.filter(|root| root.starts_with('/')).map(|root| at(&root));
        let new: Vec<PathBuf> = roots.filter(|root| !self.storage.contains(root)).collect();
        if !new.is_empty() {
            self.storage.extend(new);
            self.stored = None;
        }
    }

    /// The records that exist and are not used, each with the reason.
    pub fn unread(&self) -> BTreeMap<PathBuf, String> {
        self.records.0.borrow().clone()
    }

    /// The Kubernetes namespace of a container's pod, if its runtime has recorded it.
    pub fn namespace(&mut self, identity: &Identity) -> Option<String> {
        let id = identity.id()?;
        let namespace = match self.docker_name(id).or_else(|| self.stored_name(id)) {
            Some(name) => of_kubelet(&name)?.2.to_owned(),
            None => self.annotations(id)?.remove("io.kubernetes.cri.sandbox-namespace")?,
        };
        Some(printable(namespace.as_bytes())).filter(|namespace| !namespace.is_empty())
    }

    /// A container's name, if its runtime has recorded it.
    pub fn recorded(&mut self, identity: &Identity) -> Option<String> {
        let name = match identity {
            Identity::Name(name) => return Some(name.clone()),
            Identity::Lxc(name) => return Some(self.lxc_name(name)),
            Identity::Machine { unit, name } => return Some(self.machine_name(unit).unwrap_or_else(|| name.clone())),
            Identity::Id(id) | Identity::Unknown(id) => {
                self.docker_name(id).or_else(|| self.stored_name(id)).or_else(|| self.containerd_name(id))?
            }
        };
        Some(given_name(&name)).filter(|name| !name.is_empty())
    }

    /// A containerd container at a path of no other form, as `ctr run` and other containerd clients name the cgroup, if
    /// containerd has such a task: `/NAMESPACE/NAME`, or with runc's systemd driver (`--cgroup SLICE:PREFIX:NAME`)
    /// `PREFIX-NAME.scope`.
    pub fn task(&mut self, path: &str) -> Option<Container> {
        self.task_by_directory(path).or_else(|| self.task_by_scope(path))
    }

    fn task_by_scope(&mut self, path: &str) -> Option<Container> {
        // Scopes of sessions have dashes, too.
        let may_be = path.contains(".scope") && !path.starts_with("/user.slice/");
        let namespaces = if may_be { self.namespaces() } else { &[] };
        let is_task =
            |name: &&str| !matches!(*name, "" | "." | "..") && namespaces.iter().any(|place| place.join(name).is_dir());
        let scopes = ancestors(path).filter_map(|part| Some((part, part.rsplit('/').next()?.strip_suffix(".scope")?)));
        scopes.take(SCOPES).find_map(|(part, unit)| {
            // Prefix and name may contain dashes, too.
            let mut names = unit.match_indices('-').take(DASHES).filter_map(|(at, _)| unit.get(at + 1..));
            let name = names.find(is_task)?;
            Some(Container { cgroup: part.to_owned(), id: Identity::Name(printable(name.as_bytes())) })
        })
    }

    fn task_by_directory(&mut self, path: &str) -> Option<Container> {
        let mut parts = path.strip_prefix('/')?.splitn(3, '/');
        let (namespace, name) = (parts.next()?, parts.next().filter(|name| !matches!(*name, "" | "." | ".."))?);
        let mut of_this = self.namespaces().iter().filter(|place| place.file_name().is_some_and(|at| at == namespace));
        of_this.any(|place| place.join(name).is_dir()).then(|| Container {
            cgroup: format!("/{namespace}/{name}"),
            id: Identity::Name(printable(name.as_bytes())),
        })
    }

    fn docker_name(&mut self, id: &str) -> Option<String> {
        let docker = &self.docker;
        // With `userns-remap`, the state is in a directory named by the user's and the group's number.
        let remapped = self.remapped.get_or_insert_with(|| {
            let all = docker.iter().flat_map(|root| subdirectories(root));
            all.filter(|path| path.file_name().is_some_and(|name| is_pair_of_numbers(&name.to_string_lossy())))
                .collect()
        });
        let file = |root: &PathBuf| root.join("containers").join(id).join("config.v2.json");
        let records = &self.records;
        let mut files = docker.iter().chain(remapped.iter()).map(file);
        let state = files.find_map(|path| records.json::<DockerState>(&path))?;
        Some(state.name.trim_start_matches('/').to_owned())
    }

    fn namespaces(&mut self) -> &[PathBuf] {
        let containerd = &self.containerd;
        self.namespaces.get_or_insert_with(|| {
            let tasks = containerd.iter().map(|state| state.join(TASKS));
            tasks.flat_map(|task| subdirectories(&task)).collect()
        })
    }

    /// The annotations of a containerd container.
    fn annotations(&mut self, id: &str) -> Option<HashMap<String, String>> {
        let files: Vec<PathBuf> =
            self.namespaces().iter().map(|namespace| namespace.join(id).join("config.json")).collect();
        files
            .iter()
            .find_map(|file| self.records.json::<OciState>(file))
            .map(|state| state.annotations.unwrap_or_default())
    }

    fn containerd_name(&mut self, id: &str) -> Option<String> {
        let annotations = self.annotations(id)?;
        let annotation = |key: &str| annotations.get(key).cloned();
        match (annotation("io.kubernetes.cri.sandbox-name"), annotation("io.kubernetes.cri.container-name")) {
            (Some(sandbox), Some(name)) => Some(format!("{sandbox}/{name}")),
            (Some(sandbox), None) => Some(sandbox),
            (None, _) => annotation("nerdctl/name"),
        }
    }

    /// Whether the container of an unknown runtime is a Podman pod, whose containers are in cgroups below it
    /// (`--cgroup-manager=cgroupfs` with `--cgroup-parent`). Such a cgroup's name alone proves nothing, because a
    /// container may be able to create cgroups below its own. A pod's infra container has the pod's digits for a name;
    /// of pods without one see [`pod_of_conmon`].
    pub(crate) fn is_pod(&mut self, identity: &Identity) -> bool {
        let Identity::Unknown(pod) = identity else { return false };
        let infra = pod.get(..12).map(|digits| format!("{digits}-infra")).unwrap_or_default();
        self.stored().values().any(|name| *name == infra)
    }

    fn stored_name(&mut self, id: &str) -> Option<String> {
        self.stored().get(id).cloned()
    }

    fn stored(&mut self) -> &HashMap<String, String> {
        let (storage, records) = (&self.storage, &self.records);
        self.stored.get_or_insert_with(|| {
            // There is a directory per storage driver; containers created with --rm are in a separate file.
            let drivers = storage.iter().flat_map(|root| subdirectories(root));
            let drivers = drivers.filter(|path| path.to_string_lossy().ends_with("-containers"));
            let files =
                drivers.flat_map(|path| ["containers.json", "volatile-containers.json"].map(|file| path.join(file)));
            let all = files.filter_map(|path| records.json::<Vec<StoredContainer>>(&path)).flatten();
            all.filter_map(|one| Some((one.id, one.names?.into_iter().next()?))).collect()
        })
    }

    /// The machine for which machined has recorded a unit. The name is read as libsystemd does
    /// (`cg_path_get_machine_name`), the class from machined's own file (`machine_save`).
    pub fn machine(&mut self, unit: &str) -> Option<Machine> {
        let (directory, records) = (self.root.join("run/systemd/machines"), &self.records);
        let read = || {
            let link = std::fs::read_link(directory.join(format!("unit:{unit}"))).ok()?;
            let name = link.to_str().filter(|name| !name.is_empty() && !name.contains('/'))?;
            let record = records.bytes(&directory.join(name)).unwrap_or_default();
            let record = String::from_utf8_lossy(&record);
            let value = |key: &str| record.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            let class =
                value("CLASS").filter(|_| value("SCOPE").is_none_or(|recorded| recorded.replace(r"\\", r"\") == unit));
            let is_vm = class.and_then(|class| match class {
                "vm" => Some(true),
                "container" => Some(false),
                _ => None,
            });
            Some(Machine { name: printable(name.as_bytes()), is_vm })
        };
        if let Some(known) = self.machines.get(unit) {
            return known.clone();
        }
        let found = read();
        self.machines.insert(unit.to_owned(), found.clone());
        found
    }

    fn machine_name(&mut self, unit: &str) -> Option<String> {
        self.machine(unit).map(|machine| machine.name)
    }

    /// The name without the number that LXC appends if a cgroup of that name is left over (`cgfsng_payload_create`).
    /// The number stays if a container of the full name exists.
    fn lxc_name(&self, cgroup: &str) -> String {
        // LXD and Incus have a link to a directory, which for a snap exists in the snap's mount namespace only.
        let exists = self.lxc.iter().any(|place| place.join(cgroup).symlink_metadata().is_ok());
        without_number(cgroup).filter(|_| !exists).unwrap_or(cgroup).to_owned()
    }
}

fn is_pair_of_numbers(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.split_once('.').is_some_and(|(user, group)| is_number(user) && is_number(group))
}

/// The part before `-N`, with N from 1 to 999.
pub(crate) fn without_number(name: &str) -> Option<&str> {
    let (name, number) = name.rsplit_once('-')?;
    (!name.is_empty() && number.parse::<u16>().is_ok_and(|number| (1..1000).contains(&number))).then_some(name)
}

fn subdirectories(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).inspect_err(files::note).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The files that a path stands for, as Go's `filepath.Glob` finds them: each `*` is a part of one name. As there, `..`
/// only takes a name off, so each file has one path.
fn expand(pattern: &Path) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for part in pattern.components() {
        if part == Component::ParentDir {
            for path in &mut found {
                path.pop();
            }
            continue;
        }
        let glob = part.as_os_str().to_str().filter(|part| part.contains('*')).and_then(|part| Glob::new(part).ok());
        found = match glob.map(|glob| glob.compile_matcher()) {
            None => found.into_iter().map(|path| path.join(part)).collect(),
            Some(name) => {
                let entries = found.iter().flat_map(|directory| subdirectories(directory));
                entries.filter(|path| path.file_name().is_some_and(|own| name.is_match(own))).take(IMPORTS).collect()
            }
        };
    }
    found
}

/// The storage to which conmon's bundle belongs: `STORAGE/DRIVER-containers/ID/userdata`.
fn storage_of(bundle: &Path) -> Option<String> {
    let mut parents = bundle.ancestors().skip(2);
    let driver = parents.next()?.file_name()?.to_str()?;
    let storage = parents.next()?.to_str()?;
    driver.ends_with("-containers").then(|| storage.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(digits: char) -> String {
        digits.to_string().repeat(64)
    }

    #[test]
    fn every_runtimes_layout_is_known() {
        let a = id('a');
        for (path, cgroup) in [
            (format!("/machine.slice/libpod-{a}.scope/container"), format!("/machine.slice/libpod-{a}.scope")),
            (format!("/system.slice/docker-{a}.scope"), format!("/system.slice/docker-{a}.scope")),
            (format!("/docker/{a}/child"), format!("/docker/{a}")),
            (format!("/libpod_parent/libpod-{a}"), format!("/libpod_parent/libpod-{a}")),
            (format!("/kubepods.slice/kubepods-pod1.slice/crio-{a}.scope"), String::new()),
            (format!("/kubepods.slice/kubepods-pod1.slice/cri-containerd-{a}.scope"), String::new()),
            (format!("/kubepods/burstable/pod1/{a}"), String::new()),
        ] {
            let found = of_path(&path).unwrap_or_else(|| panic!("{path}"));
            assert_eq!(found.id, Identity::Id(a.clone()));
            assert_eq!(found.cgroup, if cgroup.is_empty() { path } else { cgroup });
        }
        for (path, name) in [
            ("/lxc.payload.web/init.scope", "web"),
            ("/lxc/old/x", "old"),
            (r"/machine.slice/machine-my\x2dbox.scope/payload", "my-box"),
            (r"/machine.slice/systemd-nspawn@my\x2dbox.service/payload", "my-box"),
            ("/plc.slice/machine-cell4.scope/payload/init.scope", "cell4"),
            ("/system.slice/cell@north.service/payload", "north"),
            ("/system.slice/press-line.service/payload/system.slice", "press-line"),
            (r"/machine.slice/machine-lxc\x2d4711\x2dscada.scope/libvirt", "scada"),
            ("/machine/lxc-4711-scada.libvirt-lxc", "scada"),
            ("/system.slice/runc-loop7.scope", "loop7"),
            ("/rt.slice:runc:loop8", "loop8"),
            ("/user.slice/user-1.slice/crun-buildah-buildah88.scope", "buildah-buildah88"),
        ] {
            assert_eq!(name_of(path), Some(name.to_owned()), "{path}");
        }
    }

    #[test]
    fn the_pod_is_the_one_around_the_outermost_container() {
        let (a, b) = (id('a'), id('b'));
        for (path, pod) in [
            (
                format!("/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod7f_0c.slice/crio-{a}.scope"),
                "7f-0c",
            ),
            (format!("/kubepods.slice/kubepods-pod7f_0c.slice/cri-containerd-{a}.scope/init"), "7f-0c"),
            (format!("/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podab12.slice/crio-{a}.scope"), "ab12"),
            (format!("/system.slice/containerd.service/kubepods-burstable-pod7f_0c.slice:cri-containerd:{a}"), "7f-0c"),
            (format!("/kubepods/burstable/pod7f-0c/{a}"), "7f-0c"),
            (format!("/system.slice/k3s.service/kubepods/pod7f-0c/{a}"), "7f-0c"),
            // A container of the host's own, whose processes name cgroups inside.
            (format!("/system.slice/docker-{b}.scope/kubepods/pod7f-0c/{a}"), ""),
            (format!("/docker/{b}/kubepods.slice/kubepods-pod7f_0c.slice/crio-{a}.scope"), ""),
            (format!("/kubepods/pod1/{b}/kubepods/pod2/{a}"), "1"),
            // The pod itself, and other directories of such names.
            ("/kubepods.slice/kubepods-pod7f_0c.slice".to_owned(), ""),
            (format!("/machine.slice/machine-podman-pod7.slice/libpod-{a}.scope"), ""),
            (format!("/kubepods/pod/{a}"), ""),
            (format!("/docker/{a}"), ""),
            ("/".to_owned(), ""),
        ] {
            assert_eq!(pod_of(&path).unwrap_or_default(), pod, "{path}");
        }
    }

    /// The name in the path.
    fn name_of(path: &str) -> Option<String> {
        match of_path(path)?.id {
            Identity::Name(name) | Identity::Lxc(name) | Identity::Machine { name, .. } => Some(name),
            Identity::Id(_) | Identity::Unknown(_) => None,
        }
    }

    #[test]
    fn identifiers_are_found_in_every_layout() {
        let (a, b) = (id('a'), id('b'));
        for (path, cgroup) in [
            // Podman in a user's unit, and in a pod with either cgroup driver.
            (
                format!("/user.slice/user-7.slice/user@7.service/app.slice/press.service/libpod-payload-{a}/x"),
                "payload",
            ),
            (format!("/machine.slice/machine-libpod_pod_{b}.slice/libpod-{a}.scope/container"), "scope"),
            (format!("/libpod_parent/{b}/libpod-{a}/ctr"), "libpod-"),
            // The cgroupfs driver with a path in systemd's form.
            (format!("/system.slice/containerd.service/kubepods-burstable-pod7.slice:cri-containerd:{a}"), "colons"),
            (format!("/plc.slice:docker:{a}/child"), "docker:"),
            (format!("/kubelet/kubepods/burstable/pod7/crio-{a}"), "crio-"),
            (format!("/user.slice/user-7.slice/user@7.service/user.slice/nerdctl-{a}.scope"), "scope"),
            // A task of Nomad with its Docker driver.
            (format!("/nomad.slice/share.slice/docker-{a}.scope"), "nomad"),
            // A container that made itself a cgroup like systemd-nspawn's.
            (format!("/machine.slice/libpod-{a}.scope/payload/init.scope"), "scope"),
        ] {
            let found = of_path(&path).unwrap_or_else(|| panic!("{path}"));
            assert_eq!(found.id, Identity::Id(a.clone()), "{path}");
            let end = path.find(&a).unwrap() + a.len();
            let end = if path[end..].starts_with(".scope") { end + 6 } else { end };
            assert_eq!(found.cgroup, path[..end], "{cgroup}");
        }
        assert_eq!(of_path("/docker/buildkit/0a1b2c3d4e5f6g7h8i9jklmno").unwrap().id.id().unwrap().len(), 25);
        for path in ["/lxc.payload/weld", "/lxc.payload/weld/init.scope", "/lxc.payload/weld/lxc.pivot"] {
            let wanted = Container { cgroup: "/lxc.payload/weld".to_owned(), id: Identity::Lxc("weld".to_owned()) };
            assert_eq!(of_path(path), Some(wanted), "{path}");
        }
    }

    #[test]
    fn an_unknown_layout_with_an_identifier_is_a_container_all_the_same() {
        let a = id('c');
        for path in [
            format!("/apps.slice/quark-{a}.scope"),
            format!("/jobs/batch/{a}/worker"),
            format!("/pool.slice/box_{a}"),
            format!("/pool.slice/vendor.{a}.scope"),
            format!("/garden/{a}"),
            format!("/mesos/{a}/leaf"),
        ] {
            assert_eq!(of_path(&path).map(|found| found.id), Some(Identity::Unknown(a.clone())), "{path}");
        }
        for path in [
            // Podman's health checks run beside the container. Hashes elsewhere are no containers.
            format!("/system.slice/{a}.service"),
            format!("/system.slice/{a}-5f6e.service"),
            format!("/machine.slice/machine-libpod_pod_{a}.slice"),
            format!("/libpod_parent/{a}"),
            format!("/pool.slice/word{a}"),
            format!("/pool.slice/{a}0"),
            format!("/pool.slice/{}", &a[..63]),
            "/devices/0000:00:1f.2".to_owned(),
            // Nomad (for plain processes, too), Mesos and Garden: a UUID alone makes no container.
            "/nomad.slice/share.slice/6b1f0c2e-93d7-4a58-8e0b-2c4d6f8a1b3e.weld.scope".to_owned(),
            "/nomad.slice/reserve.slice/6b1f0c2e-93d7-4a58-8e0b-2c4d6f8a1b3e.weld.scope".to_owned(),
            "/mesos/6b1f0c2e-93d7-4a58-8e0b-2c4d6f8a1b3e/leaf".to_owned(),
            "/system.slice/garden.service/garden/6b1f0c2e-93d7-4a58-8e0b-2c4d6f8a1b3e".to_owned(),
        ] {
            assert_eq!(of_path(&path), None, "{path}");
        }
    }

    #[test]
    fn a_machines_scope_is_the_vms_whose_monitor_is_in_it() {
        for (path, scope) in [
            (
                r"/machine.slice/machine-qemu\x2d1\x2drt1.scope/libvirt/vcpu0",
                r"/machine.slice/machine-qemu\x2d1\x2drt1.scope",
            ),
            (
                r"/machine.slice/machine-rt.slice/machine-ch\x2d3\x2da.scope",
                r"/machine.slice/machine-rt.slice/machine-ch\x2d3\x2da.scope",
            ),
            (
                r"/machine.slice/machine-rt.slice/machine-qemu\x2d12\x2dweld\x2d1.scope/libvirt/emulator",
                r"/machine.slice/machine-rt.slice/machine-qemu\x2d12\x2dweld\x2d1.scope",
            ),
            ("/machine.slice/machine-vm9.scope", "/machine.slice/machine-vm9.scope"),
            ("/machine/qemu-2-rt1.libvirt-qemu/emulator", "/machine/qemu-2-rt1.libvirt-qemu"),
        ] {
            assert_eq!(vm_scope(path), Some(scope), "{path}");
        }
        for (scope, name) in [
            (r"/machine.slice/machine-qemu\x2d1\x2drt1.scope", Some("rt1")),
            (r"/machine.slice/machine-ch\x2d31\x2dmy\x2dpress.scope", Some("my-press")),
            ("/machine.slice/machine-vm9.scope", Some("vm9")),
            ("/machine/qemu-2-rt1.libvirt-qemu", Some("rt1")),
            (r"/machine.slice/machine-qemu\x2d1\x2d.scope", None),
            (r"/machine.slice/machine-qemu\x2dembed\x2d0a1b2c3d\x2d4\x2dmy\x2dvm.scope", Some("my-vm")),
            (r"/machine.slice/machine-ch\x2d1.scope", Some("ch-1")),
            ("/machine.slice/x.scope", None),
            ("", None),
        ] {
            assert_eq!(name_of_scope(scope).as_deref(), name, "{scope}");
        }
        let a = id('a');
        for path in [
            "/machine.slice/machine-box.scope/payload",
            "/machine.slice/machine-box.scope/payload/machine-vm9.scope",
            r"/machine.slice/machine-lxc\x2d9\x2dbox.scope/libvirt",
            &format!("/system.slice/docker-{a}.scope/machine.slice/machine-vm9.scope"),
            "/machine.slice",
        ] {
            assert_eq!(vm_scope(path), None, "{path}");
        }
        assert_eq!(libvirt_scope("/machine.slice/machine-vm9.scope"), None, "not libvirt's");
    }

    #[test]
    fn a_scope_of_libvirts_tells_its_vm_from_others() {
        let long = "a.very-long-name-of-a-vm.that.libvirt-cuts.at-64.characters.with-its.number";
        let scope =
            |name: &str| format!(r"/machine.slice/machine-qemu\x2d12\x2d{}.scope/libvirt", name.replace('-', r"\x2d"));
        for (vm, name) in [("web", "web"), ("web-1", "web-1"), ("my_web..1-", "myweb.1"), (long, &long[..55])] {
            assert_eq!(other_libvirt_vm(&scope(name), vm), None, "{vm}");
        }
        for (vm, name) in [("web", "db"), ("web", "web-1"), ("web-1", "web"), ("db", &long[..55]), (long, &long[..41])]
        {
            assert_eq!(other_libvirt_vm(&scope(name), vm).as_deref(), Some(name), "{vm}");
        }
        assert_eq!(other_libvirt_vm("/machine/db.libvirt-qemu/emulator", "web").as_deref(), Some("db"));
        for path in ["/", "/qemu.slice/100.scope", "/system.slice/qemu-web.service", "/user.slice/user-7.slice"] {
            assert_eq!(other_libvirt_vm(path, "web"), None, "{path}");
        }
    }

    #[test]
    fn containers_of_nspawn_may_have_names_like_libvirts_machines() {
        for (machine, name) in [
            (r"ch\x2d1", "ch-1"),
            (r"qemu\x2d2\x2dcell", "qemu-2-cell"),
            (r"qemu\x2dembed\x2d0a1b2c3d\x2d4\x2dcell", "qemu-embed-0a1b2c3d-4-cell"),
            (r"lxc\x2d7\x2dcell", "lxc-7-cell"),
            ("ch", "ch"),
        ] {
            let scope = format!("/machine.slice/machine-{machine}.scope");
            for child in ["payload", "payload/init.scope", "payload/libvirt"] {
                let path = format!("{scope}/{child}");
                let found = of_path(&path).unwrap_or_else(|| panic!("{path}"));
                let id = Identity::Machine { unit: format!("machine-{machine}.scope"), name: name.to_owned() };
                assert_eq!((&found.cgroup, found.id), (&scope, id), "{path}");
                assert_eq!((vm_scope(&path), libvirt_scope(&path)), (None, None), "{path}");
            }
            assert_eq!(of_path(&format!("{scope}/supervisor")), None);
            assert_eq!(libvirt_scope(&format!("{scope}/supervisor")), None);
        }
        // systemd-nspawn without cgroups of its own.
        for (machine, is_libvirts) in [(r"ch\x2d1", false), (r"qemu\x2dx\x2d2", false), (r"ch\x2d1\x2da", true)] {
            let scope = format!("/machine.slice/machine-{machine}.scope");
            assert_eq!((of_path(&scope).is_none(), libvirt_scope(&scope).is_some()), (is_libvirts, is_libvirts));
        }
    }

    #[test]
    fn what_is_no_container_is_not_taken_for_one() {
        let a = id('a');
        for path in [
            "/",
            "",
            "/init.scope",
            "/system.slice/ssh.service",
            "/user.slice/user-1000.slice/session-1.scope",
            r"/machine.slice/machine-qemu\x2d1\x2drt1.scope/libvirt/emulator",
            &format!("/machine.slice/libpod-conmon-{a}.scope"),
            &format!("/kubepods.slice/crio-conmon-{a}.scope"),
            "/lxc.monitor.web",
            "/lxc/lxc.monitor.web",
            "/lxc.payload/lxc.pivot",
            "/system.slice/docker-zz.scope",
        ] {
            assert_eq!(of_path(path), None, "{path}");
        }
        let vm = r"/machine.slice/machine-qemu\x2d1\x2drt1.scope";
        assert_eq!(libvirt_scope(&format!("{vm}/libvirt/vcpu0")), Some(vm));
        assert_eq!(libvirt_scope("/machine.slice/machine-box.scope"), None);
    }

    #[test]
    fn what_lies_in_a_users_slice_is_the_users() {
        assert_eq!(owner_of_path("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-a.scope"), 1000);
        assert_eq!(owner_of_path("/machine.slice/libpod-a.scope"), 0);
        assert_eq!(owner_of_path("/user.slice"), 0);
    }

    #[test]
    fn names_come_from_the_runtimes_state() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: String, text: String| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let stored = |id: &str, name: &str| format!(r#"[{{"id":"{id}","names":["{name}"]}},{{"id":"x"}}]"#);
        let cri = |pod: &str| {
            format!(
                r#"{{"annotations":{{"{cri}sandbox-name":"{pod}","{cri}container-name":"c"}}}}"#,
                cri = "io.kubernetes.cri."
            )
        };
        let task = "io.containerd.runtime.v2.task";
        write("etc/docker/daemon.json".into(), r#"{"data-root":"/srv/docker","debug":true}"#.into());
        write("etc/containers/storage.conf".into(), "[storage]\ndriver = \"zfs\"\ngraphroot = \"/tank/c\"\n".into());
        write("etc/containers/storage.conf.d/10-fast.conf".into(), "[storage]\nrunroot = \"/fast\"\n".into());
        write("etc/containerd/config.toml".into(), "version = 3\nstate = \"/srv/ctrd\"\n[plugins]\n".into());
        let [moved, usual, snap] = ['0', '1', '2'].map(id);
        for (place, id, name) in [
            ("srv/docker", &moved, "/moved"),
            ("var/lib/docker", &usual, "/usual"),
            ("var/snap/docker/common/var-lib-docker", &snap, "/snap"),
        ] {
            write(format!("{place}/containers/{id}/config.v2.json"), format!(r#"{{"Name":"{name}","ID":"x"}}"#));
        }
        let [vfs, zfs, brief, memory, fast] = ['3', '4', '5', '6', 'b'].map(id);
        for (file, id, name) in [
            ("var/lib/containers/storage/vfs-containers/containers.json", &vfs, "k8s_cell_plc-0_plant_0f6e-77_1"),
            ("tank/c/zfs-containers/containers.json", &zfs, "zfs"),
            ("tank/c/zfs-containers/volatile-containers.json", &brief, "brief"),
            ("run/containers/storage/overlay-containers/volatile-containers.json", &memory, "memory"),
            ("fast/overlay-containers/volatile-containers.json", &fast, "fast"),
        ] {
            write(file.into(), stored(id, name));
        }
        let [own, k0s, microk8s, nerdctl] = ['7', '8', '9', 'a'].map(id);
        write(format!("srv/ctrd/{task}/k8s.io/{own}/config.json"), cri("own"));
        write(format!("run/k0s/containerd/{task}/k8s.io/{k0s}/config.json"), cri("k0s"));
        write(format!("var/snap/microk8s/common/run/containerd/{task}/k8s.io/{microk8s}/config.json"), cri("micro"));
        write(
            format!("run/containerd/{task}/default/{nerdctl}/config.json"),
            r#"{"annotations":{"nerdctl/name":"web","x":"y"}}"#.into(),
        );
        let mut names = Names::below(root.path());
        for (id, name) in [
            (moved, "moved"),
            (usual, "usual"),
            (snap, "snap"),
            (vfs, "plc-0/cell"),
            (zfs, "zfs"),
            (brief, "brief"),
            (memory, "memory"),
            (fast, "fast"),
            (own, "own/c"),
            (k0s, "k0s/c"),
            (microk8s, "micro/c"),
            (nerdctl, "web"),
        ] {
            assert_eq!(names.recorded(&Identity::Id(id)).as_deref(), Some(name));
        }
        assert_eq!(names.recorded(&Identity::Id(id('e'))), None);
        assert_eq!(names.recorded(&Identity::Name("lxc".into())).as_deref(), Some("lxc"));
    }

    #[test]
    fn conmon_tells_the_name_of_the_container_that_it_started() {
        let a = id('a');
        for (line, name) in [
            (format!("conmon --api-version 1 -c {a} -u {a} -r /usr/bin/crun -n press --exit-dir /x"), Some("press")),
            (format!("/usr/libexec/podman/conmon --cid={a} --name=mill -s"), Some("mill")),
            (format!("conmon -n k8s_loop_saw-0_plant_0f6e-77_2 --cid {a}"), Some("saw-0/loop")),
            (format!("conmon -c {a} -n k8s_POD_saw-0_plant_0f6e-77_0"), Some("saw-0")),
            (format!("conmon -c {a} -n k8s_not_one"), Some("k8s_not_one")),
            (format!("conmon -c {a} -n \u{1b}[2J"), Some("?[2J")),
            (format!("conmon -c {a}"), None),
            (format!("conmon -c {a} -n"), None),
            (format!("-c {a}"), None),
            ("conmon -c ../../x -n press".to_owned(), None),
        ] {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let found = started_by_conmon(&arguments);
            assert_eq!(found, name.map(|name| (a.clone(), name.to_owned())), "{line}");
        }
    }

    #[test]
    fn containers_of_a_client_of_containerds_are_known_by_their_tasks() {
        let root = tempfile::tempdir().unwrap();
        for place in ["run/containerd", "run/k3s/containerd"] {
            for task in ["default/press", "plant/mill.2", "k8s.io/saw"] {
                let task = root.path().join(place).join("io.containerd.runtime.v2.task").join(task);
                std::fs::create_dir_all(task).unwrap();
            }
        }
        let mut names = Names::below(root.path());
        for (path, cgroup) in [
            ("/default/press", Some("/default/press")),
            ("/plant/mill.2/init/x", Some("/plant/mill.2")),
            ("/k8s.io/saw", Some("/k8s.io/saw")),
            ("/plant/press", None),
            ("/other/press", None),
            ("/default", None),
            ("/default/", None),
            ("/default/..", None),
            ("/../default/press", None),
            ("", None),
        ] {
            assert_eq!(names.task(path).map(|found| found.cgroup).as_deref(), cgroup, "{path}");
        }
        assert_eq!(names.task("/plant/mill.2").unwrap().id, Identity::Name("mill.2".to_owned()));
    }

    #[test]
    fn of_the_scopes_on_a_path_the_topmost_may_be_a_tasks() {
        let root = tempfile::tempdir().unwrap();
        let tasks = root.path().join("run/containerd/io.containerd.runtime.v2.task/default/press");
        std::fs::create_dir_all(tasks).unwrap();
        let mut names = Names::below(root.path());
        for (path, cgroup) in [
            ("/a.slice/ctr-press.scope", Some("/a.slice/ctr-press.scope")),
            ("/ctr-press.scope/init.scope/x-y.scope/z", Some("/ctr-press.scope")),
            ("/outer.scope/a/b/ctr-press.scope/c", Some("/outer.scope/a/b/ctr-press.scope")),
            ("/a.scope/b.scope/ctr-press.scope", None),
        ] {
            assert_eq!(names.task(path).map(|found| found.cgroup).as_deref(), cgroup, "{path}");
        }
    }

    #[test]
    fn daemons_and_configurations_tell_where_the_state_is() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: String, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let task = "io.containerd.runtime.v2.task";
        for (place, digit, name) in [
            ("mnt/data", '1', "flag"),
            ("mnt/short", '2', "short"),
            ("mnt/file", '3', "file"),
            ("var/lib/docker/165536.165537", '4', "remapped"),
            ("mnt/data/231072.231072", '5', "both"),
            ("var/lib/docker/231072.x", '6', "no numbers"),
            ("relative", '7', "relative"),
        ] {
            let file = format!("{place}/containers/{}/config.v2.json", id(digit));
            write(file, &format!(r#"{{"Name":"/{name}"}}"#));
        }
        for (place, digit, name) in [("mnt/c1", 'a', "state"), ("mnt/c2", 'b', "configured")] {
            let file = format!("{place}/{task}/plant/{}/config.json", id(digit));
            write(file, &format!(r#"{{"annotations":{{"nerdctl/name":"{name}"}}}}"#));
        }
        write("opt/docker.json".into(), r#"{"data-root":"/mnt/file"}"#);
        write("opt/containerd.toml".into(), "version = 2\nstate = \"/mnt/c2\"\n");
        // Absolute, beside the file that imports, and by a part of the name, each in turn; and one imports itself.
        write("etc/containerd/config.toml".into(), "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n");
        write("etc/containerd/conf.d/10-root.toml".into(), "root = \"/mnt/data\"\n");
        write("etc/containerd/conf.d/90-state.toml".into(), "state = \"/mnt/i1\"\n");
        write("etc/containerd/conf.d/note.txt".into(), "state = \"/mnt/i5\"\n");
        write(
            "opt/imports.toml".into(),
            "imports = [\"more/site.toml\", \"/opt/no-such.toml\"]\nstate = \"/mnt/i2\"\n",
        );
        write("opt/more/site.toml".into(), "imports = [\"site.toml\", \"../*/plant-*.toml\"]\nstate = \"/mnt/i3\"\n");
        write("opt/edge/plant-7.toml".into(), "state = \"/mnt/i4\"\n");
        for (digit, place) in [('c', "i1"), ('d', "i2"), ('e', "i3"), ('f', "i4"), ('8', "i5")] {
            let file = format!("mnt/{place}/{task}/plant/{}/config.json", id(digit));
            write(file, &format!(r#"{{"annotations":{{"nerdctl/name":"{place}"}}}}"#));
        }
        write("etc/lxc/lxc.conf".into(), "# where they are\nlxc.lxcpath = /mnt/lxc\n");
        std::fs::create_dir_all(root.path().join("mnt/lxc/saw-2")).unwrap();
        let mut names = Names::below(root.path());
        assert_eq!(names.recorded(&Identity::Id(id('a'))), None, "nothing told where it is");
        for (program, line) in [
            ("dockerd", "dockerd -H fd:// --data-root=/mnt/data"),
            ("dockerd", "dockerd -g /mnt/short"),
            ("dockerd", "dockerd --config-file /opt/docker.json"),
            ("dockerd", "dockerd --data-root relative"),
            ("dockerd", "dockerd --data-root"),
            ("containerd", "containerd --state /mnt/c1 --root /x"),
            ("containerd", "containerd -c /opt/containerd.toml"),
            ("containerd", "containerd --config=/nowhere"),
            ("containerd", "containerd --config /opt/imports.toml"),
            ("other", "other --data-root=/x"),
        ] {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            names.started(program, &arguments);
        }
        for (digit, name) in [
            ('1', Some("flag")),
            ('2', Some("short")),
            ('3', Some("file")),
            ('4', Some("remapped")),
            ('5', Some("both")),
            ('6', None),
            ('7', None),
            ('a', Some("state")),
            ('b', Some("configured")),
            ('c', Some("i1")),
            ('d', Some("i2")),
            ('e', Some("i3")),
            ('f', Some("i4")),
            ('8', None),
        ] {
            assert_eq!(names.recorded(&Identity::Id(id(digit))).as_deref(), name, "{digit}");
        }
        for (cgroup, name) in [("saw-2", "saw-2"), ("mill-2", "mill")] {
            assert_eq!(names.recorded(&Identity::Lxc(cgroup.to_owned())).as_deref(), Some(name));
        }
    }

    #[test]
    fn monitors_of_containers_are_known_by_their_cgroups() {
        let a = id('a');
        for path in [
            format!("/machine.slice/libpod-conmon-{a}.scope"),
            format!("/kubepods.slice/crio-conmon-{a}.scope"),
            "/lxc.monitor.web".to_owned(),
            "/lxc.monitor/web".to_owned(),
            "/system.slice/press.service/supervisor".to_owned(),
            "/machine.slice/machine-box.scope/supervisor/x".to_owned(),
            "/libpod_parent/conmon".to_owned(),
            format!("/kubepods/burstable/pod1/crio-conmon-{a}"),
        ] {
            assert!(is_monitors(&path), "{path}");
        }
        for path in [
            "/",
            "",
            "/rt.slice/supervisor",
            "/rt.slice/conmon.service",
            "/lxc.payload.web",
            "/a-conmon/x",
            "/rt/conmon-press",
            "/conmon-exporter",
        ] {
            assert!(!is_monitors(path), "{path}");
        }
    }

    #[test]
    fn damaged_records_and_configurations_cost_only_themselves() {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("etc/docker/daemon.json", "{"),
            ("etc/containers/storage.conf", "[storage"),
            ("etc/containerd/config.toml", "state = 7"),
            ("var/lib/containers/storage/overlay-containers/containers.json", "[{]"),
            ("var/lib/containers/storage/vfs-containers/containers.json", r#"[{"id":"aa","names":["good"]}]"#),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        assert_eq!(Names::below(root.path()).recorded(&Identity::Id("aa".into())).as_deref(), Some("good"));
    }

    #[test]
    fn a_record_that_is_there_and_cannot_be_read_is_told() {
        let root = tempfile::tempdir().unwrap();
        let record = |driver: &str| {
            let directory = root.path().join(format!("var/lib/containers/storage/{driver}-containers"));
            std::fs::create_dir_all(&directory).unwrap();
            directory.join("containers.json")
        };
        // A regular file, and its reading fails.
        let unreadable = record("overlay");
        std::os::unix::fs::symlink("/proc/self/mem", &unreadable).unwrap();
        std::fs::write(record("vfs"), r#"[{"id":"aa","names":["good"]}]"#).unwrap();
        let mut names = Names::below(root.path());
        assert_eq!(names.recorded(&Identity::Id("aa".into())).as_deref(), Some("good"));
        let told: Vec<_> = names.unread().into_iter().collect();
        assert!(
            matches!(&told[..], [(path, why)] if *path == unreadable && why.contains("cannot be read")),
            "{told:?}"
        );
    }

    #[test]
    fn machines_and_lxc_containers_have_their_names() {
        let root = tempfile::tempdir().unwrap();
        let machines = root.path().join("run/systemd/machines");
        std::fs::create_dir_all(&machines).unwrap();
        std::os::unix::fs::symlink("cell", machines.join("unit:odd.service")).unwrap();
        std::os::unix::fs::symlink("../../x", machines.join("unit:worse.service")).unwrap();
        for place in ["var/lib/lxc/web", "var/lib/incus/containers/db-2"] {
            std::fs::create_dir_all(root.path().join(place)).unwrap();
        }
        let mut names = Names::below(root.path());
        let mut machine = |unit: &str| {
            names.recorded(&Identity::Machine { unit: unit.to_owned(), name: "derived".to_owned() }).unwrap()
        };
        assert_eq!(["odd.service", "worse.service", "none.scope"].map(&mut machine), ["cell", "derived", "derived"]);
        for (cgroup, name) in [
            ("web", "web"),
            ("web-1", "web"),
            ("web-17", "web"),
            ("db-2", "db-2"),
            ("db-2-1", "db-2"),
            ("a-b", "a-b"),
            ("a-0", "a-0"),
            ("-1", "-1"),
            ("vm-123456", "vm-123456"),
        ] {
            assert_eq!(names.recorded(&Identity::Lxc(cgroup.to_owned())).as_deref(), Some(name), "{cgroup}");
        }
    }

    /// What [`vm_scope`] says, by a walk over each part of the path.
    fn vm_scope_by_parts(path: &str) -> Option<&str> {
        for part in ancestors(path) {
            let component = part.rsplit('/').next()?;
            let child = path.get(part.len()..)?.split('/').nth(1);
            let machine = component.strip_suffix(".scope").and_then(|unit| unit.strip_prefix("machine-")).map(unescape);
            let is_vms = match machine {
                Some(_) if matches!(child, Some("payload" | "supervisor")) => false,
                Some(machine) if is_libvirt_vm(&machine) => true,
                Some(machine) => libvirt_lxc(&machine).is_none() && child.is_none_or(|child| child == "libvirt"),
                None => component.ends_with(".libvirt-qemu") || vmspawns(component).is_some(),
            };
            if is_vms || of_path(part).is_some() {
                return is_vms.then_some(part);
            }
        }
        None
    }

    proptest! {
        #[test]
        fn no_path_makes_it_panic(path in "(/|\\PC{0,6}|machine-|lxc|libpod-|\\\\x|\\.scope){0,12}") {
            let _ = of_path(&path);
            let _ = libvirt_scope(&path);
            let _ = vm_scope(&path);
            let _ = (is_monitors(&path), unit_of(&path), name_of_scope(&path), instance_of(&path));
            let _ = (other_libvirt_vm(&path, "web"), machine_name(&path));
            let _ = started_by_lxc(&[path.clone(), path.clone()], &path);
            let _ = owner_of_path(&path);
            let _ = unescape(&path);
        }

        #[test]
        fn a_vms_scope_is_found_in_one_walk(
            path in "(/(lxc|payload|supervisor|libvirt|init|docker|app\\.service|systemd-nspawn@w\\.service|\
                     systemd-vmspawn@w\\.service|qemu-1-w\\.libvirt-qemu|w\\.scope|\
                     machine-(w|qemu-1-w|lxc-1-w)\\.scope|[0-9a-f]{12})){1,6}"
        ) {
            prop_assert_eq!(vm_scope(&path), vm_scope_by_parts(&path));
        }
    }
}
