//! The worker that waits for room in a channel's ring.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering as Real};

use loom::thread;

use crate::atomic::{AtomicUsize, Ordering};
use crate::room::Room;

/// Room for orders.
const RING: usize = 1;

/// A ring of one producer and one consumer, with the orderings of `rtrb`.
struct Ring {
    head: AtomicUsize,
    tail: AtomicUsize,
}

impl Ring {
    fn push(&self) -> bool {
        let tail = self.tail.load(Ordering::Relaxed);
        let has_room = tail - self.head.load(Ordering::Acquire) < RING;
        if has_room {
            self.tail.store(tail + 1, Ordering::Release);
        }
        has_room
    }

    fn pop(&self) -> bool {
        let head = self.head.load(Ordering::Relaxed);
        let has_order = self.tail.load(Ordering::Acquire) > head;
        if has_order {
            self.head.store(head + 1, Ordering::Release);
        }
        has_order
    }
}

/// The worker sends one more order than there is room for, as `orders.rs` does, while the channel's thread takes all
/// that it finds, `takes` times. If the worker is left with an order, it was woken.
pub fn room(takes: usize) {
    let ring = Arc::new(Ring { head: AtomicUsize::new(0), tail: AtomicUsize::new(0) });
    let room = Arc::new(Room::new());
    while ring.push() {}
    // A bell of the kernel's: no part of the model.
    let rung = Arc::new(AtomicBool::new(false));
    let channel = {
        let (ring, room, rung) = (Arc::clone(&ring), Arc::clone(&room), Arc::clone(&rung));
        thread::spawn(move || {
            for _ in 0..takes {
                let mut took = false;
                while ring.pop() {
                    took = true;
                }
                if took && room.made() {
                    rung.store(true, Real::SeqCst);
                }
            }
        })
    };
    let mut sent = ring.push();
    if !sent {
        room.wait();
        sent = ring.push();
    }
    channel.join().unwrap();
    assert!(sent || rung.load(Real::SeqCst), "the worker waits for ever");
}
