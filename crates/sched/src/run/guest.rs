//! What a pacer reads of a vCPU's guest: its next deadlines, by its [`Reader`], and its claims from its offer. No
//! allocation.

use crate::admit::{Offer, Reserved};
use crate::guest_page::{LINE, Published};
use crate::model::{Next, Share};
use crate::run::reader::{Reader, Unread};

/// Reads what a vCPU's guest publishes and claims.
#[derive(Debug, Default)]
pub(crate) struct GuestReader {
    /// The guest's next deadlines.
    published: Option<Published>,
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
            // Generation 0: the first check reads the claim.
            claims: vcpu.offer.clone().map(|offer| Claims { offer, vcpu: vcpu.vcpu, seen: 0 }),
        }
    }

    /// The next deadline after `after`, ns, that the guest publishes. None also if it cannot be read now.
    pub(crate) fn next_deadline(&mut self, after: u64, reader: &mut Reader) -> Option<Next> {
        let published = self.published.as_mut()?;
        let (file, offset) = published.place(after)?;
        let mut line = [0; LINE];
        let read = reader.read_at(file, offset, &mut line);
        if read != Err(Unread::Busy) {
            published.charge(after, reader.excess());
        }
        if read == Ok(LINE) { published.next(&line, after) } else { None }
    }

    /// The vCPU's share, if its guest has made a new claim since the last call. No system call.
    pub(crate) fn claimed(&mut self) -> Option<Share> {
        let Claims { offer, vcpu, seen } = self.claims.as_mut()?;
        let held = offer.ledger.new_claim(*vcpu, seen)?;
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
