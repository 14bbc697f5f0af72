//! The counters' two BPF programs, as the kernel's verifier takes them (Documentation/bpf/standardization). They are
//! assembled here: a compiler for BPF is no part of a Rust toolchain, and they have a few dozen instructions.
//!
//! Both find a thread's counter by its number. At a switch of threads (tracepoint `sched_switch`) the first one takes
//! over what the ending thread has run, as the kernel has just counted it, and adds the time since the last event to
//! what the next thread has waited; at a wake-up (`sched_wakeup`) the second one notes that the thread waits from now
//! on. The kernel runs them with the lock of the CPU's run queue held, so no two of them change one thread's counter at
//! the same time.
//!
//! When a vCPU's thread leaves its CPU, the first program also copies what its guest publishes. The address is one of
//! the thread's own process, whose memory is the present one. The copy waits for nothing: memory that is not there
//! gives an error. A process that lays slow memory (a device's) there has its copies ended.
//!
//! The kernel does not run a program inside itself: a wake-up by an interrupt within the few instructions of another
//! wake-up is missed. Its thread counts as asleep until it runs.

use super::layout::{ADDRESS, BYTES, COPIED, COUNTERS, LINE_AT, RAN, STATE_BITS, State, WAITED, WORD};
use crate::guest_page::LINE;

/// What the programs need of the running kernel and of their maps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    /// Offsets in `struct task_struct`, bytes: of `pid`, `__state` and `se.sum_exec_runtime`.
    pub(crate) pid: i16,
    pub(crate) state: i16,
    pub(crate) runtime: i16,
    /// File descriptors of the maps: counters by thread number, and the counters.
    pub(crate) threads: i32,
    pub(crate) counters: i32,
}

/// Registers. R0 has a result, R1 to R5 have arguments and are lost at calls, R10 is the end of the stack.
const R0: u8 = 0;
const R1: u8 = 1;
const R2: u8 = 2;
const R3: u8 = 3;
const R4: u8 = 4;
const R5: u8 = 5;
/// The arguments of the tracepoint.
const CONTEXT: u8 = 6;
const NOW: u8 = 7;
const TASK: u8 = 8;
const STACK: u8 = 10;
/// Operations (include/uapi/linux/bpf.h, bpf_common.h); those that end in X take a register, the others a number.
const LOAD32: u8 = 0x61;
const LOAD64: u8 = 0x79;
const STORE32: u8 = 0x63;
const STORE64: u8 = 0x7b;
const MOVE: u8 = 0xb7;
const MOVE_X: u8 = 0xbf;
const MOVE32_X: u8 = 0xbc;
const ADD: u8 = 0x07;
const ADD_X: u8 = 0x0f;
const SUBTRACT_X: u8 = 0x1f;
const AND: u8 = 0x57;
const OR_X: u8 = 0x4f;
const SHIFT_LEFT: u8 = 0x67;
const SHIFT_RIGHT: u8 = 0x77;
const JUMP: u8 = 0x05;
const IF_EQUAL: u8 = 0x15;
const IF_NOT: u8 = 0x55;
const IF_AT_LEAST: u8 = 0x35;
const IF_GREATER_X: u8 = 0x2d;
const IF_AT_LEAST_X: u8 = 0x3d;
const IF_ANY_BIT: u8 = 0x45;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const LOAD_WIDE: u8 = 0x18;
const EXCHANGE64: u8 = 0xdb;
/// Sources of [`LOAD_WIDE`]: a map, and the address of an array's first value.
const OF_MAP: u8 = 1;
const OF_VALUE: u8 = 2;
/// Of [`EXCHANGE64`], which orders memory.
const EXCHANGE: i32 = 0xe1;
/// Functions of the kernel.
const LOOK_UP: i32 = 1;
const TIME: i32 = 5;
const READ_USER_MEMORY: i32 = 112;
/// A copy that takes longer, ns, is of no memory, or of such that is slow: it is the last one.
const COPY_MAX: i32 = 20_000;
/// States of a thread (include/linux/sched.h): asleep, stopped or traced; dead.
const SLEEPS: i32 = 0x1 | 0x4 | 0x8;
const DEAD: i32 = 0x10 | 0x20 | 0x80;

/// A place in a program that jumps go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Label(usize);

#[derive(Debug, Default)]
struct Assembler {
    code: Vec<u64>,
    /// Where each label is.
    labels: Vec<usize>,
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    fn emit(&mut self, operation: u8, to: u8, from: u8, offset: i16, number: i32) {
        let [low, high] = offset.to_le_bytes();
        let [a, b, c, d] = number.to_le_bytes();
        self.code.push(u64::from_le_bytes([operation, to | from << 4, low, high, a, b, c, d]));
    }

    fn number(&mut self, operation: u8, to: u8, number: i32) {
        self.emit(operation, to, 0, 0, number);
    }

    fn register(&mut self, operation: u8, to: u8, from: u8) {
        self.emit(operation, to, from, 0, 0);
    }

    fn load(&mut self, operation: u8, to: u8, from: u8, offset: i16) {
        self.emit(operation, to, from, offset, 0);
    }

    fn store(&mut self, operation: u8, to: u8, offset: i16, from: u8) {
        self.emit(operation, to, from, offset, 0);
    }

    fn wide(&mut self, to: u8, source: u8, map: i32) {
        self.emit(LOAD_WIDE, to, source, 0, map);
        self.emit(0, 0, 0, 0, 0);
    }

    fn label(&mut self) -> Label {
        self.labels.push(0);
        Label(self.labels.len() - 1)
    }

    fn here(&mut self, label: Label) {
        if let Some(place) = self.labels.get_mut(label.0) {
            *place = self.code.len();
        }
    }

    fn jump(&mut self, operation: u8, register: u8, number: i32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.number(operation, register, number);
    }

    fn jump_x(&mut self, operation: u8, register: u8, other: u8, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.register(operation, register, other);
    }

    /// The instructions, with all jumps to their labels.
    fn finish(mut self) -> Vec<u64> {
        self.number(MOVE, R0, 0);
        self.number(EXIT, 0, 0);
        for (at, label) in &self.jumps {
            let to = self.labels.get(label.0).copied().unwrap_or_default();
            // A jump counts from the next instruction; the programs are far shorter than the range of an i16.
            let distance = (to as i16).wrapping_sub(*at as i16 + 1);
            if let Some(code) = self.code.get_mut(*at) {
                *code |= u64::from(distance as u16) << 16;
            }
        }
        self.code
    }

    /// Keeps the context and the time.
    fn begin(&mut self) {
        self.register(MOVE_X, CONTEXT, R1);
        self.number(CALL, 0, TIME);
        self.register(MOVE_X, NOW, R0);
    }

    /// Finds the counter of the thread in this argument of the tracepoint: [`R1`] has its address, [`R2`] the time of
    /// its last event, [`R3`] its state. A thread without one, or whose counter has ended, goes on at `without`.
    fn find(&mut self, needs: &Needs, argument: i16, without: Label) {
        self.load(LOAD64, TASK, CONTEXT, 8 * argument);
        self.load(LOAD32, R1, TASK, needs.pid);
        self.store(STORE32, STACK, -4, R1);
        self.wide(R1, OF_MAP, needs.threads);
        self.register(MOVE_X, R2, STACK);
        self.number(ADD, R2, -4);
        self.number(CALL, 0, LOOK_UP);
        self.jump(IF_EQUAL, R0, 0, without);
        self.load(LOAD32, R0, R0, 0);
        self.jump(IF_AT_LEAST, R0, COUNTERS as i32, without);
        self.number(SHIFT_LEFT, R0, BYTES.trailing_zeros() as i32);
        self.wide(R1, OF_VALUE, needs.counters);
        self.register(ADD_X, R1, R0);
        self.load(LOAD64, R2, R1, offset(WORD));
        self.register(MOVE_X, R3, R2);
        self.number(AND, R3, (1 << STATE_BITS) - 1);
        self.jump(IF_EQUAL, R3, State::Ended as i32, without);
        self.number(SHIFT_RIGHT, R2, STATE_BITS);
    }

    /// Adds the time since the last event to what the thread has waited.
    fn add_wait(&mut self) {
        let skip = self.label();
        // The clocks of two CPUs may differ by a little.
        self.jump_x(IF_GREATER_X, R2, NOW, skip);
        self.register(MOVE_X, R5, NOW);
        self.register(SUBTRACT_X, R5, R2);
        self.load(LOAD64, R0, R1, offset(WAITED));
        self.register(ADD_X, R0, R5);
        self.store(STORE64, R1, offset(WAITED), R0);
        self.here(skip);
    }

    /// Copies what the guest publishes into the counter at [`R1`], or goes on at `without` where its address is not
    /// known.
    fn copy_line(&mut self, without: Label) {
        let [failed, in_time] = [(); 2].map(|()| self.label());
        self.load(LOAD64, R3, R1, offset(ADDRESS));
        self.jump(IF_EQUAL, R3, 0, without);
        self.register(MOVE_X, TASK, R1);
        self.number(ADD, R1, offset(LINE_AT).into());
        self.number(MOVE, R2, LINE as i32);
        self.number(CALL, 0, READ_USER_MEMORY);
        self.number(MOVE, R1, 0);
        self.jump(IF_NOT, R0, 0, failed);
        self.number(MOVE, R1, 1);
        self.here(failed);
        self.store(STORE64, TASK, offset(COPIED), R1);
        self.number(CALL, 0, TIME);
        self.register(MOVE_X, R1, NOW);
        self.number(ADD, R1, COPY_MAX);
        self.jump_x(IF_AT_LEAST_X, R1, R0, in_time);
        self.number(MOVE, R1, 0);
        self.store(STORE64, TASK, offset(ADDRESS), R1);
        self.here(in_time);
    }

    /// Stores the time and the state in [`R3`]. The times of the counter change after that: a reader that reads them
    /// first has no time twice.
    fn set_state(&mut self) {
        self.register(MOVE_X, R4, NOW);
        self.number(SHIFT_LEFT, R4, STATE_BITS);
        self.register(OR_X, R4, R3);
        self.emit(EXCHANGE64, R1, R4, offset(WORD), EXCHANGE);
    }
}

/// The offset of a counter's word, bytes.
fn offset(word: usize) -> i16 {
    (word * size_of::<u64>()) as i16
}

/// The program at `sched_switch`, whose arguments are whether the thread was preempted, the thread that ends, the next
/// one, and the state of the first (include/trace/events/sched.h; since Linux 5.18).
pub(crate) fn switch(needs: &Needs) -> Vec<u64> {
    let mut program = Assembler::default();
    let [next, store, end] = [(); 3].map(|()| program.label());
    program.begin();
    program.find(needs, 1, next);
    program.number(MOVE, R3, State::Waits as i32);
    program.load(LOAD64, R4, CONTEXT, 0);
    program.number(AND, R4, 0xff);
    program.jump(IF_NOT, R4, 0, store);
    program.load(LOAD64, R4, CONTEXT, 24);
    program.register(MOVE32_X, R4, R4);
    program.jump(IF_EQUAL, R4, 0, store);
    // One that a signal kept from sleeping has the argument of one that sleeps (until Linux 6.15).
    program.load(LOAD32, R5, TASK, needs.state);
    program.jump(IF_EQUAL, R5, 0, store);
    program.number(MOVE, R3, State::Ended as i32);
    program.jump(IF_ANY_BIT, R4, DEAD, store);
    program.number(MOVE, R3, State::Asleep as i32);
    program.jump(IF_ANY_BIT, R4, SLEEPS, store);
    program.number(MOVE, R3, State::Blocked as i32);
    program.here(store);
    program.set_state();
    program.load(LOAD64, R4, TASK, needs.runtime);
    program.store(STORE64, R1, offset(RAN), R4);
    program.copy_line(next);

    program.here(next);
    program.find(needs, 2, end);
    let [waited, runs] = [(); 2].map(|()| program.label());
    program.jump(IF_EQUAL, R3, State::Waits as i32, waited);
    program.number(MOVE, R3, State::Running as i32);
    program.set_state();
    program.jump(JUMP, 0, 0, runs);
    program.here(waited);
    program.number(MOVE, R3, State::Running as i32);
    program.set_state();
    program.add_wait();
    program.here(runs);
    program.here(end);
    program.finish()
}

/// The program at `sched_wakeup`, whose argument is the thread.
pub(crate) fn wakeup(needs: &Needs) -> Vec<u64> {
    let mut program = Assembler::default();
    let [waits, store, end] = [(); 3].map(|()| program.label());
    program.begin();
    program.find(needs, 0, end);
    program.jump(IF_EQUAL, R3, State::Asleep as i32, waits);
    program.jump(IF_EQUAL, R3, State::Blocked as i32, waits);
    // Of a thread without an event so far only the time changes, which tells `Counters::watch` that it woke.
    program.jump(IF_EQUAL, R3, State::Unknown as i32, store);
    program.jump(JUMP, 0, 0, end);
    program.here(waits);
    program.number(MOVE, R3, State::Waits as i32);
    program.here(store);
    program.set_state();
    program.here(end);
    program.finish()
}
