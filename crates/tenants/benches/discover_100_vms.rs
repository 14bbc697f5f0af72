//! `discover` on a host with 100 VMs (half libvirt's, half plain QEMU) with 8 threads and 30 open files each, 200 other
//! processes, 50 of them in containers, and 300 kernel threads.

#![allow(missing_docs)] // criterion's macros make public functions without any

#[path = "../tests/common/mod.rs"]
mod common;

use criterion::{Criterion, criterion_group, criterion_main};
use ontime_tenants::config::Text;
use ontime_tenants::{Rules, discover};

fn host() -> common::Host {
    let host = common::Host::new();
    // All of them have run for days.
    let _ = std::fs::write(host.path("proc/uptime"), "1000000.00 1.00\n");
    for n in 0..100 {
        let (pid, name) = (10_000 + n * 10, format!("vm{n}"));
        if n % 2 == 0 {
            host.vm(pid, &name, "/user.slice/session-1.scope");
            continue;
        }
        host.vm(pid, &name, &format!(r"/machine.slice/machine-qemu\x2d{n}\x2dvm{n}.scope/libvirt/emulator"));
        // About as large as a live status file.
        let devices: String = (0..60)
            .map(|d| {
                format!(
                    "<controller type='pci' index='{d}' model='pcie-root-port'><model name='pcie-root-port'/><target \
                     chassis='{d}' port='0x{d:x}'/><alias name='pci.{d}'/><address type='pci' domain='0x0000' \
                     bus='0x00' slot='0x02' function='0x0' multifunction='on'/></controller>\n"
                )
            })
            .collect();
        let inside = format!(
            "<metadata><o:tenant xmlns:o='https://ontime.dev/xmlns/tenant/1' class='rt'/></metadata>\
             <devices><interface type='bridge'><target dev='tap{pid}'/></interface>{devices}</devices>"
        );
        host.domain(&name, pid, "3f1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33", &inside);
    }
    for n in 0..200 {
        let cgroup = match n % 4 {
            0 => format!("/machine.slice/libpod-{n:064x}.scope/container"),
            _ => format!("/system.slice/service{n}.service"),
        };
        host.process(2000 + n, "/usr/sbin/some-service", &cgroup, 0, &["some-service", "--option"]);
    }
    for n in 0..300 {
        host.kernel_thread(100 + n, &format!("kworker/{n}:0"));
    }
    host
}

fn bench(criterion: &mut Criterion) {
    let host = host();
    let sources = host.sources();
    let text = "[[tenant]]\nname = \"vm1*\"\nclass = \"rt\"\n[[tenant]]\ncgroup = \"/machine.slice/libpod-*\"\nclass \
        = \"bulk\"\n";
    let Ok(rules) = Rules::parse(&[Text::new("tenants.toml", text)]) else { return };
    let found = discover(&sources, &rules);
    assert_eq!(found.tenants.len(), 150, "100 VMs and 50 containers: {:?}", found.problems);
    criterion.bench_function("discover_100_vms", |bencher| bencher.iter(|| discover(&sources, &rules)));
}

criterion_group!(benches, bench);
criterion_main!(benches);
