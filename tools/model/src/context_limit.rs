//! The longest context that a graph can compute: the rows of its tables of positions, the slots of its caches of fixed size, and the tokens of sliding
//! caches that texts cannot go on beyond.

mod counted;
mod fixed_cache;
mod table_change;

pub use table_change::tables_change_after;

use crate::rotary_caches::RotaryInputs;
use crate::sliding_cache::{SlidingCaches, SlidingObstacle};
use counted::CountedFrom;
use hpp_graph::{BlockState, Graph, Node, ValueId};

/// The smallest table of positions or cache of fixed size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextLimit {
    /// Positions from 0 to below this have a row or a slot.
    pub tokens: u64,
    /// What limits the context.
    pub holder: PositionHolder,
    /// Its name.
    pub name: String,
}

/// What has a place for each position of a token, and no more places than it was exported with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionHolder {
    /// A table of positions, or a cache of rotary embeddings.
    Table,
    /// A state of fixed size, which tokens are written into at their positions.
    Cache,
    /// A state of which the graph drops the oldest tokens, where texts cannot go on beyond those that are kept.
    SlidingCache(SlidingObstacle),
}

/// Why a text ends where a sliding cache is full, and what to do about it.
fn not_followed(obstacle: SlidingObstacle) -> &'static str {
    match obstacle {
        SlidingObstacle::CountsTokens => {
            "a cache of which the model drops the oldest tokens, and by whose length it counts tokens; export it with position_ids"
        }
        SlidingObstacle::SharesLength => {
            "a cache of which the model drops the oldest tokens, and whose size has the same name as that of a cache of another length; \
             export it with a size of its own for each cache"
        }
    }
}

impl ContextLimit {
    /// The refusal where a user asks for a longer context.
    pub fn refusal(&self, asked: u64) -> String {
        let ContextLimit { tokens, name, .. } = self;
        match self.holder {
            PositionHolder::Table => {
                format!("--context {asked} is longer than the {tokens} rows of {name}, the model's table of positions")
            }
            PositionHolder::Cache => {
                format!("--context {asked} is longer than the {tokens} slots of {name}, a cache of fixed size")
            }
            PositionHolder::SlidingCache(obstacle) => {
                let why = not_followed(obstacle);
                format!("--context {asked} is longer than the {tokens} tokens of {name}, {why}")
            }
        }
    }

    /// The note where a configuration claims a longer context, or where a cache ends texts that nothing else would.
    pub fn note(&self, claimed: Option<u64>) -> Option<String> {
        let ContextLimit { tokens, name, .. } = self;
        let has = match self.holder {
            PositionHolder::Table => format!("its table of positions {name} has {tokens} rows"),
            PositionHolder::Cache => format!("its cache {name} has {tokens} slots"),
            PositionHolder::SlidingCache(obstacle) => {
                let why = not_followed(obstacle);
                return Some(format!("a text has {tokens} tokens at most: those that {name} keeps, {why}"));
            }
        };
        let claimed = claimed.filter(|claimed| claimed > tokens)?;
        Some(format!("the model's configuration claims {claimed} tokens of context, and {has}: the limit is {tokens}"))
    }
}

/// The smallest of the caches of rotary embeddings, of the tables that positions index, of the states of fixed size and of sliding caches that cannot be
/// followed; `None` without one. A table whose first rows are not for positions allows fewer tokens than it has rows.
pub fn context_limit(graph: &Graph, states: &[BlockState]) -> Option<ContextLimit> {
    let limit = |tokens, holder, id| ContextLimit { tokens, holder, name: graph.value(id).name.clone() };
    let tables = graph.node_ids().flat_map(|id| position_tables(graph, graph.node(id)));
    let tables = tables.filter_map(|id| Some(limit(rows(graph, id)?, PositionHolder::Table, id)));
    let pairs = states.iter().map(|state| &state.pair);
    let caches =
        pairs.filter_map(|pair| Some(limit(fixed_cache::slots(graph, pair)?, PositionHolder::Cache, pair.past)));
    let sliding = SlidingCaches::of(graph, states.iter().map(|state| &state.pair)).limit();
    let sliding = sliding.map(|(tokens, past, why)| limit(tokens, PositionHolder::SlidingCache(why), past));
    tables.chain(caches).chain(sliding).min_by_key(|limit| limit.tokens)
}

/// Rows of a weight with two axes.
fn rows(graph: &Graph, id: ValueId) -> Option<u64> {
    graph.weight(id)?;
    match graph.value(id).shape.as_deref()? {
        [rows, _] => rows.as_fixed(),
        _ => None,
    }
}

/// The inputs of a node that are tables with a row for each position.
fn position_tables(graph: &Graph, node: &Node) -> Vec<ValueId> {
    let input = |at: usize| node.inputs.get(at).copied().flatten();
    if let Some(rotary) = RotaryInputs::of(node) {
        return rotary.caches.into_iter().filter_map(input).collect();
    }
    let is_lookup = matches!(node.domain.as_str(), "" | "ai.onnx")
        && node.op_type == "Gather"
        && node.int("axis").unwrap_or(0) == 0;
    let by_position = |_: &ValueId| is_lookup && input(1).is_some_and(|indices| are_positions(graph, indices));
    input(0).filter(by_position).into_iter().collect()
}

/// Whether integers are positions of tokens: they come from a count (`Range`, `CumSum`) or from the input of positions, and depend on
/// no values of other inputs than the attention mask. Logarithms of distances are buckets (T5), which any distance has.
pub(crate) fn are_positions(graph: &Graph, indices: ValueId) -> bool {
    CountedFrom::of(graph, indices).is_some_and(|from| {
        !from.has_operator(&["Log"]) && (from.has_positions || from.has_operator(&["Range", "CumSum"]))
    })
}

#[cfg(test)]
mod tests {
    use crate::{LogitsMode, ModelError, analyse};
    use std::path::{Path, PathBuf};

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
    }

    fn context(path: &Path, asked: Option<u64>) -> Result<(u64, Option<u64>), ModelError> {
        analyse(path, asked, LogitsMode::All).map(|analysis| (analysis.context, analysis.config.context_length))
    }

    #[test]
    fn a_table_of_positions_limits_the_context() {
        let gpt = fixture("torch/gpt-dynamo");
        assert_eq!(context(&gpt, None).unwrap(), (256, Some(256)));
        assert_eq!(context(&gpt, Some(64)).unwrap(), (64, Some(256)));
        let refusal = context(&gpt, Some(257)).unwrap_err();
        assert!(refusal.to_string().contains("--context 257 is longer than the 256 rows of"), "{refusal}");
    }

    /// A model without a configuration, or with one that claims more than the caches of its rotary embeddings hold.
    #[test]
    fn rotary_caches_limit_the_context() {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(fixture("genai/llama3-fp32-cpu")).unwrap().flatten() {
            if !entry.file_name().to_string_lossy().ends_with(".json") {
                std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
            }
        }
        assert_eq!(context(dir.path(), None).unwrap(), (512, Some(512)));
        std::fs::write(dir.path().join("config.json"), r#"{"max_position_embeddings": 4096}"#).unwrap();
        let analysis = analyse(dir.path(), None, LogitsMode::All).unwrap();
        assert_eq!((analysis.context, analysis.config.context_length), (512, Some(512)));
        assert!(analysis.notes.iter().any(|note| note.contains("claims 4096 tokens")), "{:?}", analysis.notes);
        assert!(context(dir.path(), Some(513)).is_err());
    }
}
