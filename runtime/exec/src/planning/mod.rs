//! Plans a model that is given instead of a plan: runs hpp-split for this machine and caches the plan.
//!
//! hpp-split is a child process. This module knows its command line and exit code, and nothing of graphs or planning.

mod cache;
mod compiled;
mod error;
mod key;
mod planner;

pub use compiled::compiled_models;
pub use error::PlanningError;

use crate::cli::RuntimeArgs;
use crate::console::Console;
use crate::interrupt::Interrupt;
use crate::runtime::available_memory;
use cache::{LockedPlan, PlanCache};
use hpp_generate::{PLAN_NAME, PlanFile};
use hpp_schema::{ByteSize, FileRole};
use key::CacheKey;
use planner::SplitCommand;
use std::cell::Cell;
use std::path::{Path, PathBuf};

/// Extensions of model files. Any other file is read as a plan, and the error of reading says what is wrong with it.
const MODEL_EXTENSIONS: [&str; 8] = ["onnx", "ort", "pb", "gguf", "safetensors", "bin", "pt", "pth"];

/// A plan from the cache. While this exists, no other process removes the plan.
pub struct CachedPlan {
    cache: PlanCache,
    plan: LockedPlan,
}

impl CachedPlan {
    /// The plan of the model at `path`, made now if the cache has none. `None` if `path` is not a model.
    pub fn for_model(
        path: &Path,
        args: &RuntimeArgs,
        console: &Console,
        interrupt: &Interrupt,
    ) -> Result<Option<Self>, PlanningError> {
        let planning = &args.planning;
        if !is_model(path) {
            let options = [
                ("--draft int4 or int8", planning.draft_bits.is_some()),
                ("--ram", planning.ram.is_some()),
                ("--vram", planning.vram.is_some()),
                ("--gpu-layers", planning.gpu_layers.is_some()),
                ("--int8-activations", planning.int8_activations),
                ("--replan", planning.replan),
            ];
            return match options.into_iter().find(|(_, given)| *given) {
                Some((option, _)) if path.exists() => {
                    Err(PlanningError::AlreadyPlanned { option, path: path.to_owned() })
                }
                _ => Ok(None),
            };
        }
        if let Some(plan) = plan_with_part(path) {
            return Err(PlanningError::PartOfPlan { path: path.to_owned(), plan });
        }
        let planner = SplitCommand::find(path)?;
        let flags = planner::flags(args);
        let key = CacheKey::new(path, planner.path(), &flags)?;
        tracing::info!(planner = %planner.path().display(), ?flags, key = key.directory(), "plan looked for in the cache");
        let cache = PlanCache::open(planning)?;
        // Evicts plans before a new one takes room, but keeps the plan that this command uses.
        cache.evict(Some(&key.directory()));
        let is_new = Cell::new(false);
        let make_plan = |dir: &Path, lock: std::fs::File| {
            let draft = planning.draft_bits.map_or(String::new(), |bits| format!(" with an {} draft", bits.name()));
            console.info(&format!("planning {}{draft} for this machine with hpp-split", path.display()));
            cache.keep_notes(&key, &planner.plan(path, &flags, dir, lock, console, interrupt)?);
            is_new.set(true);
            Ok::<(), PlanningError>(())
        };
        let plan = cache.acquire(&key, planning.replan, console, make_plan)?;
        if !is_new.get() {
            cache.notes(&plan).iter().for_each(|note| console.info(note));
            let made_for = PlanFile::open(&plan.dir().join(PLAN_NAME)).ok().and_then(|plan| plan.plan.budgets.ram);
            let note =
                made_for.zip(available_memory()).and_then(|(ram, free)| note_of_more_memory(ram, ByteSize(free)));
            note.filter(|_| planning.ram.is_none()).iter().for_each(|note| console.info(note));
        }
        console.info(&format!("plan: {} (kept for the next time; --replan makes it again)", plan.dir().display()));
        Ok(Some(CachedPlan { cache, plan }))
    }

    /// The plan's file.
    pub fn path(&self) -> PathBuf {
        self.plan.dir().join(PLAN_NAME)
    }

    /// Releases the plan and evicts others until the cache is within its limit. `files_differ`: the engine found that files of the plan, or of the
    /// model although their sizes and times match the cache key, are missing or differ from the plan's records. Then the plan is removed.
    pub fn release(self, files_differ: bool, console: &Console) {
        let name = self.plan.name().to_owned();
        drop(self.plan);
        if files_differ {
            self.cache.remove(&name);
            console.info(
                "files of the cached plan or of its model are missing or have changed, so hpp-exec has removed the plan: run the same command again, which makes a new one",
            );
        }
        self.cache.evict(Some(&name));
    }
}

/// A note if far more memory is free than the plan was made for. Such plans exist only for models that exceed that memory.
fn note_of_more_memory(made_for: ByteSize, free: ByteSize) -> Option<String> {
    let is_much_more = free.0 / 2 > made_for.0;
    is_much_more.then(|| {
        let [made_for, free] = [made_for, free].map(ByteSize::human);
        format!("note: this plan is for {made_for} of host memory, and {free} are free now: --replan makes a plan for that much")
    })
}

/// Whether a path is a model: a model file, or a directory with files of a model and without a plan.
fn is_model(path: &Path) -> bool {
    if !path.is_dir() {
        // A JSON file of a model counts as a model: hpp-split's error says what to give instead.
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        return path.is_file() && (is_json || has_model_extension(path));
    }
    if path.join(PLAN_NAME).is_file() {
        return false;
    }
    let is_model_file = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        has_model_extension(&path) || name == "onnx" || name == "config.json" || name == "genai_config.json"
    };
    std::fs::read_dir(path).is_ok_and(|entries| entries.flatten().any(|entry| is_model_file(entry.path())))
}

/// The plan beside a file that hpp-split wrote as a part of it: a partition, or the model with taps. Such a file can run as a model, but its results
/// mean nothing.
fn plan_with_part(path: &Path) -> Option<PathBuf> {
    let beside = path.with_file_name(PLAN_NAME);
    if !path.is_file() || !beside.is_file() {
        return None;
    }
    let name = path.file_name()?;
    let plan = PlanFile::open(&beside).ok()?.plan;
    let is_part = |role: FileRole| matches!(role, FileRole::Partition | FileRole::Tapped);
    plan.files.iter().any(|file| is_part(file.role) && name == file.path.as_str()).then_some(beside)
}

fn has_model_extension(path: &Path) -> bool {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    extension.is_some_and(|extension| MODEL_EXTENSIONS.contains(&extension.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_more_free_memory_than_planned_is_told() {
        let [small, large] = [ByteSize(1 << 30), ByteSize(3 << 30)];
        let note = note_of_more_memory(small, large).unwrap();
        assert!(note.contains("for 1 GiB") && note.contains("3 GiB are free") && note.contains("--replan"), "{note}");
        assert_eq!((note_of_more_memory(large, large), note_of_more_memory(large, small)), (None, None));
    }

    #[test]
    fn models_and_plans_are_distinguished() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, b"x").unwrap();
            path
        };
        assert!(!is_model(dir.path()), "an empty directory");
        for name in ["a/model.onnx", "b/model.gguf", "c/model-00001.safetensors", "d/config.json", "e/onnx/model.onnx"]
        {
            let path = file(name);
            assert!(is_model(&dir.path().join(&name[..1])), "{name}");
            assert!(is_model(&path), "{name}");
        }
        assert!(!is_model(&file("f/plan.yaml")));
        // A directory with a plan and its model is a plan.
        file("f/model.onnx");
        assert!(!is_model(&dir.path().join("f")));
        assert!(!is_model(&dir.path().join("nowhere.onnx")) && !is_model(&dir.path().join("nowhere")));
    }
}
