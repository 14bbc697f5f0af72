//! A libvirt host with four VMs, as `ontime report` describes it, in the laboratory: before and after a change.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::inside::command::run;
use crate::inside::daemon::{Daemon, reset};
use crate::inside::vm::Vm;
use crate::outside::Outside;

/// Name, role and network, address, Ontime's attributes.
const VMS: [(&str, &str, &str, &str); 4] = [
    ("plc", "rt", "10.1.0.2", "class=\"rt\" level=\"0\""),
    ("hmi", "rt", "10.1.0.3", "class=\"rt\" level=\"2\" runtime-cap=\"0.5\""),
    ("web", "bulk", "10.2.0.2", "class=\"bulk\""),
    ("backup", "bulk", "10.2.0.3", "class=\"bulk\""),
];

pub(crate) fn a_libvirt_host_has_a_twin(test: &Outside) -> Result<()> {
    test.inside()?;
    let twin = |more: &[&str]| {
        let mut command = test.lab(&["twin"]);
        command.arg(test.files()?.join("report.tar")).args(more);
        anyhow::Ok(command)
    };
    let scenario = test.run(&mut twin(&[])?)?.expect(0)?;
    for (name, ..) in VMS {
        ensure!(scenario.contains(&format!("name = \"{name}\"")), "{name} is not in the twin: {scenario}");
    }
    ensure!(scenario.contains("level = 2") && scenario.contains("methods = [\"partitioned\"]"), "{scenario}");
    let file = test.dir().join("twin.json");
    let mut measured = twin(&["--change", "methods=vanilla", "--silence", "900"])?;
    measured.arg("--ontime").arg(test.ontime()).arg("--json").arg(&file);
    test.run(&mut measured)?.expect(0)?;
    let report: Value = serde_json::from_slice(&fs::read(&file).context("the results")?).context("the results")?;
    let results = report.get("results").and_then(Value::as_array).context("the report has no results")?;
    let slowest = |method: &str| -> Result<f64> {
        let result = results.iter().find(|result| result.get("method").and_then(Value::as_str) == Some(method));
        let max = result.and_then(|result| result.get("latency_us")?.get("max")?.as_f64());
        max.with_context(|| format!("no slowest request of {method}"))
    };
    let (before, after) = (slowest("before-partitioned")?, slowest("after-vanilla")?);
    test.note(format_args!("figures: slowest request: partitioned {before} us, vanilla {after} us"))?;
    ensure!(after > before, "the change makes no difference");
    Ok(())
}

pub(crate) fn libvirt_host() -> Result<()> {
    run("lab-libvirt up")?;
    for (name, net, address, attributes) in VMS {
        run(["lab-libvirt", "define", name, net, net, address, attributes])?;
        run(format!("virsh -q start {name}"))?;
        Vm::of_libvirt(name).wait()?;
    }
    let daemon = Daemon::start()?;
    run("ontime apply")?;
    run("ontime report --output /lab/report.tar")?;
    reset()?;
    daemon.ends()
}
