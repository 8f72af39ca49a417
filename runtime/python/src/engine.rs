//! The class `Engine`: a loaded plan. It sends jobs to the engine's thread, and turns text into tokens and back on the caller's.

use crate::failure::Failure;
use crate::generation::{Generation, table};
use crate::job::{GenerateWork, Job, JobHandle, Reuse, Running, Work};
use crate::load::{LoadSettings, Loaded};
use crate::thread::{EngineThread, ThreadSettings, start};
use crate::wait::receive;
use crate::warnings::Warnings;
use hpp_engine::{CancelHandle, EngineOptions, Fallback, Verify, WeightReads};
use hpp_generate::sampling::SamplingOverrides;
use hpp_generate::text::{ChatTemplate, Message, Role, SpecialTokens};
use hpp_generate::{GenerationRequest, PlanFile, PromptEncoder, PromptError, check_language_model, check_prompt};
use hpp_schema::{
    InputRole, Provider, ProviderArgError, ProviderLibraryArg, ProviderNameError, ProviderOptionArg,
    provider_libraries, provider_options,
};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

/// A loaded plan. It is closed when it is dropped, after the job that runs.
#[pyclass(frozen, module = "hpp._native")]
pub struct Engine {
    plan: Arc<PlanFile>,
    encoder: PromptEncoder,
    /// Opened for the first conversation, so that a model whose template is broken can still continue texts.
    template: Mutex<Option<Arc<ChatTemplate>>>,
    loaded: Loaded,
    warnings: Arc<Warnings>,
    running: Running,
    next_id: AtomicU64,
    /// Jobs that may still wait or run.
    handles: Mutex<Vec<Weak<JobHandle>>>,
    /// `None` once closed.
    thread: Mutex<Option<Thread>>,
}

struct Thread {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

#[pymethods]
impl Engine {
    /// Loads a plan. Ctrl-C ends the load.
    #[staticmethod]
    #[pyo3(signature = (path, *, package, library, threads, context, strict, providers, ep_lib, ep_option, weights, pinned, verify_weights, ngram_drafts))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, which Python's side fills")]
    fn load(
        py: Python<'_>,
        path: PathBuf,
        package: Option<PathBuf>,
        library: Option<PathBuf>,
        threads: Option<usize>,
        context: Option<u64>,
        strict: bool,
        providers: Vec<String>,
        ep_lib: Vec<String>,
        ep_option: Vec<String>,
        weights: &str,
        pinned: Option<u64>,
        verify_weights: bool,
        ngram_drafts: bool,
    ) -> PyResult<Self> {
        let providers = providers.iter().map(|name| provider(name)).collect::<Result<Vec<_>, Failure>>()?;
        let libraries = parsed::<ProviderLibraryArg>(&ep_lib)?;
        let options = parsed::<ProviderOptionArg>(&ep_option)?;
        // If the CPU is first in the list, running there is no fallback.
        let is_strict = strict && providers.first() != Some(&Provider::CPU);
        let engine = EngineOptions {
            fallback: if is_strict { Fallback::Refuse } else { Fallback::Report },
            context,
            verify: if verify_weights { Verify::Full } else { Verify::Default },
            weights: weight_reads(weights)?,
            pinned,
            ..EngineOptions::default()
        };
        let load = LoadSettings {
            library,
            package,
            threads,
            providers,
            provider_libraries: provider_libraries(&libraries),
            provider_options: provider_options(&options),
            engine,
        };
        let opened = py.detach(|| open(&path))?;
        Self::start(py, opened, load, ngram_drafts)
    }

    /// Submits a request.
    #[pyo3(signature = (prompt, *, max_new, stop, ignore_eos, temperature, top_k, top_p, min_p, repetition_penalty, seed, reuse, logits))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, which Python's side fills")]
    fn generate(
        &self,
        prompt: Vec<u32>,
        max_new: Option<u64>,
        stop: Vec<String>,
        ignore_eos: bool,
        temperature: Option<f64>,
        top_k: Option<usize>,
        top_p: Option<f64>,
        min_p: Option<f64>,
        repetition_penalty: Option<f64>,
        seed: Option<u64>,
        reuse: &str,
        logits: bool,
    ) -> PyResult<Generation> {
        let sampling = SamplingOverrides { temperature, top_k, top_p, min_p, repetition_penalty, seed };
        let request = self.request(prompt, max_new, stop, ignore_eos, sampling)?;
        let (events, receiver) = channel();
        let work = GenerateWork { request, reuse: reuse_of(reuse)?, keep_logits: logits, events };
        let handle = self.submit(Work::Generate(Box::new(work)))?;
        Ok(Generation::new(receiver, handle))
    }

    /// The logits after each token, or after the last one only: bytes of float32, rows, columns.
    fn logits<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        only_last: bool,
    ) -> PyResult<(Bound<'py, PyByteArray>, usize, usize)> {
        let (answer, receiver) = channel();
        let handle = self.submit(Work::Logits { tokens, only_last, answer })?;
        let logits = receive(py, &Mutex::new(receiver), || handle.cancel())??;
        table(py, &logits)
    }

    /// The tokens of a text.
    fn encode(&self, py: Python<'_>, text: &str, special: bool) -> PyResult<Vec<u32>> {
        let special = if special { SpecialTokens::Add } else { SpecialTokens::Omit };
        let encode = || -> Result<Vec<u32>, Failure> { Ok(self.encoder.tokenizer()?.encode(text, special)?) };
        Ok(py.detach(encode)?)
    }

    /// The tokens of a conversation: (role, text) of each message.
    fn encode_messages(&self, py: Python<'_>, messages: Vec<(String, String)>) -> PyResult<Vec<u32>> {
        Ok(py.detach(|| self.tokens_of(messages))?)
    }

    /// The text of tokens, which the vocabulary must have.
    fn decode(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<String> {
        let decode = || -> Result<String, Failure> {
            let tokenizer = self.encoder.tokenizer()?;
            tokenizer.check_known(&tokens)?;
            Ok(tokenizer.decode(&tokens)?)
        };
        Ok(py.detach(decode)?)
    }

    /// Cancels what runs and what waits.
    fn cancel(&self) {
        let handles = std::mem::take(&mut *lock(&self.handles));
        handles.iter().filter_map(Weak::upgrade).for_each(|handle| handle.cancel());
    }

    /// Cancels all jobs and frees the model.
    fn close(&self, py: Python<'_>) {
        let thread = lock(&self.thread).take();
        self.cancel();
        let Some(Thread { jobs, thread }) = thread else { return };
        drop(jobs);
        // If the thread panicked, it has ended too.
        py.detach(|| drop(thread.join()));
    }

    /// Warnings since the last call.
    fn take_warnings(&self) -> Vec<String> {
        self.warnings.take()
    }

    #[getter]
    fn context(&self) -> u64 {
        self.loaded.context
    }

    #[getter]
    fn vocab_size(&self) -> Option<u64> {
        self.plan.plan.model.vocab_size
    }

    #[getter]
    fn eos_token_ids(&self) -> Vec<u32> {
        self.plan.plan.generation.as_ref().map_or_else(Vec::new, |generation| generation.eos_token_ids.clone())
    }

    #[getter]
    fn has_tokenizer(&self) -> bool {
        self.encoder.tokenizer.is_some()
    }

    #[getter]
    fn threads(&self) -> usize {
        self.loaded.threads
    }

    #[getter]
    fn library(&self) -> PathBuf {
        self.loaded.library.clone()
    }

    #[getter]
    fn load_ms(&self) -> f64 {
        self.loaded.time.as_secs_f64() * 1e3
    }
}

impl Engine {
    /// Starts the engine's thread and waits until the plan is loaded.
    fn start(
        py: Python<'_>,
        (plan, encoder): (Arc<PlanFile>, PromptEncoder),
        load: LoadSettings,
        ngram_drafts: bool,
    ) -> PyResult<Self> {
        let (cancel, warnings) = (CancelHandle::new(), Arc::new(Warnings::default()));
        let settings = ThreadSettings {
            load,
            tokenizer: encoder.tokenizer.clone(),
            ngram_drafts,
            cancel: cancel.clone(),
            warnings: Arc::clone(&warnings),
        };
        let EngineThread { jobs, loaded, thread } = start(Arc::clone(&plan), settings)?;
        let loaded = receive(py, &Mutex::new(loaded), || cancel.cancel())??;
        Ok(Self {
            plan,
            encoder,
            template: Mutex::default(),
            loaded,
            warnings,
            running: Running::new(cancel),
            next_id: AtomicU64::new(0),
            handles: Mutex::default(),
            thread: Mutex::new(Some(Thread { jobs, thread })),
        })
    }

    fn request(
        &self,
        prompt: Vec<u32>,
        max_new: Option<u64>,
        stop: Vec<String>,
        ignore_eos: bool,
        sampling: SamplingOverrides,
    ) -> Result<GenerationRequest, Failure> {
        check_prompt(&prompt, self.loaded.context)?;
        if let Err((name, expected)) = sampling.check() {
            return Err(Failure::of(format!("{name} must be {expected}"), "leave it out for the model's own setting"));
        }
        if !stop.is_empty() && self.encoder.tokenizer.is_none() {
            return Err(Failure::of("stop needs a tokenizer, and this plan has none", "leave stop out"));
        }
        let generation = self.plan.plan.generation.clone().unwrap_or_default();
        Ok(GenerationRequest {
            prompt,
            max_new_tokens: max_new.unwrap_or(u64::MAX),
            eos_token_ids: if ignore_eos { vec![] } else { generation.eos_token_ids },
            stop,
            sampling: sampling.resolve(&generation.sampling),
            grammar: None,
            visible_tokens: vec![],
            prompt_logits: false,
        })
    }

    fn submit(&self, work: Work) -> Result<Arc<JobHandle>, Failure> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let handle = Arc::new(JobHandle::new(id, self.running.clone()));
        let thread = lock(&self.thread);
        let closed = || Failure::of("this model is closed", "load the plan again");
        let jobs = &thread.as_ref().ok_or_else(closed)?.jobs;
        let mut handles = lock(&self.handles);
        handles.retain(|handle| handle.strong_count() > 0);
        handles.push(Arc::downgrade(&handle));
        jobs.send(Job { work, handle: Arc::clone(&handle) }).map_err(|_| Failure::engine_gone())?;
        Ok(handle)
    }

    fn tokens_of(&self, messages: Vec<(String, String)>) -> Result<Vec<u32>, Failure> {
        let messages = messages.into_iter().map(|(role, content)| Ok(Message::new(role_of(&role)?, content)));
        let messages = messages.collect::<Result<Vec<_>, Failure>>()?;
        let prompt = self.chat_template()?.render(&messages)?;
        Ok(self.encoder.tokenizer()?.encode(&prompt, SpecialTokens::Omit)?)
    }

    fn chat_template(&self) -> Result<Arc<ChatTemplate>, Failure> {
        let mut template = lock(&self.template);
        if let Some(template) = template.as_ref() {
            return Ok(Arc::clone(template));
        }
        let generation = self.plan.plan.generation.as_ref().ok_or(PromptError::NoTemplate)?;
        let path = |file: &Option<String>| file.as_ref().map(|file| self.plan.resolve(file));
        let (file, config) = (path(&generation.chat_template), path(&generation.tokenizer_config));
        let opened = ChatTemplate::open(file.as_deref(), config.as_deref())?.ok_or(PromptError::NoTemplate)?;
        Ok(Arc::clone(template.insert(Arc::new(opened))))
    }
}

/// Reads a plan of a language model, and its tokenizer.
fn open(path: &std::path::Path) -> Result<(Arc<PlanFile>, PromptEncoder), Failure> {
    let plan = PlanFile::open(path)?;
    check_language_model(&plan.plan)?;
    let is_given = |role: InputRole| matches!(role, InputRole::Embeddings | InputRole::Free);
    if let Some(input) = plan.plan.model.inputs.iter().find(|input| is_given(input.role)) {
        let message = format!("this model reads {}, and hpp.load gives token ids only", input.name);
        return Err(Failure::of(message, "run it with hpp-exec, which has --embeddings and --inputs"));
    }
    let encoder = PromptEncoder::open(&plan, false)?;
    Ok((Arc::new(plan), encoder))
}

fn provider(name: &str) -> Result<Provider, Failure> {
    name.parse().map_err(|error: ProviderNameError| {
        Failure::of(error.to_string(), "give names such as \"cuda\", \"webgpu\", \"openvino\" or \"cpu\"")
    })
}

/// Parses libraries or options of providers in the form that the commands take.
fn parsed<T: FromStr<Err = ProviderArgError>>(arguments: &[String]) -> Result<Vec<T>, Failure> {
    let read = |argument: &String| argument.parse().map_err(|error: ProviderArgError| Failure::new(&error, None));
    arguments.iter().map(read).collect()
}

fn weight_reads(name: &str) -> Result<WeightReads, Failure> {
    // Earlier names.
    let name = match name {
        "ahead" => "prefetch",
        "on-time" => "on-demand",
        name => name,
    };
    let all =
        [("prefetch", WeightReads::Prefetch), ("on-demand", WeightReads::OnDemand), ("mapped", WeightReads::Mapped)];
    chosen("weights", name, &all)
}

fn reuse_of(name: &str) -> Result<Reuse, Failure> {
    let all = [("continuation", Reuse::Continuation), ("prefix", Reuse::Prefix), ("nothing", Reuse::Nothing)];
    chosen("reuse", name, &all)
}

fn role_of(name: &str) -> Result<Role, Failure> {
    let all = [("system", Role::System), ("user", Role::User), ("assistant", Role::Assistant)];
    chosen("the role of a message", name, &all)
}

/// The value with this name, or a failure that lists all names.
fn chosen<T: Copy>(what: &str, name: &str, all: &[(&str, T)]) -> Result<T, Failure> {
    let found = all.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    let names: Vec<&str> = all.iter().map(|(known, _)| *known).collect();
    found
        .ok_or_else(|| Failure::of(format!("{what} cannot be {name:?}"), &format!("it is one of {}", names.join(", "))))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
