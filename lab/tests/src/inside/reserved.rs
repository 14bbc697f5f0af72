//! Reserved CPU time as `ontime top` shows it. All reservations have a period of 20 ms.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::daemon::{json, report};

/// A reservation in sched.toml: `reservation("a", "6ms")`.
pub(crate) fn reservation(vm: &str, budget: &str) -> String {
    format!("[[reservation]]\nname = \"{vm}\"\nbudget = \"{budget}\"\nperiod = \"20ms\"\n")
}

/// What `ontime top` printed.
pub(crate) struct Look(Value);

impl Look {
    /// What is used in the next tenth of a second.
    pub(crate) fn take() -> Result<Self> {
        Self::take_over("0.1")
    }

    /// What is used in so many seconds.
    pub(crate) fn take_over(seconds: &str) -> Result<Self> {
        json(&format!("ontime top --once --json --interval {seconds}")).map(Self)
    }

    /// The time over which it measured.
    pub(crate) fn time(&self) -> Result<Duration> {
        let seconds = self.0.get("seconds").and_then(Value::as_f64).context("a look has no time")?;
        Duration::try_from_secs_f64(seconds).context("the time of a look")
    }

    /// How often the daemon has looked at the vCPUs.
    pub(crate) fn looks(&self) -> Result<u64> {
        let looks = self.0.pointer("/reservations/slice/looks").and_then(Value::as_u64);
        looks.with_context(|| format!("it has not looked at any vCPU: {}", self.0))
    }

    /// Why the kernel does not count for the pacers, if it does not.
    pub(crate) fn uncounted(&self) -> Option<&str> {
        self.0.pointer("/reservations/uncounted").and_then(Value::as_str)
    }

    /// The CPUs for reservations.
    pub(crate) fn cpus(&self) -> Vec<u64> {
        let cpus = self.0.pointer("/reservations/cpus").and_then(Value::as_array);
        cpus.into_iter().flatten().filter_map(Value::as_u64).collect()
    }

    /// Whether a VM has a reservation that is kept.
    pub(crate) fn keeps(&self, vm: &str) -> bool {
        self.value(vm, "period_us").is_ok_and(|period| period == 20_000.0)
    }

    /// A number of a VM's vCPU: `value("a", "misses")`.
    pub(crate) fn value(&self, vm: &str, what: &str) -> Result<f64> {
        let vcpus = self.0.pointer("/reservations/vcpus").and_then(Value::as_array);
        let is_of = |vcpu: &&Value| vcpu.get("vm").and_then(Value::as_str) == Some(vm);
        let value = vcpus.and_then(|vcpus| vcpus.iter().find(is_of)?.get(what)?.as_f64());
        value.with_context(|| format!("{vm} has no {what}: {}", self.0))
    }
}

/// What `ontime top` shows an operator.
pub(crate) fn shown() -> Result<String> {
    report("ontime top --once --interval 0.1")
}

/// The lines of [`shown`] that say which VM has no reservation, and why.
pub(crate) fn refused() -> Result<Vec<String>> {
    Ok(shown()?.lines().filter(|line| line.starts_with("refused: ")).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_look_is_read() {
        let vcpus = json!([{"vm": "a", "period_us": 20000.0, "misses": 3}, {"vm": "b", "period_us": 10000.0}]);
        let look = Look(json!({"seconds": 0.25, "reservations": {"cpus": [0, 1], "vcpus": vcpus,
            "slice": {"looks": 7}}}));
        assert_eq!(look.time().unwrap(), Duration::from_millis(250));
        assert_eq!((look.looks().unwrap(), look.cpus()), (7, vec![0, 1]));
        assert_eq!(["a", "b", "c"].map(|vm| look.keeps(vm)), [true, false, false]);
        assert_eq!(look.value("a", "misses").unwrap(), 3.0);
        assert!(look.value("b", "misses").is_err());
        let none = Look(json!({"reservations": {}}));
        assert!(none.time().is_err() && none.looks().is_err() && none.cpus().is_empty());
    }
}
