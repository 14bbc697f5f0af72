//! Every answer of the API fits the schema that the daemon serves, and that `docs/reference/openapi.json` repeats.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test ends by panicking")]

mod support;

use serde_json::Value;
use support::{Daemon, Guest, Site, possible, until};

/// Whether `value` fits `schema`. Supports the part of JSON Schema that the description uses; anything else fails the
/// test.
fn fits(value: &Value, schema: &Value, all: &Value, at: &str) -> Result<(), String> {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        let target =
            all.pointer(reference.strip_prefix('#').unwrap()).ok_or(format!("{at}: {reference} is missing"))?;
        return fits(value, target, all, at);
    }
    if let Some(any) = schema.get("oneOf").and_then(Value::as_array) {
        let fitting = any.iter().filter(|one| fits(value, one, all, at).is_ok()).count();
        return if fitting == 1 { Ok(()) } else { Err(format!("{at}: {value} fits {fitting} of {any:?}")) };
    }
    if let Some(allowed) = schema.get("enum").and_then(Value::as_array) {
        if !allowed.contains(value) {
            return Err(format!("{at}: {value} is none of {allowed:?}"));
        }
    }
    let kinds: Vec<&str> = match schema.get("type") {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => return Err(format!("{at}: the schema has no type: {schema}")),
    };
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if kinds.contains(&"integer") && (number.is_i64() || number.is_u64()) => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    if !kinds.contains(&kind) {
        return Err(format!("{at}: {value} is a {kind}, wanted {kinds:?}"));
    }
    if let (Value::Number(number), Some(minimum)) = (value, schema.get("minimum").and_then(Value::as_f64)) {
        if number.as_f64() < Some(minimum) {
            return Err(format!("{at}: {number} is below {minimum}"));
        }
    }
    if let (Value::Array(items), Some(schema)) = (value, schema.get("items")) {
        for (index, item) in items.iter().enumerate() {
            fits(item, schema, all, &format!("{at}[{index}]"))?;
        }
    }
    if let (Value::Object(fields), Some(known)) = (value, schema.get("properties").and_then(Value::as_object)) {
        for (name, field) in fields {
            let schema = known.get(name).ok_or(format!("{at}.{name} is not described"))?;
            fits(field, schema, all, &format!("{at}.{name}"))?;
        }
        for name in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
            if !fields.contains_key(name.as_str().unwrap()) {
                return Err(format!("{at}.{name} is missing"));
            }
        }
    }
    Ok(())
}

fn check(site: &Site, all: &Value, method: &str, path: &str, body: Option<&str>, wanted: u16) -> Value {
    let url = format!("http://ontime{path}");
    let mut args = vec!["-X", method, &url];
    if let Some(body) = body {
        args.extend(["-H", "content-type: application/json", "-d", body]);
    }
    let (code, text) = site.curl(&args);
    assert_eq!(code, wanted, "{method} {path} {body:?}: {text}");
    let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}: {text}"));
    let responses = &all["paths"][path][method.to_lowercase()]["responses"];
    let schema = &responses[wanted.to_string()]["content"]["application/json"]["schema"];
    fits(&value, schema, all, path).unwrap();
    value
}

#[test]
fn every_answer_fits_the_description() {
    if !possible() {
        return;
    }
    let site = Site::new();
    let name = format!("api-{}", std::process::id());
    site.configure("tenants.toml", &format!("[[tenant]]\nname = \"{name}\"\nclass = \"rt\"\nlevel = 1\n"));
    site.ip(&["link", "add", "va0", "type", "veth", "peer", "name", "va1"]);
    site.ip(&["link", "set", "va0", "up"]);
    let guest = Guest::stopped(&name);
    guest.vcpu();
    let _daemon = Daemon::start(&site);
    let (code, served) = site.curl(&["http://ontime/openapi.json"]);
    assert_eq!(code, 200);
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/openapi.json");
    assert_eq!(served, std::fs::read_to_string(page).unwrap());
    let all: Value = serde_json::from_str(&served).unwrap();

    let applied = check(&site, &all, "POST", "/v1/apply", Some("{}"), 200);
    assert!(applied["unchanged"].as_u64().unwrap() + applied["changes"].as_array().unwrap().len() as u64 > 0);
    let tenants = check(&site, &all, "GET", "/v1/tenants", None, 200);
    let tenant = tenants["tenants"].as_array().unwrap().iter().find(|tenant| tenant["name"] == name.as_str()).unwrap();
    assert_eq!(tenant["class"], "rt1");
    let status = check(&site, &all, "GET", "/v1/status", None, 200);
    assert!(status["knobs"].as_array().unwrap().iter().any(|knob| knob["wanted"] == "FIFO 42"), "{status}");
    let nics = check(&site, &all, "GET", "/v1/nics", None, 200);
    assert!(nics["nics"].as_array().unwrap().iter().any(|nic| nic["name"] == "va0"), "{nics}");
    check(&site, &all, "POST", "/v1/apply", Some("{\"method\":\"no\"}"), 400);
    check(&site, &all, "POST", "/v1/apply", Some("{\"methid\":\"vanilla\"}"), 400);
    check(&site, &all, "POST", "/v1/apply", Some("{"), 400);
    check(&site, &all, "POST", "/v1/apply", Some("{\"method\":\"vanilla\",\"dry_run\":true}"), 200);
    check(&site, &all, "POST", "/v1/reset", Some("null"), 200);
    assert_eq!(site.curl(&["http://ontime/no"]).0, 404);
    assert_eq!(site.curl(&["-X", "DELETE", "http://ontime/v1/tenants"]).0, 405);
    let large = site.path("large");
    std::fs::write(&large, vec![b' '; 1 << 20]).unwrap();
    let data = format!("@{}", large.display());
    let header = "content-type: application/json";
    let (code, _) = site.curl(&["-X", "POST", "-H", header, "--data-binary", &data, "http://ontime/v1/apply"]);
    assert!((400..500).contains(&code), "{code}");
    // The daemon still answers after all of this.
    assert_eq!(site.curl(&["http://ontime/v1/status"]).0, 200);
}

#[test]
fn only_root_changes() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    if !possible() {
        return;
    }
    let site = Site::new();
    let _daemon = Daemon::start(&site);
    let socket = site.path("run/ontime.sock");
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o660);
    // Even if an administrator opens the socket to more users, the kernel identifies the client.
    for (path, mode) in [(site.path("."), 0o755), (site.path("run"), 0o755), (socket.clone(), 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let as_nobody = |args: &[&str]| {
        let mut command = std::process::Command::new("curl");
        command.args(["-sS", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket"]).arg(&socket).args(args);
        String::from_utf8(command.uid(65534).gid(65534).output().unwrap().stdout).unwrap()
    };
    assert_eq!(as_nobody(&["http://o/v1/status"]), "200");
    assert_eq!(as_nobody(&["-X", "POST", "http://o/v1/reset"]), "403");
    let json = "content-type: application/json";
    assert_eq!(as_nobody(&["-X", "POST", "-H", json, "-d", "{}", "http://o/v1/apply"]), "403");
    assert_eq!(as_nobody(&["-X", "POST", "-H", json, "-d", "{\"dry_run\":true}", "http://o/v1/apply"]), "200");
    assert_eq!(site.json(&["status", "--json"])["state"], "applied");
}

#[test]
fn metrics_parse_and_name_no_thread() {
    if !possible() {
        return;
    }
    let site = Site::new();
    let name = format!("metrics-{}", std::process::id());
    site.configure("tenants.toml", &format!("[[tenant]]\nname = \"{name}\"\nclass = \"rt\"\n"));
    let guest = Guest::stopped(&name);
    guest.vcpu();
    let _daemon = Daemon::start(&site);
    site.poke();
    let text = until("the guest has metrics", || {
        let (_, text) = site.curl(&["-H", "accept: application/openmetrics-text", "http://o/metrics"]);
        text.contains(&name).then_some(text)
    });
    let mut types = std::collections::BTreeMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "TYPE", name, kind] => {
                assert!(name.starts_with("ontime_"), "{line}");
                types.insert(name.to_owned(), kind.to_owned());
            }
            ["#", ..] => {}
            _ => {
                let (series, value) = line.rsplit_once(' ').unwrap();
                value.parse::<f64>().unwrap_or_else(|_| panic!("{line}"));
                let family = series.split('{').next().unwrap();
                let known = ["", "_total", "_bucket", "_sum", "_count"]
                    .iter()
                    .any(|tail| family.strip_suffix(tail).is_some_and(|base| types.contains_key(base)));
                assert!(known, "{line} has no TYPE");
                assert!(!series.contains("tid="), "{line}");
                assert!(!series.contains(&format!("\"{}\"", guest.vcpu())), "{line}");
            }
        }
    }
    // The value is not checked: on a busy machine the guest's start may look like a long computation.
    assert!(text.contains(&format!("ontime_cap_pauses_total{{domain=\"{name}\",class=\"rt0\"}} ")), "{text}");
    assert!(text.trim_end().ends_with("# EOF"));
}
