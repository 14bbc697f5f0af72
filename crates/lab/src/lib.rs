//! An emulated host in a box, for machines without usable KVM and for CI.
