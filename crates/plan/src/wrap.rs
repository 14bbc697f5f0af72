//! The order of shares on the CPUs of a slice: McNaughton's wrap, maintained through sleeps and wake-ups.
//!
//! At a slice's start [`Wrap::assign`] places all shares, including those of sleepers, one after the other over the
//! CPUs. For this slice each vCPU is then *bound* to a CPU. Only a vCPU that *crosses* from one CPU to the next is
//! shared by these two. [`Wrap::lay_out`] turns this into segments, at the start and again at each sleep and wake-up.
//! On each CPU, without gaps:
//!
//! | first | then | last |
//! |---|---|---|
//! | `ahead`, of the vCPU crossing from the previous CPU | bound vCPUs | rest of the vCPU crossing to the next |
//!
//! A crossing vCPU never runs on both CPUs at once if `ahead` is at most the work on its own CPU before the rest. A
//! sleep shrinks that work, and `ahead` with it. A wake-up pushes the rest beyond the slice's end, and `ahead` grows by
//! that amount. Nothing else moves to another CPU.
//!
//! Why the layout always fits: let y be the time left in the slice. The vCPUs *inner* to a row of neighbouring CPUs are
//! those that are bound to one of them or cross between two of them. Claim: (1) the inner vCPUs' remaining time, plus
//! the kept time of sleepers and the time that crosses into the row (`ahead`), is at most y times the number of these
//! CPUs; (2) no vCPU has more than y.
//!
//! - Start: no share exceeds what pinned vCPUs leave of a shared CPU, so no vCPU crosses more than one border.
//! - Time passes: a CPU works on the incoming crossing vCPU, then on the bound ones, last on the outgoing crossing one.
//!   Inner work f becomes max(0, f - s) after time s, which is at most f (y - s) / y. The kept time and the right side
//!   shrink in the same proportion.
//! - A sleep moves time from "remaining" to "kept" and shrinks `ahead`, so the left side of (1) only decreases. A
//!   wake-up pushes the time beyond y over the border: the new `ahead` is that CPU's load minus y, and (1) for the row
//!   that begins with this CPU is (1) for the row after it. For a single CPU, (1) says that nothing is cut.

use crate::dpwrap::{Segment, VcpuId};
use crate::units::Nanos;

/// Segments by CPU, then by time.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    segments: Vec<Segment>,
    /// Per CPU: the end index of its segments.
    ends: Vec<usize>,
}

impl Layout {
    pub(crate) fn new(cpus: usize) -> Self {
        Self { segments: Vec::with_capacity(cpus), ends: vec![0; cpus] }
    }

    /// Reserves space for `vcpus`, each with one segment, and a second segment for one vCPU per CPU.
    pub(crate) fn reserve(&mut self, vcpus: usize) {
        let most = vcpus + self.ends.len();
        self.segments.reserve(most.saturating_sub(self.segments.len()));
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    pub(crate) fn cpu(&self, cpu: usize) -> &[Segment] {
        let from = cpu.checked_sub(1).map_or(0, |before| self.ends.get(before).copied().unwrap_or(0));
        let to = self.ends.get(cpu).copied().unwrap_or(from);
        self.segments.get(from..to).unwrap_or_default()
    }

    /// Removes a vCPU; the other segments stay unchanged.
    pub(crate) fn remove(&mut self, vcpu: VcpuId) {
        self.segments.retain(|segment| segment.vcpu != vcpu);
        let mut segments = self.segments.iter().enumerate().peekable();
        for (cpu, end) in (0_u32..).zip(&mut self.ends) {
            while segments.next_if(|(_, segment)| segment.cpu <= cpu).is_some() {}
            *end = segments.peek().map_or(self.segments.len(), |(at, _)| *at);
        }
    }
}

/// A CPU's part of the wrap.
#[derive(Debug, Clone, Copy, Default)]
struct Row {
    /// Whether vCPUs may cross to this CPU.
    shared: bool,
    /// End index of its vCPUs in `bound`.
    bound_end: usize,
    /// The vCPU that crosses from here to the next shared CPU.
    crossing: Option<u32>,
    /// That vCPU's time on the next CPU, ns; the rest runs here.
    ahead: u64,
}

/// The wrap of one slice.
#[derive(Debug, Clone)]
pub(crate) struct Wrap {
    rows: Vec<Row>,
    bound: Vec<u32>,
}

impl Wrap {
    pub(crate) fn new(cpus: usize) -> Self {
        Self { rows: vec![Row::default(); cpus], bound: Vec::new() }
    }

    /// Reserves space for `vcpus`.
    pub(crate) fn reserve(&mut self, vcpus: usize) {
        self.bound.reserve(vcpus.saturating_sub(self.bound.len()));
    }

    /// Distributes a slice of `length` ns over the CPUs. `pinned`: (CPU, vCPU), sorted; `claimed`: their time per CPU,
    /// ns; `free`: all other vCPUs with their shares, ns. A share that exceeds what `claimed` leaves of a shared CPU is
    /// cut.
    pub(crate) fn assign(
        &mut self,
        length: u64,
        shared: &[bool],
        pinned: &[(u32, u32)],
        claimed: &[u64],
        mut free: impl Iterator<Item = (u32, u64)>,
    ) {
        self.bound.clear();
        let mut pinned = pinned.iter().peekable();
        let mut over = 0;
        for (((cpu, row), shared), claimed) in (0_u32..).zip(&mut self.rows).zip(shared).zip(claimed) {
            while let Some((_, vcpu)) = pinned.next_if(|(home, _)| *home <= cpu) {
                self.bound.push(*vcpu);
            }
            *row = Row { shared: *shared, ..Row::default() };
            let mut room = if *shared { length.saturating_sub(*claimed).saturating_sub(over) } else { 0 };
            while room > 0 {
                let Some((vcpu, share)) = free.next() else { break };
                if share > room {
                    row.crossing = Some(vcpu);
                    row.ahead = share - room;
                } else if share > 0 {
                    self.bound.push(vcpu);
                }
                room = room.saturating_sub(share);
            }
            over = if *shared { row.ahead } else { over };
            row.bound_end = self.bound.len();
        }
    }

    /// Places `left` of every vCPU, ns, from `start` to `end`.
    pub(crate) fn lay_out(&mut self, start: u64, end: u64, left: impl Fn(u32) -> u64, layout: &mut Layout) {
        let Layout { segments, ends } = layout;
        segments.clear();
        let mut bound = self.bound.iter();
        let mut begin = 0;
        let mut coming = None;
        for ((cpu, row), cpu_end) in (0_u32..).zip(&mut self.rows).zip(ends) {
            let mut line = Line { cpu, at: start, end, segments };
            if let Some((vcpu, ahead)) = coming.take_if(|_| row.shared) {
                line.put(vcpu, ahead);
            }
            for vcpu in bound.by_ref().take(row.bound_end - begin) {
                line.put(*vcpu, left(*vcpu));
            }
            begin = row.bound_end;
            if let Some(vcpu) = row.crossing {
                let whole = left(vcpu);
                let pushed = whole.saturating_sub(end - line.at);
                row.ahead = row.ahead.max(pushed).min(line.at - start).min(whole);
                line.put(vcpu, whole - row.ahead);
                coming = Some((vcpu, row.ahead));
            }
            *cpu_end = segments.len();
        }
    }

    /// Reads the crossing parts from the layout at `now`. `left`: the remaining time of each vCPU, ns.
    pub(crate) fn take_up(&mut self, now: u64, left: impl Fn(u32) -> u64, layout: &Layout) {
        for (cpu, row) in self.rows.iter_mut().enumerate() {
            let Some(vcpu) = row.crossing else { continue };
            let rest = layout.cpu(cpu).last().filter(|last| last.vcpu.0 == vcpu).map_or(0, |last| last.left(now));
            row.ahead = left(vcpu).saturating_sub(rest);
        }
    }
}

/// The plan of one CPU while it is built.
struct Line<'a> {
    cpu: u32,
    at: u64,
    end: u64,
    segments: &'a mut Vec<Segment>,
}

impl Line<'_> {
    /// Adds `amount`, limited by the time left.
    fn put(&mut self, vcpu: u32, amount: u64) {
        let taken = amount.min(self.end - self.at);
        if taken > 0 {
            let (start, end) = (Nanos(self.at), Nanos(self.at + taken));
            self.segments.push(Segment { cpu: self.cpu, vcpu: VcpuId(vcpu), start, end });
            self.at += taken;
        }
    }
}
