//! The plan cache: a directory of plans, bounded in size, shared by processes, safe to remove.
//!
//! ```text
//! DIR/CACHEDIR.TAG        tells backup programs to skip the directory
//! DIR/lock                the cache lock: held while a process acquires or removes a plan
//! DIR/plans/NAME/         a plan, and the weights that hpp-exec prepares beside it
//! DIR/openvino/           models that OpenVINO has compiled (compiled.rs)
//! DIR/plans/NAME.notes    notes and warnings of hpp-split about the plan, one line each
//! DIR/plans/NAME.lock     held shared by processes that use the plan, exclusively by the one that makes it; its time is the last use
//! ```
//!
//! Invariant: lock files are opened and removed only under DIR/lock, so that no process waits for a lock file that was removed.

use super::error::PlanningError;
use super::key::CacheKey;
use crate::cli::AutoPlanArgs;
use crate::console::Console;
use etcetera::BaseStrategy;
use hpp_generate::PLAN_NAME;
use hpp_schema::{ByteSize, PREPARED_DIR};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Default limit of the cache's size.
const DEFAULT_LIMIT: u64 = 50 << 30;
/// Contents of CACHEDIR.TAG, which backup programs look for (bford.info/cachedir).
const TAG: &str =
    "Signature: 8a477f597d28d172789f06886806bc55\n# Plans made by hpp-exec; removing this directory is safe.\n";

/// The directory of `--cache`, else HPP_CACHE, else `hpp` in the user's cache directory, and the limit of its size.
pub(super) fn location(args: &AutoPlanArgs) -> Result<(PathBuf, u64), PlanningError> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let default_dir = || Some(etcetera::choose_base_strategy().ok()?.cache_dir().join("hpp"));
    let dir = args.cache.clone().or_else(|| variable("HPP_CACHE").map(PathBuf::from)).or_else(default_dir);
    let dir = dir.ok_or(PlanningError::NoCacheDirectory)?;
    let limit = match (args.cache_limit, variable("HPP_CACHE_LIMIT")) {
        (Some(limit), _) => limit,
        (None, Some(text)) => text.to_string_lossy().parse().map_err(PlanningError::CacheLimit)?,
        (None, None) => ByteSize(DEFAULT_LIMIT),
    };
    let failed = |source| PlanningError::Cache { path: dir.clone(), source };
    Ok((std::path::absolute(&dir).map_err(failed)?, limit.0))
}

/// The cache.
pub(super) struct PlanCache {
    dir: PathBuf,
    limit: u64,
}

/// A plan whose lock this process holds shared.
pub(super) struct LockedPlan {
    dir: PathBuf,
    name: String,
    _lock: File,
}

impl LockedPlan {
    /// The plan's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its name in the cache.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl PlanCache {
    /// Opens the directory at its [`location`]. Creates it if it does not exist.
    pub fn open(args: &AutoPlanArgs) -> Result<Self, PlanningError> {
        let (dir, limit) = location(args)?;
        let cache = Self { dir, limit };
        let failed = |source| PlanningError::Cache { path: cache.dir.clone(), source };
        fs::create_dir_all(cache.plans()).map_err(failed)?;
        let tag = cache.dir.join("CACHEDIR.TAG");
        if !tag.exists() {
            fs::write(&tag, TAG).map_err(failed)?;
        }
        Ok(cache)
    }

    /// Returns the plan with this key, locked shared. If there is none, or with `replan`, calls `make_plan` with the directory for the plan and its
    /// exclusive lock.
    pub fn acquire(
        &self,
        key: &CacheKey,
        mut replan: bool,
        console: &Console,
        make_plan: impl Fn(&Path, File) -> Result<(), PlanningError>,
    ) -> Result<LockedPlan, PlanningError> {
        let name = key.directory();
        let dir = self.plans().join(&name);
        let failed = |source: io::Error| PlanningError::Cache { path: self.dir.clone(), source };
        loop {
            let cache_lock = self.cache_lock().map_err(failed)?;
            let lock = self.lock_file(&name).map_err(failed)?;
            let has_plan = dir.join(PLAN_NAME).is_file();
            if lock.try_lock_shared().is_err() {
                drop(cache_lock);
                console.info("another process is making the same plan; waiting for it");
                lock.lock_shared().map_err(failed)?;
                continue;
            }
            tracing::info!(plan = name, has_plan, replan, "plan locked in the cache");
            if has_plan && !replan {
                // If this fails, the plan is merely evicted earlier.
                let _ = lock.set_modified(SystemTime::now());
                return Ok(LockedPlan { dir, name, _lock: lock });
            }
            lock.unlock().map_err(failed)?;
            if lock.try_lock().is_err() {
                if !has_plan {
                    return Err(PlanningError::InUse { path: dir });
                }
                console.warn("another hpp-exec uses this plan, so it is not made again");
                replan = false;
                continue;
            }
            drop(cache_lock);
            make_plan(&dir, lock.try_clone().map_err(failed)?)?;
            self.replace_other_versions(key, &dir);
            replan = false;
            lock.unlock().map_err(failed)?;
        }
    }

    /// Removes unlocked plans, least recently used first, until the rest is within the limit. Keeps `used`, the plan of this process, whose
    /// weights would otherwise be prepared again at each start. A failure merely leaves the cache larger.
    pub fn evict(&self, used: Option<&str>) {
        let Ok(_cache_lock) = self.cache_lock() else { return };
        self.remove_leftovers();
        let mut plans: Vec<PlanUse> = self.names().into_iter().map(|name| self.plan_use(name)).collect();
        plans.sort();
        let mut total: u64 = plans.iter().map(|plan| plan.bytes).sum();
        for plan in plans.iter().filter(|plan| Some(plan.name.as_str()) != used) {
            if total > self.limit && self.remove_unlocked(&plan.name) {
                tracing::info!(plan = plan.name, bytes = plan.bytes, limit = self.limit, "cached plan evicted");
                total -= plan.bytes;
            }
        }
    }

    /// Removes a plan unless it is locked.
    pub fn remove(&self, name: &str) {
        if let Ok(_cache_lock) = self.cache_lock() {
            self.remove_unlocked(name);
        }
    }

    fn plans(&self) -> PathBuf {
        self.dir.join("plans")
    }

    /// Takes the lock under which plans are acquired and removed.
    fn cache_lock(&self) -> io::Result<File> {
        let lock = File::create(self.dir.join("lock"))?;
        lock.lock()?;
        Ok(lock)
    }

    fn lock_file(&self, name: &str) -> io::Result<File> {
        let path = self.plans().join(format!("{name}.lock"));
        File::options().read(true).write(true).create(true).truncate(false).open(path)
    }

    /// Names of all plans.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.plans()).into_iter().flatten().flatten();
        let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let names = directories.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| !name.starts_with('.')).collect()
    }

    fn plan_use(&self, name: String) -> PlanUse {
        let lock = fs::metadata(self.plans().join(format!("{name}.lock")));
        let last_used = lock.and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let bytes = disk_usage(&self.plans().join(&name));
        PlanUse { last_used, name, bytes }
    }

    /// Saves the planner's notes on a plan that was just made. The caller holds the plan's lock. If saving fails, later runs do not repeat the notes.
    pub fn keep_notes(&self, key: &CacheKey, notes: &[String]) {
        let path = self.notes_file(&key.directory());
        let _ = match notes {
            [] => fs::remove_file(path),
            notes => fs::write(path, notes.join("\n")),
        };
    }

    /// The planner's notes on a plan, one line each.
    pub fn notes(&self, plan: &LockedPlan) -> Vec<String> {
        let text = fs::read_to_string(self.notes_file(plan.name())).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn notes_file(&self, name: &str) -> PathBuf {
        self.plans().join(format!("{name}.notes"))
    }

    /// Removes other versions of a plan and moves their prepared weights to the new one. Each prepared file records the hash of its
    /// source, so files that no longer fit are not used.
    fn replace_other_versions(&self, key: &CacheKey, dir: &Path) {
        let Ok(_cache_lock) = self.cache_lock() else { return };
        let (own, prefix) = (key.directory(), key.prefix());
        for name in self.names().into_iter().filter(|name| name.starts_with(&prefix) && *name != own) {
            let Ok(lock) = self.lock_file(&name) else { continue };
            if lock.try_lock().is_ok() {
                let (from, to) = (self.plans().join(&name).join(PREPARED_DIR), dir.join(PREPARED_DIR));
                if from.is_dir() && !to.exists() {
                    let _ = fs::rename(from, to);
                }
                self.delete(&name);
            }
        }
    }

    /// Removes a plan unless it is locked. The caller holds the cache lock. Returns whether the plan is gone.
    fn remove_unlocked(&self, name: &str) -> bool {
        let Ok(lock) = self.lock_file(name) else { return false };
        lock.try_lock().is_ok() && self.delete(name)
    }

    /// Removes a plan whose lock the caller holds. Removes plan.yaml first, so that a process killed in between leaves no plan.
    fn delete(&self, name: &str) -> bool {
        let dir = self.plans().join(name);
        let _ = fs::remove_file(dir.join(PLAN_NAME));
        let gone = fs::remove_dir_all(&dir).is_ok() || !dir.exists();
        let _ = fs::remove_file(self.notes_file(name));
        let _ = fs::remove_file(self.plans().join(format!("{name}.lock")));
        gone
    }

    /// Removes what killed processes left: partial plans, and locks of plans that are gone.
    fn remove_leftovers(&self) {
        for entry in fs::read_dir(self.plans()).into_iter().flatten().flatten() {
            let Ok(file) = entry.file_name().into_string() else { continue };
            let partial = file.strip_prefix('.').and_then(|file| file.strip_suffix(".partial"));
            let partial = partial.or_else(|| file.strip_prefix('.').and_then(|file| file.strip_suffix(".lock")));
            let locked = file.strip_suffix(".lock").filter(|name| !name.starts_with('.'));
            let Some(name) = partial.or(locked) else { continue };
            if partial.is_none() && self.plans().join(name).exists() {
                continue;
            }
            let Ok(lock) = self.lock_file(name) else { continue };
            if lock.try_lock().is_ok() {
                let _ = fs::remove_dir_all(entry.path()).or_else(|_| fs::remove_file(entry.path()));
                if !self.plans().join(name).exists() {
                    let _ = fs::remove_file(self.notes_file(name));
                    let _ = fs::remove_file(self.plans().join(format!("{name}.lock")));
                }
            }
        }
    }
}

/// When a plan was used last, its name and its bytes on disk. The order is least recently used first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct PlanUse {
    last_used: SystemTime,
    name: String,
    bytes: u64,
}

/// Bytes that a directory's files take on disk, without files that have other hard links, such as a model's weights.
fn disk_usage(dir: &Path) -> u64 {
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => disk_usage(&entry.path()),
        Ok(metadata) => file_usage(&metadata),
        Err(_) => 0,
    };
    fs::read_dir(dir).into_iter().flatten().flatten().map(size).sum()
}

#[cfg(unix)]
fn file_usage(metadata: &fs::Metadata) -> u64 {
    use std::os::unix::fs::MetadataExt;
    if metadata.nlink() > 1 { 0 } else { metadata.blocks().saturating_mul(512) }
}

#[cfg(not(unix))]
fn file_usage(metadata: &fs::Metadata) -> u64 {
    metadata.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::Level;
    use std::cell::Cell;
    use std::ffi::OsString;
    use std::time::Duration;

    struct Fixture {
        dir: tempfile::TempDir,
        console: std::sync::Arc<Console>,
    }

    impl Fixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("model")).unwrap();
            fs::write(dir.path().join("model/model.onnx"), b"graph").unwrap();
            Self { dir, console: Console::new(Level::Quiet) }
        }

        fn cache(&self, limit: u64) -> PlanCache {
            let cache = Some(self.dir.path().join("cache"));
            PlanCache::open(&AutoPlanArgs { cache, cache_limit: Some(ByteSize(limit)), ..Default::default() }).unwrap()
        }

        fn key(&self, flag: &str) -> CacheKey {
            let flags: [OsString; 1] = [flag.into()];
            CacheKey::new(&self.dir.path().join("model"), &std::env::current_exe().unwrap(), &flags).unwrap()
        }

        fn take(&self, cache: &PlanCache, flag: &str, made: &Cell<u32>) -> LockedPlan {
            let make = |dir: &Path, _: File| {
                made.set(made.get() + 1);
                fs::create_dir_all(dir).unwrap();
                fs::write(dir.join("weights.bin"), vec![1; 1 << 20]).unwrap();
                fs::write(dir.join(PLAN_NAME), b"plan").unwrap();
                Ok(())
            };
            cache.acquire(&self.key(flag), false, &self.console, make).unwrap()
        }

        fn names(&self) -> usize {
            fs::read_dir(self.dir.path().join("cache/plans")).unwrap().count()
        }
    }

    #[test]
    fn least_recently_used_plans_are_evicted_and_locked_ones_stay() {
        let (fixture, made) = (Fixture::new(), Cell::new(0));
        let cache = fixture.cache(5 << 19);
        let flags = ["a", "b", "c"];
        for (age, flag) in flags.iter().enumerate() {
            let in_use = fixture.take(&cache, flag, &made);
            let used = SystemTime::now() - Duration::from_secs(100 - age as u64);
            in_use._lock.set_modified(used).unwrap();
        }
        let is_cached = |flag: &str| cache.plans().join(fixture.key(flag).directory()).is_dir();
        assert_eq!(flags.map(is_cached), [true; 3]);
        cache.evict(None);
        assert_eq!(flags.map(is_cached), [false, true, true], "two MiB are within the limit");
        // The oldest plan is locked. A cache too small for one plan keeps the plan used last.
        let b = fixture.take(&cache, "b", &made);
        assert_eq!(made.get(), 3, "it was cached");
        b._lock.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        fixture.cache(1).evict(None);
        assert_eq!(flags.map(is_cached), [false, true, false]);
        let name = b.name().to_owned();
        drop(b);
        fixture.cache(1).evict(Some(&name));
        assert_eq!(flags.map(is_cached), [false, true, false]);
        fixture.cache(1).evict(None);
        assert_eq!(fixture.names(), 0, "no locks are left either");
    }

    #[test]
    fn remarks_on_a_plan_are_kept_as_long_as_the_plan() {
        let (fixture, made) = (Fixture::new(), Cell::new(0));
        let cache = fixture.cache(1 << 30);
        let key = fixture.key("a");
        let notes = ["note: one", "warning: two"].map(str::to_owned);
        cache.keep_notes(&key, &notes);
        let plan = fixture.take(&cache, "a", &made);
        assert_eq!(cache.notes(&plan), notes);
        // The plan was made again, without notes.
        cache.keep_notes(&key, &[]);
        assert_eq!(cache.notes(&plan), [] as [String; 0]);
        cache.keep_notes(&key, &notes);
        let name = plan.name().to_owned();
        drop(plan);
        cache.remove(&name);
        assert_eq!(fixture.names(), 0);
    }

    #[test]
    fn a_changed_model_replaces_its_plan_and_keeps_prepared_weights() {
        let (fixture, made) = (Fixture::new(), Cell::new(0));
        let cache = fixture.cache(1 << 30);
        let old = fixture.take(&cache, "a", &made).dir().to_owned();
        fs::create_dir(old.join(PREPARED_DIR)).unwrap();
        fs::write(old.join(PREPARED_DIR).join("x"), b"x").unwrap();
        fs::write(fixture.dir.path().join("model/model.onnx"), b"another graph").unwrap();
        let new = fixture.take(&cache, "a", &made);
        assert_eq!(made.get(), 2);
        assert!(!old.exists() && new.dir().join(PREPARED_DIR).join("x").is_file());
    }

    #[test]
    fn leftovers_of_killed_processes_are_removed() {
        let (fixture, made) = (Fixture::new(), Cell::new(0));
        let cache = fixture.cache(1 << 30);
        drop(fixture.take(&cache, "a", &made));
        let held = cache.lock_file("busy").unwrap();
        held.try_lock().unwrap();
        for partial in [".dead.partial", ".busy.partial"] {
            fs::create_dir(cache.plans().join(partial)).unwrap();
        }
        cache.evict(None);
        assert!(!cache.plans().join(".dead.partial").exists());
        assert!(cache.plans().join(".busy.partial").exists());
        // The plan and its lock, the held lock and the partial plan of its holder.
        assert_eq!(fixture.names(), 4);
    }

    #[test]
    fn concurrent_processes_make_a_plan_once() {
        let fixture = Fixture::new();
        let cache = fixture.cache(1 << 30);
        let made = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let make = |dir: &Path, _: File| {
                        made.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(50));
                        fs::create_dir_all(dir).unwrap();
                        fs::write(dir.join(PLAN_NAME), b"plan").unwrap();
                        Ok(())
                    };
                    cache.acquire(&fixture.key("a"), false, &fixture.console, make).unwrap();
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn failed_planning_leaves_no_plan() {
        let fixture = Fixture::new();
        let cache = fixture.cache(1 << 30);
        let fails = |_: &Path, _: File| Err(PlanningError::NotPlanned { code: Some(1) });
        assert!(cache.acquire(&fixture.key("a"), false, &fixture.console, fails).is_err());
        let made = Cell::new(0);
        fixture.take(&cache, "a", &made);
        assert_eq!(made.get(), 1);
    }
}
