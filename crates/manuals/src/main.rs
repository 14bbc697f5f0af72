//! `ontime-manuals DIRECTORY`: writes the man pages of the `ontime` command to `DIRECTORY/man` and its shell
//! completions to `DIRECTORY/completions`, both from the definitions that the command itself parses with.

use std::io;
use std::path::Path;

use anyhow::Context;
use clap_complete::{Generator, Shell};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

/// Exit statuses; docs/reference/daemon.md has them in full.
const STATUSES: [(&str, &str); 6] = [
    ("0", "Done; everything is as configured."),
    ("1", "Warning: something drifted, failed, was not restored, does not fit, or was missed."),
    ("2", "Critical: a finding breaks the guarantee of the real-time class."),
    ("3", "Unknown: not done or not all seen, because rights, the daemon or a feature of the host is missing."),
    ("64", "Wrong arguments, or a name that does not exist."),
    ("78", "A configuration file is wrong; the message has file, line and allowed values."),
];

/// What the command reads and writes.
const FILES: [(&str, &str); 4] = [
    (
        "/etc/ontime/*.toml",
        "Configuration: daemon, tenants, host, sched, sockets; parts of each in NAME.conf.d/*.toml.",
    ),
    ("/run/ontime/ontime.sock", "The daemon's HTTP socket."),
    ("/var/lib/ontime/originals", "The original value of every setting that Ontime changed since the host booted."),
    ("/usr/share/doc/ontime/", "The documentation; README.md is its index."),
];

fn main() -> anyhow::Result<()> {
    let directory = std::env::args_os().nth(1).context("call it with a directory: ontime-manuals DIRECTORY")?;
    write(Path::new(&directory))
}

fn write(directory: &Path) -> anyhow::Result<()> {
    let (man, completions) = (directory.join("man"), directory.join("completions"));
    for made in [&man, &completions] {
        std::fs::create_dir_all(made).with_context(|| made.display().to_string())?;
    }
    let mut command = ontime::command().disable_help_subcommand(true);
    command.build();
    write_pages(&command, &man)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let path = completions.join(shell.file_name("ontime"));
        std::fs::write(&path, completion(shell)?).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// What the markers in `NAMES` begin with; the rest is the argument of `ontime names`.
const MARKER: &str = "ontime-names-";

/// Arguments whose values are names that only the host knows: the subcommand, the argument, and the marker that stands
/// for the names in what the generators write.
const NAMES: [(&[&str], &str, &str); 8] = [
    (&["apply"], "method", "ontime-names-methods"),
    (&["attach"], "vm", "ontime-names-socket-vms"),
    (&["device"], "vm", "ontime-names-socket-vms"),
    (&["net", "status"], "nics", "ontime-names-nics"),
    (&["sockets"], "vm", "ontime-names-socket-vms"),
    (&["trace"], "vm", "ontime-names-vms"),
    (&["trace"], "container", "ontime-names-containers"),
    (&["trace"], "nic", "ontime-names-nics"),
];

/// The completions for a shell. The generators write them with a marker as the only value of an argument in `NAMES`;
/// then the shell's code that runs `ontime names` takes the marker's place.
fn completion(shell: Shell) -> anyhow::Result<String> {
    let mut command = ontime::command();
    for (path, argument, marker) in NAMES {
        command = with_marker(command, path, argument, marker);
    }
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "ontime", &mut text);
    let mut text = String::from_utf8(text)?;
    for (path, _, marker) in NAMES {
        let names = marker.trim_start_matches(MARKER);
        text = match shell {
            Shell::Zsh => text.replace(&format!("({marker})"), &format!("_ontime_names {names}")),
            Shell::Fish => text.replace(&format!("{marker}\\t''"), &format!("(ontime names {names} 2>/dev/null)")),
            _ => text.replace(marker, &format!("$(ontime names {names} 2>/dev/null)")),
        };
        // The generator for fish leaves positional arguments out.
        if let (Shell::Fish, Some(condition)) = (shell, positional(&command, path, marker)) {
            text += &format!("complete -c ontime -n \"{condition}\" -f -a \"(ontime names {names} 2>/dev/null)\"\n");
        }
    }
    if shell == Shell::Zsh {
        let (first, rest) = text.split_once('\n').context("zsh's completions have one line")?;
        text = format!("{first}\n{ZSH}{rest}");
    }
    Ok(text)
}

/// A function for `_arguments`, which puts options of compadd before the argument.
const ZSH: &str = r#"
_ontime_names() {
    local -a names
    names=(${(f)"$(ontime names ${@[-1]} 2>/dev/null)"})
    compadd "${@[1,-2]}" -a names
}
"#;

fn with_marker(command: clap::Command, path: &[&str], argument: &str, marker: &'static str) -> clap::Command {
    match path {
        [] => command
            .mut_arg(argument, |argument| argument.value_parser(clap::builder::PossibleValuesParser::new([marker]))),
        [first, rest @ ..] => command.mut_subcommand(first, |command| with_marker(command, rest, argument, marker)),
    }
}

/// Where fish offers names for a subcommand's positional argument, if it has one with this marker.
fn positional(command: &clap::Command, path: &[&str], marker: &str) -> Option<String> {
    let found = path.iter().try_fold(command, |command, name| command.find_subcommand(name))?;
    let is_marked =
        |argument: &clap::Arg| argument.get_possible_values().iter().any(|value| value.get_name() == marker);
    found.get_positionals().any(is_marked).then(|| match path {
        [first, second, ..] => {
            format!("__fish_ontime_using_subcommand {first}; and __fish_seen_subcommand_from {second}")
        }
        _ => format!("__fish_ontime_using_subcommand {}", path.concat()),
    })
}

/// A page for the command and for each of its subcommands, but for hidden ones.
fn write_pages(command: &clap::Command, directory: &Path) -> anyhow::Result<()> {
    let page = Man::new(command.clone()).source(format!("Ontime {}", env!("CARGO_PKG_VERSION"))).manual("Ontime");
    let path = directory.join(page.get_filename());
    std::fs::write(&path, text(command, &page)?).with_context(|| path.display().to_string())?;
    subcommands(command).try_for_each(|command| write_pages(command, directory))
}

fn subcommands(command: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

fn text(command: &clap::Command, page: &Man) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if subcommands(command).next().is_some() {
        page.render_subcommands_section(&mut text)?;
    }
    let is_root = command.get_display_name().is_none_or(|name| name == "ontime");
    let mut end = Roff::new();
    list(&mut end, "EXIT STATUS", &STATUSES);
    if is_root {
        list(&mut end, "FILES", &FILES);
    }
    end.control("SH", ["SEE ALSO"]);
    let others = if is_root { "(8)" } else { "(1), " };
    end.text([bold(if is_root { "ontimed" } else { "ontime" }), roman(others)]);
    if !is_root {
        end.text([bold("ontimed"), roman("(8)")]);
    }
    end.to_writer(&mut text)?;
    Ok(text)
}

fn list(page: &mut Roff, heading: &str, entries: &[(&str, &str)]) {
    page.control("SH", [heading]);
    for (name, meaning) in entries {
        page.control("TP", []);
        page.text([bold(*name)]);
        page.text([roman(*meaning)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subcommand_has_a_page_and_every_shell_its_completions() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        assert!(read("man/ontime.1").contains("/etc/ontime/*.toml"));
        for command in subcommands(&ontime::command()) {
            let page = read(&format!("man/ontime-{}.1", command.get_name()));
            assert!(page.contains(".SH NAME") && page.contains("EXIT STATUS"), "{page}");
        }
        for hidden in ["guardian", "trace-guardian", "help"] {
            assert!(!directory.path().join(format!("man/ontime-{hidden}.1")).exists(), "{hidden}");
        }
        for hidden in ["names", "guardian"] {
            assert!(!read("man/ontime.1").contains(&format!("ontime\\-{hidden}")), "{hidden}");
        }
        for completion in ["ontime.bash", "_ontime", "ontime.fish"] {
            assert!(read(&format!("completions/{completion}")).contains("status"), "{completion}");
        }
    }

    #[test]
    fn no_marker_is_left_and_each_shell_asks_for_each_kind_of_names() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = completion(shell).unwrap();
            assert!(!text.contains(MARKER), "{shell}: {text}");
            for names in ["methods", "vms", "socket-vms", "containers", "nics"] {
                assert!(text.contains(&format!("names {names}")), "{shell} {names}");
            }
            assert!(text.contains("vcpu-place") && text.contains("oslat"), "{shell}");
        }
        assert!(completion(Shell::Zsh).unwrap().starts_with("#compdef ontime\n"));
    }

    /// What bash offers in place of the last word, with a program `ontime` that prints two names for each kind.
    fn offered(words: &[&str]) -> Vec<String> {
        let [.., previous, current] = words else { panic!("{words:?} are too few words") };
        let last = words.len() - 1;
        let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
        let script = format!(
            "ontime() {{ [ \"$1\" = names ] && echo \"$2-1 $2-2\"; }}\n{}\nCOMP_WORDS=({})\nCOMP_CWORD={last}\n\
             _ontime ontime '{current}' '{previous}'\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n",
            completion(Shell::Bash).unwrap(),
            quoted.join(" ")
        );
        let out = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn bash_offers_the_names_of_the_host() {
        for (words, wanted) in [
            (&["ontime", "trace", "--vm", ""][..], &["vms-1", "vms-2"][..]),
            (&["ontime", "trace", "--container", "containers-2"], &["containers-2"]),
            (&["ontime", "trace", "--nic", "n"], &["nics-1", "nics-2"]),
            (&["ontime", "apply", "--method", "methods-1"], &["methods-1"]),
            (&["ontime", "status", "--rule", "vcpu"], &["vcpu-place"]),
            (&["ontime", "verify", "--test", "o"], &["oslat"]),
            (&["ontime", "attach", "s"], &["socket-vms-1", "socket-vms-2"]),
            (&["ontime", "device", "--vm", ""], &["socket-vms-1", "socket-vms-2"]),
            (&["ontime", "sockets", "socket-vms-2"], &["socket-vms-2"]),
            (&["ontime", "net", "status", "nics-1"], &["nics-1"]),
        ] {
            assert_eq!(offered(words), wanted, "{words:?}");
        }
    }
}
