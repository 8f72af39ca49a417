//! The directory that keeps plans of models: bounded in size, shared by processes, safe to remove.
//!
//! ```text
//! DIR/CACHEDIR.TAG        tells backup programs to leave it out
//! DIR/lock                held for the moment in which a process takes or removes a plan
//! DIR/plans/NAME/         a plan, and the weights that hpp-exec prepares beside it
//! DIR/plans/NAME.lock     held shared by those who use the plan, exclusively by the one who makes it; its time is the last use
//! ```
//!
//! Lock files are opened and removed only under DIR/lock, so that nobody waits for a file that is gone from the directory.

use super::identity::Identity;
use crate::cli::PlanningArgs;
use crate::console::Console;
use crate::error::ExecError;
use crate::plan_file::PLAN_NAME;
use etcetera::BaseStrategy;
use hpp_schema::ByteSize;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Size of the cache where nobody gives one.
const LIMIT: u64 = 50 << 30;
/// Where hpp-exec prepares weights beside a plan.
const PREPARED: &str = "prepared";
/// What programs that make backups look for (bford.info/cachedir).
const TAG: &str =
    "Signature: 8a477f597d28d172789f06886806bc55\n# Plans made by hpp-exec; removing this directory is safe.\n";

/// Why there is no plan from the cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Nobody says where it is.
    #[error("there is no directory for cached plans: no HPP_CACHE, no XDG_CACHE_HOME and no home directory")]
    NoPlace,
    /// `HPP_CACHE_LIMIT` is no size.
    #[error("HPP_CACHE_LIMIT is no size")]
    Limit(#[source] <ByteSize as std::str::FromStr>::Err),
    /// The directory cannot be used.
    #[error("cannot use the plan cache {}", path.display())]
    Io {
        /// The directory or a file in it.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The model cannot be looked at.
    #[error("cannot read the model {}", path.display())]
    Model {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The plan is gone although a process uses it.
    #[error("the plan {} is damaged and another hpp-exec uses it", path.display())]
    InUse {
        /// Its directory.
        path: PathBuf,
    },
}

impl CacheError {
    /// The next step for a person.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            CacheError::NoPlace | CacheError::Io { .. } => {
                Some("give a directory on a local disk with --cache or HPP_CACHE")
            }
            CacheError::Limit(_) | CacheError::Model { .. } => None,
            CacheError::InUse { .. } => Some("wait until it has ended, or give another directory with --cache"),
        }
    }
}

/// The cache.
pub(super) struct Cache {
    dir: PathBuf,
    limit: u64,
}

/// A plan that this process uses.
pub(super) struct InUse {
    place: PathBuf,
    name: String,
    _shared: File,
}

impl InUse {
    /// The plan's directory.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Its name in the cache.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Cache {
    /// The directory of `--cache`, else HPP_CACHE, else `hpp` in the system's place for caches; made where it is not there.
    pub fn open(args: &PlanningArgs) -> Result<Self, CacheError> {
        let said = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let usual = || Some(etcetera::choose_base_strategy().ok()?.cache_dir().join("hpp"));
        let dir = args.cache.clone().or_else(|| said("HPP_CACHE").map(PathBuf::from)).or_else(usual);
        let dir = dir.ok_or(CacheError::NoPlace)?;
        let limit = match (args.cache_limit, said("HPP_CACHE_LIMIT")) {
            (Some(limit), _) => limit,
            (None, Some(text)) => text.to_string_lossy().parse().map_err(CacheError::Limit)?,
            (None, None) => ByteSize(LIMIT),
        };
        let failed = |source| CacheError::Io { path: dir.clone(), source };
        let dir = std::path::absolute(&dir).map_err(failed)?;
        let cache = Self { dir, limit: limit.0 };
        let failed = |source| CacheError::Io { path: cache.dir.clone(), source };
        fs::create_dir_all(cache.plans()).map_err(failed)?;
        let tag = cache.dir.join("CACHEDIR.TAG");
        if !tag.exists() {
            fs::write(&tag, TAG).map_err(failed)?;
        }
        Ok(cache)
    }

    /// The plan with this identity, for use: as it is, or made by `make` at the place and under the lock that it is given.
    pub fn acquire(
        &self,
        identity: &Identity,
        mut again: bool,
        console: &Console,
        make: impl Fn(&Path, File) -> Result<(), ExecError>,
    ) -> Result<InUse, ExecError> {
        let name = identity.directory();
        let place = self.plans().join(&name);
        let failed = |source: io::Error| CacheError::Io { path: self.dir.clone(), source };
        loop {
            let gate = self.gate().map_err(failed)?;
            let lock = self.lock_file(&name).map_err(failed)?;
            let is_whole = place.join(PLAN_NAME).is_file();
            if lock.try_lock_shared().is_err() {
                drop(gate);
                console.say("another hpp-exec makes the same plan; waiting for it");
                lock.lock_shared().map_err(failed)?;
                continue;
            }
            if is_whole && !again {
                // Without the time of use the plan is only removed sooner.
                let _ = lock.set_modified(SystemTime::now());
                return Ok(InUse { place, name, _shared: lock });
            }
            lock.unlock().map_err(failed)?;
            if lock.try_lock().is_err() {
                if !is_whole {
                    return Err(CacheError::InUse { path: place }.into());
                }
                console.warn("another hpp-exec uses this plan, so it is not made again");
                again = false;
                continue;
            }
            drop(gate);
            make(&place, lock.try_clone().map_err(failed)?)?;
            self.replace_other_versions(identity, &place);
            again = false;
            lock.unlock().map_err(failed)?;
        }
    }

    /// Removes plans that nobody uses, those used longest ago first, until the rest is within the limit. `last` stays: removing
    /// the plan used last would prepare its weights anew at each start. Failures leave a larger cache and nothing worse.
    pub fn evict(&self, last: Option<&str>) {
        let Ok(_gate) = self.gate() else { return };
        self.sweep();
        let mut plans: Vec<(SystemTime, String, u64)> = self.names().into_iter().map(|name| self.about(name)).collect();
        plans.sort();
        let mut total: u64 = plans.iter().map(|(_, _, bytes)| bytes).sum();
        for (_, name, bytes) in plans.iter().filter(|(_, name, _)| Some(name.as_str()) != last) {
            if total > self.limit && self.remove_idle(name) {
                total -= bytes;
            }
        }
    }

    /// Removes a plan unless somebody uses it.
    pub fn remove(&self, name: &str) {
        if let Ok(_gate) = self.gate() {
            self.remove_idle(name);
        }
    }

    fn plans(&self) -> PathBuf {
        self.dir.join("plans")
    }

    /// The lock under which plans are taken and removed.
    fn gate(&self) -> io::Result<File> {
        let gate = File::create(self.dir.join("lock"))?;
        gate.lock()?;
        Ok(gate)
    }

    fn lock_file(&self, name: &str) -> io::Result<File> {
        let path = self.plans().join(format!("{name}.lock"));
        File::options().read(true).write(true).create(true).truncate(false).open(path)
    }

    /// Names of the plans that are there.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.plans()).into_iter().flatten().flatten();
        let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let names = directories.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| !name.starts_with('.')).collect()
    }

    /// When a plan was used last, its name and size.
    fn about(&self, name: String) -> (SystemTime, String, u64) {
        let lock = fs::metadata(self.plans().join(format!("{name}.lock")));
        let used = lock.and_then(|about| about.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let bytes = occupied(&self.plans().join(&name));
        (used, name, bytes)
    }

    /// Older versions of a plan make room for the new one, and leave it their prepared weights: each has the hash of what it was
    /// made from, so what no longer fits is not used.
    fn replace_other_versions(&self, identity: &Identity, place: &Path) {
        let Ok(_gate) = self.gate() else { return };
        let (own, any) = (identity.directory(), identity.any_version());
        for name in self.names().into_iter().filter(|name| name.starts_with(&any) && *name != own) {
            let Ok(lock) = self.lock_file(&name) else { continue };
            if lock.try_lock().is_ok() {
                let (from, to) = (self.plans().join(&name).join(PREPARED), place.join(PREPARED));
                if from.is_dir() && !to.exists() {
                    let _ = fs::rename(from, to);
                }
                self.delete(&name);
            }
        }
    }

    /// Removes a plan, under the gate; whether it is gone.
    fn remove_idle(&self, name: &str) -> bool {
        let Ok(lock) = self.lock_file(name) else { return false };
        lock.try_lock().is_ok() && self.delete(name)
    }

    /// Removes a plan whose lock is held. The plan's file goes first: what a killed process leaves is then no plan.
    fn delete(&self, name: &str) -> bool {
        let place = self.plans().join(name);
        let _ = fs::remove_file(place.join(PLAN_NAME));
        let gone = fs::remove_dir_all(&place).is_ok() || !place.exists();
        let _ = fs::remove_file(self.plans().join(format!("{name}.lock")));
        gone
    }

    /// Removes what processes that were killed left: half-written plans, and locks of plans that are gone.
    fn sweep(&self) {
        for entry in fs::read_dir(self.plans()).into_iter().flatten().flatten() {
            let Ok(file) = entry.file_name().into_string() else { continue };
            let half = file.strip_prefix('.').and_then(|file| file.strip_suffix(".partial"));
            let half = half.or_else(|| file.strip_prefix('.').and_then(|file| file.strip_suffix(".lock")));
            let locked = file.strip_suffix(".lock").filter(|name| !name.starts_with('.'));
            let Some(name) = half.or(locked) else { continue };
            if half.is_none() && self.plans().join(name).exists() {
                continue;
            }
            let Ok(lock) = self.lock_file(name) else { continue };
            if lock.try_lock().is_ok() {
                let _ = fs::remove_dir_all(entry.path()).or_else(|_| fs::remove_file(entry.path()));
                if !self.plans().join(name).exists() {
                    let _ = fs::remove_file(self.plans().join(format!("{name}.lock")));
                }
            }
        }
    }
}

/// Bytes on disk of a directory's files that are nowhere else: a hard link to a model's weights takes nothing.
fn occupied(dir: &Path) -> u64 {
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(about) if about.is_dir() => occupied(&entry.path()),
        Ok(about) => bytes_of(&about),
        Err(_) => 0,
    };
    fs::read_dir(dir).into_iter().flatten().flatten().map(size).sum()
}

#[cfg(unix)]
fn bytes_of(about: &fs::Metadata) -> u64 {
    use std::os::unix::fs::MetadataExt;
    if about.nlink() > 1 { 0 } else { about.blocks().saturating_mul(512) }
}

#[cfg(not(unix))]
fn bytes_of(about: &fs::Metadata) -> u64 {
    about.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::Level;
    use std::cell::Cell;
    use std::ffi::OsString;
    use std::time::Duration;

    struct Setting {
        dir: tempfile::TempDir,
        console: std::sync::Arc<Console>,
    }

    impl Setting {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("model")).unwrap();
            fs::write(dir.path().join("model/model.onnx"), b"graph").unwrap();
            Self { dir, console: Console::new(Level::Quiet) }
        }

        fn cache(&self, limit: u64) -> Cache {
            let cache = Some(self.dir.path().join("cache"));
            Cache::open(&PlanningArgs { cache, cache_limit: Some(ByteSize(limit)), ..Default::default() }).unwrap()
        }

        fn identity(&self, flag: &str) -> Identity {
            let flags: [OsString; 1] = [flag.into()];
            Identity::of(&self.dir.path().join("model"), &std::env::current_exe().unwrap(), &flags).unwrap()
        }

        fn take(&self, cache: &Cache, flag: &str, made: &Cell<u32>) -> InUse {
            let make = |place: &Path, _: File| {
                made.set(made.get() + 1);
                fs::create_dir_all(place).unwrap();
                fs::write(place.join("weights.bin"), vec![1; 1 << 20]).unwrap();
                fs::write(place.join(PLAN_NAME), b"plan").unwrap();
                Ok(())
            };
            cache.acquire(&self.identity(flag), false, &self.console, make).unwrap()
        }

        fn names(&self) -> usize {
            fs::read_dir(self.dir.path().join("cache/plans")).unwrap().count()
        }
    }

    #[test]
    fn the_plans_used_longest_ago_go_first_and_those_in_use_stay() {
        let (setting, made) = (Setting::new(), Cell::new(0));
        let cache = setting.cache(5 << 19);
        let flags = ["a", "b", "c"];
        for (age, flag) in flags.iter().enumerate() {
            let in_use = setting.take(&cache, flag, &made);
            let used = SystemTime::now() - Duration::from_secs(100 - age as u64);
            in_use._shared.set_modified(used).unwrap();
        }
        let there = |flag: &str| cache.plans().join(setting.identity(flag).directory()).is_dir();
        assert_eq!(flags.map(there), [true; 3]);
        cache.evict(None);
        assert_eq!(flags.map(there), [false, true, true], "two MiB are within the limit");
        // The oldest is in use now; and of a cache that is too small for one plan, the last one used stays.
        let b = setting.take(&cache, "b", &made);
        assert_eq!(made.get(), 3, "it was there");
        b._shared.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        setting.cache(1).evict(None);
        assert_eq!(flags.map(there), [false, true, false]);
        let name = b.name().to_owned();
        drop(b);
        setting.cache(1).evict(Some(&name));
        assert_eq!(flags.map(there), [false, true, false]);
        setting.cache(1).evict(None);
        assert_eq!(setting.names(), 0, "no locks are left either");
    }

    #[test]
    fn a_changed_model_replaces_its_plan_and_keeps_what_was_prepared() {
        let (setting, made) = (Setting::new(), Cell::new(0));
        let cache = setting.cache(1 << 30);
        let old = setting.take(&cache, "a", &made).place().to_owned();
        fs::create_dir(old.join(PREPARED)).unwrap();
        fs::write(old.join(PREPARED).join("x"), b"x").unwrap();
        fs::write(setting.dir.path().join("model/model.onnx"), b"another graph").unwrap();
        let new = setting.take(&cache, "a", &made);
        assert_eq!(made.get(), 2);
        assert!(!old.exists() && new.place().join(PREPARED).join("x").is_file());
    }

    #[test]
    fn what_killed_processes_left_is_swept_up() {
        let (setting, made) = (Setting::new(), Cell::new(0));
        let cache = setting.cache(1 << 30);
        drop(setting.take(&cache, "a", &made));
        let held = cache.lock_file("busy").unwrap();
        held.try_lock().unwrap();
        for half in [".dead.partial", ".busy.partial"] {
            fs::create_dir(cache.plans().join(half)).unwrap();
        }
        cache.evict(None);
        assert!(!cache.plans().join(".dead.partial").exists());
        assert!(cache.plans().join(".busy.partial").exists());
        // The plan and its lock, the lock in use and what its holder writes.
        assert_eq!(setting.names(), 4);
    }

    #[test]
    fn processes_that_come_at_once_make_a_plan_once() {
        let setting = Setting::new();
        let cache = setting.cache(1 << 30);
        let made = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let make = |place: &Path, _: File| {
                        made.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(50));
                        fs::create_dir_all(place).unwrap();
                        fs::write(place.join(PLAN_NAME), b"plan").unwrap();
                        Ok(())
                    };
                    cache.acquire(&setting.identity("a"), false, &setting.console, make).unwrap();
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn a_failure_to_plan_leaves_no_plan() {
        let setting = Setting::new();
        let cache = setting.cache(1 << 30);
        let fails = |_: &Path, _: File| Err(ExecError::NotPlanned { code: Some(1) });
        assert!(cache.acquire(&setting.identity("a"), false, &setting.console, fails).is_err());
        let made = Cell::new(0);
        setting.take(&cache, "a", &made);
        assert_eq!(made.get(), 1);
    }
}
