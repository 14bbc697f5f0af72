//! Generates the Rust side of the guest-host ABI from its only definition, kernel/abi/ontime_abi.h.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let header = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("../../kernel/abi/ontime_abi.h");
    println!("cargo::rerun-if-changed={}", header.display());
    let out = PathBuf::from(std::env::var("OUT_DIR")?).join("abi.rs");
    bindgen::Builder::default()
        .header(header.display().to_string())
        .allowlist_type("ontime_.*")
        .allowlist_var("ONTIME_.*")
        .derive_default(true)
        .derive_eq(true)
        .generate_comments(false)
        .layout_tests(true)
        .generate()?
        .write_to_file(out)?;
    Ok(())
}
