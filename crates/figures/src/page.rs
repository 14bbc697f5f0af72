//! The page: one self-contained HTML file, in light and dark, for phones and for paper. There is no script, and the
//! content security policy forbids every request.

use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = include_str!("page.css");
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// A self-contained page in Ontime's common style: light and dark, no script, no requests. `style` has the page's
/// additional style rules.
pub fn page(title: &str, style: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(style)) }
            }
            body { main { (body) } }
        }
    };
    page.into_string()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Relative luminance of a colour `#rrggbb`, as WCAG 2.2 defines it.
    fn luminance(colour: &str) -> f64 {
        let channel = |at: usize| {
            let value = f64::from(u8::from_str_radix(colour.get(at..at + 2).unwrap(), 16).unwrap()) / 255.0;
            if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    /// Contrast ratio of two colours, 1 to 21.
    fn contrast(one: &str, other: &str) -> f64 {
        let (one, other) = (luminance(one), luminance(other));
        (one.max(other) + 0.05) / (one.min(other) + 0.05)
    }

    /// The colours of the light scheme and of the dark one, by name.
    fn schemes() -> Vec<HashMap<&'static str, &'static str>> {
        let rules = STYLE.split(":root {").skip(1).map(|rest| rest.split_once('}').unwrap().0);
        let colour = |property: &'static str| {
            let (name, value) = property.trim().split_once(": ")?;
            Some((name.strip_prefix("--")?, value))
        };
        rules.map(|rule| rule.split(';').filter_map(colour).collect()).collect()
    }

    /// Text on the page, and the page's colour as text on a method's bar, have the contrast of WCAG 2.2, level AA.
    #[test]
    fn every_colour_is_legible_in_light_and_in_dark() {
        assert_eq!(format!("{:.1}", contrast("#000000", "#ffffff")), "21.0");
        assert!(contrast("#2b8a3e", "#ffffff") < 4.5);
        let schemes = schemes();
        assert_eq!(schemes.len(), 2);
        for scheme in &schemes {
            let is_text = |name: &str| !["page", "raised", "line", "grid"].contains(&name);
            let texts: Vec<_> = scheme.iter().filter(|(name, _)| is_text(name)).collect();
            assert_eq!(texts.len(), 12, "{texts:?}");
            for (name, colour) in texts {
                let reached = contrast(colour, scheme["page"]);
                assert!(reached >= 4.5, "--{name} {colour} on {}: {reached:.2}", scheme["page"]);
            }
        }
    }
}
