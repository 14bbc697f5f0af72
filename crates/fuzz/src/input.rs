//! An input, taken from its front.

/// The bytes that are left. Where there are too few, zeros are taken.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of an input.
    pub fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    /// The next so many bytes.
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let (now, later) = self.0.split_at(N.min(self.0.len()));
        taken[..now.len()].copy_from_slice(now);
        self.0 = later;
        taken
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let [byte] = self.bytes();
        byte
    }

    /// The next 8 bytes as a number.
    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All that is left.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}
