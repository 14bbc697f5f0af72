//! Data that a device process shares with the daemon or sends to it. The device process serves a guest and may be
//! hostile.

use std::os::fd::AsFd;
use std::sync::OnceLock;

use ontime::fuzzing::take_lines;
use ontime_plan::{Bandwidth, Nanos};
use ontime_sched::account::Share;
use ontime_sched::ledger::{Budget, Ledger, NOTHING, Table, VCPUS};
use ontime_sched::published::{self, Follow, LINE};
use ontime_sched::{Ask, Asks, GuestNeed, Offer, SchedConfig, Settled, settle};
use ontime_tenants::config::Text;
use ontime_tenants::{
    Class, ClassSource, CpuSet, Kind, Level, LibvirtTuning, Namer, Policy, Tenant, TenantThread, ThreadId, ThreadRole,
};

use crate::input::Input;

const MS: u64 = 1_000_000;

/// The ledger's page. Input: a vCPU, a generation, a budget and a period; then the page as written by the device
/// process.
///
/// Property: a reported change has another generation than before and the page's values; the resulting share of a vCPU
/// is at most the declared plus the offered bandwidth, with no shorter period; after a withdrawal nothing can be
/// claimed; offers of the daemon and claims within them are read back unchanged, and a claim beyond the offer fails.
pub fn ledger(data: &[u8]) {
    let mut input = Input::new(data);
    let (vcpu, mut seen) = (u32::from(input.byte()), input.word());
    let asked = Budget { budget: input.word(), period: input.word() };
    let Ok(ledger) = Ledger::create() else { return };
    let page = input.rest();
    rustix::io::pwrite(ledger.file(), &page[..page.len().min(4096)], 0).unwrap();

    let before = seen;
    let declared = Share { bandwidth: Bandwidth::ppm(300_000), period: 10 * MS };
    let offered = Budget { budget: 2 * MS, period: 5 * MS };
    let offer = Offer { ledger: ledger.clone(), declared, most: Bandwidth::ppm(500_000), offered };
    if let Some(held) = ledger.new_claim(vcpu, &mut seen) {
        assert!(seen != before && seen == ledger.generation() && (vcpu as usize) < VCPUS);
        assert_eq!(ledger.table(seen)[vcpu as usize], held);
        if let Some(share) = offer.share(&held) {
            let most = declared.bandwidth + offered.bandwidth();
            assert!(share.bandwidth <= most, "{held:?} gives {share:?}");
            assert!(share.period >= offered.period.min(declared.period), "{held:?} gives {share:?}");
        }
    } else {
        assert_eq!(seen, before);
    }

    let copy = Ledger::accept(ledger.file().as_fd().try_clone_to_owned().unwrap()).unwrap();
    copy.withdraw();
    assert_eq!(ledger.claim(&NOTHING), None);
    let mut offers: Table = NOTHING;
    offers[0] = offered;
    let mut held = NOTHING;
    held[0] = Budget { budget: MS, period: 10 * MS };
    let generation = copy.offer(&offers, &held);
    assert_eq!((copy.generation(), copy.table(generation)), (generation, held));
    let mut wanted = NOTHING;
    wanted[0] = asked;
    // At most 2 ms in 5 ms, in no shorter period.
    let fits = asked.budget == 0
        || asked.period >= offered.period
            && u128::from(asked.budget) * u128::from(offered.period)
                <= u128::from(offered.budget) * u128::from(asked.period);
    let claimed = ledger.claim(&wanted);
    assert_eq!(claimed.is_some(), fits, "{asked:?}");
    let now = claimed.unwrap_or(generation);
    assert_eq!(copy.table(now)[0], if fits { asked } else { held[0] });
    let mut unseen = now.wrapping_add(1);
    assert_eq!(copy.new_claim(0, &mut unseen), Some(copy.table(now)[0]));
}

/// The next deadlines that a guest publishes. Input: the vCPU's period, a time, the clocks' difference, then the lines
/// that a pacer reads.
///
/// Property: each deadline is later than the time after which it is requested; in the long run slices end for the vCPU
/// at most eight times per period; tasks are sorted by their deadlines.
pub fn published(data: &[u8]) {
    /// As in `guest_page.rs`.
    const CUTS: u64 = 8;
    const BURST: u64 = 16;
    const SLICE_MIN: u64 = ontime_plan::dpwrap::SLICE_MIN.0;
    let mut input = Input::new(data);
    let period = input.word();
    // The kernel's monotonic clock starts at 0 and never gets near its maximum.
    let start = input.word() >> 2;
    let ahead = i128::from(i64::from_le_bytes(input.bytes()));
    let distance = (period / CUTS).max(SLICE_MIN);
    let mut follow = Follow::new(period);
    let (mut now, mut ends) = (start, 0);
    while !input.is_empty() {
        let line: [u8; LINE] = input.bytes();
        let tasks = published::tasks(&line, i128::from(start) + ahead);
        assert!(tasks.len() <= published::ENTRIES && tasks.is_sorted_by_key(|task| task.deadline_in));
        assert!(tasks.iter().all(|task| task.period > 0));
        let Some(next) = follow.next(&line, now, ahead) else { continue };
        assert!(next.at > now, "{} is not after {now}", next.at);
        now = next.at.max(now.saturating_add(SLICE_MIN));
        ends += 1;
    }
    assert!(ends <= (now - start) / distance + BURST + 1, "{ends} ends in {} ns of {distance} ns", now - start);
}

fn vm(name: &str, pid: i32) -> Tenant {
    let thread = |number: u32| TenantThread {
        id: ThreadId { pid, tid: pid * 100 + number as i32, start_time: pid as u64 },
        role: ThreadRole::Vcpu(number),
        comm: format!("CPU {number}/KVM"),
        policy: Policy::BULK,
        affinity: "0-1".to_owned(),
        last_cpu: 0,
        libvirt: LibvirtTuning::default(),
    };
    Tenant {
        name: name.to_owned(),
        uuid: None,
        kind: Kind::Qemu,
        owner: 0,
        namer: Namer::User(0),
        process: ThreadId { pid, tid: pid, start_time: pid as u64 },
        cgroup: None,
        class: Class::Rt(Level::HIGHEST),
        class_source: ClassSource::Default,
        runtime_cap: 0.95,
        threads: (0..2).map(thread).collect(),
        vnics: Vec::new(),
        attached: Vec::new(),
    }
}

/// Two VMs with two vCPUs each; both VMs may request more.
fn host() -> &'static (SchedConfig, [Tenant; 2], CpuSet) {
    static HOST: OnceLock<(SchedConfig, [Tenant; 2], CpuSet)> = OnceLock::new();
    HOST.get_or_init(|| {
        let mut config = SchedConfig::default();
        let reservation = |name: &str| {
            format!("[[reservation]]\nname = \"{name}\"\nbudget = \"1ms\"\nperiod = \"10ms\"\ndeadlines = 0.6\n")
        };
        config.add(&Text::new("sched.toml", reservation("hostile") + &reservation("other"))).unwrap();
        (config, [vm("hostile", 10), vm("other", 20)], (0..2).collect())
    })
}

/// Lines of a device process. Input: the bytes from its socket.
///
/// Property: a parsed line is the same after writing and parsing it again. For all requests, the admitted bandwidth
/// fits the host, is well-formed, and is at most what sched.toml allows. Both VMs keep their declared bandwidth. The
/// reasons for refusals are fit for a log.
pub fn asks(data: &[u8]) {
    let mut buffer = data.to_vec();
    let Ok(asked) = take_lines(&mut buffer) else { return };
    assert!(!buffer.contains(&b'\n') || asked.is_empty());
    let (config, tenants, online) = host();
    let mut before = Settled::default();
    for one in asked.iter().take(4) {
        let mut line = serde_json::to_vec(one).unwrap();
        line.push(b'\n');
        assert_eq!(take_lines(&mut line).unwrap(), std::slice::from_ref(one));
        let need = |need: &ontime_sockets::deadlines::Need| GuestNeed {
            vcpu: need.vcpu,
            budget: Nanos(need.budget),
            period: Nanos(need.period),
        };
        let needs: Vec<GuestNeed> = one.vcpus.iter().map(need).collect();
        let ask = Ask { needs: needs.clone(), published: one.next.is_some(), page: None, taking: None };
        let _ = ask.held();
        let asks = Asks::from([("hostile".to_owned(), ask)]);
        let settled = settle(config, tenants, online, &before, &asks);
        admitted(&settled);
        let _ = settled.has("hostile", &needs);
        before = settled;
    }
}

fn admitted(settled: &Settled) {
    assert!(settled.total() <= Bandwidth::cpus(2), "{settled:?}");
    for name in ["hostile", "other"] {
        let vcpus = || settled.vcpus.iter().filter(|vcpu| vcpu.tenant == name);
        assert_eq!(vcpus().count(), 2, "{name} lost what is declared: {:?}", settled.refused);
        for vcpu in vcpus() {
            assert!(vcpu.bandwidth >= Bandwidth::ppm(100_000), "{vcpu:?}");
            // 0.1 declared and 0.6 allowed, plus rounding.
            assert!(vcpu.bandwidth <= Bandwidth::ppm(701_000), "{vcpu:?}");
            assert!(vcpu.period.0 > 0 && vcpu.budget <= vcpu.period, "{vcpu:?}");
        }
        assert!(name == "hostile" || vcpus().all(|vcpu| vcpu.guest.is_none()));
    }
    for refused in &settled.refused {
        assert_eq!(refused.tenant, "hostile", "{refused:?}");
        assert!(!refused.why.contains(char::is_control) && refused.why.len() < 1000, "{}", refused.why);
    }
}
