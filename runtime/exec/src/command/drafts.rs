//! The drafter for speculative decoding: n-grams of the text, the plan's own draft, or the draft model of `--draft`, which must have the
//! same tokens.

use super::load_engine;
use crate::cli::RuntimeArgs;
use crate::console::Console;
use crate::error::ExecError;
use crate::interrupt::Interrupt;
use crate::runtime::{OnnxRuntime, OrtBackend};
use crate::settings::{DraftMethod, WithoutDraft};
use hpp_engine::{EngineOptions, host_memory_needed, tries_none};
use hpp_generate::speculate::{DraftLength, DraftModel, DraftOrigin, Drafts};
use hpp_generate::{PlanFile, PromptEncoder, check_language_model};
use hpp_schema::memory::PROCESS;
use hpp_schema::{InputRole, Plan, Provider};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Where drafts come from, and the plan to load for them.
pub enum DraftChoice {
    /// Nowhere.
    None,
    /// The text itself.
    Ngram,
    /// A draft model.
    Model(Box<DraftPlan>),
}

/// The plan of a draft model.
pub struct DraftPlan {
    file: PlanFile,
    /// Bytes of the plan's host memory that the draft takes for one sequence; 0 if its memory comes on top of the plan's limit.
    memory: u64,
    /// Bytes for each further sequence.
    sequence_memory: u64,
}

impl DraftChoice {
    /// Finds the draft model of `plan`, if there is one, and checks that it has the same tokens.
    pub fn open(
        method: &DraftMethod,
        plan: &PlanFile,
        encoder: &PromptEncoder,
        console: &Console,
    ) -> Result<Self, ExecError> {
        if let Some(why) = plan.plan.why_drafts_fail() {
            return Self::without_drafts(method, plan, why, console);
        }
        let path = match method {
            DraftMethod::None => return Ok(DraftChoice::None),
            DraftMethod::Ngram => return Ok(DraftChoice::Ngram),
            DraftMethod::OfPlan(without) => return Self::of_plan(plan, *without, console),
            DraftMethod::Model(path) => path,
        };
        let file = PlanFile::open(path)?;
        check_language_model(&file.plan)?;
        let needs = |role: InputRole| matches!(role, InputRole::Embeddings | InputRole::Free);
        if let Some(input) = file.plan.model.inputs.iter().find(|input| needs(input.role)) {
            return Err(unfit(&format!("it reads {}, and a draft model gets token ids only", input.name)));
        }
        check_tokens(plan, encoder, &file)?;
        Ok(DraftChoice::Model(Box::new(DraftPlan { file, memory: 0, sequence_memory: 0 })))
    }

    /// The choice for a model that cannot verify drafts: none, or an error if drafts were demanded.
    fn without_drafts(method: &DraftMethod, plan: &PlanFile, why: &str, console: &Console) -> Result<Self, ExecError> {
        match method {
            DraftMethod::None => {}
            DraftMethod::OfPlan(WithoutDraft::Off) if plan.plan.draft.is_none() => {}
            DraftMethod::OfPlan(WithoutDraft::Off | WithoutDraft::Ngram) => {
                console.warn(&format!("no speculative decoding: {why}"));
            }
            DraftMethod::Ngram | DraftMethod::OfPlan(WithoutDraft::Refuse) | DraftMethod::Model(_) => {
                return Err(ExecError::Usage {
                    message: format!("speculative decoding cannot be used: {why}"),
                    hint: "leave out the options for speculative decoding".to_owned(),
                });
            }
        }
        Ok(DraftChoice::None)
    }

    /// The draft that a plan has of its own model.
    fn of_plan(plan: &PlanFile, without: WithoutDraft, console: &Console) -> Result<Self, ExecError> {
        let found = plan.plan.draft.as_ref().filter(|draft| plan.resolve(&draft.plan).exists());
        let missing = plan.plan.draft.is_some() && found.is_none();
        if missing {
            console.warn(
                "the plan's draft is missing: make the plan again with the command of before, --draft included, and --force",
            );
        }
        let Some(draft) = found else {
            return match without {
                WithoutDraft::Off => Ok(DraftChoice::None),
                WithoutDraft::Ngram => Ok(DraftChoice::Ngram),
                WithoutDraft::Refuse => Err(ExecError::Usage {
                    message: format!("--speculate draft needs a draft model, and {} has none", plan.path.display()),
                    hint: "use --speculate ngram, or, if the model's weights are floats, split it with --draft int4; without a \
                           subcommand hpp-exec also takes --draft PLAN"
                        .to_owned(),
                }),
            };
        };
        let file = PlanFile::open(&plan.resolve(&draft.plan))?;
        check_vocabulary(plan, &file)?;
        let (memory, sequence_memory) = (draft.host_memory.0, draft.sequence_memory.0);
        Ok(DraftChoice::Model(Box::new(DraftPlan { file, memory, sequence_memory })))
    }

    /// Bytes of the plan's host memory that drafting for one sequence takes.
    pub fn memory(&self) -> u64 {
        self.shared_memory().saturating_add(self.sequence_memory())
    }

    /// Bytes of the plan's host memory that drafting takes once, however many sequences there are.
    pub fn shared_memory(&self) -> u64 {
        let DraftChoice::Model(draft) = self else { return 0 };
        draft.memory.saturating_sub(draft.sequence_memory)
    }

    /// Bytes of the plan's host memory that drafting takes for each sequence.
    pub fn sequence_memory(&self) -> u64 {
        let DraftChoice::Model(draft) = self else { return 0 };
        draft.sequence_memory
    }

    /// Bytes of host memory that a draft model takes on top of the limit of `plan`, the verifying model's. Includes its partitions on GPUs that are
    /// missing here.
    pub fn memory_on_top(&self, plan: &Plan, sequences: u64, args: &RuntimeArgs) -> Result<u64, ExecError> {
        let draft = match self {
            DraftChoice::Model(draft) if draft.memory == 0 => &draft.file.plan,
            DraftChoice::None | DraftChoice::Ngram | DraftChoice::Model(_) => return Ok(0),
        };
        let mut here = OnnxRuntime::open_and_plan_on_this_machine(draft, &draft_args(draft, plan, args))?;
        // Drafts use the tokenizer of the model that verifies. The tokenizer is most of `heap`, so `heap` is left out.
        here.devices.iter_mut().for_each(|device| device.heap = None);
        Ok(host_memory_needed(&here, sequences).saturating_sub(PROCESS))
    }

    /// Loads the draft model, if there is one, for at most `sequences` texts at once. `plan` is the plan of the verifying model.
    pub fn load(
        self,
        plan: &Plan,
        sequences: usize,
        args: &RuntimeArgs,
        console: &Arc<Console>,
        interrupt: &Interrupt,
    ) -> Result<Drafts<OrtBackend>, ExecError> {
        let length = DraftLength::predicted(&predicted_passes(plan));
        let lock_weights = self.memory() > 0;
        let file = match self {
            DraftChoice::None => return Ok(Drafts { origin: DraftOrigin::None, length }),
            DraftChoice::Ngram => return Ok(Drafts { origin: DraftOrigin::Ngram(Rc::default()), length }),
            DraftChoice::Model(draft) => draft.file,
        };
        let args = &draft_args(&file.plan, plan, args);
        let options = EngineOptions { sequences: Some(sequences as u64), lock_weights, ..args.engine_options() };
        let engine = load_engine(&file.plan, &file.dir, args, options, console, interrupt)?;
        let model = DraftModel::new(engine, sequences);
        Ok(Drafts { origin: DraftOrigin::Model(Rc::new(RefCell::new(model))), length })
    }
}

/// The options for the draft model of `plan`.
fn draft_args(draft_plan: &Plan, plan: &Plan, args: &RuntimeArgs) -> RuntimeArgs {
    let context = Some(draft_context(draft_plan, plan, args.context));
    RuntimeArgs { context, providers: draft_providers(draft_plan, args), ..args.clone() }
}

/// The value of `--providers` for a draft model: empty, which means the plan's own, if no partition of the draft would try any of the user's
/// providers. A draft on the host is no error if the option is meant for a model on a GPU.
fn draft_providers(draft_plan: &Plan, args: &RuntimeArgs) -> Vec<Provider> {
    if tries_none(draft_plan, &args.providers) { vec![] } else { args.providers.clone() }
}

/// The context of a draft model: as many tokens as the text can have, or fewer if the draft model has no room for them. Drafting stops when this
/// context is full.
fn draft_context(draft_plan: &Plan, plan: &Plan, asked: Option<u64>) -> u64 {
    let most = draft_plan.model.longest_context().unwrap_or(u64::MAX);
    asked.map_or(draft_plan.budgets.context.min(plan.budgets.context), |asked| asked.min(most))
}

/// The passes of one sequence that a measured plan predicts: tokens and milliseconds of each.
fn predicted_passes(plan: &Plan) -> Vec<(u64, f64)> {
    let predictions = &plan.predictions;
    let measured = predictions.throughput.iter().filter(|_| !predictions.is_static());
    let passes = measured.flat_map(|throughput| &throughput.passes).filter(|pass| pass.sequences == 1);
    passes.map(|pass| (pass.tokens, pass.ms)).collect()
}

/// Refuses a draft model whose tokens are not those of the plan.
fn check_tokens(plan: &PlanFile, encoder: &PromptEncoder, draft_plan: &PlanFile) -> Result<(), ExecError> {
    check_vocabulary(plan, draft_plan)?;
    let draft_encoder = PromptEncoder::open(draft_plan, false)?;
    let (Some(ours), Some(theirs)) = (&encoder.tokenizer, &draft_encoder.tokenizer) else { return Ok(()) };
    match ours.first_difference(theirs) {
        Some(token) => Err(unfit(&format!("it has another tokenizer: {token:?} is not the same token in both"))),
        None => Ok(()),
    }
}

fn check_vocabulary(plan: &PlanFile, draft_plan: &PlanFile) -> Result<(), ExecError> {
    let (ours, theirs) = (plan.plan.model.vocab_size, draft_plan.plan.model.vocab_size);
    if ours == theirs {
        return Ok(());
    }
    let size = |size: Option<u64>| size.map_or("an unknown number of".to_owned(), |size| size.to_string());
    Err(unfit(&format!("its vocabulary has {} tokens and that of the model {}", size(theirs), size(ours))))
}

fn unfit(why: &str) -> ExecError {
    let message = format!("this model cannot draft: {why}");
    ExecError::Usage { message, hint: "give the plan of a smaller model with the same tokenizer".to_owned() }
}
