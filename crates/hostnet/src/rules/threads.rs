//! NAPI instances, kernel threads, and the setting that gives a thread its place.

use ontime_tenants::{Policy, Role};

use crate::intent::Intent;
use crate::inventory::{Inventory, KernelThread, KernelThreadKind, Napi, Nic};
use crate::knob::{Knob, Value};
use crate::rule::{RuleId, Setting, Stage};

/// The first kernel version in which netlink lists NAPI instances.
pub const NAPI_LISTED: (u32, u32) = (6, 8);

/// A physical interface has NAPI, also while it is down and the kernel shows none. A virtual interface has NAPI if the
/// kernel shows an instance. Before kernels showed any, a veth may have NAPI; if it has none, setting it fails without
/// harm. An interface that is threaded keeps the setting while it is down, because otherwise every ifdown would undo
/// it.
pub(super) fn has_napi(inventory: &Inventory, nic: &Nic) -> bool {
    let may_have = inventory.kernel.version < NAPI_LISTED && nic.kind.as_deref() == Some("veth") && nic.up;
    nic.physical || !nic.napis.is_empty() || nic.threaded.is_some_and(|mode| mode > 0) || may_have
}

/// The mode of a NAPI instance.
pub(super) fn napi_knob(nic: &Nic, napi: &Napi) -> Knob {
    Knob::NapiThreaded { nic: nic.id.clone(), napi: napi.id }
}

/// The thread of a NAPI instance, by the thread id from netlink, or (before 6.8) by the NAPI id in the thread's name.
pub(super) fn thread_of<'a>(inventory: &'a Inventory, napi: &Napi) -> Option<&'a KernelThread> {
    match napi.pid {
        Some(pid) => inventory.threads.iter().find(|thread| thread.id.tid == pid),
        None => inventory.threads.iter().find(|thread| thread.kind == KernelThreadKind::Napi(napi.id)),
    }
}

/// Whether RT tenants wait for a thread of a policy: its priority is that of their lowest vCPU or above.
pub(super) fn delays_rt(intent: &Intent) -> impl Fn(Policy) -> bool {
    let places = intent.rt_tenants().map(|tenant| intent.table.policy(tenant.class, Role::VcpuEntitled));
    let lowest = places.filter_map(real_time).min();
    move |policy| real_time(policy).zip(lowest).is_some_and(|(own, lowest)| own >= lowest)
}

fn real_time(policy: Policy) -> Option<u8> {
    match policy {
        Policy::Fifo(priority) | Policy::Rr(priority) => Some(priority),
        _ => None,
    }
}

/// What a finding says of a thread that [`delays_rt`].
pub(super) const DELAYS_RT: &str = ", where RT threads wait for it";

/// The setting that gives a kernel thread a place.
pub(super) fn place(rule: RuleId, thread: &KernelThread, policy: Policy) -> Setting {
    let knob = Knob::ThreadPolicy { thread: thread.id, comm: thread.comm.clone() };
    Setting::new(rule, Stage::Place, knob, Value::Policy(policy))
}
