//! The NUMA nodes of RT tenants' memory.
//!
//! In: the counters of a tenant's cgroup (`memory.numa_stat`, `hugetlb.*.numa_stat`), or else `numa_maps` of its
//! process. Out: bytes by node. The cgroup's counters cost nothing. For `numa_maps` the kernel walks every page while
//! it holds the lock of the process's mappings (`fs/proc/task_mmu.c`), and a vCPU's page faults may wait for that. The
//! file is therefore read only for processes with little memory in small pages.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ontime_tenants::proc::status_value;
use ontime_tenants::{Tenant, ThreadId, limit_waits};

use crate::intent::Intent;
use crate::inventory::Inventory;
use crate::obstacle::file_error;
use crate::roots::Roots;
use crate::roots::read;

/// Bytes by NUMA node.
pub type ByNode = BTreeMap<u32, u64>;

/// Limit of the memory in small pages for reading `numa_maps`, KiB. A walk of this size takes about 10 ms.
const WALKED_MAX_KIB: u64 = 1 << 20;

/// The nodes of each RT tenant's memory, or why they are not known. Empty on a host with one node.
pub fn of_rt_tenants(
    roots: &Roots,
    inventory: &Inventory,
    intent: &Intent,
) -> BTreeMap<ThreadId, Result<ByNode, String>> {
    if inventory.cpus.nodes.len() < 2 {
        return BTreeMap::new();
    }
    intent.rt_tenants().map(|tenant| (tenant.process, of_tenant(roots, tenant))).collect()
}

fn of_tenant(roots: &Roots, tenant: &Tenant) -> Result<ByNode, String> {
    // The path of a cgroup outside this process's cgroup namespace begins with `..`.
    let cgroup = tenant.cgroup.as_deref().filter(|path| !path.split('/').any(|part| part == ".."));
    let by_cgroup = ["fs/cgroup", "fs/cgroup/unified"].iter().find_map(|mount| {
        let directory = roots.sys.join(mount).join(cgroup?.trim_start_matches('/'));
        Some(of_cgroup(&directory)).filter(|found| found.values().any(|bytes| *bytes > 0))
    });
    by_cgroup.map_or_else(|| of_process(&roots.proc.join(tenant.process.pid.to_string())), Ok)
}

/// Memory of the cgroup and its children, without the page cache of files.
fn of_cgroup(directory: &Path) -> ByNode {
    let mut found = ByNode::new();
    let ordinary = read(&directory.join("memory.numa_stat")).unwrap_or_default();
    for line in ordinary.lines().filter(|line| line.starts_with("anon ") || line.starts_with("shmem ")) {
        add(&mut found, line, 1);
    }
    for path in fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("hugetlb.") && name.ends_with(".numa_stat") {
            add(&mut found, &read(&path).unwrap_or_default(), 1);
        }
    }
    found
}

fn of_process(process: &Path) -> Result<ByNode, String> {
    let status = limit_waits(|| fs::read(process.join("status"))).map_err(|error| file_error("status", &error))?;
    let resident = status_value(&status, "VmRSS").and_then(|text| text.split_ascii_whitespace().next()?.parse().ok());
    let resident: u64 = resident.unwrap_or_default();
    if resident > WALKED_MAX_KIB {
        let gib = resident >> 20;
        return Err(format!(
            "it has {gib} GiB in small pages, which the kernel would walk while it holds up page faults, and no \
             memory.numa_stat of its own; give it huge pages, or a cgroup of its own with controller memory"
        ));
    }
    let maps = limit_waits(|| fs::read(process.join("numa_maps"))).map_err(|error| file_error("numa_maps", &error))?;
    let mut found = ByNode::new();
    for line in String::from_utf8_lossy(&maps).lines().filter(|line| is_own(line)) {
        let size = line.split_ascii_whitespace().find_map(|word| word.strip_prefix("kernelpagesize_kB=")?.parse().ok());
        add(&mut found, line, size.unwrap_or(4u64).saturating_mul(1024));
    }
    Ok(found)
}

/// Whether a line of `numa_maps` is for the process's own memory, or for a guest's shared memory, and not for the file
/// of a program or library.
fn is_own(line: &str) -> bool {
    let mut words = line.split_ascii_whitespace();
    let file = words.clone().find_map(|word| word.strip_prefix("file="));
    words.any(|word| word == "huge") || file.is_none_or(|file| file.starts_with("/memfd:") || file.starts_with("/dev/"))
}

/// Adds the words `N0=7` of a line; `unit` is the size of one, bytes.
fn add(found: &mut ByNode, line: &str, unit: u64) {
    let words = line.split_ascii_whitespace().filter_map(|word| word.strip_prefix('N')?.split_once('='));
    for (node, count) in words.filter_map(|(node, count)| Some((node.parse().ok()?, count.parse::<u64>().ok()?))) {
        let bytes: &mut u64 = found.entry(node).or_default();
        *bytes = bytes.saturating_add(count.saturating_mul(unit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_cgroups_accounts_tell_without_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        assert!(of_cgroup(dir.path()).is_empty());
        put(
            &dir.path().join("memory.numa_stat"),
            "anon N0=4096 N1=0 N3=100\nfile N0=7777777 N1=1\nshmem N0=4096 N1=8192 N3=0\nanon_thp N0=5 N1=5\n",
        );
        assert_eq!(of_cgroup(dir.path()), ByNode::from([(0, 8192), (1, 8192), (3, 100)]));
        put(&dir.path().join("hugetlb.1GB.numa_stat"), "total=2147483648 N0=0 N1=1073741824 N3=1073741824\n");
        put(&dir.path().join("hugetlb.2MB.numa_stat"), "total=2097152 N0=2097152 N1=0 N3=0\n");
        put(&dir.path().join("hugetlb.2MB.max"), "N0=1\n");
        let all = ByNode::from([(0, 2_105_344), (1, 1_073_750_016), (3, 1_073_741_924)]);
        assert_eq!(of_cgroup(dir.path()), all);
    }

    #[test]
    fn a_process_is_walked_where_it_has_little_memory_in_small_pages() {
        let dir = tempfile::tempdir().unwrap();
        assert!(of_process(dir.path()).is_err(), "it is gone");
        put(&dir.path().join("status"), "Name:\tqemu\nVmRSS:\t  204800 kB\nHugetlbPages:\t 8388608 kB\n");
        put(
            &dir.path().join("numa_maps"),
            "5581 default file=/usr/bin/qemu-system-x86_64 mapped=900 N0=900 kernelpagesize_kB=4\n\
             5590 default heap anon=20 dirty=20 N0=15 N2=5 kernelpagesize_kB=4\n\
             7f00 bind:2 file=/dev/hugepages/libvirt/qemu/3-cell/ram huge anon=3 dirty=3 N2=3 \
             kernelpagesize_kB=1048576\n7f40 default file=/memfd:memory-backend-memfd\\040(deleted) dirty=2 N2=2 \
             kernelpagesize_kB=4\n7f50 default stack anon=1 N1=x Ny=1\n",
        );
        let wanted = ByNode::from([(0, 15 * 4096), (2, 3 * (1 << 30) + 7 * 4096)]);
        assert_eq!(of_process(dir.path()), Ok(wanted));
        put(&dir.path().join("status"), "VmRSS:\t 33554432 kB\n");
        let error = of_process(dir.path()).unwrap_err();
        assert!(error.contains("32 GiB in small pages"), "{error}");
    }
}
