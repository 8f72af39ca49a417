//! The drafter for speculative decoding: n-grams of the text, or the draft model of `--draft`, which must have the same tokens.

use super::{CommandContext, load_sequence};
use crate::cli::RuntimeArgs;
use crate::error::ExecError;
use crate::runtime::OrtBackend;
use crate::settings::{DraftMethod, GenerateSettings};
use hpp_generate::speculate::{DraftLength, Drafter, ModelDrafter, NgramDrafter, Speculation};
use hpp_generate::{Generation, ModelInputs, PlanFile, PromptEncoder, SingleSequence, check_language_model};
use hpp_schema::{InputRole, Plan, Predictions};
use std::cell::RefCell;
use std::rc::Rc;

/// Makes a drafter for each of any number of texts.
pub struct DraftSource {
    from: Source,
    length: DraftLength,
}

enum Source {
    /// No speculation.
    None,
    /// The text itself.
    Ngram,
    /// A loaded draft model.
    Model(Rc<RefCell<SingleSequence<OrtBackend>>>),
}

impl DraftSource {
    /// Loads the draft model, if there is one, and checks that it has the tokens of `plan`.
    pub fn open(
        settings: &GenerateSettings,
        plan: &PlanFile,
        encoder: &PromptEncoder,
        ctx: &CommandContext<'_>,
    ) -> Result<Self, ExecError> {
        let fixed = settings.run.draft_tokens.map(|tokens| DraftLength::fixed(usize::from(tokens)));
        let length = fixed.unwrap_or_else(|| DraftLength::predicted(&predicted_passes(&plan.plan)));
        let path = match &settings.draft_method {
            DraftMethod::None => return Ok(DraftSource { from: Source::None, length }),
            DraftMethod::Ngram => return Ok(DraftSource { from: Source::Ngram, length }),
            DraftMethod::Model(model) => &model.path,
        };
        let draft_plan = PlanFile::open(path)?;
        check_language_model(&draft_plan.plan)?;
        let needs = |role: InputRole| matches!(role, InputRole::Embeddings | InputRole::Free);
        if let Some(input) = draft_plan.plan.model.inputs.iter().find(|input| needs(input.role)) {
            return Err(unfit(&format!("it reads {}, and a draft model gets token ids only", input.name)));
        }
        check_tokens(plan, encoder, &draft_plan)?;
        // A draft model with a shorter context drafts until its context is full.
        let most = draft_plan.plan.model.context_length.unwrap_or(u64::MAX);
        let context = settings.run.runtime.context.map(|context| context.min(most));
        let args = &RuntimeArgs { context, ..settings.run.runtime.clone() };
        let inputs = ModelInputs::default();
        let sequence = load_sequence(&draft_plan.plan, &draft_plan.dir, args, inputs, ctx.console, ctx.interrupt)?;
        Ok(DraftSource { from: Source::Model(Rc::new(RefCell::new(sequence))), length })
    }

    /// The generation with a drafter from here.
    pub fn speculate(&self, generation: Generation) -> Generation {
        let drafter: Box<dyn Drafter> = match &self.from {
            Source::None => return generation,
            Source::Ngram => Box::<NgramDrafter>::default(),
            Source::Model(sequence) => Box::new(ModelDrafter::new(Rc::clone(sequence))),
        };
        generation.speculate(Speculation::with_length(drafter, self.length.clone()))
    }
}

/// Tokens and milliseconds of the passes of one sequence that a measured plan predicts.
fn predicted_passes(plan: &Plan) -> Vec<(u64, f64)> {
    let Predictions { source, throughput, .. } = &plan.predictions;
    let measured = throughput.iter().filter(|_| source != "static");
    let passes = measured.flat_map(|throughput| &throughput.passes).filter(|pass| pass.sequences == 1);
    passes.map(|pass| (pass.tokens, pass.ms)).collect()
}

/// Refuses a draft model whose tokens are not those of the plan.
fn check_tokens(plan: &PlanFile, encoder: &PromptEncoder, draft_plan: &PlanFile) -> Result<(), ExecError> {
    let (ours, theirs) = (plan.plan.model.vocab_size, draft_plan.plan.model.vocab_size);
    if ours != theirs {
        let size = |size: Option<u64>| size.map_or("an unknown number of".to_owned(), |size| size.to_string());
        return Err(unfit(&format!("it has {} tokens and the model has {}", size(theirs), size(ours))));
    }
    let draft_encoder = PromptEncoder::open(draft_plan, false)?;
    let (Some(ours), Some(theirs)) = (&encoder.tokenizer, &draft_encoder.tokenizer) else { return Ok(()) };
    match ours.first_difference(theirs) {
        Some(token) => Err(unfit(&format!("it has another tokenizer: {token:?} is not the same token in both"))),
        None => Ok(()),
    }
}

fn unfit(why: &str) -> ExecError {
    let message = format!("this model cannot draft: {why}");
    ExecError::Usage { message, hint: "give the plan of a smaller model with the same tokenizer".to_owned() }
}
