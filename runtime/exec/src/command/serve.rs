//! `hpp-exec serve PLAN`: models over HTTP.

mod memory;
mod placement;

use super::adaptation::pass_time_adaptation;
use super::drafts::DraftChoice;
use super::prefix_cache::{CacheSettings, open_cache, warning_of_pages};
use super::sequences::fitting_sequences;
use super::{CommandContext, context_length, load_engine, open_embeddings, open_extra_inputs};
use crate::cli::{KvArgs, NamedPlan, ServeArgs, SpeculateArg};
use crate::console::Console;
use crate::error::ExecError;
use crate::interrupt::Interrupt;
use crate::numbers::counted;
use crate::runtime::{OnnxRuntime, OrtBackend, resident_memory};
use crate::settings::DraftMethod;
use hpp_engine::EngineOptions;
use hpp_generate::adapt::Reclaimable;
use hpp_generate::text::TextTokenizer;
use hpp_generate::{
    Batch, ModelInputs, PlanFile, PromptEncoder, check_language_model, hidden_states_output, kept_logits_bytes,
};
use hpp_schema::{InputRole, Plan, Seal};
use hpp_serve::{
    ConnectionLimits, EnginePool, EngineSource, LoadContext, LoadError, LoadedEngine, Metrics, ModelSettings,
    PoolSettings, ServeError, ServeSettings, ServedModel, Shutdown, check_address, serve,
};
use memory::{BeyondLimit, EngineNeeds, allowed_host_memory, memory_budget};
use placement::{loaded_placement, planned_placement};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Environment variable with an API key.
const KEY_VARIABLE: &str = "HPP_API_KEY";
/// Host memory that loading the first model adds to the process and later models share, bytes: thread pools, allocators, kernel tables (measured by
/// hand, 2026-11-27, ONNX Runtime 1.31.1).
const FIRST_SESSION: u64 = 16 << 20;
/// Interval between two checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Serves until Ctrl-C or SIGTERM.
pub fn run(args: &ServeArgs, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    let args = &ServeArgs { kv: KvArgs { limit: args.memory, ..args.kv.clone() }, ..args.clone() };
    let plans: Vec<(String, PlanFile)> = args.plans.iter().map(open).collect::<Result<_, _>>()?;
    check_names(&plans)?;
    check_keys(&args.api_key)?;
    if args.kv.kv_dir.is_some() {
        check_stores(&plans)?;
    }
    check_address(SocketAddr::new(args.host, args.port))?;
    ctx.interrupt.request_stop_on_signal();
    let (metrics, shutdown) = (Metrics::new(), Shutdown::default());
    let budget = memory_budget(&plans, args)?;
    let starting = Arc::new(AtomicBool::new(true));
    let (mut settings, mut sources) = (Vec::new(), Vec::new());
    let (mut before_models, mut too_large) = (None, Vec::new());
    for (name, plan) in plans {
        let runtime = OnnxRuntime::open_for(&plan.plan, &args.runtime, ctx.console)?;
        let before_models = *before_models.get_or_insert_with(resident_memory);
        let here = runtime.plan_on_this_machine(&plan.plan, &args.runtime);
        settings.push(model_settings(&name, &plan, args)?);
        if let Some(warning) = settings.last().and_then(without_text_or_chat) {
            ctx.console.warn(&warning);
        }
        // A draft that cannot be used is refused here, before models are loaded.
        let draft = draft_choice(&plan, args, ctx.console)?;
        let needs = match EngineNeeds::new(&name, &plan.plan, &here, &draft, args, &budget) {
            Ok(needs) => needs,
            Err(beyond) => {
                too_large.push(beyond);
                continue;
            }
        };
        if let Some(warning) = args.kv.kv_ram.and_then(|_| warning_of_pages(&needs.least, needs.pages)) {
            ctx.console.warn(&warning);
        }
        let loader = ModelLoader {
            tokenizer: settings.last().and_then(|settings| settings.encoder.tokenizer.clone()),
            plan,
            args: args.clone(),
            sequences: needs.sequences,
            pages: needs.pages,
            console: Arc::clone(ctx.console),
            interrupt: ctx.interrupt.clone(),
            is_starting: Arc::clone(&starting),
            shared_memory: before_models.saturating_add(FIRST_SESSION),
        };
        let metrics = metrics.model(&name);
        let load = Arc::new(move |context| loader.load(context).map_err(LoadError::from));
        sources.push(EngineSource::new(name, needs.memory, metrics, load));
    }
    if let Some(error) = BeyondLimit::error(&too_large) {
        return Err(error);
    }
    let names: Vec<String> = settings.iter().map(|settings| settings.name.clone()).collect();
    let pool = PoolSettings {
        budget: budget.memory,
        allowed: Some(Arc::new(allowed_host_memory)),
        idle_timeout: args.idle_timeout.map(Duration::from_secs),
        queue: args.queue,
    };
    let pool = EnginePool::start(sources, pool, shutdown.stop_flag()).map_err(ServeError::from)?;
    if !args.on_demand {
        load_those_that_fit(&pool, &names, ctx)?;
    }
    starting.store(false, Ordering::SeqCst);
    let models = settings.into_iter().enumerate();
    let models = models.map(|(engine, settings)| ServedModel::new(settings, pool.clone(), engine)).collect();
    let keys = std::env::var(KEY_VARIABLE).ok();
    let settings = ServeSettings {
        address: SocketAddr::new(args.host, args.port),
        api_keys: args.api_key.iter().cloned().chain(keys).collect(),
        max_body: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        timeout: args.timeout.map(Duration::from_secs),
        cors_origins: args.cors_origin.clone(),
        allowed_hosts: args.allowed_host.clone(),
        connections: ConnectionLimits { most: args.max_connections as usize, ..ConnectionLimits::default() },
        rate_limit: args.rate_limit,
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
    serve(models, pool, metrics, settings, &shutdown, on_ready)?;
    ctx.console.info("stopped");
    Ok(0)
}

/// Loads models in their order while they fit. The others are loaded later, when a request needs them.
fn load_those_that_fit(pool: &EnginePool, names: &[String], ctx: &CommandContext<'_>) -> Result<(), ExecError> {
    for (engine, name) in names.iter().enumerate() {
        if engine > 0 && !pool.has_room_for(engine) {
            ctx.console
                .info(&format!("{name} is loaded when a request needs it: memory does not hold it beside others"));
            continue;
        }
        ctx.console.info(&format!("loading {name}"));
        pool.load(engine).map_err(|error| match error.downcast::<ExecError>() {
            Ok(error) => *error,
            Err(other) => ServeError::EngineThread(other.to_string()).into(),
        })?;
    }
    Ok(())
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

/// Refuses empty keys. An empty key is usually a secret that was not set, and would let everyone in.
fn check_keys(keys: &[String]) -> Result<(), ExecError> {
    let from_environment = std::env::var_os(KEY_VARIABLE).is_some_and(|key| key.is_empty());
    let what = match keys.iter().any(String::is_empty) {
        true => "--api-key",
        false if from_environment => KEY_VARIABLE,
        false => return Ok(()),
    };
    Err(ExecError::Usage {
        message: format!("{what} is empty"),
        hint: format!("give a key, or leave {what} out to serve without one"),
    })
}

/// Refuses two names for one plan if KV pages are kept in a directory, because the directory has one store for each plan.
fn check_stores(plans: &[(String, PlanFile)]) -> Result<(), ExecError> {
    let same = |a: &PlanFile, b: &PlanFile| Seal::of(&a.plan).ok() == Seal::of(&b.plan).ok();
    for (index, (name, plan)) in plans.iter().enumerate() {
        if let Some((other, _)) = plans[..index].iter().find(|(_, other)| same(other, plan)) {
            return Err(ExecError::Usage {
                message: format!("{other} and {name} are the same plan, and --kv-dir has one store for each plan"),
                hint: "serve it under one name, or omit --kv-dir".to_owned(),
            });
        }
    }
    Ok(())
}

fn model_settings(name: &str, plan: &PlanFile, args: &ServeArgs) -> Result<ModelSettings, ExecError> {
    let generation = plan.plan.generation.clone().unwrap_or_default();
    // Models that need more inputs than tokens are refused here, before the others are loaded.
    model_inputs(&plan.plan)?;
    let hidden_states = hidden_states_output(&plan.plan);
    Ok(ModelSettings {
        name: name.to_owned(),
        sampling: generation.sampling,
        eos_token_ids: generation.eos_token_ids,
        context: context_length(plan, &args.runtime),
        placement: planned_placement(&plan.plan),
        scores_all_positions: !plan.plan.model.gives_one_position(),
        gives_hidden_states: hidden_states.is_some(),
        hidden_size: hidden_states.and_then(|output| output.shape.last()?.as_fixed()),
        encoder: PromptEncoder::open(plan, true)?,
    })
}

/// The warning for a model that cannot answer requests with text, or cannot answer chats.
fn without_text_or_chat(model: &ModelSettings) -> Option<String> {
    without_tokenizer(model).or_else(|| without_template(model))
}

/// A warning for a model with a tokenizer and without a chat template: each chat would fail.
fn without_template(model: &ModelSettings) -> Option<String> {
    let is_missing = model.encoder.template.is_none();
    is_missing.then(|| {
        format!(
            "{} has no chat template: chats are refused, those of the page too; /v1/completions continues texts. For chats, put the \
             template of its fine-tuned version beside the model as chat_template.jinja and split it again",
            model.name
        )
    })
}

/// A warning for a model without a tokenizer: most requests have text, and each of them would fail.
fn without_tokenizer(model: &ModelSettings) -> Option<String> {
    if model.encoder.tokenizer.is_some() {
        return None;
    }
    let embeddings = if model.gives_hidden_states { " and as `input` of /v1/embeddings" } else { "" };
    Some(format!(
        "{} has no tokenizer: chats and all other requests with text are refused. Token ids are taken as `prompt` of \
         /v1/completions{embeddings}; completions then have no text. For text, put tokenizer.json beside the model and split it again",
        model.name
    ))
}

fn model_inputs(plan: &Plan) -> Result<ModelInputs, ExecError> {
    if plan.model.inputs.iter().any(|input| input.role == InputRole::Embeddings) {
        return Err(ExecError::Usage {
            message: format!("{} takes embeddings instead of token ids, and cannot be served", plan.model.name),
            hint: "export it with its embedding, or run it with hpp-exec --embeddings FILE.npy".to_owned(),
        });
    }
    Ok(ModelInputs { embeddings: open_embeddings(plan, None)?, extra: open_extra_inputs(plan, None)? })
}

/// Loads the engine of a model, each time it is needed.
struct ModelLoader {
    plan: PlanFile,
    args: ServeArgs,
    /// Most sequences, as many as the memory budget has room for.
    sequences: u64,
    /// Bytes of RAM for KV pages.
    pages: u64,
    tokenizer: Option<TextTokenizer>,
    console: Arc<Console>,
    interrupt: Interrupt,
    /// Whether the server is still starting. Then Ctrl-C cancels the load.
    is_starting: Arc<AtomicBool>,
    /// Bytes that the process takes with the runtime library but without any model.
    shared_memory: u64,
}

/// How requests of a model draft tokens.
fn draft_choice(plan: &PlanFile, args: &ServeArgs, console: &Console) -> Result<DraftChoice, ExecError> {
    let speculate = if args.ngram { Some(SpeculateArg::Ngram) } else { args.speculate };
    // An empty encoder suffices: a plan's own draft has the tokens of its model, so tokenizers are not compared.
    DraftChoice::open(&DraftMethod::resolve(speculate, None)?, plan, &PromptEncoder::default(), console)
}

impl ModelLoader {
    /// Refuses a plan that was replaced since the server read it: the server would use the context, tokenizer and template of the old plan.
    fn check_unchanged(&self) -> Result<(), ExecError> {
        let PlanFile { plan, path, .. } = &self.plan;
        if PlanFile::open(path)?.plan == *plan {
            return Ok(());
        }
        Err(ExecError::Usage {
            message: format!("{} was replaced since the server started", path.display()),
            hint: "restart the server to serve the new plan".to_owned(),
        })
    }

    fn load(&self, LoadContext { wake, cancel }: LoadContext) -> Result<LoadedEngine<OrtBackend>, ExecError> {
        let Self { plan, args, console, .. } = self;
        self.check_unchanged()?;
        let (runtime, asked) = (&args.runtime, args.max_sequences);
        let draft = draft_choice(plan, args, console)?;
        // With a single model, the plan's memory limit covers the whole process. With several, the memory of the other models is subtracted.
        let others = if args.plans.len() > 1 { resident_memory().saturating_sub(self.shared_memory) } else { 0 };
        let options = EngineOptions {
            sequences: Some(self.sequences),
            row_batching: args.batch.engine_option(),
            reserved: self.pages.saturating_add(draft.shared_memory()),
            reserved_per_sequence: draft.sequence_memory().saturating_add(kept_logits_bytes(&plan.plan.model)),
            others,
            cancel: Some(cancel),
            ..runtime.engine_options()
        };
        // After the start, Ctrl-C does not cancel a load at once: requests that wait for it have the time of --grace.
        let interrupt =
            if self.is_starting.load(Ordering::SeqCst) { self.interrupt.clone() } else { Interrupt::never() };
        let engine = load_engine(&plan.plan, &plan.dir, runtime, options, console, &interrupt)?;
        let max_sequences = fitting_sequences(&engine, self.sequences, asked.is_some(), console);
        let settings = CacheSettings { args: &args.kv, ram: self.pages, models: args.plans.len() as u64 };
        let cache = open_cache(&engine, &plan.plan, runtime, settings, wake, console)?;
        let placement = loaded_placement(&engine);
        let name = plan.plan.model.name.clone();
        let report = Box::new(move |line: &str| tracing::warn!(model = name, "{line}"));
        let adaptation = pass_time_adaptation(&plan.plan, runtime, report);
        let reclaimable = Reclaimable {
            // Counted in what the model needs, also where it has no cache.
            kv: self.pages,
            sequences: max_sequences as u64,
            sequence: engine.host_state_bytes().saturating_add(draft.sequence_memory()),
            locked: engine.locked().1,
        };
        let mut batch = Batch::new(engine, model_inputs(&plan.plan)?);
        adaptation.into_iter().for_each(|adaptation| batch.adapt(adaptation));
        cache.into_iter().for_each(|cache| batch.save_in(cache));
        let drafts = draft.load(&plan.plan, max_sequences, runtime, console, &interrupt)?;
        Ok(LoadedEngine { batch, reclaimable, tokenizer: self.tokenizer.clone(), drafts, placement })
    }
}

/// Starts a thread that requests a shutdown once Ctrl-C or SIGTERM has come. The thread ends with the process.
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
