//! Formats figures, the same way everywhere.

/// Microseconds: one decimal below 100, else whole with a thousands separator.
pub fn us(value: f64) -> String {
    if value.abs() < 99.95 { format!("{value:.1}") } else { grouped(value.round()) }
}

/// Three significant digits, and all digits before the decimal point.
pub fn significant(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 99.95 {
        grouped(value.round())
    } else if magnitude >= 9.995 {
        format!("{value:.1}")
    } else if magnitude >= 0.9995 {
        format!("{value:.2}")
    } else if magnitude >= 0.000_5 {
        format!("{value:.3}")
    } else if magnitude == 0.0 {
        "0".to_string()
    } else {
        format!("{value:.1e}")
    }
}

/// A share, 0 to 1, as a percentage.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent >= 9.995 || percent == 0.0 { format!("{percent:.0} %") } else { format!("{} %", significant(percent)) }
}

/// A ratio of vanilla's p99 to a method's, as a factor: how many times lower or higher the method is.
pub fn times(below: f64) -> String {
    if below >= 1.0 {
        format!("{}x lower", significant(below))
    } else {
        format!("{}x higher", significant(1.0 / below))
    }
}

/// A whole number with commas at the thousands.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn grouped(whole: f64) -> String {
    let sign = if whole < 0.0 { "-" } else { "" };
    format!("{sign}{}", count(whole.abs() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_keep_what_matters() {
        assert_eq!([us(0.0), us(46.84), us(99.96), us(5323.4)], ["0.0", "46.8", "100", "5,323"]);
        assert_eq!([significant(0.0423), significant(18.84), significant(61.2)], ["0.042", "18.8", "61.2"]);
        assert_eq!([significant(0.0), significant(1e-5), significant(1234567.0)], ["0", "1.0e-5", "1,234,567"]);
        assert_eq!([percent(0.5), percent(0.0312), percent(0.0)], ["50 %", "3.12 %", "0 %"]);
        assert_eq!([times(61.0), times(0.5)], ["61.0x lower", "2.00x higher"]);
        assert_eq!([count(0), count(999), count(1_000), count(20_000_000)], ["0", "999", "1,000", "20,000,000"]);
    }
}
