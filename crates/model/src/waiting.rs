//! The worker that waits for room in a channel's ring.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering as Real};

use loom::thread;

use crate::atomic::{AtomicUsize, Ordering};
use crate::room::Room;

/// Capacity of the ring of orders.
const RING: usize = 1;

/// A single-producer, single-consumer ring with the memory orderings of `rtrb`.
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

/// The worker sends one more order than the ring can hold, as `orders.rs` does. Meanwhile the channel's thread takes
/// all orders that it finds, `takes` times. If the worker still has an order at the end, it must have been woken.
pub fn room(takes: usize) {
    let ring = Arc::new(Ring { head: AtomicUsize::new(0), tail: AtomicUsize::new(0) });
    let room = Arc::new(Room::new());
    while ring.push() {}
    // A bell (eventfd) of the kernel. It is not part of the model.
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
