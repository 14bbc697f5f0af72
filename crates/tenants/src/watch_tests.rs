use super::*;
use crate::common;
use crate::discover;
use crate::testing::tenant;
use crate::thread::ThreadId;

fn event(pid: i32, tid: i32) -> [Event; 3] {
    [Event::Fork { parent: pid, child: pid, tid }, Event::Comm { pid, tid }, Event::Exit { pid, tid }]
}

fn concerns(watcher: &Watcher, pid: i32, tid: i32) -> [bool; 3] {
    event(pid, tid).map(|event| watcher.concerns(event))
}

#[test]
fn of_a_vm_with_names_only_threads_with_a_place_are_told() {
    let (host, rules) = (common::Host::new(), Rules::default());
    host.vm(100, "a", "/a");
    let mut watcher = Watcher::new(&host.sources()).unwrap();
    watcher.follow(&discover(&host.sources(), &rules), &rules).unwrap();
    // QEMU's threads for disk reads: such a thread first has its creator's name, then its own, and ends.
    for name in ["qemu-system-x86", "IO mon_iothread", "worker"] {
        host.thread(100, 150, name, 0);
        assert_eq!(concerns(&watcher, 100, 150), [false; 3], "{name}");
    }
    assert_eq!(concerns(&watcher, 100, 106), [false; 3], "a worker that was found");
    assert_eq!(concerns(&watcher, 100, 151), [false; 3], "it has ended before it was looked at");
    // Threads that must get a place, and threads whose policy may need a correction.
    for (name, flags, policy) in [
        ("CPU 2/KVM", 0, (0, 0)),
        ("IO iothread2", 0, (0, 0)),
        ("vhost-100", common::PF_USER_WORKER, (0, 0)),
        ("worker", 0, (1, 3)),
        ("worker", 0, (5, 0)),
    ] {
        host.thread_at(100, 150, name, flags, policy, "0-3");
        assert_eq!(concerns(&watcher, 100, 150), [true, true, false], "{name} {policy:?}");
    }
    assert_eq!(concerns(&watcher, 100, 101), [true; 3], "a vCPU");
    host.thread(100, 101, "worker", 0);
    assert_eq!(concerns(&watcher, 100, 101), [false, true, true], "a vCPU that calls itself otherwise");
    assert!(watcher.concerns(Event::Exit { pid: 100, tid: 100 }), "the VM ends");
    assert!(watcher.concerns(Event::Fork { parent: 100, child: 150, tid: 150 }), "a process of its own");
}

#[test]
fn of_a_vm_without_names_any_thread_may_be_a_vcpu() {
    let (host, rules) = (common::Host::new(), Rules::default());
    host.process(100, "/usr/bin/qemu-system-x86_64", "/", 0, &["qemu", "-name", "plain"]);
    for tid in 101..104 {
        host.thread(100, tid, "qemu-system-x86", 0);
    }
    let mut watcher = Watcher::new(&host.sources()).unwrap();
    watcher.follow(&discover(&host.sources(), &rules), &rules).unwrap();
    assert_eq!(concerns(&watcher, 100, 103), [true; 3]);
}

#[test]
fn a_process_that_cannot_be_read_may_be_a_tenant_and_one_that_is_gone_is_none() {
    let host = common::Host::new();
    let sources = host.sources();
    let watcher = Watcher::new(&sources).unwrap();
    let starts = Event::Exec { pid: 300 };
    let kernels = Event::Fork { parent: KTHREADD, child: 301, tid: 301 };
    assert!(!watcher.concerns(starts) && !watcher.concerns(kernels), "they are gone");
    // A directory can be opened, and its reading fails.
    std::fs::create_dir_all(sources.proc.join("300/cgroup")).unwrap();
    std::fs::create_dir_all(sources.proc.join("301/comm")).unwrap();
    assert!(watcher.concerns(starts) && watcher.concerns(kernels));
}

#[test]
fn a_directory_that_is_there_and_is_not_watched_is_told() {
    let host = common::Host::new();
    let untold = |libvirt: PathBuf| {
        let watcher = Watcher::new(&Sources { libvirt, ..host.sources() }).unwrap();
        watcher.rescan_reasons().filter(|why| why.contains("cannot be watched")).count()
    };
    let absent = host.path("run/libvirt/nothing");
    assert_eq!(untold(absent.clone()), 0);
    std::fs::create_dir_all(absent.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(&absent, &absent).unwrap();
    assert_eq!(untold(absent), 1, "a link to itself");
    assert!(unwatchable(Path::new("/run"), Errno::NOSPC).contains("fs.inotify.max_user_watches"));
}

/// A watcher of a host with an RT VM 100 and 300 programs of containers.
fn watcher_of(host: &common::Host) -> Watcher {
    let text = "[[tenant]]\nname = \"a\"\nclass = \"rt\"\n";
    let rules = Rules::parse(&[crate::config::Text::new("/etc/ontime/tenants.toml", text)]).unwrap();
    host.vm(100, "a", "/a");
    let mut watcher = Watcher::new(&host.sources()).unwrap();
    watcher.follow(&discover(&host.sources(), &rules), &rules).unwrap();
    for pid in 1000..1300 {
        host.process(pid, "/bin/program", &format!("/docker/{:064x}", pid), 0, &["program"]);
    }
    watcher
}

fn execs(watcher: &mut Watcher, owner: &Account, pid: i32) {
    watcher.enqueue(owner.clone(), Waiting { event: Event::Exec { pid }, came: Instant::now() });
}

#[test]
fn a_burst_of_one_owner_keeps_no_other_owners_newcomer_waiting() {
    let host = common::Host::new();
    let mut watcher = watcher_of(&host);
    let [hostile, other] = [Account::User(1000), Account::Container("/other".to_owned())];
    (1000..1299).for_each(|pid| execs(&mut watcher, &hostile, pid));
    assert!(watcher.pending.is_some(), "what the queue does not take is left to a discovery");
    execs(&mut watcher, &other, 1299);
    let start = Instant::now();
    watcher.look_into(start);
    let news = watcher.newcomers();
    assert!(news.get(&1299) == Some(&other) && news.len() == LOOKS, "{news:?}");
    // An owner whose looks have taken too long waits; the others do not.
    watcher.charge([&hostile].into_iter(), Duration::from_secs(60));
    execs(&mut watcher, &other, 1299);
    watcher.look_into(start);
    assert!(watcher.newcomers().into_keys().eq([1299]));
}

#[test]
fn a_vhost_worker_without_its_name_is_looked_at_again() {
    let host = common::Host::new();
    let mut watcher = watcher_of(&host);
    let now = Instant::now();
    for (child, tid, before, flags, after, pid) in [
        (100, 150, "qemu-system-x86", common::PF_USER_WORKER, "vhost-100", 100),
        (151, 151, "kthreadd", common::PF_KTHREAD, "vhost-100", 151),
    ] {
        host.thread(child, tid, before, flags);
        std::fs::write(host.path(&format!("proc/{child}/comm")), before).unwrap();
        let parent = if child == tid { KTHREADD } else { 1 };
        let event = Event::Fork { parent, child, tid };
        let owner = watcher.owner(event).unwrap();
        watcher.enqueue(owner, Waiting { event, came: now });
        watcher.look_into(now);
        assert!(watcher.newcomers().is_empty() && watcher.unnamed.len() == 1, "{before}");
        host.thread(child, tid, after, flags);
        std::fs::write(host.path(&format!("proc/{child}/comm")), after).unwrap();
        watcher.look_into(now);
        assert!(watcher.newcomers().into_keys().eq([pid]) && watcher.unnamed.is_empty(), "{after}");
    }
    // Threads of QEMU's own pool never get a place, and are not looked at twice.
    host.thread(100, 160, "worker", 0);
    watcher.enqueue(Account::System, Waiting { event: Event::Fork { parent: 1, child: 100, tid: 160 }, came: now });
    watcher.look_into(now);
    assert!(watcher.newcomers().is_empty() && watcher.unnamed.is_empty());
}

#[test]
fn a_watcher_without_events_waits_for_the_next_one_and_rests_after_one() {
    let host = common::Host::new();
    let mut watcher = watcher_of(&host);
    // This machine's own events.
    watcher.connector = None;
    watcher.take().unwrap();
    assert!(watcher.listening && watcher.rests_until <= watcher.read_at, "it would wake up without a reason");
    let rests = |watcher: &Watcher| watcher.rests_until > watcher.read_at;
    for pid in 1000..1000 + i32::try_from(LOOKS).unwrap() + 1 {
        execs(&mut watcher, &Account::System, pid);
    }
    watcher.take().unwrap();
    assert!(rests(&watcher) && watcher.news.len() == LOOKS);
    // On a slow machine the looks take longer than the rest.
    assert!(!watcher.listening || Instant::now() >= watcher.rests_until);
    std::thread::sleep(GAP);
    watcher.take().unwrap();
    assert!(!rests(&watcher) && watcher.listening && watcher.news.len() == LOOKS + 1);
}

#[test]
fn what_is_gathered_wakes_the_watcher_up() {
    let host = common::Host::new();
    let mut watcher = watcher_of(&host);
    // This machine's own events.
    watcher.connector = None;
    watcher.next_rescan = Instant::now() + RESCAN;
    watcher.take().unwrap();
    execs(&mut watcher, &Account::System, 1000);
    std::thread::sleep(GAP);
    watcher.gather().unwrap();
    assert!(watcher.pending.is_some());
    assert_eq!(watcher.wait(Some(RESCAN / 6)).unwrap(), Some(Change::Seen));
}

/// To find the owner, files of the process are read.
#[test]
fn finding_the_owner_of_events_is_charged_to_the_owner_and_leaves_time_for_other_work() {
    let host = common::Host::new();
    let mut watcher = watcher_of(&host);
    let start = Instant::now();
    watcher.sort((1000..1300).cycle().take(3000).map(|pid| Event::Exec { pid }).collect(), start);
    assert!(watcher.rests_until > start + GAP, "3,000 lookups took {:?}", start.elapsed());
    let host = common::Host::new();
    let mut watcher = watcher_of(&host);
    let mut events = 0;
    loop {
        watcher.sort(vec![Event::Exec { pid: 1000 }; 1000], Instant::now());
        if watcher.turns.due_in(Instant::now()).is_some_and(|wait| !wait.is_zero()) {
            break;
        }
        events += 1000;
        assert!(events < 1_000_000, "{events} events of one owner cost it nothing");
    }
    execs(&mut watcher, &Account::User(1), 1299);
    watcher.look_into(Instant::now());
    assert!(watcher.newcomers().into_keys().eq([1299]), "another owner's turn comes first");
}

#[test]
fn no_process_chooses_whose_turn_it_takes() {
    let host = common::Host::new();
    let watcher = watcher_of(&host);
    let slice = "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-1.scope";
    host.process(2000, "/bin/program", slice, 0, &["program"]);
    assert_eq!(watcher.account(2000), Account::User(1000), "its user number does not matter");
    let Account::Container(cgroup) = watcher.account(1000) else { panic!() };
    assert_eq!(cgroup, format!("/docker/{:064x}", 1000));
}

#[test]
fn processes_for_which_the_filter_has_no_room_are_told_in_one_text() {
    let host = common::Host::new();
    let mut watcher = Watcher::new(&host.sources()).unwrap();
    if watcher.connector.is_none() {
        println!("SKIPPED: no process events");
        return;
    }
    let vms = |count: i32| {
        let vm = |pid| Tenant { process: ThreadId { pid, tid: pid, start_time: 1 }, ..tenant("vm", Class::Bulk) };
        Discovery { tenants: (1_000_000..1_000_000 + count).map(vm).collect(), ..Discovery::default() }
    };
    let mut told = BTreeSet::new();
    for (count, reasons) in [(240, 0), (241, 1), (300, 1), (240, 0)] {
        watcher.follow(&vms(count), &Rules::default()).unwrap();
        assert_eq!((watcher.followed.len(), watcher.rescan_reasons().count()), (240, reasons), "{count}");
        told.extend(watcher.rescan_reasons().map(str::to_owned));
    }
    assert_eq!(told.len(), 1, "{told:?}");
}
