//! Strict configuration files: unknown keys and values out of range are refused with file, line, column, the fault and
//! the allowed values.
//!
//! Input: TOML files and a type that defines their contents. Output: the value, or a [`ConfigError`] for the user.
//! Every part of Ontime reads `/etc/ontime` through this module.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::remedy;

/// The directory of Ontime's configuration.
pub const DIRECTORY: &str = "/etc/ontime";

/// The largest configuration file that is read, bytes.
const SIZE_MAX: u64 = 1 << 20;

/// An unusable configuration file.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}; {}", .path.display(), remedy_of(.source))]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file has an invalid value.
    #[error("{place}: {what}{}{}", line_of(.snippet), hint_of(.hint))]
    Invalid {
        /// Where the value is.
        place: TextPosition,
        /// The fault and the allowed values.
        what: String,
        /// The line of the file.
        snippet: String,
        /// A likely correction.
        hint: Option<String>,
    },
}

fn remedy_of(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "name a file that exists",
        io::ErrorKind::PermissionDenied if rustix::process::geteuid().is_root() => remedy(source),
        io::ErrorKind::PermissionDenied => "run as root, or correct its permissions",
        io::ErrorKind::NotADirectory => "put a directory in place of the file",
        io::ErrorKind::FileTooLarge => "shorten it, or split it into files below NAME.conf.d",
        io::ErrorKind::InvalidData => "write it as text in UTF-8",
        io::ErrorKind::IsADirectory => "put a file in place of the directory",
        _ => "correct or remove it",
    }
}

/// Replaces a Rust type's name in serde's message by a description of the allowed values.
fn plain(message: &str) -> String {
    // The parser only names these faults; add what to do.
    let remedies =
        [("missing field", "add it"), ("duplicate key", "keep one of them"), ("duplicate field", "keep one of them")];
    if let Some((_, remedy)) = remedies.iter().find(|(what, _)| message.starts_with(what)) {
        return format!("{message}; {remedy}");
    }
    if message == "wanted string or table" {
        return "invalid type, expected one of the key's words in quotes".to_owned();
    }
    let Some((what, name)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    let range = match name {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number from 0 up",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a string" => "a text in quotes",
        "a sequence" if what.ends_with("map") => {
            return "invalid type: one table, expected a list of tables: write its header in two brackets, [[...]]"
                .to_owned();
        }
        "a map" if what.ends_with("sequence") => {
            return "invalid type: a list of tables, expected one table for each name: write its header in single \
                    brackets, with the name, [....NAME]"
                .to_owned();
        }
        "a sequence" => "a list in brackets",
        "a map" => "a table",
        name if name.starts_with("struct ") => "a table",
        _ => return message.to_owned(),
    };
    format!("{what}, expected {range}")
}

fn line_of(snippet: &str) -> String {
    if snippet.is_empty() { String::new() } else { format!("\n  | {snippet}") }
}

fn hint_of(hint: &Option<String>) -> String {
    hint.as_ref().map_or_else(String::new, |hint| format!("\n  did you mean `{hint}`?"))
}

/// A position in a configuration file. Displays as `FILE:LINE:COLUMN`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextPosition {
    /// The configuration file.
    pub path: PathBuf,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
}

impl fmt::Display for TextPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.path.display(), self.line, self.column)
    }
}

/// A configuration file's text, kept so that later checks can point into it.
#[derive(Debug, Clone)]
pub struct Text {
    path: PathBuf,
    text: String,
}

impl Text {
    /// A text as the contents of a file.
    pub fn new(path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        Self { path: path.into(), text: text.into() }
    }

    /// Reads a file of at most 1 MiB.
    ///
    /// # Errors
    /// [`ConfigError::Read`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError::Read { path: path.to_owned(), source };
        let size = std::fs::metadata(path).map_err(failed)?.len();
        if size > SIZE_MAX {
            return Err(failed(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("{size} bytes are more than the allowed {SIZE_MAX}"),
            )));
        }
        Ok(Self::new(path, std::fs::read_to_string(path).map_err(failed)?))
    }

    /// The file, line and column of a byte offset.
    pub fn place(&self, offset: usize) -> TextPosition {
        let before = self.text.get(..offset).unwrap_or(&self.text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        TextPosition {
            path: self.path.clone(),
            line: before.matches('\n').count() + 1,
            column: before.get(line_start..).unwrap_or_default().chars().count() + 1,
        }
    }

    /// An error at a span of this file, for checks after parsing.
    pub fn error(&self, span: &Range<usize>, what: impl Into<String>) -> ConfigError {
        let place = self.place(span.start);
        let snippet = self.text.lines().nth(place.line - 1).unwrap_or_default().trim_end().to_owned();
        let what = what.into();
        let hint = suggestion(&what);
        ConfigError::Invalid { place, what, snippet, hint }
    }

    /// Parses the text as a `T`, which should deny unknown fields.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`].
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        toml::from_str(&self.text)
            .map_err(|error| self.error(&error.span().unwrap_or(0..0), plain(error.message().trim_end())))
    }
}

/// A value and the text from which it was parsed.
#[derive(Debug, Clone)]
pub struct Loaded<T> {
    /// The parsed value.
    pub value: T,
    /// For errors in later checks.
    pub text: Text,
}

/// Reads and parses one file. `T` should deny unknown fields and use [`toml::Spanned`] where later checks point to.
///
/// # Errors
/// [`ConfigError`] with the position.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<Loaded<T>, ConfigError> {
    let text = Text::read(path)?;
    Ok(Loaded { value: text.parse()?, text })
}

/// The files of a configuration: `DIRECTORY/NAME.toml`, then `DIRECTORY/NAME.conf.d/*.toml` in order of names. Missing
/// files are no error. Hidden files and files with another ending are ignored, because they belong to editors.
///
/// # Errors
/// [`ConfigError::Read`] if a directory exists but may not be searched or listed. A link that leads nowhere is listed:
/// reading it is an error.
pub fn files(directory: &Path, name: &str) -> Result<Vec<PathBuf>, ConfigError> {
    let main = directory.join(format!("{name}.toml"));
    let mut files = match main.symlink_metadata() {
        Ok(_) => vec![main],
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(source) => return Err(ConfigError::Read { path: main, source }),
    };
    let drop_ins = directory.join(format!("{name}.conf.d"));
    let failed = |source| ConfigError::Read { path: drop_ins.clone(), source };
    let entries = match std::fs::read_dir(&drop_ins) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(files),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension().is_some_and(|ending| ending == "toml") {
            found.push(path);
        }
    }
    found.sort();
    files.extend(found);
    Ok(files)
}

/// Longer names get no suggestion, bytes: no allowed name is this long.
const NAME_MAX: usize = 64;

/// The allowed name nearest to x in serde's "unknown field `x`, expected one of `a`, `b`" (or "unknown variant"). x
/// comes from the file and may contain anything.
fn suggestion(message: &str) -> Option<String> {
    let (named, allowed) = message.strip_prefix("unknown ")?.rsplit_once(", expected ")?;
    let unknown = named.split_once('`')?.1.strip_suffix('`').filter(|name| name.len() <= NAME_MAX)?;
    let allowed = allowed.split('`').skip(1).step_by(2);
    let (distance, nearest) =
        allowed.map(|allowed| (strsim::damerau_levenshtein(unknown, allowed), allowed)).min_by_key(|(far, _)| *far)?;
    (distance <= (unknown.chars().count() / 3).max(1) + 1).then(|| nearest.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Class {
        Rt,
        Bulk,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "kebab-case")]
    struct Sample {
        #[allow(dead_code)]
        runtime_cap: Option<f64>,
        #[allow(dead_code)]
        class: Option<Class>,
    }

    fn message(text: &str) -> String {
        Text::new("/etc/ontime/x.toml", text).parse::<Sample>().unwrap_err().to_string()
    }

    #[test]
    fn no_message_has_a_word_of_rusts() {
        #[derive(Debug, Deserialize)]
        struct File {
            #[allow(dead_code)]
            tenant: Option<Vec<Sample>>,
            #[allow(dead_code)]
            vm: Option<std::collections::BTreeMap<String, Sample>>,
            #[allow(dead_code)]
            defaults: Option<Sample>,
        }
        for (text, wanted) in [
            ("[tenant]\n", "1:1: invalid type: one table, expected a list of tables: write its header in two brackets"),
            ("\n[[vm]]\n", "2:1: invalid type: a list of tables, expected one table for each name"),
            ("tenant = 3\n", "1:10: invalid type: integer `3`, expected a list in brackets"),
            ("vm = 3\n", "1:6: invalid type: integer `3`, expected a table"),
            ("defaults = 3\n", "1:12: invalid type: integer `3`, expected a table"),
        ] {
            let said = Text::new("x.toml", text).parse::<File>().unwrap_err().to_string();
            assert!(said.starts_with(&format!("x.toml:{wanted}")), "{said}");
            assert!(!["struct", "map", "sequence"].iter().any(|word| said.contains(word)), "{said}");
        }
    }

    #[test]
    fn what_the_parser_only_names_has_a_remedy() {
        #[derive(Debug, Deserialize)]
        struct File {
            #[allow(dead_code)]
            host: String,
        }
        for (text, wanted) in [
            ("[a]\n", "missing field `host`; add it"),
            ("host = \"a\"\nhost = \"b\"\n", "duplicate key; keep one of them"),
            ("host = \"a\"\n[x]\n[x]\n", "duplicate key; keep one of them"),
        ] {
            let said = Text::new("x.toml", text).parse::<File>().unwrap_err().to_string();
            assert!(said.contains(wanted), "{said}");
        }
    }

    #[test]
    fn a_file_of_another_kind_is_refused_with_what_to_put_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir(path("host.toml")).unwrap();
        std::fs::write(path("sched.conf.d"), "").unwrap();
        std::fs::write(path("large.toml"), vec![b'#'; SIZE_MAX as usize + 1]).unwrap();
        std::fs::write(path("latin.toml"), [b'#', 0xe4]).unwrap();
        for (error, wanted) in [
            (Text::read(&path("host.toml")).map(drop), "put a file in place of the directory"),
            (files(dir.path(), "sched").map(drop), "put a directory in place of the file"),
            (Text::read(&path("large.toml")).map(drop), "split it into files below NAME.conf.d"),
            (Text::read(&path("latin.toml")).map(drop), "write it as text in UTF-8"),
        ] {
            let said = error.unwrap_err().to_string();
            assert!(said.ends_with(wanted), "{said}");
        }
    }

    #[test]
    fn an_unknown_key_is_named_with_place_allowed_keys_and_a_suggestion() {
        let message = message("# first\nruntime-cup = 0.5\n");
        assert!(message.starts_with("/etc/ontime/x.toml:2:1: unknown field `runtime-cup`"), "{message}");
        assert!(message.contains("expected `runtime-cap` or `class`"), "{message}");
        assert!(message.contains("| runtime-cup = 0.5"), "{message}");
        assert!(message.ends_with("did you mean `runtime-cap`?"), "{message}");
    }

    #[test]
    fn a_wrong_type_and_a_wrong_variant_are_named_with_their_place() {
        let message_type = message("runtime-cap = \"much\"");
        assert!(message_type.starts_with("/etc/ontime/x.toml:1:15: invalid type"), "{message_type}");
        let message_variant = message("class = \"tr\"");
        assert!(message_variant.contains("unknown variant `tr`"), "{message_variant}");
        assert!(message_variant.ends_with("did you mean `rt`?"), "{message_variant}");
    }

    #[test]
    fn broken_toml_points_at_the_line() {
        let message = message("runtime-cap = 0.5\nclass = \n");
        assert!(message.starts_with("/etc/ontime/x.toml:2:"), "{message}");
    }

    #[test]
    fn nothing_like_it_gives_no_suggestion() {
        assert!(!message("zebra = 1").contains("did you mean"));
    }

    /// With a backquote in the key, `, ` was once suggested.
    #[test]
    fn what_is_suggested_is_an_allowed_name_whatever_the_key_is() {
        for key in ["c`lass", "`", "a`, expected `b", "clas`, expected one of `,"] {
            let message = message(&format!("\"{key}\" = 1"));
            let hint = message.split_once("did you mean `").map(|(_, hint)| hint.trim_end_matches("`?"));
            assert!(hint.is_none_or(|hint| ["runtime-cap", "class"].contains(&hint)), "{message}");
        }
        assert!(!message(&format!("{} = 1", "class".repeat(100_000))).contains("did you mean"));
    }

    #[test]
    fn drop_ins_follow_the_main_file_in_name_order() {
        let dir = tempfile::tempdir().unwrap();
        assert!(files(dir.path(), "tenants").unwrap().is_empty());
        let drop_ins = dir.path().join("tenants.conf.d");
        std::fs::create_dir(&drop_ins).unwrap();
        for name in ["20-b.toml", "10-a.toml", "10-a.toml~", ".hidden.toml", "README"] {
            std::fs::write(drop_ins.join(name), "").unwrap();
        }
        std::fs::write(dir.path().join("tenants.toml"), "").unwrap();
        let names: Vec<_> = files(dir.path(), "tenants")
            .unwrap()
            .iter()
            .map(|path| path.strip_prefix(dir.path()).unwrap().display().to_string())
            .collect();
        assert_eq!(names, ["tenants.toml", "tenants.conf.d/10-a.toml", "tenants.conf.d/20-b.toml"]);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named_with_what_to_do() {
        let error = load::<Sample>(Path::new("/nonexistent/tenants.toml")).unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent/tenants.toml: cannot be read"), "{error}");
        assert!(error.ends_with("name a file that exists"), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let error = load::<Sample>(dir.path()).unwrap_err().to_string();
        assert!(error.ends_with("put a file in place of the directory"), "{error}");
        let path = dir.path().join("x.toml");
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        let error = load::<Sample>(&path).unwrap_err().to_string();
        assert!(error.ends_with("write it as text in UTF-8"), "{error}");
    }

    #[test]
    fn a_wrong_value_is_told_without_a_type_of_the_program() {
        #[derive(Debug, Deserialize)]
        #[allow(dead_code, reason = "only read")]
        struct Values {
            cpu: Option<u32>,
            port: Option<u16>,
            share: Option<f64>,
            name: Option<String>,
            class: Option<Class>,
        }
        for (text, said) in [
            ("cpu = -1", "integer `-1`, expected a whole number from 0 to 4294967295"),
            ("cpu = \"x\"", "string \"x\", expected a whole number from 0 to 4294967295"),
            ("port = 65536", "integer `65536`, expected a whole number from 0 to 65535"),
            ("share = true", "boolean `true`, expected a number"),
            ("name = 3.5", "floating point `3.5`, expected a text in quotes"),
            ("class = 2", "expected one of the key's words in quotes"),
            ("class = \"2\"", "unknown variant `2`, expected `rt` or `bulk`"),
        ] {
            let message = Text::new("x.toml", text).parse::<Values>().unwrap_err().to_string();
            assert!(message.contains(said), "{message}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(\\PC|\n){0,200}") {
            if let Err(error) = Text::new("f", text).parse::<Sample>() {
                let _ = error.to_string();
            }
        }
    }
}
