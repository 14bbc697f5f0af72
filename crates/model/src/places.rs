//! The places of closed connections.

use std::sync::Arc;

use loom::thread;

use crate::free::Free;

/// With `most` free places, `takers` threads take one each. Concurrently a thread takes two and returns the first.
pub fn places(most: u32, takers: usize) {
    let free = Arc::new(Free::new(most));
    let takers: Vec<_> = (0..takers)
        .map(|_| {
            let free = Arc::clone(&free);
            thread::spawn(move || free.take())
        })
        .collect();
    let first = free.take();
    let second = free.take();
    first.into_iter().for_each(|first| free.give(first as u32));
    let mut taken: Vec<usize> = takers.into_iter().filter_map(|taker| taker.join().unwrap()).chain(second).collect();
    while let Some(left) = free.take() {
        assert!(taken.len() < most as usize, "a place is taken twice: {taken:?} and {left}");
        taken.push(left);
    }
    taken.sort_unstable();
    assert_eq!(taken, (0..most as usize).collect::<Vec<_>>(), "each place once");
}
