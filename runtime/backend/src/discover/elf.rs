//! Checks that a Linux library is for this architecture, by its ELF header.

use std::fs::File;
use std::io::Read;
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
        _ => Ok(()),
    }
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
