//! The emulated host that a test needs, as options of `ontime-lab run`.

use ontime_lab::{Clients, Clock, Kernel};

/// An emulated host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Host {
    pub(crate) kernel: Kernel,
    pub(crate) clock: Clock,
    /// CPUs; without a number `ontime-lab` decides by the clock.
    pub(crate) cpus: Option<u8>,
    /// The clients' side. Without one, time that the host only waits for passes at once.
    pub(crate) clients: Clients,
    /// The link to clients on a CPU of their own.
    pub(crate) link: Option<&'static str>,
    /// Whether the emulator logs what enters the CPUs.
    pub(crate) events: bool,
    /// Time of an instruction on the virtual clock, ns.
    pub(crate) instruction: u8,
    /// Whether `/lab/ontime_napi.ko` is there.
    pub(crate) host_module: bool,
    /// Whether guests can have outsourced sockets.
    pub(crate) guest_module: bool,
    /// Shell command of the clients' side, which is inside then.
    pub(crate) client: Option<&'static str>,
    /// Word for the kernel's command line.
    pub(crate) append: Option<&'static str>,
    /// Longest time of the command, s of this machine's clock.
    pub(crate) timeout: u64,
    /// Longest time without a sign of life, s of this machine's clock.
    pub(crate) silence: u64,
    /// Variables of the test inside, in addition to [`PASSED`].
    pub(crate) environment: &'static [(&'static str, &'static str)],
}

/// The emulated host of most tests. The others name what differs: `Host { cpus: Some(2), ..HOST }`.
pub(crate) const HOST: Host = Host {
    kernel: Kernel::Rt72,
    clock: Clock::Virtual,
    cpus: None,
    clients: Clients::None,
    link: None,
    events: false,
    instruction: 4,
    host_module: false,
    guest_module: false,
    client: None,
    append: None,
    timeout: 1800,
    silence: 600,
    environment: &[],
};

/// Variables of this program's environment that a test gets inside, with their defaults. `CYCLES`: how often
/// `path_holds_under_traffic_and_faults` applies and resets. `BACKEND`: the back end of `reserved_cpu_time_is_kept`.
/// The others describe the guest of the tests of deadlines ([`crate::cases::builds::with_deadlines`]).
pub(crate) const PASSED: [(&str, &str); 5] =
    [("CYCLES", "3"), ("BACKEND", "paced"), ("SLOW", "1"), ("GUEST_MB", ""), ("GUEST_APPEND", "")];

impl Host {
    /// Options of `ontime-lab run`.
    pub(crate) fn options(&self) -> Vec<String> {
        let clients = if self.client.is_some() { Clients::Inside } else { self.clients };
        let named = [
            ("--kernel", Some(self.kernel.to_string())),
            ("--clock", Some(self.clock.to_string())),
            ("--cpus", self.cpus.map(|cpus| cpus.to_string())),
            ("--instruction", Some(self.instruction.to_string())),
            ("--clients", Some(clients.to_string())),
            ("--link", self.link.map(str::to_owned)),
            ("--client", self.client.map(str::to_owned)),
            ("--append", self.append.map(str::to_owned)),
            ("--timeout", Some(self.timeout.to_string())),
            ("--silence", Some(self.silence.to_string())),
        ];
        let given = named.into_iter().filter_map(|(name, value)| Some([name.to_owned(), value?])).flatten();
        let switches =
            [("--events", self.events), ("--host-module", self.host_module), ("--guest-module", self.guest_module)];
        let on = switches.into_iter().filter(|(_, on)| *on).map(|(name, _)| name.to_owned());
        given.chain(on).collect()
    }

    /// Variables of the test inside, as `NAME=VALUE`. Those of the host override [`PASSED`].
    pub(crate) fn variables(&self) -> Vec<String> {
        let passed = PASSED.map(|(name, default)| format!("{name}={}", variable(name, default)));
        passed.into_iter().chain(self.environment.iter().map(|(name, value)| format!("{name}={value}"))).collect()
    }
}

/// A variable of this program's environment, or its default if the variable is missing or empty.
pub(crate) fn variable(name: &str, default: &str) -> String {
    std::env::var(name).ok().filter(|value| !value.is_empty()).unwrap_or_else(|| default.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_name_what_a_host_has_and_nothing_else() {
        let plain = "--kernel 7.2-rt --clock virtual --instruction 4 --clients none --timeout 1800 --silence 600";
        assert_eq!(HOST.options().join(" "), plain);
        let other = Host { kernel: Kernel::Rt612, cpus: Some(2), host_module: true, client: Some("sh a.sh"), ..HOST };
        let options = other.options();
        for words in [
            &["--cpus", "2"][..],
            &["--client", "sh a.sh"],
            &["--clients", "inside"],
            &["--kernel", "6.12-rt"],
            &["--host-module"],
        ] {
            assert!(options.windows(words.len()).any(|found| found == words), "{words:?} in {options:?}");
        }
        assert!(!options.iter().any(|option| option == "--guest-module"), "{options:?}");
    }

    #[test]
    fn a_hosts_variable_comes_after_the_one_that_it_overrides() {
        let host = Host { environment: &[("BACKEND", "sched_ext")], ..HOST };
        let variables = host.variables();
        assert_eq!(variables.last().map(String::as_str), Some("BACKEND=sched_ext"), "{variables:?}");
        assert_eq!(variables.len(), PASSED.len() + 1);
    }
}
