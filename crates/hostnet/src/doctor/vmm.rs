//! The start options of RT VMs' VMMs, which only a restart changes.

use ontime_tenants::{Problem, ProblemKind};

use super::{Check, State};

pub(super) fn settings(problems: &[Problem]) -> Check {
    let (id, title) = ("vmm-settings", "how RT VMs' QEMU was started");
    let delays: Vec<&Problem> = problems.iter().filter(|one| matches!(one.kind, ProblemKind::Delay(_))).collect();
    if delays.is_empty() {
        return Check::new(id, title, State::Ok, "no RT VM has a setting that delays its guest");
    }
    let told = |tell: fn(&Problem) -> String| -> Vec<String> {
        delays.iter().map(|problem| format!("{}: {}", problem.subject, tell(problem))).collect()
    };
    Check::new(id, title, State::Warning, told(Problem::message).join("; "))
        .costs(
            8_618,
            "one or two thread switches to QEMU's main thread a packet, and its lock, or a vCPU that never rests; \
            not measured",
            "",
        )
        .remedy(format!("at the VM's next start, {}", told(Problem::remedy).join("; ")))
}
