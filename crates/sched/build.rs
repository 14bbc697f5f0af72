//! With feature `sched-ext`: compiles the BPF scheduler. Needs clang.

use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "src/ext/scheduler.bpf.c";

fn main() {
    println!("cargo:rerun-if-changed={SOURCE}");
    println!("cargo:rerun-if-env-changed=CLANG");
    if std::env::var_os("CARGO_FEATURE_SCHED_EXT").is_none() {
        return;
    }
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let target = PathBuf::from(variable("OUT_DIR")).join("scheduler.bpf.o");
    // libbpf's headers come with libbpf-sys, the kernel's with the C library.
    let compiled = Command::new(&clang)
        .args(["-g", "-O2", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3", "-D__TARGET_ARCH_x86"])
        .args([
            "-I",
            &variable("DEP_BPF_INCLUDE"),
            "-I",
            &format!("/usr/include/{}-linux-gnu", variable("CARGO_CFG_TARGET_ARCH")),
        ])
        .args(["-c", SOURCE, "-o"])
        .arg(&target)
        .status();
    let why = match compiled {
        Ok(status) if status.success() => return,
        Ok(status) => format!("{clang} ended with {status}"),
        Err(error) => {
            format!("{clang}: {error}; Debian: apt-get install clang libelf-dev zlib1g-dev; $CLANG names another one")
        }
    };
    println!("cargo::error=feature sched-ext: {SOURCE} could not be compiled: {why}");
}
