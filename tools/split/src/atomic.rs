//! Files that appear whole or not at all: written beside their place, then moved there.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Writes a file; what was there stays until the new one is whole.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".hpp-").suffix(".partial");
    ordinary_permissions(&mut builder);
    let mut file = builder.tempfile_in(parent)?;
    file.write_all(bytes)?;
    let file: File = file.persist(path).map_err(|error| error.error)?;
    file.sync_all()
}

/// Temporary files are private; what becomes a result is as readable as any file the user makes.
#[cfg(unix)]
fn ordinary_permissions(builder: &mut tempfile::Builder<'_, '_>) {
    use std::os::unix::fs::PermissionsExt;
    builder.permissions(std::fs::Permissions::from_mode(0o666));
}

#[cfg(not(unix))]
fn ordinary_permissions(_: &mut tempfile::Builder<'_, '_>) {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn nothing_but_the_whole_file_appears() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        write(&path, b"old").unwrap();
        write(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(write(dir.path(), b"x").is_err());
        assert!(write(&dir.path().join("none/x.json"), b"x").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no leftovers");
    }
}
