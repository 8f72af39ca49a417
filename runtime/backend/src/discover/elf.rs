//! Checks that a Linux library is for this architecture and complete, by its ELF header.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// An error message if the header shows that the file cannot be loaded here.
pub(super) fn examine(path: &Path) -> Result<(), String> {
    if !cfg!(target_os = "linux") {
        return Ok(());
    }
    let mut header = [0; 20];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    if read.is_err() || !header.starts_with(b"\x7fELF") {
        return Err("it is not a Linux library".into());
    }
    let little = header[5] == 1;
    let machine = [header[18], header[19]];
    let machine = if little { u16::from_le_bytes(machine) } else { u16::from_be_bytes(machine) };
    match own_machine() {
        Some(own) if own != machine => {
            Err(format!("it is for {}, and this program is for {}", name(machine), name(own)))
        }
        _ => is_complete(path),
    }
}

/// An error message if segments that are loaded lie beyond the end of the file: the loader maps them, and reading them there ends the
/// process with a bus error.
fn is_complete(path: &Path) -> Result<(), String> {
    let unreadable = |error: std::io::Error| format!("it cannot be read: {error}");
    let mut file = File::open(path).map_err(unreadable)?;
    let length = file.metadata().map_err(unreadable)?.len();
    let end = loaded_end(&mut file).map_err(|_| format!("it is truncated after {length} bytes"))?;
    if end.is_some_and(|end| end > length) {
        return Err(format!("it is truncated: {length} bytes of at least {} are there", end.unwrap_or_default()));
    }
    Ok(())
}

/// Where the last loaded segment of a 64-bit little-endian file ends, by its program headers; `None` for other files.
fn loaded_end(file: &mut File) -> std::io::Result<Option<u64>> {
    const LOADED: u64 = 1;
    let mut header = [0; 64];
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut header)?;
    if header[4] != 2 || header[5] != 1 {
        return Ok(None);
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
    let (start, entries) = (number(&header[32..40]), number(&header[56..58]));
    let mut table = vec![0; 56 * entries as usize];
    file.seek(SeekFrom::Start(start))?;
    file.read_exact(&mut table)?;
    let loaded = table.chunks_exact(56).filter(|entry| number(&entry[..4]) == LOADED);
    Ok(loaded.map(|entry| number(&entry[8..16]).saturating_add(number(&entry[32..40]))).max())
}

fn own_machine() -> Option<u16> {
    MACHINES.iter().find(|(_, arch, _)| *arch == std::env::consts::ARCH).map(|(number, _, _)| *number)
}

fn name(machine: u16) -> String {
    let known = MACHINES.iter().find(|(number, _, _)| *number == machine);
    known.map_or(format!("machine type {machine}"), |(_, _, name)| (*name).to_owned())
}

/// ELF machine numbers, with Rust's architecture names and common names.
const MACHINES: [(u16, &str, &str); 7] = [
    (3, "x86", "32-bit x86"),
    (20, "powerpc", "PowerPC"),
    (21, "powerpc64", "64-bit PowerPC"),
    (40, "arm", "32-bit Arm"),
    (62, "x86_64", "x86-64"),
    (183, "aarch64", "64-bit Arm"),
    (243, "riscv64", "RISC-V"),
];

#[cfg(all(test, target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_library_is_refused_before_it_is_mapped() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let with_bytes = |count: usize| {
            let path = dir.path().join("library.so");
            std::fs::write(&path, &own[..count]).unwrap();
            examine(&path)
        };
        assert_eq!(with_bytes(own.len()), Ok(()));
        // Loaded segments come first: with debug information, which follows them, half of the file may still hold them all.
        for count in [own.len() / 16, 4096, 100, 64, 30] {
            let refused = with_bytes(count).unwrap_err();
            assert!(refused.contains("truncated"), "{count}: {refused}");
        }
        assert!(with_bytes(10).is_err());
    }
}
