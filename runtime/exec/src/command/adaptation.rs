//! The adaptation of a command's engine: which memory it follows, and where its messages go.

use super::drafts::DraftChoice;
use super::host_need::HostNeed;
use crate::cli::{AdaptArg, RuntimeArgs};
use crate::console::Console;
use crate::error::ExecError;
use crate::runtime::{OnnxRuntime, OrtBackend, allowed_memory};
use hpp_engine::{Engine, host_memory_needed};
use hpp_generate::adapt::{Adaptation, Devices, HostMemory, Reclaimable};
use hpp_schema::Plan;
use std::sync::Arc;

/// Host memory that a command takes besides its engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct BesideEngine {
    /// Most sequences at once.
    pub sequences: u64,
    /// Bytes of RAM for saved KV pages.
    pub kv: u64,
    /// Bytes that drafting takes within the plan's limit.
    pub draft: u64,
    /// Bytes that drafting takes on top of the plan's limit.
    pub draft_on_top: u64,
    /// Bytes that drafting takes for each sequence.
    pub draft_sequence: u64,
}

impl BesideEngine {
    /// The memory of a command with this draft, this many sequences and `kv` bytes of saved KV pages.
    pub fn new(
        draft: &DraftChoice,
        plan: &Plan,
        sequences: u64,
        kv: u64,
        args: &RuntimeArgs,
    ) -> Result<Self, ExecError> {
        let draft_on_top = draft.memory_on_top(plan, sequences, args)?;
        let draft_sequence = draft.sequence_memory();
        let draft = draft.shared_memory().saturating_add(sequences.saturating_mul(draft_sequence));
        Ok(BesideEngine { sequences, kv, draft, draft_on_top, draft_sequence })
    }
}

/// Adapts the only engine of a process to memory and times that are not as planned, unless `--adapt off`.
pub fn adaptation(
    engine: &Engine<OrtBackend>,
    beside: BesideEngine,
    args: &RuntimeArgs,
    console: &Arc<Console>,
) -> Result<Option<Adaptation>, ExecError> {
    let lines = Arc::clone(console);
    let report = Box::new(move |line: &str| lines.info(&format!("note: {line}")));
    let Some(adaptation) = pass_time_adaptation(engine.plan(), args, report) else { return Ok(None) };
    let BesideEngine { sequences, kv, draft, draft_on_top, draft_sequence } = beside;
    let plan = engine.plan();
    // Partitions of a missing GPU count as host memory.
    let here = OnnxRuntime::open_and_plan_on_this_machine(plan, args)?;
    let needed = host_memory_needed(&here, sequences).saturating_add(kv).saturating_add(draft);
    let least = HostNeed::new(plan, &here, args.weight_reads(), draft);
    let needed = least.taken(needed, kv).saturating_add(draft_on_top);
    let sequence = engine.host_state_bytes().saturating_add(draft_sequence);
    let reclaimable = Reclaimable { kv, sequences, sequence, locked: engine.locked().1 };
    Ok(Some(adaptation.follow_memory(HostMemory { needed, reclaimable, allowed: Box::new(allowed_memory) })))
}

/// Adapts one of several engines of a process to times that are not as planned. The engine pool decides about memory, for all engines together.
pub fn pass_time_adaptation(plan: &Plan, args: &RuntimeArgs, report: Box<dyn Fn(&str)>) -> Option<Adaptation> {
    let devices = match args.adapt {
        AdaptArg::Off => return None,
        AdaptArg::Exact => Devices::Planned,
        AdaptArg::Devices => Devices::Other,
    };
    Some(Adaptation::new(plan, devices, report))
}
