//! Every target with its corpus and with mutations of the corpus: the coverage of `cargo test` without a fuzzer.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use ontime_fuzz::TARGETS;

/// Number of mutations of each target's corpus, unless the environment variable `MUTATIONS` is set.
const MUTATIONS: usize = 2_000;
/// The longest input, bytes.
const LONGEST: usize = 4_096;
/// The most inputs per target in the corpus.
const INPUTS: usize = 15;

/// Marsaglia's xorshift64: the same inputs on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound.max(1)
    }

    /// One to eight changes of an input: bits, bytes, numbers at the limits of their range, pieces of other inputs.
    fn mutate(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = inputs[self.below(inputs.len())].clone();
        for _ in 0..=self.below(8) {
            let at = self.below(bytes.len() + 1);
            let end = (at + 1 + self.below(16)).min(bytes.len());
            match self.below(8) {
                0 | 1 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                2 if at < bytes.len() => bytes[at] = self.below(256) as u8,
                3 if at + 4 <= bytes.len() => {
                    let edge = [0, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX, 0xffff, 0x1_0000][self.below(7)];
                    bytes[at..at + 4].copy_from_slice(&edge.to_le_bytes());
                }
                4 => drop(bytes.drain(at..end)),
                5 => {
                    let piece = bytes[at..end].to_vec();
                    bytes.splice(at..at, piece);
                }
                6 => {
                    let other = &inputs[self.below(inputs.len())];
                    let from = self.below(other.len() + 1);
                    let piece = &other[from..(from + self.below(64)).min(other.len())];
                    bytes.splice(at..end, piece.iter().copied());
                }
                _ => {
                    let marks = b"\"'<>[]{}=,:\n\0-9/";
                    bytes.insert(at, marks[self.below(marks.len())]);
                }
            }
        }
        bytes.truncate(LONGEST);
        bytes
    }
}

fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// Prints the input that caused a panic.
struct About<'a>(&'a str, &'a [u8]);

impl Drop for About<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self(name, input) = *self;
            let path = std::env::temp_dir().join(format!("ontime-fuzz-{name}"));
            let kept = fs::write(&path, input).is_ok();
            eprintln!("{name}: {:?}", String::from_utf8_lossy(input));
            if kept {
                eprintln!("the input is in {}", path.display());
            }
        }
    }
}

fn run(name: &str) {
    let target = ontime_fuzz::target(name).unwrap();
    let seeds = corpus(name);
    let mut inputs = vec![Vec::new()];
    for (_, seed) in seeds {
        let about = About(name, &seed);
        target(&seed);
        drop(about);
        inputs.push(seed);
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mutations = std::env::var("MUTATIONS").ok().and_then(|number| number.parse().ok()).unwrap_or(MUTATIONS);
    for _ in 0..mutations {
        let input = random.mutate(&inputs);
        let about = About(name, &input);
        target(&input);
        drop(about);
    }
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            run(stringify!($name));
        })*

        #[test]
        fn every_target_has_a_test_and_a_small_corpus() {
            assert_eq!(TARGETS.map(|(name, _)| name).as_slice(), [$(stringify!($name)),*].as_slice());
            for (name, _) in TARGETS {
                let seeds = corpus(name);
                assert!((1..=INPUTS).contains(&seeds.len()), "{name}: {} inputs", seeds.len());
                for (path, seed) in seeds {
                    assert!(seed.len() <= LONGEST, "{}: {} bytes", path.display(), seed.len());
                }
            }
        }
    };
}

tests! {
    ring call control ledger published asks api proc cmdline cgroup libvirt qmp trace analysis netlink journal
    tenants_toml host_toml daemon_toml sched_toml sockets_toml plan_toml limits_toml
}
