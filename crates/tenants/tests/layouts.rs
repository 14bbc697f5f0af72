//! One host with containers and VMs in every layout that managers document, and the effect of a rule for a pod.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::fs;

use common::Host;
use ontime_tenants::config::Text;
use ontime_tenants::rules::{Grant, ReservedFor};
use ontime_tenants::{Class, ClassSource, Discovery, Kind, Level, Rules, Tenant, ThreadRole, discover};

const RT: Class = Class::Rt(Level::HIGHEST);

fn rules(text: &str) -> Rules {
    Rules::parse(&[Text::new("/etc/ontime/tenants.toml", text)]).unwrap()
}

/// An identifier that ends with this number.
fn id(number: u32) -> String {
    format!("{number:064x}")
}

fn named<'a>(found: &'a Discovery, name: &str) -> &'a Tenant {
    let tenant = found.tenants.iter().find(|tenant| tenant.name == name);
    assert!(tenant.is_some(), "no {name}: {found:#?}");
    tenant.unwrap()
}

fn pids(tenant: &Tenant) -> Vec<i32> {
    let pids: std::collections::BTreeSet<i32> = tenant.threads.iter().map(|thread| thread.id.pid).collect();
    pids.into_iter().collect()
}

fn put(host: &Host, path: &str, text: &str) {
    let path = host.path(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// containerd's state of a pod's container, or without a container, of its sandbox.
fn cri(host: &Host, state: &str, id: &str, pod: &str, container: Option<&str>) {
    let container =
        container.map_or_else(String::new, |name| format!(r#","io.kubernetes.cri.container-name":"{name}""#));
    let text = format!(r#"{{"annotations":{{"io.kubernetes.cri.sandbox-name":"{pod}"{container}}}}}"#);
    put(host, &format!("{state}/io.containerd.runtime.v2.task/k8s.io/{id}/config.json"), &text);
}

fn stored(host: &Host, file: &str, id: &str, name: &str) {
    put(host, file, &format!(r#"[{{"id":"{id}","names":["{name}"]}}]"#));
}

fn docker(host: &Host, root: &str, id: &str, name: &str) {
    put(host, &format!("{root}/containers/{id}/config.v2.json"), &format!(r#"{{"Name":"/{name}"}}"#));
}

/// Each with the path as in its manager's documentation or sources, and the name that an administrator knows.
#[test]
fn containers_of_every_manager_have_their_own_names() {
    let host = Host::new();
    let all = [
        // Kubernetes: kind and minikube (a node is a container), k3s with cgroupfs in its service, RKE2, MicroK8s with
        // its daemon's flags, kubelet in its own slice, with cgroupfs below its own root, static pods.
        (
            1,
            format!(
                "/system.slice/docker-{}.scope/kubelet.slice/kubelet-kubepods-pod1.slice/cri-containerd-{}.scope",
                id(1),
                id(99)
            ),
            "kind-control-plane",
        ),
        (2, format!("/system.slice/k3s.service/kubepods/burstable/pod0b7b1a2c-5f0e/{}", id(2)), "cell-0/loop"),
        (3, format!("/kubepods.slice/kubepods-podab.slice/cri-containerd-{}.scope", id(3)), "mill-0/loop"),
        (4, format!("/kubepods/besteffort/pod77/{}", id(4)), "saw-0/loop"),
        (
            5,
            format!("/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod5.slice/crio-{}.scope/container", id(5)),
            "lathe-0/loop",
        ),
        (6, format!("/kube/kubepods/pod5f3a0c5cdf6d7b8e9a0b1c2d3e4f5a6b/crio-{}", id(6)), "etcd-0/etcd"),
        // cri-dockerd with systemd.
        (
            7,
            format!("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7.slice/docker-{}.scope", id(7)),
            "press-0/loop",
        ),
        // Docker: in its own slice, with cgroupfs, a build step with either driver, rootless.
        (8, format!("/plc.slice/docker-{}.scope", id(8)), "weld"),
        (9, format!("/docker/{}/init.scope", id(9)), "paint"),
        (10, "/system.slice/docker-0a1b2c3d4e5f6g7h8i9jklmno.scope".to_owned(), "0a1b2c3d4e5f"),
        (11, "/docker/buildkit/1a1b2c3d4e5f6g7h8i9jklmno".to_owned(), "1a1b2c3d4e5f"),
        (
            12,
            format!("/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{}.scope", "c".repeat(64)),
            "cccccccccccc",
        ),
        // Podman: Quadlet, a pod, --cgroup-parent, cgroupfs.
        (13, format!("/system.slice/drill.service/libpod-payload-{}", id(13)), "drill"),
        (14, format!("/machine.slice/machine-libpod_pod_{}.slice/libpod-{}.scope/container", id(98), id(14)), "belt"),
        (15, format!("/plc.slice/libpod-{}.scope", id(15)), "crane"),
        (16, format!("/libpod_parent/{}/libpod-{}", id(97), id(16)), "robot"),
        // CRI-O with its own storage, nerdctl with either driver, Bottlerocket.
        (17, format!("/kubepods.slice/kubepods-pod9.slice/crio-{}.scope", id(17)), "arm-0/loop"),
        (18, format!("/system.slice/nerdctl-{}.scope", id(18)), "lift"),
        (19, format!("/default/{}", id(19)), "door"),
        (
            20,
            format!("/system.slice/containerd.service/kubepods-besteffort-pod3.slice:cri-containerd:{}", id(20)),
            "gate-0/loop",
        ),
        // systemd-nspawn: in a user's manager, in any service, kept in a scope; runc and crun with systemd.
        (
            21,
            "/user.slice/user-0.slice/user@0.service/machine.slice/machine-box1.scope/payload/init.scope".to_owned(),
            "box1",
        ),
        (22, r"/system.slice/system-plant.slice/plant@north\x2deast.service/payload".to_owned(), "north-east"),
        (23, "/system.slice/run-r7.scope/payload/system.slice/a.service".to_owned(), "run-r7"),
        (24, "/machine.slice/crun-loop.scope".to_owned(), "loop"),
        // LXC below its own unit, Incus in a project, Proxmox, libvirt.
        (25, "/system.slice/lxc@web.service/lxc.payload.web/init.scope".to_owned(), "web"),
        (26, "/lxc.payload.plant_db/system.slice/db.service".to_owned(), "plant_db"),
        (27, "/lxc/101/ns/init.scope".to_owned(), "101"),
        (28, r"/machine.slice/machine-lxc\x2d4242\x2dscada\x2d2.scope/libvirt".to_owned(), "scada-2"),
        (29, "/lxc/lxc.payload.shop/init.scope".to_owned(), "shop"),
    ];
    docker(&host, "var/lib/docker", &id(1), "kind-control-plane");
    cri(&host, "run/k3s/containerd", &id(2), "cell-0", Some("loop"));
    cri(&host, "run/k3s/containerd", &id(3), "mill-0", Some("loop"));
    cri(&host, "var/snap/microk8s/other/run", &id(4), "saw-0", Some("loop"));
    let flags = ["containerd", "--root", "/var/snap/x", "--state", "/var/snap/microk8s/other/run"];
    host.process(
        900,
        "/snap/microk8s/7/bin/containerd",
        "/system.slice/snap.microk8s.daemon-containerd.service",
        0,
        &flags,
    );
    let overlay = "var/lib/containers/storage/overlay-containers/containers.json";
    let of_pods = format!(
        r#"[{{"id":"{}","names":["k8s_loop_lathe-0_plant_u_0"]}},
           {{"id":"{}","names":["k8s_etcd_etcd-0_kube-system_u_0"]}},
           {{"id":"{}","names":["drill"]}},{{"id":"{}","names":["belt"]}},{{"id":"{}","names":["robot"]}}]"#,
        id(5),
        id(6),
        id(13),
        id(14),
        id(16)
    );
    put(&host, overlay, &of_pods);
    docker(&host, "var/lib/docker", &id(7), "k8s_loop_press-0_plant_u_1");
    docker(&host, "var/lib/docker", &id(8), "weld");
    docker(&host, "var/snap/docker/common/var-lib-docker", &id(9), "paint");
    stored(&host, "var/lib/containers/storage/overlay-containers/volatile-containers.json", &id(15), "crane");
    put(&host, "etc/crio/crio.conf.d/10-storage.conf", "[crio]\nroot = \"/srv/crio\"\n[crio.runtime]\n");
    stored(&host, "srv/crio/overlay-containers/containers.json", &id(17), "k8s_loop_arm-0_plant_u_0");
    for (number, name) in [(18, "lift"), (19, "door")] {
        let file = format!("run/containerd/io.containerd.runtime.v2.task/default/{}/config.json", id(number));
        put(&host, &file, &format!(r#"{{"annotations":{{"nerdctl/name":"{name}"}}}}"#));
    }
    cri(&host, "run/host-containerd", &id(20), "gate-0", Some("loop"));
    for (number, path, _) in &all {
        let uid = if path.starts_with("/user.slice/user-1000.slice") { 100_000 } else { 0 };
        host.process(1000 + number, "/usr/bin/app", path, uid, &["app"]);
    }
    host.process(930, "/usr/bin/lxc-start", "/lxc/lxc.monitor.shop", 0, &["lxc-start"]);
    // libvirt's monitor of its container is in the same cgroup.
    for (pid, numbers) in [(928, "928"), (1128, "1128\t7")] {
        host.process(pid, "/usr/libexec/libvirt_lxc", &all[27].1, 0, &["libvirt_lxc", "--name", "scada-2"]);
        fs::write(host.path(&format!("proc/{pid}/status")), format!("Uid:\t0\t0\t0\t0\nNSpid:\t{numbers}\n")).unwrap();
    }
    let found = discover(&host.sources(), &Rules::default());
    let mut seen: Vec<(i32, &str)> =
        found.tenants.iter().map(|tenant| (tenant.process.pid - 1000, tenant.name.as_str())).collect();
    seen.sort_unstable();
    let wanted: Vec<(i32, &str)> = all.iter().map(|(number, _, name)| (*number, *name)).collect();
    assert_eq!(seen, wanted);
    assert!(found.problems.is_empty(), "{:?}", found.problems);
    assert_eq!(pids(named(&found, "scada-2")), [1028, 1128], "one inside only calls itself so");
}

#[test]
fn vms_of_every_manager_have_their_own_names_and_vcpus() {
    let host = Host::new();
    let vm = |pid: i32, executable: &str, cgroup: &str, uid: u32, line: &str, comm: &str| {
        let arguments: Vec<&str> = line.split(' ').collect();
        host.process(pid, executable, cgroup, uid, &arguments);
        host.thread(pid, pid + 1, comm, 0);
    };
    let jail = "/srv/jailer/firecracker/7c9e6679/root/firecracker";
    vm(100, jail, &format!("/firecracker/{}", id(7)), 0, "firecracker --id 7c9e6679 --api-sock /a", "fc_vcpu 0");
    vm(
        110,
        "/usr/bin/qemu-system-x86_64",
        "/machine.slice/systemd-vmspawn@mill.service",
        0,
        "qemu -machine q35",
        "CPU 0/KVM",
    );
    vm(120, "/usr/bin/crosvm", "/system.slice/cell.service", 0, "crosvm run --name=cell k", "crosvm_vcpu0");
    vm(130, "/usr/local/bin/lkvm", "/user.slice/user-0.slice/session-1.scope", 0, "lkvm run --name saw", "kvm-vcpu-0");
    vm(140, "/usr/bin/stratovirt", "/vm.slice/press.service", 0, "stratovirt -machine q35 -name press", "CPU 0/KVM");
    let nix = "/nix/store/0a-qemu-9.2.0/bin/.qemu-system-x86_64-wrapped";
    vm(150, nix, "/system.slice/microvm@lathe.service", 0, "qemu -name lathe", "CPU 0/KVM");
    vm(160, "/usr/lib/virtualbox/VBoxHeadless", "/vm.slice/b.service", 0, "VBoxHeadless --comment weld", "EMT-0");
    let incus = "/opt/incus/bin/qemu-system-x86_64";
    vm(170, incus, "/system.slice/incus.service", 0, "qemu -S -name plant_drill -uuid 1", "CPU 0/KVM");
    // microvm.nix: this monitor has no option for a name.
    let (hypervisor, unit) =
        ("/nix/store/0b-ch-44.0/bin/cloud-hypervisor", r"/system.slice/m.slice/microvm@hot\x2d2.service");
    vm(180, hypervisor, unit, 0, "microvm@hot-2 --cpus boot=1", "vcpu0");
    // Two in one unit, and one in a user's: the unit's name is none of theirs.
    for (pid, unit) in [(190, "/vm.slice/pair@1.service"), (194, "/vm.slice/pair@1.service")] {
        vm(pid, hypervisor, unit, 0, "ch", "vcpu0");
    }
    let of_user = "/user.slice/user-1000.slice/user@1000.service/app.slice/vm@cell.service";
    vm(198, hypervisor, of_user, 0, "ch", "vcpu0");
    // A forked crosvm process for a device, and vmspawn's own helpers.
    host.process(122, "/usr/bin/crosvm", "/system.slice/cell.service", 0, &["crosvm"]);
    host.alter(122, 120, 0);
    host.process(
        112,
        "/usr/lib/systemd/systemd-vmspawn",
        "/machine.slice/systemd-vmspawn@mill.service",
        0,
        &["vmspawn"],
    );
    let found = discover(
        &host.sources(),
        &rules("[[tenant]]\ncgroup = \"/*.slice/**\"\nclass = \"rt\"\n[[tenant]]\nname = \"7c9e*\"\nclass = \"rt\"\n"),
    );
    let seen: Vec<(&str, i32)> =
        found.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.process.pid)).collect();
    let wanted = [
        ("7c9e6679", 100),
        ("cell", 120),
        ("hot-2", 180),
        ("lathe", 150),
        ("mill", 110),
        ("plant_drill", 170),
        ("press", 140),
        ("saw", 130),
        ("vm-190", 190),
        ("vm-194", 194),
        ("vm-198", 198),
        ("weld", 160),
    ];
    assert_eq!(seen, wanted, "{:?}", found.problems);
    for tenant in &found.tenants {
        let vcpus = tenant.threads.iter().filter(|thread| thread.role == ThreadRole::Vcpu(0)).count();
        assert_eq!((vcpus, pids(tenant)), (1, vec![tenant.process.pid]), "{}", tenant.name);
        assert_eq!(tenant.class, RT, "{}", tenant.name);
    }
}

/// An administrator's rule for a KubeVirt virtual machine: a rule for its pod.
#[test]
fn a_rule_for_a_pod_with_a_vm_means_the_vm_and_not_what_manages_it() {
    let host = Host::new();
    let pod = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f.slice";
    let compute = format!("{pod}/crio-{}.scope", id(1));
    for (pid, program) in [(10, "virt-launcher-monitor"), (11, "virt-launcher"), (12, "virtqemud"), (13, "virtlogd")] {
        host.process(pid, &format!("/usr/bin/{program}"), &format!("{compute}/container"), 107, &[program]);
    }
    host.process(
        20,
        "/usr/libexec/qemu-kvm",
        &format!("{compute}/container"),
        107,
        &["qemu-kvm", "-name", "guest=plant_cell"],
    );
    host.thread(20, 21, "CPU 0/KVM", 0);
    host.in_namespace(20, 107, 67);
    // A sidecar in its own container, and another pod.
    host.process(30, "/usr/bin/tail", &format!("{pod}/crio-{}.scope", id(2)), 107, &["tail"]);
    host.process(
        40,
        "/usr/bin/app",
        &format!("/kubepods.slice/kubepods-pod77.slice/crio-{}.scope", id(3)),
        0,
        &["app"],
    );
    let rt = |text: &str| {
        let found = discover(&host.sources(), &rules(&format!("[[tenant]]\n{text}\nclass = \"rt\"\n")));
        let rt = found.tenants.iter().filter(|tenant| tenant.class == RT);
        let mut all: Vec<i32> = rt.flat_map(pids).collect();
        all.sort_unstable();
        all
    };
    assert_eq!(rt(&format!("cgroup = \"{compute}\"")), [20]);
    assert_eq!(rt(&format!("cgroup = \"{pod}\"")), [20, 30], "a container of its own is what the rule says, too");
    assert_eq!(rt("cgroup = \"/kubepods.slice/**\"\nkind = \"qemu\""), [20]);
    assert_eq!(rt("cgroup = \"/kubepods.slice/**\""), [20, 30, 40]);
    // A reservation for the pod is the VM's; without a VM in the pod, it is its containers'.
    for (uid, reserved) in [("0f", vec![20]), ("77", vec![40]), ("7", vec![])] {
        let mut rules = Rules::default();
        let to = ReservedFor::Pod(uid.to_owned());
        let grant = Grant { reservation: "r".to_owned(), to, level: Level::HIGHEST, runtime_cap: None, vcpus: 1 };
        rules.set_grants(vec![grant]);
        let found = discover(&host.sources(), &rules);
        let is_its = |tenant: &&Tenant| matches!(tenant.class_source, ClassSource::Reservation { .. });
        let threads: Vec<i32> = found.tenants.iter().filter(is_its).flat_map(pids).collect();
        assert_eq!(threads, reserved, "{uid}");
    }
    // Rules that name the container.
    assert_eq!(rt(&format!("cgroup = \"{compute}\"\nkind = \"container\"")), [10, 11, 12, 13]);
    assert_eq!(rt("name = \"000000000000\""), [10, 11, 12, 13, 30, 40]);
}

/// packaging/kubevirt: the rule is for the VM that the manifest makes, and not for the helpers in its pod.
#[test]
fn the_kubevirt_example_makes_its_vm_real_time() {
    let file = |name: &str| {
        let path = format!("{}/../../packaging/kubevirt/{name}", env!("CARGO_MANIFEST_DIR"));
        fs::read_to_string(path).unwrap()
    };
    let manifest = file("vm.yaml");
    let value = |key: &str| manifest.lines().find_map(|line| line.trim().strip_prefix(key)).unwrap().trim().to_owned();
    let guest = format!("guest={}_{},debug-threads=on", value("namespace:"), value("name:"));
    let host = Host::new();
    let container = format!("/kubepods.slice/kubepods-pod3.slice/crio-{}.scope/container", id(1));
    host.process(11, "/usr/bin/virt-launcher", &container, 107, &["virt-launcher"]);
    host.process(20, "/usr/libexec/qemu-kvm", &container, 107, &["qemu-kvm", "-name", &guest]);
    host.thread(20, 21, "CPU 0/KVM", 0);
    host.in_namespace(20, 107, 67);
    let found = discover(&host.sources(), &rules(&file("tenants.toml")));
    let rt: Vec<_> = found.tenants.iter().filter(|tenant| tenant.class == RT).map(|tenant| &tenant.name).collect();
    assert_eq!(rt, ["default_plc-1"], "{found:#?}");
    assert!(file("host.toml").contains("tenants = [\"default_plc-1\"]"));
}

/// gVisor: the sandbox and its file server are in the scope of the manager's container.
#[test]
fn a_gvisor_sandbox_is_the_container_whose_scope_it_is_in() {
    let host = Host::new();
    let scope = format!("/system.slice/docker-{}.scope", id(4));
    docker(&host, "var/lib/docker", &id(4), "weld");
    host.process(10, "/usr/local/bin/runsc", &scope, 0, &["runsc-gofer", "--root=/var/run/docker/runtime-runc/moby"]);
    host.process(11, "/usr/local/bin/runsc", &scope, 65_534, &["runsc-sandbox", "--platform=systrap", "boot"]);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"weld\"\nclass = \"rt\"\n"));
    assert_eq!(found.tenants.len(), 1, "{found:#?}");
    let tenant = named(&found, "weld");
    assert_eq!((tenant.kind, tenant.class, pids(tenant)), (Kind::Container, RT, vec![10, 11]));
}

/// A kind node, or a system in a container, contains more than the VM of one of its pods.
#[test]
fn a_vm_deep_in_a_container_does_not_make_helpers_of_all_that_is_there() {
    let host = Host::new();
    let node = format!("/system.slice/docker-{}.scope", id(1));
    let inner = format!("{node}/kubelet.slice/kubelet-kubepods-pod5.slice/cri-containerd-{}.scope", id(2));
    host.process(10, "/usr/bin/kubelet", &format!("{node}/init.scope"), 0, &["kubelet"]);
    host.vm(100, "cell", &inner);
    host.process(20, "/usr/bin/virt-launcher", &inner, 0, &["virt-launcher"]);
    host.process(50, "/sbin/init", "/lxc.payload.web/init.scope", 0, &["init"]);
    host.vm(500, "inner", "/lxc.payload.web/system.slice/vm.service");
    let found = discover(
        &host.sources(),
        &rules("[[tenant]]\ncgroup = \"/{system.slice/**,lxc.payload.*}\"\nclass = \"rt\"\n"),
    );
    assert_eq!(found.tenants.iter().filter(|tenant| tenant.class == RT).count(), 4, "{found:#?}");
    assert_eq!(pids(named(&found, "000000000000")), [10, 20]);
    assert_eq!(pids(named(&found, "web")), [50]);
}

/// Kata: the pod's sandbox is a VM, whose monitor and helpers are in the sandbox's cgroup or beside it.
#[test]
fn the_vm_of_a_sandbox_has_the_pods_name_and_its_helpers_get_nothing() {
    let host = Host::new();
    let shim = |pid, cgroup: &str| {
        host.process(pid, "/opt/kata/bin/containerd-shim-kata-v2", cgroup, 0, &["shim"]);
        host.process(pid + 1, "/opt/kata/libexec/virtiofsd", cgroup, 0, &["virtiofsd"]);
    };
    let monitor = |pid: i32, executable: &str, cgroup: &str, line: &str, comm: &str| {
        host.process(pid, executable, cgroup, 0, &line.split(' ').collect::<Vec<_>>());
        host.thread(pid, pid + 1, comm, 0);
        // In the host's PID namespace.
        fs::write(host.path(&format!("proc/{pid}/status")), format!("Uid:\t0\t0\t0\t0\nNSpid:\t{pid}\n")).unwrap();
    };
    let pod = |number: u32| format!("/kubepods.slice/kubepods-pod{number}.slice/cri-containerd-{}.scope", id(number));
    for (number, name) in [(1, "cell-0"), (2, "mill-0"), (3, "saw-0"), (4, "press-0"), (5, "drill-0")] {
        cri(&host, "run/containerd", &id(number), name, None);
    }
    shim(10, &pod(1));
    let qemu = "/opt/kata/bin/qemu-system-x86_64";
    monitor(100, qemu, &pod(1), &format!("qemu -name sandbox-{},debug-threads=on", id(1)), "CPU 0/KVM");
    let overhead = format!("/kata_overhead/{}", id(2));
    shim(20, &overhead);
    let socket = format!("cloud-hypervisor --api-socket /run/vc/vm/{}/clh-api.sock", id(2));
    monitor(200, "/opt/kata/bin/cloud-hypervisor", &overhead, &socket, "vcpu0");
    let by_files = format!("/kubepods/pod3/kata_{}", id(3));
    monitor(
        300,
        "/opt/kata/bin/firecracker",
        &by_files,
        &format!("firecracker --config-file /run/vc/firecracker/{}/root/fc.json", id(3)),
        "fc_vcpu 0",
    );
    let runtime_rs = format!("/kata-overhead.slice/runtime-rs-{}.scope", id(4));
    monitor(400, "/usr/bin/stratovirt", &runtime_rs, &format!("stratovirt -name sandbox-{}", id(4)), "CPU 0/KVM");
    // A process inside a container with such a name: it has numbers in a namespace. And one with another sandbox's
    // identifier.
    monitor(500, qemu, &pod(5), &format!("qemu -name sandbox-{}", id(5)), "CPU 0/KVM");
    host.in_namespace(500, 0, 500);
    monitor(600, qemu, &pod(5), &format!("qemu -name sandbox-{}", id(1)), "CPU 0/KVM");
    let text = "[[tenant]]\nname = \"{cell,mill,saw,press,drill}-0\"\nkind = \"{}\"\nclass = \"rt\"\n";
    for kind in ["qemu", "vmm"] {
        let found = discover(&host.sources(), &rules(&text.replace("{}", kind)));
        let rt = found.tenants.iter().filter(|tenant| tenant.class == RT);
        let seen: Vec<(&str, i32)> = rt.map(|tenant| (tenant.name.as_str(), tenant.process.pid)).collect();
        let wanted: &[(&str, i32)] =
            if kind == "qemu" { &[("cell-0", 100)] } else { &[("mill-0", 200), ("press-0", 400), ("saw-0", 300)] };
        assert_eq!(seen, wanted, "{:?}", found.problems);
        let all: Vec<i32> = found.tenants.iter().flat_map(pids).collect();
        assert!(![10, 11, 20, 21].iter().any(|helper| all.contains(helper)), "{all:?}");
        assert_eq!(named(&found, &format!("sandbox-{}", id(5))).kind, Kind::Qemu);
        assert_eq!(named(&found, &format!("sandbox-{}", id(1))).process.pid, 600);
    }
}

/// Ontime does not read a user's records: the user could delay discovery by a file system of the user's own.
#[test]
fn a_users_container_without_a_name_is_found_and_a_rule_that_may_mean_it_is_told() {
    let host = Host::new();
    let of_user = |user: u32, digit: char, prefix: &str| {
        let slice = format!("/user.slice/user-{user}.slice/user@{user}.service/user.slice");
        let id = digit.to_string().repeat(64);
        put(&host, &format!("home/u{user}/.local/share/docker/containers/{id}/config.v2.json"), r#"{"Name":"/press"}"#);
        format!("{slice}/{prefix}-{id}.scope")
    };
    host.process(10, "/usr/bin/app", &of_user(1000, 'a', "docker"), 101_000, &["app"]);
    host.process(20, "/usr/bin/app", &of_user(1001, 'b', "nerdctl"), 102_000, &["app"]);
    host.process(30, "/usr/bin/app", &format!("/system.slice/docker-{}.scope", "c".repeat(64)), 0, &["app"]);
    let found = discover(&host.sources(), &rules("[[tenant]]\nname = \"press\"\nuser = 1000\nclass = \"rt\"\n"));
    let seen: Vec<(&str, u32, Class)> =
        found.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.owner, tenant.class)).collect();
    let bulk = Class::Bulk;
    assert_eq!(seen, [("aaaaaaaaaaaa", 1000, bulk), ("bbbbbbbbbbbb", 1001, bulk), ("cccccccccccc", 0, bulk)]);
    assert_eq!(found.problems.len(), 1);
    let said = found.problems[0].to_string();
    for words in [
        "no tenant that runs has a name like `press`",
        "no runtime has a name on record for cccccccccccc",
        "names are not known of aaaaaaaaaaaa of user 1000, bbbbbbbbbbbb of user 1001",
        "what users' runtimes record is not read",
        "`user = 1000`",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    // The remedy in the message.
    let id = "d".repeat(64);
    let slice = "/user.slice/user-1000.slice/user@1000.service/plc.slice";
    host.process(40, "/usr/bin/app", &format!("{slice}/docker-{id}.scope"), 101_000, &["app"]);
    let found =
        discover(&host.sources(), &rules(&format!("[[tenant]]\ncgroup = \"{slice}\"\nuser = 1000\nclass = \"rt\"\n")));
    assert_eq!(named(&found, "dddddddddddd").class, RT);
}
