//! From a model to a plan in one step: hpp-split plans for this machine, a cache keeps the plan.
//!
//! hpp-split is a child process. This module knows its command line and exit code, and nothing of graphs or planning.

mod cache;
mod child;
mod identity;

pub use cache::CacheError;

use crate::cli::RuntimeArgs;
use crate::console::Console;
use crate::error::ExecError;
use crate::plan_file::PLAN_NAME;
use cache::{Cache, InUse};
use child::Planner;
use hpp_engine::EngineError;
use identity::Identity;
use std::path::{Path, PathBuf};

/// What models' files are called; anything else that is a file is read as a plan, whose message then says what is wrong with it.
const MODEL_FILES: [&str; 8] = ["onnx", "ort", "pb", "gguf", "safetensors", "bin", "pt", "pth"];

/// A plan from the cache. While this exists, no other process removes the plan.
pub struct CachedPlan {
    cache: Cache,
    in_use: InUse,
}

impl CachedPlan {
    /// The plan of the model at `path`, made now unless the cache has it. `None` where `path` is not a model.
    pub fn of(path: &Path, args: &RuntimeArgs, console: &Console) -> Result<Option<Self>, ExecError> {
        let planning = &args.planning;
        if !is_model(path) {
            let given = [("--ram", planning.ram.is_some()), ("--vram", planning.vram.is_some())];
            let given = given.into_iter().chain([("--gpu-layers", planning.gpu_layers.is_some())]);
            let given = given.chain([("--replan", planning.replan)]).find(|(_, given)| *given);
            return match given {
                Some((flag, _)) if path.exists() => Err(is_a_plan_already(flag, path)),
                _ => Ok(None),
            };
        }
        let planner = Planner::find(path)?;
        let flags = child::flags(args);
        let identity = Identity::of(path, planner.path(), &flags)?;
        let cache = Cache::open(planning)?;
        cache.evict(None);
        let make = |place: &Path, lock: std::fs::File| {
            console.say(&format!("planning {} for this machine with hpp-split", path.display()));
            planner.plan(path, &flags, place, lock, console)
        };
        let in_use = cache.acquire(&identity, planning.replan, console, make)?;
        console.say(&format!("plan: {} (cached; --replan makes it again)", in_use.place().display()));
        Ok(Some(CachedPlan { cache, in_use }))
    }

    /// Where the plan is.
    pub fn path(&self) -> PathBuf {
        self.in_use.place().join(PLAN_NAME)
    }

    /// Ends the use of the plan after a command that gave `outcome`, and keeps the cache within its limit.
    pub fn finish(self, outcome: &Result<u8, ExecError>, console: &Console) {
        let name = self.in_use.name().to_owned();
        drop(self.in_use);
        if matches!(outcome, Err(ExecError::Engine(EngineError::Files { .. }))) {
            // Size and time of the model's files are those the plan was made for, and contents differ.
            self.cache.remove(&name);
            console.say(
                "the model is not the one the cached plan was made for, so hpp-exec has removed the plan: run it again",
            );
        }
        self.cache.evict(Some(&name));
    }
}

fn is_a_plan_already(flag: &str, path: &Path) -> ExecError {
    ExecError::Usage {
        message: format!("{flag} is for planning, and {} is a plan already", path.display()),
        hint: format!("leave {flag} out, or give the model instead of the plan"),
    }
}

/// Whether a path is to be planned first: a directory without a plan that holds something of a model, or a model file.
fn is_model(path: &Path) -> bool {
    if !path.is_dir() {
        return path.is_file() && has_model_extension(path);
    }
    if path.join(PLAN_NAME).is_file() {
        return false;
    }
    let is_part = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        has_model_extension(&path) || name == "onnx" || name == "config.json" || name == "genai_config.json"
    };
    std::fs::read_dir(path).is_ok_and(|entries| entries.flatten().any(|entry| is_part(entry.path())))
}

fn has_model_extension(path: &Path) -> bool {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    extension.is_some_and(|extension| MODEL_FILES.contains(&extension.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_plans_are_told_apart() {
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
            assert_eq!(is_model(&path), !name.ends_with("json"), "{name}");
        }
        assert!(!is_model(&file("f/plan.yaml")));
        // A plan beside its model is a plan.
        file("f/model.onnx");
        assert!(!is_model(&dir.path().join("f")));
        assert!(!is_model(&dir.path().join("nowhere.onnx")) && !is_model(&dir.path().join("nowhere")));
    }
}
