//! Which rule speaks for an operator: one table per family, the families tried in turn.
//!
//! An operator in no table has no rule; nothing is assumed of it.

mod attention;
mod broadcast;
mod contract;
mod contrib;
mod control;
mod conv;
mod einsum;
mod elementwise;
mod generate;
mod indexing;
mod layout;
mod norm;
mod quantize;
mod recurrent;
mod reduce;
mod slicing;

use super::fact::Rule;
use hpp_schema::Shape;

/// The rule for an operator, if there is one.
pub(super) fn find(domain: &str, op: &str) -> Option<Rule> {
    match domain {
        "" | "ai.onnx" => standard(op),
        "com.microsoft" => contrib::rule(op).or_else(|| attention::contrib(op)).or_else(|| quantize::contrib(op)),
        _ => None,
    }
}

fn standard(op: &str) -> Option<Rule> {
    const FAMILIES: [fn(&str) -> Option<Rule>; 14] = [
        elementwise::rule,
        layout::rule,
        slicing::rule,
        indexing::rule,
        generate::rule,
        contract::rule,
        norm::rule,
        reduce::rule,
        attention::rule,
        quantize::rule,
        conv::rule,
        control::rule,
        recurrent::rule,
        contrib::adopted,
    ];
    FAMILIES.iter().find_map(|family| family(op))
}

/// The size of every letter of an `Einsum`, and of what the ellipsis stands for.
pub(super) fn einsum_axes(equation: &str, shapes: &[&Shape]) -> Option<Shape> {
    let axes = einsum::Axes::bind(equation, shapes)?;
    Some(axes.letters.into_values().chain(axes.ellipsis).collect())
}
