//! `src/generated` is what prost-build and this file make of `schemas/onnx.proto`. It is committed so that a build needs neither `protoc`
//! nor a compiler for the schema; `make schemas` writes it again.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn the_generated_code_is_that_of_the_schema() {
    let descriptors = descriptors();
    let out = tempfile::tempdir().unwrap();
    let mut config = prost_build::Config::new();
    config.bytes([".onnx.TensorProto.raw_data"]).out_dir(out.path()).compile_fds(descriptors.clone()).unwrap();
    let types = fs::read_to_string(out.path().join("onnx.rs")).unwrap();
    for (name, text) in [("onnx.rs", types), ("field_table.rs", field_table(&descriptors))] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/generated").join(name);
        if std::env::var_os("HPP_UPDATE_SCHEMAS").is_some() {
            fs::write(&path, &text).unwrap();
        }
        assert!(fs::read_to_string(&path).unwrap() == text, "{name} is out of date: run `make schemas`");
    }
}

/// The messages of `schemas/onnx.proto`.
pub fn descriptors() -> FileDescriptorSet {
    let schemas = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../schemas");
    protox::compile([schemas.join("onnx.proto")], [&schemas]).unwrap()
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
