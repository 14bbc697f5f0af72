//! What cannot be read for want of a descriptor is not taken for absent. One test only, because the limit is that of
//! the whole process.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;

use ontime_hostnet::{Inventory, Roots};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn processes_that_cannot_be_read_make_the_inventory_incomplete() {
    let tree = tempfile::tempdir().unwrap();
    let at = |name: &str| tree.path().join(name);
    fs::create_dir_all(at("proc/77")).unwrap();
    let own = fs::read_to_string("/proc/self/stat").unwrap();
    let fields = own.rsplit_once(')').unwrap().1;
    fs::write(at("proc/77/stat"), format!("77 (irqbalance){fields}")).unwrap();
    let roots = Roots { proc: at("proc"), sys: at("sys"), debug: at("debug"), dev: at("dev"), root: at("") };
    let seen = || {
        let inventory = Inventory::scan(&roots);
        let unread = inventory.notes.iter().find(|note| note.about == "files of the kernel");
        let why = unread.map(|note| note.why.clone());
        (inventory.conflicts.len(), why, inventory.incomplete.is_some())
    };
    let (found, unread, _) = seen();
    assert_eq!((found, unread), (1, None), "an absent file is not told as unread");
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
    let (found, unread, incomplete) = seen();
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(found == 0 && incomplete, "{found} {incomplete}");
    assert!(unread.is_some_and(|why| why.contains("LimitNOFILE=")));
}
