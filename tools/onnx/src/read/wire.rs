//! Checks protobuf bytes before they are decoded: unknown fields, nesting depth, and memory that decoding would use.
//!
//! prost silently drops unknown fields. A dropped field could change a model's results, so an unknown field is an error
//! here. Uses the generated table of fields; does not know the meaning of fields.

mod table {
    use super::{Field, FieldKind, Message};
    include!("../generated/field_table.rs");
}

/// A message type of the schema.
pub struct Message {
    name: &'static str,
    fields: &'static [Field],
}

/// A field of a message type.
pub struct Field {
    number: u32,
    name: &'static str,
    kind: FieldKind,
    repeated: bool,
}

/// The wire format of a field.
#[derive(Clone, Copy, PartialEq)]
pub enum FieldKind {
    /// Variable-length integers, booleans, enums.
    Varint,
    /// Four bytes.
    Fixed32,
    /// Eight bytes.
    Fixed64,
    /// Strings and bytes.
    Bytes,
    /// The message at this index of the table.
    Message(usize),
}

/// The reason why bytes are not a model that this build can read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum WireError {
    #[error("the file ends inside {inside} at byte {at} of {len}: it is truncated or damaged")]
    Truncated { inside: String, at: usize, len: usize },
    #[error(
        "{message} has a field number {number} that this build does not know (byte {at}): the file is no ONNX model, is damaged, or was written by a newer exporter"
    )]
    UnknownField { message: &'static str, number: u32, at: usize },
    #[error(
        "{message}.{field} has wire type {found} at byte {at}, which does not fit it: this is not an ONNX model, or it is damaged"
    )]
    WrongType { message: &'static str, field: &'static str, found: u8, at: usize },
    #[error("{message} has a malformed number at byte {at}: this is not an ONNX model, or it is damaged")]
    Malformed { message: &'static str, at: usize },
    #[error("{message} at byte {at} is nested more than {MAX_DEPTH} deep")]
    TooDeep { message: &'static str, at: usize },
    #[error("decoding would take more than {MAX_DECODED} bytes of memory without the weights: {message} at byte {at}")]
    TooLarge { message: &'static str, at: usize },
}

/// Maximum nesting depth of messages; the limit of prost is 100.
pub const MAX_DEPTH: usize = 96;

/// Maximum length of a varint of 64 bits.
const MAX_VARINT_BYTES: usize = 10;

/// Maximum memory of the decoded structure in bytes, without raw weights.
pub const MAX_DECODED: u64 = 4 << 30;

struct Frame {
    message: &'static Message,
    end: usize,
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// Checks that `bytes` are a `ModelProto` with known fields only.
pub fn check_model(bytes: &[u8]) -> Result<(), WireError> {
    let mut cursor = Cursor { bytes, at: 0 };
    let mut stack = vec![Frame { message: &table::MESSAGES[table::MODEL], end: bytes.len() }];
    let mut decoded = 0u64;
    while let Some(Frame { message, end }) = stack.last() {
        let (message, end) = (*message, *end);
        if cursor.at == end {
            stack.pop();
            continue;
        }
        let at = cursor.at;
        let (field, wire_type) = cursor.key(message, end)?;
        let (entered, cost) = cursor.value(message, field, wire_type, end)?;
        decoded = decoded.saturating_add(cost);
        if decoded > MAX_DECODED {
            return Err(WireError::TooLarge { message: message.name, at });
        }
        if let Some(frame) = entered {
            if stack.len() == MAX_DEPTH {
                return Err(WireError::TooDeep { message: frame.message.name, at });
            }
            stack.push(frame);
        }
    }
    Ok(())
}

impl Cursor<'_> {
    /// Reads a key and looks up its field.
    fn key(&mut self, message: &'static Message, end: usize) -> Result<(&'static Field, u8), WireError> {
        let at = self.at;
        let key = self.varint(message, end)?;
        let number = u32::try_from(key >> 3).map_err(|_| WireError::Malformed { message: message.name, at })?;
        match message.fields.binary_search_by_key(&number, |f| f.number) {
            Ok(found) => Ok((&message.fields[found], (key & 7) as u8)),
            Err(_) if number == 0 => Err(WireError::Malformed { message: message.name, at }),
            Err(_) => Err(WireError::UnknownField { message: message.name, number, at }),
        }
    }

    /// Skips a value, or enters it if it is a message. Also returns the memory that decoding it uses.
    fn value(
        &mut self,
        message: &'static Message,
        field: &'static Field,
        wire_type: u8,
        end: usize,
    ) -> Result<(Option<Frame>, u64), WireError> {
        match (field.kind, wire_type) {
            (FieldKind::Varint, 0) => self.varint(message, end).map(|_| (None, 8)),
            (FieldKind::Fixed64, 1) => self.skip(message, field, 8, end).map(|()| (None, 8)),
            (FieldKind::Fixed32, 5) => self.skip(message, field, 4, end).map(|()| (None, 4)),
            (FieldKind::Message(index), 2) => {
                let len = self.length(message, field, end)?;
                let inner = &table::MESSAGES[index];
                Ok((Some(Frame { message: inner, end: self.at + len }), inner.decoded_bytes()))
            }
            (kind, 2) if kind == FieldKind::Bytes || field.repeated => {
                let len = self.length(message, field, end)?;
                self.at += len;
                Ok((None, field.decoded_bytes(len as u64)))
            }
            _ => Err(WireError::WrongType { message: message.name, field: field.name, found: wire_type, at: self.at }),
        }
    }

    fn length(&mut self, message: &'static Message, field: &Field, end: usize) -> Result<usize, WireError> {
        let at = self.at;
        let len = self.varint(message, end)?;
        match usize::try_from(len).ok().filter(|len| *len <= end - self.at) {
            Some(len) => Ok(len),
            None => Err(self.truncated(message, field, at)),
        }
    }

    fn skip(&mut self, message: &'static Message, field: &Field, n: usize, end: usize) -> Result<(), WireError> {
        if end - self.at < n {
            return Err(self.truncated(message, field, self.at));
        }
        self.at += n;
        Ok(())
    }

    fn varint(&mut self, message: &'static Message, end: usize) -> Result<u64, WireError> {
        let (at, len) = (self.at, self.bytes.len());
        let mut rest = &self.bytes[at..end];
        let value = prost::encoding::decode_varint(&mut rest);
        self.at = end - rest.len();
        value.map_err(|_| match self.bytes[at..end].iter().take(MAX_VARINT_BYTES).any(|byte| *byte < 0x80) {
            false if end - at < MAX_VARINT_BYTES => WireError::Truncated { inside: message.name.into(), at, len },
            _ => WireError::Malformed { message: message.name, at },
        })
    }

    fn truncated(&self, message: &Message, field: &Field, at: usize) -> WireError {
        WireError::Truncated { inside: format!("{}.{}", message.name, field.name), at, len: self.bytes.len() }
    }
}

impl Message {
    /// An upper bound for the decoded struct: a vector or an optional string for each field.
    fn decoded_bytes(&self) -> u64 {
        32 + 32 * self.fields.len() as u64
    }
}

impl Field {
    /// Memory for `len` bytes of this field after decoding. Raw data stays in the file.
    fn decoded_bytes(&self, len: u64) -> u64 {
        match self.kind {
            FieldKind::Bytes if self.name == "raw_data" => 0,
            FieldKind::Varint => len.saturating_mul(8),
            _ => len + 24,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A length-delimited field.
    fn wrap(tag: u8, body: &[u8]) -> Vec<u8> {
        let mut out = vec![tag];
        prost::encoding::encode_varint(body.len() as u64, &mut out);
        out.extend(body);
        out
    }

    #[test]
    fn an_unknown_field_is_named() {
        // ModelProto field 27, varint 1.
        let error = check_model(&[0xd8, 0x01, 0x01]).unwrap_err();
        assert!(matches!(error, WireError::UnknownField { message: "ModelProto", number: 27, at: 0 }), "{error}");
        // ModelProto.graph { field 30: varint }
        let error = check_model(&[0x3a, 0x03, 0xf0, 0x01, 0x01]).unwrap_err();
        assert!(matches!(error, WireError::UnknownField { message: "GraphProto", number: 30, .. }), "{error}");
    }

    #[test]
    fn lengths_stay_inside_their_parent() {
        // graph of 2 bytes holding a node that claims 5.
        let error = check_model(&[0x3a, 0x02, 0x0a, 0x05, 0, 0, 0, 0, 0]).unwrap_err();
        assert!(matches!(error, WireError::Truncated { .. }), "{error}");
        // A length of 2^64 - 1.
        let mut huge = vec![0x3a];
        huge.extend([0xff; 9]);
        huge.push(1);
        assert!(matches!(check_model(&huge), Err(WireError::Truncated { .. })));
    }

    #[test]
    fn overlong_numbers_are_malformed() {
        let mut bytes = vec![0x08];
        bytes.extend([0xff; 10]);
        bytes.push(0);
        assert!(matches!(check_model(&bytes), Err(WireError::Malformed { .. })));
    }

    #[test]
    fn deep_nesting_is_refused_without_recursion() {
        // An `If` inside an `If`: graph { node { attribute { g { .. } } } }.
        let graph = (0..2_000).fold(vec![], |body, _| wrap(0x0a, &wrap(0x2a, &wrap(0x32, &body))));
        let error = check_model(&wrap(0x3a, &graph)).unwrap_err();
        assert!(matches!(error, WireError::TooDeep { .. }), "{error}");
    }

    #[test]
    fn many_empty_messages_are_refused_before_they_are_decoded() {
        // Each two-byte `node {}` would become a struct of hundreds of bytes.
        let nodes = 16 << 20;
        let bytes = wrap(0x3a, &[0x0a, 0x00].repeat(nodes));
        assert!(matches!(check_model(&bytes), Err(WireError::TooLarge { .. })));
    }
}
