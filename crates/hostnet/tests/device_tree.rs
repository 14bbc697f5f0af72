//! Assignment of interrupts to interfaces, and the way of packets down to NICs, from synthetic device trees.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

#[path = "support/fleet.rs"]
mod fleet;
#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use ontime_hostnet::inventory::{KernelThread, KernelThreadKind};
use ontime_hostnet::{Intent, Inventory, NicConfig, NicUse, Roots, RuleId, Severity, plan};
use ontime_tenants::{Class, Level, Policy, Tenant, ThreadId};

const RT: Class = Class::Rt(Level::HIGHEST);

/// A synthetic `/sys` and `/proc`, with real links of the test's own network namespace.
struct Tree {
    dir: tempfile::TempDir,
}

impl Tree {
    fn new() -> Self {
        let tree = Self { dir: tempfile::tempdir().unwrap() };
        tree.put("proc/sys/kernel/osrelease", "6.18.3-rt");
        tree.put("proc/sys/kernel/version", "#1 SMP PREEMPT_RT");
        tree
    }

    fn roots(&self) -> Roots {
        let at = |name: &str| self.dir.path().join(name);
        Roots { proc: at("proc"), sys: at("sys"), debug: at("debug"), dev: at("dev"), root: at("") }
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Adds a link, and its device in `/sys`.
    fn nic(&self, name: &str, device: &str) {
        support::run("ip", &format!("link add {name} type ifb"));
        self.device(name, device);
    }

    fn device(&self, name: &str, device: &str) {
        let device = self.dir.path().join("sys/devices").join(device);
        fs::create_dir_all(&device).unwrap();
        let class = self.dir.path().join("sys/class/net").join(name);
        fs::create_dir_all(&class).unwrap();
        symlink(device, class.join("device")).unwrap();
    }

    fn attribute(&self, nic: &str, name: &str, text: &str) {
        self.put(&format!("sys/class/net/{nic}/{name}"), text);
    }

    /// Adds the link by which the kernel shows that one interface is below another.
    fn lower(&self, upper: &str, lower: &str) {
        let class = self.dir.path().join("sys/class/net");
        fs::create_dir_all(class.join(upper)).unwrap();
        symlink(Path::new("..").join(lower), class.join(upper).join(format!("lower_{lower}"))).unwrap();
    }

    /// Sets the name of a NIC's driver in its device.
    fn driver(&self, device: &str, driver: &str) {
        let device = self.dir.path().join("sys/devices").join(device);
        symlink(Path::new("/sys/bus/any/drivers").join(driver), device.join("driver")).unwrap();
    }

    fn driver_of(&self, name: &str, driver: &str) {
        let device = self.dir.path().join("sys/class/net").join(name).join("device");
        let link = device.join("driver");
        if !link.is_symlink() {
            symlink(Path::new("/sys/bus/any/drivers").join(driver), link).unwrap();
        }
    }

    fn irq(&self, number: u32, handler: &str) {
        self.put(&format!("sys/kernel/irq/{number}/actions"), handler);
        self.put(&format!("proc/irq/{number}/smp_affinity_list"), "0-3");
    }

    /// Shows a device on its bus.
    fn on_bus(&self, bus: &str, device: &str) {
        let device = self.dir.path().join("sys/devices").join(device);
        let folder = self.dir.path().join("sys/bus").join(bus).join("devices");
        [&device, &folder].into_iter().for_each(|path| fs::create_dir_all(path).unwrap());
        symlink(&device, folder.join(device.file_name().unwrap())).unwrap();
    }

    /// Adds a NIC whose interfaces are in other network namespaces: the kernel keeps its folder for them.
    fn nic_elsewhere(&self, bus: &str, device: &str, driver: &str) {
        self.on_bus(bus, device);
        self.driver(device, driver);
        fs::create_dir_all(self.dir.path().join("sys/devices").join(device).join("net")).unwrap();
    }

    fn msi(&self, device: &str, irqs: &[u32]) {
        irqs.iter().for_each(|irq| self.put(&format!("sys/devices/{device}/msi_irqs/{irq}"), "msix"));
    }

    fn scan(&self) -> Inventory {
        Inventory::scan(&self.roots())
    }

    fn irqs(&self) -> BTreeMap<String, Vec<u32>> {
        self.scan().nics.into_iter().map(|nic| (nic.id.name, nic.irqs)).filter(|(_, irqs)| !irqs.is_empty()).collect()
    }
}

fn owned<const N: usize>(wanted: [(&str, &[u32]); N]) -> BTreeMap<String, Vec<u32>> {
    wanted.map(|(name, irqs)| (name.to_owned(), irqs.to_vec())).into()
}

#[test]
fn devices_that_are_on_no_pci_bus_have_the_interrupts_named_after_them() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        tree.nic("end0", "platform/axi/1000120000.pcie/1f00100000.ethernet");
        tree.irq(106, "1f00100000.ethernet");
        tree.nic("wan", "platform/axi/fe300000.usb/usb5/5-1/5-1.4/5-1.4:2.0");
        tree.irq(38, "dwc3-hcd:usb5");
        tree.nic("ens4", "platform/b000c00.virtio_mmio/virtio7");
        tree.irq(52, "virtio7");
        // Another bus's interrupt, and others whose numbers only begin with the same digits.
        tree.irq(39, "xhci-hcd:usb50");
        tree.irq(53, "virtio70");
        tree.irq(54, "2f00100000.ethernet");
        // Another device's, which the plan moves.
        tree.irq(40, "mystery");
        assert_eq!(tree.irqs(), owned([("end0", &[106]), ("ens4", &[52]), ("wan", &[38])]));
        let mut inventory = tree.scan();
        for irq in [38, 40, 52, 106] {
            let id = ThreadId { pid: irq, tid: irq, start_time: 1 };
            let kind = KernelThreadKind::Irq(u32::try_from(irq).unwrap());
            inventory.threads.push(KernelThread { id, kind, comm: format!("irq/{irq}-x"), policy: Policy::Fifo(50) });
        }
        let found = plan(&inventory, &intent(&["end0", "ens4", "wan"].map(|name| (name, RT)), Vec::new()));
        let policies = fleet::policies(&found);
        let (nics, other) = (Policy::Fifo(50), Policy::BULK_DRIVER);
        for (irq, wanted) in [(38, nics), (52, nics), (106, nics), (40, other)] {
            assert_eq!(policies.get(&format!("irq/{irq}-x")), Some(&wanted), "{irq}");
        }
        let of_rule = |rule| fleet::of_rule(&found, rule).len();
        assert_eq!((of_rule(RuleId::IrqThread), of_rule(RuleId::DeviceIrq)), (3, 1));
    });
}

#[test]
fn of_interfaces_whose_names_begin_alike_the_longest_whole_name_has_the_interrupt() {
    let names = ["lan1", "lan10", "lan1x", "lan1-x", "lan"];
    for order in [names, ["lan", "lan1-x", "lan1x", "lan10", "lan1"]] {
        support::in_namespace(|_| {
            let tree = Tree::new();
            order.iter().for_each(|name| tree.nic(name, &format!("platform/mac-of-{name}")));
            for (irq, handler) in [
                (20, "lan1"),
                (21, "lan1-rx-0"),
                (22, "lan10"),
                (23, "lan10-TxRx-1"),
                (24, "lan1x-tx-0"),
                (25, "lan1-x"),
                (26, "lan1-x-rx-0"),
                (27, "lan-rx-1"),
                (28, "queue1@lan1"),
                // Of no interface here.
                (29, "lan100-rx-0"),
                (30, "wlan1"),
                (31, "lan1xy"),
                (32, "lan2"),
            ] {
                tree.irq(irq, handler);
            }
            let wanted = owned([
                ("lan", &[27][..]),
                ("lan1", &[20, 21, 28]),
                ("lan10", &[22, 23]),
                ("lan1x", &[24]),
                ("lan1-x", &[25, 26]),
            ]);
            assert_eq!(tree.irqs(), wanted);
        });
    }
}

#[test]
fn a_name_that_an_interface_took_over_gives_it_no_interrupt() {
    // Two NICs swapped names after their drivers had requested interrupts, in each order of appearance.
    for order in [["nic-a", "nic-b"], ["nic-b", "nic-a"]] {
        support::in_namespace(|_| {
            let tree = Tree::new();
            for name in order {
                let (device, irqs) =
                    if name == "nic-a" { ("0000:41:00.0", [80, 81]) } else { ("0000:42:00.0", [90, 91]) };
                tree.nic(name, &format!("pci0000:40/{device}"));
                tree.msi(&format!("pci0000:40/{device}"), &irqs);
            }
            for (irq, handler) in [(80, "nic-b-rx-0"), (81, "nic-b"), (90, "nic-a-rx-0"), (91, "nic-a")] {
                tree.irq(irq, handler);
            }
            assert_eq!(tree.irqs(), owned([("nic-a", &[80, 81]), ("nic-b", &[90, 91])]));
        });
    }
}

/// Drivers of SoCs call handlers as the interface was called when it was brought up, or before it had a name.
#[test]
fn the_only_nic_without_interrupts_has_those_of_its_earlier_name() {
    for (handlers, wanted) in [
        (&["end1:mac", "end1:rx-0", "end1:tx-0"][..], &[40, 41, 42][..]),
        (&["eth%d:ch0:rx_be", "eth%d:ch19:tx_nc", "ttyS1"], &[40, 41]),
        // The other NIC's name, which that one took over, and its own interrupt.
        (&["lan1"], &[40]),
        // Perhaps two NICs', and names of other devices.
        (&["end1:mac", "end2"], &[]),
        (&["ttyS1", "mmc1"], &[]),
    ] {
        support::in_namespace(|_| {
            let tree = Tree::new();
            tree.nic("plc", "platform/soc/fe2a0000.gmac");
            tree.nic("lan1", "pci0000:00/0000:01:00.0");
            tree.msi("pci0000:00/0000:01:00.0", &[70]);
            tree.irq(70, "lan1-TxRx-0");
            // Neither can have an interrupt of its own now.
            tree.nic("usbnic", "platform/soc/fd000000.usb/usb1/1-1/1-1:1.0");
            tree.nic("spare", "platform/soc/fe010000.gmac");
            ["plc", "lan1", "usbnic"].iter().for_each(|name| support::run("ip", &format!("link set {name} up")));
            (40..).zip(handlers).for_each(|(irq, handler)| tree.irq(irq, handler));
            let found = |name: &str| tree.scan().nic(name).unwrap().irqs.clone();
            assert_eq!(found("plc"), wanted, "{handlers:?}");
            assert!(found("spare").is_empty() && found("usbnic").is_empty());
            assert_eq!(found("lan1"), [70]);
            support::run("ip", "link set spare up");
            assert!(found("plc").is_empty(), "either may have them");
        });
    }
}

/// An SoC's NICs, whose nodes in the device tree say which interrupts of Arm's GIC are theirs.
#[test]
fn interrupts_in_the_device_tree_are_the_nics_whatever_their_handlers_are_called() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        // Two swapped names while they were up; of two the handlers have the driver's name; one is on a GPIO.
        for (name, device, cells) in [
            ("end0", "fe010000.ethernet", &[0, 27, 4, 0, 28, 4][..]),
            ("end1", "fe2a0000.ethernet", &[0, 32, 4, 0, 0, 33, 4, 0]),
            ("neta0", "30000.ethernet", &[0, 42, 4]),
            ("neta1", "40000.ethernet", &[1, 7, 0xf08]),
            ("spi0", "spi0.0", &[5, 8]),
            ("odd0", "odd.ethernet", &[0, 60, 4, 0]),
            ("odd1", "ends.early", &[0, 61]),
        ] {
            tree.nic(name, &format!("platform/soc/{device}"));
            let bytes: Vec<u8> = cells.iter().flat_map(|cell: &u32| cell.to_be_bytes()).collect();
            let node = tree.dir.path().join(format!("sys/devices/platform/soc/{device}/of_node"));
            fs::create_dir_all(&node).unwrap();
            fs::write(node.join("interrupts"), bytes).unwrap();
        }
        for (irq, chip, number, handler) in [
            (20, "GICv3", 59, "end1:mac"),
            (21, "GICv3", 60, "end1:rx-0"),
            (22, "GICv3", 64, "end0:mac"),
            (23, "GICv3", 65, "end0:rx-0"),
            (24, "GIC-0", 74, "mvneta"),
            (25, "GICv2", 23, "mvneta"),
            (26, "GICv3", 92, "ttyS0"),
            (27, "GICv3", 93, "mmc0"),
            // Of another controller, and of another number.
            (28, "gpio-rockchip", 60, "key"),
            (29, "GICv3", 27, "timer"),
            (30, "GICv3", 5, "watchdog"),
        ] {
            tree.irq(irq, handler);
            for (file, text) in [("chip_name", chip.to_owned()), ("hwirq", number.to_string())] {
                tree.put(&format!("sys/kernel/irq/{irq}/{file}"), &text);
            }
        }
        let wanted =
            [("end0", &[20, 21][..]), ("end1", &[22, 23]), ("neta0", &[24]), ("neta1", &[25]), ("odd0", &[26])];
        assert_eq!(tree.irqs(), owned(wanted));
    });
}

#[test]
fn a_nic_that_is_called_like_a_device_or_a_handler_has_its_own_interrupts_only() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        // NICs on PCI with the names of a disk's virtio device, a controller's bus, and a handler.
        for (name, device, irq) in
            [("virtio2", "0000:05:00.0", 60), ("usb3", "0000:06:00.0", 61), ("ahci", "0000:07:00.0", 62)]
        {
            tree.nic(name, &format!("pci0000:00/{device}"));
            tree.msi(&format!("pci0000:00/{device}"), &[irq]);
            tree.irq(irq, &format!("{name}-TxRx-0"));
        }
        // A NIC without such a bus, whose name is the word before a disk controller's address.
        tree.nic("mmc0", "platform/switch-mac");
        tree.irq(70, "virtio2-requests");
        tree.irq(71, "ehci_hcd:usb3");
        tree.irq(72, "ahci");
        tree.irq(73, "mmc0");
        tree.put("sys/bus/virtio/devices/virtio2/device", "0x0002");
        tree.put("sys/bus/platform/devices/mmc0/of_node/name", "mmc");
        assert_eq!(tree.irqs(), owned([("ahci", &[62]), ("usb3", &[61]), ("virtio2", &[60])]));
    });
}

#[test]
fn interfaces_of_one_function_share_what_none_of_them_alone_has() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        let function = "pci0000:80/0000:81:00.0";
        tree.msi(function, &[120, 121, 122, 123, 124]);
        // Two ports and a representor on the function, and a scalable function that lists its own interrupt.
        for name in ["port0", "port1", "rep0"] {
            tree.nic(name, function);
        }
        tree.nic("sub0", &format!("{function}/core.sf.4"));
        tree.put(&format!("sys/devices/{function}/core.sf.4/irqs/124"), "");
        tree.attribute("rep0", "phys_port_name", "pf0vf2\n");
        for (irq, handler) in [
            (120, "async0@pci:0000:81:00.0"),
            (121, "port0-rx-0"),
            (122, "port1-rx-0"),
            (123, "comp3@pci:0000:81:00.0"),
        ] {
            tree.irq(irq, handler);
        }
        tree.irq(124, "comp4@pci:0000:81:00.0");
        let wanted = owned([("port0", &[120, 121, 123]), ("port1", &[120, 122, 123]), ("sub0", &[124])]);
        assert_eq!(tree.irqs(), wanted);
        // The thread of a shared interrupt gets the place of the more urgent port, and a finding reports it.
        let mut inventory = tree.scan();
        let id = ThreadId { pid: 9, tid: 9, start_time: 1 };
        let comm = "irq/123-comp3@pci:0000:81:00.0".to_owned();
        inventory.threads.push(KernelThread { id, kind: KernelThreadKind::Irq(123), comm, policy: Policy::Fifo(50) });
        let of_class = |class| NicConfig { class: Some(class), ..NicConfig::default() };
        let nics = BTreeMap::from([("port0".to_owned(), of_class(Class::Bulk)), ("port1".to_owned(), of_class(RT))]);
        let found = plan(&inventory, &Intent { nics, ..Intent::default() });
        let placed = found.settings.iter().find(|setting| setting.rule == RuleId::IrqThread).unwrap();
        assert_eq!(placed.value, ontime_hostnet::Value::Policy(Policy::Fifo(50)));
        let said = found.findings.iter().find(|finding| finding.rule == RuleId::IrqThread).unwrap();
        assert_eq!(said.severity, Severity::Warning);
        assert!(said.object == "port1" && said.found.contains("port1 (rt0), port0 (bulk)"), "{said:?}");
    });
}

/// A scalable function in a container. Before 6.11 it lists no interrupts.
#[test]
fn interrupts_of_a_scalable_function_elsewhere_are_not_its_parents() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        let function = "pci0000:c8/0000:ca:00.0";
        let part = format!("{function}/mlx5_core.sf.6");
        tree.on_bus("pci", function);
        tree.put(&format!("sys/devices/{function}/class"), "0x020000\n");
        tree.msi(function, &[130, 131, 132, 133]);
        tree.nic("enp202s0f0np0", function);
        tree.nic_elsewhere("auxiliary", &part, "mlx5_core.sf");
        // Without a folder for interfaces, and with none of its own.
        tree.on_bus("auxiliary", &format!("{function}/mlx5_core.eth.0"));
        ["mlx5_async0", "mlx5_comp0", "mlx5_sf_ctrl0", "mlx5_sf_comp0"]
            .into_iter()
            .zip(130..)
            .for_each(|(handler, irq)| tree.irq(irq, &format!("{handler}@pci:0000:ca:00.0")));
        let seen = || {
            let mut inventory = tree.scan();
            assert_eq!(inventory.nic("enp202s0f0np0").unwrap().irqs, [130, 131]);
            assert!(inventory.irqs.iter().all(|irq| irq.network && irq.elsewhere.is_none()), "{:?}", inventory.irqs);
            for irq in [131, 133] {
                let number = i32::try_from(irq).unwrap();
                let id = ThreadId { pid: number, tid: number, start_time: 1 };
                let (kind, comm) = (KernelThreadKind::Irq(irq), format!("irq/{irq}-x"));
                inventory.threads.push(KernelThread { id, kind, comm, policy: Policy::Fifo(50) });
            }
            let found = plan(&inventory, &intent(&[], Vec::new()));
            assert_eq!(fleet::policies(&found), BTreeMap::from([("irq/131-x".to_owned(), Policy::BULK_DRIVER)]));
            found.findings.into_iter().find(|finding| finding.object == "irq/133-x").unwrap().found
        };
        let words = "thread 133 is of network controller 0000:ca:00.0, but of none of its interfaces in the host's";
        assert!(seen().starts_with(words));
        // Names that tell nothing, as the function's own.
        [132, 133].into_iter().for_each(|irq| {
            tree.put(&format!("sys/devices/{part}/irqs/{irq}"), "");
            tree.irq(irq, "mlx5_comp7@pci:0000:ca:00.0");
        });
        assert!(seen().starts_with("thread 133 is of network controller mlx5_core.sf.6, which has no interface"));
    });
}

/// A function with an interface per port, of which one is in a container.
#[test]
fn queues_of_a_functions_interface_elsewhere_are_not_those_of_its_interface_here() {
    for (handlers, own, elsewhere) in [
        // `eth%d`: the driver requested it before it named the interface.
        (["enp225s0f4", "enp225s0f4-Rx0", "enp225s0f4d1-Rx0", "cxgb4-other", "eth%d"], &[140, 141, 143, 144][..], true),
        (
            ["enp225s0f4", "ice-enp225s0f4-TxRx-0", "ice-net1-TxRx-10", "ice-0000:e1:00.4:fdir-TxRx-0", "eth%d"],
            &[140, 141, 143, 144],
            true,
        ),
        (["nfp", "enp225s0f4-rxtx-0", "net1-rxtx-0", "net-exn", "enp225s0f4-lsc"], &[140, 141, 143, 144], true),
        // Renamed while it was up: a handler's name that the driver did not copy has changed, the queues' have not.
        (["enp225s0f4", "eth8-TxRx-0", "eth8-TxRx-1", "eth8-TxRx-2", "eth8-TxRx-3"], &[140, 141, 142, 143, 144], false),
        // Renamed: no name tells the ports apart.
        (["eth8", "eth8-Rx0", "eth9-Rx0", "cxgb4-other", "eth%d"], &[140, 141, 142, 143, 144], false),
    ] {
        support::in_namespace(|_| {
            let tree = Tree::new();
            let function = "pci0000:e0/0000:e1:00.4";
            tree.on_bus("pci", function);
            tree.put(&format!("sys/devices/{function}/class"), "0x020000\n");
            tree.nic("enp225s0f4", function);
            tree.msi(function, &[140, 141, 142, 143, 144]);
            (140..).zip(handlers).for_each(|(irq, handler)| tree.irq(irq, handler));
            assert_eq!(tree.irqs(), owned([("enp225s0f4", own)]));
            let mut inventory = tree.scan();
            for irq in [141, 142] {
                let number = i32::try_from(irq).unwrap();
                let id = ThreadId { pid: number, tid: number, start_time: 1 };
                let (kind, comm) = (KernelThreadKind::Irq(irq), format!("irq/{irq}-x"));
                inventory.threads.push(KernelThread { id, kind, comm, policy: Policy::Fifo(50) });
            }
            let found = plan(&inventory, &intent(&[], Vec::new()));
            let policies = fleet::policies(&found);
            assert_eq!(policies.get("irq/141-x"), Some(&Policy::BULK_DRIVER), "{handlers:?}");
            assert_eq!(policies.contains_key("irq/142-x"), !elsewhere, "{handlers:?}");
            let told = found.findings.iter().find(|finding| finding.object == "irq/142-x");
            let words = "is of network controller 0000:e1:00.4, but of none of its interfaces in the host's network";
            assert_eq!(told.map(|finding| finding.found.contains(words)), elsewhere.then_some(true), "{told:?}");
        });
    }
}

/// Configured classes of interfaces, as `host.toml` would give them.
fn intent(nics: &[(&str, Class)], tenants: Vec<Tenant>) -> Intent {
    let of_class = |class: Class| NicConfig { class: Some(class), ..NicConfig::default() };
    let nics = nics.iter().map(|(name, class)| ((*name).to_owned(), of_class(*class))).collect();
    Intent { nics, tenants, ..Intent::default() }
}

fn used(inventory: &Inventory, intent: &Intent, name: &str) -> NicUse {
    intent.nic_use(inventory, inventory.nic(name).unwrap())
}

#[test]
fn what_is_said_of_a_switchs_port_holds_for_the_nic_below_it() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        tree.nic("cpu0", "platform/c000000.ethernet");
        tree.irq(33, "c000000.ethernet");
        for port in ["lan4", "lan5"] {
            tree.nic(port, "platform/c000000.ethernet/mdio/mdio-bus:1f");
            tree.lower(port, "cpu0");
        }
        // Only `iflink`, as kernels before 5.5 show it.
        tree.nic("lan6", "platform/c000000.ethernet/mdio/mdio-bus:1f");
        let index = |name: &str| tree.scan().nic(name).unwrap().id.ifindex;
        for port in ["lan4", "lan5", "lan6"] {
            tree.attribute(port, "iflink", &format!("{}\n", index("cpu0")));
        }
        let inventory = tree.scan();
        assert_eq!(tree.irqs(), owned([("cpu0", &[33])]));
        for port in ["lan4", "lan5", "lan6"] {
            assert_eq!(inventory.nic(port).unwrap().lower, [index("cpu0")], "{port}");
            assert_eq!(used(&inventory, &intent(&[(port, RT)], Vec::new()), "cpu0"), NicUse::Configured(RT), "{port}");
        }
        let both = intent(&[("lan4", RT), ("lan5", Class::Bulk)], Vec::new());
        assert_eq!(used(&inventory, &both, "cpu0"), NicUse::Mixed(RT));
        // A VM whose tap discovery followed down to the switch's port, and a VM that is configured there.
        let mut inventory = inventory;
        let found = fleet::vm(&mut inventory, 1, RT, 1, "lan5");
        let by_tap = intent(&[], vec![found.clone()]);
        assert_eq!(used(&inventory, &by_tap, "cpu0"), NicUse::Derived(RT));
        let elsewhere = fleet::vm(&mut inventory, 2, RT, 1, "");
        let mut by_name = intent(&[], vec![elsewhere.clone()]);
        by_name.nics.insert("lan6".to_owned(), NicConfig { tenants: vec![elsewhere.name], ..NicConfig::default() });
        assert_eq!(used(&inventory, &by_name, "cpu0"), NicUse::Derived(RT));
        // The port's configuration counts, not its users.
        let said = intent(&[("lan5", Class::Bulk)], vec![found]);
        assert_eq!(used(&inventory, &said, "cpu0"), NicUse::Configured(Class::Bulk));
        let itself = intent(&[("lan4", RT), ("cpu0", Class::Bulk)], Vec::new());
        assert_eq!(used(&inventory, &itself, "cpu0"), NicUse::Configured(Class::Bulk));
    });
}

#[test]
fn a_synthetic_nic_and_a_failover_pair_lead_to_what_is_below_them() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        // Hyper-V: the synthetic NIC is above a virtual function, and has its own rings.
        tree.nic("syn0", "VMBUS:01/f8615163-df3e-46c5-913f-f2d2f965ed0e");
        tree.nic("vf0", "pci0002:00/0002:00:02.0");
        tree.msi("pci0002:00/0002:00:02.0", &[40, 41]);
        tree.lower("syn0", "vf0");
        // net_failover: the upper interface shows the standby's device, which has the interrupts.
        for name in ["fail0", "stby0"] {
            tree.nic(name, "pci0000:00/0000:00:03.0/virtio1");
        }
        tree.nic("prim0", "pci0000:00/0000:00:04.0");
        tree.msi("pci0000:00/0000:00:03.0", &[50]);
        tree.msi("pci0000:00/0000:00:04.0", &[51]);
        tree.lower("fail0", "stby0");
        tree.lower("fail0", "prim0");
        let inventory = tree.scan();
        assert_eq!(tree.irqs(), owned([("prim0", &[51]), ("stby0", &[50]), ("vf0", &[40, 41])]));
        let is_carried = |name: &str| inventory.nic(name).unwrap().carried;
        assert_eq!(["syn0", "fail0", "stby0"].map(is_carried), [false, true, false]);
        for (upper, below) in [("syn0", &["vf0"][..]), ("fail0", &["stby0", "prim0"])] {
            for nic in below {
                let said = intent(&[(upper, RT)], Vec::new());
                assert_eq!(used(&inventory, &said, nic), NicUse::Configured(RT), "{upper} {nic}");
                assert_eq!(used(&inventory, &intent(&[], Vec::new()), nic), NicUse::Derived(Class::Bulk));
            }
        }
    });
}

/// A tunnel has no `lower_*` link. The tree shows none for the macvlan here, so it stands for one.
#[test]
fn a_tunnel_is_above_the_nic_that_carries_it_and_a_pairs_end_is_not_above_the_other() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        tree.nic("wire0", "pci0000:00/0000:0b:00.0");
        for arguments in ["link wire0 name tun8 type macvlan", "name va type veth peer name vb"] {
            support::run("ip", &format!("link add {arguments}"));
        }
        let inventory = tree.scan();
        let lower = |name: &str| inventory.nic(name).unwrap().lower.clone();
        assert_eq!(lower("tun8"), [inventory.nic("wire0").unwrap().id.ifindex]);
        assert!(["wire0", "va", "vb"].iter().all(|name| lower(name).is_empty()));
    });
}

#[test]
fn a_representor_leads_to_the_uplink_of_its_function() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        for (name, port, switch, function) in [
            ("up0", "p0", "a1b2", "0"),
            ("up1", "p1", "a1b2", "1"),
            ("other", "p0", "ffff", "2"),
            ("vrep", "pf0vf3", "a1b2", "0"),
            ("srep", "c1pf1sf88", "a1b2", "1"),
            ("prep", "p0pf1vf2", "a1b2", "1"),
        ] {
            tree.nic(name, &format!("pci0000:80/0000:81:00.{function}"));
            tree.attribute(name, "phys_port_name", &format!("{port}\n"));
            tree.attribute(name, "phys_switch_id", &format!("{switch}\n"));
        }
        tree.msi("pci0000:80/0000:81:00.0", &[70]);
        tree.msi("pci0000:80/0000:81:00.1", &[71]);
        let inventory = tree.scan();
        assert_eq!(tree.irqs(), owned([("up0", &[70]), ("up1", &[71])]));
        for (representor, uplink) in [("vrep", "up0"), ("srep", "up1"), ("prep", "up1")] {
            let said = intent(&[(representor, RT)], Vec::new());
            assert_eq!(used(&inventory, &said, uplink), NicUse::Configured(RT), "{representor}");
        }
        assert_eq!(used(&inventory, &intent(&[("vrep", RT)], Vec::new()), "up1"), NicUse::Derived(Class::Bulk));
    });
}

/// Not every driver gives its representors a device, and port and function need not have the same number.
#[test]
fn a_representor_without_a_device_passes_its_class_to_its_switchs_uplink() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        tree.nic("wire0", "pci0000:c0/0000:c1:00.0");
        tree.nic("wire1", "pci0000:c0/0000:c1:00.1");
        for name in ["r0", "r1", "lost"] {
            support::run("ip", &format!("link add {name} type ifb"));
        }
        for (name, port, switch) in [
            ("wire0", "p0", "0badcafe"),
            ("wire1", "p3", "d00d"),
            ("r0", "pf0vf7", "0badcafe"),
            ("r1", "pf1vf2", "d00d"),
            ("lost", "pf0vf1", "beef"),
        ] {
            tree.attribute(name, "phys_port_name", &format!("{port}\n"));
            tree.attribute(name, "phys_switch_id", &format!("{switch}\n"));
        }
        let inventory = tree.scan();
        for (representor, uplink, other) in [("r0", "wire0", "wire1"), ("r1", "wire1", "wire0")] {
            let said = intent(&[(representor, RT)], Vec::new());
            assert_eq!(used(&inventory, &said, uplink), NicUse::Configured(RT), "{representor}");
            assert_eq!(used(&inventory, &said, other), NicUse::Derived(Class::Bulk), "{representor}");
            let nic = inventory.nic(representor).unwrap();
            assert!(nic.carried && !nic.physical && !nic.passes_on(), "{representor}");
        }
        assert!(inventory.nic("lost").unwrap().lower.is_empty());
    });
}

#[test]
fn a_nic_on_either_bus_of_a_usb_controller_has_the_controllers_interrupt() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        // A USB 3 controller has two buses, and names its interrupt after the first.
        for (name, controller, bus, others) in
            [("fast", "xhci-hcd.2.auto", 4, 3), ("slow", "xhci-hcd.5.auto", 7, 8), ("alone", "fe980000.usb", 1, 1)]
        {
            let controller = format!("platform/soc/{controller}");
            tree.nic(name, &format!("{controller}/usb{bus}/{bus}-1/{bus}-1:1.0"));
            fs::create_dir_all(tree.dir.path().join(format!("sys/devices/{controller}/usb{others}"))).unwrap();
        }
        for (irq, handler) in
            [(40, "xhci-hcd:usb3"), (41, "xhci-hcd:usb7"), (42, "dwc2_hsotg:usb1"), (43, "xhci-hcd:usb9")]
        {
            tree.irq(irq, handler);
        }
        assert_eq!(tree.irqs(), owned([("alone", &[42]), ("fast", &[40]), ("slow", &[41])]));
    });
}

/// A NIC that is called like another NIC's bus: on another controller, which has only a line, or on the same.
#[test]
fn a_nic_that_is_called_like_a_usb_bus_has_its_own_controllers_interrupt() {
    for order in [["usb7", "lan9"], ["lan9", "usb7"]] {
        support::in_namespace(|_| {
            let tree = Tree::new();
            for name in order {
                let device = if name == "usb7" { "1a.0/usb9/9-1/9-1:1.0" } else { "14.0/usb7/7-2/7-2:1.0" };
                tree.nic(name, &format!("pci0000:00/0000:00:{device}"));
            }
            for function in ["1a.0", "14.0"] {
                tree.on_bus("pci", &format!("pci0000:00/0000:00:{function}"));
            }
            tree.put("sys/devices/pci0000:00/0000:00:1a.0/irq", "18\n");
            tree.msi("pci0000:00/0000:00:14.0", &[44]);
            tree.irq(18, "ehci_hcd:usb9");
            tree.irq(44, "xhci-hcd:usb7");
            let wanted = owned([("lan9", &[44]), ("usb7", &[18])]);
            assert_eq!(tree.irqs(), wanted, "down: the line by its handler's name");
            order.iter().for_each(|name| support::run("ip", &format!("link set {name} up")));
            assert_eq!(tree.irqs(), wanted);
        });
        support::in_namespace(|_| {
            let tree = Tree::new();
            for name in order {
                let device = if name == "usb7" { "usb8/8-1/8-1:1.0" } else { "usb7/7-1/7-1:1.0" };
                tree.nic(name, &format!("pci0000:00/0000:00:15.0/{device}"));
            }
            tree.msi("pci0000:00/0000:00:15.0", &[46]);
            tree.irq(46, "xhci-hcd:usb7");
            assert_eq!(tree.irqs(), owned([("lan9", &[46]), ("usb7", &[46])]));
        });
    }
}

#[test]
fn handlers_that_are_called_after_a_driver_or_a_portal_are_the_nics_of_that_driver() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        for (name, device, driver) in [
            ("spi-nic", "platform/soc/fe204000.spi/spi_master/spi0/spi0.1", "enc28j60"),
            ("mc0", "platform/soc/80c000000.fsl-mc/dprc.1/dpni.0", "fsl_dpaa2_eth"),
            ("mc1", "platform/soc/80c000000.fsl-mc/dprc.1/dpni.1", "fsl_dpaa2_eth"),
            ("fm1", "platform/ffe000000.soc/dpaa-ethernet.2", "fsl_dpa"),
            ("pci", "pci0000:00/0000:09:00.0", "8139too"),
        ] {
            tree.nic(name, device);
            tree.driver(device, driver);
        }
        tree.msi("pci0000:00/0000:09:00.0", &[60]);
        for (irq, handler) in [
            (50, "enc28j60"),
            (51, "dpio.3"),
            (52, "dpio.4"),
            (53, "dpni.1"),
            (54, "QMan portal 0"),
            (55, "BMan portal 0"),
            (60, "pci"),
            // The driver's name counts only for a NIC without any interrupt.
            (61, "8139too"),
        ] {
            tree.irq(irq, handler);
        }
        let wanted =
            [("fm1", &[54][..]), ("mc0", &[51, 52]), ("mc1", &[51, 52, 53]), ("pci", &[60]), ("spi-nic", &[50])];
        assert_eq!(tree.irqs(), owned(wanted));
    });
}

/// Handlers with the names that drivers use, on the buses of their NICs: clouds' NICs, ports of one function, SoCs,
/// USB, SDIO, Thunderbolt, Xen's front end. Some interfaces were renamed later.
#[test]
fn interrupts_of_many_drivers_are_their_nics() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        let (pci, soc) = ("pci0000:00", "platform/soc@0");
        let hub = format!("{pci}/0000:00:14.0/usb2/2-1/2-1.3/2-1.3:1.0");
        let tunnel = format!("{pci}/0000:00:0d.2/domain0/0-0/0-1/0-1.0");
        let sdio = format!("{soc}/fe300000.mmcnr/mmc_host/mmc1/mmc1:0001/mmc1:0001:1");
        for (name, device) in [
            ("ens5", format!("{pci}/0000:00:05.0")),
            ("ens4", format!("{pci}/0000:00:04.0")),
            ("pf0", format!("{pci}/0000:00:01.0/0000:18:00.0")),
            ("bcm1", format!("{pci}/0000:00:01.0/0000:19:00.1")),
            ("ib0", format!("{pci}/0000:00:01.0/0000:1a:00.0")),
            ("ib1", format!("{pci}/0000:00:01.0/0000:1a:00.0")),
            ("eth0", "vif-0".to_owned()),
            ("eth1", "vif-1".to_owned()),
            ("end0", format!("{soc}/fd580000.ethernet")),
            ("end1", format!("{soc}/bus@100000/8000000.ethernet")),
            ("enu1", hub),
            ("enu2", format!("{pci}/0000:00:14.0/usb3/3-4/3-4:1.0")),
            ("wlan0", sdio),
            ("tb0", tunnel),
            ("lan", format!("{soc}/f1070000.ethernet")),
        ] {
            tree.nic(name, &device);
        }
        tree.driver("platform/soc@0/f1070000.ethernet", "mvneta");
        for (device, irqs) in [
            ("0000:00:05.0", &[30, 31][..]),
            ("0000:00:04.0", &[32, 33]),
            ("0000:00:01.0/0000:18:00.0", &[34, 35]),
            ("0000:00:01.0/0000:19:00.1", &[36]),
            ("0000:00:01.0/0000:1a:00.0", &[37, 38]),
            ("0000:00:14.0", &[39]),
            ("0000:00:0d.2", &[40, 41]),
        ] {
            tree.msi(&format!("{pci}/{device}"), irqs);
        }
        for (irq, handler) in [
            (30, "ena-mgmnt@pci:0000:00:05.0"),
            (31, "eth0-Tx-Rx-0"),
            (32, "gve-mgmnt@pci:0000:00:04.0"),
            (33, "gve-ntfy-blk0@pci:0000:00:04.0"),
            (34, "ice-eth1-TxRx-0"),
            (35, "ice-0000:18:00.0:misc"),
            (36, "end0-TxRx-0"),
            (37, "mlx4-async@pci:0000:1a:00.0"),
            (38, "mlx4-ib-1-0@PCI Bus 0000:1a"),
            (39, "xhci_hcd"),
            (40, "thunderbolt"),
            (41, "thunderbolt"),
            (50, "eth0-q0-tx"),
            (51, "eth0-q0-rx"),
            (52, "eth1-q0-rx"),
            (53, "fd580000.ethernet"),
            (54, "8000000.ethernet-rx0"),
            (55, "8000000.ethernet-tx0"),
            (56, "mmc1"),
            (57, "mvneta"),
            (58, "mmc0"),
        ] {
            tree.irq(irq, handler);
        }
        let wanted = owned([
            ("ens5", &[30, 31]),
            ("ens4", &[32, 33]),
            ("pf0", &[34, 35]),
            ("bcm1", &[36]),
            ("ib0", &[37, 38]),
            ("ib1", &[37, 38]),
            ("eth0", &[50, 51]),
            ("eth1", &[52]),
            ("end0", &[53]),
            ("end1", &[54, 55]),
            ("enu1", &[39]),
            ("enu2", &[39]),
            ("wlan0", &[56]),
            ("tb0", &[40, 41]),
            ("lan", &[57]),
        ]);
        assert_eq!(tree.irqs(), wanted);
    });
}

#[test]
fn an_interface_that_is_called_like_a_word_of_a_description_does_not_get_its_interrupt() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        for name in ["wan", "power", "usb6", "cell", "board"] {
            tree.nic(name, &format!("platform/soc/mac-of-{name}"));
        }
        for (irq, handler) in [
            (40, "wan"),
            (41, "sdhci:wan-detect"),
            (42, "power key"),
            (43, "xhci-hcd:usb6"),
            (44, "usb6-rx-0"),
            (45, "modem-cell:tx-1"),
            (46, "carrier board"),
        ] {
            tree.irq(irq, handler);
        }
        assert_eq!(tree.irqs(), owned([("cell", &[45]), ("usb6", &[44]), ("wan", &[40])]));
    });
}

/// Names that administrators give: words of which lines of other platform devices are described, too.
#[test]
fn a_nic_that_is_called_like_a_word_of_another_line_has_its_own_interrupts_only() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        for name in ["modem", "uplink", "press4", "charger", "hall", "silent"] {
            tree.nic(name, &format!("platform/soc/mac-of-{name}"));
            support::run("ip", &format!("link set {name} up"));
        }
        tree.driver_of("hall", "fs-enet");
        for (irq, handler) in [
            (40, "modem:rx0"),
            (41, "modem-wakeup"),
            (42, "uplink"),
            (43, "sfp-uplink"),
            (44, "uplink_los"),
            (45, "press4-TxRx-1"),
            (46, "press4-pump"),
            (47, "charger_g0_tx"),
            (48, "axp20x_charger"),
            (49, "charger-vbus-removal"),
            (50, "fs_enet-mac@hall"),
            (51, "fs-enet-hall"),
            (52, "pca953x-hall"),
            (53, "silent-alarm"),
            (54, "board-silent"),
        ] {
            tree.irq(irq, handler);
        }
        let wanted =
            [("charger", &[47][..]), ("hall", &[50, 51]), ("modem", &[40]), ("press4", &[45]), ("uplink", &[42])];
        assert_eq!(tree.irqs(), owned(wanted));
        // The NIC of which no interrupt is known is reported, and no line is taken for another device's meanwhile.
        let mut inventory = tree.scan();
        for irq in [41, 53, 54] {
            let id = ThreadId { pid: irq, tid: irq, start_time: 1 };
            let kind = KernelThreadKind::Irq(u32::try_from(irq).unwrap());
            inventory.threads.push(KernelThread { id, kind, comm: format!("irq/{irq}-x"), policy: Policy::Fifo(50) });
        }
        let found = plan(&inventory, &intent(&[("silent", RT)], Vec::new()));
        assert!(found.settings.iter().all(|setting| setting.rule != RuleId::DeviceIrq), "{:?}", found.settings);
        let told = |rule| found.findings.iter().find(|finding| finding.rule == rule).unwrap();
        assert_eq!(told(RuleId::IrqThread).object, "silent");
        assert!(told(RuleId::DeviceIrq).found.contains("may be that of silent"), "{:?}", found.findings);
    });
}

/// A NIC's own interrupts, and those of the devices above it.
#[test]
fn what_a_device_above_has_does_not_hide_the_nics_own_interrupts() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        // On a demultiplexing PCI function and below a bridge, both with vectors of their own.
        let function = "pci0001:00/0001:00:00.0/0001:01:00.0";
        tree.nic("end4", &format!("{function}/40100000.ethernet"));
        tree.msi("pci0001:00/0001:00:00.0", &[30]);
        tree.msi(function, &[31, 32]);
        tree.irq(30, "PCIe PME");
        tree.irq(31, "mfd-demux");
        tree.irq(130, "end4");
        // A function whose vectors have no handler, and a NIC that has no evidence at all. The bridge above is none.
        let silent = "pci0003:00/0003:00:00.0/0003:01:00.0";
        tree.msi("pci0003:00/0003:00:00.0", &[33]);
        tree.msi(silent, &[34]);
        tree.irq(33, "pciehp");
        tree.nic("mute0", &format!("{silent}/switch.3"));
        // The vectors' handlers are the NIC's where it has no others.
        let only = "pci0004:00/0004:01:00.0";
        tree.msi(only, &[35]);
        tree.irq(35, "net-events");
        tree.nic("part0", &format!("{only}/bnge.part.2"));
        assert_eq!(tree.irqs(), owned([("end4", &[130]), ("part0", &[35])]));
    });
}

/// On SPI and SDIO each packet needs the controller, and the NIC has an interrupt besides.
#[test]
fn a_nic_behind_a_bus_has_its_own_interrupt_and_the_controllers() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        let spi = |controller: &str, bus: u32| format!("platform/soc/{controller}/spi_master/spi{bus}/spi{bus}.0");
        for (name, device, driver) in [
            ("w5500", spi("7e204000.spi", 0), "w5100"),
            ("t1l", spi("pxa2xx-spi.7", 1), "adin1110"),
            ("wlan3", "platform/soc/7e300000.mmc/mmc_host/mmc2/mmc2:0001/mmc2:0001:2".to_owned(), "brcmfmac"),
            ("lone", spi("nameless-spi", 2), "mcp_eth"),
        ] {
            tree.nic(name, &device);
            tree.driver(&device, driver);
        }
        for (irq, handler) in [
            (60, "7e204000.spi"),
            (61, "w5500"),
            (62, "pxa2xx-spi.7"),
            (63, "adin1110"),
            (64, "mmc2"),
            (65, "wlan3-oob"),
            (66, "mcp_eth"),
            // Another bus of each kind.
            (67, "7e204600.spi"),
            (68, "mmc0"),
        ] {
            tree.irq(irq, handler);
        }
        let wanted = [("lone", &[66][..]), ("t1l", &[62, 63]), ("w5500", &[60, 61]), ("wlan3", &[64, 65])];
        assert_eq!(tree.irqs(), owned(wanted));
    });
}

/// phylib names a PHY's interrupt after the MDIO bus, which many drivers call like the NIC's device.
#[test]
fn a_phys_interrupt_comes_on_top_of_the_nics_and_never_instead() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        for (name, device) in [
            ("end6", "platform/ahb/e000b000.ethernet"),
            ("tsn0", "platform/soc/e6540000.ethernet"),
            ("fec3", "platform/soc/5b040000.ethernet"),
            ("quiet", "platform/soc/ff0e0000.ethernet"),
        ] {
            tree.nic(name, device);
        }
        for (irq, handler) in [
            (40, "end6"),
            (41, "e000b000.ethernet-ffffffff:07"),
            (42, "tsn0:ch4:rx_be"),
            (43, "tsn0:ch20:emac"),
            (44, "e6540000.ethernet-mii:0a"),
            (45, "5b040000.ethernet"),
            (46, "5b040000.ethernet-1:00"),
            // The driver of this NIC's own interrupts names them after something else.
            (47, "ff0e0000.ethernet-ffffffff:0c"),
            (48, "queue-pair-3"),
        ] {
            tree.irq(irq, handler);
        }
        for device in ["e000b000", "e6540000", "5b040000", "ff0e0000"] {
            tree.put(&format!("sys/bus/platform/devices/{device}.ethernet/of_node/name"), "ethernet\0");
        }
        let wanted = owned([("end6", &[40, 41]), ("fec3", &[45, 46]), ("tsn0", &[42, 43, 44])]);
        assert_eq!(tree.irqs(), wanted);
        // The NIC of which only a PHY is known is reported, and nothing that may be its own is moved.
        support::run("ip", "link set quiet up");
        let mut inventory = tree.scan();
        for irq in [47, 48] {
            let id = ThreadId { pid: irq, tid: irq, start_time: 1 };
            let kind = KernelThreadKind::Irq(u32::try_from(irq).unwrap());
            inventory.threads.push(KernelThread { id, kind, comm: format!("irq/{irq}-x"), policy: Policy::Fifo(50) });
        }
        let found = plan(&inventory, &intent(&[("quiet", RT)], Vec::new()));
        assert!(found.settings.iter().all(|setting| setting.rule != RuleId::DeviceIrq), "{:?}", found.settings);
        let told = |rule| found.findings.iter().find(|finding| finding.rule == rule).unwrap();
        assert_eq!(told(RuleId::IrqThread).object, "quiet");
        assert!(told(RuleId::DeviceIrq).found.contains("may be that of quiet"), "{:?}", found.findings);
    });
}

/// Names that need more than the device's or the interface's name as it is.
#[test]
fn handlers_with_a_part_of_the_devices_name_or_a_channels_number_are_found() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        for (name, device, driver) in [
            ("enX0", "vif-0", "vif"),
            ("enX11", "vif-11", "vif"),
            ("env2", "vio/71000002", "ibmvnic"),
            ("env6", "vio/71000006", "ibmvnic"),
            ("pru0", "platform/icssg0-eth", "icssg-prueth"),
            ("pru1", "platform/icssg0-eth", "icssg-prueth"),
            ("fm1-mac9", "platform/soc/1a00000.fman/1af0000.ethernet", "fsl_dpaa_mac"),
        ] {
            tree.nic(name, device);
            tree.driver_of(name, driver);
        }
        for (irq, handler) in [
            (20, "vif0-q1-rx"),
            (21, "vif11-q0-tx"),
            (22, "vif11-q0-rx"),
            (23, "vif1-q0-rx"),
            (30, "ibmvnic-71000002-tx1"),
            (31, "ibmvnic-71000006-rx0"),
            // A third one, whose interface is not here.
            (32, "ibmvnic-71000007-rx0"),
            (40, "icssg0-eth"),
            (41, "tx0-3"),
            (42, "tx1-3"),
            (43, "tx-3"),
            (44, "txx-y"),
            (50, "QMan portal 2"),
            (51, "BMan portal 2"),
        ] {
            tree.irq(irq, handler);
        }
        let wanted = owned([
            ("enX0", &[20][..]),
            ("enX11", &[21, 22]),
            ("env2", &[30]),
            ("env6", &[31]),
            ("pru0", &[40, 41, 42]),
            ("pru1", &[40, 41, 42]),
            ("fm1-mac9", &[50]),
        ]);
        assert_eq!(tree.irqs(), wanted);
    });
}

#[test]
fn a_functions_line_is_its_nics_only_while_that_is_up() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        let function = |name: &str, line: u32, class: &str, driver: &str| {
            let device = format!("pci0000:00/{name}");
            tree.put(&format!("sys/devices/{device}/irq"), &line.to_string());
            tree.put(&format!("sys/devices/{device}/class"), class);
            tree.driver(&device, driver);
            let bus = tree.dir.path().join("sys/bus/pci/devices");
            fs::create_dir_all(&bus).unwrap();
            symlink(tree.dir.path().join("sys/devices").join(&device), bus.join(name)).unwrap();
            device
        };
        for (name, line, driver) in [("old0", 21, "sis900"), ("old1", 22, "via_rhine"), ("old2", 23, "dl2k")] {
            tree.nic(name, &function(&format!("0000:0{line}:00.0"), line, "0x020000", driver));
        }
        function("0000:00:1f.4", 22, "0x0c0500", "piix4_smbus");
        tree.irq(21, "old0");
        tree.irq(22, "piix4-smbus");
        tree.irq(23, "dl2k,ohci_hcd:usb4");
        let flags = |flags: &str| {
            for (name, device) in [("old0", "0000:021:00.0"), ("old1", "0000:022:00.0"), ("old2", "0000:023:00.0")] {
                tree.put(&format!("sys/devices/pci0000:00/{device}/net/{name}/flags"), flags);
            }
        };
        flags("0x1002\n");
        assert_eq!(tree.irqs(), owned([("old0", &[21]), ("old2", &[23])]), "down: by the handlers' names");
        ["old0", "old1", "old2"].iter().for_each(|name| support::run("ip", &format!("link set {name} up")));
        flags("0x1003\n");
        assert_eq!(tree.irqs(), owned([("old0", &[21]), ("old2", &[23])]), "the second line is the bus controller's");
        assert!(tree.scan().irqs.iter().all(|irq| irq.network == (irq.id.irq != 22)));
        tree.irq(22, "old1,piix4-smbus");
        assert_eq!(tree.irqs()["old1"], [22]);
    });
}

/// The device tree tells which of an SoC's interrupts are those of a NIC whose interface is in a container.
#[test]
fn interrupts_of_a_platform_nic_elsewhere_are_networks_by_the_device_tree() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        let device = "sys/bus/platform/devices/20000000.ethernet";
        tree.put(&format!("{device}/of_node/name"), "ethernet\0");
        symlink("/sys/bus/platform/drivers/any", tree.dir.path().join(device).join("driver")).unwrap();
        let cells: Vec<u8> = [0_u32, 11, 4, 0, 12, 1].iter().flat_map(|cell| cell.to_be_bytes()).collect();
        fs::write(tree.dir.path().join(device).join("of_node/interrupts"), cells).unwrap();
        for (irq, number, handler) in [(50, 43, "emac-core0"), (51, 44, "gmac-ptp"), (52, 45, "lan4"), (53, 11, "rtc")]
        {
            tree.irq(irq, handler);
            tree.put(&format!("sys/kernel/irq/{irq}/chip_name"), "GICv3\n");
            tree.put(&format!("sys/kernel/irq/{irq}/hwirq"), &format!("{number}\n"));
        }
        let found = tree.scan().irqs.into_iter().filter(|irq| irq.network);
        let found: Vec<(u32, Option<String>)> = found.map(|irq| (irq.id.irq, irq.device)).collect();
        let its = Some("20000000.ethernet".to_owned());
        assert_eq!(found, [(50, its.clone()), (51, its)], "with these known, `lan4` need not be its");
    });
}

/// Pods' NICs behind USB (by MSI and by a line), SPI, SDIO and NXP's portals, on Broadcom's buses, and on the platform
/// by ACPI and by a node of another name than `ethernet`.
#[test]
fn interrupts_of_a_nic_elsewhere_are_networks_on_every_bus() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        for (bus, device, driver) in [
            ("usb", "pci0000:00/0000:00:14.0/usb1/1-6/1-6:1.0", "r8152"),
            ("usb", "pci0000:00/0000:00:1d.0/usb3/3-1/3-1:2.0", "asix"),
            ("spi", "platform/soc/fe204000.spi/spi_master/spi0/spi0.2", "ksz8851"),
            ("sdio", "platform/soc/fe340000.mmc/mmc_host/mmc3/mmc3:0001/mmc3:0001:1", "mwifiex_sdio"),
            ("fsl-mc", "platform/soc/80c000000.fsl-mc/dprc.1/dpni.4", "fsl_dpaa2_eth"),
            ("bcma", "platform/18000000.axi/bcma0:3", "b43"),
            ("ssb", "ssb0:1", "b43legacy"),
            ("platform", "platform/ETHX0D05:00", "acpi-mac"),
            ("platform", "platform/soc/ff360000.gmac", "rk_gmac-dwmac"),
        ] {
            tree.nic_elsewhere(bus, device, driver);
        }
        tree.on_bus("platform", "platform/SERX0001:00");
        let node = "sys/devices/platform/soc/ff360000.gmac/of_node";
        tree.put(&format!("{node}/name"), "gmac\0");
        let cells: Vec<u8> = [0_u32, 21, 4].iter().flat_map(|cell| cell.to_be_bytes()).collect();
        fs::write(tree.dir.path().join(node).join("interrupts"), cells).unwrap();
        for (function, class, driver) in
            [("14.0", "0x0c0330", "xhci_hcd"), ("15.0", "0x0c0330", "xhci_hcd"), ("1d.0", "0x0c0320", "ehci-pci")]
        {
            let device = format!("pci0000:00/0000:00:{function}");
            tree.on_bus("pci", &device);
            tree.driver(&device, driver);
            tree.put(&format!("sys/devices/{device}/class"), class);
        }
        tree.msi("pci0000:00/0000:00:14.0", &[70]);
        tree.msi("pci0000:00/0000:00:15.0", &[71]);
        tree.put("sys/devices/pci0000:00/0000:00:1d.0/irq", "23\n");
        for (irq, handler) in [
            (23, "i801_smbus,ehci_hcd:usb3"),
            (70, "xhci_hcd"),
            (71, "xhci_hcd"),
            (80, "fe204000.spi"),
            (81, "ksz8851"),
            (82, "fe204600.spi"),
            (83, "mmc3"),
            (84, "mmc0"),
            (85, "dpio.6"),
            (86, "dpni.4"),
            (87, "ETHX0D05:00"),
            (88, "SERX0001:00"),
            (89, "thermal"),
            (90, "b43"),
            (91, "b43legacy"),
        ] {
            tree.irq(irq, handler);
        }
        tree.put("sys/kernel/irq/89/chip_name", "GICv3\n");
        tree.put("sys/kernel/irq/89/hwirq", "53\n");
        let networks = |inventory: &Inventory| -> Vec<(u32, String)> {
            let networks = inventory.irqs.iter().filter(|irq| irq.network);
            networks.map(|irq| (irq.id.irq, irq.device.clone().unwrap_or_default())).collect()
        };
        let wanted = [
            (23, "3-1:2.0"),
            (70, "1-6:1.0"),
            (80, "spi0.2"),
            (81, "spi0.2"),
            (83, "mmc3:0001:1"),
            (85, "dpni.4"),
            (86, "dpni.4"),
            (87, "ETHX0D05:00"),
            (89, "ff360000.gmac"),
            (90, "bcma0:3"),
            (91, "ssb0:1"),
        ]
        .map(|(irq, device)| (irq, device.to_owned()));
        let mut inventory = tree.scan();
        assert_eq!(networks(&inventory), wanted);
        // Their threads stay, and are told; those of other devices go below every RT thread.
        for irq in inventory.irqs.iter().map(|irq| irq.id.irq).collect::<Vec<_>>() {
            let number = i32::try_from(irq).unwrap();
            let id = ThreadId { pid: number, tid: number, start_time: 1 };
            let (kind, comm) = (KernelThreadKind::Irq(irq), format!("irq/{irq}-x"));
            inventory.threads.push(KernelThread { id, kind, comm, policy: Policy::Fifo(50) });
        }
        let found = plan(&inventory, &intent(&[], Vec::new()));
        let moved: Vec<String> = fleet::policies(&found).into_keys().collect();
        assert_eq!(moved, ["irq/71-x", "irq/82-x", "irq/84-x", "irq/88-x"]);
        let told: Vec<&str> = found.findings.iter().map(|finding| finding.found.as_str()).collect();
        for (irq, device) in &wanted {
            let words = format!("thread {irq} is of network controller {device}, which has no interface");
            assert!(told.iter().any(|one| one.starts_with(&words)), "{words}: {told:?}");
        }
        // An interface here behind the same controller has the controller's interrupt, which serves the pod's as well:
        // as long as no interface here is RT, its thread stays.
        let desk = "pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0";
        tree.nic("desk", desk);
        tree.nic_elsewhere("usb", desk, "cdc_ncm");
        tree.put(&format!("sys/devices/{desk}/net/desk/flags"), "0x1002\n");
        assert_eq!(tree.irqs(), owned([("desk", &[70])]));
        let mut shared = Inventory { threads: inventory.threads.clone(), ..tree.scan() };
        assert_eq!(networks(&shared).len(), wanted.len() - 1);
        let found = plan(&shared, &intent(&[], Vec::new()));
        assert!(!fleet::policies(&found).contains_key("irq/70-x"), "{:?}", fleet::policies(&found));
        let said = found.findings.iter().find(|finding| finding.object == "irq/70-x").unwrap();
        let words = "thread 70 is of desk (bulk) and of network controller 1-6:1.0, which has no interface";
        assert!(said.rule == RuleId::IrqThread && said.severity == Severity::Info, "{said:?}");
        assert!(said.found.starts_with(words) && said.found.ends_with("stays at FIFO 50"), "{said:?}");
        let found = plan(&shared, &intent(&[("desk", RT)], Vec::new()));
        assert_eq!(fleet::policies(&found).get("irq/70-x"), Some(&Policy::Fifo(50)));
        assert!(!found.findings.iter().any(|finding| finding.object == "irq/70-x"), "{:?}", found.findings);
        // An RT tenant's vCPUs wait for it, unless it is below them.
        let vm = fleet::vm(&mut shared, 1, RT, 1, "");
        let rt = intent(&[], vec![vm]);
        for (priority, severity, end) in [
            (50, Severity::Warning, "stays at FIFO 50, where RT threads wait for it"),
            (1, Severity::Info, "stays at FIFO 1"),
        ] {
            let its = |thread: &&mut KernelThread| thread.comm == "irq/70-x";
            shared.threads.iter_mut().filter(its).for_each(|thread| thread.policy = Policy::Fifo(priority));
            let found = plan(&shared, &rt);
            assert!(!fleet::policies(&found).contains_key("irq/70-x"), "{:?}", fleet::policies(&found));
            let said = found.findings.iter().find(|finding| finding.object == "irq/70-x").unwrap();
            assert!(said.severity == severity && said.found.ends_with(end), "{said:?}");
        }
    });
}

/// A switch of the platform: its ports here are carried by the conduit, and its own interrupt tells of links.
#[test]
fn a_switchs_interrupt_is_a_networks_only_while_its_ports_are_elsewhere() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        tree.nic("conduit", "platform/soc/17000000.ethernet");
        tree.irq(40, "17000000.ethernet");
        let switch = "platform/soc/17020000.switch";
        tree.nic_elsewhere("platform", switch, "gsw-mmio");
        tree.nic("port3", switch);
        let index = tree.scan().nic("conduit").unwrap().id.ifindex;
        tree.attribute("port3", "iflink", &format!("{index}\n"));
        let cells: Vec<u8> = [0_u32, 151, 4].iter().flat_map(|cell| cell.to_be_bytes()).collect();
        let node = tree.dir.path().join("sys/devices").join(switch).join("of_node");
        fs::create_dir_all(&node).unwrap();
        fs::write(node.join("interrupts"), cells).unwrap();
        tree.irq(41, "gsw-mmio");
        tree.put("sys/kernel/irq/41/chip_name", "GICv3\n");
        tree.put("sys/kernel/irq/41/hwirq", "183\n");
        let planned = || {
            let mut inventory = tree.scan();
            let id = ThreadId { pid: 41, tid: 41, start_time: 1 };
            let (kind, comm) = (KernelThreadKind::Irq(41), "irq/41-gsw-mmio".to_owned());
            inventory.threads.push(KernelThread { id, kind, comm, policy: Policy::Fifo(50) });
            let found = plan(&inventory, &intent(&[], Vec::new()));
            let said = found.findings.iter().find(|finding| finding.object == "irq/41-gsw-mmio");
            (fleet::policies(&found).get("irq/41-gsw-mmio").copied(), said.map(|finding| finding.found.clone()))
        };
        let (place, said) = planned();
        assert!(place.is_none() && said.unwrap().contains("network controller 17020000.switch, which has no"));
        tree.put(&format!("sys/devices/{switch}/net/port3/flags"), "0x1003\n");
        assert_eq!(planned(), (Some(Policy::BULK_DRIVER), None));
        assert_eq!(tree.irqs(), owned([("conduit", &[40])]));
    });
}

/// A platform NIC without the node name `ethernet`, of whose interrupts nothing is known.
#[test]
fn while_an_acpi_nics_interface_is_elsewhere_handlers_like_interfaces_stay() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        tree.irq(60, "lan2:tx");
        tree.irq(61, "ttyAMA1");
        let kept = || tree.scan().irqs.into_iter().filter(|irq| irq.network).map(|irq| irq.id.irq).collect::<Vec<_>>();
        assert!(kept().is_empty());
        tree.nic_elsewhere("platform", "platform/NIXX8001:00", "acpi-mac");
        assert_eq!(kept(), [60]);
        // Its handler has the device's name; then its interface is here.
        tree.irq(62, "NIXX8001:00");
        assert_eq!(kept(), [62]);
        tree.irq(62, "rtc");
        tree.put("sys/devices/platform/NIXX8001:00/net/plant/flags", "0x1003\n");
        assert!(kept().is_empty());
    });
}

/// A handler has the name that the interface had when it was brought up, and the interface is in a container.
#[test]
fn while_a_platform_nics_interface_is_elsewhere_handlers_like_interfaces_stay() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        let device = "sys/bus/platform/devices/ff540000.ethernet";
        tree.put(&format!("{device}/of_node/name"), "ethernet\0");
        let handlers = [
            "eth3", "end1-rx", "enP2p1s0", "lan2:tx", "mmc1", "ttyS2", "ethosu", "energy", "sdhci4", "enable-1",
            "enxerr",
        ]
        .map(str::to_owned);
        (60..).zip(&handlers).for_each(|(irq, handler)| tree.irq(irq, handler));
        let kept = || {
            let irqs = tree.scan().irqs.into_iter().filter(|irq| irq.network);
            irqs.map(|irq| irq.actions.concat()).collect::<Vec<_>>()
        };
        assert_eq!(kept(), handlers[..3], "without a driver it has no handler, and these are of no other device");
        symlink("/sys/bus/platform/drivers/any", tree.dir.path().join(device).join("driver")).unwrap();
        assert_eq!(kept(), handlers[..4]);
        // Its handlers have the device's name, beside a PHY's that does not count.
        tree.irq(80, "ff540000.ethernet-0:03");
        assert_eq!(kept(), handlers[..4]);
        tree.irq(81, "ff540000.ethernet");
        assert_eq!(kept(), ["eth3", "end1-rx", "enP2p1s0", "ff540000.ethernet"]);
        fs::remove_dir_all(tree.dir.path().join("sys/kernel/irq/81")).unwrap();
        // The kernel keeps the folder of an interface that is in another namespace.
        fs::create_dir_all(tree.dir.path().join(device).join("net")).unwrap();
        assert_eq!(kept(), handlers[..4]);
        // Its interface is here.
        fs::create_dir_all(tree.dir.path().join(device).join("net/plant")).unwrap();
        assert_eq!(kept(), handlers[..3]);
    });
}

/// The files from which doctor has CPUs without a tick, work that comes at intervals, and the node of a NIC.
#[test]
fn sets_of_cpus_sysctls_and_nodes_are_read_as_the_kernel_writes_them() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        tree.put("sys/devices/system/cpu/online", "0-3\n");
        tree.put("sys/devices/system/cpu/possible", "0-7\n");
        let sysctls = [("kernel/nmi_watchdog", "0"), ("kernel/timer_migration", "1"), ("vm/stat_interval", "60")];
        for (name, value) in sysctls {
            tree.put(&format!("proc/sys/{name}"), &format!("{value}\n"));
        }
        for (name, function, node) in [("near", "0", "1"), ("lone", "1", "-1"), ("bare", "2", "")] {
            let device = format!("pci0000:80/0000:81:00.{function}");
            tree.nic(name, &device);
            if !node.is_empty() {
                tree.put(&format!("sys/devices/{device}/numa_node"), &format!("{node}\n"));
            }
        }
        // The kernel writes `(null)` where it was booted without nohz_full, and an empty line for no CPU.
        for (isolated, nohz_full, wanted) in
            [("2-3", "(null)", ["2-3", "", ""]), ("", "1,3", ["", "1,3", "1,3"]), ("1-2", "", ["1-2", "", ""])]
        {
            tree.put("sys/devices/system/cpu/isolated", &format!("{isolated}\n"));
            tree.put("sys/devices/system/cpu/nohz_full", &format!("{nohz_full}\n"));
            let cpus = tree.scan().cpus;
            assert_eq!([cpus.isolated, cpus.nohz_full, cpus.rcu_nocbs].map(|set| set.to_string()), wanted);
        }
        let inventory = tree.scan();
        for (name, value) in sysctls {
            assert_eq!(inventory.sysctls.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(!inventory.sysctls.contains_key("net/core/busy_poll"), "a kernel without it");
        let nodes = ["near", "lone", "bare"].map(|name| inventory.nic(name).unwrap().node);
        assert_eq!(nodes, [Some(1), None, None]);
    });
}

#[test]
fn without_any_description_of_interrupts_an_rt_nic_without_its_own_is_said() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        for name in ["dark0", "hv0", "osa0", "pci0"] {
            tree.nic(name, &format!("platform/{name}-device"));
            support::run("ip", &format!("link set {name} up"));
        }
        tree.driver_of("hv0", "hv_netvsc");
        tree.driver_of("osa0", "qeth");
        tree.msi("platform/pci0-device", &[70]);
        let inventory = tree.scan();
        assert!(inventory.irqs.is_empty());
        let said = || {
            let found = plan(&inventory, &intent(&["dark0", "hv0", "osa0", "pci0"].map(|name| (name, RT)), Vec::new()));
            let irq = found.findings.into_iter().filter(|finding| finding.rule == RuleId::IrqThread);
            irq.filter(|finding| finding.severity == Severity::Warning)
                .map(|finding| finding.object)
                .collect::<Vec<_>>()
        };
        assert_eq!(said(), ["dark0"]);
    });
}

#[test]
fn while_an_rt_nics_interrupt_is_not_known_it_is_said_and_no_thread_is_taken_for_another_devices() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        tree.nic("odd0", "platform/made-up-mac");
        support::run("ip", "link set odd0 up");
        for (irq, handler) in [(70, "mystery"), (71, "ttyS0"), (72, "ahci")] {
            tree.irq(irq, handler);
        }
        let of_disk = "sys/bus/pci/devices/0000:02:00.0";
        tree.put(&format!("{of_disk}/class"), "0x010601");
        tree.put(&format!("{of_disk}/msi_irqs/72"), "msi");
        let mut inventory = tree.scan();
        for irq in [70, 71, 72] {
            let id = ThreadId { pid: irq, tid: irq, start_time: 1 };
            let kind = KernelThreadKind::Irq(u32::try_from(irq).unwrap());
            inventory.threads.push(KernelThread { id, kind, comm: format!("irq/{irq}-x"), policy: Policy::Fifo(50) });
        }
        let placed = |inventory: &Inventory, class| {
            let found = plan(inventory, &intent(&[("odd0", class)], Vec::new()));
            let placed = found.settings.iter().filter(|setting| setting.rule == RuleId::DeviceIrq).count();
            let told = found.findings.iter().filter(|finding| finding.severity == Severity::Warning);
            let told: Vec<String> = told.map(|finding| format!("{}: {}", finding.object, finding.found)).collect();
            (placed, told)
        };
        let (count, told) = placed(&inventory, RT);
        assert_eq!(count, 1, "the disk's: {told:?}");
        assert!(told.iter().any(|one| one.starts_with("odd0: no interrupt is known to be its own")), "{told:?}");
        assert!(told.iter().any(|one| one.contains("may be that of odd0")), "{told:?}");
        let (count, told) = placed(&inventory, Class::Bulk);
        assert!(count == 3 && !told.iter().any(|one| one.contains("odd0")), "{told:?}");
        // Hyper-V's interrupts belong to no device.
        inventory.nics.iter_mut().for_each(|nic| nic.driver = Some("hv_netvsc".to_owned()));
        assert_eq!(placed(&inventory, RT).0, 3);
    });
}

#[test]
fn queues_of_interfaces_that_are_not_here_are_networks() {
    support::in_namespace(|_| {
        let tree = Tree::new();
        tree.nic("here", "pci0000:00/0000:01:00.0");
        tree.msi("pci0000:00/0000:01:00.0", &[80]);
        let queues = ["eth7-TxRx-12", "end3:tx-0", "eno9-rx-1", "vmx5-rxtx-2", "ens8-Tx-Rx-4", "here-tx"];
        let others = ["nvme0q3", "ttyS0-rx", "dma0-tx-1", "i915", "rx-", "mmc0"];
        let handlers = queues.iter().map(|handler| (handler, true)).chain(others.iter().map(|one| (one, false)));
        let all: Vec<(u32, &str, bool)> = (90..).zip(handlers).map(|(irq, (name, is))| (irq, *name, is)).collect();
        all.iter().for_each(|(irq, handler, _)| tree.irq(*irq, handler));
        let seen: Vec<(u32, bool)> = tree.scan().irqs.into_iter().map(|irq| (irq.id.irq, irq.network)).collect();
        assert_eq!(seen, all.iter().map(|(irq, _, is)| (*irq, *is)).collect::<Vec<_>>());
    });
}
