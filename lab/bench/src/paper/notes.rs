//! Statements of the papers about experiments, beyond the rows of their tables, as sentences.

use ontime_figures::number::count;

use super::shape::*;

impl Outsourcing {
    /// The statement of a figure about an application's response times.
    pub fn application(&self, figure: &str, load: &str, versus: TwoMethods) -> String {
        let TwoMethods { vs_threaded, vs_exclusive } = versus;
        format!(
            "paper (Access'18, {figure}; {}; {load}): p99 of outsourcing {} % lower than threaded's, {} % lower than \
             exclusive's; \
             the rest is a plot",
            self.host, -vs_threaded, -vs_exclusive
        )
    }
}

impl Rtvirt {
    /// The statement about periodic applications.
    pub fn periodic(&self) -> String {
        let Self { host, slack_us, table2, bandwidth, .. } = self;
        let Cpus { needed, rtxen, rtvirt } = table2.cpus;
        let beyond = |cpus: f64| (cpus / needed - 1.0) * 100.0;
        format!(
            "paper (RTVirt, Tables 1 and 2, Figure 3; {host}; slack of {slack_us} us a vCPU, no bulk work): {} \
             deadlines missed by either in all groups; for NH-Dec's {needed} CPUs RTVirt allocates {rtvirt} (+{:.1} %) \
             and RT-Xen {rtxen} (+{:.1} %); over all groups RTVirt {} % less than RT-Xen, and {} % less than RT-Xen \
             sets aside; the rest is a plot",
            bandwidth.deadline_misses,
            beyond(rtvirt),
            beyond(rtxen),
            -bandwidth.allocated_vs_rtxen_percent,
            -bandwidth.claimed_vs_rtxen_percent
        )
    }

    /// The statement about video applications.
    pub fn video(&self) -> String {
        let VideoClaims { load, rtas, rtas_with_misses, worst_miss_percent } = &self.video;
        format!(
            "paper (RTVirt, section 4.3, Figure 4; {}; {load}): of {rtas} applications {rtas_with_misses} missed a \
             deadline, the worst {worst_miss_percent} % of its",
            self.host
        )
    }

    /// The statement about 100 applications.
    pub fn scale(&self) -> String {
        let Table6 { multi_rta_vms: multi, single_rta_vms: single } = &self.table6;
        format!(
            "paper (RTVirt, section 4.5, Tables 5 and 6; {}, 100 s): 10 VMs with 10 applications missed {} % of their \
             deadlines at an overhead of {} % of a CPU (RT-Xen: {} %), 100 VMs with one {} % at {} % (RT-Xen: {} %); \
             overhead is schedule() and context switches",
            self.host,
            multi.rtvirt.miss_percent.unwrap_or_default(),
            multi.rtvirt.percent,
            multi.rtxen.percent,
            single.rtvirt.miss_percent.unwrap_or_default(),
            single.rtvirt.percent,
            single.rtxen.percent
        )
    }

    /// The statement about the hypercall.
    pub fn registration(&self) -> String {
        let Self { host, hypercall_us, .. } = self;
        format!(
            "paper (RTVirt, sections 4.3 and 4.5; {host}): a hypercall, by which a guest asks, takes {hypercall_us} us"
        )
    }

    /// The statement about memcached.
    pub fn memcached(&self) -> String {
        let Memcached { load, fig5a_p99_9_us: a, fig5b_p99_9_us: b, fig5b_video_worst_miss_percent: missed, .. } =
            &self.memcached;
        let [budget, period] = self.memcached.reservation_us.rtvirt;
        format!(
            "paper (RTVirt, section 4.4; {}; {load}; RTVirt with {budget} us in {period} us): p99.9 alone RTVirt {} \
             us, RT-Xen {}, Credit {}; beside 19 VMs that never idle on 2 CPUs RTVirt {}, RT-Xen A {} (twice the \
             bandwidth), B {}, Credit {}; beside 10 video VMs and 4 more memcached on 15 CPUs RTVirt {}, RT-Xen A {}, \
             B {}, Credit {}; of the worst video VM's deadlines RTVirt missed {} %, Credit {} %, RT-Xen {} %",
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

    /// The statement about sporadic applications.
    pub fn sporadic(&self) -> String {
        let Sporadic { requests, gap_ms: [least, most], deadline_misses, network_p99_9_us } = self.sporadic;
        format!(
            "paper (RTVirt, section 4.2): {requests} requests to each application over the network, at random {least} \
             to {most} ms apart: {deadline_misses} deadlines missed by either; p99.9 of the network's delay, not \
             counted: {network_p99_9_us} us"
        )
    }
}

impl XenArm {
    /// The statement about Xen-ARM.
    pub fn note(&self) -> String {
        let Self { host, load, over_1ms_percent: over, immediate_percent_by_cpu_load: immediate, .. } = self;
        format!(
            "paper (Xen-ARM, {host}; {load}): over 1 ms under the credit scheduler {} % from the driver domain to the \
             guest and {} % before it, the slowest {} ms; with strict priorities {} %, and {} of a million; handled at \
             once {} % at 20 % CPU load, {} % at 80 %; the rest is plots",
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

impl Pvsched {
    /// The statement about cyclictest in a guest.
    pub fn note(&self) -> String {
        let Self { load, guest_max_us: ByPriority { vanilla, dynamic_boost, static_rt }, .. } = self;
        format!(
            "RFC pvsched (lkml, 13 December 2023; {load}): cyclictest's maximum in the guest {} us with Linux's \
             defaults, {} us with vCPUs boosted on request, {} us with vCPUs always at an RT priority, beside which \
             the host's is {} us",
            count(*vanilla),
            count(*dynamic_boost),
            count(*static_rt),
            count(self.host_max_us_beside_static_rt)
        )
    }
}
