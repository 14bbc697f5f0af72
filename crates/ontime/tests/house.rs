//! The product does not depend on the laboratory: no crate of the laboratory is linked into `ontime`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test ends by panicking"
)]

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

/// The laboratory's crates.
const LABORATORY: [&str; 2] = ["ontime-bench", "ontime-lab"];

/// Crates of the workspace that are linked into a crate, with every feature.
fn below(packages: &[Value], name: &str, found: &mut BTreeSet<String>) {
    let package = packages.iter().find(|package| package["name"] == name).unwrap();
    for dependency in package["dependencies"].as_array().unwrap() {
        let name = dependency["name"].as_str().unwrap();
        // Only dependencies inside the workspace have a path; those for tests have the kind "dev".
        if !dependency["path"].is_null() && dependency["kind"] != "dev" && found.insert(name.to_owned()) {
            below(packages, name, found);
        }
    }
}

#[test]
fn no_crate_of_the_laboratory_is_below_the_product() {
    let asked = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .output()
        .unwrap();
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
    let metadata: Value = serde_json::from_slice(&asked.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let mut product = BTreeSet::new();
    below(packages, "ontime", &mut product);
    assert!(product.contains("ontime-tenants"), "the walk found only {product:?}");
    for crate_of_lab in LABORATORY {
        assert!(packages.iter().any(|package| package["name"] == crate_of_lab), "{crate_of_lab} was renamed");
        assert!(!product.contains(crate_of_lab), "{crate_of_lab} is below ontime: {product:?}");
    }
    // The same walk does find the laboratory's dependencies.
    let mut laboratory = BTreeSet::new();
    below(packages, "ontime-bench", &mut laboratory);
    assert!(laboratory.contains("ontime-lab"), "{laboratory:?}");
}
