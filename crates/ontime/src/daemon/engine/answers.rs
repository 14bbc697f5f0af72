//! The engine's answers to requests: status, tenants, NICs, metrics, and what an apply would do. Nothing here changes
//! the host.

use ontime_hostnet::{self as hostnet, Knob, Method};
use ontime_tenants::{ThreadRole, discover};

use super::Engine;
use super::caps::PastPauses;
use super::look::{Known, Look};
use super::observe;
use super::reservations::UNRESERVED;
use crate::api;
use crate::daemon::cap::Pauses;
use crate::daemon::view::{self, Owned};
use crate::daemon::watches::Moved;

impl Engine {
    /// What an apply would change, with this method if one is given.
    pub(super) fn dry_run(&self, method: Option<Method>) -> api::Report {
        let (paused, pauses) = (self.paused(), self.pauses());
        let known = Known {
            method,
            journal: Some(&self.journal),
            caps: self.in_force,
            resting: Some(&self.traffic.resting),
            paused: &paused,
            pauses: Some(&pauses),
            keeper: Some(&self.keeper),
            ..Known::default()
        };
        let look = match self.state {
            api::State::Applied => {
                let mut look = Look::at(&self.sources, &self.config, &self.paths, known);
                look.reserves_nothing();
                look
            }
            api::State::Reset | api::State::Observing => {
                observe::to_be(&self.config, &self.paths, method, &self.journal, &self.keeper)
            }
        };
        observe::would(&look, &PastPauses { pauses, ..self.past_pacers() }, &self.journal, &self.look.settled)
    }

    /// The tenants as they are now.
    pub fn tenants(&self) -> api::Tenants {
        let found = discover(&self.sources, &self.config.rules);
        let mut shown: Vec<_> = found.tenants.iter().map(|tenant| view::tenant(tenant, self.table())).collect();
        let past = self.keeper.past();
        for setting in &self.look.plan.settings {
            let Knob::ThreadPolicy { thread: id, .. } = &setting.knob else { continue };
            let threads = shown.iter_mut().filter(|tenant| tenant.pid == id.pid).flat_map(|tenant| &mut tenant.threads);
            for thread in threads.filter(|thread| thread.tid == id.tid) {
                thread.wanted = (!past.moves(*id)).then(|| setting.value.to_string());
            }
        }
        api::Tenants { schema_version: api::SCHEMA_VERSION, tenants: shown, unseen: view::unseen(&found) }
    }

    fn past_pacers(&self) -> PastPauses<'_> {
        PastPauses { host: &self.host, pauses: Pauses::default(), paced: self.keeper.past() }
    }

    /// The NICs as the last pass found them.
    pub fn nics(&self) -> api::Nics {
        let look = &self.look;
        view::nics(&look.inventory, &look.intent, &look.plan, &|setting| self.knob_state(setting))
    }

    /// Metrics, brought up to date, as text.
    pub fn metrics_text(&mut self) -> String {
        self.catch_up();
        self.account_caps();
        self.account_reservations();
        self.account_traffic();
        self.account_steal();
        let states: Vec<api::KnobState> = self.knob_states();
        self.metrics.knobs(states.iter().map(|knob| knob.state.as_str()));
        self.metrics.text()
    }

    /// Updates the stolen time of the vCPUs of the last look.
    fn account_steal(&mut self) {
        let vcpus = self.look.found.tenants.iter().flat_map(|tenant| {
            let owned = Owned { name: tenant.name.clone(), class: tenant.class.to_string() };
            let vcpus = tenant.threads.iter().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_)));
            vcpus.map(move |thread| (thread.id, owned.clone()))
        });
        // Limited, because a VMM may name any number of threads.
        let vcpus = vcpus.take(self.config.daemon.cap_threads);
        let waited = vcpus.filter_map(|(id, owned)| Some((id, (owned, id.wait_time().ok()?)))).collect();
        self.metrics.stolen(&waited);
    }

    fn knob_states(&self) -> Vec<api::KnobState> {
        self.look.plan.settings.iter().map(|setting| self.knob_state(setting)).collect()
    }

    /// Why this method is in force.
    pub(super) fn method_by(&self) -> &'static str {
        match (self.method, self.config.host.method) {
            (Some(_), _) => "request",
            (None, Some(_)) => "configuration",
            (None, None) => "default",
        }
    }

    /// The status: the value that the plan gives each knob, and the value that was read now.
    pub fn status(&self) -> api::Status {
        let mut knobs = self.knob_states();
        if self.state == api::State::Observing {
            knobs.extend(self.would_reserve());
        }
        let mut problems: Vec<api::Problem> = self.look.found.problems.iter().map(view::problem).collect();
        problems.extend(self.errors.iter().cloned());
        let unserved = |why: &String| api::Problem { subject: "metrics".to_owned(), message: why.clone() };
        problems.extend(self.unserved.iter().map(unserved));
        let fault = |why: &str| api::Problem { subject: "reservations".to_owned(), message: why.to_owned() };
        problems.extend(self.requested.fault().map(fault));
        api::Status {
            schema_version: api::SCHEMA_VERSION,
            version: crate::version().to_owned(),
            pid: std::process::id(),
            kernel: self.look.inventory.kernel.release.clone(),
            state: self.state,
            method: self.look.intent.method.name().to_owned(),
            method_by: self.method_by().to_owned(),
            passes: self.passes,
            last_pass_seconds: self.last_pass.as_secs_f64(),
            caps: self.caps_status(),
            polling: self.polling(),
            drift: knobs.iter().filter(|knob| knob.state == "drifted").count(),
            knobs,
            findings: self.look.plan.findings.iter().map(view::finding).collect(),
            problems,
            refused_configuration: self.refused.clone(),
            requested: self.requested.len(),
        }
    }

    /// The CPU time that would be reserved, as knobs.
    fn would_reserve(&self) -> impl Iterator<Item = api::KnobState> + '_ {
        let foreseen = &self.look.foreseen;
        foreseen.vcpus.iter().map(|vcpu| {
            let (knob, wanted) = view::reservation(foreseen, vcpu);
            let (rule, state) = (view::RESERVATION.to_owned(), "would-change".to_owned());
            api::KnobState { rule, knob, wanted, actual: None, state, why: Some(UNRESERVED.to_owned()) }
        })
    }

    fn knob_state(&self, setting: &hostnet::Setting) -> api::KnobState {
        let mut known = view::knob_state(&self.past_pacers(), setting);
        if known.state != "drifted" {
            return known;
        }
        let moved = match (&setting.knob, &known.actual) {
            (Knob::ThreadPolicy { thread, .. }, Some(actual)) => self.watches.moved(*thread, actual),
            _ => None,
        };
        let (state, why) = match self.failures.get(&setting.knob.key()) {
            _ if self.state == api::State::Reset => {
                ("not-applied", "`ontime reset` was called; nothing is applied until `ontime apply`".to_owned())
            }
            _ if self.state == api::State::Observing => {
                let foreseen = view::foreseen(&self.host, setting).unwrap_or(("would-change", None));
                (foreseen.0, foreseen.1.unwrap_or_else(|| "mode observe: nothing is set".to_owned()))
            }
            _ if moved == Some(Moved::Paused) => ("paused", "over its runtime cap this moment".to_owned()),
            _ if moved == Some(Moved::Ahead) => ("ahead", "put ahead of its level because of an interrupt".to_owned()),
            Some((state, why)) => (*state, why.clone()),
            None => ("drifted", "changed by another program since; set again at the next pass".to_owned()),
        };
        state.clone_into(&mut known.state);
        known.why = Some(why);
        known
    }

    fn caps_status(&self) -> api::Caps {
        let (threads, why) = match &self.caps {
            Ok(caps) => {
                let report = caps.report();
                let open = report.iter().find(|used| !used.cover.holds());
                let open = open.or_else(|| report.iter().find(|used| used.refused + used.escaped > 0));
                let why = open.map(|used| view::cap_thread(used, &self.watches.of)).map(|thread| {
                    let cause = thread.watched.strip_prefix("not: ").unwrap_or(&thread.watched);
                    format!("thread {} of {} is not held to its runtime cap: {cause}", thread.tid, thread.of)
                });
                let why = why.or_else(|| self.why_uncapped().map(|(found, remedy)| format!("{found}; {remedy}")));
                let by_plan = "vCPUs with reserved CPU time are held to that; kernel protections stay on beside them";
                let why = why.or_else(|| (!self.look.settled.vcpus.is_empty()).then(|| by_plan.to_owned()));
                (report.iter().map(|used| view::cap_thread(used, &self.watches.of)).collect(), why)
            }
            Err(why) => (Vec::new(), Some(why.clone())),
        };
        api::Caps { in_force: self.in_force, why, protections_off: self.protections_off(), threads }
    }
}
