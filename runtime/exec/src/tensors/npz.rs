//! Named arrays in NumPy's `.npz` format: a zip archive of `.npy` files, stored or deflated.

use super::npy;
use hpp_engine::HostTensor;
use hpp_io::{FileWriteError, OutputFile};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use zip::result::ZipError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Why an archive cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum NpzError {
    /// It is missing or not an archive.
    #[error("cannot read {} as a NumPy archive (.npz)", path.display())]
    Archive {
        /// The file.
        path: PathBuf,
        /// What the reader reported.
        source: io::Error,
    },
    /// One of its arrays cannot be used.
    #[error("cannot read array {name:?} of {}", path.display())]
    Array {
        /// The file.
        path: PathBuf,
        /// The array.
        name: String,
        /// What the reader reported.
        source: io::Error,
    },
    /// An array cannot be written.
    #[error("cannot write array {name:?} to {}", path.display())]
    WriteArray {
        /// The file.
        path: PathBuf,
        /// The array.
        name: String,
        /// What the writer reported.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] FileWriteError),
}

impl NpzError {
    /// What the user can do next.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            // The file is readable but no archive: one array (.npy), an empty file, a broken download.
            NpzError::Archive { source, .. }
                if matches!(source.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) =>
            {
                Some(
                    "--inputs reads named arrays as numpy.savez writes them: numpy.savez(\"in.npz\", input_ids=...), not one \
                     array of numpy.save (.npy)",
                )
            }
            NpzError::Archive { .. } | NpzError::Array { .. } | NpzError::WriteArray { .. } | NpzError::Write(_) => {
                None
            }
        }
    }
}

/// Reads every array, in the archive's order.
pub fn read_npz(path: &Path) -> Result<Vec<(String, HostTensor)>, NpzError> {
    read_within(path, &mut npy::MemoryBudget::of_this_process())
}

fn read_within(path: &Path, budget: &mut npy::MemoryBudget) -> Result<Vec<(String, HostTensor)>, NpzError> {
    let archive_error = |source| NpzError::Archive { path: path.to_owned(), source };
    let file = File::open(path).map_err(archive_error)?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|e| archive_error(into_io(e)))?;
    let mut arrays = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index(index).map_err(|e| archive_error(into_io(e)))?;
        let file_name = entry.name().map_err(|e| archive_error(into_io(e)))?.into_owned();
        let name = file_name.strip_suffix(".npy").unwrap_or(&file_name).to_owned();
        let array_error = |source| NpzError::Array { path: path.to_owned(), name: name.clone(), source };
        let tensor = npy::read(entry, budget).map_err(array_error)?;
        arrays.push((name, tensor));
    }
    Ok(arrays)
}

/// How a ZIP archive begins.
const ZIP_MAGIC: &[u8] = b"PK";

/// Refuses a path that [`write_npz`] would not replace or could not create. Called before work that takes long.
pub fn check_npz(path: &Path) -> Result<(), FileWriteError> {
    hpp_io::check_replaceable(path, ZIP_MAGIC)?;
    hpp_io::check_creatable(path)
}

/// Writes arrays in this order, uncompressed. The file appears once it is complete.
pub fn write_npz(path: &Path, arrays: &[(String, HostTensor)]) -> Result<(), NpzError> {
    let mut file = OutputFile::create_as(path, ZIP_MAGIC)?;
    let mut archive = ZipWriter::new(BufWriter::new(file.file()));
    for (name, tensor) in arrays {
        let error = |source| NpzError::WriteArray { path: path.to_owned(), name: name.clone(), source };
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored).large_file(true);
        archive.start_file(format!("{name}.npy"), options).map_err(|e| error(into_io(e)))?;
        npy::write(tensor, &mut archive).map_err(error)?;
    }
    let whole = |source| FileWriteError { path: path.to_owned(), source };
    archive.finish().map_err(into_io).and_then(|mut writer| writer.flush()).map_err(whole)?;
    Ok(file.finish()?)
}

fn into_io(error: ZipError) -> io::Error {
    match error {
        ZipError::Io(error) => error,
        other => io::Error::new(io::ErrorKind::InvalidData, other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_arrays_are_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.npz");
        let arrays = vec![
            ("input_ids".to_owned(), HostTensor::from_i64(&[1, 3], &[1, 2, 3])),
            ("a/b:0".to_owned(), HostTensor::from_f32(&[], &[0.5])),
        ];
        write_npz(&path, &arrays).unwrap();
        assert_eq!(read_npz(&path).unwrap(), arrays);
    }

    #[test]
    fn other_files_are_not_archives() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for bytes in [&b""[..], b"no", b"\x93NUMPY\x01\x00 and one array"] {
            std::fs::write(file.path(), bytes).unwrap();
            let error = read_npz(file.path()).unwrap_err();
            assert!(matches!(error, NpzError::Archive { .. }), "{error}");
            assert!(error.hint().is_some_and(|hint| hint.contains("numpy.savez")), "{error:?}");
        }
        let error = read_npz(Path::new("nowhere.npz")).unwrap_err();
        assert!(matches!(error, NpzError::Archive { .. }) && error.hint().is_none(), "{error:?}");
    }

    /// Zeros compress to a thousandth of their size, so the size on disk does not limit the size in memory.
    #[test]
    fn archives_that_unpack_beyond_the_budget_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut archive = ZipWriter::new(file.reopen().unwrap());
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        for name in ["a.npy", "b.npy"] {
            archive.start_file(name, options).unwrap();
            npy::write(&HostTensor::from_f32(&[1 << 18], &vec![0.0; 1 << 18]), &mut archive).unwrap();
        }
        archive.finish().unwrap();
        assert!(file.as_file().metadata().unwrap().len() < 8 << 10);
        let mut budget = npy::MemoryBudget::new(1536 << 10);
        let NpzError::Array { name, source, .. } = read_within(file.path(), &mut budget).unwrap_err() else {
            panic!("another error")
        };
        assert_eq!(name, "b");
        assert!(source.to_string().contains("declares 1 MiB"), "{source}");
        let arrays = read_within(file.path(), &mut npy::MemoryBudget::new(2 << 20)).unwrap();
        assert!(arrays.iter().all(|(_, tensor)| tensor.bytes.capacity() == 1 << 20), "memory is allocated once");
    }

    #[test]
    fn deflated_archives_are_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let tensor = HostTensor::from_f32(&[64], &[1.0; 64]);
        let mut archive = ZipWriter::new(file.reopen().unwrap());
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        archive.start_file("x.npy", options).unwrap();
        npy::write(&tensor, &mut archive).unwrap();
        archive.finish().unwrap();
        assert_eq!(read_npz(file.path()).unwrap(), [("x".to_owned(), tensor)]);
    }
}
