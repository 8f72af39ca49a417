//! The table of inference rules by operator, one module per family.
//!
//! The rules cover what exporters of language, vision and speech models emit, and ONNX Runtime's fused operators in
//! such models. Outputs of any other operator keep the types and shapes that the file declares.

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

use super::context::Rule;
use hpp_schema::Shape;

/// The rule of an operator; `None` if it has none.
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

/// The sizes of all letters of an `Einsum` equation and of the dimensions behind the ellipsis.
pub(super) fn einsum_axes(equation: &str, shapes: &[&Shape]) -> Option<Shape> {
    let axes = einsum::Axes::bind(equation, shapes)?;
    Some(axes.letters.into_values().chain(axes.ellipsis).collect())
}
