//! What a pacer reads of a vCPU's guest: its next deadlines, by its [`Reader`], and its claims from its offer. No
//! allocation.
//!
//! Having the reader read takes two changes of thread. So what was read is kept until the guest may have written: until
//! a thread of its VM runs ([`GuestReader::forget`]).

use crate::admit::{Offer, Reserved};
use crate::guest_page::{LINE, Published};
use crate::model::{Next, Share};
use crate::run::reader::{Reader, Unread};

/// Reads what a vCPU's guest publishes and claims.
#[derive(Debug, Default)]
pub(crate) struct GuestReader {
    /// The guest's next deadlines.
    published: Option<Published>,
    /// What was read of its entries.
    line: Option<[u8; LINE]>,
    /// The guest's claims from its offer.
    claims: Option<Claims>,
}

/// The claims of a vCPU's guest, as its pacer reads them.
#[derive(Debug)]
struct Claims {
    offer: Offer,
    vcpu: u32,
    /// The generation that was read last.
    seen: u64,
}

impl GuestReader {
    /// For this vCPU.
    pub(crate) fn of(vcpu: &Reserved) -> Self {
        Self {
            published: vcpu.page.clone().map(|page| Published::new(page, vcpu.vcpu, vcpu.period.0)),
            line: None,
            // Generation 0: the first check reads the claim.
            claims: vcpu.offer.clone().map(|offer| Claims { offer, vcpu: vcpu.vcpu, seen: 0 }),
        }
    }

    /// The next deadline after `after`, ns, that the guest publishes. None also if it cannot be read now. `copied`: its
    /// entries, if the kernel has copied them.
    pub(crate) fn next_deadline(
        &mut self,
        after: u64,
        copied: Option<[u8; LINE]>,
        reader: &mut Reader,
    ) -> Option<Next> {
        let published = self.published.as_mut()?;
        self.line = self.line.or(copied);
        if let Some(line) = &self.line {
            return published.next(line, after);
        }
        let (file, offset) = published.place(after)?;
        let mut line = [0; LINE];
        let read = reader.read_at(file, offset, &mut line);
        if read != Err(Unread::Busy) {
            published.charge(after, reader.excess());
        }
        self.line = (read == Ok(LINE)).then_some(line);
        self.line.as_ref().and_then(|line| published.next(line, after))
    }

    /// The guest may have written since the last call.
    pub(crate) fn forget(&mut self) {
        self.line = None;
    }

    /// The vCPU's share, if its guest has made a new claim since the last call. No system call.
    pub(crate) fn claimed(&mut self) -> Option<Share> {
        let Claims { offer, vcpu, seen } = self.claims.as_mut()?;
        let held = offer.ledger.new_claim(*vcpu, seen)?;
        // A claim comes with a change of what the guest publishes. At `Beyond` its thread is not read.
        self.line = None;
        // None for a claim beyond the offer, which only a faulty or hostile device process writes.
        let share = offer.share(&held)?;
        self.published.iter_mut().for_each(|published| published.set_period(share.period));
        Some(share)
    }

    /// Takes over what another reader of the same vCPU's guest knows.
    pub(crate) fn take_over(&mut self, before: &GuestReader) {
        if let (Some(published), Some(before)) = (&mut self.published, &before.published) {
            published.take_over(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use ontime_base::clock::now;
    use ontime_plan::{Bandwidth, Nanos};
    use rustix::time::{ClockId, clock_gettime};

    use super::*;
    use crate::guest_page::{self, Page};
    use crate::ledger::{Ledger, NOTHING};
    use crate::run::reader::unplaced;

    #[test]
    fn a_page_is_read_again_only_after_its_guest_may_have_written() {
        let period = 4_000_000_000;
        let memory = File::from(rustix::fs::memfd_create("vm", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(16_384).unwrap();
        let real = clock_gettime(ClockId::Realtime);
        let soon = u64::try_from(real.tv_sec).unwrap() * 1_000_000_000 + period / 2;
        let publish = |deadline| memory.write_all_at(&guest_page::line(1, &[(deadline, period)]), 4096).unwrap();
        publish(soon);
        let (after, mut reader) = (now(), unplaced());
        // A page that is not read in time is not read again for a while.
        let (mut guest, first) = loop {
            let Ok(page) = Page::new(memory.try_clone().unwrap(), 4096) else {
                println!("SKIPPED: memory may be swapped out");
                return;
            };
            let published = Some(Published::new(page, 0, period));
            let mut guest = GuestReader { published, ..GuestReader::default() };
            reader.begin_check();
            if let Some(next) = guest.next_deadline(after, None, &mut reader) {
                break (guest, next.at);
            }
            std::thread::yield_now();
        };
        publish(soon + 1_000_000);
        assert_eq!(guest.next_deadline(after, None, &mut reader).map(|next| next.at), Some(first));
        guest.forget();
        reader.begin_check();
        let again = guest.next_deadline(after, None, &mut reader);
        assert!(again.is_none_or(|next| next.at == first + 1_000_000), "{again:?}, not 1 ms after {first}");
    }

    #[test]
    fn a_claim_makes_the_page_be_read_again() {
        let ledger = Ledger::create().unwrap();
        let period = Nanos(10_000_000);
        let share = Share { bandwidth: Bandwidth::ppm(100_000), period: period.0 };
        let offer = Offer::new(ledger.clone(), share, share.bandwidth, period);
        let claims = Some(Claims { offer, vcpu: 0, seen: 0 });
        let mut guest = GuestReader { claims, ..GuestReader::default() };
        for anew in [true, false] {
            if anew {
                ledger.offer(&NOTHING, &NOTHING);
            }
            guest.line = Some([0; LINE]);
            assert_eq!((guest.claimed().is_some(), guest.line.is_none()), (anew, anew));
        }
    }
}
