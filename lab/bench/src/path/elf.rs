//! Function symbols of a program file (ELF), by offset in the file, which a mapping states too.
//!
//! In: the file's bytes. Out: the start of each function in the file, and its name, with Rust's mangling undone.
//! Without a symbol table, or if the file's headers are inconsistent, there are none.

use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};

/// Offset in the file and name of every function, in no order.
pub(super) fn functions(file: &[u8]) -> Vec<(u64, String)> {
    let Ok(program) = object::File::parse(file) else { return Vec::new() };
    let segments: Vec<(u64, (u64, u64))> =
        program.segments().map(|segment| (segment.address(), segment.file_range())).collect();
    let offset = |address: u64| {
        segments.iter().find_map(|(start, (offset, size))| {
            let at = address.checked_sub(*start).filter(|at| at < size)?;
            offset.checked_add(at)
        })
    };
    program
        .symbols()
        .filter(|symbol| symbol.is_definition() && symbol.kind() == SymbolKind::Text)
        .filter_map(|symbol| {
            let name = rustc_demangle::demangle(symbol.name().ok()?);
            // Without the hash.
            Some((offset(symbol.address())?, format!("{name:#}")))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_very_program_has_its_functions() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let found = functions(&file);
        let is_own = |(at, name): &(u64, String)| name.contains("path::elf::tests::") && *at > 0;
        assert!(found.iter().any(is_own), "{} functions", found.len());
        assert!(found.iter().any(|(_, name)| name == "main"), "{} functions", found.len());
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
