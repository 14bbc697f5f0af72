//! The RT guest's own CPU load of experiment `xen-arm`, and the times that belong to its requests.

use std::net::SocketAddr;
use std::time::Duration;

use crate::client::{self, ClientError};

/// Time from an answer to the next request, us: uniform, as in the paper.
pub(crate) const GAPS_US: (u64, u64) = (0, 40_000);
/// Delay from which the paper counts a spike, ns.
pub(crate) const SPIKE_NS: u64 = 1_000_000;
/// The guest's port for its load.
pub(crate) const PORT: u16 = 11_112;
/// Number of tries for an answer about the load, and the limit of the time of each.
const TRIES: u32 = 60;
const TRY: Duration = Duration::from_secs(2);

/// Sets the load in the RT guest at `address`. `go_on` is called before each try.
pub(crate) fn set<E: From<ClientError>>(
    address: SocketAddr,
    percent: u8,
    mut go_on: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    let failed = |source| ClientError::Socket { what: "set a receive timeout for", address, source };
    let socket = client::connected(address)?;
    socket.set_read_timeout(Some(TRY)).map_err(failed)?;
    let wanted = format!("load {percent}");
    let mut received = [0; 32];
    for _ in 0..TRIES {
        go_on()?;
        // The send fails while the guest is not up yet; then the next try follows.
        let _ = socket.send(percent.to_string().as_bytes());
        if let Ok(length) = socket.recv(&mut received) {
            if received.get(..length) == Some(wanted.as_bytes()) {
                return Ok(());
            }
        }
    }
    Err(ClientError::Told(format!("no answer from {address} about the RT guest's load in {TRIES} tries")).into())
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::thread;

    use super::*;

    #[test]
    fn a_load_is_set_once_the_guest_says_so() {
        let guest = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = guest.local_addr().unwrap();
        let guest = thread::spawn(move || {
            let (mut asked, mut received) = (Vec::new(), [0; 32]);
            for answer in ["load 10", "load 40"] {
                let (length, from) = guest.recv_from(&mut received).unwrap();
                asked.push(String::from_utf8_lossy(&received[..length]).into_owned());
                guest.send_to(answer.as_bytes(), from).unwrap();
            }
            asked
        });
        let mut tries = 0;
        let set = set(address, 40, || {
            tries += 1;
            Ok::<(), ClientError>(())
        });
        set.unwrap();
        assert_eq!((guest.join().unwrap(), tries), (vec!["40".to_owned(); 2], 2));
        // A host that has ended ends the tries.
        assert!(super::set(address, 40, || Err(ClientError::Told("the host ended".to_owned()))).is_err());
    }
}
