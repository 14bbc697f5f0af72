//! Frames that the link between the host and clients inside drops.

use ontime_lab::{Lab, LabError, Link, Way};

use crate::schema::LINK;

/// The directions of both networks.
const WAYS: [(&str, Way); 4] =
    [("rt", Way::ToHost), ("rt", Way::ToClients), ("bulk", Way::ToHost), ("bulk", Way::ToClients)];

/// Frames that each of [`WAYS`] has dropped so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LinkLosses {
    link: Option<Link>,
    dropped: [u64; WAYS.len()],
}

impl LinkLosses {
    pub(super) fn read(lab: &Lab) -> Result<Self, LabError> {
        let mut losses = Self { link: lab.link(), ..Self::default() };
        for (dropped, (nic, way)) in losses.dropped.iter_mut().zip(WAYS) {
            *dropped = lab.dropped(nic, way)?;
        }
        Ok(losses)
    }

    /// Notes for results: the link, and what it has dropped since an earlier reading. None without a link.
    pub(crate) fn notes(&self, before: &Self) -> Vec<String> {
        let Some(link) = self.link else { return Vec::new() };
        let since = self.dropped.iter().zip(before.dropped).map(|(now, then)| now.saturating_sub(then));
        let each: Vec<String> = since
            .zip(WAYS)
            .filter(|(dropped, _)| *dropped > 0)
            .map(|(dropped, (nic, way))| format!("{dropped} {} on {nic}0", way.description()))
            .collect();
        let dropped = if each.is_empty() { "none".to_owned() } else { each.join(", ") };
        vec![format!("{LINK}{link}"), format!("frames that the link dropped meanwhile: {dropped}")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_and_what_it_dropped_meanwhile_are_noted() {
        let losses = |dropped| LinkLosses { link: Some("1gbit,5us,256".parse().unwrap()), dropped };
        let notes = losses([1, 0, 9, 4]).notes(&losses([1, 0, 2, 3]));
        assert_eq!(notes[0], "link of each NIC (rate, delay, frames that may wait): 1gbit,5us,256");
        assert_eq!(
            notes[1],
            "frames that the link dropped meanwhile: 7 to the host on bulk0, 1 to the clients on bulk0"
        );
        let none = losses([1; 4]).notes(&losses([1; 4]));
        assert!(none[1].ends_with("meanwhile: none"), "{none:?}");
        assert!(LinkLosses::default().notes(&LinkLosses::default()).is_empty());
    }
}
