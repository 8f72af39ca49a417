//! One partition under one provider: loaded once, then each case run and timed.

use super::product::ProductFile;
use super::{Answer, ProbeSession};
use crate::error::ExecError;
use crate::machine::OrtBackend;
use crate::report::millis;
use hpp_engine::port::Backend;
use hpp_engine::{CacheFlusher, PartitionBench};
use hpp_schema::probe::{PartitionProbe, Reply};
use hpp_schema::{Provider, Timing, error_line};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

/// What reads memory between runs, by provider; made when a case first asks for it.
pub(super) type Evictors = BTreeMap<Provider, CacheFlusher<OrtBackend>>;

/// Answers the request.
pub(super) fn run(
    session: &mut ProbeSession<'_>,
    probe: &PartitionProbe,
    reply: &mut Answer<'_>,
) -> Result<(), ExecError> {
    let backend = session.machine.backend().clone();
    // While a partition loads nothing is read, and the cases of the last one may have asked for much.
    read_nothing(session)?;
    let mut rehearsal = PartitionBench::load(&backend, probe, session.console.as_ref())?;
    reply(Reply::Loaded { load_ms: millis(rehearsal.load_time()), processor: rehearsal.processor().to_owned() })?;
    for case in &probe.cases {
        let runs = match case.evict_bytes {
            0 => read_nothing(session).and_then(|()| rehearsal.case(case, None).map_err(ExecError::from)),
            _ => flusher(session, probe.provider)
                .and_then(|flusher| rehearsal.case(case, Some(flusher)).map_err(ExecError::from)),
        };
        match runs {
            Ok(runs) => reply(Reply::Measured {
                case: case.name.clone(),
                timing: timing(&runs.times),
                peak_resident: backend.memory_use().peak_resident,
            })?,
            Err(error) => reply(Reply::CaseFailed { case: case.name.clone(), reason: error_line(&error) })?,
        }
    }
    Ok(())
}

/// Gives back what earlier cases had read between their runs.
fn read_nothing(session: &mut ProbeSession<'_>) -> Result<(), ExecError> {
    session.evictors.values_mut().try_for_each(|flusher| flusher.make_room(0)).map_err(ExecError::from)
}

/// What reads memory between runs under this provider.
pub(super) fn flusher<'a>(
    session: &'a mut ProbeSession<'_>,
    provider: Provider,
) -> Result<&'a mut CacheFlusher<OrtBackend>, ExecError> {
    match session.evictors.entry(provider) {
        Entry::Occupied(there) => Ok(there.into_mut()),
        Entry::Vacant(place) => {
            let file = ProductFile::write().map_err(ExecError::Scratch)?;
            let backend = session.machine.backend();
            Ok(place.insert(CacheFlusher::load(backend, &file.path(), provider, session.console.as_ref())?))
        }
    }
}

/// What these runs say together.
pub(super) fn timing(runs: &[Duration]) -> Timing {
    let mut times: Vec<f64> = runs.iter().map(|time| millis(*time)).collect();
    times.sort_by(f64::total_cmp);
    Timing {
        runs: u32::try_from(times.len()).unwrap_or(u32::MAX),
        median_ms: quantile(&times, 0.5),
        p10_ms: quantile(&times, 0.1),
        p90_ms: quantile(&times, 0.9),
    }
}

/// The quantile `q` of sorted numbers, linear between neighbours; 0 of none.
pub(super) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = q * last as f64;
    let (below, part) = (at.floor() as usize, at.fract());
    sorted[below] + part * (sorted[(below + 1).min(last)] - sorted[below])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_neighbours() {
        assert_eq!(quantile(&[], 0.5), 0.0);
        assert_eq!(quantile(&[3.0], 0.9), 3.0);
        assert_eq!(quantile(&[1.0, 2.0, 4.0, 8.0], 0.5), 3.0);
        assert_eq!(quantile(&[0.0, 10.0], 0.1), 1.0);
    }

    #[test]
    fn runs_are_sorted_first() {
        let timing = timing(&[4, 1, 2].map(Duration::from_millis));
        assert_eq!((timing.runs, timing.median_ms), (3, 2.0));
        assert!(timing.p10_ms < 1.3 && timing.p90_ms > 3.5);
    }
}
