//! A draft model that several texts share.

use hpp_engine::mock::MockBackend;
use hpp_generate::speculate::{DraftModel, Drafter, ModelDrafter};
use hpp_schema::{ByteSize, StateUpdate};
use std::cell::RefCell;
use std::rc::Rc;

#[path = "../../engine/tests/support/mod.rs"]
mod toy;

const CONTEXT: u64 = 256;
/// A prompt of three chunks of 64 tokens, of which the last is not full.
const PROMPT: usize = 150;

/// The lengths of the first drafts after a prompt, from a draft model for `texts` texts.
fn drafts(texts: usize) -> Vec<usize> {
    let mut toy = toy::Toy::new();
    (toy.plan.budgets.context, toy.plan.schedule.prefill_chunk) = (CONTEXT, Some(4));
    toy.plan.partitions.iter_mut().for_each(|partition| partition.bytes.kv = ByteSize(16 * CONTEXT));
    for state in &mut toy.plan.states {
        if let StateUpdate::InPlace { capacity, .. } | StateUpdate::Append { capacity, .. } = &mut state.update {
            (*capacity, state.bytes) = (CONTEXT, ByteSize(4 * CONTEXT));
        }
    }
    let model = Rc::new(RefCell::new(DraftModel::<MockBackend>::new(toy.load().unwrap(), texts)));
    let mut drafter = ModelDrafter::new(model);
    drafter.extend(&[3; PROMPT]);
    let mut tokens = Vec::new();
    let mut draft = || {
        drafter.draft(2, &mut tokens).unwrap();
        tokens.len()
    };
    (0..4).map(|_| draft()).collect()
}

#[test]
fn a_draft_model_of_several_texts_reads_one_chunk_of_a_prompt_between_two_passes() {
    assert!(drafts(1)[0] > 0);
    let shared = drafts(2);
    assert_eq!(shared[..2], [0, 0]);
    assert!(shared[2] > 0, "{shared:?}");
}
