//! Root qdiscs of real interfaces: who attached them, setting and restoring them. Also a tap's send buffer, which
//! replaces a qdisc.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)] // a test that cannot go on fails

mod support;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};

use ontime_hostnet::{
    Done, Host, Inventory, Journal, Knob, KnobError, LiveHost, NicId, Original, Report, Roots, SteerFrom, Value, reset,
};
use ontime_tenants::ThreadId;
use support::{in_namespace, run};

fn id(roots: &Roots, name: &str) -> NicId {
    let text = std::fs::read_to_string(roots.sys.join(format!("class/net/{name}/ifindex"))).unwrap();
    NicId { ifindex: text.trim().parse().unwrap(), name: name.to_owned() }
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

/// Whether the kernel has the needed feature; prints a message if not.
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
        for _ in 0..2 {
            if !done(host.write(&knob, &text("noqueue"))) {
                return;
            }
            assert_eq!(host.read(&knob).unwrap(), text("noqueue"));
            // Ontime's qdisc does not count as another program's choice.
            assert_eq!(Inventory::scan(roots).nic("va0").unwrap().qdisc_by_others, None);
        }
        assert!(host.write(&knob, &text("prio")).is_err(), "a kind that Ontime never attaches");
        host.write(&knob, &text("default")).unwrap();
        assert_eq!(host.read(&knob).unwrap(), text("default"));
        host.write(&knob, &text("default")).unwrap();
        // An administrator's qdisc is distinguished from Ontime's.
        run("tc", "qdisc add dev va0 root handle 1a: pfifo limit 77");
        assert_eq!(host.read(&knob).unwrap(), text("pfifo 1a:"));
        assert_eq!(Inventory::scan(roots).nic("va0").unwrap().qdisc_by_others.as_deref(), Some("pfifo 1a:"));
        run("ip", "link del va0");
        assert!(matches!(host.read(&knob), Err(KnobError::Gone(_))));
        assert!(matches!(host.write(&knob, &text("noqueue")), Err(KnobError::Gone(_))));
    });
}

/// Opens a tap, as a VMM does.
fn tap(name: &str) -> File {
    let file = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun").unwrap();
    // SAFETY: zeroes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the kernel reads and writes an ifreq there, which outlives the call.
    assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) }, 0);
    file
}

#[test]
fn a_send_buffer_holds_a_vms_packets_back_until_what_is_on_its_way_has_gone() {
    in_namespace(|roots| {
        if !std::path::Path::new("/dev/net/tun").exists() {
            return println!("SKIPPED: no /dev/net/tun");
        }
        let (mut vm, other) = (tap("vm0"), tap("vm1"));
        run("ip", "link add br0 type bridge");
        run("ip", "link add va0 type veth peer name va1");
        for (name, more) in [("vm0", "master br0 up"), ("va0", "master br0 up"), ("br0", "up"), ("va1", "up")] {
            run("ip", &format!("link set {name} {more}"));
        }
        // Another process has the taps open, as a VMM does.
        let open = |tap: &File| Stdio::from(tap.try_clone().unwrap());
        let mut monitor = Command::new("sleep").arg("1000").stdin(open(&vm)).stdout(open(&other)).spawn().unwrap();
        let pid = i32::try_from(monitor.id()).unwrap();
        let process = ThreadId::of(pid, pid).unwrap();
        let host = LiveHost::with_roots(roots.clone());
        let knob = |name| Knob::SendBuffer { nic: id(roots, name), process };
        let unlimited = text(&i32::MAX.to_string());
        assert_eq!(host.read(&knob("vm0")).unwrap(), unlimited);
        host.write(&knob("vm0"), &text("16384")).unwrap();
        assert_eq!((host.read(&knob("vm0")).unwrap(), host.read(&knob("vm1")).unwrap()), (text("16384"), unlimited));
        for bad in ["0", "-1", "much", "99999999999"] {
            assert!(host.write(&knob("vm0"), &text(bad)).is_err(), "{bad}");
        }
        // The limit decides whether vhost sends batches. A limit that another program set stays, and means no batches.
        let batches = |name| Knob::TapBatch { nic: id(roots, name), process };
        let present = |name| host.read(&batches(name)).unwrap() == Value::Present(true);
        assert_eq!([present("vm0"), present("vm1")], [false, true]);
        for on in [true, false] {
            host.write(&batches("vm0"), &Value::Present(on)).unwrap();
            assert_eq!(host.read(&knob("vm0")).unwrap(), text("16384"));
        }
        for (on, size) in [(false, "2147483646"), (true, "2147483647")] {
            host.write(&batches("vm1"), &Value::Present(on)).unwrap();
            assert_eq!((present("vm1"), host.read(&knob("vm1")).unwrap()), (on, text(size)));
        }
        // Packets that the NIC has not sent: here, packets that wait in a qdisc for a very long time.
        let stuck = Command::new("tc")
            .args("qdisc add dev va0 root tbf rate 8bit burst 2000 limit 1000000".split(' '))
            .output();
        if !stuck.unwrap().status.success() {
            monitor.kill().unwrap();
            monitor.wait().unwrap();
            return println!("SKIPPED: the kernel has no tbf");
        }
        // A unicast frame: a bridge sends copies of broadcasts, which belong to no sender.
        let frame = [&[2, 0, 0, 0, 0, 2][..], &[2, 0, 0, 0, 0, 1], &[0x88, 0xba], &[0; 46]].concat();
        let sent = (0..1_000).take_while(|_| vm.write(&frame).is_ok()).count();
        // The packets of the first burst, and as many as the buffer has room for.
        assert!((2_000 / 60..=2_000 / 60 + 16_384 / 768 + 1).contains(&sent), "{sent} packets");
        assert_eq!(vm.write(&frame).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        run("tc", "qdisc del dev va0 root");
        assert!(vm.write(&frame).is_ok(), "what was on its way is gone");
        drop(other);
        assert!(matches!(
            host.read(&Knob::SendBuffer { nic: NicId { ifindex: 999, name: "vm1".into() }, process }),
            Err(KnobError::Gone(_))
        ));
        let other_process = ThreadId { start_time: process.start_time + 1, ..process };
        assert!(matches!(
            host.read(&Knob::SendBuffer { nic: id(roots, "vm0"), process: other_process }),
            Err(KnobError::Gone(_))
        ));
        monitor.kill().unwrap();
        monitor.wait().unwrap();
        assert!(matches!(host.read(&knob("vm0")), Err(KnobError::Gone(_))), "who had it open has ended");
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
        let [steer, other] = [0, 1].map(|queue| Knob::TxSteer { nic: nic.clone(), queue, from: from() });
        let mut journal = Journal::open(&state.path().join("originals"), "boot").unwrap();
        for knob in [&clsact, &steer] {
            journal.store(vec![Original { knob: knob.clone(), value: Value::Present(false) }]).unwrap();
            if !done(host.write(knob, &Value::Present(true))) {
                return;
            }
        }
        run("ip", "link del vb0");
        assert!(matches!(host.write(&other, &Value::Present(true)), Err(KnobError::Gone(_))));
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
