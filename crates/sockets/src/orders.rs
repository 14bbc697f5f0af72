//! The worker's orders to the channels. No order is lost, even if a channel's thread does not run for long and its ring
//! is full: orders that do not fit wait here, in order, until the ring has room. The real-time thread only checks a
//! flag for this.
//!
//! A guest cannot make the waiting list grow without bound: a socket is moved once at a time; at most one `Look` per
//! socket waits; every other order belongs to a pending call of the guest, or to a reset, which withdraws waiting
//! orders.

use std::collections::{BTreeSet, VecDeque};

use rtrb::PushError;

use crate::abi::Errno;
use crate::mail::{Mail, Order, ROOM, Released, WorkerEnd};

/// Orders to all channels.
#[derive(Debug, Default)]
pub(crate) struct Orders(Vec<Outbox>);

/// Orders to one channel.
#[derive(Debug)]
struct Outbox {
    end: WorkerEnd,
    /// Orders that did not fit into the ring.
    waiting: VecDeque<Order>,
    /// Sockets with a `Look` in `waiting`.
    looks: BTreeSet<u32>,
    /// Sent orders whose answers are outstanding. The answer ring has room for them.
    asked: usize,
}

impl Orders {
    /// By channel, starting with channel 1.
    pub(crate) fn new(ends: Vec<WorkerEnd>) -> Self {
        let outbox = |end| Outbox { end, waiting: VecDeque::new(), looks: BTreeSet::new(), asked: 0 };
        Self(ends.into_iter().map(outbox).collect())
    }

    fn outbox(&mut self, channel: u32) -> Option<&mut Outbox> {
        self.0.get_mut(channel.checked_sub(1)? as usize)
    }

    /// Sends an order to a channel, now or as soon as the ring has room.
    ///
    /// # Errors
    /// EINVAL if the channel does not exist.
    pub(crate) fn send(&mut self, mail: &Mail, channel: u32, order: Order) -> Result<(), Errno> {
        let outbox = self.outbox(channel).ok_or(Errno(libc::EINVAL))?;
        match order {
            Order::Look { index } if !outbox.looks.insert(index) => {}
            order => outbox.waiting.push_back(order),
        }
        outbox.flush(mail, channel);
        Ok(())
    }

    /// Sends orders that waited for room.
    pub(crate) fn flush(&mut self, mail: &Mail) {
        for (outbox, channel) in self.0.iter_mut().zip(1..) {
            outbox.flush(mail, channel);
        }
    }

    /// The next answer.
    pub(crate) fn released(&mut self) -> Option<Released> {
        self.0.iter_mut().find_map(|outbox| {
            let released = outbox.end.released.pop().ok()?;
            outbox.asked = outbox.asked.saturating_sub(1);
            Some(released)
        })
    }

    /// Withdraws the orders that were not sent yet.
    pub(crate) fn withdraw(&mut self, channel: u32) -> Vec<Order> {
        self.outbox(channel).map_or_else(Vec::new, |outbox| {
            outbox.looks.clear();
            outbox.waiting.drain(..).collect()
        })
    }
}

impl Outbox {
    fn flush(&mut self, mail: &Mail, channel: u32) {
        if self.waiting.is_empty() {
            return;
        }
        let mut sent = self.push();
        if !self.waiting.is_empty() {
            // Either the channel sees the flag after it made room, or this second attempt finds the room.
            mail.await_room(channel);
            sent |= self.push();
        }
        if sent {
            mail.ring(channel);
        }
    }

    /// Moves waiting orders into the ring. Returns whether any was sent.
    fn push(&mut self) -> bool {
        let mut sent = false;
        while let Some(order) = self.waiting.pop_front() {
            let answered = matches!(order, Order::Release { .. } | Order::Forget { .. });
            if answered && self.asked == ROOM {
                self.waiting.push_front(order);
                break;
            }
            let look = if let Order::Look { index } = order { Some(index) } else { None };
            match self.end.orders.push(order) {
                Ok(()) => {
                    sent = true;
                    self.asked += usize::from(answered);
                    if let Some(index) = look {
                        self.looks.remove(&index);
                    }
                }
                Err(PushError::Full(order)) => {
                    self.waiting.push_front(order);
                    break;
                }
            }
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;

    use super::*;

    fn rung(mail: &Mail, channel: u32) -> bool {
        // SAFETY: the bell lives as long as `mail`.
        let bell = unsafe { BorrowedFd::borrow_raw(mail.bell(channel)) };
        rustix::io::read(bell, &mut [0; 8]).is_ok()
    }

    #[test]
    fn what_does_not_fit_waits_in_its_order_and_the_worker_is_told_of_room() {
        let mail = Mail::new(1).unwrap();
        let mut orders = Orders::new(mail.take_worker().unwrap().channels);
        let mut end = mail.take_channel(1).unwrap();
        assert_eq!(orders.send(&mail, 2, Order::Look { index: 0 }), Err(Errno(libc::EINVAL)));
        let all = 3 * ROOM as u32;
        for index in 0..all {
            orders.send(&mail, 1, Order::Adopt { index }).unwrap();
            for _ in 0..3 {
                // One `Look` is sent, however many are requested in the meantime.
                orders.send(&mail, 1, Order::Look { index: all }).unwrap();
            }
        }
        assert!(orders.0[0].waiting.len() <= all as usize + 1);
        let (mut adopted, mut looks) = (Vec::new(), 0);
        while adopted.len() < all as usize {
            assert!(rung(&mail, 1), "it is told of orders");
            let mut took = 0;
            while let Ok(order) = end.orders.pop() {
                match order {
                    Order::Adopt { index } => adopted.push(index),
                    _ => looks += 1,
                }
                took += 1;
            }
            assert!(took > 0);
            mail.made_room(1);
            let more = !orders.0[0].waiting.is_empty();
            assert_eq!(rung(&mail, 0), more, "who waits is told of room, and nobody else");
            orders.flush(&mail);
        }
        assert_eq!(adopted, (0..all).collect::<Vec<_>>());
        assert!(looks > 0);
    }

    #[test]
    fn answers_have_room() {
        let mail = Mail::new(1).unwrap();
        let mut orders = Orders::new(mail.take_worker().unwrap().channels);
        let mut end = mail.take_channel(1).unwrap();
        let all = 3 * ROOM as u32;
        for ticket in 0..all {
            orders.send(&mail, 1, Order::Release { id: 0, ticket, force: true }).unwrap();
        }
        let mut answered = Vec::new();
        while answered.len() < all as usize {
            // The worker does not run until no more orders arrive.
            while let Ok(Order::Release { ticket, .. }) = end.orders.pop() {
                end.released.push(Released { ticket, result: Ok(()) }).unwrap();
                orders.flush(&mail);
            }
            while let Some(released) = orders.released() {
                answered.push(released.ticket);
            }
            orders.flush(&mail);
        }
        assert_eq!(answered, (0..all).collect::<Vec<_>>());
        orders.send(&mail, 1, Order::Forget { ticket: 0 }).unwrap();
        assert!(orders.withdraw(1).is_empty(), "it was sent");
    }
}
