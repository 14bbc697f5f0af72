//! The keys of `lab/papers/figures.toml`, table by table.

use serde::Deserialize;

/// The figures of all papers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// Access'18.
    pub outsourcing: Outsourcing,
    /// EuroSys'18.
    pub rtvirt: Rtvirt,
    // These tables get types with the first experiment that shows them.
    vatc: toml::Table,
    kbp: toml::Table,
    /// Xen-ARM.
    pub xen_arm: XenArm,
    /// pvsched.
    pub pvsched: Pvsched,
}

/// pvsched: a proposal for Linux by which a guest raises the priority of its vCPUs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pvsched {
    /// The load.
    pub load: String,
    /// cyclictest's maximum in the guest, us.
    pub guest_max_us: ByPriority,
    /// cyclictest's maximum on the host, with vCPUs always at an RT priority, us.
    pub host_max_us_beside_static_rt: u64,
}

/// A figure by the priority of the guest's vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByPriority {
    /// Linux's default.
    pub vanilla: u64,
    /// Raised when the guest asks.
    pub dynamic_boost: u64,
    /// Always RT.
    pub static_rt: u64,
}

/// Xen-ARM: strict priorities by interrupt context.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct XenArm {
    /// The machine.
    pub host: String,
    /// The load of section 3.
    pub load: String,
    /// Figures 1 and 6: delays above 1 ms.
    pub over_1ms_percent: SlowShare,
    /// Maximum under the credit scheduler, ms.
    pub worst_before_ms: f64,
    /// Figure 3: requests that were handled immediately, by the guest's CPU load.
    pub immediate_percent_by_cpu_load: Immediate,
    /// Number of spikes in a million requests, with all changes.
    pub spikes_after_all_changes_in_a_million: u64,
    xen_to_netback_over_1ms_percent: toml::Table,
    timer_tick_ms: [u32; 2],
}

/// Delays above 1 ms, percent of all.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlowShare {
    /// From the driver domain to the guest, credit scheduler.
    pub netback_to_domu_before: f64,
    /// The same with all changes.
    pub after: f64,
    /// From the interrupt to the driver domain, credit scheduler.
    pub xen_to_netback_before: f64,
}

/// Requests that were handled immediately, percent of all.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Immediate {
    /// At 20 % CPU load.
    pub l20: f64,
    /// At 80 %.
    pub l80: f64,
}

/// Access'18: separate network processing for RT and non-RT, and sockets executed by the host.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outsourcing {
    /// The machine.
    pub host: String,
    /// The load of section IV-A.
    pub load: String,
    /// Table 3 and Figure 7, by method.
    pub table3: Methods,
    /// Figures of IV-B and IV-G that the text states as differences.
    pub relative: Relative,
    priorities: toml::Table,
    /// The applications of IV-G, in words.
    pub workloads: Workloads,
}

/// Outsourcing compared with the other methods, percent; negative for less.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Relative {
    sd_vs_threaded: String,
    sd_vs_exclusive: String,
    throughput_vs_threaded_percent: f64,
    cpu_vs_threaded_percent: f64,
    throughput_vs_exclusive: String,
    /// p99 of the VoIP server's forward delays.
    pub voip_p99_percent: TwoMethods,
    /// p99 of memcached's response times.
    pub memcached_p99_percent: TwoMethods,
    rt_vms: toml::Table,
    probe_effect_us_four_probes: f64,
    softirq_patch_lines: u32,
}

/// A figure compared with those of two methods, percent.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TwoMethods {
    /// Threaded interrupt handling.
    pub vs_threaded: f64,
    /// Exclusive CPU.
    pub vs_exclusive: f64,
}

/// The applications, in words.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workloads {
    /// IV-G 1.
    pub voip: String,
    /// IV-G 2.
    pub memcached: String,
}

/// The methods of Table 3, in the paper's order.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Methods {
    /// Vanilla Linux.
    pub vanilla: Table3,
    /// Threaded interrupt handling.
    pub threaded: Table3,
    /// Exclusive CPU.
    pub exclusive: Table3,
    /// The paper's method.
    pub outsourcing: Table3,
}

/// A method's line in Table 3, and its throughput from Figure 7 as stated in the text.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table3 {
    /// us.
    pub mean: f64,
    /// us.
    pub p99: f64,
    /// us.
    pub sd: f64,
    /// Gbit/s of both heavy receivers.
    pub bulk_gbps: f64,
}

/// EuroSys'18: guest and host schedulers share bandwidth needs and next deadlines.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rtvirt {
    /// The machine.
    pub host: String,
    min_global_slice_us: u64,
    /// Added to every vCPU's budget.
    pub slack_us: u64,
    /// Cost of a guest's request for bandwidth, us.
    pub hypercall_us: f64,
    shared_bytes_per_vcpu: u64,
    /// Periodic applications.
    pub table1_ms: Table1,
    /// Interfaces of one group.
    pub table2: Table2,
    /// Statements of the text about Figure 3.
    pub bandwidth: Claims,
    /// Sporadic applications, section 4.2.
    pub sporadic: Sporadic,
    /// Video applications.
    pub table3_video: Table3Video,
    /// Results of the video applications.
    pub video: VideoClaims,
    /// memcached alone on a CPU.
    pub table4_us: Table4,
    /// memcached beside other VMs, section 4.4.
    pub memcached: Memcached,
    /// Applications of section 4.5.
    pub table5_ms: Table5,
    /// Cost of scheduling these applications.
    pub table6: Table6,
}

/// Slice and period of each application, ms.
type Group = Vec<[u64; 2]>;

/// Table 1.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table1 {
    h_equiv: Group,
    h_dec: Group,
    h_inc: Group,
    nh_equiv: Group,
    nh_dec: Group,
    nh_inc: Group,
}

impl Table1 {
    /// A group by its name on the command line.
    pub fn group(&self, name: &str) -> Option<&Group> {
        Some(match name {
            "h-equiv" => &self.h_equiv,
            "h-dec" => &self.h_dec,
            "h-inc" => &self.h_inc,
            "nh-equiv" => &self.nh_equiv,
            "nh-dec" => &self.nh_dec,
            "nh-inc" => &self.nh_inc,
            _ => return None,
        })
    }
}

/// Table 2: NH-Dec.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table2 {
    rtxen_ms: Group,
    rtvirt_ms: Vec<[f64; 2]>,
    /// Needed and allocated bandwidth.
    pub cpus: Cpus,
}

/// CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpus {
    /// Needed by the applications.
    pub needed: f64,
    /// Allocated by RT-Xen.
    pub rtxen: f64,
    /// Allocated by RTVirt.
    pub rtvirt: f64,
}

/// Figure 3, as far as the text states it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claims {
    rtxen_h_equiv: toml::Table,
    rtxen_extra_cpus_mean: f64,
    rtxen_h_dec_wasted_cpus: f64,
    /// RTVirt's allocation compared with RT-Xen's, percent.
    pub allocated_vs_rtxen_percent: f64,
    /// RTVirt's allocation compared with what RT-Xen must reserve, percent.
    pub claimed_vs_rtxen_percent: f64,
    /// Deadline misses in all groups.
    pub deadline_misses: u64,
}

/// Table 3, by frames per second.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table3Video {
    fps24: Video,
    fps30: Video,
    fps48: Video,
    fps60: Video,
}

impl Table3Video {
    /// All rates, the slowest first.
    pub(crate) fn rates(&self) -> [Video; 4] {
        [self.fps24, self.fps30, self.fps48, self.fps60]
    }
}

/// Requirement of a frame rate.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Video {
    need_percent: f64,
    /// CPU time, ms.
    pub slice: u64,
    /// Period, ms.
    pub period: u64,
}

/// Statements of the text in section 4.3.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VideoClaims {
    /// The load.
    pub load: String,
    /// Number of applications.
    pub rtas: u64,
    /// Number of applications that missed a deadline.
    pub rtas_with_misses: u64,
    /// Largest share of missed deadlines of one application, percent.
    pub worst_miss_percent: f64,
}

/// Table 5: ten applications of each group.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table5 {
    /// Slice and period, ms.
    pub groups: Group,
}

/// Table 6, by scenario.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table6 {
    /// 10 VMs with 10 applications each.
    pub multi_rta_vms: Overheads,
    /// 100 VMs with one application each.
    pub single_rta_vms: Overheads,
}

/// Overheads by scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overheads {
    /// RT-Xen 2.0.
    pub rtxen: Overhead,
    /// The paper's scheduler.
    pub rtvirt: Overhead,
}

/// Overhead over 100 s.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overhead {
    /// Time in `schedule()`, us.
    pub schedule: f64,
    /// Time in context switches, us.
    pub switch: f64,
    /// Both, as a share of all CPUs' time, percent.
    pub percent: f64,
    /// Missed deadlines, percent, if stated.
    pub miss_percent: Option<f64>,
}

/// Table 4.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table4 {
    /// Xen's default.
    pub credit: Tail,
    /// RT-Xen 2.0.
    pub rtxen: Tail,
    /// The paper's scheduler.
    pub rtvirt: Tail,
}

/// Percentiles of response times, us.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tail {
    p90: f64,
    p95: f64,
    p99: f64,
    /// 99.9th percentile.
    pub p99_9: f64,
}

/// Figures 5a and 5b, as far as the text states them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memcached {
    /// The requests.
    pub load: String,
    /// Budget and period, us.
    pub reservation_us: ReservationUs,
    /// p99.9 beside VMs that never idle, us.
    pub fig5a_p99_9_us: Schedulers,
    fig5a_bandwidth_vs_rtxen_a_percent: f64,
    /// p99.9 beside video VMs, us.
    pub fig5b_p99_9_us: Schedulers,
    pub(super) fig5b_video_worst_miss_percent: Misses,
    fig5b_allocated_cpus: toml::Table,
}

/// Reservations of the memcached VM, us.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReservationUs {
    credit: [u64; 2],
    /// The paper's scheduler.
    pub rtvirt: [u64; 2],
    rtxen_a: [u64; 2],
    rtxen_b: [u64; 2],
}

/// A figure by scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedulers {
    /// The paper's scheduler.
    pub rtvirt: f64,
    /// RT-Xen with 66 us in 283 us.
    pub rtxen_a: f64,
    /// RT-Xen with 33 us in 177 us.
    pub rtxen_b: f64,
    /// Xen's default.
    pub credit: f64,
}

/// Missed deadlines of the worst video VM, percent.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Misses {
    pub(super) rtvirt: f64,
    pub(super) credit: f64,
    pub(super) rtxen: f64,
}

/// The sporadic applications of section 4.2.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sporadic {
    /// Requests per application.
    pub requests: u64,
    /// Time between requests, ms, uniform.
    pub gap_ms: [u64; 2],
    /// Deadline misses in all groups.
    pub deadline_misses: u64,
    /// p99.9 of a request's time on the network, us.
    pub network_p99_9_us: u64,
}
