//! How fast weights came, against what their way brings by itself: a bare copy to the device, direct reads of the disk.

use super::tokens::{Brought, Token};
use crate::command::probe::{bare_copy, bare_reads};
use crate::console::Console;
use crate::error::ExecError;
use crate::machine::Machine;
use crate::plan_file::PlanFile;
use hpp_engine::{StageTelemetry, Telemetry};
use hpp_schema::{FileRole, Provider};
use serde::Serialize;

/// One way that weights came while tokens were decoded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Link {
    /// `to gpu0`, or `disk`.
    pub name: String,
    /// Bytes over the time in which something was brought, in 1e9 bytes a second.
    pub gb_per_second: f64,
    /// The same of the way by itself, measured right after.
    pub bare_gb_per_second: f64,
    /// One over the other.
    pub share: f64,
}

impl Link {
    fn new(name: String, tokens: &[Token], which: impl Fn(&Token) -> Option<&Brought>, bare: f64) -> Option<Self> {
        let brought = || tokens.iter().filter_map(&which);
        let (bytes, busy): (f64, f64) =
            (brought().map(|brought| brought.bytes).sum(), brought().map(|brought| brought.busy_ms).sum());
        let gb_per_second = bytes / busy / 1e6;
        let share = gb_per_second / bare;
        share.is_finite().then_some(Link { name, gb_per_second, bare_gb_per_second: bare, share })
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let Link { name, gb_per_second, bare_gb_per_second, share } = self;
        format!(
            "{name}: weights came at {gb_per_second:.2} GB/s, {:.0} % of the {bare_gb_per_second:.2} GB/s of this way alone\n",
            100.0 * share
        )
    }
}

/// All ways that weights came in a run, measured by themselves now, when nothing of the plan is loaded any more. A way that cannot be
/// measured is left out, which is said.
pub(super) fn links(
    machine: &Machine,
    plan: &PlanFile,
    telemetry: &Telemetry,
    tokens: &[Token],
    console: &Console,
) -> Vec<Link> {
    let mut found = Vec::new();
    let mut put = |link: Option<Link>| found.extend(link);
    let failed = |name: &str, error: ExecError| console.detail(&format!("{name} by itself: {error}"));
    let streaming: Vec<&str> =
        plan.plan.devices.iter().filter(|device| device.ring.is_some()).map(|device| &*device.name).collect();
    let streams = |stage: &&StageTelemetry| stage.provider != Provider::Cpu && streaming.contains(&&*stage.device);
    let stage = telemetry.stages.iter().find(streams).filter(|_| tokens.iter().any(|token| token.streamed.is_some()));
    if let Some(stage) = stage {
        // What several devices were brought is known together only, and held against the way to the first.
        let name = format!("to {}", streaming.join(", "));
        match bare_copy(machine.backend(), stage.provider, &stage.device) {
            Ok(bare) => put(Link::new(name, tokens, |token| token.streamed.as_ref(), bare)),
            Err(error) => failed(&name, error.into()),
        }
    }
    if tokens.iter().any(|token| token.disk.is_some()) {
        let weights = plan.plan.files.iter().filter(|file| file.role == FileRole::Weights);
        let largest = weights.max_by_key(|file| file.bytes).map(|file| plan.dir.join(&file.path));
        match largest.map(|file| bare_reads(&file)) {
            Some(Ok(bare)) => put(Link::new("disk".into(), tokens, |token| token.disk.as_ref(), bare)),
            Some(Err(error)) => failed("the disk", error.into()),
            None => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_the_way_alone() {
        let token = |bytes, busy_ms| Token {
            ms: 0.0,
            compute_ms: Default::default(),
            transfer_ms: 0.0,
            transferred_bytes: 0.0,
            streamed: Some(Brought { bytes, busy_ms, ..Brought::default() }),
            disk: None,
            rest_ms: 0.0,
        };
        let tokens = [token(4e6, 1.0), token(2e6, 2.0)];
        let link = Link::new("to gpu0".into(), &tokens, |token| token.streamed.as_ref(), 4.0).unwrap();
        assert_eq!((link.gb_per_second, link.share), (2.0, 0.5));
        assert_eq!(link.line(), "to gpu0: weights came at 2.00 GB/s, 50 % of the 4.00 GB/s of this way alone\n");
        assert_eq!(Link::new("disk".into(), &tokens, |token| token.disk.as_ref(), 4.0), None);
    }
}
