//! Decides which engine is loaded or unloaded next: first for waiting requests, in their order; then unloads engines that have been idle for long.

use super::memory::MemoryNeeds;
use std::time::{Duration, Instant};

/// How long a request waits for the memory of busy engines. After that, these engines get no more requests.
pub(super) const DRAIN_DELAY: Duration = Duration::from_secs(10);

/// What is known about an engine.
#[derive(Clone, Debug)]
pub(super) struct EngineFacts<'a> {
    pub status: EngineStatus,
    pub needs: &'a MemoryNeeds,
    /// Bytes of KV pages in RAM, which are reclaimed before an engine is unloaded: pages on disk are read again later, others computed again.
    pub kv: u64,
    /// When the first request that waits for this engine to be loaded arrived.
    pub wanted_since: Option<Instant>,
}

/// Whether an engine is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineStatus {
    Unloaded,
    /// Being loaded or unloaded.
    Changing,
    Loaded {
        /// Whether it has no request.
        is_idle: bool,
        /// Whether it gets no more requests, because it will be unloaded.
        is_draining: bool,
        last_used: Instant,
    },
}

/// What to do next. An engine is named by its index in the list of facts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Load(usize),
    Unload(usize),
    /// Send an engine no more requests, so that it can be unloaded.
    Drain(usize),
    /// Send an engine requests again: nothing needs its memory.
    Resume(usize),
    /// Do nothing until something changes, or until this time.
    Wait(Option<Instant>),
}

/// What the engines may take.
#[derive(Clone, Debug)]
pub(super) struct MemoryRoom {
    /// Memory for all engines together, now.
    pub budget: MemoryNeeds,
    /// Bytes of host memory that the loaded engines take above the limit, because it was lowered.
    pub excess: u64,
}

/// Decides the next step.
pub(super) fn decide(
    engines: &[EngineFacts<'_>],
    room: &MemoryRoom,
    idle_timeout: Option<Duration>,
    now: Instant,
) -> Decision {
    let MemoryRoom { budget, excess } = room;
    if engines.iter().any(|engine| engine.status == EngineStatus::Changing) {
        return Decision::Wait(None);
    }
    let unloaded = engines.iter().enumerate().filter(|(_, engine)| engine.status == EngineStatus::Unloaded);
    let wanted = unloaded.filter_map(|(index, engine)| Some((engine.wanted_since?, index))).min();
    let Some((since, wanted)) = wanted else {
        let unloaded = idle_engine_over_limit(engines, *excess).map(Decision::Unload);
        return unloaded.unwrap_or_else(|| decide_without_requests(engines, idle_timeout, now));
    };
    let mut loaded: Vec<Loaded> = engines.iter().enumerate().filter_map(Loaded::new).collect();
    // Draining engines come first, then idle ones, then by the time of the last use.
    loaded.sort_by_key(|engine| (!engine.is_draining, !engine.is_idle, engine.last_used));
    let fits = |kept: &[&Loaded]| {
        let others = kept.iter().map(|engine| engine.needs);
        kept.is_empty() || others.fold(engines[wanted].needs.clone(), MemoryNeeds::plus).fits(budget)
    };
    let leaving = leaving(&loaded, fits);
    match leaving.first() {
        None => Decision::Load(wanted),
        Some(_) if now < since + DRAIN_DELAY && leaving.iter().any(|engine| !engine.is_idle && !engine.is_draining) => {
            Decision::Wait(Some(since + DRAIN_DELAY))
        }
        Some(_) => match leaving.iter().find(|engine| engine.is_idle) {
            Some(engine) => Decision::Unload(engine.index),
            None => match leaving.iter().find(|engine| !engine.is_draining) {
                Some(engine) => Decision::Drain(engine.index),
                None => Decision::Wait(None),
            },
        },
    }
}

/// A loaded engine.
struct Loaded<'a> {
    index: usize,
    needs: &'a MemoryNeeds,
    is_idle: bool,
    is_draining: bool,
    last_used: Instant,
}

impl<'a> Loaded<'a> {
    fn new((index, engine): (usize, &EngineFacts<'a>)) -> Option<Self> {
        match engine.status {
            EngineStatus::Loaded { is_idle, is_draining, last_used } => {
                Some(Loaded { index, needs: engine.needs, is_idle, is_draining, last_used })
            }
            EngineStatus::Unloaded | EngineStatus::Changing => None,
        }
    }
}

/// The engines to unload so that the rest fits: takes them from the start of the list, then keeps again those whose memory is not needed.
fn leaving<'a, 'b>(loaded: &'b [Loaded<'a>], fits: impl Fn(&[&'b Loaded<'a>]) -> bool) -> Vec<&'b Loaded<'a>> {
    let mut kept: Vec<&Loaded> = loaded.iter().collect();
    let mut leaving = Vec::new();
    while !fits(&kept) {
        leaving.push(kept.remove(0));
    }
    leaving.retain(|engine| {
        kept.push(engine);
        let must_leave = !fits(&kept);
        if must_leave {
            kept.pop();
        }
        must_leave
    });
    leaving
}

/// The idle engine used longest ago, if the loaded engines exceed a lowered memory limit by more than their KV pages in RAM. The last engine is never
/// unloaded: it releases other memory instead.
fn idle_engine_over_limit(engines: &[EngineFacts<'_>], excess: u64) -> Option<usize> {
    let loaded: Vec<Loaded> = engines.iter().enumerate().filter_map(Loaded::new).collect();
    let cheap = loaded.iter().map(|engine| engines[engine.index].kv).fold(0, u64::saturating_add);
    if excess <= cheap || loaded.len() < 2 {
        return None;
    }
    let idle = loaded.iter().filter(|engine| engine.is_idle);
    idle.min_by_key(|engine| engine.last_used).map(|engine| engine.index)
}

/// Decides the next step if no request waits for an engine to be loaded.
fn decide_without_requests(engines: &[EngineFacts<'_>], idle_timeout: Option<Duration>, now: Instant) -> Decision {
    let mut next = None;
    for (index, engine) in engines.iter().enumerate() {
        let EngineStatus::Loaded { is_idle, is_draining, last_used } = engine.status else { continue };
        if is_draining {
            return Decision::Resume(index);
        }
        let Some(end) = idle_timeout.filter(|_| is_idle).map(|timeout| last_used + timeout) else { continue };
        if end <= now {
            return Decision::Unload(index);
        }
        next = next.into_iter().chain([end]).min();
    }
    Decision::Wait(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(host: u64) -> MemoryNeeds {
        MemoryNeeds { host, ..MemoryNeeds::default() }
    }

    const UNLOADED: EngineStatus = EngineStatus::Unloaded;

    struct Clock(Instant);

    impl Clock {
        fn at(&self, seconds: u64) -> Instant {
            self.0 + Duration::from_secs(seconds)
        }

        fn idle_since(&self, seconds: u64) -> EngineStatus {
            EngineStatus::Loaded { is_idle: true, is_draining: false, last_used: self.at(seconds) }
        }

        fn busy(&self, seconds: u64, is_draining: bool) -> EngineStatus {
            EngineStatus::Loaded { is_idle: false, is_draining, last_used: self.at(seconds) }
        }

        /// Decides at time `now` for engines of these sizes. The memory limit is 10.
        fn decide(&self, engines: &[(EngineStatus, u64, Option<u64>)], now: u64) -> Decision {
            self.decide_with(engines, 10, now)
        }

        /// Like `decide`, after the limit was lowered from 10 to `limit`. Half of each engine's bytes are KV pages.
        fn decide_with(&self, engines: &[(EngineStatus, u64, Option<u64>)], limit: u64, now: u64) -> Decision {
            let loaded = engines.iter().filter(|(status, ..)| *status != UNLOADED);
            let taken: u64 = loaded.map(|(_, bytes, _)| bytes).sum();
            let room = MemoryRoom { budget: super::tests::needs(limit), excess: taken.min(10).saturating_sub(limit) };
            let needs: Vec<MemoryNeeds> = engines.iter().map(|(_, bytes, _)| needs(*bytes)).collect();
            let facts = engines.iter().zip(&needs).map(|((status, bytes, wanted), needs)| EngineFacts {
                status: *status,
                needs,
                kv: bytes / 2,
                wanted_since: wanted.map(|seconds| self.at(seconds)),
            });
            let facts: Vec<EngineFacts<'_>> = facts.collect();
            decide(&facts, &room, Some(Duration::from_secs(300)), self.at(now))
        }
    }

    #[test]
    fn requests_are_loaded_for_in_their_order_one_at_a_time() {
        let clock = Clock(Instant::now());
        let second_first = [(UNLOADED, 4, Some(2)), (UNLOADED, 4, Some(1))];
        assert_eq!(clock.decide(&second_first, 3), Decision::Load(1));
        let one_is_loading = [(UNLOADED, 4, Some(2)), (EngineStatus::Changing, 4, Some(1))];
        assert_eq!(clock.decide(&one_is_loading, 3), Decision::Wait(None));
        assert_eq!(clock.decide(&[(UNLOADED, 4, None)], 3), Decision::Wait(None));
        assert_eq!(clock.decide(&[(UNLOADED, 99, Some(1))], 3), Decision::Load(0), "too large, but alone");
    }

    #[test]
    fn the_engine_used_longest_ago_leaves_and_no_more_than_needed() {
        let clock = Clock(Instant::now());
        let both_fit = [(clock.idle_since(1), 5, None), (UNLOADED, 5, Some(2))];
        assert_eq!(clock.decide(&both_fit, 3), Decision::Load(1));
        let oldest = [(clock.idle_since(2), 5, None), (clock.idle_since(1), 5, None), (UNLOADED, 5, Some(3))];
        assert_eq!(clock.decide(&oldest, 3), Decision::Unload(1));
        let small_helps_nothing =
            [(clock.idle_since(1), 1, None), (clock.idle_since(2), 8, None), (UNLOADED, 9, Some(3))];
        assert_eq!(clock.decide(&small_helps_nothing, 3), Decision::Unload(1));
    }

    #[test]
    fn engines_with_requests_give_way_after_a_while() {
        let clock = Clock(Instant::now());
        let busy = [(clock.busy(5, false), 8, None), (UNLOADED, 8, Some(3))];
        assert_eq!(clock.decide(&busy, 4), Decision::Wait(Some(clock.at(13))));
        assert_eq!(clock.decide(&busy, 13), Decision::Drain(0));
        let draining = [(clock.busy(5, true), 8, Some(14)), (UNLOADED, 8, Some(3))];
        assert_eq!(clock.decide(&draining, 14), Decision::Wait(None));
        let drained = EngineStatus::Loaded { is_idle: true, is_draining: true, last_used: clock.at(15) };
        assert_eq!(clock.decide(&[(drained, 8, Some(14)), (UNLOADED, 8, Some(3))], 15), Decision::Unload(0));
        // The request for the other engine has been cancelled, so the draining engine resumes.
        assert_eq!(clock.decide(&[(clock.busy(5, true), 8, Some(14)), (UNLOADED, 8, None)], 15), Decision::Resume(0));
    }

    #[test]
    fn a_lowered_limit_unloads_idle_engines_where_their_pages_are_not_enough() {
        let clock = Clock(Instant::now());
        let two = [(clock.idle_since(2), 4, None), (clock.idle_since(1), 4, None)];
        let waits = Decision::Wait(Some(clock.at(301)));
        assert_eq!(clock.decide_with(&two, 8, 3), waits, "they fit");
        assert_eq!(clock.decide_with(&two, 4, 3), waits, "their pages are enough");
        assert_eq!(clock.decide_with(&two, 3, 3), Decision::Unload(1));
        let one_is_busy = [(clock.idle_since(2), 4, None), (clock.busy(1, false), 4, None)];
        assert_eq!(clock.decide_with(&one_is_busy, 3, 3), Decision::Unload(0));
        let both_are_busy = [(clock.busy(2, false), 4, None), (clock.busy(1, false), 4, None)];
        assert_eq!(clock.decide_with(&both_are_busy, 1, 3), Decision::Wait(None));
        assert_eq!(clock.decide_with(&[(clock.idle_since(1), 9, None)], 1, 3), waits, "the last one stays");
        // Engines for waiting requests must fit the lowered limit.
        let wanted = [(clock.idle_since(2), 4, None), (UNLOADED, 4, Some(3))];
        assert_eq!(clock.decide_with(&wanted, 8, 3), Decision::Load(1));
        assert_eq!(clock.decide_with(&wanted, 7, 3), Decision::Unload(0));
    }

    #[test]
    fn idle_engines_leave_after_the_idle_timeout() {
        let clock = Clock(Instant::now());
        let engines =
            [(clock.idle_since(20), 4, None), (clock.idle_since(10), 4, None), (clock.busy(0, false), 2, None)];
        assert_eq!(clock.decide(&engines, 30), Decision::Wait(Some(clock.at(310))));
        assert_eq!(clock.decide(&engines, 310), Decision::Unload(1));
    }
}
