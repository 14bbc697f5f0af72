//! What cannot be read for want of a descriptor is not taken for absent. One test only, because the limit is that of
//! the whole process.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;

use ontime_base::files;
use ontime_tenants::container::{Identity, Names};
use ontime_tenants::vnic::Network;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn interfaces_and_records_that_cannot_be_opened_make_discovery_incomplete() {
    let root = tempfile::tempdir().unwrap();
    let put = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    put("net/eth0/ifindex", "2\n");
    put("net/eth0/device/vendor", "0x8086\n");
    put("net/macvtap0/lower_eth0/ifindex", "2\n");
    put("var/lib/docker/containers/0a/config.v2.json", r#"{"Name":"/press"}"#);
    let (net, docker) = (root.path().join("net"), Identity::Id("0a".to_owned()));
    let lower = || Network::at(&net).vnic("macvtap0").lower;
    let index = || Network::at(&net).name_of(2).map(str::to_owned);
    let record = || Names::below(root.path()).recorded(&docker);
    let _ = files::exhausted();
    assert_eq!(
        (lower(), index(), record()),
        (vec!["eth0".to_owned()], Some("eth0".to_owned()), Some("press".to_owned()))
    );
    assert_eq!(files::exhausted(), None, "files that are absent are no lack of descriptors");
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
    let each = [
        (lower().is_empty(), files::exhausted()),
        (index().is_none(), files::exhausted()),
        (record().is_none(), files::exhausted()),
    ];
    setrlimit(Resource::Nofile, limit).unwrap();
    assert_eq!(each, [(true, Some(Errno::MFILE)); 3]);
}
