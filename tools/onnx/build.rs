//! Compiles `schemas/onnx.proto` without `protoc`: generates prost types, a table of all fields for the wire check, and
//! the descriptor set that a test compares with PyPI's `onnx` package.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let schemas = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../schemas");
    let proto = schemas.join("onnx.proto");
    println!("cargo:rerun-if-changed={}", proto.display());
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR")?);

    let descriptors = protox::compile([&proto], [&schemas])?;
    fs::write(out.join("field_table.rs"), field_table(&descriptors))?;
    prost_build::Config::new().bytes([".onnx.TensorProto.raw_data"]).compile_fds(descriptors.clone())?;
    fs::write(out.join("onnx.descriptors"), prost::Message::encode_to_vec(&descriptors))?;
    Ok(())
}

/// Rust source of the table of all messages: name, and fields by number.
fn field_table(descriptors: &FileDescriptorSet) -> String {
    let mut messages = vec![];
    for file in &descriptors.file {
        for message in &file.message_type {
            collect("", message, &mut messages);
        }
    }
    messages.sort_by(|a, b| a.0.cmp(&b.0));
    let index = |name: &str| messages.iter().position(|(path, _)| format!(".onnx.{path}") == name);
    let mut table = String::from("/// Every message of the IR, in name order.\npub static MESSAGES: &[Message] = &[\n");
    for (path, message) in &messages {
        let _ = writeln!(table, "    Message {{ name: {path:?}, fields: &[");
        let mut fields = message.field.clone();
        fields.sort_by_key(|f| f.number());
        for field in &fields {
            let kind = kind_of(field, &index);
            let repeated = field.label() == Label::Repeated;
            let (number, name) = (field.number(), field.name());
            let _ = writeln!(
                table,
                "        Field {{ number: {number}, name: {name:?}, kind: {kind}, repeated: {repeated} }},"
            );
        }
        table.push_str("    ] },\n");
    }
    let root = index(".onnx.ModelProto").expect("the schema defines ModelProto");
    let _ = writeln!(table, "];\n\n/// Index of `ModelProto`.\npub const MODEL: usize = {root};");
    table
}

fn collect<'a>(prefix: &str, message: &'a DescriptorProto, into: &mut Vec<(String, &'a DescriptorProto)>) {
    let path = format!("{prefix}{}", message.name());
    for nested in &message.nested_type {
        collect(&format!("{path}."), nested, into);
    }
    into.push((path, message));
}

fn kind_of(field: &FieldDescriptorProto, index: &dyn Fn(&str) -> Option<usize>) -> String {
    match field.r#type() {
        Type::Message => {
            format!("FieldKind::Message({})", index(field.type_name()).expect("protox resolved every type"))
        }
        Type::String | Type::Bytes => "FieldKind::Bytes".into(),
        Type::Float | Type::Fixed32 | Type::Sfixed32 => "FieldKind::Fixed32".into(),
        Type::Double | Type::Fixed64 | Type::Sfixed64 => "FieldKind::Fixed64".into(),
        _ => "FieldKind::Varint".into(),
    }
}
