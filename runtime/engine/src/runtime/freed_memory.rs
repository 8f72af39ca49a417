//! Decides whether host memory that a run has freed is kept for later runs. A backend's arena never joins its pieces: where each run needs pieces
//! of other sizes, the pieces of earlier runs would stay unused.

use hpp_schema::{ModelKind, Plan, State, StateUpdate};

/// The runs after which freed memory returns to the system. The next run then takes it anew, page by page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FreedMemory {
    /// None: all runs need pieces of the same sizes.
    Stays,
    /// Runs of more than one token, where memory is limited and experts are read by demand: partitions with experts need pieces of other sizes than
    /// the partitions between them.
    ReturnsAfterSeveralTokens,
    /// All: values grow from run to run, because tokens are appended to states or the whole sequence is computed again.
    Returns,
}

impl FreedMemory {
    /// The rule for a plan. `is_limited`: host memory is limited.
    pub fn of(plan: &Plan, is_limited: bool) -> Self {
        let grows = |state: &State| matches!(state.update, StateUpdate::Append { .. } | StateUpdate::Sliding { .. });
        if plan.model.kind == ModelKind::DecoderWithoutCache || plan.states.iter().any(grows) {
            FreedMemory::Returns
        } else if is_limited && plan.partitions.iter().any(|partition| partition.experts.is_some()) {
            FreedMemory::ReturnsAfterSeveralTokens
        } else {
            FreedMemory::Stays
        }
    }

    /// Whether freed memory returns to the system after a run of this many tokens.
    pub fn returns_after(self, tokens: u64) -> bool {
        match self {
            FreedMemory::Stays => false,
            FreedMemory::ReturnsAfterSeveralTokens => tokens > 1,
            FreedMemory::Returns => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_returns_after_the_runs_that_need_pieces_of_other_sizes() {
        let tokens = |rule: FreedMemory| [1, 2, 64].map(|tokens| rule.returns_after(tokens));
        assert_eq!(tokens(FreedMemory::Stays), [false, false, false]);
        assert_eq!(tokens(FreedMemory::ReturnsAfterSeveralTokens), [false, true, true]);
        assert_eq!(tokens(FreedMemory::Returns), [true, true, true]);
    }
}
