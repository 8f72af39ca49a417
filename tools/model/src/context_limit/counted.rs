//! Integers that count tokens: what they are computed from.

use crate::roles;
use hpp_graph::{Graph, Origin, ValueId};
use hpp_schema::InputRole;
use std::collections::BTreeSet;

/// What a value is computed from, if it depends on no values of other inputs than the positions and the attention mask. It may depend on the
/// shapes of all inputs.
#[derive(Default)]
pub struct CountedFrom<'g> {
    operators: BTreeSet<&'g str>,
    pub has_positions: bool,
    pub has_mask: bool,
}

impl<'g> CountedFrom<'g> {
    /// Follows a value back to the inputs and shapes; `None` if it depends on values of another input.
    pub fn of(graph: &'g Graph, value: ValueId) -> Option<Self> {
        let mut found = Self::default();
        let (mut seen, mut open) = (BTreeSet::new(), vec![value]);
        while let Some(id) = open.pop() {
            if !seen.insert(id) {
                continue;
            }
            match &graph.value(id).origin {
                Origin::Weight(_) => {}
                Origin::Input => match roles::input_role(graph, id) {
                    InputRole::PositionIds | InputRole::PastLengths | InputRole::TotalLengths => {
                        found.has_positions = true;
                    }
                    InputRole::AttentionMask => found.has_mask = true,
                    _ => return None,
                },
                Origin::Node { node, .. } => {
                    let node = graph.node(*node);
                    found.operators.insert(&node.op_type);
                    if !matches!(node.op_type.as_str(), "Shape" | "Size") {
                        open.extend(node.inputs.iter().flatten().chain(&node.captures));
                    }
                }
            }
        }
        Some(found)
    }

    /// Whether one of these operators takes part.
    pub fn has_operator(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.operators.contains(name))
    }
}
