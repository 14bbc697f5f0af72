//! Root qdiscs of real interfaces: told apart by who chose them, set for a comparison, given back.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)] // a test that cannot go on fails

mod support;

use ontime_hostnet::{
    Done, Host, Inventory, Journal, Knob, KnobError, LiveHost, NicId, Original, Report, Roots, SteerFrom, Value, reset,
};
use support::{in_namespace, run};

fn id(roots: &Roots, name: &str) -> NicId {
    let text = std::fs::read_to_string(roots.sys.join(format!("class/net/{name}/ifindex"))).unwrap();
    NicId { ifindex: text.trim().parse().unwrap(), name: name.to_owned() }
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

/// Whether the kernel has what a write needed; says so where not.
fn done(result: Result<(), KnobError>) -> bool {
    match result {
        Ok(()) => true,
        Err(KnobError::Unsupported { why, .. }) => {
            println!("SKIPPED: {why}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_root_qdisc_is_set_and_the_kernels_own_comes_back() {
    in_namespace(|roots| {
        run("ip", "link add va0 type veth peer name va1");
        run("ip", "link set va0 txqueuelen 1000 up");
        run("ip", "link set va1 up");
        let host = LiveHost::with_roots(roots.clone());
        let knob = Knob::RootQdisc { nic: id(roots, "va0") };
        assert_eq!(host.read(&knob).unwrap(), text("default"));
        for kind in ["prio", "fq_codel"] {
            if !done(host.write(&knob, &text(kind))) {
                return;
            }
            assert_eq!(host.read(&knob).unwrap(), text(kind));
            // Ours is nobody's choice.
            assert_eq!(Inventory::scan(roots).nic("va0").unwrap().qdisc_by_others, None);
            host.write(&knob, &text(kind)).unwrap();
        }
        host.write(&knob, &text("default")).unwrap();
        assert_eq!(host.read(&knob).unwrap(), text("default"));
        host.write(&knob, &text("default")).unwrap();
        // An administrator's is told from it.
        run("tc", "qdisc add dev va0 root handle 1a: pfifo limit 77");
        assert_eq!(host.read(&knob).unwrap(), text("pfifo 1a:"));
        assert_eq!(Inventory::scan(roots).nic("va0").unwrap().qdisc_by_others.as_deref(), Some("pfifo 1a:"));
        run("ip", "link del va0");
        assert!(matches!(host.read(&knob), Err(KnobError::Gone(_))));
        assert!(matches!(host.write(&knob, &text("prio")), Err(KnobError::Gone(_))));
    });
}

#[test]
fn a_filter_gives_packets_the_first_band() {
    in_namespace(|roots| {
        run("ip", "link add va0 type veth peer name va1");
        run("ip", "link add vb0 type veth peer name vb1");
        run("ip", "link set va0 up");
        let host = LiveHost::with_roots(roots.clone());
        let nic = id(roots, "va0");
        let clsact = Knob::Clsact { nic: nic.clone() };
        if !done(host.write(&clsact, &Value::Present(true))) {
            return;
        }
        let knob = Knob::TxPriority { nic: nic.clone(), from: SteerFrom::Interface(id(roots, "vb0")) };
        assert_eq!(host.read(&knob).unwrap(), Value::Present(false));
        if !done(host.write(&knob, &Value::Present(true))) {
            return;
        }
        assert_eq!(host.read(&knob).unwrap(), Value::Present(true));
        // It is no filter that chooses a queue.
        let steer = Knob::TxSteer { nic, queue: 0, from: SteerFrom::Interface(id(roots, "vb0")) };
        assert_eq!(host.read(&steer).unwrap(), Value::Present(false));
        host.write(&knob, &Value::Present(false)).unwrap();
        assert_eq!(host.read(&knob).unwrap(), Value::Present(false));
    });
}

#[test]
fn filter_and_clsact_go_though_the_source_has_gone_and_stay_kept_where_others_filter() {
    in_namespace(|roots| {
        run("ip", "link add va0 type veth peer name va1");
        run("ip", "link add vb0 type veth peer name vb1");
        let host = LiveHost::with_roots(roots.clone());
        let (nic, state) = (id(roots, "va0"), tempfile::tempdir().unwrap());
        let clsact = Knob::Clsact { nic: nic.clone() };
        let from = || SteerFrom::Interface(id(roots, "vb0"));
        let (steer, first) =
            (Knob::TxSteer { nic: nic.clone(), queue: 0, from: from() }, Knob::TxPriority { nic, from: from() });
        let mut journal = Journal::open(&state.path().join("originals"), "boot").unwrap();
        for knob in [&clsact, &steer] {
            journal.keep(vec![Original { knob: knob.clone(), value: Value::Present(false) }]).unwrap();
            if !done(host.write(knob, &Value::Present(true))) {
                return;
            }
        }
        run("ip", "link del vb0");
        assert!(matches!(host.write(&first, &Value::Present(true)), Err(KnobError::Gone(_))));
        run("tc", "filter add dev va0 ingress matchall action drop");
        let outcomes = |report: &Report| report.items.iter().map(|item| item.done.clone()).collect::<Vec<_>>();
        let kept = outcomes(&reset(&host, &mut journal).unwrap());
        assert!(matches!(kept.as_slice(), [Done::Restored, Done::Unsupported(_)]), "{kept:?}");
        assert_eq!(host.read(&steer).unwrap(), Value::Present(false));
        assert_eq!(host.read(&clsact).unwrap(), Value::Present(true));
        assert!(journal.has(&clsact) && !journal.has(&steer));

        run("tc", "filter del dev va0 ingress");
        assert_eq!(outcomes(&reset(&host, &mut journal).unwrap()), [Done::Restored]);
        assert_eq!(host.read(&clsact).unwrap(), Value::Present(false));
        assert!(journal.entries().is_empty());
    });
}
