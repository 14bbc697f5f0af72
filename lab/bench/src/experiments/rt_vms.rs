//! `rt-vms`: Access'18, IV-H (Figures 16 to 18). 1 to 100 RT VMs with an RT server each, beside two bulk VMs that
//! receive TCP at full speed.
//!
//! In: methods and numbers of VMs on one emulated host, whose clients' side is a CPU of the machine. Out: a
//! `MethodResult` for each, named `METHOD-VMS`: the response times of all VMs, those of each VM as metrics, bulk
//! throughput and CPU use ([`crate::several`]).

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitCode;

use ontime_cli::usage;
use ontime_lab::images::Images;

use super::{Emulated, Experiment, Measured, Methods, Output, command};
use crate::error::MeasureError;
use crate::goals::Figure::{self, Bulk, Own};
use crate::goals::{GoalSpec, goal, tcp};
use crate::host::{BULK_VMS, Host, RT_VM, Site, Vm, boot_vm};
use crate::schema::Load;
use crate::server::{self, Sockets, Wake, bring_module};
use crate::several::{SeveralServers, WORST_P99, WORST_SD};
use crate::trial::{self, CaseResults};

/// The methods, in the order of measurement: those whose VMs have a NIC first.
const METHODS: Methods = Methods(&[
    ("rt-default", "PREEMPT_RT kernel with its defaults, RT vCPUs and vNIC threads at FIFO"),
    ("threaded", "the paper's threaded interrupt handling, NAPI not threaded"),
    ("exclusive", "the paper's exclusive CPU for all RT VMs"),
    ("partitioned", "every NAPI threaded, one priority table for the whole path"),
    (OUTSOURCING, "as partitioned, and the VMs' sockets are the host's"),
]);
/// The method whose VMs have the host's sockets in place of a NIC.
const OUTSOURCING: &str = "outsourcing";
/// Numbers of RT VMs for which there are goals.
const COUNTS: [u8; 4] = [1, 10, 40, 100];
/// Requests to each VM at the start of each case that do not count.
const WARM_UP: u64 = 20;
/// A rule for all of the RT VMs.
const TENANTS: &str = "[[tenant]]\nname = \"rt-*\"\nclass = \"rt\"\nlevel = 0\n";

/// Name and address of RT VM `number`, from 1.
fn rt_vm(number: u8) -> (String, String) {
    (format!("rt-{number}"), Ipv4Addr::new(10, 1, 0, number.saturating_add(1)).to_string())
}

/// The servers of these VMs.
fn servers(count: u8) -> Vec<(String, SocketAddr)> {
    let server = |number: u8| {
        let address = IpAddr::from(Ipv4Addr::new(10, 1, 0, number.saturating_add(1)));
        (rt_vm(number).0, SocketAddr::new(address, server::SOCKPERF.port))
    };
    (1..=count).map(server).collect()
}

/// Name of a case in results.
fn name(method: &str, count: u8) -> String {
    format!("{method}-{count}")
}

/// The cases in order: VMs are booted once for all methods with a NIC, and once for outsourced sockets.
fn cases(args: &Options) -> Vec<(&'static str, u8, Load)> {
    let mut counts = args.vms.clone();
    counts.sort_unstable();
    counts.dedup();
    let asked = METHODS.in_order(&args.methods);
    let (sockets, nics): (Vec<_>, Vec<_>) = asked.partition(|method| *method == OUTSOURCING);
    let of = |methods: Vec<&'static str>| {
        let mut cases = Vec::new();
        for count in &counts {
            for method in &methods {
                cases.extend(args.loads.iter().map(|load| (*method, *count, *load)));
            }
        }
        cases
    };
    [of(nics), of(sockets)].concat()
}

/// The RT VMs that run.
#[derive(Debug, Default)]
struct Running {
    count: u8,
    outsourced: bool,
}

impl Running {
    /// Boots what is missing up to `count` VMs. VMs of the other kind are ended first.
    fn reach(&mut self, host: &mut Host, count: u8, outsourced: bool) -> Result<(), MeasureError> {
        if self.outsourced != outsourced {
            while self.count > 0 {
                server::stop_server(host, &rt_vm(self.count).0)?;
                self.count -= 1;
            }
            self.outsourced = outsourced;
        }
        if outsourced {
            let tables: String = (1..=count).map(|number| sockets(&rt_vm(number).0).table()).collect();
            host.shell(&format!("echo '{tables}' > /etc/ontime/sockets.toml"))?;
        }
        while self.count < count {
            let (name, address) = rt_vm(self.count + 1);
            let net = if outsourced { "sockets:rt" } else { "rt" };
            boot_vm(host.lab()?, &Vm { name: &name, net, address: &address, ..RT_VM })?;
            self.count += 1;
        }
        Ok(())
    }
}

fn sockets(vm: &str) -> Sockets<'_> {
    Sockets { vm, bind: server::SOCKPERF.bind, reach: "10.1.0.0/24", channels: 1, wake: Wake::Idle }
}

/// Boots the host and its VMs and measures every case. If a case fails, the remaining cases are measured while the host
/// lives.
fn measure(args: &Options, site: &Site, images: &Images) -> Result<CaseResults, MeasureError> {
    if args.outsources() {
        bring_module(site, images)?;
    }
    let [nics] = server::CONFIG;
    let config = [nics, ("tenants.toml", TENANTS)];
    let host = Host::start(site, images, &BULK_VMS, &config)?;
    let mut running = Running::default();
    trial::each(
        host,
        cases(args),
        |(method, count, load)| format!("{} ({})", name(method, *count), load.description()),
        |host, &(method, count, load)| {
            running.reach(host, count, method == OUTSOURCING)?;
            host.apply(match method {
                "rt-default" => "vanilla",
                OUTSOURCING => "partitioned",
                method => method,
            })?;
            let case = name(method, count);
            let several = SeveralServers {
                case: &case,
                label: &format!("{}; RT VMs: {count}", METHODS.description(method)),
                servers: &servers(count),
                load,
                bulk: &host.bulk(),
                requests: args.requests,
                warmup: WARM_UP,
                seed: args.seed,
            };
            several.run(host)
        },
    )
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Methods: rt-default, threaded, exclusive (needs two CPUs), partitioned, outsourcing
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',', default_value = "partitioned")]
    methods: Vec<String>,
    /// Numbers of RT VMs, 1 to 100; each takes 192 MiB of this machine's memory (the paper: up to 100)
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,10",
          value_parser = clap::value_parser!(u8).range(1..=100))]
    vms: Vec<u8>,
    /// What the bulk VMs receive: tcp (at full speed, as in the paper), small-packets, large-packets, none
    #[arg(long = "load", value_name = "LOAD", value_delimiter = ',', default_value = "tcp")]
    loads: Vec<Load>,
    /// Counted requests to each RT VM
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    requests: u64,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

impl Options {
    fn outsources(&self) -> bool {
        self.methods.iter().any(|method| method == OUTSOURCING)
    }

    /// The options with everything that this experiment always has. Refuses what it cannot have.
    fn checked(&self) -> anyhow::Result<Self> {
        let methods = METHODS.chosen(&self.methods)?;
        let emulated = self.emulated.clone();
        emulated.refuse_real_clock("rt-vms")?;
        let machine = emulated.machine();
        machine.check()?;
        if machine.cpus < 2 && methods.iter().any(|method| method == "exclusive") {
            usage!("exclusive keeps a CPU for the RT group, and this host has one: add --cpus 2");
        }
        Ok(Self { methods, emulated, ..self.clone() })
    }
}

/// Measures every method with every number of VMs on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let args = &args.checked()?;
    let most = args.vms.iter().copied().max().unwrap_or(1);
    let found = args.emulated.measure(args.outsources(), |site, images| {
        let site = site.with_room_for(u32::from(most) + BULK_VMS.len() as u32);
        measure(args, &site, images)
    })?;
    Measured { experiment: "rt-vms", seed: args.seed, found, notes: Vec::new() }.report(&args.output)
}

/// Figures 16 to 18, plots.
#[derive(Debug)]
pub(super) struct RtVms;

impl Experiment for RtVms {
    command!(
        "rt-vms",
        "Access'18 IV-H (Figs. 16 to 18): 1 to 100 RT VMs beside two bulk VMs that receive TCP at full speed",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        let of = |method| COUNTS.map(|count| name(method, count));
        METHODS.iter().flat_map(of).flat_map(|case| Load::ALL.map(|load| (case.clone(), load))).collect()
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::P99, Figure::Max, Figure::Sd, Bulk]
    }

    fn meaning(&self) -> &'static str {
        "Response times of all RT VMs together, then of each; worst p99 and worst sd: those of the VM with the highest."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("p99-of-100", "outsourcing, 100 RT VMs: no VM's p99 above 1.5 times that of a VM alone")
                .of(Own(WORST_P99), tcp("outsourcing-100"), tcp("outsourcing-1"))
                .at_most(1.5),
            goal("bulk-beside-100", "outsourcing, 100 RT VMs: bulk throughput at least 0.95 of that beside one")
                .of(Bulk, tcp("outsourcing-100"), tcp("outsourcing-1"))
                .at_least(0.95),
            goal("sd-of-40", "outsourcing, 40 RT VMs: no VM's SD above that of threaded's")
                .of(Own(WORST_SD), tcp("outsourcing-40"), tcp("threaded-40"))
                .at_most(1.0),
            goal("bulk-beside-40", "outsourcing, 40 RT VMs: bulk throughput at least 0.95 of that beside one (paper)")
                .of(Bulk, tcp("outsourcing-40"), tcp("outsourcing-1"))
                .at_least(0.95),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::options_of;

    fn options(words: &[&str]) -> Result<Options, String> {
        let options: Options = options_of(words).map_err(|error| error.to_string())?;
        options.checked().map_err(|error| error.to_string())
    }

    #[test]
    fn vms_are_booted_in_order_and_for_outsourced_sockets_at_last() {
        let options =
            options(&["--method", "outsourcing,partitioned", "--vms", "10,1,10", "--load", "tcp,none"]).unwrap();
        let cases: Vec<String> = cases(&options)
            .iter()
            .map(|(method, count, load)| format!("{} {}", name(method, *count), load.name()))
            .collect();
        assert_eq!(
            cases,
            [
                "partitioned-1 tcp",
                "partitioned-1 none",
                "partitioned-10 tcp",
                "partitioned-10 none",
                "outsourcing-1 tcp",
                "outsourcing-1 none",
                "outsourcing-10 tcp",
                "outsourcing-10 none",
            ]
        );
        assert!(options.emulated.machine().has_client_cpu() && options.outsources());
    }

    #[test]
    fn a_hundred_vms_have_addresses_and_one_rule() {
        let all = servers(100);
        assert_eq!(
            all.first().map(|(name, at)| (name.as_str(), at.to_string())),
            Some(("rt-1", "10.1.0.2:11111".into()))
        );
        assert_eq!(
            all.last().map(|(name, at)| (name.as_str(), at.to_string())),
            Some(("rt-100", "10.1.0.101:11111".into()))
        );
        assert!(all.iter().all(|(name, at)| name.starts_with("rt-") && at.ip().to_string() != "10.1.0.1"));
        assert!(sockets("rt-7").table().contains("[vm.rt-7]\nbind = [\"udp/11111\"]"));
    }

    #[test]
    fn what_it_cannot_have_is_refused_with_what_to_do() {
        for (words, said) in [
            (vec!["--method", "vanilla"], "not one of rt-default, threaded"),
            (vec!["--method", "exclusive"], "add --cpus 2"),
            (vec!["--clock", "real"], "leave out --clock real"),
            (vec!["--vms", "0"], "1..=100"),
            (vec!["--vms", "101"], "1..=100"),
            (vec!["--cpus", "8"], "1 to 7 CPUs, beside that of clients inside"),
            (vec!["--cpus", "0"], "1..=8"),
            (vec!["--requests", "0"], "1..=10000000"),
        ] {
            let error = options(&words).unwrap_err();
            assert!(error.contains(said), "{words:?}: {error}");
        }
        assert!(options(&["--method", "exclusive", "--cpus", "4"]).is_ok());
    }
}
