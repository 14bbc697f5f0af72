//! `ontime sockets`: a VM's outsourced sockets, as `ss` would show them.

use std::io::{ErrorKind, Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use ontime_sockets::status::{SocketStatus, Status};
use ontime_tenants::qmp::Bounded;
use rustix::net::SocketFlags;

use crate::device::{connect, vm_name};
use crate::exit;
use crate::paths::Paths;
use crate::table::{self, visible};

/// Longer than the device process waits for its own worker.
const PATIENCE: Duration = Duration::from_secs(5);
/// The largest accepted answer, bytes: 60,000 sockets.
const ANSWER_MAX: u64 = 64 << 20;

/// `ontime sockets`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM.
    #[arg(value_name = "VM", value_parser = vm_name)]
    vm: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Shows the sockets, and the number of refused calls. Exit status 3 where the device process could not list them.
///
/// # Errors
/// Where no device process runs for the VM.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let status = ask(&ontime_sockets::Paths::new(&paths.run_dir, &args.vm), &args.vm)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &crate::api::Versioned::of(&status))?;
        writeln!(out)?;
    } else {
        show(&mut out, &status)?;
    }
    Ok(ExitCode::from(if status.sockets.is_some() { exit::OK } else { exit::UNKNOWN }))
}

fn show(out: &mut impl Write, status: &Status) -> std::io::Result<()> {
    match &status.sockets {
        None => writeln!(
            out,
            "the open sockets are not known: the worker thread of the device process does not answer; ask again, or \
             see its log: journalctl -u ontime-device@{}",
            visible(&status.vm)
        )?,
        Some(none) if none.is_empty() => writeln!(out, "no socket: {} has none open", visible(&status.vm))?,
        Some(sockets) => {
            let head = ["PROTO", "STATE", "RECV-Q", "SEND-Q", "LOCAL", "GUEST", "PEER", "CHANNEL"];
            let rows: Vec<[String; 8]> = sockets.iter().map(row).collect();
            table::write(out, head, &rows)?;
        }
    }
    let counted = status.counters.iter().map(|(name, count)| format!("{} {count}", visible(name)));
    let counted: Vec<String> = counted.collect();
    writeln!(out, "\n{}", counted.join(", "))
}

fn ask(paths: &ontime_sockets::Paths, vm: &str) -> anyhow::Result<Status> {
    let path = paths.status();
    let said = |what: &str| format!("{}: {what}", path.display());
    let stream = connect(&path, SocketFlags::empty()).map_err(|error| {
        let what = match error.kind() {
            ErrorKind::PermissionDenied => format!("whether a device process serves {vm} cannot be seen; run as root"),
            _ => format!("no device process serves {vm}; start it: systemctl start ontime-device@{vm}"),
        };
        anyhow::Error::from(error).context(said(&what))
    })?;
    let stream = Bounded { stream: &stream, until: Instant::now() + PATIENCE };
    let mut answer = Vec::new();
    let log = format!("see its log: journalctl -u ontime-device@{vm}");
    let late = || said(&format!("the device process does not answer; {log}"));
    stream.take(ANSWER_MAX).read_to_end(&mut answer).with_context(late)?;
    serde_json::from_slice(&answer).with_context(|| said(&format!("not an answer of this version; {log}")))
}

fn row(socket: &SocketStatus) -> [String; 8] {
    let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    [
        socket.protocol.clone(),
        socket.state.clone(),
        socket.recv_queue.to_string(),
        socket.send_queue.to_string(),
        socket.local.clone(),
        or(&socket.guest),
        or(&socket.peer),
        socket.channel.map_or_else(|| "-".to_owned(), |channel| channel.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_was_not_answered_is_not_shown_as_an_empty_one() {
        let shown = |sockets| {
            let counters = vec![("stayed_local".to_owned(), 3)];
            let status = Status { vm: "mail".to_owned(), sockets, deadlines: Vec::new(), counters };
            let mut out = Vec::new();
            show(&mut out, &status).unwrap();
            let json = serde_json::to_value(crate::api::Versioned::of(&status)).unwrap();
            (String::from_utf8(out).unwrap(), json["sockets"].clone())
        };
        let (text, json) = shown(None);
        assert!(text.starts_with("the open sockets are not known: ") && text.contains("ontime-device@mail"), "{text}");
        assert!(!text.contains("none open") && text.ends_with("\nstayed_local 3\n"), "{text}");
        assert_eq!(json, serde_json::Value::Null);
        let (text, json) = shown(Some(Vec::new()));
        assert_eq!(text, "no socket: mail has none open\n\nstayed_local 3\n");
        assert_eq!(json, serde_json::json!([]));
    }

    /// A guest that has taken its device process over chooses them.
    #[test]
    fn names_in_an_answer_do_not_reach_a_terminal() {
        let name = || "\x1b]0;x\x07".to_owned();
        let vm = r#"{"protocol":"N","state":"N","recv_queue":0,"send_queue":0,"local":"N","guest":"N","peer":"N",
                     "channel":0,"id":0}"#;
        let socket: SocketStatus = serde_json::from_str(&vm.replace('N', "\\u001b[2J")).unwrap();
        for sockets in [None, Some(Vec::new()), Some(vec![socket])] {
            let status = Status { vm: name(), sockets, deadlines: Vec::new(), counters: vec![(name(), 1)] };
            let mut out = Vec::new();
            show(&mut out, &status).unwrap();
            let text = String::from_utf8(out).unwrap();
            assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        }
    }
}
