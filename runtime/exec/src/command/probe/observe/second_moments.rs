//! Sums the products of neighbouring numbers in rows of tapped tensors, over all positions of the prompts, and writes the sums to a file.

use super::budget;
use super::corpus::CorpusEncoder;
use super::load;
use super::rows::{Rows, wrong};
use crate::command::probe::{ProbeSession, Replies};
use crate::error::ExecError;
use crate::runtime::OrtBackend;
use hpp_engine::{Engine, EngineError, LogitRows, Logits, StepInput};
use hpp_generate::{PlanFile, check_language_model};
use hpp_io::FileWriteError;
use hpp_schema::error_line;
use hpp_schema::probe::{MomentsProbe, Reply};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Sums the products of neighbouring numbers in rows of one width.
struct SpanSums {
    /// Neighbours in a span.
    span: usize,
    /// Numbers in a row; 0 before the first one.
    width: usize,
    /// For each span the sums of products `[length, length]`; only the entries on and above the diagonal are filled.
    sums: Vec<f64>,
}

impl SpanSums {
    fn new(span: usize) -> Self {
        SpanSums { span, width: 0, sums: Vec::new() }
    }

    /// Lengths of the spans.
    fn lengths(&self) -> impl Iterator<Item = usize> + use<> {
        let (span, width) = (self.span, self.width);
        (0..width).step_by(span).map(move |start| span.min(width - start))
    }

    /// Adds rows of `width` numbers; `false` if earlier rows had another width.
    fn add(&mut self, rows: &[f32], width: usize) -> bool {
        if self.width == 0 {
            self.width = width;
            self.sums = vec![0.0; self.lengths().map(|length| length * length).sum()];
        }
        if width != self.width {
            return false;
        }
        let (mut start, mut first) = (0, 0);
        for length in self.lengths() {
            let sums = &mut self.sums[first..first + length * length];
            rows.chunks_exact(width).for_each(|row| add_products(&row[start..start + length], sums));
            (start, first) = (start + length, first + length * length);
        }
        true
    }

    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut sums = &self.sums[..];
        for length in self.lengths() {
            let (of_span, rest) = sums.split_at(length * length);
            for (i, j) in (0..length).flat_map(|i| (0..length).map(move |j| (i, j))) {
                to.write_all(&of_span[i.min(j) * length + i.max(j)].to_le_bytes())?;
            }
            sums = rest;
        }
        Ok(())
    }
}

/// Adds the products of all pairs in a row to the entries on and above the diagonal.
fn add_products(row: &[f32], sums: &mut [f64]) {
    for (at, (value, sums)) in row.iter().zip(sums.chunks_exact_mut(row.len())).enumerate() {
        let value = f64::from(*value);
        sums[at..].iter_mut().zip(&row[at..]).for_each(|(sum, other)| *sum += value * f64::from(*other));
    }
}

/// Runs the prompts, writes the file and replies with the number of positions. A prompt that fails midway leaves its first positions in the sums.
pub(in crate::command::probe) fn run(
    session: &mut ProbeSession<'_>,
    probe: &MomentsProbe,
    replies: &mut Replies<'_>,
) -> Result<(), ExecError> {
    let plan = PlanFile::open(&probe.plan)?;
    check_language_model(&plan.plan)?;
    let span = usize::try_from(probe.span).ok().filter(|span| *span > 0);
    let span = span.ok_or_else(|| unusable("a span has at least one number"))?;
    let corpus = CorpusEncoder::open(&plan, &probe.prompts)?;
    let mut engine = load(session, &plan)?;
    engine.set_taps(probe.taps.iter().map(String::as_str))?;
    let mut sums: Vec<(&str, SpanSums)> = probe.taps.iter().map(|tap| (tap.as_str(), SpanSums::new(span))).collect();
    let mut positions = 0;
    for prompt in &probe.prompts {
        let run = corpus.tokens(prompt, 0, engine.context()).and_then(|tokens| {
            let added = add_prompt(&mut engine, &tokens, &mut sums);
            added.map(|()| tokens.len() as u64).map_err(|error| error_line(&error))
        });
        replies(match run {
            Ok(prompt_tokens) => {
                positions += prompt_tokens;
                Reply::Progress { line: prompt.line, prompt_tokens }
            }
            Err(reason) => Reply::PromptFailed { line: prompt.line, reason },
        })?;
    }
    if positions == 0 {
        return Err(unusable("no prompt could be run"));
    }
    write(&probe.file, &sums).map_err(|source| FileWriteError { path: probe.file.clone(), source })?;
    let widths = sums.iter().map(|(_, sums)| sums.width as u64).collect();
    replies(Reply::Moments { positions, widths })?;
    Ok(())
}

fn unusable(why: &str) -> ExecError {
    EngineError::WrongOutput { name: "the moments".into(), why: why.to_owned() }.into()
}

/// Adds the taps of all positions of a prompt.
fn add_prompt(
    engine: &mut Engine<OrtBackend>,
    tokens: &[u32],
    sums: &mut [(&str, SpanSums)],
) -> Result<(), EngineError> {
    let mut sequence = engine.new_sequence()?;
    let (mut logits, mut rows) = (Logits::default(), Rows::default());
    // A model without state would recompute the text before each chunk.
    let chunk = match engine.recomputes() {
        true => tokens.len(),
        false => budget::positions_per_pass(engine.plan(), sums.iter().map(|(tap, _)| *tap)) as usize,
    };
    for tokens in tokens.chunks(chunk) {
        // Asks for the logits of all rows: otherwise the head's input would have the last position only.
        engine.step_into(&mut sequence, StepInput::Tokens(tokens), LogitRows::All, &mut logits)?;
        for (tap, sums) in &mut *sums {
            let tensor = engine.taps().get(*tap).ok_or_else(|| wrong(tap, "the pass has no such tap".into()))?;
            rows.read(tap, tensor, tokens.len())?;
            if !sums.add(&rows.values, rows.width) {
                return Err(wrong(tap, format!("its rows have {} numbers, and {} before", rows.width, sums.width)));
            }
        }
    }
    Ok(())
}

fn write(path: &Path, sums: &[(&str, SpanSums)]) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    sums.iter().try_for_each(|(_, sums)| sums.write(&mut file))?;
    file.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_neighbours_are_summed_in_spans() {
        let mut sums = SpanSums::new(2);
        assert!(sums.add(&[1.0, 2.0, 3.0, -1.0, 0.5, 2.0], 3));
        assert!(sums.add(&[0.0, 1.0, 1.0], 3));
        assert!(!sums.add(&[1.0, 1.0], 2), "another width is refused");
        let mut bytes = Vec::new();
        sums.write(&mut bytes).unwrap();
        let numbers: Vec<f64> = bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        assert_eq!(numbers, [2.0, 1.5, 1.5, 5.25, 14.0]);
    }
}
