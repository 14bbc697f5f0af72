//! Files of the kernel and of the host module that both rules and the inventory name, and a version that both know.

/// The sysctl of rule `skb-defer`, below `/proc/sys`.
pub(crate) const SKB_DEFER_MAX: &str = "net/core/skb_defer_max";
/// Whether a kernel's warning is a panic, below `/proc/sys`.
pub(crate) const PANIC_ON_WARN: &str = "kernel/panic_on_warn";
/// RT throttling, below `/proc/sys`.
pub(crate) const RT_RUNTIME: &str = "kernel/sched_rt_runtime_us";
/// Weight of the backlog and of qdiscs, below `/proc/sys`.
pub(crate) const DEV_WEIGHT: &str = "net/core/dev_weight";
/// The module's file, below a NIC's directory in sysfs.
pub(crate) const WEIGHT_FILE: &str = "ontime/napi_weight";
/// The module's file, below a NIC's directory in sysfs.
pub(crate) const POLL_FILE: &str = "ontime/busy_poll";
/// The first kernel version that, when it ends NAPI threads, waits until each instance is idle or owned by its thread.
/// An instance of an interface that is down is neither (`net/core/dev.c`, `napi_stop_kthread`: `napi_disable` has left
/// it scheduled).
pub(crate) const UNTHREADING_WAITS: (u32, u32) = (6, 17);
