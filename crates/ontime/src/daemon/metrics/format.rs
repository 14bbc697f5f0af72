//! The two text formats of metrics. In: OpenMetrics' text, as `prometheus-client` writes it, and a request's `Accept`.
//! Out: the format that the client asked for. The classic format is the default, because every reader has it.

use std::collections::BTreeSet;

/// A text format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Prometheus' classic format.
    Classic,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// The format that the client prefers; the classic one where it accepts neither by name.
    pub(crate) fn accepted(accept: Option<&str>) -> Self {
        let (mut open, mut classic) = (0.0_f32, 0.0_f32);
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut version, mut quality) = (None, 1.0);
            for (name, value) in parts.filter_map(|part| part.split_once('=')) {
                match name.trim().to_ascii_lowercase().as_str() {
                    "version" => version = Some(value.trim().trim_matches('"')),
                    "q" => quality = value.trim().parse().unwrap_or(0.0),
                    _ => {}
                }
            }
            match (kind.as_str(), version) {
                ("application/openmetrics-text", None | Some("1.0.0" | "0.0.1")) => open = open.max(quality),
                ("text/plain", None | Some("0.0.4")) => classic = classic.max(quality),
                _ => {}
            }
        }
        if open > 0.0 && open >= classic { Self::OpenMetrics } else { Self::Classic }
    }

    /// The content type of this format.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Converts OpenMetrics text to this format.
    pub(crate) fn render(self, open: &str) -> String {
        match self {
            Self::Classic => classic(open),
            Self::OpenMetrics => open.to_owned(),
        }
    }
}

/// The classic format has no end mark and no units, and names a counter like its samples, with `_total`.
fn classic(open: &str) -> String {
    let words = |line: &str| line.splitn(4, ' ').map(str::to_owned).collect::<Vec<_>>();
    let counter = |line: &str| match words(line).as_slice() {
        [hash, kind, name, of] if hash == "#" && kind == "TYPE" && of == "counter" => Some(name.clone()),
        _ => None,
    };
    let counters: BTreeSet<String> = open.lines().filter_map(counter).collect();
    let mut out = String::with_capacity(open.len());
    for line in open.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        let named = line.strip_prefix("# ").and_then(|rest| rest.split_once(' '));
        let described = named.and_then(|(kind, rest)| rest.split_once(' ').map(|(name, text)| (kind, name, text)));
        match described {
            Some((kind, name, text)) if counters.contains(name) => {
                out.extend(["# ", kind, " ", name, "_total ", text]);
            }
            _ => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_chooses_the_format() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, wanted) in [
            (None, Format::Classic),
            (Some(""), Format::Classic),
            (Some("*/*"), Format::Classic),
            (Some("text/html, */*"), Format::Classic),
            (Some(prometheus), Format::OpenMetrics),
            (Some("Application/OpenMetrics-Text"), Format::OpenMetrics),
            (Some("application/openmetrics-text;q=0"), Format::Classic),
            (Some("application/openmetrics-text;version=2.0.0, text/plain;q=0.1"), Format::Classic),
            (Some("application/openmetrics-text;q=0.2, text/plain;version=0.0.4;q=0.3"), Format::Classic),
            (Some("application/openmetrics-text;q=x"), Format::Classic),
            (Some(";;;=,,q=1"), Format::Classic),
        ] {
            assert_eq!(Format::accepted(accept), wanted, "{accept:?}");
        }
    }

    #[test]
    fn the_classic_format_names_counters_as_their_samples() {
        let open = "# HELP ontime_cap_paused_seconds Time off.\n# TYPE ontime_cap_paused_seconds counter\n\
                    # UNIT ontime_cap_paused_seconds seconds\n\
                    ontime_cap_paused_seconds_total{domain=\"# TYPE ontime_x counter\"} 1.5\n\
                    # HELP ontime_tenants Tenants.\n# TYPE ontime_tenants gauge\nontime_tenants 2\n# EOF\n";
        let classic = "# HELP ontime_cap_paused_seconds_total Time off.\n# TYPE ontime_cap_paused_seconds_total \
                       counter\nontime_cap_paused_seconds_total{domain=\"# TYPE ontime_x counter\"} 1.5\n\
                       # HELP ontime_tenants Tenants.\n# TYPE ontime_tenants gauge\nontime_tenants 2\n";
        assert_eq!(Format::Classic.render(open), classic);
        assert_eq!(Format::OpenMetrics.render(open), open);
    }
}
