//! `hpp-exec serve PLAN`: models over HTTP.

use super::drafts::DraftChoice;
use super::kv_cache::open_cache;
use super::sequences::{fitting_sequences, planned_sequences};
use super::{CommandContext, context_length, load_engine, open_embeddings, open_extra_inputs};
use crate::cli::{NamedPlan, ServeArgs, SpeculateArg};
use crate::console::Console;
use crate::error::ExecError;
use crate::interrupt::Interrupt;
use crate::numbers::counted;
use crate::runtime::OrtBackend;
use crate::settings::DraftMethod;
use hpp_engine::EngineOptions;
use hpp_generate::{Batch, ModelInputs, PlanFile, PromptEncoder, check_language_model};
use hpp_schema::{Plan, Residency};
use hpp_serve::{
    EngineHandle, EngineLimits, LoadedEngine, Metrics, ModelSettings, ServeSettings, ServedModel, Shutdown, WakeFn,
    WeightPlacement, check_address, serve,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Least sequences of a model by default, so that this many conversations can run at once whether or not they share passes.
const DEFAULT_SEQUENCES: u64 = 8;
/// Environment variable with an API key.
const KEY_VARIABLE: &str = "HPP_API_KEY";
/// How often Ctrl-C is looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Serves until Ctrl-C or SIGTERM.
pub fn run(args: &ServeArgs, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    let plans: Vec<(String, PlanFile)> = args.plans.iter().map(open).collect::<Result<_, _>>()?;
    check_names(&plans)?;
    check_address(SocketAddr::new(args.host, args.port))?;
    ctx.interrupt.stop_gracefully();
    ctx.interrupt.also_on_terminate().map_err(ExecError::Signal)?;
    let (metrics, shutdown) = (Metrics::new(), Shutdown::default());
    let mut models = Vec::new();
    for (name, plan) in plans {
        ctx.console.info(&format!("loading {name}"));
        models.push(start(name, plan, args, ctx, &metrics, &shutdown)?);
    }
    let names: Vec<String> = models.iter().map(|(model, _)| model.name().to_owned()).collect();
    let keys = std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty());
    let settings = ServeSettings {
        address: SocketAddr::new(args.host, args.port),
        api_keys: args.api_key.iter().cloned().chain(keys).collect(),
        max_body: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        timeout: args.timeout.map(Duration::from_secs),
        cors_origins: args.cors_origin.clone(),
        grace: Duration::from_secs(args.grace),
    };
    if !args.host.is_loopback() && settings.api_keys.is_empty() {
        ctx.console.warn("anyone who can reach this address may use the server: require a key with --api-key");
    }
    watch(ctx, &shutdown, args.grace);
    let console = Arc::clone(ctx.console);
    let on_ready = |address: SocketAddr| {
        console.info(&format!("serving {} at http://{address} (Ctrl-C ends it)", names.join(", ")));
    };
    serve(models, metrics, settings, &shutdown, on_ready)?;
    ctx.console.info("stopped");
    Ok(0)
}

fn open(named: &NamedPlan) -> Result<(String, PlanFile), ExecError> {
    let plan = PlanFile::open(&named.path)?;
    check_language_model(&plan.plan)?;
    Ok((named.name.clone().unwrap_or_else(|| plan.plan.model.name.clone()), plan))
}

fn check_names(plans: &[(String, PlanFile)]) -> Result<(), ExecError> {
    for (index, (name, _)) in plans.iter().enumerate() {
        if plans[..index].iter().any(|(other, _)| other == name) {
            return Err(ExecError::Usage {
                message: format!("two models have the name {name:?}"),
                hint: "give them names: hpp-exec serve a=PLAN b=PLAN".to_owned(),
            });
        }
    }
    Ok(())
}

/// Where a plan's weights lie, one entry for each device and kind of residency.
fn placement(plan: &Plan) -> Vec<WeightPlacement> {
    let mut places: Vec<WeightPlacement> = Vec::new();
    for partition in &plan.partitions {
        let weights = match partition.residency {
            Residency::Resident => "resident",
            Residency::Streamed => "streamed",
            Residency::Mapped => "mapped",
        };
        let same = |place: &&mut WeightPlacement| place.device == partition.device && place.weights == weights;
        let (bytes, pinned) = (partition.bytes.weights.0, partition.bytes.locked.map(|locked| locked.0));
        match places.iter_mut().find(same) {
            Some(place) => {
                place.partitions += 1;
                place.bytes += bytes;
                place.pinned_bytes = place.pinned_bytes.into_iter().chain(pinned).reduce(|a, b| a + b);
            }
            None => places.push(WeightPlacement {
                device: partition.device.clone(),
                weights,
                partitions: 1,
                bytes,
                pinned_bytes: pinned,
            }),
        }
    }
    places
}

/// Loads a model on a thread of its own.
fn start(
    name: String,
    plan: PlanFile,
    args: &ServeArgs,
    ctx: &CommandContext<'_>,
    metrics: &Metrics,
    shutdown: &Shutdown,
) -> Result<(ServedModel, EngineHandle), ExecError> {
    let generation = plan.plan.generation.clone().unwrap_or_default();
    let encoder = PromptEncoder::open(&plan, true)?;
    let inputs =
        ModelInputs { embeddings: open_embeddings(&plan.plan, None)?, extra: open_extra_inputs(&plan.plan, None)? };
    let settings = ModelSettings {
        name: name.clone(),
        sampling: generation.sampling,
        eos_token_ids: generation.eos_token_ids,
        context: context_length(&plan, &args.runtime),
        limits: EngineLimits { queue: args.queue },
        placement: placement(&plan.plan),
        encoder,
    };
    let tokenizer = settings.encoder.tokenizer.clone();
    let speculate = if args.ngram { Some(SpeculateArg::Ngram) } else { args.speculate };
    let draft = DraftChoice::open(&DraftMethod::resolve(speculate, None)?, &plan, &settings.encoder, ctx.console)?;
    let (console, interrupt) = (Arc::clone(ctx.console), ctx.interrupt.clone());
    let args = args.clone();
    let load = move |wake| {
        let (batch, max_sequences) = load_model(&plan, &args, &draft, inputs, wake, &console, &interrupt)?;
        let drafts = draft.load(&plan.plan, max_sequences, &args.runtime, &console, &interrupt)?;
        Ok(LoadedEngine { batch, max_sequences, tokenizer, drafts })
    };
    let metrics = metrics.model(&name);
    ServedModel::start(settings, load, metrics, shutdown.stop_flag())
}

fn load_model(
    plan: &PlanFile,
    args: &ServeArgs,
    draft: &DraftChoice,
    inputs: ModelInputs,
    wake: WakeFn,
    console: &Arc<Console>,
    interrupt: &Interrupt,
) -> Result<(Batch<OrtBackend>, usize), ExecError> {
    let (runtime, asked) = (&args.runtime, args.max_sequences);
    let wanted = asked.unwrap_or_else(|| planned_sequences(&plan.plan, DEFAULT_SEQUENCES).max(DEFAULT_SEQUENCES));
    let reserved = args.kv.ram(&plan.plan).saturating_add(draft.memory(wanted));
    let row_batching = args.batch.engine_option();
    let options = EngineOptions { sequences: Some(wanted), row_batching, reserved, ..runtime.engine_options() };
    let engine = load_engine(&plan.plan, &plan.dir, runtime, options, console, interrupt)?;
    let sequences = fitting_sequences(&engine, wanted, asked.is_some(), console);
    let cache = open_cache(&engine, &plan.plan, runtime, &args.kv, args.plans.len() as u64, wake, console)?;
    let mut batch = Batch::new(engine, inputs);
    cache.into_iter().for_each(|cache| batch.save_in(cache));
    Ok((batch, sequences))
}

/// Requests a shutdown once Ctrl-C or SIGTERM has come. The thread ends with the process.
fn watch(ctx: &CommandContext<'_>, shutdown: &Shutdown, grace: u64) {
    let (interrupt, console, shutdown) = (ctx.interrupt.clone(), Arc::clone(ctx.console), shutdown.clone());
    std::thread::spawn(move || {
        while !interrupt.is_requested() {
            std::thread::sleep(POLL_INTERVAL);
        }
        let seconds = counted(grace, "second");
        console.info(&format!(
            "taking no more requests; those in progress have {seconds} to finish, Ctrl-C again ends them at once"
        ));
        shutdown.request();
    });
}
