//! The structure of the source: no crate of the laboratory is linked into `ontime`, no files of a crate import each
//! other in a circle, and no condition needs a newer compiler than the one that is supported.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use syn::visit::Visit;
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree, Visibility};

/// The laboratory's crates.
const LABORATORY: [&str; 3] = ["ontime-bench", "ontime-lab", "ontime-lab-tests"];

/// The folders of the product's crates and of the laboratory's.
fn folders_of_crates() -> [PathBuf; 2] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    ["crates", "lab"].map(|folder| root.join(folder))
}

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

/// A module's path inside its crate.
type Module = Vec<String>;

/// Whether an item is compiled for tests only.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    let condition = |attribute: &Attribute| attribute.parse_args::<syn::Ident>().is_ok_and(|word| word == "test");
    attributes.iter().any(|attribute| attribute.path().is_ident("cfg") && condition(attribute))
}

/// The modules of a crate that have a file of their own, with what the files hold. Those for tests are left out.
fn modules(file: &Path, folder: &Path, module: Module, found: &mut BTreeMap<Module, syn::File>) {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    for item in &parsed.items {
        // A file of another crate (`#[path]`) is looked at there.
        let Item::Mod(ItemMod { attrs, ident, content: None, .. }) = item else { continue };
        if is_for_tests(attrs) || attrs.iter().any(|attribute| attribute.path().is_ident("path")) {
            continue;
        }
        let name = ident.to_string();
        let (own, inner) = (folder.join(format!("{name}.rs")), folder.join(&name));
        let file = if own.exists() { own } else { inner.join("mod.rs") };
        modules(&file, &inner, [module.clone(), vec![name]].concat(), found);
    }
    found.insert(module, parsed);
}

/// The paths that a file's items begin with `crate` or `super`. Re-exports and items for tests do not count.
struct Imports {
    /// The module in which the walk is: the file's, or one inside the file.
    here: Module,
    paths: BTreeSet<Module>,
}

impl Imports {
    fn path(&mut self, words: &[String]) {
        let ups = words.iter().take_while(|word| *word == "super").count();
        let base = match words.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("super") => self.here[..self.here.len().saturating_sub(ups)].to_vec(),
            _ => return,
        };
        self.paths.insert([base, words[ups.max(1)..].to_vec()].concat());
    }

    fn tree(&mut self, before: &[String], tree: &UseTree) {
        let with = |word: &syn::Ident| [before, &[word.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.tree(&with(&path.ident), &path.tree),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.tree(before, tree)),
            UseTree::Name(name) => self.path(&with(&name.ident)),
            UseTree::Rename(name) => self.path(&with(&name.ident)),
            UseTree::Glob(_) => self.path(before),
        }
    }
}

impl<'ast> Visit<'ast> for Imports {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Mod(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Const(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            _ => return syn::visit::visit_item(self, item),
        };
        if !is_for_tests(attributes) {
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.here.push(module.ident.to_string());
        syn::visit::visit_item_mod(self, module);
        self.here.pop();
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if matches!(item.vis, Visibility::Inherited) {
            self.tree(&[], &item.tree);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        if !is_for_tests(&variant.attrs) {
            syn::visit::visit_variant(self, variant);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let words: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.path(&words);
        syn::visit::visit_path(self, path);
    }
}

/// Which files a crate's files import. A file and those in its own folder are one unit: it may use what they have, and
/// they what it has, so its imports from them do not count.
fn imports(files: &BTreeMap<Module, syn::File>) -> BTreeMap<Module, BTreeSet<Module>> {
    let of = |(module, file): (&Module, &syn::File)| {
        let mut imports = Imports { here: module.clone(), paths: BTreeSet::new() };
        imports.visit_file(file);
        // The file that a path leads to is the one of its longest beginning that is a module.
        let file_of = |path: &Module| (0..=path.len()).rev().find_map(|end| files.get_key_value(&path[..end]));
        let found = imports.paths.iter().filter_map(file_of).map(|(to, _)| to.clone());
        let others = found.filter(|to| to != module && !to.starts_with(module));
        (module.clone(), others.collect())
    };
    files.iter().map(of).collect()
}

/// The files that are left if files without imports from others that are left are taken away, and files that no other
/// imports: all circles, and what lies between them.
fn circles(mut imports: BTreeMap<Module, BTreeSet<Module>>) -> BTreeMap<Module, BTreeSet<Module>> {
    loop {
        let before = imports.len();
        let left: BTreeSet<Module> = imports.keys().cloned().collect();
        let imported: BTreeSet<Module> = imports.values().flatten().cloned().collect();
        imports.values_mut().for_each(|to| to.retain(|to| left.contains(to)));
        imports.retain(|module, to| !to.is_empty() && imported.contains(module));
        if imports.len() == before {
            return imports;
        }
    }
}

#[test]
fn files_of_a_crate_import_each_other_in_no_circle() {
    let folders = folders_of_crates().into_iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    let mut seen = 0;
    for of in folders.map(|entry| entry.unwrap().path()) {
        let source = of.join("src");
        let Some(root) = ["lib.rs", "main.rs"].map(|name| source.join(name)).into_iter().find(|file| file.exists())
        else {
            continue;
        };
        let mut files = BTreeMap::new();
        modules(&root, &source, Vec::new(), &mut files);
        seen += files.len();
        let circles = circles(imports(&files));
        let shown: Vec<String> = circles
            .iter()
            .map(|(module, to)| {
                let to: Vec<String> = to.iter().map(|to| to.join("::")).collect();
                format!("  {} imports {}", module.join("::"), to.join(", "))
            })
            .collect();
        let of = of.display();
        assert!(shown.is_empty(), "{of}: move what two files need from each other to a third:\n{}", shown.join("\n"));
    }
    assert!(seen > 200, "the walk found only {seen} files");
}

#[test]
fn a_circle_is_seen_by_every_form_of_import() {
    let crate_of = |texts: &[(&str, &str)]| -> BTreeMap<Module, syn::File> {
        let module = |name: &str| name.split("::").filter(|word| !word.is_empty()).map(str::to_owned).collect();
        texts.iter().map(|(name, text)| (module(name), syn::parse_file(text).unwrap())).collect()
    };
    for (a, b, wanted) in [
        ("use crate::b::B;", "use super::a::{self, A};", 2),
        ("fn f() { crate::b::g() }", "struct S(crate::a::A);", 2),
        ("use crate::b::*;", "mod inner { use super::super::a::A; }", 2),
        ("use crate::b::B;", "pub use crate::a::A;", 0),
        ("use crate::b::B;", "#[cfg(test)] mod tests { use crate::a::A; }", 0),
        ("use crate::b::B;", "enum E { #[cfg(test)] Test(crate::a::A) }", 0),
        ("use crate::b::B;", "use std::fs;", 0),
        ("use crate::b::B;", "use crate::c::C;", 0),
    ] {
        let files = crate_of(&[("", "mod a; mod b; mod c;"), ("a", a), ("b", b), ("c", "")]);
        assert_eq!(circles(imports(&files)).len(), wanted, "{a} and {b}");
    }
    // A parent and its child.
    let files = crate_of(&[("", ""), ("a", "use self::b::B; use crate::a::b::C;"), ("a::b", "use super::A;")]);
    assert!(circles(imports(&files)).is_empty());
}

/// The conditions of a file in which `let` is a part of a longer condition. Rust 1.85 cannot compile these.
#[derive(Default)]
struct LetChains(usize);

impl<'ast> Visit<'ast> for LetChains {
    fn visit_expr_binary(&mut self, binary: &'ast syn::ExprBinary) {
        let sides = [&binary.left, &binary.right];
        self.0 += sides.into_iter().filter(|side| matches!(***side, syn::Expr::Let(_))).count();
        syn::visit::visit_expr_binary(self, binary);
    }
}

fn let_chains(text: &str) -> usize {
    let mut chains = LetChains::default();
    chains.visit_file(&syn::parse_file(text).unwrap());
    chains.0
}

/// The Rust files of a folder, without those that a build made.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn the_oldest_supported_compiler_knows_each_condition() {
    for (text, wanted) in [
        ("fn f() { if a && let Some(b) = c {} }", 1),
        ("fn f() { if let Some(b) = c && b {} }", 1),
        ("fn f() { while let Some(b) = c && let Some(d) = b {} }", 2),
        ("fn f() { if let Some(b) = c.filter(|c| *c && d) {} }", 0),
        ("fn f() { if matches!(a, b if c && d) {} }", 0),
    ] {
        assert_eq!(let_chains(text), wanted, "{text}");
    }
    let mut files = Vec::new();
    folders_of_crates().iter().for_each(|folder| sources(folder, &mut files));
    assert!(files.len() > 300, "the walk found only {} files", files.len());
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(let_chains(&text), 0, "{}: Rust 1.85 has no `let` in a longer condition", file.display());
    }
}
