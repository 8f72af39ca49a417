//! `POST /v1/embeddings`.

use super::{CompletionPrompt, OnePrompt, read};
use crate::error::ApiError;
use serde::Deserialize;
use serde_json::{Value, json};

/// Most texts of one request.
const MAX_INPUTS: usize = 2048;

/// A request for embeddings.
#[derive(Clone, Debug, Deserialize)]
pub struct EmbeddingRequest {
    /// The model's name.
    pub model: Option<String>,
    /// The texts or tokens.
    pub input: CompletionPrompt,
    /// How vectors are written.
    #[serde(default)]
    pub encoding_format: EncodingFormat,
    /// Only the model's own number is supported.
    pub dimensions: Option<usize>,
    /// Time limit, seconds.
    pub timeout: Option<f64>,
}

/// How vectors are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// The bytes of the numbers as 32-bit floats, little-endian, in base64.
    Base64,
}

impl EmbeddingRequest {
    /// Reads the body of a request.
    pub fn read(body: &Value) -> Result<Self, ApiError> {
        read(body)
    }

    /// The texts.
    pub fn inputs(&self) -> Result<Vec<OnePrompt>, ApiError> {
        let inputs = self.input.each();
        if let Some(index) = inputs.iter().position(OnePrompt::is_empty) {
            let field = if inputs.len() == 1 { "input".to_owned() } else { format!("input[{index}]") };
            let message = format!("`{field}` is empty");
            return Err(ApiError::field(field, message));
        }
        match inputs.len() {
            1..=MAX_INPUTS => Ok(inputs),
            _ => Err(ApiError::field("input", format!("give from 1 to {MAX_INPUTS} texts"))),
        }
    }
}

impl EncodingFormat {
    /// A vector in this form.
    pub fn write(self, vector: &[f32]) -> Value {
        match self {
            EncodingFormat::Float => json!(vector),
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                json!(base64(&bytes))
            }
        }
    }
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let number = group.iter().fold(0u32, |number, byte| number << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let digit = DIGITS[(number >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
        assert_eq!(EncodingFormat::Base64.write(&[1.0]), json!("AACAPw=="));
    }

    #[test]
    fn inputs_are_texts_or_tokens_one_or_many() {
        let read = |input: Value| EmbeddingRequest::read(&json!({"input": input}))?.inputs();
        assert_eq!(read(json!("a")).unwrap(), [OnePrompt::Text("a".into())]);
        assert_eq!(read(json!([[1], [2]])).unwrap().len(), 2);
        assert!(read(json!(7)).is_err() && read(json!(vec!["x"; 3000])).is_err());
        for (empty, field) in [(json!(""), "input"), (json!([]), "input"), (json!(["a", ""]), "input[1]")] {
            let refused = read(empty);
            assert!(matches!(&refused, Err(ApiError::Invalid { param: Some(p), .. }) if p == field), "{refused:?}");
        }
        let wrong = EmbeddingRequest::read(&json!({"input": "a", "encoding_format": "xml"}));
        assert!(matches!(wrong, Err(ApiError::Invalid { param: Some(param), .. }) if param == "encoding_format"));
    }
}
