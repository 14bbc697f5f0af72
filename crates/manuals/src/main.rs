//! `ontime-manuals DIRECTORY`: writes the man pages of the `ontime` command to `DIRECTORY/man` and its shell
//! completions to `DIRECTORY/completions`, both from the definitions that the command itself parses with.

use std::io;
use std::path::Path;

use anyhow::Context;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

/// Exit statuses; docs/daemon.md has them in full.
const STATUSES: [(&str, &str); 6] = [
    ("0", "Done, and all is as wanted."),
    ("1", "Warning: something drifted, failed, was not restored, does not fit, or was missed."),
    ("2", "Critical: a finding breaks the guarantee of the real-time class."),
    ("3", "Unknown: not done or not all seen, for lack of rights, the daemon or an ability of the host."),
    ("64", "Called wrongly, or with a name that does not exist."),
    ("78", "A configuration file is wrong; the message has file, line and what is allowed."),
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
        clap_complete::generate_to(shell, &mut ontime::command(), "ontime", &completions)?;
    }
    Ok(())
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
        for completion in ["ontime.bash", "_ontime", "ontime.fish"] {
            assert!(read(&format!("completions/{completion}")).contains("status"), "{completion}");
        }
    }
}
