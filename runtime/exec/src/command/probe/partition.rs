//! Times one partition under one provider: loads it once, then runs each case.

use super::{ProbeSession, Replies};
use crate::error::ExecError;
use crate::measure::{MeasureError, ProductFile, quantile};
use crate::numbers::millis;
use crate::runtime::OrtBackend;
use hpp_engine::port::Backend;
use hpp_engine::{CacheFlusher, PartitionBench};
use hpp_schema::probe::{PartitionProbe, Reply};
use hpp_schema::{Provider, TimingStats, error_line};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

/// The cache flushers, by provider. Each is created when a case first needs it.
pub(super) type Flushers = BTreeMap<Provider, CacheFlusher<OrtBackend>>;

/// Answers the request.
pub(super) fn run(
    session: &mut ProbeSession<'_>,
    probe: &PartitionProbe,
    replies: &mut Replies<'_>,
) -> Result<(), ExecError> {
    let backend = session.runtime.backend().clone();
    // Earlier cases leave flush buffers allocated. Their memory must be free while the partition loads.
    free_flushers(session)?;
    let mut bench = PartitionBench::load(&backend, probe, session.console.as_ref())?;
    replies(Reply::Loaded { load_ms: millis(bench.load_time()), processor: bench.processor().to_owned() })?;
    for case in &probe.cases {
        let runs = match case.evict_bytes {
            0 => free_flushers(session).and_then(|()| bench.case(case, None).map_err(ExecError::from)),
            _ => flusher(session, probe.provider)
                .and_then(|flusher| bench.case(case, Some(flusher)).map_err(ExecError::from)),
        };
        match runs {
            Ok(runs) => replies(Reply::Measured {
                case: case.name.clone(),
                timing: timing(&runs.times),
                peak_resident: backend.memory_use().peak_resident,
            })?,
            Err(error) => replies(Reply::CaseFailed { case: case.name.clone(), reason: error_line(&error) })?,
        }
    }
    Ok(())
}

/// Frees the buffers with which earlier cases flushed caches.
fn free_flushers(session: &mut ProbeSession<'_>) -> Result<(), ExecError> {
    session.flushers.values_mut().try_for_each(|flusher| flusher.make_room(0)).map_err(ExecError::from)
}

/// The cache flusher of a provider. Creates it on first use.
pub(super) fn flusher<'a>(
    session: &'a mut ProbeSession<'_>,
    provider: Provider,
) -> Result<&'a mut CacheFlusher<OrtBackend>, ExecError> {
    match session.flushers.entry(provider) {
        Entry::Occupied(entry) => Ok(entry.into_mut()),
        Entry::Vacant(entry) => {
            let file = ProductFile::write().map_err(MeasureError::TemporaryFile)?;
            let backend = session.runtime.backend();
            Ok(entry.insert(CacheFlusher::load(backend, &file.path(), provider, session.console.as_ref())?))
        }
    }
}

/// Median and 10 % and 90 % quantiles of these runs.
pub(super) fn timing(runs: &[Duration]) -> TimingStats {
    let mut times: Vec<f64> = runs.iter().map(|time| millis(*time)).collect();
    times.sort_by(f64::total_cmp);
    TimingStats {
        runs: u32::try_from(times.len()).unwrap_or(u32::MAX),
        median_ms: quantile(&times, 0.5),
        p10_ms: quantile(&times, 0.1),
        p90_ms: quantile(&times, 0.9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsorted_runs_have_sorted_quantiles() {
        let timing = timing(&[4, 1, 2].map(Duration::from_millis));
        assert_eq!((timing.runs, timing.median_ms), (3, 2.0));
        assert!(timing.p10_ms < 1.3 && timing.p90_ms > 3.5);
    }
}
