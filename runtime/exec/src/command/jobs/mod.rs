//! `hpp-exec jobs PLAN --in PROMPTS.jsonl --out ANSWERS.jsonl`: many prompts together, throughput over latency.

mod predicted_passes;
mod requests;
mod summary;

use super::adaptation::{BesideEngine, adaptation};
use super::drafts::DraftChoice;
use super::sequences::{fitting_sequences, planned_sequences};
use super::trace::TraceFile;
use super::{CommandContext, context_length, load_engine, open_embeddings, open_extra_inputs, refuse_same_file};
use crate::cli::{JobsArgs, SpeculateArg};
use crate::error::ExecError;
use crate::interrupt::INTERRUPTED;
use crate::job_files::{Answer, Answers, BadLine, Job, JobId, PromptReader};
use crate::json_schema::read_schema;
use crate::numbers::{counted, rate};
use crate::other_load::OtherLoad;
use crate::runtime::OrtBackend;
use crate::settings::{DraftMethod, UNUSED_SAMPLING};
use hpp_engine::{EngineOptions, Telemetry};
use hpp_generate::adapt::Adaptation;
use hpp_generate::speculate::{Drafts, SpeculationStats};
use hpp_generate::{
    Batch, Finished, GenerateError, Generated, Generation, ModelInputs, PlanFile, RequestId, check_language_model,
};
use hpp_io::show_json;
use hpp_schema::error_line;
use predicted_passes::PredictedPasses;
pub(super) use requests::RequestMaker;
use std::collections::HashMap;
use std::time::Instant;
use summary::{JobCounts, answers_so_far, duration, time_left};

/// Sequences at once if neither the user nor a measured plan gives a number: about as many as the processor can compute in the time in which a disk
/// of 1 GB/s delivers the weights of a 4-bit model.
const DEFAULT_SEQUENCES: u64 = 16;

/// Spans after which a trace is written: about 30 MB.
const TRACED_SPANS: usize = 100_000;

/// Runs every prompt that has no answer yet.
pub fn run(args: &JobsArgs, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    let plan = PlanFile::open(&args.plan)?;
    check_language_model(&plan.plan)?;
    // A wrong path is refused before the file of answers is created.
    PromptReader::check(&args.input).map_err(|source| ExecError::Prompts { path: args.input.clone(), source })?;
    if let Some(trace) = &args.trace {
        refuse_same_file(("--trace", trace), ("--out", Some(&args.output)))?;
    }
    let (answers, answered) = Answers::open(&args.output, &args.input)?;
    let (done, errors) = (answered.count(), answered.errors);
    let counts =
        JobCounts { earlier_answers: done.saturating_sub(errors), earlier_errors: errors, ..JobCounts::default() };
    let opened = PromptReader::open(&args.input, answered);
    let (mut prompts, total) = opened.map_err(|source| ExecError::Prompts { path: args.input.clone(), source })?;
    let schema = read_schema(args.defaults.json_schema.as_deref())?;
    let requests = RequestMaker::open(&plan, &args.defaults, context_length(&plan, &args.runtime))?;
    let requests = requests.follow(schema.as_ref())?;
    let inputs = ModelInputs {
        embeddings: open_embeddings(&plan.plan, args.embeddings.as_deref())?,
        extra: open_extra_inputs(&plan.plan, None)?,
    };
    let failed = |source| ExecError::Prompts { path: args.input.clone(), source };
    if prompts.is_done().map_err(failed)? {
        let of_errors = match errors {
            0 => String::new(),
            _ => format!(" ({} with an error)", counted(errors as u64, "line")),
        };
        match total {
            0 => ctx.console.warn(&format!("{} has no lines, so there is nothing to answer", args.input.display())),
            _ => ctx.console.info(&format!(
                "every line of {} has an answer already, by its id{of_errors}; another --out computes them again",
                args.input.display()
            )),
        }
        if args.json {
            show_json(ctx.out, &counts)?;
        }
        return Ok(0);
    }
    if done > 0 {
        // Does not say how many lines were answered: some answers may belong to lines that have since been removed.
        let answers = counted(done as u64, "answer");
        ctx.console.info(&format!("{} has {answers} already: lines with one are skipped", args.output.display()));
    }
    if requests.is_greedy() && args.defaults.sampling.asks_for_random_choices() {
        ctx.console.warn(&format!("for lines without a temperature of their own, {UNUSED_SAMPLING}"));
    }
    let trace = TraceFile::create(args.trace.as_deref())?;
    let wanted = args.max_sequences.unwrap_or_else(|| planned_sequences(&plan.plan, DEFAULT_SEQUENCES));
    let (sequences, row_batching) = (Some(wanted.min(total as u64)), args.batch.engine_option());
    // Off by default: sequences share each pass anyway, and memory gains more from additional sequences than from drafts.
    let method = DraftMethod::resolve(Some(args.speculate.unwrap_or(SpeculateArg::Off)), None)?;
    let draft = DraftChoice::open(&method, &plan, requests.encoder(), ctx.console)?;
    let options = EngineOptions {
        sequences,
        row_batching,
        reserved: draft.shared_memory(),
        reserved_per_sequence: draft.sequence_memory(),
        ..args.runtime.engine_options()
    };
    let other_load = OtherLoad::start();
    ctx.interrupt.request_stop_on_signal();
    let engine = load_engine(&plan.plan, &plan.dir, &args.runtime, options, ctx.console, ctx.interrupt)?;
    let sequences = fitting_sequences(&engine, wanted.min(total as u64), args.max_sequences.is_some(), ctx.console);
    let beside = BesideEngine::new(&draft, &plan.plan, sequences as u64, 0, &args.runtime)?;
    let adaptation = adaptation(&engine, beside, &args.runtime, ctx.console)?;
    let drafts = draft.load(&plan.plan, sequences, &args.runtime, ctx.console, ctx.interrupt)?;
    let mut batch = Batch::new(engine, inputs);
    adaptation.into_iter().for_each(|adaptation| batch.adapt(adaptation));
    batch.record_timeline(trace.is_some());
    let jobs = Jobs {
        batch,
        trace,
        drafts,
        sequences,
        prompts,
        requests,
        answers,
        running: HashMap::new(),
        counts,
        predicted: PredictedPasses::new(&plan.plan.predictions, sequences as u64),
        other_load,
        answered_tokens: 0,
        first_error: None,
        started: Instant::now(),
    };
    jobs.run((done, total), args, ctx)
}

/// The state of one `hpp-exec jobs` command.
struct Jobs {
    batch: Batch<OrtBackend>,
    /// The trace, until it is written.
    trace: Option<TraceFile>,
    drafts: Drafts<OrtBackend>,
    /// Most sequences at once.
    sequences: usize,
    prompts: PromptReader,
    requests: RequestMaker,
    answers: Answers,
    running: HashMap<RequestId, Running>,
    counts: JobCounts,
    /// Sums over the passes whose time the plan predicts.
    predicted: PredictedPasses,
    /// CPU time of other processes, counted from before the model was loaded.
    other_load: OtherLoad,
    /// The first error of this run.
    first_error: Option<String>,
    /// Tokens of finished answers.
    answered_tokens: usize,
    started: Instant,
}

/// What is needed to write the answer of a running generation.
struct Running {
    id: JobId,
    seed: Option<u64>,
}

impl Jobs {
    fn run(
        mut self,
        (done, total): (usize, usize),
        args: &JobsArgs,
        ctx: &mut CommandContext<'_>,
    ) -> Result<u8, ExecError> {
        let watch = ctx.interrupt.cancel_on_request(&self.batch.engine().cancel_handle());
        let outcome = self.answer_all((done, total), ctx);
        drop(watch);
        ctx.console.idle();
        self.counts.seconds = self.started.elapsed().as_secs_f64();
        let busy = self.other_load.note();
        let telemetry = self.batch.engine().telemetry();
        let state_bytes = self.state_bytes();
        self.counts.measured(&telemetry, state_bytes);
        self.answers.sync()?;
        self.write_trace()?;
        let is_interrupted = match outcome {
            Ok(()) => ctx.interrupt.is_requested(),
            Err(error) if error.is_cancelled() => true,
            Err(error) => return Err(error),
        };
        if args.json {
            show_json(ctx.out, &self.counts)?;
        }
        ctx.console.info(&self.counts.summary(&telemetry));
        if is_interrupted {
            ctx.console.info("interrupted: the same command continues with the prompts that have no answer; unfinished answers start again");
        }
        if let Some(warning) = self.slow_disk_warning(&telemetry) {
            ctx.console.warn(&warning);
        }
        if let Some(note) = busy {
            ctx.console.info(&format!("note: {note}"));
        }
        if let Some(first) = &self.first_error {
            let of = format!("{} of {}", self.counts.errors, counted(self.answered() as u64, "line"));
            ctx.console.warn(&format!(
                "{of} got an error instead of an answer ({} lists them all); the first: {first}",
                args.output.display()
            ));
        }
        Ok(match self.counts {
            _ if is_interrupted => INTERRUPTED,
            JobCounts { answers: 0, errors: 1.., .. } => 1,
            _ => 0,
        })
    }

    fn answer_all(&mut self, (done, total): (usize, usize), ctx: &CommandContext<'_>) -> Result<(), ExecError> {
        while !ctx.interrupt.is_requested() {
            self.start_more()?;
            if self.batch.is_empty() {
                return Ok(());
            }
            let running = self.batch.len();
            let tokens = &mut self.counts.tokens;
            let finished = self.batch.pass::<ExecError>(&mut |_, event| {
                *tokens += usize::from(matches!(event, hpp_generate::GenerationEvent::Token { .. }));
                Ok(())
            });
            // Sequences of a pass that was interrupted ran, too.
            let finished = finished.inspect_err(|_| self.counts.sequences = self.counts.sequences.max(running))?;
            self.counts.passes += 1;
            let refused = finished.iter().filter(|finished| finished.result.is_err()).count();
            self.counts.sequences = self.counts.sequences.max(running - refused);
            self.predicted.add(self.batch.pass_size(), self.batch.engine().last_pass());
            if self.batch.engine().timeline_spans() >= TRACED_SPANS {
                self.write_trace()?;
            }
            let mut sequences = Vec::with_capacity(finished.len());
            for Finished { id, result, sequence } in finished {
                self.write(id, result)?;
                sequences.push(sequence);
            }
            ctx.console.answered(done + self.answered(), total, self.progress(done, total, running));
            // After the answers, because freeing KV caches on disk may take seconds.
            sequences.into_iter().for_each(|sequence| self.batch.free(sequence));
        }
        Ok(())
    }

    /// Starts prompts until as many run as fit. Writes an error as the answer of each line that is no prompt.
    fn start_more(&mut self) -> Result<(), ExecError> {
        let admitted = self.batch.admitted().map_or(self.sequences, |admitted| admitted.min(self.sequences));
        while self.batch.len() < admitted {
            let next = self.prompts.next_job();
            let failed = |source| ExecError::Prompts { path: self.prompts.path().to_owned(), source };
            match next.map_err(failed)? {
                None => return Ok(()),
                Some(Ok(job)) => self.start(job)?,
                Some(Err(BadLine { id, line, error })) => {
                    self.count_error(&format!("line {line}: {error}"));
                    self.answers.write(&Answer { line: Some(line), ..Answer::error(id.as_ref(), &error) })?;
                }
            }
        }
        Ok(())
    }

    fn start(&mut self, job: Job) -> Result<(), ExecError> {
        let id = job.id.clone();
        let request = match self.requests.request(job) {
            Ok(request) => request,
            Err(error) => return self.write_error(&id, &error),
        };
        let seed = request.sampling.seed();
        let generation = Generation::new(request, self.requests.tokenizer(), self.batch.prompt_chunk());
        let generation = self.drafts.speculate(generation);
        self.running.insert(self.batch.add(generation), Running { id, seed });
        Ok(())
    }

    /// Writes the answer of a generation that has ended.
    fn write(&mut self, id: RequestId, result: Result<Generated, GenerateError>) -> Result<(), ExecError> {
        let Some(Running { id, seed }) = self.running.remove(&id) else { return Ok(()) };
        let generated = match result {
            Ok(generated) => generated,
            Err(error) => return self.write_error(&id, &error),
        };
        self.counts.answers += 1;
        self.counts.prompt_tokens += generated.usage.prompt_tokens;
        self.answered_tokens += generated.tokens.len();
        if let Some(SpeculationStats { drafted, accepted, .. }) = generated.speculation {
            let counts = self.counts.speculation.get_or_insert_default();
            counts.drafted += drafted;
            counts.accepted += accepted;
        }
        let answer = Answer {
            id: Some(&id),
            line: None,
            prompt_tokens: Some(generated.usage.prompt_tokens),
            tokens: Some(&generated.tokens),
            text: generated.text.as_deref(),
            finish: Some(generated.finish_reason),
            seed,
            error: None,
        };
        Ok(self.answers.write(&answer)?)
    }

    /// Writes the timeline so far, if it is wanted and not written yet, and stops recording.
    fn write_trace(&mut self) -> Result<(), ExecError> {
        let Some(trace) = self.trace.take() else { return Ok(()) };
        trace.write(&self.batch.engine().timeline())?;
        self.batch.record_timeline(false);
        Ok(())
    }

    fn write_error(&mut self, id: &JobId, error: &GenerateError) -> Result<(), ExecError> {
        let error = error_line(error);
        self.count_error(&format!("prompt {id}: {error}"));
        Ok(self.answers.write(&Answer::error(Some(id), &error))?)
    }

    fn count_error(&mut self, error: &str) {
        self.counts.errors += 1;
        self.first_error.get_or_insert_with(|| error.to_owned());
    }

    fn answered(&self) -> usize {
        self.counts.answers + self.counts.errors
    }

    fn tokens_per_second(&self) -> f64 {
        self.counts.tokens as f64 / self.started.elapsed().as_secs_f64().max(1e-9)
    }

    /// The text of the progress line. `running`: sequences in the last pass.
    fn progress(&self, done: usize, total: usize, running: usize) -> String {
        let answered = self.answered();
        let prompts = total.saturating_sub(done + self.counts.errors);
        let tokens = (self.answered_tokens, self.counts.tokens.saturating_sub(self.answered_tokens));
        let answers = answers_so_far(self.counts.answers, prompts, running, tokens);
        let left = time_left(self.started.elapsed(), answers, prompts);
        let time_left = left.map_or_else(String::new, |left| format!(", about {} left", duration(left)));
        let tokens = rate(Some(self.tokens_per_second()));
        format!("{} of {total} lines done, {running} at once, {tokens} tok/s{time_left}", done + answered)
    }

    /// A warning if passes took longer than planned because of the disk, unless the adaptation has reported slow passes already.
    fn slow_disk_warning(&self, telemetry: &Telemetry) -> Option<String> {
        let is_said = self.batch.adaptation().is_some_and(Adaptation::is_reported_slow);
        let predictions = &self.batch.engine().plan().predictions;
        self.predicted.slow_disk_warning(predictions, telemetry).filter(|_| !is_said)
    }

    /// Bytes of states for the largest number of sequences that ran at once.
    fn state_bytes(&self) -> u64 {
        let engine = self.batch.engine();
        (engine.host_state_bytes() + engine.disk_state_bytes()) * self.counts.sequences as u64
    }
}
