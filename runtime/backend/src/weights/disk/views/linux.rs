//! The views of this process as Linux lists them.

use super::super::mapping::Mapping;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Whether this system lists views.
pub(in super::super) const CAN_LIST: bool = true;
/// Set in an entry of `/proc/self/pagemap` whose page is resident.
const PRESENT: u64 = 1 << 63;

/// Private writable mappings of files under a directory: how ONNX Runtime maps external weights.
pub(crate) fn list(dir: &Path) -> io::Result<Vec<Mapping>> {
    let dir = dir.canonicalize()?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    Ok(maps.lines().filter_map(parse).filter(|mapping| mapping.path.starts_with(&dir)).collect())
}

fn parse(line: &str) -> Option<Mapping> {
    let (fields, path) = (line.split_ascii_whitespace(), line.find('/').map(|at| &line[at..])?);
    let [range, rights, offset] = fields.take(3).collect::<Vec<_>>().try_into().ok()?;
    let (start, end) = range.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    let (start, end) = (number(start)?, number(end)?);
    // The system writes spaces as they are and line ends as \012.
    let path = PathBuf::from(path.replace("\\012", "\n"));
    (rights == "rw-p").then_some(Mapping { start, length: end - start, offset: number(offset)? as u64, path })
}

/// Resident bytes of a range that starts at a page.
pub(in super::super) fn resident(addresses: &Range<usize>) -> io::Result<usize> {
    let page = super::page_bytes();
    let mut entries = vec![0; addresses.len() / page * 8];
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entries, (addresses.start / page * 8) as u64)?;
    let (entries, _) = entries.as_chunks();
    Ok(entries.iter().filter(|entry| u64::from_ne_bytes(**entry) & PRESENT != 0).count() * page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_writable_mappings_of_files_count() {
        let line = "7f0000001000-7f0000004000 rw-p 00002000 fe:00 12   /a dir/model.data";
        let found = parse(line).unwrap();
        assert_eq!((found.start, found.length, found.offset), (0x7f0000001000, 0x3000, 0x2000));
        assert_eq!(found.path, Path::new("/a dir/model.data"));
        for other in [
            "7f0000001000-7f0000004000 r--p 00002000 fe:00 12 /a/model.data",
            "7f0000001000-7f0000004000 rw-s 00002000 fe:00 12 /a/model.data",
            "7f0000001000-7f0000004000 rw-p 00000000 00:00 0 [heap]",
            "7f0000001000-7f0000004000 rw-p 00000000 00:00 0",
            "nonsense",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
