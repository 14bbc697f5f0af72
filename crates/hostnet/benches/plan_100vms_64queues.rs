//! Planning time for 100 VMs and 64 queues.
#![allow(missing_docs)] // criterion's macro makes an undocumented function
#![allow(clippy::unwrap_used)] // of the made-up host

#[path = "../tests/support/fleet.rs"]
mod fleet;

use criterion::{Criterion, criterion_group, criterion_main};
use ontime_hostnet::{Inventory, Roots, plan};

fn planning(criterion: &mut Criterion) {
    let (inventory, intent) = fleet::hundred_vms();
    criterion.bench_function("plan_100vms_64queues", |bencher| bencher.iter(|| plan(&inventory, &intent)));
    criterion.bench_function("scan_this_host", |bencher| bencher.iter(|| Inventory::scan(&Roots::default())));
}

criterion_group!(benches, planning);
criterion_main!(benches);
