//! The memory of all models that are served together, and how much of it each needs: from plans, before anything is loaded.

use crate::cli::ServeArgs;
use crate::command::drafts::DraftChoice;
use crate::command::host_need::HostNeed;
use crate::command::sequences::planned_sequences;
use crate::error::ExecError;
use crate::runtime::allowed_memory;
use hpp_engine::{host_memory_needed, listed, streams_on_host};
use hpp_generate::PlanFile;
use hpp_schema::memory::PROCESS;
use hpp_schema::{ByteSize, DeviceKind, Partition, Plan};
use hpp_serve::MemoryNeeds;
use std::collections::BTreeMap;

/// Fewest sequences of a model by default: this many conversations can run at once, whether or not they share passes.
const DEFAULT_SEQUENCES: u64 = 8;

/// The memory for all engines together.
pub(super) struct MemoryBudget {
    /// Bytes of host memory and of each device.
    pub memory: MemoryNeeds,
    /// Whether the user gave the limit of host memory.
    is_given: bool,
}

/// The budget: `--memory`, else the free memory of this machine. For each GPU, the largest VRAM budget among the plans.
///
/// # Errors
/// `--memory` is less than the process takes without any model.
pub(super) fn memory_budget(plans: &[(String, PlanFile)], args: &ServeArgs) -> Result<MemoryBudget, ExecError> {
    let host = match args.memory {
        Some(given) if given.0 < PROCESS => {
            return Err(ExecError::Usage {
                message: format!(
                    "--memory {} is less than the {} that the process takes without a model",
                    given.human(),
                    ByteSize(PROCESS).human()
                ),
                hint: "raise --memory".to_owned(),
            });
        }
        Some(given) => given.0.saturating_sub(PROCESS),
        None => allowed_host_memory().unwrap_or(u64::MAX),
    };
    let mut devices = BTreeMap::new();
    for (_, plan) in plans {
        for (number, bytes) in plan.plan.budgets.vram.iter().enumerate() {
            let most: &mut u64 = devices.entry(format!("gpu{number}")).or_default();
            *most = bytes.0.max(*most);
        }
    }
    Ok(MemoryBudget { memory: MemoryNeeds { host, devices }, is_given: args.memory.is_some() })
}

/// Bytes of host memory that the system allows all engines together now.
pub(super) fn allowed_host_memory() -> Option<u64> {
    allowed_memory().map(|allowed| allowed.saturating_sub(PROCESS))
}

/// What one engine needs.
#[derive(Debug)]
pub(super) struct EngineNeeds {
    /// Bytes of host memory and of each device.
    pub memory: MemoryNeeds,
    /// Sequences that `memory` has room for.
    pub sequences: u64,
    /// The least host memory beside KV pages.
    pub least: HostNeed,
    /// Bytes of RAM for KV pages.
    pub pages: u64,
}

impl EngineNeeds {
    /// The needs of a plan with this draft. `here`: the plan as it runs on this machine. Counts as many of the wanted sequences as the budget has room
    /// for, at least one.
    ///
    /// # Errors
    /// The user gave a limit of host memory, and the plan alone needs more.
    pub fn new(
        name: &str,
        plan: &Plan,
        here: &Plan,
        draft: &DraftChoice,
        args: &ServeArgs,
        budget: &MemoryBudget,
    ) -> Result<Self, BeyondLimit> {
        let planned = || planned_sequences(here, DEFAULT_SEQUENCES).max(DEFAULT_SEQUENCES);
        let wanted = args.max_sequences.unwrap_or_else(planned).max(1);
        let least = HostNeed::new(plan, here, args.runtime.weight_reads(), draft.memory());
        let pages = args.kv.ram(&least);
        let unused = memory_of_unused_draft(plan, draft);
        let host_beside = |pages: u64, sequences: u64| {
            let drafting = draft.shared_memory().saturating_add(draft.sequence_memory().saturating_mul(sequences));
            let parts = [drafting, unused, pages];
            let needed = parts.into_iter().fold(host_memory_needed(here, sequences), u64::saturating_add);
            least.taken(needed, pages).saturating_sub(PROCESS)
        };
        let host = |sequences: u64| host_beside(pages, sequences);
        let limit = budget.memory.host;
        if budget.is_given && host(1) > limit {
            let pages_of = |memory: u64| args.kv.ram_of(&least, ByteSize(memory.saturating_add(PROCESS)));
            let needed = sufficient(|memory| host_beside(pages_of(memory), 1));
            let (pages, without_pages) = (pages_of(needed), host_beside(0, 1));
            let (name, planned) = (name.to_owned(), plan.budgets.ram);
            return Err(BeyondLimit { name, needed, pages, without_pages, limit, planned });
        }
        let sequences = if budget.is_given { most(wanted, |sequences| host(sequences) <= limit) } else { wanted };
        let memory = MemoryNeeds { host: host(sequences), devices: device_needs(here) };
        Ok(EngineNeeds { memory, sequences, least, pages })
    }
}

/// Bytes of host memory that the plan has for a draft which this server does not use: the engine locks more weights there, if it reads weights from
/// disk.
fn memory_of_unused_draft(plan: &Plan, draft: &DraftChoice) -> u64 {
    let planned = plan.draft.as_ref().filter(|_| draft.memory() == 0 && streams_on_host(plan));
    planned.map_or(0, |planned| planned.host_memory.0)
}

/// The largest number up to `wanted` that `fits`, at least 1. What fits a number fits all smaller ones.
fn most(wanted: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut most, mut beyond) = (1, wanted.saturating_add(1).max(2));
    while beyond - most > 1 {
        let middle = most + (beyond - most) / 2;
        if fits(middle) {
            most = middle;
        } else {
            beyond = middle;
        }
    }
    most
}

/// The smallest memory M, bytes beside the process, with `needed(M) <= M`. The need grows with M because KV pages take a share of M by default.
fn sufficient(needed: impl Fn(u64) -> u64) -> u64 {
    let mut memory = 0;
    loop {
        let more = needed(memory);
        if more <= memory {
            return memory;
        }
        memory = more;
    }
}

/// A model that does not fit `--memory`, even alone and with one sequence.
#[derive(Clone, Debug)]
pub(super) struct BeyondLimit {
    name: String,
    /// Bytes of host memory beside the process.
    needed: u64,
    /// The part of `needed` for KV pages, bytes.
    pages: u64,
    /// Bytes of host memory beside the process without KV pages.
    without_pages: u64,
    /// The limit, bytes beside the process.
    limit: u64,
    /// The limit that the plan was made for.
    planned: Option<ByteSize>,
}

impl BeyondLimit {
    /// The error for the first of these models; its hint suffices for all. `None` if there are none.
    pub fn error(models: &[BeyondLimit]) -> Option<ExecError> {
        let BeyondLimit { name, needed, pages, limit, planned, .. } = models.first()?;
        let human = |bytes: u64| ByteSize(bytes.saturating_add(PROCESS)).human_rounded_up();
        let (needs, most) = (human(*needed), ByteSize(limit.saturating_add(PROCESS)).human());
        let has_pages = |model: &BeyondLimit| model.needed.saturating_sub(model.without_pages) >= 1 << 20;
        let of_it = match planned {
            _ if has_pages(&models[0]) => format!(", up to {} of it for KV pages (--kv-ram)", ByteSize(*pages).human()),
            Some(ram) => format!(", planned for {}", ram.human()),
            None => String::new(),
        };
        let fits_without_pages = |model: &BeyondLimit| has_pages(model) && model.without_pages <= *limit;
        let fewer = if models.iter().all(fits_without_pages) { ", give less --kv-ram (0 for no KV pages)" } else { "" };
        let all = models.iter().map(|model| model.needed).max().unwrap_or(*needed);
        let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
        Some(ExecError::Usage {
            message: format!(
                "{name} needs about {needs} of host memory{of_it}, and --memory allows {most} for all models"
            ),
            hint: format!(
                "raise --memory to {}{fewer}, or plan {} for less: hpp-split with a smaller --ram or --context",
                human(all),
                listed(&names)
            ),
        })
    }
}

/// Bytes on each GPU: weights, slots for streamed ones, states and the largest workspace.
fn device_needs(plan: &Plan) -> BTreeMap<String, u64> {
    let gpus = plan.devices.iter().filter(|device| device.kind != DeviceKind::Cpu);
    let needs = gpus.map(|device| {
        let ring = device.ring.as_ref().map_or(0, |ring| ring.slot_bytes.0.saturating_mul(ring.slots.into()));
        let states = plan.states.iter().filter(|state| state.device == device.name);
        let states = states.map(|state| state.memory().saturating_mul(plan.budgets.batch));
        let is_here = |partition: &&Partition| partition.variants().any(|variant| variant.device == device.name);
        let here = plan.partitions.iter().filter(is_here);
        let workspace = here.map(|partition| partition.bytes.workspace.0).max().unwrap_or(0);
        let weights = plan.weights_on(&device.name).unwrap_or(u64::MAX);
        let parts = states.chain([weights, ring, workspace]);
        (device.name.clone(), parts.fold(0, u64::saturating_add))
    });
    needs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use hpp_schema::{OwnDraft, Residency};

    fn plan() -> Plan {
        let plan = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        Plan::from_yaml(plan).unwrap()
    }

    /// The needs of eight sequences without KV pages and drafts, with `memory` bytes for all models.
    fn needs(plan: &Plan, here: &Plan, memory: u64) -> Result<EngineNeeds, ()> {
        let memory = memory.to_string();
        let line = ["hpp-exec", "serve", "plan", "--memory", &memory, "--kv-ram", "0", "--max-sequences", "8"];
        let Some(crate::cli::Command::Serve(args)) = crate::cli::Cli::parse_from(line).command else { panic!() };
        let budget = memory_budget(&[], &args).unwrap();
        EngineNeeds::new("m", plan, here, &DraftChoice::None, &args, &budget).map_err(drop)
    }

    #[test]
    fn a_draft_that_is_not_used_leaves_its_memory_to_weights_that_are_read_from_disk() {
        let mut plan = plan();
        let (plan_file, bits) = ("draft/plan.yaml".into(), 4);
        plan.draft =
            Some(OwnDraft { plan: plan_file, bits, host_memory: ByteSize(100), sequence_memory: ByteSize(10) });
        plan.partitions.iter_mut().for_each(|partition| partition.residency = Residency::Resident);
        assert_eq!(memory_of_unused_draft(&plan, &DraftChoice::None), 0);
        let host = plan.partitions.iter_mut().find(|partition| partition.device == "cpu").unwrap();
        host.residency = Residency::Streamed;
        assert_eq!(memory_of_unused_draft(&plan, &DraftChoice::None), 100);
        plan.budgets.ram = None;
        let host = |plan: &Plan| needs(plan, plan, 1 << 40).unwrap().memory.host;
        let with_draft = host(&plan);
        plan.draft = None;
        assert_eq!(memory_of_unused_draft(&plan, &DraftChoice::None), 0);
        assert_eq!(with_draft, host(&plan) + 100);
    }

    #[test]
    fn as_many_sequences_as_fit_run_at_least_one() {
        for wanted in 1..=20 {
            for fitting in 0..=wanted + 1 {
                assert_eq!(most(wanted, |sequences| sequences <= fitting), fitting.clamp(1, wanted));
            }
        }
        assert_eq!([most(0, |_| true), most(u64::MAX, |sequences| sequences <= 7)], [1, 7]);
    }

    /// The memory of each sequence counts also if its context is shorter than planned.
    #[test]
    fn sequences_share_the_memory_that_is_given() {
        let mut plan = plan();
        plan.budgets.ram = None;
        let context = plan.budgets.context;
        for context in [context, context / 2, context / 2 * 3] {
            let here = plan.for_context(context);
            let of = |sequences: u64| host_memory_needed(&here, sequences);
            assert!(of(2) > of(1));
            for fitting in [1, 3, 8] {
                let needs = needs(&plan, &here, of(fitting)).unwrap();
                assert_eq!((needs.sequences, needs.memory.host + PROCESS), (fitting, of(fitting)), "{context}");
            }
            assert!(needs(&plan, &here, of(1) - 1).is_err());
        }
    }

    /// With the memory that the hint names, no other model is refused.
    #[test]
    fn a_hint_names_memory_that_suffices_for_each_model() {
        let short = |name: &str, mib: u64| BeyondLimit {
            name: name.into(),
            needed: mib << 20,
            pages: 0,
            without_pages: mib << 20,
            limit: 0,
            planned: None,
        };
        assert!(BeyondLimit::error(&[]).is_none());
        let error = BeyondLimit::error(&[short("a", 25), short("b", 33), short("c", 1)]).unwrap();
        let human = |mib: u64| ByteSize((mib << 20) + PROCESS).human();
        assert!(error.to_string().starts_with(&format!("a needs about {} of", human(25))), "{error}");
        assert!(error.hint().unwrap().starts_with(&format!("raise --memory to {}, or", human(33))));
    }

    #[test]
    fn the_named_memory_suffices_although_pages_take_a_share_of_it() {
        assert_eq!(sufficient(|memory| 95 + memory / 20), 99);
        assert_eq!(sufficient(|memory| (95 << 20) + memory / 20), (100 << 20) - 1);
        assert_eq!([sufficient(|_| 0), sufficient(|_| u64::MAX)], [0, u64::MAX]);
    }
}
