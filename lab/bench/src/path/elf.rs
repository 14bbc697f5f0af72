//! Function symbols of a program file (ELF, 64 bit, little endian), by offset in the file, which a mapping states too.
//!
//! In: the file's bytes. Out: the start of each function in the file, and its name, with Rust's legacy mangling undone.
//! Without a symbol table, or if anything is inconsistent, there are none.

/// A loaded segment.
const PT_LOAD: u32 = 1;
/// A section with symbols.
const SHT_SYMTAB: u32 = 2;
/// A function symbol.
const STT_FUNC: u8 = 2;

/// Offset in the file and name of every function, in no order.
pub(super) fn functions(file: &[u8]) -> Vec<(u64, String)> {
    read(file).unwrap_or_default()
}

fn read(file: &[u8]) -> Option<Vec<(u64, String)>> {
    if file.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let segments = table(file, 0x20, 0x36, 0x38)?;
    let loads: Vec<[u64; 3]> = segments
        .iter()
        .filter(|at| u32_at(file, **at) == Some(PT_LOAD))
        .filter_map(|at| Some([u64_at(file, at + 8)?, u64_at(file, at + 16)?, u64_at(file, at + 32)?]))
        .collect();
    let sections = table(file, 0x28, 0x3a, 0x3c)?;
    let symbols = *sections.iter().find(|at| u32_at(file, *at + 4) == Some(SHT_SYMTAB))?;
    let strings = *sections.get(usize::try_from(u32_at(file, symbols + 40)?).ok()?)?;
    let (symbols, names) = (contents(file, symbols)?, contents(file, strings)?);
    let mut found = Vec::new();
    for symbol in symbols.chunks_exact(24) {
        let (name, kind, address) = (u32_at(symbol, 0)?, *symbol.get(4)?, u64_at(symbol, 8)?);
        let load = loads.iter().find(|[_, start, size]| address.checked_sub(*start).is_some_and(|at| at < *size));
        if let (STT_FUNC, Some([offset, start, _])) = (kind & 15, load) {
            let name = names.get(usize::try_from(name).ok()?..)?;
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            found.push((address - start + offset, demangled(&String::from_utf8_lossy(name))));
        }
    }
    Some(found)
}

/// Offsets of the entries of a header table. Its offset, entry size and count are at these places in the file.
fn table(file: &[u8], offset: usize, size: usize, count: usize) -> Option<Vec<usize>> {
    let start = usize::try_from(u64_at(file, offset)?).ok()?;
    let (size, count) = (usize::from(u16_at(file, size)?), usize::from(u16_at(file, count)?));
    (0..count).map(|entry| start.checked_add(entry.checked_mul(size)?)).collect()
}

fn contents(file: &[u8], section: usize) -> Option<&[u8]> {
    let at = |field: usize| u64_at(file, section.checked_add(field)?).and_then(|value| usize::try_from(value).ok());
    let start = at(24)?;
    file.get(start..start.checked_add(at(32)?)?)
}

fn bytes<const N: usize>(file: &[u8], at: usize) -> Option<[u8; N]> {
    file.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(file: &[u8], at: usize) -> Option<u16> {
    bytes(file, at).map(u16::from_le_bytes)
}

fn u32_at(file: &[u8], at: usize) -> Option<u32> {
    bytes(file, at).map(u32::from_le_bytes)
}

fn u64_at(file: &[u8], at: usize) -> Option<u64> {
    bytes(file, at).map(u64::from_le_bytes)
}

/// Demangles `_ZN4name2of17h0123456789abcdefE` into `name::of`. Any other name stays as it is.
fn demangled(name: &str) -> String {
    let parts = || {
        let mut rest = name.strip_prefix("_ZN")?;
        let mut parts = Vec::new();
        while !rest.starts_with('E') {
            let digits = rest.find(|c: char| !c.is_ascii_digit())?;
            let end = digits.checked_add(rest.get(..digits)?.parse().ok()?)?;
            parts.push(rest.get(digits..end)?);
            rest = rest.get(end..)?;
        }
        // The last part is a hash.
        if parts.last().is_some_and(|last| last.len() == 17 && last.starts_with('h')) {
            parts.pop();
        }
        (!parts.is_empty()).then(|| parts.join("::"))
    };
    let Some(mut plain) = parts() else { return name.to_owned() };
    for (mangled, meant) in [
        ("$LT$", "<"),
        ("$GT$", ">"),
        ("$RF$", "&"),
        ("$u20$", " "),
        ("$u7b$", "{"),
        ("$u7d$", "}"),
        ("$C$", ","),
        ("..", "::"),
    ] {
        plain = plain.replace(mangled, meant);
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_rust_are_undone_and_others_left() {
        assert_eq!(
            demangled("_ZN14ontime_sockets4mail4Mail12take_channel17h9dede93f0c8370aaE"),
            "ontime_sockets::mail::Mail::take_channel"
        );
        assert_eq!(
            demangled("_ZN4core3ptr35drop_in_place$LT$std..io..Error$GT$17h9dede93f0c8370aaE"),
            "core::ptr::drop_in_place<std::io::Error>"
        );
        for odd in ["main", "_ZN", "_ZNE", "_ZN99aE", "_ZN1", "_ZN2\u{e9}x1E"] {
            let _ = demangled(odd);
        }
        assert_eq!(demangled("main"), "main");
    }

    #[test]
    fn this_very_program_has_its_functions() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let found = functions(&file);
        assert!(found.iter().any(|(at, name)| name.contains("functions") && *at > 0), "{} functions", found.len());
    }

    #[test]
    fn what_is_no_program_has_none() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for length in [0, 5, 6, 0x30, 0x40, 0x1000.min(file.len())] {
            assert!(functions(&file[..length]).is_empty());
        }
        let mut odd = file[..0x40].to_vec();
        odd.iter_mut().skip(6).for_each(|byte| *byte = 0xff);
        assert!(functions(&odd).is_empty());
    }
}
