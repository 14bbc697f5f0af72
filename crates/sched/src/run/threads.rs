//! The vCPU threads of a schedule, by number.

use crate::model::{Counts, Next, Place, Share, Threads};
use crate::run::reader::Reader;
use crate::run::vcpu::VcpuThread;

/// vCPU threads; None: the thread had ended when it was to be opened.
#[derive(Debug, Default)]
pub(crate) struct VcpuThreads(pub Vec<Option<VcpuThread>>);

impl VcpuThreads {
    /// Takes over what `old` knows of the threads that are in both.
    pub(crate) fn take_over(&mut self, old: &VcpuThreads) {
        for vcpu in self.0.iter_mut().flatten() {
            if let Some(before) = old.0.iter().flatten().find(|before| before.is_of(vcpu)) {
                vcpu.guest.take_over(&before.guest);
            }
        }
    }

    /// Whether this thread is among them.
    pub(crate) fn has(&self, vcpu: &VcpuThread) -> bool {
        self.0.iter().flatten().any(|one| one.is_of(vcpu))
    }

    /// Moves the threads for which `stays` does not hold to a place.
    pub(crate) fn place_others(&mut self, stays: impl Fn(&VcpuThread) -> bool, place: Place) {
        for vcpu in self.0.iter_mut().flatten().filter(|vcpu| !stays(vcpu)) {
            // If the thread has ended, or the change is not permitted, nothing changes.
            if vcpu.is_there() {
                let _ = vcpu.set_place(place);
            }
        }
    }
}

/// The vCPU threads as a pacer sees them, with its reader.
#[derive(Debug)]
pub(crate) struct Seen<'a> {
    pub vcpus: &'a mut VcpuThreads,
    pub reader: &'a mut Reader,
    /// Whether they all stay on the pacer's CPU. The CPU time of a thread that runs on another one is known up to a
    /// tick late, and so is whether its guest may have written.
    pub stay: bool,
}

impl Seen<'_> {
    fn get(&mut self, vcpu: usize) -> Option<&mut VcpuThread> {
        self.vcpus.0.get_mut(vcpu)?.as_mut()
    }
}

impl Threads for Seen<'_> {
    fn read(&mut self, vcpu: usize) -> Option<Counts> {
        self.get(vcpu)?.read().ok()
    }

    fn is_asleep(&mut self, vcpu: usize) -> bool {
        let thread = self.vcpus.0.get(vcpu).and_then(Option::as_ref);
        thread.is_none_or(|thread| thread.is_asleep(self.reader))
    }

    fn next_deadline(&mut self, vcpu: usize, after: u64) -> Option<Next> {
        let thread = self.vcpus.0.get_mut(vcpu)?.as_mut()?;
        thread.next_deadline(after, self.stay, self.reader)
    }

    fn claimed(&mut self, vcpu: usize) -> Option<Share> {
        self.get(vcpu)?.guest.claimed()
    }

    fn set_place(&mut self, vcpu: usize, place: Place) -> Option<Counts> {
        self.get(vcpu)?.set_place(place).ok()
    }
}
