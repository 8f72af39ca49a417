//! Rewrites a file of packed weights with each weight aligned as its kernel expects.
//!
//! Kernels may place parts of a packed weight at addresses, not at offsets in the buffer, that are multiples of 64 bytes. A packed weight
//! is therefore valid only with the alignment that it had when it was packed. ONNX Runtime allocates packed buffers at multiples of 64
//! bytes, but writes them to the file one after the other without padding. This module rewrites the file with every weight at a multiple of
//! 64 bytes, and large ones at the start of a page, so that no two large weights share a page.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// Alignment of packed weights.
const LINE: u64 = 64;
/// Alignment of weights of at least this size.
const PAGE: u64 = 4096;
/// Bytes copied at once.
const COPY: usize = 1 << 20;

/// Copies the weights in the file `weights` to `aligned`, and rewrites the references in `model`. References to other files do not
/// change. Returns the offset and length of each weight in `aligned`.
pub(super) fn align(model: &Path, weights: &Path, aligned: &Path) -> io::Result<Vec<(u64, u64)>> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (old, new) = (name(weights), name(aligned));
    let mut moved = Relocation { old, new, pieces: BTreeMap::new(), end: 0 };
    let rewritten = moved.message(Kind::Model, &std::fs::read(model)?)?;
    let (mut source, mut target) = (File::open(weights)?, BufWriter::with_capacity(COPY, File::create(aligned)?));
    let mut pieces: Vec<((u64, u64), u64)> = moved.pieces.into_iter().collect();
    pieces.sort_by_key(|(_, to)| *to);
    let (mut at, mut buffer) = (0, vec![0; COPY]);
    for &((from, length), to) in &pieces {
        io::copy(&mut io::Read::take(io::repeat(0), to - at), &mut target)?;
        source.seek(SeekFrom::Start(from))?;
        let mut done = 0;
        while done < length {
            let size = buffer.len().min(usize::try_from(length - done).unwrap_or(COPY));
            source.read_exact(&mut buffer[..size])?;
            target.write_all(&buffer[..size])?;
            done += size as u64;
        }
        at = to + length;
    }
    target.flush()?;
    std::fs::write(model, rewritten)?;
    Ok(pieces.into_iter().map(|((_, length), to)| (to, length)).collect())
}

/// A weight of a model file whose bytes are in another file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tensor {
    /// Its name.
    pub name: String,
    /// The other file, relative to the directory of weights.
    pub location: String,
    /// Offset and length of its bytes.
    pub stored: Option<(u64, u64)>,
    /// Offset and length of the copy in the layout that a kernel wants; if that copy has several buffers, of the first.
    pub packed: Option<(u64, u64)>,
}

/// The weights of a model's main graph whose bytes are in other files.
pub(super) fn tensors(model: &[u8]) -> io::Result<Vec<Tensor>> {
    let mut found = Vec::new();
    for graph in fields(model)?.into_iter().filter(|(number, _)| *number == GRAPH) {
        for tensor in fields(graph.1)?.into_iter().filter(|(number, _)| *number == INITIALIZER) {
            found.extend(external_tensor(tensor.1)?);
        }
    }
    Ok(found)
}

/// Field numbers: the graph of a model, an initializer of a graph, the name of a tensor.
const GRAPH: u64 = 7;
const INITIALIZER: u64 = 5;
const NAME: u64 = 8;

fn external_tensor(bytes: &[u8]) -> io::Result<Option<Tensor>> {
    let (mut tensor, mut offset, mut length) = (Tensor::default(), 0, None);
    for (number, value) in fields(bytes)? {
        match number {
            NAME => tensor.name = String::from_utf8(value.to_vec()).map_err(|_| broken())?,
            EXTERNAL_DATA => {
                let (key, value) = pair(value)?;
                match key.as_str() {
                    "location" => tensor.location = value,
                    "offset" => offset = number_of(&value)?,
                    "length" => length = Some(number_of(&value)?),
                    "prepacked_0" => tensor.packed = first_buffer(&value)?,
                    _ => {}
                }
            }
            _ => {}
        }
    }
    tensor.stored = length.map(|length| (offset, length));
    Ok(Some(tensor).filter(|tensor| !tensor.location.is_empty()))
}

/// Offset and length of the first buffer of `key|offset;length;checksum|...`.
fn first_buffer(value: &str) -> io::Result<Option<(u64, u64)>> {
    let Some(buffer) = value.split('|').nth(1) else { return Ok(None) };
    let mut fields = buffer.split(';');
    let mut next = || fields.next().ok_or_else(broken).and_then(number_of);
    Ok(Some((next()?, next()?)))
}

/// The length-delimited fields of a message.
fn fields(mut rest: &[u8]) -> io::Result<Vec<(u64, &[u8])>> {
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let tag = varint(&mut rest)?;
        match tag & 7 {
            0 => drop(varint(&mut rest)?),
            1 => drop(take(&mut rest, 8)?),
            2 => {
                let length = varint(&mut rest)?;
                fields.push((tag >> 3, take(&mut rest, length)?));
            }
            5 => drop(take(&mut rest, 4)?),
            _ => return Err(broken()),
        }
    }
    Ok(fields)
}

/// The protobuf messages of the ONNX IR that contain weights.
#[derive(Clone, Copy)]
enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
}

impl Kind {
    fn field(self, number: u64) -> Option<Kind> {
        match (self, number) {
            (Kind::Model, 7) | (Kind::Attribute, 6 | 11) => Some(Kind::Graph),
            (Kind::Graph, 1) => Some(Kind::Node),
            (Kind::Node, 5) => Some(Kind::Attribute),
            (Kind::Graph, 5) | (Kind::Attribute, 5 | 10) => Some(Kind::Tensor),
            _ => None,
        }
    }
}

/// The field `external_data` of a tensor: key-value pairs that locate its bytes.
const EXTERNAL_DATA: u64 = 13;

/// The new offsets of the weights of a file.
struct Relocation {
    /// The name of the old file.
    old: String,
    /// The name of the new file.
    new: String,
    /// New offset by old offset and length.
    pieces: BTreeMap<(u64, u64), u64>,
    /// The length of the new file so far.
    end: u64,
}

impl Relocation {
    /// The new offset of a weight, assigned on the first call.
    fn new_offset(&mut self, from: u64, length: u64) -> u64 {
        let end = &mut self.end;
        *self.pieces.entry((from, length)).or_insert_with(|| {
            let to = end.next_multiple_of(if length >= PAGE { PAGE } else { LINE });
            *end = to + length;
            to
        })
    }

    /// A message with every reference to the old file rewritten.
    fn message(&mut self, kind: Kind, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::with_capacity(bytes.len());
        let mut external: Vec<(String, String)> = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let before = rest;
            let tag = varint(&mut rest)?;
            let inside = match tag & 7 {
                0 => {
                    varint(&mut rest)?;
                    None
                }
                1 => take(&mut rest, 8).map(|_| None)?,
                2 => {
                    let length = varint(&mut rest)?;
                    Some(take(&mut rest, length)?)
                }
                5 => take(&mut rest, 4).map(|_| None)?,
                _ => return Err(broken()),
            };
            match (inside, kind, kind.field(tag >> 3)) {
                (Some(inside), Kind::Tensor, _) if tag >> 3 == EXTERNAL_DATA => external.push(pair(inside)?),
                (Some(inside), _, Some(kind)) => field(&mut out, tag, &self.message(kind, inside)?),
                _ => out.extend_from_slice(&before[..before.len() - rest.len()]),
            }
        }
        for (key, value) in self.external(external)? {
            let mut entry = Vec::new();
            field(&mut entry, 1 << 3 | 2, key.as_bytes());
            field(&mut entry, 2 << 3 | 2, value.as_bytes());
            field(&mut out, EXTERNAL_DATA << 3 | 2, &entry);
        }
        Ok(out)
    }

    /// The new `external_data` of a tensor.
    fn external(&mut self, pairs: Vec<(String, String)>) -> io::Result<Vec<(String, String)>> {
        let value = |key: &str| pairs.iter().find(|(other, _)| other == key).map(|(_, value)| value.as_str());
        if value("location") != Some(self.old.as_str()) {
            return Ok(pairs);
        }
        let length = number_of(value("length").ok_or_else(broken)?)?;
        let changed = |(key, value): &(String, String)| {
            let value = match key.as_str() {
                "location" => self.new.clone(),
                "offset" => self.new_offset(number_of(value)?, length).to_string(),
                _ if key.starts_with("prepacked_") => self.packed(value)?,
                _ => value.clone(),
            };
            Ok((key.clone(), value))
        };
        pairs.iter().map(changed).collect()
    }

    /// Rewrites `key|offset;length;checksum|offset;length;checksum...`, one group for each buffer into which a kernel packed the weight.
    fn packed(&mut self, value: &str) -> io::Result<String> {
        let (key, buffers) = value.split_once('|').ok_or_else(broken)?;
        let buffers: Vec<String> = buffers.split('|').map(|buffer| self.buffer(buffer)).collect::<io::Result<_>>()?;
        Ok(format!("{key}|{}", buffers.join("|")))
    }

    fn buffer(&mut self, text: &str) -> io::Result<String> {
        let [offset, length, checksum] = text.split(';').collect::<Vec<_>>().try_into().map_err(|_| broken())?;
        Ok(format!("{};{length};{checksum}", self.new_offset(number_of(offset)?, number_of(length)?)))
    }
}

fn number_of(text: &str) -> io::Result<u64> {
    text.parse().map_err(|_| broken())
}

fn pair(entry: &[u8]) -> io::Result<(String, String)> {
    let (mut key, mut value, mut rest) = (String::new(), String::new(), entry);
    while !rest.is_empty() {
        let tag = varint(&mut rest)?;
        let length = varint(&mut rest)?;
        let text = String::from_utf8(take(&mut rest, length)?.to_vec()).map_err(|_| broken())?;
        match tag {
            0x0a => key = text,
            0x12 => value = text,
            _ => return Err(broken()),
        }
    }
    Ok((key, value))
}

fn field(out: &mut Vec<u8>, tag: u64, bytes: &[u8]) {
    put(out, tag);
    put(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn varint(rest: &mut &[u8]) -> io::Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(rest, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(broken())
}

fn take<'a>(rest: &mut &'a [u8], length: u64) -> io::Result<&'a [u8]> {
    let length = usize::try_from(length).ok().filter(|length| *length <= rest.len()).ok_or_else(broken)?;
    let (first, more) = rest.split_at(length);
    *rest = more;
    Ok(first)
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "ONNX Runtime wrote a file in a format that this build does not know")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A model with one weight: the first `bytes` of a file.
    pub fn refers_to(file: &str, bytes: usize) -> Vec<u8> {
        model(&[tensor("w", &[("location", file), ("offset", "0"), ("length", &bytes.to_string())])])
    }

    pub fn tensor(name: &str, pairs: &[(&str, &str)]) -> Vec<u8> {
        let mut tensor = Vec::new();
        put(&mut tensor, 2 << 3);
        put(&mut tensor, 1);
        field(&mut tensor, 8 << 3 | 2, name.as_bytes());
        for (key, value) in pairs {
            let mut entry = Vec::new();
            field(&mut entry, 0x0a, key.as_bytes());
            field(&mut entry, 0x12, value.as_bytes());
            field(&mut tensor, EXTERNAL_DATA << 3 | 2, &entry);
        }
        tensor
    }

    pub fn model(tensors: &[Vec<u8>]) -> Vec<u8> {
        let mut graph = Vec::new();
        for tensor in tensors {
            field(&mut graph, 5 << 3 | 2, tensor);
        }
        let mut model = Vec::new();
        put(&mut model, 1 << 3);
        put(&mut model, 10);
        field(&mut model, 7 << 3 | 2, &graph);
        model
    }

    #[test]
    fn weights_are_aligned_to_lines_and_large_ones_to_pages() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let bytes: Vec<u8> = (0..20_000_u32).map(|at| (at % 253) as u8).collect();
        std::fs::write(path("old"), &bytes).unwrap();
        let location = ("location", "old");
        let elsewhere = tensor("c", &[("location", "other"), ("offset", "3"), ("length", "5")]);
        let written = model(&[
            tensor("a", &[location, ("offset", "7"), ("length", "100"), ("prepacked_0", "Op+1|107;5000;0|5107;63;0")]),
            tensor("b", &[location, ("offset", "6000"), ("length", "9000")]),
            elsewhere.clone(),
        ]);
        std::fs::write(path("model"), written).unwrap();
        let pieces = align(&path("model"), &path("old"), &path("new")).unwrap();
        assert_eq!(pieces, [(0, 100), (4096, 5000), (9152, 63), (12_288, 9000)]);
        let location = ("location", "new");
        let expected = model(&[
            tensor("a", &[location, ("offset", "0"), ("length", "100"), ("prepacked_0", "Op+1|4096;5000;0|9152;63;0")]),
            tensor("b", &[location, ("offset", "12288"), ("length", "9000")]),
            elsewhere,
        ]);
        assert_eq!(std::fs::read(path("model")).unwrap(), expected);
        let aligned = std::fs::read(path("new")).unwrap();
        assert_eq!(aligned.len(), 12_288 + 9000);
        for (to, from, length) in [(0, 7, 100), (4096, 107, 5000), (9152, 5107, 63), (12_288, 6000, 9000)] {
            assert_eq!(aligned[to..to + length], bytes[from..from + length]);
        }
    }

    #[test]
    fn an_unknown_format_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("old"), [0; 100]).unwrap();
        let location = ("location", "old");
        for strange in [
            model(&[tensor("a", &[location, ("offset", "0"), ("length", "9"), ("prepacked_0", "Op|1;2")])]),
            model(&[tensor("a", &[location, ("offset", "0"), ("length", "9"), ("prepacked_0", "Op|1;2;0;3;4;0")])]),
            model(&[tensor("a", &[location, ("offset", "x"), ("length", "9")])]),
            vec![0x0f],
            vec![0x3a, 0x7f],
        ] {
            std::fs::write(path("model"), &strange).unwrap();
            assert!(align(&path("model"), &path("old"), &path("new")).is_err());
            assert_eq!(std::fs::read(path("model")).unwrap(), strange, "the model is unchanged");
        }
    }
}
