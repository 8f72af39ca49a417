//! How fast weights were transferred, compared with the bandwidth of the same path alone: a plain copy to the device, direct reads of
//! the disk.

use super::token_times::{TokenTimes, WeightTransfer};
use crate::error::ExecError;
use crate::measure::{copy_bandwidth, direct_read_bandwidth};
use crate::runtime::OnnxRuntime;
use hpp_engine::{StageTelemetry, Telemetry};
use hpp_generate::PlanFile;
use hpp_schema::{FileRole, Provider};
use serde::Serialize;

/// The name of the path from the disk.
const DISK: &str = "disk";

/// A path by which weights were transferred while tokens were decoded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct WeightPath {
    /// `to gpu0`, or `disk`.
    pub name: String,
    /// Bytes over the time in which transfers were in progress, in 1e9 bytes a second.
    pub gb_per_second: f64,
    /// Bandwidth of the path alone, measured after the runs.
    pub bare_gb_per_second: f64,
    /// The first over the second.
    pub share: f64,
}

impl WeightPath {
    /// `None` if nothing was transferred.
    fn new<'t>(
        name: String,
        transfers: impl Iterator<Item = &'t WeightTransfer> + Clone,
        bare_gb_per_second: f64,
    ) -> Option<Self> {
        let bytes: f64 = transfers.clone().map(|transfer| transfer.bytes).sum();
        let busy_ms: f64 = transfers.map(|transfer| transfer.busy_ms).sum();
        let gb_per_second = bytes / busy_ms / 1e6;
        let share = gb_per_second / bare_gb_per_second;
        share.is_finite().then_some(WeightPath { name, gb_per_second, bare_gb_per_second, share })
    }

    /// One line for people. It says "of the measured passes", because another line about the disk covers all reads of a run.
    pub fn line(&self) -> String {
        let WeightPath { name, gb_per_second, bare_gb_per_second, share } = self;
        let from = if name == DISK { "from " } else { "" };
        format!(
            "{from}{name}: weights of the measured passes at {gb_per_second:.2} GB/s, {:.0} % of the {bare_gb_per_second:.2} GB/s of this path alone\n",
            100.0 * share
        )
    }
}

/// Measures each path by which weights were transferred in a run, alone, after the plan was unloaded. Logs and leaves out a path that cannot be
/// measured.
pub(super) fn weight_paths(
    runtime: &OnnxRuntime,
    plan: &PlanFile,
    telemetry: &Telemetry,
    tokens: &[TokenTimes],
) -> Vec<WeightPath> {
    let streamed = tokens.iter().filter_map(|token| token.streamed.as_ref());
    let read = tokens.iter().filter_map(|token| token.disk.as_ref());
    let mut paths = Vec::new();
    if streamed.clone().next().is_some() {
        let devices = plan.plan.devices.iter().filter(|device| device.ring.is_some());
        let devices: Vec<&str> = devices.map(|device| &*device.name).collect();
        let streams = |stage: &&StageTelemetry| stage.provider != Provider::CPU && devices.contains(&&*stage.device);
        if let Some(stage) = telemetry.stages.iter().find(streams) {
            // Telemetry has one sum over all devices. It is compared with the path to the first device.
            let name = format!("to {}", devices.join(", "));
            match copy_bandwidth(runtime.backend(), stage.provider, &stage.device) {
                Ok(bare) => paths.extend(WeightPath::new(name, streamed, bare)),
                Err(error) => report_failure(&name, error.into()),
            }
        }
    }
    if read.clone().next().is_some() {
        let weights = plan.plan.files.iter().filter(|file| file.role == FileRole::Weights);
        if let Some(largest) = weights.max_by_key(|file| file.bytes) {
            match direct_read_bandwidth(&plan.dir.join(&largest.path)) {
                Ok(bare) => paths.extend(WeightPath::new(DISK.into(), read, bare)),
                Err(error) => report_failure("the disk", error.into()),
            }
        }
    }
    paths
}

fn report_failure(path: &str, error: ExecError) {
    tracing::info!(path, %error, "bandwidth not measured");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_relative_to_the_path_alone() {
        let transfer = |bytes, busy_ms| WeightTransfer { bytes, busy_ms, ..WeightTransfer::default() };
        let transfers = [transfer(4e6, 1.0), transfer(2e6, 2.0)];
        let path = WeightPath::new("to gpu0".into(), transfers.iter(), 4.0).unwrap();
        assert_eq!((path.gb_per_second, path.share), (2.0, 0.5));
        assert_eq!(
            path.line(),
            "to gpu0: weights of the measured passes at 2.00 GB/s, 50 % of the 4.00 GB/s of this path alone\n"
        );
        let disk = WeightPath::new(DISK.into(), transfers.iter(), 4.0).unwrap();
        assert!(disk.line().starts_with("from disk: weights of the measured passes"), "{}", disk.line());
        assert_eq!(WeightPath::new(DISK.into(), [].iter(), 4.0), None);
    }
}
