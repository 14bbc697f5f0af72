//! A fuzz input that is consumed from its front.

/// The remaining bytes. Missing bytes are read as zeros.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// A whole input.
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    /// The next `N` bytes.
    pub(crate) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let (now, later) = self.0.split_at(N.min(self.0.len()));
        taken[..now.len()].copy_from_slice(now);
        self.0 = later;
        taken
    }

    /// The next byte.
    pub(crate) fn byte(&mut self) -> u8 {
        let [byte] = self.bytes();
        byte
    }

    /// The next 8 bytes as a little-endian number.
    pub(crate) fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// Whether no bytes are left.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All remaining bytes.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }
}
