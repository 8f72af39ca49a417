//! Reads with a size limit: a path may come from hostile input and name an endless device.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Reads a file of at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    bytes(File::open(path)?, limit)
}

/// Reads a UTF-8 file of at most `limit` bytes.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    read_text_from(File::open(path)?, limit)
}

/// Reads a UTF-8 stream of at most `limit` bytes, without the byte order mark that editors on Windows begin it with.
pub fn read_text_from(reader: impl Read, limit: u64) -> io::Result<String> {
    let mut text = String::from_utf8(bytes(reader, limit)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not valid UTF-8 text"))?;
    if text.starts_with('\u{feff}') {
        text.remove(0);
    }
    Ok(text)
}

fn bytes(reader: impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One extra byte distinguishes a file of exactly `limit` bytes from a longer one.
    reader.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it is larger than {}", size(limit))));
    }
    Ok(bytes)
}

fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 && b % (1 << 30) == 0 => format!("{} GiB", b >> 30),
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b => format!("{b} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_of_exactly_the_limit_is_read() {
        assert_eq!(read_text_from(&b"four"[..], 4).unwrap(), "four");
        let error = read_text_from(&b"five!"[..], 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("4 bytes"), "{error}");
        assert!(read_text_from(&[0xff][..], 4).unwrap_err().to_string().contains("UTF-8"));
    }

    #[test]
    fn a_byte_order_mark_is_left_out() {
        assert_eq!(read_text_from("\u{feff}{}".as_bytes(), 8).unwrap(), "{}");
        assert_eq!(read_text_from("a\u{feff}".as_bytes(), 8).unwrap(), "a\u{feff}");
    }

    #[cfg(unix)]
    #[test]
    fn an_endless_device_is_refused() {
        let error = read(Path::new("/dev/zero"), 1 << 20).unwrap_err();
        assert!(error.to_string().contains("larger than 1 MiB"), "{error}");
    }
}
