//! Containers, known by their cgroup's path.
//!
//! In: cgroup v2 paths, and the runtimes' own state files for names. Out: a [`Container`] per path. Nothing is asked of a
//! runtime's daemon.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::proc::printable;

/// The largest state file of a runtime that is read, in bytes.
const STATE_MAX: u64 = 4 << 20;

/// A container, as its cgroup's path tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// The path of the container's own cgroup.
    pub cgroup: String,
    /// How it is identified.
    pub id: Identity,
}

/// What the path says of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// Its name (LXC, systemd-nspawn).
    Name(String),
    /// A runtime's identifier: hexadecimal, 12 to 64 digits.
    Id(String),
}

/// Scopes that systemd-driven runtimes make: prefix before the identifier.
const SCOPES: [&str; 6] = ["libpod-", "libpod-payload-", "docker-", "crio-", "cri-containerd-", "nerdctl-"];

/// The outermost container that a path leads into.
pub fn of_path(path: &str) -> Option<Container> {
    let mut parent = "";
    let mut end = 0;
    for component in path.split('/').skip(1) {
        end += 1 + component.len();
        if let Some(id) = identity(parent, component) {
            return Some(Container { cgroup: path.get(..end)?.to_owned(), id });
        }
        parent = component;
    }
    None
}

fn identity(parent: &str, component: &str) -> Option<Identity> {
    if let Some(unit) = component.strip_suffix(".scope") {
        if let Some(id) = SCOPES.iter().find_map(|prefix| hex_id(unit.strip_prefix(prefix)?)) {
            return Some(Identity::Id(id));
        }
        // systemd-nspawn's machines, and others registered with machined; QEMU's are VMs.
        let machine = unescape(unit.strip_prefix("machine-").filter(|_| parent == "machine.slice")?);
        return (!is_libvirt_vm(&machine)).then_some(Identity::Name(machine));
    }
    if let Some(unit) = component.strip_suffix(".service") {
        return unit.strip_prefix("systemd-nspawn@").map(|name| Identity::Name(unescape(name)));
    }
    if let Some(name) = component.strip_prefix("lxc.payload.") {
        return Some(Identity::Name(printable(name.as_bytes())));
    }
    match parent {
        "lxc" | "lxc.payload" => Some(Identity::Name(printable(component.as_bytes()))),
        // The cgroupfs driver: /docker/ID, /libpod_parent/libpod-ID, /kubepods/.../podUID/ID.
        _ => hex_id(component.strip_prefix("libpod-").unwrap_or(component))
            .filter(|id| id.len() == 64 || parent == "docker")
            .map(Identity::Id),
    }
}

fn is_libvirt_vm(machine: &str) -> bool {
    machine.strip_prefix("qemu-").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Whether a path's component is the scope libvirt makes for a VM.
pub fn libvirt_scope(path: &str) -> Option<&str> {
    let mut end = 0;
    for component in path.split('/').skip(1) {
        end += 1 + component.len();
        let machine = component.strip_suffix(".scope").and_then(|unit| unit.strip_prefix("machine-"));
        if machine.is_some_and(|machine| is_libvirt_vm(&unescape(machine))) {
            return path.get(..end);
        }
    }
    None
}

/// The user below whose slice a path is; what is there was made, and named, by that user.
pub fn owner_of_path(path: &str) -> u32 {
    let user = path.strip_prefix("/user.slice/user-").and_then(|rest| rest.split_once(".slice"));
    user.and_then(|(number, _)| number.parse().ok()).unwrap_or(0)
}

fn hex_id(text: &str) -> Option<String> {
    let hex = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (hex && (12..=64).contains(&text.len())).then(|| text.to_owned())
}

/// systemd's `\x2d` for characters that unit names may not hold.
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

/// The runtimes' state on disk, asked for names.
#[derive(Debug)]
pub struct Names {
    docker: PathBuf,
    containerd: PathBuf,
    storage: PathBuf,
    /// From `containers/storage`, read once: identifier to name.
    stored: Option<HashMap<String, String>>,
}

#[derive(Deserialize)]
struct DockerState {
    #[serde(rename = "Name")]
    name: String,
}

#[derive(Deserialize)]
struct OciState {
    #[serde(default)]
    annotations: HashMap<String, String>,
}

#[derive(Deserialize)]
struct StoredContainer {
    id: String,
    #[serde(default)]
    names: Vec<String>,
}

impl Names {
    /// The runtimes' state below a root directory (`/` on a real host).
    pub fn below(root: &Path) -> Self {
        Self {
            docker: root.join("var/lib/docker/containers"),
            containerd: root.join("run/containerd/io.containerd.runtime.v2.task"),
            storage: root.join("var/lib/containers/storage/overlay-containers/containers.json"),
            stored: None,
        }
    }

    /// A container's name: its runtime's, where it says one, else the first 12 digits of its identifier.
    pub fn name(&mut self, identity: &Identity) -> String {
        let id = match identity {
            Identity::Name(name) => return name.clone(),
            Identity::Id(id) => id,
        };
        self.docker_name(id)
            .or_else(|| self.stored_name(id))
            .or_else(|| self.containerd_name(id))
            .map(|name| printable(name.as_bytes()))
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| id.chars().take(12).collect())
    }

    fn docker_name(&self, id: &str) -> Option<String> {
        let state: DockerState = read_json(&self.docker.join(id).join("config.v2.json"))?;
        Some(state.name.trim_start_matches('/').to_owned())
    }

    fn containerd_name(&self, id: &str) -> Option<String> {
        let state: OciState = read_json(&self.containerd.join("k8s.io").join(id).join("config.json"))?;
        let annotation = |key: &str| state.annotations.get(&format!("io.kubernetes.cri.{key}")).cloned();
        let sandbox = annotation("sandbox-name")?;
        Some(annotation("container-name").map_or_else(|| sandbox.clone(), |name| format!("{sandbox}/{name}")))
    }

    fn stored_name(&mut self, id: &str) -> Option<String> {
        let path = &self.storage;
        let stored = self.stored.get_or_insert_with(|| {
            let all: Vec<StoredContainer> = read_json(path).unwrap_or_default();
            all.into_iter().filter_map(|one| Some((one.id, one.names.into_iter().next()?))).collect()
        });
        stored.get(id).cloned()
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    if std::fs::metadata(path).ok()?.len() > STATE_MAX {
        return None;
    }
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
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
        ] {
            assert_eq!(of_path(path).unwrap().id, Identity::Name(name.to_owned()), "{path}");
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
        let (docker, podman, cri, none) = (id('a'), id('b'), id('c'), id('d'));
        write(format!("var/lib/docker/containers/{docker}/config.v2.json"), r#"{"Name":"/web","ID":"x"}"#.into());
        write(
            "var/lib/containers/storage/overlay-containers/containers.json".into(),
            format!(r#"[{{"id":"{podman}","names":["db"]}},{{"id":"{none}"}}]"#),
        );
        write(
            format!("run/containerd/io.containerd.runtime.v2.task/k8s.io/{cri}/config.json"),
            r#"{"annotations":{"io.kubernetes.cri.sandbox-name":"pod","io.kubernetes.cri.container-name":"app"}}"#
                .into(),
        );
        let mut names = Names::below(root.path());
        assert_eq!(names.name(&Identity::Id(docker)), "web");
        assert_eq!(names.name(&Identity::Id(podman)), "db");
        assert_eq!(names.name(&Identity::Id(cri)), "pod/app");
        assert_eq!(names.name(&Identity::Id(none)), "dddddddddddd");
        assert_eq!(names.name(&Identity::Name("lxc".into())), "lxc");
    }

    proptest! {
        #[test]
        fn no_path_makes_it_panic(path in "(/|\\PC{0,6}|machine-|lxc|libpod-|\\\\x|\\.scope){0,12}") {
            let _ = of_path(&path);
            let _ = libvirt_scope(&path);
            let _ = owner_of_path(&path);
            let _ = unescape(&path);
        }
    }
}
