//! Many generations on one engine: each pass takes the next tokens of every one of them and fetches each stage's weights once.

use crate::adapt::{Adaptation, PassSize};
use crate::error::GenerateError;
use crate::generation::{Generated, Generation, GenerationEvent};
use crate::prefix_cache::{PageValue, PrefixCache, PromptPages};
use crate::sequence::{ModelInputs, TokenSequence};
use hpp_engine::{Backend, Engine, EngineError};
use hpp_kv::PageBytes;
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Instant;

/// Identifies a generation of a [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

/// A generation that has left the batch.
pub struct Finished<B: Backend> {
    /// The generation.
    pub id: RequestId,
    /// Its result, or the error that ended it alone.
    pub result: Result<Generated, GenerateError>,
    /// Its tokens with their state, for a later prompt that begins with them. Empty after an error.
    pub sequence: TokenSequence<B>,
}

/// Generations that run together. Each computes the same tokens as alone.
pub struct Batch<B: Backend> {
    engine: Engine<B>,
    inputs: ModelInputs,
    cache: Option<PrefixCache>,
    members: Vec<Member<B>>,
    next_id: u64,
    /// Most tokens of prompts in a pass in which an answer goes on.
    prompt_limit: Option<usize>,
    /// Generations of which the last pass computed something.
    items: usize,
    /// The size of the last pass, if all generations in it had as many tokens.
    size: Option<PassSize>,
    adaptation: Option<Adaptation>,
}

/// One generation with its sequence.
struct Member<B: Backend> {
    id: RequestId,
    generation: Generation,
    sequence: TokenSequence<B>,
    error: Option<GenerateError>,
    /// The value of the pages that it saves.
    value: PageValue,
    /// Whether the current pass runs without it, because memory for its states is short or other prompts use up the pass's limit of prompt
    /// tokens.
    is_waiting: bool,
    /// Passes since the last that took a part of its prompt.
    passed_over: u32,
}

impl<B: Backend> Batch<B> {
    /// An empty batch on an engine.
    pub fn new(engine: Engine<B>, inputs: ModelInputs) -> Self {
        Self {
            engine,
            inputs,
            cache: None,
            members: Vec::new(),
            next_id: 0,
            prompt_limit: None,
            items: 0,
            size: None,
            adaptation: None,
        }
    }

    /// Saves the states of prompts, and of sessions, in this cache from now on.
    pub fn save_in(&mut self, cache: PrefixCache) {
        self.cache = Some(cache);
    }

    /// Keeps the engine true to its plan from now on, between two passes.
    pub fn adapt(&mut self, adaptation: Adaptation) {
        self.adaptation = Some(adaptation);
    }

    /// What keeps the engine true to its plan.
    pub fn adaptation(&self) -> Option<&Adaptation> {
        self.adaptation.as_ref()
    }

    /// Most generations that should run at once while the system allows less memory than planned; `None` if it allows enough.
    pub fn admitted(&self) -> Option<usize> {
        let share = self.adaptation.as_ref()?.share()?;
        Some(usize::try_from(share.sequences).unwrap_or(usize::MAX))
    }

    /// Where states are saved.
    pub fn cache(&self) -> Option<&PrefixCache> {
        self.cache.as_ref()
    }

    /// A sequence that holds these pages of a prompt, and its end if that was found with all of them. See [`PrefixCache::restore`].
    pub fn restore(
        &mut self,
        prompt: &[u32],
        found: &PromptPages,
        pages: &[Arc<PageBytes>],
    ) -> Result<TokenSequence<B>, GenerateError> {
        match &self.cache {
            Some(cache) => cache.restore(&mut self.engine, prompt, found, pages),
            None => Ok(TokenSequence::default()),
        }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<B> {
        &self.engine
    }

    /// Frees the states of a sequence. See [`Engine::free`].
    pub fn free(&mut self, sequence: TokenSequence<B>) {
        sequence.free(&mut self.engine);
    }

    /// Locks `bytes` bytes of weights in host memory from the next pass on. See [`Engine::set_locked`].
    pub fn set_locked(&mut self, bytes: u64) -> Result<u64, EngineError> {
        self.engine.set_locked(bytes)
    }

    /// Starts a new timeline of the engine, or stops recording.
    pub fn record_timeline(&mut self, on: bool) {
        self.engine.record_timeline(on);
    }

    /// The engine and what its model takes besides tokens.
    pub(crate) fn engine_and_inputs(&mut self) -> (&mut Engine<B>, &ModelInputs) {
        (&mut self.engine, &self.inputs)
    }

    /// The largest prompt chunk for its generations: the engine's limit.
    pub fn prompt_chunk(&self) -> usize {
        usize::try_from(self.engine.chunk()).unwrap_or(usize::MAX).max(1)
    }

    /// Limits the tokens of prompts in a pass in which an answer goes on, so that its next token is not late. Prompts take turns then; 0
    /// lets them wait. `None`: each pass takes a chunk of every prompt.
    pub fn limit_prompts(&mut self, tokens: Option<usize>) {
        self.prompt_limit = tokens;
    }

    /// Whether a prompt is not computed yet.
    pub fn is_prefilling(&self) -> bool {
        self.members.iter().any(Member::reads_prompt)
    }

    /// Whether an answer goes on: its prompt is computed, and it has no end yet.
    pub fn is_decoding(&self) -> bool {
        self.members.iter().any(|member| member.is_running() && !member.reads_prompt())
    }

    /// Generations in progress.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Generations of which the last pass computed something.
    pub fn items(&self) -> usize {
        self.items
    }

    /// The size of the last pass, if all generations in it had as many tokens.
    pub fn pass_size(&self) -> Option<PassSize> {
        self.size
    }

    /// Whether no generation is in progress.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Adds a generation that is new and whose prompt chunk is at most [`prompt_chunk`](Self::prompt_chunk). It takes part from the next
    /// pass on.
    pub fn add(&mut self, generation: Generation) -> RequestId {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let (sequence, value) = (TokenSequence::default(), PageValue::default());
        self.members.push(Member { id, generation, sequence, error: None, value, is_waiting: false, passed_over: 0 });
        id
    }

    /// Sets how important it is to keep what a generation saves.
    pub fn set_priority(&mut self, id: RequestId, priority: i32) {
        if let Some(member) = self.members.iter_mut().find(|member| member.id == id) {
            member.value.priority = priority;
        }
    }

    /// Like [`add`](Self::add), but continues the tokens of an earlier generation, or restored pages. Keeps the prefix that the prompt can
    /// share with them ([`TokenSequence::shared_prefix`]), in whole chunks of `chunk_tokens`. With `chunk_tokens` as the generation's prompt
    /// chunk, the rest of the prompt is computed in the same chunks as the whole prompt would be, so that its logits are the same. A prompt
    /// equal to the one that the sequence has answered, or whose end was restored, needs no pass. Returns also the number of tokens kept.
    pub fn add_to(
        &mut self,
        mut sequence: TokenSequence<B>,
        mut generation: Generation,
        session: Option<&str>,
        chunk_tokens: usize,
    ) -> Result<(RequestId, usize), GenerateError> {
        if generation.request().prompt_logits {
            sequence.clear();
        }
        let prompt = &generation.request().prompt;
        let kept = match sequence.keep_prompt(&mut self.engine, prompt, session)? {
            true => prompt.len(),
            false => sequence.keep_whole_chunks(&mut self.engine, prompt, session, chunk_tokens)?,
        };
        generation.set_reused(kept);
        let id = self.add(generation);
        if let Some(member) = self.members.last_mut() {
            member.sequence = sequence;
        }
        Ok((id, kept))
    }

    /// Drops every generation, after an error of a pass.
    pub fn clear(&mut self) {
        self.members.clear();
    }

    /// Takes a generation out before it is finished. `None` if it has left already.
    pub fn cancel(&mut self, id: RequestId) -> Option<Finished<B>> {
        let index = self.members.iter().position(|member| member.id == id)?;
        let mut member = self.members.remove(index);
        member.error = member.generation.cancel().err();
        Some(member.leave())
    }

    /// Runs one pass, reports its events and returns the generations that left: those that finished, and those that failed alone. An
    /// error of the whole pass concerns all generations, which cannot continue.
    pub fn pass<E: From<GenerateError>>(
        &mut self,
        on_event: &mut dyn FnMut(RequestId, GenerationEvent<'_>) -> Result<(), E>,
    ) -> Result<Vec<Finished<B>>, E> {
        let started = Instant::now();
        self.schedule_prompts();
        self.size = self.run_pass().map_err(GenerateError::from)?;
        let cost_ms = started.elapsed().as_secs_f64() * 1e3 / self.items.max(1) as f64;
        for member in self.members.iter_mut().filter(|member| member.is_running() && !member.is_waiting) {
            member.advance(&mut self.engine, on_event)?;
            if let Some(cache) = &self.cache
                && member.error.is_none()
            {
                let is_last = member.generation.is_finished();
                cache.save(&mut self.engine, &mut member.sequence, PageValue { cost_ms, ..member.value }, is_last);
            }
        }
        if let Some(adaptation) = &mut self.adaptation {
            let changes = adaptation.after_pass(&mut self.engine, self.size, Instant::now());
            let changes = changes.map_err(GenerateError::from)?;
            if changes {
                self.members.iter_mut().for_each(|member| member.generation.discount_measured_times());
            }
        }
        let is_done = |member: &mut Member<B>| !member.is_running();
        Ok(self.members.extract_if(.., is_done).map(Member::leave).collect())
    }

    /// Decides which prompts have a part in the next pass. Within the limit, those that were passed over in the most passes come first.
    fn schedule_prompts(&mut self) {
        let mut left = self.prompt_limit.filter(|_| self.is_decoding()).unwrap_or(usize::MAX);
        let mut prompts = Vec::new();
        for member in &mut self.members {
            member.is_waiting = false;
            if let Some(tokens) = member.generation.next_prompt_tokens() {
                prompts.push((member, tokens));
            }
        }
        prompts.sort_by_key(|(member, _)| Reverse(member.passed_over));
        let mut is_first = left > 0;
        for (member, tokens) in prompts {
            member.is_waiting = !std::mem::take(&mut is_first) && tokens > left;
            member.passed_over = if member.is_waiting { member.passed_over.saturating_add(1) } else { 0 };
            left = if member.is_waiting { left } else { left.saturating_sub(tokens) };
        }
    }

    /// Feeds the next tokens of every generation that does not wait. Returns the size of the pass if all had as many.
    fn run_pass(&mut self) -> Result<Option<PassSize>, EngineError> {
        let Batch { engine, inputs, members, .. } = self;
        let (mut items, mut errors) = (Vec::with_capacity(members.len()), Vec::with_capacity(members.len()));
        let (mut sizes, mut context) = (Vec::with_capacity(members.len()), 0);
        for Member { generation, sequence, error, is_waiting, .. } in
            members.iter_mut().filter(|member| !member.is_waiting)
        {
            let input = match generation.next_input(sequence.max_draft(engine)) {
                Ok(Some(input)) => input,
                Ok(None) => continue,
                Err(failed) => {
                    *error = Some(failed);
                    continue;
                }
            };
            let tokens = input.tokens.len() as u64;
            context = context.max(sequence.tokens().len() as u64 + tokens);
            match sequence.work_item(engine, inputs, input) {
                Ok(item) => {
                    sizes.push(tokens);
                    items.push(item);
                    errors.push(error);
                }
                // The generations before it run on, and free memory for this one when they leave.
                Err(failed) if failed.is_out_of_memory() && !items.is_empty() => *is_waiting = true,
                Err(failed) => *error = Some(failed),
            }
        }
        self.items = items.len();
        if items.is_empty() {
            return Ok(None);
        }
        for (error, outcome) in errors.into_iter().zip(engine.pass(&mut items)?) {
            *error = outcome.err().map(GenerateError::from);
        }
        let tokens = sizes.first().copied().filter(|first| sizes.iter().all(|tokens| tokens == first));
        Ok(tokens.map(|tokens| PassSize { sequences: sizes.len() as u64, tokens, context }))
    }
}

impl<B: Backend> Member<B> {
    fn reads_prompt(&self) -> bool {
        self.error.is_none() && self.generation.next_prompt_tokens().is_some()
    }

    fn is_running(&self) -> bool {
        self.error.is_none() && !self.generation.is_finished()
    }

    /// Takes the logits of a pass that succeeded.
    fn advance<E: From<GenerateError>>(
        &mut self,
        engine: &mut Engine<B>,
        on_event: &mut dyn FnMut(RequestId, GenerationEvent<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Member { id, generation, sequence, error, .. } = self;
        // If a pass computes the logits of a whole chunk, those after its last token are rounded differently: no other prompt may use them.
        let reads_prompt = generation.next_prompt_tokens().is_some() && !generation.request().prompt_logits;
        sequence.fed(generation.input());
        if reads_prompt && sequence.tokens().len() == generation.request().prompt.len() {
            sequence.end_prompt(generation.prompt_chunk());
        }
        let room = sequence.room(engine);
        // The caller's error ends the batch; the generation's own only this member.
        let advanced =
            generation.advance(sequence.logit_rows(), room, &mut |event| on_event(*id, event).map_err(Failure::Caller));
        let rejected = match advanced {
            Ok(rejected) => rejected,
            Err(Failure::Caller(caller)) => return Err(caller),
            Err(Failure::Generation(failed)) => {
                *error = Some(failed);
                return Ok(());
            }
        };
        if rejected > 0 {
            match sequence.drop_last(engine, rejected) {
                Ok(left) => generation.set_fed(left),
                Err(failed) => *error = Some(failed),
            }
        }
        Ok(())
    }

    fn leave(self) -> Finished<B> {
        match self.error {
            Some(error) => Finished { id: self.id, result: Err(error), sequence: TokenSequence::default() },
            None => Finished { id: self.id, result: Ok(self.generation.into_result()), sequence: self.sequence },
        }
    }
}

/// The source of the error that ended an advance.
enum Failure<E> {
    Generation(GenerateError),
    Caller(E),
}

impl<E> From<GenerateError> for Failure<E> {
    fn from(error: GenerateError) -> Self {
        Failure::Generation(error)
    }
}
