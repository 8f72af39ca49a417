//! `hpp-profile MODEL` and `hpp-profile merge`: from the command line to the profile.

use crate::begin::{add_entries, begin, clear_failures, profiled_model};
use crate::child::{Launcher, Prober, RequestError};
use crate::cli::{Cli, Command};
use crate::corpus::Corpus;
use crate::derive::{PHASES, phase_costs};
use crate::doubt::doubts;
use crate::effort::{Effort, last_level_cache};
use crate::error::ProfileError;
use crate::estimate::RooflineEstimator;
use crate::interrupt::Interrupt;
use crate::measure::{CorpusRun, ProfilingRun};
use crate::merge;
use crate::missing::missing_measurements;
use crate::page;
use crate::progress::Progress;
use crate::settings::{self, ModelLimits, unusable};
use crate::store::{ProfileStoreError, Store, check_writable, parent};
use crate::table::summary;
use crate::taps::{self, Wanted};
use crate::targets::{BlockFacts, RunBytes, facts, targets};
use hpp_io::CpuMonitor;
use hpp_io::WorkDir;
use hpp_model::{Analysis, AnalysisOptions, LogitsMode, ThisHost, analyse_with, model_hash};
use hpp_schema::{Activations, Host, Profile, Provider, ProviderCosts};
use std::path::Path;

/// Runs the command.
pub fn run(cli: &Cli) -> Result<(), ProfileError> {
    match (&cli.command, &cli.model) {
        (Some(Command::Merge(args)), _) => merge::run(args),
        (None, Some(model)) => measure(cli, model),
        (None, None) => Err(ProfileError::setting("no model is named", "write hpp-profile MODEL")),
    }
}

/// Measures. When it ends early for any reason, the profile has every measurement finished so far.
fn measure(cli: &Cli, model: &Path) -> Result<(), ProfileError> {
    let progress = Progress::new(cli.quiet);
    hpp_io::log_to(cli.verbose, progress.line_printer())?;
    let store = Store::new(&cli.out);
    let before = previous_profile(cli, &store)?;
    let reply_timeout = settings::reply_timeout(cli)?;
    let activations = Activations::int8_if(cli.int8_activations);
    let exported = AnalysisOptions::as_exported(None, LogitsMode::Requested);
    let analysis = analyse_with(model, AnalysisOptions { activations, ..exported })?;
    let corpus = corpus(cli, &analysis)?;
    let corpus = corpus.as_ref().map(|(corpus, hash)| CorpusRun {
        corpus,
        hash: hash.clone(),
        is_cut: cli.max_prompts.is_none(),
        wanted: Wanted { attention: cli.attention_entropy },
    });
    let interrupt = Interrupt::install();
    let interrupt =
        interrupt.map_err(|e| ProfileError::setting(format!("cannot watch for Ctrl-C: {e}"), "try again"))?;
    let mut launcher = Launcher::beside(&own_path(), std::env::var_os("HPP_EXEC"), reply_timeout);
    launcher.arguments.extend(child_arguments(cli)?);
    let mut prober = Prober::new(launcher, interrupt);
    let host = prober.host().map_err(no_child)?;
    refuse_unknown_providers(cli, &host)?;
    let profile = match before {
        None => new_profile(cli, &analysis, host)?,
        Some(before) => resume(cli, &analysis, &host, &store, before, corpus.as_ref())?,
    };
    let (work_dir, cache) = (work_dir(&cli.out)?, last_level_cache());
    let effort = if profile.settings.quick { Effort::Quick } else { Effort::Thorough };
    let estimate = RooflineEstimator::new(&analysis, effort, profile.model.weight_bytes.0);
    let mut measure = ProfilingRun {
        analysis: &analysis,
        cpu_share: CpuMonitor::start(prober.child_id()),
        share_before: profile.others_cpu_share,
        profile,
        store: &store,
        prober,
        progress,
        effort,
        estimate,
        cache,
        work_dir: work_dir.path(),
    };
    let measured = measure_all(cli, &mut measure, corpus.as_ref());
    measure.progress.finish();
    if matches!(measured, Err(ProfileError::Interrupted)) {
        hpp_io::line_to_stderr(&store.after_an_interrupt());
    }
    measured?;
    finish(cli, &measure)?;
    refuse_unmeasured(&measure.profile)
}

/// Runs every stage in order.
fn measure_all(cli: &Cli, measure: &mut ProfilingRun, corpus: Option<&CorpusRun>) -> Result<(), ProfileError> {
    // Not `save`: a resumed profile with nothing left to measure must stay unchanged.
    measure.save_derived()?;
    let mut seconds = measure.machine_seconds() + measure.pass_seconds();
    seconds += missing_measurements(&measure.profile, &measure.estimate).iter().map(|job| job.seconds).sum::<f64>();
    seconds += corpus.map_or(0.0, |run| run.seconds(measure.profile.corpus.as_ref()));
    seconds += if cli.sensitivity { measure.sensitivity_seconds() } else { 0.0 };
    measure.progress.expect(seconds);
    measure.machine()?;
    measure.pass()?;
    measure.blocks()?;
    if let Some(run) = corpus {
        measure.corpus(run)?;
        if cli.sensitivity {
            let prompts = run.corpus.prompts_after(0)?.take(ProfilingRun::SENSITIVITY_PROMPTS);
            let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
            measure.sensitivity(&prompts)?;
        }
    }
    Ok(())
}

fn finish(cli: &Cli, measure: &ProfilingRun) -> Result<(), ProfileError> {
    if let Some(path) = &cli.report {
        page::write(path, measure.analysis, &measure.profile, &measure.estimate)?;
    }
    measure.store.finish(&measure.profile)?;
    for doubt in doubts(&measure.profile) {
        hpp_io::line_to_stderr(&format!("warning: {doubt}"));
    }
    // Print the path of the profile even if writing the table to stdout fails.
    let shown = hpp_io::print_line(&match cli.json {
        true => serde_json::to_string_pretty(&measure.profile).unwrap_or_default(),
        false => summary(&measure.profile),
    });
    if !cli.quiet {
        hpp_io::line_to_stderr(&format!("wrote {}", measure.store.path().display()));
        if let Some(path) = &cli.report {
            hpp_io::line_to_stderr(&format!("wrote {}", path.display()));
        }
    }
    Ok(shown?)
}

/// Refuses a profile with blocks that no provider has computed: nothing can be planned with it.
fn refuse_unmeasured(profile: &Profile) -> Result<(), ProfileError> {
    let is_timed = |costs: &ProviderCosts| {
        PHASES.iter().any(|phase| phase_costs(costs, *phase).points.iter().any(|point| point.single.is_some()))
    };
    let unmeasured = profile.classes.iter().filter(|entry| !entry.providers.iter().any(is_timed));
    let blocks: Vec<&str> = unmeasured.map(|entry| entry.block.as_str()).collect();
    if blocks.is_empty() {
        return Ok(());
    }
    let message = match blocks.len() == profile.classes.len() {
        true => "nothing usable was measured: every measurement of a block failed".to_owned(),
        false => {
            format!("this profile cannot plan the model: every measurement failed for the blocks {}", blocks.join(", "))
        }
    };
    let hint = match profile.settings.providers.contains(&Provider::CPU) {
        true => "the profile says why each measurement failed; --resume --retry-failures tries them again",
        false => {
            "`cpu` in --providers, or leaving the option out, measures this machine's CPU (with --force: the profile is there already); \
             `hpp-exec devices` says why a provider has no device"
        }
    };
    Err(ProfileError::setting(message, hint))
}

/// Reads the profile to resume. Refuses to overwrite an existing file without `--force`.
fn previous_profile(cli: &Cli, store: &Store) -> Result<Option<Profile>, ProfileError> {
    store.check_creatable()?;
    if let Some(report) = &cli.report {
        if hpp_io::is_same_file(report, store.path()) {
            let message = format!("--out and --report name the same file, {}", report.display());
            return Err(ProfileError::setting(message, "give another file to --report"));
        }
        check_writable(report, page::START)?;
    }
    if cli.resume {
        return Ok(Some(store.read()?));
    }
    if !cli.force {
        store.refuse_to_overwrite()?;
    }
    store.refuse_another_kind()?;
    Ok(None)
}

/// Scans the corpus once and hashes its file.
fn corpus(cli: &Cli, analysis: &Analysis) -> Result<Option<(Corpus, String)>, ProfileError> {
    let Some(path) = &cli.prompts else { return Ok(None) };
    taps::check(analysis)?;
    let corpus = Corpus::scan(path, settings::most_prompts(cli)?, cli.skip_bad)?;
    if analysis.config.tokenizer.is_none() {
        return Err(ProfileError::setting(
            "prompts cannot be read by this model: there is no tokenizer.json beside it",
            "put the model's tokenizer.json into its directory, or leave --prompts out",
        ));
    }
    let hash = hpp_onnx::hash::full(path)?;
    Ok(Some((corpus, hash)))
}

fn child_arguments(cli: &Cli) -> Result<Vec<std::ffi::OsString>, ProfileError> {
    let mut arguments = Vec::new();
    if let Some(threads) = cli.threads {
        if threads == 0 {
            return Err(ProfileError::setting("0 threads compute nothing", "give --threads 1 or more"));
        }
        arguments.extend(["--threads".into(), threads.to_string().into()]);
    }
    if let Some(library) = &cli.ort_lib {
        arguments.extend(["--ort-lib".into(), library.clone().into_os_string()]);
    }
    for library in &cli.ep_lib {
        arguments.extend(["--ep-lib".into(), library.to_string().into()]);
    }
    for option in &cli.ep_option {
        arguments.extend(["--ep-option".into(), option.to_string().into()]);
    }
    Ok(arguments)
}

fn new_profile(cli: &Cli, analysis: &Analysis, host: Host) -> Result<Profile, ProfileError> {
    let settled = settings::settle(cli, settings::limits(analysis), &host, analysis.activations())?;
    let blocks = block_facts(analysis);
    let targets = targets(&blocks, settled.settings.all_blocks, run_bytes(&host));
    let weight_bytes = weights(analysis);
    let model = profiled_model(analysis, &blocks, model_hash(&analysis.model)?, weight_bytes);
    let date = jiff::Timestamp::now();
    let date = date.round(jiff::Unit::Second).unwrap_or(date).to_string();
    Ok(begin(model, host, date, settled, &targets))
}

/// Prepares a profile to be resumed. Refuses it if model, machine, settings or corpus differ, and lists every difference.
fn resume(
    cli: &Cli,
    analysis: &Analysis,
    host: &Host,
    store: &Store,
    mut profile: Profile,
    corpus: Option<&CorpusRun>,
) -> Result<Profile, ProfileError> {
    let mut differences = Vec::new();
    if profile.model.hash != model_hash(&analysis.model)? {
        differences.push(format!("it is of another model, {}", profile.model.name));
    }
    let host_differences = if cli.allow_other_machine { vec![] } else { host_differences(host, &profile.host) };
    let same_model = differences.is_empty();
    differences.extend(host_differences.iter().map(|what| format!("another machine: {what}")));
    let limits: ModelLimits = settings::limits(analysis);
    let settled = match settings::settle_again(cli, limits, &profile, analysis.activations())? {
        Ok(settled) => Some(settled),
        Err(more) => {
            differences.extend(more);
            None
        }
    };
    if let Some((run, before)) = corpus.zip(profile.corpus.as_ref()).filter(|(run, before)| run.hash != before.hash) {
        let name = run.corpus.path().display();
        differences.push(format!("it has {} prompts of a corpus that was not {name}", before.prompts_done));
    }
    let Some(settled) = settled.filter(|_| differences.is_empty()) else {
        let hint = match same_model && differences.len() == host_differences.len() {
            true => "measure anew with --force, or continue it all the same with --allow-other-machine",
            false => "give what it was begun with, choose another --out, or measure anew with --force",
        };
        return Err(ProfileStoreError::Other { path: store.path().to_owned(), differences, hint }.into());
    };
    profile.settings = settled.settings;
    profile.notes.extend(settled.notes.into_iter().filter(|note| !note.is_empty()));
    profile.notes.dedup();
    if cli.retry_failures {
        clear_failures(&mut profile);
    }
    let targets = targets(&block_facts(analysis), profile.settings.all_blocks, run_bytes(host));
    add_entries(&mut profile, &targets);
    Ok(profile)
}

fn host_differences(host: &Host, before: &Host) -> Vec<String> {
    let mut differences = ThisHost::read().differences(before);
    if host.threads != before.threads {
        differences.push(format!("{} threads here and {} there", host.threads, before.threads));
    }
    if host.onnxruntime != before.onnxruntime {
        differences.push(format!("ONNX Runtime {} here and {} there", host.onnxruntime, before.onnxruntime));
    }
    differences
}

/// Refuses providers that neither HPP's table nor this machine has, because the name is probably mistyped. A provider of the table that is not on
/// this machine is accepted: only its own measurements fail.
fn refuse_unknown_providers(cli: &Cli, host: &Host) -> Result<(), ProfileError> {
    let is_unknown = |provider: &&Provider| provider.facts().provider.is_none() && unusable(**provider, host).is_some();
    let Some(unknown) = cli.providers.iter().find(is_unknown) else { return Ok(()) };
    if let Some(named) = cli.ep_lib.iter().find(|library| library.provider == *unknown) {
        return Err(ProfileError::setting(
            format!("the library of the provider {:?} offers no device here", unknown.id()),
            format!("`hpp-exec devices --ep-lib {}={}` says why", unknown.id(), named.path.display()),
        ));
    }
    Err(ProfileError::setting(
        format!("there is no provider {:?} here", unknown.id()),
        "`hpp-exec devices` lists the providers; --ep-lib NAME=PATH names the library of another",
    ))
}

fn block_facts(analysis: &Analysis) -> Vec<BlockFacts> {
    facts(&analysis.segmentation, |index| {
        let weights = &analysis.segmentation.blocks[index].weights;
        weights.iter().filter_map(|id| analysis.graph.weight(*id)).map(|weight| weight.bytes).sum()
    })
}

/// Bytes of the model's weights; a shared weight counts once.
fn weights(analysis: &Analysis) -> u64 {
    let ids = analysis.graph.value_ids();
    ids.filter_map(|id| analysis.graph.weight(id)).map(|weight| weight.bytes).sum()
}

/// Limits on the weights of a run of blocks: at most a quarter of host memory and half of each device's memory, at least four
/// times the last-level cache.
fn run_bytes(host: &Host) -> RunBytes {
    let devices = host.devices.iter().filter_map(|device| device.memory).map(|memory| memory.0 / 2);
    let most = devices.chain([host.memory.0 / 4]).filter(|bytes| *bytes > 0).min().unwrap_or(u64::MAX);
    RunBytes { most, enough: last_level_cache().saturating_mul(4) }
}

/// Makes a work directory beside the profile, or in the system's temporary directory if the profile goes to a device or a pipe.
fn work_dir(out: &Path) -> Result<WorkDir, ProfileError> {
    let temporary = std::env::temp_dir();
    let place = if hpp_io::is_stream(out) { &temporary } else { parent(out) };
    WorkDir::new(place, ".hpp-profile-").map_err(|source| ProfileError::Io {
        action: "make a directory in",
        path: place.to_owned(),
        source,
    })
}

fn own_path() -> std::path::PathBuf {
    std::env::current_exe().unwrap_or_else(|_| "hpp-profile".into())
}

fn no_child(trouble: RequestError) -> ProfileError {
    match trouble {
        RequestError::Start(error) => error.into(),
        RequestError::Interrupted => ProfileError::Interrupted,
        RequestError::Refused(why) | RequestError::Lost(why) => {
            ProfileError::setting(why, "`hpp-exec devices` says what is there")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;
    use hpp_partition::Phase;

    #[test]
    fn a_profile_with_blocks_that_nothing_computed_is_refused() {
        let analysis = sample::analysis("genai/llama3-fp32-cpu");
        let refusal = |profile: &Profile| match refuse_unmeasured(profile) {
            Err(ProfileError::Setting { message, hint }) => (message, hint),
            other => panic!("{other:?}"),
        };
        let mut profile = sample::profile(&analysis, sample::settings(&[Provider::CUDA]));
        let (message, hint) = refusal(&profile);
        assert!(message.contains("nothing usable") && hint.contains("`cpu` in --providers"), "{message} {hint}");
        let on_cpu = sample::profile(&analysis, sample::settings(&[Provider::CPU]));
        assert!(refusal(&on_cpu).1.contains("--retry-failures"));
        let blocks: Vec<String> = profile.classes.iter().map(|entry| entry.block.clone()).collect();
        let (last, others) = blocks.split_last().unwrap();
        for block in others {
            sample::time(&mut profile, block, Provider::CUDA, (Phase::Decode, 100), (1.0, None));
        }
        let (message, _) = refusal(&profile);
        assert!(message.ends_with(&format!("failed for the blocks {last}")), "{message}");
        sample::time(&mut profile, last, Provider::CUDA, (Phase::Prefill, 100), (1.0, None));
        assert!(refuse_unmeasured(&profile).is_ok());
    }
}
