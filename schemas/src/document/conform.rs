//! Validates a value against a JSON Schema generated from this crate's types, and reports all violations with their
//! places.
//!
//! Supports the keywords that schemars generates for these types: `$ref`, `anyOf`, `oneOf`, `const`, `enum`, `type`,
//! `properties`, `required`, `additionalProperties`, `items`, `minimum`, `maximum`, `exclusiveMinimum`.

use crate::{ByteSize, Finding, Provider};
use serde::Deserialize;
use serde_json::{Map, Value};

/// A schema with its definitions.
pub(super) struct Conform<'a> {
    root: &'a Value,
}

impl<'a> Conform<'a> {
    pub fn new(root: &'a Value) -> Self {
        Conform { root }
    }

    /// All violations.
    pub fn findings(&self, value: &Value) -> Vec<Finding> {
        let mut found = Vec::new();
        self.walk(self.root, value, "", &mut found);
        found
    }

    fn walk(&self, schema: &Value, value: &Value, place: &str, found: &mut Vec<Finding>) {
        if let Some(target) = schema["$ref"].as_str() {
            return self.definition(target, value, place, found);
        }
        if let Some(forms) = schema["anyOf"].as_array().or_else(|| schema["oneOf"].as_array()) {
            return self.one_of(forms, value, place, found);
        }
        if let Some(wanted) = schema.get("const") {
            if wanted != value {
                found.push(Finding::error(place, format!("it is {value}, not {wanted}")));
            }
            return;
        }
        if let Some(wanted) = schema["enum"].as_array() {
            if !wanted.contains(value) {
                found.push(Finding::error(place, none_of(value, wanted.iter())));
            }
            return;
        }
        if !has_type(&schema["type"], value) {
            found.push(Finding::error(place, format!("{} is not {}", shown(value), type_names(&schema["type"]))));
            return;
        }
        match value {
            Value::Object(fields) => self.object(schema, fields, place, found),
            Value::Array(entries) => {
                for (at, entry) in entries.iter().enumerate() {
                    self.walk(&schema["items"], entry, &format!("{place}[{at}]"), found);
                }
            }
            Value::Number(_) => range(schema, value, place, found),
            _ => {}
        }
    }

    fn definition(&self, target: &str, value: &Value, place: &str, found: &mut Vec<Finding>) {
        let name = target.rsplit('/').next().unwrap_or_default();
        // Types that parse text with their own rules.
        let read = match name {
            "ByteSize" => ByteSize::deserialize(value).map(|_| ()),
            "Provider" => Provider::deserialize(value).map(|_| ()),
            _ => return self.walk(&self.root["$defs"][name], value, place, found),
        };
        if let Err(why) = read {
            found.push(Finding::error(place, why.to_string()));
        }
    }

    /// Reports the violations of the alternative with the fewest.
    fn one_of(&self, forms: &[Value], value: &Value, place: &str, found: &mut Vec<Finding>) {
        let consts: Vec<&Value> = forms.iter().filter_map(|form| form.get("const")).collect();
        if consts.len() == forms.len() {
            if !consts.contains(&value) {
                found.push(Finding::error(place, none_of(value, consts.into_iter())));
            }
            return;
        }
        let tries = forms.iter().filter(|form| form["type"] != "null" || value.is_null()).map(|form| {
            let mut found = Vec::new();
            self.walk(form, value, place, &mut found);
            found
        });
        found.extend(tries.min_by_key(Vec::len).unwrap_or_default());
    }

    fn object(&self, schema: &Value, fields: &Map<String, Value>, place: &str, found: &mut Vec<Finding>) {
        let below = |name: &str| if place.is_empty() { name.to_owned() } else { format!("{place}.{name}") };
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !fields.contains_key(name) {
                found.push(Finding::error(below(name), "it is missing"));
            }
        }
        for (name, value) in fields {
            match (schema["properties"].get(name), schema.get("additionalProperties")) {
                (Some(field), _) => self.walk(field, value, &below(name), found),
                (None, Some(Value::Bool(false))) => {
                    found.push(Finding::error(below(name), unknown(&schema["properties"])))
                }
                (None, Some(of_each @ Value::Object(_))) => self.walk(of_each, value, &below(name), found),
                (None, _) => {}
            }
        }
    }
}

fn unknown(properties: &Value) -> String {
    let names = properties.as_object().into_iter().flat_map(Map::keys).map(String::as_str);
    format!("there is no such field; the fields are {}", names.collect::<Vec<_>>().join(", "))
}

fn range(schema: &Value, value: &Value, place: &str, found: &mut Vec<Finding>) {
    let Some(number) = value.as_f64() else { return };
    let bound = |name: &str| schema[name].as_f64();
    if let Some(least) = bound("minimum").filter(|least| number < *least) {
        found.push(Finding::error(place, format!("{value} is less than {least}")));
    }
    if let Some(most) = bound("maximum").filter(|most| number > *most) {
        found.push(Finding::error(place, format!("{value} is more than {most}")));
    }
    if let Some(least) = bound("exclusiveMinimum").filter(|least| number <= *least) {
        found.push(Finding::error(place, format!("{value} is not more than {least}")));
    }
}

fn has_type(wanted: &Value, value: &Value) -> bool {
    let is_of_type = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        _ => false,
    };
    match wanted {
        Value::String(name) => is_of_type(name),
        Value::Array(names) => names.iter().filter_map(Value::as_str).any(is_of_type),
        _ => true,
    }
}

fn type_names(wanted: &Value) -> String {
    let name = |name: &str| match name {
        "object" => "a mapping",
        "array" => "a list",
        "string" => "text",
        "boolean" => "true or false",
        "integer" => "a whole number",
        "number" => "a number",
        _ => "nothing",
    };
    match wanted {
        Value::String(one) => name(one).to_owned(),
        // Optional fields are omitted rather than null.
        Value::Array(names) => {
            let names = names.iter().filter_map(Value::as_str).filter(|one| *one != "null").map(name);
            names.collect::<Vec<_>>().join(" or ")
        }
        _ => String::new(),
    }
}

fn none_of<'v>(value: &Value, wanted: impl Iterator<Item = &'v Value>) -> String {
    let wanted = wanted.map(|one| one.as_str().map_or_else(|| one.to_string(), str::to_owned));
    format!("{} is none of {}", shown(value), wanted.collect::<Vec<_>>().join(", "))
}

/// JSON represents NaN and infinity as null.
fn shown(value: &Value) -> String {
    let text = if value.is_null() { "null, .nan or .inf".to_owned() } else { value.to_string() };
    match text.char_indices().nth(40) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}
