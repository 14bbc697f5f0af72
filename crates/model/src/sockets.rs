//! The table of a VM's sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use loom::thread;

use crate::abi::ONTIME_SOCK_INDEX_BITS;
use crate::request::{Family, Protocol};
use crate::table::Table;

/// Two ids with the same slot. `fd_of` gives the descriptor of each.
const FIRST: u32 = 0;
const SECOND: u32 = 1 << ONTIME_SOCK_INDEX_BITS;

fn fd_of(id: u32) -> i32 {
    if id == FIRST { 10 } else { 20 }
}

/// A channel closes the first socket, another thread opens the second one in the same slot, and the worker uses `id`.
pub fn table(id: u32) {
    let table = Arc::new(Table::new(1));
    // The closed descriptor. It is not part of the model: loom runs one thread at a time.
    let closed = Arc::new(AtomicI32::new(-1));
    let open = |table: &Table, id| {
        let index = table.claim(id)?;
        table.set(index, fd_of(id), Family::V4, Protocol::Tcp, 1);
        Ok::<_, crate::abi::Errno>(index)
    };
    let index = open(&table, FIRST).unwrap();
    let channel = {
        let (table, closed) = (Arc::clone(&table), Arc::clone(&closed));
        thread::spawn(move || {
            let Some(_held) = table.hold(index) else { return };
            assert_eq!(table.take(index), Some(fd_of(FIRST)));
            closed.store(fd_of(FIRST), Ordering::SeqCst);
        })
    };
    let guest = {
        let table = Arc::clone(&table);
        thread::spawn(move || open(&table, SECOND).is_ok())
    };
    if let Ok((socket, _held)) = table.held(id) {
        assert_eq!((socket.id, socket.fd, socket.owner), (id, fd_of(id), 1));
        assert_ne!(closed.load(Ordering::SeqCst), socket.fd, "closed while it is held");
    }
    channel.join().unwrap();
    guest.join().unwrap();
    assert!(table.open() <= 1);
}

/// The ids for [`table`].
pub const IDS: [u32; 2] = [FIRST, SECOND];
