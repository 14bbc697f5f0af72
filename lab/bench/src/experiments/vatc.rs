//! `vatc` and `vatc-network`: VATC, sections IV-B and IV-C. A periodic RT request goes through a NIC through which up
//! to four bulk VMs send small packets, or one bulk VM sends large packets.
//!
//! In: methods and the traffic of the bulk VMs, on one host. Out: a [`MethodResult`] per pair, named by [`Case`]'s
//! `Display`. One [`measure`] is one boot: the RT VM and the bulk VMs share one NIC and bridge, as the paper's domains
//! share one NIC. Bulk VMs are stock `iperf3` servers (`-R`).

use std::fmt;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;

use clap::ValueEnum;

use super::{Experiment, HostArgs, Measured, Methods, Output, command};
use crate::bulk::{self, BulkFlows};
use crate::client::ClientConfig;
use crate::datagrams;
use crate::error::MeasureError;
use crate::flood::{Flood, Kind};
use crate::frame::{Frame, parse};
use crate::goals::Figure::{self, P95};
use crate::goals::{GoalSpec, goal, idle, small as flooded};
use crate::hardware::HardwareError;
use crate::host::{Host, PlannedHost, RT_VM, Vm};
use crate::pcap::{PcapError, Tail};
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Run};
use crate::trial::{self, CaseResults};
use crate::wire::{self, RtFlow};
use crate::workload::{HEADERS, SOCKPERF};

/// The methods, in the order of the report: the paper's two comparisons, the kernel's defaults, Ontime, and VATC with
/// packets that go through the NIC's qdisc or bypass it.
const METHODS: Methods = Methods(&[
    ("prio", "prio root qdisc with RT packets in its first band, vhost threads as found"),
    ("fq_codel", "fq_codel root qdisc, vhost threads as found"),
    ("vanilla", "kernel's defaults, RT vCPU and vhost threads at FIFO"),
    ("partitioned", "NAPI threaded; of a shared NIC its threads are bulk"),
    ("vatc-qdisc", "a thread for each level, receive threads before them"),
    ("vatc", "a thread for each level, receive threads before them; no qdisc"),
]);
/// Maximum of bulk VMs, as in the paper.
const STREAMS_MAX: u8 = 4;

/// Time from a reply to the next request, us (section IV: a ping every 10 ms).
const PERIOD_US: u64 = 10_000;
/// Requests at the start of each case that do not count.
const WARM_UP: u64 = 10;
/// The emulated host's NIC, which all VMs use in this experiment.
const NIC: &str = "rt0";
/// The handle of the root qdiscs of methods `prio` and `fq_codel`, by which they are removed.
const HANDLE: &str = "1a:";

/// The traffic of the bulk VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BulkTraffic {
    /// Number of VMs (0 to [`STREAMS_MAX`]) that send datagrams of [`datagrams::SMALL`] bytes: they compete for the CPU
    /// (IV-B).
    Small(u8),
    /// One VM sends datagrams of [`datagrams::LARGE`] bytes as fast as possible: it saturates the link (IV-C).
    LargeUdp,
    /// One VM sends a TCP stream (IV-C).
    Tcp,
}

impl BulkTraffic {
    /// Number of sending VMs.
    fn vms(self) -> u8 {
        match self {
            BulkTraffic::Small(streams) => streams,
            BulkTraffic::LargeUdp | BulkTraffic::Tcp => 1,
        }
    }

    fn load(self) -> Load {
        match self {
            BulkTraffic::Small(0) => Load::None,
            BulkTraffic::Small(_) => Load::SmallPackets,
            BulkTraffic::LargeUdp => Load::LargePackets,
            BulkTraffic::Tcp => Load::Tcp,
        }
    }

    /// The flow of each VM, if all VMs together send `total` datagrams per second.
    fn flow(self, total: Option<u32>) -> Kind {
        let bytes = if self == BulkTraffic::LargeUdp { datagrams::LARGE } else { datagrams::SMALL };
        match self {
            BulkTraffic::Tcp => Kind::Send { streams: 1 },
            BulkTraffic::Small(_) | BulkTraffic::LargeUdp => {
                Kind::SendUdp { bytes, rate: total.map(|total| total / u32::from(self.vms().max(1))) }
            }
        }
    }

    fn description(self) -> String {
        match self {
            BulkTraffic::Small(streams) => format!("{streams} bulk VMs send small packets by the same NIC"),
            BulkTraffic::LargeUdp => "a bulk VM sends large UDP packets by the same NIC".to_owned(),
            BulkTraffic::Tcp => "a bulk VM sends TCP by the same NIC".to_owned(),
        }
    }
}

/// Minimum time between two interrupts of the NIC (Figures 6 and 7), in the form that the driver of an emulated host
/// takes: `ethtool -C rx-usecs`. e1000e uses some numbers for its adaptive modes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interval {
    /// Fixed, us: 0 (no limit) or 10 to 10,000.
    Micros(u16),
    /// 14 to 250 us, depending on the traffic.
    Dynamic,
    /// 50 to 250 us, depending on the traffic: the driver's default.
    Conservative,
}

impl Interval {
    /// The value of rx-usecs (`e1000_set_coalesce`, drivers/net/ethernet/intel/e1000e/ethtool.c).
    fn rx_usecs(self) -> u16 {
        match self {
            Interval::Micros(us) => us,
            Interval::Dynamic => 1,
            Interval::Conservative => 3,
        }
    }
}

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "dynamic" => Ok(Interval::Dynamic),
            "conservative" => Ok(Interval::Conservative),
            us => {
                let us = us.parse().ok().filter(|us| *us == 0 || (10..=10_000).contains(us));
                us.map(Interval::Micros).ok_or_else(|| "0, 10 to 10000 (us), dynamic or conservative".to_owned())
            }
        }
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Interval::Micros(us) => write!(to, "{us}us"),
            Interval::Dynamic => to.write_str("dynamic"),
            Interval::Conservative => to.write_str("conservative"),
        }
    }
}

/// What to measure on one host.
#[derive(Debug, Clone)]
struct VatcPlan {
    /// Methods from [`METHODS`].
    methods: Vec<String>,
    /// Traffic of the bulk VMs.
    beside: Vec<BulkTraffic>,
    /// Datagrams per second of all bulk VMs together (Figure 11); `None` for as many as possible.
    total_rate: Option<u32>,
    /// Interrupt intervals of the NIC (emulated hosts); empty for the driver's setting.
    intervals: Vec<Interval>,
    /// Minimum of counted requests per case (1000 in the paper).
    requests: u64,
}

#[derive(Debug, Clone, Copy)]
struct Case<'a> {
    /// A method from [`METHODS`].
    method: &'a str,
    /// Traffic of the bulk VMs.
    beside: BulkTraffic,
    /// An interval from [`VatcPlan::intervals`].
    interval: Option<Interval>,
}

/// The name in results: `METHOD-STREAMS`, `METHOD-udp` or `METHOD-tcp`, and `-INTERVAL` if an interval is set.
impl fmt::Display for Case<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.beside {
            BulkTraffic::Small(streams) => write!(to, "{}-{streams}", self.method),
            BulkTraffic::LargeUdp => write!(to, "{}-udp", self.method),
            BulkTraffic::Tcp => write!(to, "{}-tcp", self.method),
        }?;
        self.interval.map_or(Ok(()), |interval| write!(to, "-{interval}"))
    }
}

impl VatcPlan {
    /// Every case, in the order of measurement.
    fn cases(&self) -> Vec<Case<'_>> {
        let intervals: Vec<_> = self.intervals.iter().copied().map(Some).collect();
        let intervals = if intervals.is_empty() { vec![None] } else { intervals };
        let mut cases = Vec::new();
        for beside in &self.beside {
            for interval in &intervals {
                let of = |method| Case { method, beside: *beside, interval: *interval };
                cases.extend(self.methods.iter().map(String::as_str).map(of));
            }
        }
        cases
    }
}

/// Boots the host, starts the VMs and measures every method with every traffic and interval. If a case fails, the
/// remaining cases are measured while the host lives.
fn measure(plan: &VatcPlan, ground: PlannedHost<'_>) -> Result<CaseResults, MeasureError> {
    let bulk = bulk_vms(plan.beside.iter().map(|beside| beside.vms()).max().unwrap_or(0));
    let mut vms = vec![RT_VM];
    vms.extend(bulk.iter().map(|(name, address)| Vm { name, role: "bulk", net: "rt", address }));
    let host = ground.start(&vms, &[])?;
    trial::each(host, plan.cases(), Case::to_string, |host, case| measure_case(host, plan, *case))
}

/// Names and addresses of the first `count` bulk VMs.
fn bulk_vms(count: u8) -> Vec<(String, String)> {
    (1..=count).map(|number| (format!("bulk{number}"), format!("10.1.0.{}", 10 + number))).collect()
}

/// The VMs that send; on a real host the first of its bulk tenants.
fn senders(host: &Host, count: u8) -> Result<Vec<(String, String)>, MeasureError> {
    if host.target().is_none() {
        return Ok(bulk_vms(count));
    }
    let mut all = host.bulk();
    if all.len() < usize::from(count) {
        let said = format!("{count} streams take as many bulk tenants, and the site names {}", all.len());
        return Err(HardwareError::NotHere(said).into());
    }
    all.truncate(usize::from(count));
    Ok(all)
}

fn measure_case(
    host: &mut Host,
    plan: &VatcPlan,
    Case { method, beside, interval }: Case<'_>,
) -> Result<MethodResult, MeasureError> {
    let case = Case { method, beside, interval }.to_string();
    progress(format_args!("{case}: applying"));
    apply(host, method)?;
    if let Some(interval) = interval {
        moderate(host, interval)?;
    }
    let capture = host.capture("rt");
    let load = beside.load();
    let flows = if load.floods() {
        Some(Flood::start(host, "rt", &senders(host, beside.vms())?, beside.flow(plan.total_rate))?)
    } else {
        None
    };
    let server = SOCKPERF.on(host);
    let mut config = ClientConfig::new(server, plan.requests + WARM_UP, 1);
    (config.min_gap_us, config.max_gap_us) = (PERIOD_US, PERIOD_US);
    let stretch = trial::stretch(host, [capture.clone()], flows, |host| host.requests(config, &case))?;
    if let Some(interval) = interval {
        still_moderated(host, interval)?;
    }
    let cut = host.dir.join(format!("{case}.pcap"));
    let [from] = stretch.from;
    host.cut(&capture, from, &cut)?;
    let mut flow = RtFlow::new(server.port());
    flow.warmup = WARM_UP;
    let wire = wire::analyse(&cut, flow)?;
    let sent = bulk_rate(&cut)?;
    // The VM is the sender, so the receiver's port may be any. The capture has no other TCP.
    let flows = BulkFlows { ports: Vec::new(), window: wire.span_ns };
    let bulk = if load == Load::Tcp { Some(bulk::analyse(&cut, flows)?) } else { None };
    // The capture of a flood is large, and its sums are in the result.
    let _ = std::fs::remove_file(&cut);
    let mut result = MethodResult::new(&Run {
        load,
        wire: &wire,
        bulk: bulk.as_ref(),
        cpu_share: stretch.cpu_share,
        ..host.run(&case, &format!("{}; {}", METHODS.description(method), beside.description()))
    });
    result.notes.extend(stretch.notes);
    if matches!(load, Load::SmallPackets | Load::LargePackets) {
        result.notes.push(format!("bulk VMs sent {sent:.0} packets a second in all"));
    }
    Ok(result)
}

/// The methods that are measured by default.
fn defaults(on_hardware: bool) -> &'static [&'static str] {
    if on_hardware { &["vanilla", "vatc"] } else { &["prio", "fq_codel", "vanilla", "vatc"] }
}

/// Why a real host is not measured with this method.
fn refused_on_hardware(method: &str) -> Option<&'static str> {
    match method {
        "prio" | "fq_codel" => {
            Some("prio and fq_codel replace root qdiscs, in an emulated host only: name other methods")
        }
        "vatc-qdisc" => {
            Some("whether packets bypass a qdisc is the host's own host.toml's to say: measure vatc with it")
        }
        _ => None,
    }
}

/// Applies a method. `prio` and `fq_codel` are not Ontime's: it places the RT vCPU for them, and the emulated host's
/// own programs set the qdiscs.
fn apply(host: &mut Host, method: &str) -> Result<(), MeasureError> {
    if host.target().is_some() {
        return match refused_on_hardware(method) {
            Some(said) => Err(HardwareError::NotHere(said.to_owned()).into()),
            None => host.apply(method),
        };
    }
    let compared = matches!(method, "prio" | "fq_codel");
    host.shell(&without_qdiscs())?;
    let (applied, settings) = match method {
        _ if compared => ("vanilla", "without = [\"vnic-place\"]\n".to_owned()),
        "vatc" => ("vatc", format!("[nic.{NIC}]\nqdisc_bypass = true\n")),
        "vatc-qdisc" => ("vatc", String::new()),
        other => (other, String::new()),
    };
    host.configure(&settings)?;
    host.apply(applied)?;
    if compared { host.shell(&with_qdiscs(method)).map(|_| ()) } else { Ok(()) }
}

/// Lists the NIC and the taps of all VMs, in the emulated host's shell.
const INTERFACES: &str = "$(cd /sys/class/net && ls -d rt0 t-*)";

/// The command that sets the root qdiscs of `prio` or `fq_codel` on the NIC and the taps. Under `prio` RT packets go to
/// the first band (6 is TC_PRIO_INTERACTIVE); the paper classifies high-priority domains' packets in the same way.
fn with_qdiscs(kind: &str) -> String {
    let filter = if kind == "prio" {
        format!(
            "tc qdisc add dev {NIC} clsact; tc filter add dev {NIC} egress protocol all flower skip_hw indev t-{} \
             action skbedit priority 6",
            RT_VM.name
        )
    } else {
        String::new()
    };
    format!("set -e; for nic in {INTERFACES}; do tc qdisc replace dev $nic root handle {HANDLE} {kind}; done; {filter}")
}

/// The command that removes what [`with_qdiscs`] set, and nothing else: the kernel compares the handle.
fn without_qdiscs() -> String {
    format!(
        "for nic in {INTERFACES}; do tc qdisc del dev $nic root handle {HANDLE} && tc qdisc del dev $nic clsact; done \
         2> /dev/null; :"
    )
}

/// Sets the interrupt interval of the emulated host's NIC.
fn moderate(host: &mut Host, interval: Interval) -> Result<(), MeasureError> {
    if host.target().is_some() {
        // The NIC belongs to the host's owner, and its driver may use other units.
        let said = "--interval is for the emulated host's NIC: set a real one's by ethtool -C and leave --interval out";
        return Err(HardwareError::NotHere(said.to_owned()).into());
    }
    let wanted = interval.rx_usecs();
    // ethtool fails if the value does not change.
    if rx_usecs(host)? != wanted.to_string() {
        // The other value ends the adaptive mode. After that e1000e may still write an interval of that mode, at the
        // next interrupt; there is one at least every 2 s.
        let other = if wanted == 20 { 30 } else { 20 };
        host.shell(&format!(
            "{{ ethtool -C {NIC} rx-usecs {other} && sleep 3 && ethtool -C {NIC} rx-usecs {wanted}; }} 2>&1"
        ))?;
    }
    Ok(())
}

/// Checks that the interval is still set. Rule `moderation` changes it, if the method has the rule for this NIC.
fn still_moderated(host: &mut Host, interval: Interval) -> Result<(), MeasureError> {
    let (wanted, found) = (interval.rx_usecs().to_string(), rx_usecs(host)?);
    if found == wanted {
        return Ok(());
    }
    let said = format!("rx-usecs of {NIC} was set to {wanted} and is {found} now: the method wants its own");
    Err(MeasureError::Program { program: "ethtool".to_owned(), said })
}

/// The NIC's present interval, in the driver's numbers.
fn rx_usecs(host: &mut Host) -> Result<String, MeasureError> {
    let said = host.shell(&format!("ethtool -c {NIC} | sed -n 's/^rx-usecs:[[:space:]]*//p'"))?;
    Ok(said.trim().to_owned())
}

/// Datagrams per second of the capture's clock that bulk VMs sent; 0 if there are fewer than two.
fn bulk_rate(capture: &Path) -> Result<f64, PcapError> {
    let (mut count, mut span) = (0u64, None::<(u64, u64)>);
    Tail::open(capture)?.read_new(|record| {
        let bulk = matches!(parse(&record), Some(Frame::Udp(datagram)) if datagram.from.port() == datagrams::PORT);
        if bulk {
            count += 1;
            span = Some(span.map_or((record.at_ns, record.at_ns), |(from, _)| (from, record.at_ns)));
        }
    })?;
    let length = span.map_or(0, |(from, to)| to.saturating_sub(from));
    Ok(if length == 0 { 0.0 } else { (count - 1) as f64 * 1e9 / length as f64 })
}

/// What both have.
#[derive(Debug, clap::Args)]
struct Common {
    /// Methods: prio, fq_codel (emulated host only), vanilla, partitioned, vatc, vatc-qdisc (vatc where packets go
    /// through the NIC's qdisc); default: prio, fq_codel, vanilla, vatc; on a real host vanilla, vatc
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    #[command(flatten)]
    host: HostArgs,
    /// Times between two interrupts of the NIC, a case each: 0 (none), 10 to 10000 us, dynamic (14 to 250 us) or
    /// conservative (50 to 250); default: as its driver has it
    #[arg(long = "interval", value_name = "US", value_delimiter = ',')]
    intervals: Vec<Interval>,
    /// Counted requests a case (1000 in the paper)
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, clap::Args)]
struct SmallOptions {
    /// Numbers of bulk VMs that send
    #[arg(long, default_value = "0,1,2,3,4", value_delimiter = ',',
          value_parser = clap::value_parser!(u8).range(0..=i64::from(STREAMS_MAX)))]
    streams: Vec<u8>,
    /// Packets a second of all bulk VMs together (Fig. 11); default: as many as they can
    #[arg(long, value_name = "PACKETS", value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
    total_rate: Option<u32>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
struct LargeOptions {
    /// What the bulk VM sends
    #[arg(long, value_enum, default_value = "none,udp,tcp", value_delimiter = ',')]
    stream: Vec<Stream>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stream {
    /// Nothing
    None,
    /// UDP datagrams that fill a frame, as fast as it can
    Udp,
    /// One TCP connection
    Tcp,
}

impl From<Stream> for BulkTraffic {
    fn from(stream: Stream) -> Self {
        match stream {
            Stream::None => BulkTraffic::Small(0),
            Stream::Udp => BulkTraffic::LargeUdp,
            Stream::Tcp => BulkTraffic::Tcp,
        }
    }
}

/// Measures every method with every number of streams on one host.
fn small(args: &SmallOptions) -> anyhow::Result<ExitCode> {
    let beside = args.streams.iter().copied().map(BulkTraffic::Small).collect();
    let mut words = vec![
        "paper (VATC, IV-B, its hardware): with two streams the 95th percentile of prio is 8 times VATC's on Linux \
         3.10 and 40 times on 3.18; VATC's does not depend on the number of streams"
            .to_owned(),
    ];
    if let Some(rate) = args.total_rate {
        words.push(format!(
            "bulk VMs were told to send {rate} packets a second together; the paper's Figure 11, its hardware: worst \
             160 ms"
        ));
    }
    execute("vatc", beside, args.total_rate, &args.common, words)
}

/// Measures every method with every kind of large packets on one host.
fn large(args: &LargeOptions) -> anyhow::Result<ExitCode> {
    let beside = args.stream.iter().copied().map(BulkTraffic::from).collect();
    let words = vec![
        "paper (VATC, IV-C, its hardware): the link is saturated, what waits waits in the NIC, and VATC has little or \
         no advantage"
            .to_owned(),
        "an emulated NIC has no speed of its own: what is saturated there is the CPU".to_owned(),
    ];
    execute("vatc-network", beside, None, &args.common, words)
}

fn execute(
    experiment: &'static str,
    beside: Vec<BulkTraffic>,
    total_rate: Option<u32>,
    common: &Common,
    words: Vec<String>,
) -> anyhow::Result<ExitCode> {
    let hardware = &common.host.hardware;
    let methods = hardware.methods(&common.methods, defaults(hardware.hardware.is_some()), &METHODS.names())?;
    let intervals = common.intervals.clone();
    let plan = VatcPlan { methods, beside, total_rate, intervals, requests: common.requests };
    let measure = |ground: PlannedHost<'_>| measure(&plan, ground);
    let (found, mut notes) = common.host.measure(HEADERS, measure)?;
    notes.extend(words);
    notes.push(
        "a request comes from outside and is answered in the VM; the paper's comes from the VM and is answered \
         outside: both ways pass the host in either"
            .to_owned(),
    );
    Measured { experiment, seed: 1, found, notes }.report(&common.output)
}

/// Figures 6 and 7.
#[derive(Debug)]
pub(super) struct Vatc;

impl Experiment for Vatc {
    command!(
        "vatc",
        "VATC IV-B: a periodic RT request beside up to four VMs that send small packets by the same NIC",
        SmallOptions,
        small
    );

    fn cases(&self) -> Vec<(String, Load)> {
        let of = |beside: BulkTraffic| {
            METHODS.iter().map(move |method| (Case { method, beside, interval: None }.to_string(), beside.load()))
        };
        (0..=STREAMS_MAX).map(BulkTraffic::Small).flat_map(of).collect()
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, Figure::Lost, Figure::P50, P95, Figure::Max]
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("p95-by-streams", "vatc: p95 with four streams at most 1.1 times that with none")
                .of(P95, flooded("vatc-4"), idle("vatc-0"))
                .at_most(1.1),
            goal("p95-vs-prio", "vatc: p95 with four streams at least 40 times below prio's")
                .of(P95, flooded("prio-4"), flooded("vatc-4"))
                .at_least(40.0),
        ]
    }
}

/// Figure 12.
#[derive(Debug)]
pub(super) struct VatcNetwork;

impl Experiment for VatcNetwork {
    command!(
        "vatc-network",
        "VATC IV-C (Fig. 12): the same beside one VM that sends large packets, by UDP or TCP",
        LargeOptions,
        large
    );

    fn cases(&self) -> Vec<(String, Load)> {
        let of = |beside: BulkTraffic| {
            METHODS.iter().map(move |method| (Case { method, beside, interval: None }.to_string(), beside.load()))
        };
        [BulkTraffic::Small(0), BulkTraffic::LargeUdp, BulkTraffic::Tcp].into_iter().flat_map(of).collect()
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, Figure::Lost, Figure::P50, P95, Figure::Max]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_what_the_driver_takes() {
        for (text, usecs) in [("0", 0), ("10", 10), ("10000", 10_000), ("dynamic", 1), ("conservative", 3)] {
            assert_eq!(text.parse::<Interval>().map(Interval::rx_usecs), Ok(usecs), "{text}");
        }
        // 1 to 4 are e1000e's names for its modes; it refuses 5 to 9.
        for text in ["1", "9", "10001", "-1", "adaptive", ""] {
            assert!(text.parse::<Interval>().is_err(), "{text}");
        }
    }

    #[test]
    fn no_method_that_is_measured_by_default_is_refused() {
        assert!(defaults(true).iter().all(|method| refused_on_hardware(method).is_none()));
        assert!(defaults(false).iter().chain(defaults(true)).all(|method| METHODS.iter().any(|name| name == *method)));
    }

    #[test]
    fn every_interval_is_a_case_and_has_its_name() {
        let methods = vec!["prio".to_owned(), "vatc".to_owned()];
        let mut plan = VatcPlan {
            methods,
            beside: vec![BulkTraffic::Small(0), BulkTraffic::Tcp],
            total_rate: None,
            intervals: Vec::new(),
            requests: 1,
        };
        let names = |plan: &VatcPlan| plan.cases().iter().map(Case::to_string).collect::<Vec<_>>();
        assert_eq!(names(&plan), ["prio-0", "vatc-0", "prio-tcp", "vatc-tcp"]);
        (plan.intervals, plan.beside) = (vec![Interval::Micros(10), Interval::Dynamic], vec![BulkTraffic::Small(1)]);
        assert_eq!(names(&plan), ["prio-1-10us", "vatc-1-10us", "prio-1-dynamic", "vatc-1-dynamic"]);
    }
}
