//! The papers' own figures, for the column beside ours.
//!
//! In: `papers/figures.toml`, which holds what the papers' texts state and nothing read off a plot; it is compiled in.
//! Out: the rows of the paper's table that an experiment repeats. An unknown key is an error, so that a figure cannot
//! be there and go unread by a misspelling.

use serde::Deserialize;

use crate::schema::PaperRow;

/// The file, as it was when this was built.
pub const FIGURES: &str = include_str!("../../../papers/figures.toml");

/// Why the papers' figures could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PaperError {
    /// Not TOML, or not the keys that are known.
    #[error("papers/figures.toml: {0}")]
    Figures(#[from] toml::de::Error),
    /// No paper has such an experiment.
    #[error(
        "no paper's figures are known for experiment {0:?}; known are rt-server, ablation, segments, bulk, vatc, vatc-network, inversion, kbp, memcached, voip, sampled-values, rta-periodic, rta-sporadic, rta-scale, memcached-slo, video, xen-arm"
    )]
    Experiment(String),
}

/// The figures of all papers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// Access'18.
    pub outsourcing: Outsourcing,
    /// EuroSys'18.
    pub rtvirt: Rtvirt,
    // The others are typed with the experiment that first shows them.
    vatc: toml::Table,
    kbp: toml::Table,
    /// Xen-ARM.
    pub xen_arm: XenArm,
}

/// Xen-ARM: strict priorities by interrupt context.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct XenArm {
    /// The machine.
    pub host: String,
    /// The load of section 3.
    pub load: String,
    /// Figures 1 and 6: delays over 1 ms.
    pub over_1ms_percent: Spikes,
    /// The slowest under the credit scheduler, ms.
    pub worst_before_ms: f64,
    /// Figure 3: requests that were handled at once, by the guest's CPU load.
    pub immediate_percent_by_cpu_load: Immediate,
    /// Of a million, with all changes.
    pub spikes_after_all_changes_in_a_million: u64,
    xen_to_netback_over_1ms_percent: toml::Table,
    timer_tick_ms: [u32; 2],
}

/// Delays over 1 ms, percent of all.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spikes {
    /// From the driver domain to the guest, credit scheduler.
    pub netback_to_domu_before: f64,
    /// The same with all changes.
    pub after: f64,
    /// From the interrupt to the driver domain, credit scheduler.
    pub xen_to_netback_before: f64,
}

/// Requests that were handled at once, percent of all.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Immediate {
    /// At 20 % CPU load.
    pub l20: f64,
    /// At 80 %.
    pub l80: f64,
}

/// Access'18: RT and non-RT network processing kept apart, sockets executed by the host.
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

/// Outsourcing beside the other methods; percent, below 0 where it is less.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Relative {
    sd_vs_threaded: String,
    sd_vs_exclusive: String,
    throughput_vs_threaded_percent: f64,
    cpu_vs_threaded_percent: f64,
    throughput_vs_exclusive: String,
    /// p99 of the VoIP server's forward delays.
    pub voip_p99_percent: Versus,
    /// p99 of memcached's response times.
    pub memcached_p99_percent: Versus,
    rt_vms: toml::Table,
    probe_effect_us_four_probes: f64,
    softirq_patch_lines: u32,
}

/// A figure beside those of two methods, percent.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versus {
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

/// The methods of Table 3, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Methods {
    /// Vanilla Linux.
    pub vanilla: Table3,
    /// Threaded interrupt handling.
    pub threaded: Table3,
    /// Exclusive CPU.
    pub exclusive: Table3,
    /// The paper's own.
    pub outsourcing: Table3,
}

/// A method's line of Table 3, with its throughput of Figure 7 as the text states it.
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
    hypercall_us: f64,
    shared_bytes_per_vcpu: u64,
    /// Periodic applications.
    pub table1_ms: Table1,
    /// Interfaces of one group.
    pub table2: Table2,
    /// What the text states of Figure 3.
    pub bandwidth: Claims,
    /// Sporadic applications, section 4.2.
    pub sporadic: Sporadic,
    /// Video applications.
    pub table3_video: Table3Video,
    /// What came of them.
    pub video: VideoClaims,
    /// memcached alone on a CPU.
    pub table4_us: Table4,
    /// memcached beside others, section 4.4.
    pub memcached: Memcached,
    /// Applications of section 4.5.
    pub table5_ms: Table5,
    /// What scheduling them took.
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
    /// What is needed and allocated.
    pub cpus: Cpus,
}

/// CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpus {
    /// By the applications.
    pub needed: f64,
    /// By RT-Xen.
    pub rtxen: f64,
    /// By RTVirt.
    pub rtvirt: f64,
}

/// Figure 3, as far as the text has it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claims {
    rtxen_h_equiv: toml::Table,
    rtxen_extra_cpus_mean: f64,
    rtxen_h_dec_wasted_cpus: f64,
    /// RTVirt's allocation beside RT-Xen's, percent.
    pub allocated_vs_rtxen_percent: f64,
    /// The same beside what RT-Xen must set aside.
    pub claimed_vs_rtxen_percent: f64,
    /// In all groups.
    pub deadline_misses: u64,
}

/// Table 3, by frames a second.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table3Video {
    fps24: Video,
    fps30: Video,
    fps48: Video,
    fps60: Video,
}

impl Table3Video {
    /// The slowest first.
    pub fn rates(&self) -> [Video; 4] {
        [self.fps24, self.fps30, self.fps48, self.fps60]
    }
}

/// A frame rate's need.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Video {
    need_percent: f64,
    /// ms of CPU time.
    pub slice: u64,
    /// Within so many ms.
    pub period: u64,
}

/// What the text states of section 4.3.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VideoClaims {
    /// What runs.
    pub load: String,
    /// Applications.
    pub rtas: u64,
    /// Of those, how many missed a deadline.
    pub rtas_with_misses: u64,
    /// The share that the worst missed.
    pub worst_miss_percent: f64,
}

/// Table 5: ten applications of each.
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
    /// 10 VMs with 10 applications.
    pub multi_rta_vms: Overheads,
    /// 100 VMs with one.
    pub single_rta_vms: Overheads,
}

/// By scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overheads {
    /// RT-Xen 2.0.
    pub rtxen: Overhead,
    /// The paper's own.
    pub rtvirt: Overhead,
}

/// Over 100 s.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overhead {
    /// Time in `schedule()`, us.
    pub schedule: f64,
    /// In context switches, us.
    pub switch: f64,
    /// Both, of all CPUs' time.
    pub percent: f64,
    /// Deadlines missed, where it is stated.
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
    /// The paper's own.
    pub rtvirt: Tail,
}

/// Percentiles of response times, us.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tail {
    p90: f64,
    p95: f64,
    p99: f64,
    /// 99.9th.
    pub p99_9: f64,
}

/// Figures 5a and 5b, as far as the text has them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memcached {
    /// What is asked.
    pub load: String,
    /// Budget and period, us.
    pub reservation_us: ReservationUs,
    /// Beside VMs that never idle.
    pub fig5a_p99_9_us: Schedulers,
    fig5a_bandwidth_vs_rtxen_a_percent: f64,
    /// Beside video VMs.
    pub fig5b_p99_9_us: Schedulers,
    fig5b_video_worst_miss_percent: Misses,
    fig5b_allocated_cpus: toml::Table,
}

/// The memcached VM's.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReservationUs {
    credit: [u64; 2],
    /// The paper's own.
    pub rtvirt: [u64; 2],
    rtxen_a: [u64; 2],
    rtxen_b: [u64; 2],
}

/// A figure by scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedulers {
    /// The paper's own.
    pub rtvirt: f64,
    /// RT-Xen with 66 us in 283 us.
    pub rtxen_a: f64,
    /// RT-Xen with 33 us in 177 us.
    pub rtxen_b: f64,
    /// Xen's default.
    pub credit: f64,
}

/// Deadlines that the worst of the video VMs missed, percent.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Misses {
    rtvirt: f64,
    credit: f64,
    rtxen: f64,
}

/// The sporadic applications of section 4.2.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sporadic {
    /// To each application.
    pub requests: u64,
    /// Between requests, uniform.
    pub gap_ms: [u64; 2],
    /// In all groups.
    pub deadline_misses: u64,
    /// What a request takes on the network.
    pub network_p99_9_us: u64,
}

impl Figures {
    /// Reads the compiled-in file.
    ///
    /// # Errors
    /// [`PaperError::Figures`], with line and key.
    pub fn load() -> Result<Self, PaperError> {
        Self::parse(FIGURES)
    }

    /// Reads such a file.
    ///
    /// # Errors
    /// [`PaperError::Figures`], with line and key.
    pub fn parse(text: &str) -> Result<Self, PaperError> {
        Ok(toml::from_str(text)?)
    }

    /// The paper's rows for an experiment of `ontime bench`.
    ///
    /// # Errors
    /// [`PaperError::Experiment`] where there are none.
    pub fn rows(&self, experiment: &str) -> Result<Vec<PaperRow>, PaperError> {
        let Outsourcing { host, load, .. } = &self.outsourcing;
        let conditions = format!("{host}; {load}");
        let Methods { vanilla, threaded, exclusive, outsourcing } = self.outsourcing.table3;
        let all =
            [("vanilla", vanilla), ("threaded", threaded), ("exclusive", exclusive), ("outsourcing", outsourcing)];
        let rows = match experiment {
            "rt-server" => all.to_vec(),
            // Figure 9's own figures are plots; its a is Table 3's last line.
            "ablation" => vec![("outsourcing", outsourcing), ("threaded", threaded)],
            // Figures 14 and 15 are plots; the text states differences only (`Self::notes`).
            "memcached" | "voip" => Vec::new(),
            // Figure 11 is a plot; its load, and so the whole of its three segments, is Table 3's.
            "segments" => vec![("vanilla", vanilla), ("threaded", threaded)],
            // The text has ratios or no figure.
            "bulk" | "vatc" | "vatc-network" | "inversion" | "kbp" | "xen-arm" => Vec::new(),
            // No paper has it.
            "sampled-values" => Vec::new(),
            // No response times, or of percentiles only.
            "rta-periodic" | "rta-sporadic" | "rta-scale" | "memcached-slo" | "video" => Vec::new(),
            _ => return Err(PaperError::Experiment(experiment.to_string())),
        };
        Ok(rows.into_iter().map(|(method, line)| line.row(method, &conditions)).collect())
    }

    /// What the paper states of an experiment besides [`Self::rows`], in sentences.
    pub fn notes(&self, experiment: &str) -> Vec<String> {
        match experiment {
            "rta-periodic" => return vec![self.rtvirt.periodic()],
            "rta-sporadic" => return vec![self.rtvirt.periodic(), self.rtvirt.sporadic()],
            "memcached-slo" => return vec![self.rtvirt.memcached()],
            "video" => return vec![self.rtvirt.video()],
            "rta-scale" => return vec![self.rtvirt.scale()],
            _ => {}
        }
        if experiment == "xen-arm" {
            return vec![self.xen_arm.note()];
        }
        let Outsourcing { host, relative, workloads, .. } = &self.outsourcing;
        let (figure, load, versus) = match experiment {
            "voip" => ("Figure 14, forward delays", &workloads.voip, relative.voip_p99_percent),
            "memcached" => ("Figure 15, response times of GETs", &workloads.memcached, relative.memcached_p99_percent),
            _ => return Vec::new(),
        };
        let Versus { vs_threaded, vs_exclusive } = versus;
        vec![format!(
            "paper (Access'18, {figure}; {host}; {load}): p99 of outsourcing {} % lower than threaded's, {} % lower than exclusive's; \
             the rest is a plot",
            -vs_threaded, -vs_exclusive
        )]
    }
}

impl Rtvirt {
    fn periodic(&self) -> String {
        let Self { host, slack_us, table2, bandwidth, .. } = self;
        let Cpus { needed, rtxen, rtvirt } = table2.cpus;
        let beyond = |cpus: f64| (cpus / needed - 1.0) * 100.0;
        format!(
            "paper (RTVirt, Tables 1 and 2, Figure 3; {host}; slack of {slack_us} us a vCPU, no bulk work): {} deadlines missed by either in all groups; for \
             NH-Dec's {needed} CPUs RTVirt allocates {rtvirt} (+{:.1} %) and RT-Xen {rtxen} (+{:.1} %); over all groups RTVirt {} % less than RT-Xen, \
             and {} % less than RT-Xen sets aside; the rest is a plot",
            bandwidth.deadline_misses,
            beyond(rtvirt),
            beyond(rtxen),
            -bandwidth.allocated_vs_rtxen_percent,
            -bandwidth.claimed_vs_rtxen_percent
        )
    }
}

impl Rtvirt {
    fn video(&self) -> String {
        let VideoClaims { load, rtas, rtas_with_misses, worst_miss_percent } = &self.video;
        format!(
            "paper (RTVirt, section 4.3, Figure 4; {}; {load}): of {rtas} applications {rtas_with_misses} missed a deadline, the worst {worst_miss_percent} % of its",
            self.host
        )
    }

    fn scale(&self) -> String {
        let Table6 { multi_rta_vms: multi, single_rta_vms: single } = &self.table6;
        format!(
            "paper (RTVirt, section 4.5, Tables 5 and 6; {}, 100 s): 10 VMs with 10 applications missed {} % of their deadlines at an overhead of {} % of a CPU (RT-Xen: {} %), \
             100 VMs with one {} % at {} % (RT-Xen: {} %); overhead is schedule() and context switches",
            self.host,
            multi.rtvirt.miss_percent.unwrap_or_default(),
            multi.rtvirt.percent,
            multi.rtxen.percent,
            single.rtvirt.miss_percent.unwrap_or_default(),
            single.rtvirt.percent,
            single.rtxen.percent
        )
    }

    fn memcached(&self) -> String {
        let Memcached { load, fig5a_p99_9_us: a, fig5b_p99_9_us: b, fig5b_video_worst_miss_percent: missed, .. } =
            &self.memcached;
        let [budget, period] = self.memcached.reservation_us.rtvirt;
        format!(
            "paper (RTVirt, section 4.4; {}; {load}; RTVirt with {budget} us in {period} us): p99.9 alone RTVirt {} us, RT-Xen {}, Credit {}; beside 19 VMs that never \
             idle on 2 CPUs RTVirt {}, RT-Xen A {} (twice the bandwidth), B {}, Credit {}; beside 10 video VMs and 4 more memcached on 15 CPUs RTVirt {}, \
             RT-Xen A {}, B {}, Credit {}; of the worst video VM's deadlines RTVirt missed {} %, Credit {} %, RT-Xen {} %",
            self.host,
            self.table4_us.rtvirt.p99_9,
            self.table4_us.rtxen.p99_9,
            self.table4_us.credit.p99_9,
            a.rtvirt,
            a.rtxen_a,
            a.rtxen_b,
            a.credit,
            b.rtvirt,
            b.rtxen_a,
            b.rtxen_b,
            b.credit,
            missed.rtvirt,
            missed.credit,
            missed.rtxen
        )
    }

    fn sporadic(&self) -> String {
        let Sporadic { requests, gap_ms: [least, most], deadline_misses, network_p99_9_us } = self.sporadic;
        format!(
            "paper (RTVirt, section 4.2): {requests} requests to each application over the network, at random {least} to {most} ms apart: {deadline_misses} \
             deadlines missed by either; p99.9 of the network's delay, not counted: {network_p99_9_us} us"
        )
    }
}

impl XenArm {
    fn note(&self) -> String {
        let Self { host, load, over_1ms_percent: over, immediate_percent_by_cpu_load: immediate, .. } = self;
        format!(
            "paper (Xen-ARM, {host}; {load}): over 1 ms under the credit scheduler {} % from the driver domain to the guest and {} % before it, the \
             slowest {} ms; with strict priorities {} %, and {} of a million; handled at once {} % at 20 % CPU load, {} % at 80 %; the rest is plots",
            over.netback_to_domu_before,
            over.xen_to_netback_before,
            self.worst_before_ms,
            over.after,
            self.spikes_after_all_changes_in_a_million,
            immediate.l20,
            immediate.l80
        )
    }
}

impl Table3 {
    fn row(self, method: &str, conditions: &str) -> PaperRow {
        PaperRow {
            method: method.to_string(),
            source: "Access'18, Table 3 and section IV-B".to_string(),
            conditions: conditions.to_string(),
            mean_us: self.mean,
            p99_us: self.p99,
            sd_us: self.sd,
            bulk_gbps: self.bulk_gbps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiled_in_figures_are_the_papers() {
        let rows = Figures::load().unwrap().rows("rt-server").unwrap();
        // Access'18, Table 3, first and last line; throughput from the text of IV-B.
        assert_eq!(rows.len(), 4);
        assert_eq!((rows[0].mean_us, rows[0].p99_us, rows[0].sd_us, rows[0].bulk_gbps), (92.5, 225.0, 29.2, 18.8));
        assert_eq!((rows[3].mean_us, rows[3].p99_us, rows[3].sd_us, rows[3].bulk_gbps), (32.9, 46.8, 4.3, 18.8));
    }

    #[test]
    fn differences_are_told_and_are_what_the_goals_ask_for() {
        let figures = Figures::load().unwrap();
        for (experiment, percent, versus) in [
            ("voip", "63 %", figures.outsourcing.relative.voip_p99_percent),
            ("memcached", "67 %", figures.outsourcing.relative.memcached_p99_percent),
        ] {
            let notes = figures.notes(experiment);
            assert!(notes.len() == 1 && notes[0].contains(percent), "{notes:?}");
            assert!(figures.rows(experiment).unwrap().is_empty());
            let goal =
                crate::goals::of_experiment(experiment).iter().find(|goal| goal.id == "p99-vs-threaded").unwrap();
            assert!((goal.target - (1.0 + versus.vs_threaded / 100.0)).abs() < 1e-9, "{experiment}");
        }
        assert!(figures.notes("rt-server").is_empty());
        let xen_arm = figures.notes("xen-arm");
        assert!(xen_arm.len() == 1 && xen_arm[0].contains("16 %") && xen_arm[0].contains("60 ms"), "{xen_arm:?}");
        for experiment in ["bulk", "vatc", "vatc-network", "inversion", "kbp", "sampled-values", "xen-arm"] {
            assert!(figures.rows(experiment).unwrap().is_empty(), "{experiment}");
        }
    }

    #[test]
    fn rtvirts_figures_are_told() {
        let figures = Figures::load().unwrap();
        let notes = figures.notes("rta-periodic");
        assert!(notes[0].contains("2.11 (+4.5 %)") && notes[0].contains("39.4 % less"), "{notes:?}");
        assert!(figures.rows("rta-periodic").unwrap().is_empty());
    }

    #[test]
    fn a_misspelt_key_is_named_with_its_line() {
        let wrong = FIGURES.replace("bulk_gbps = 17.8", "bulk_gbit = 17.8");
        let error = Figures::parse(&wrong).unwrap_err().to_string();
        assert!(error.contains("bulk_gbit") && error.contains("line 9"), "{error}");
        assert!(Figures::load().unwrap().rows("table9").unwrap_err().to_string().contains("rt-server"));
    }
}
