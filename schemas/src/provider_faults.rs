//! Operators that an execution provider computes wrongly, as measured. The planner places them on other providers, and
//! the runtime warns if the user forces such a placement.
//!
//! docs/PROVIDERS.md has the evidence for each row, and `tools/bench/provider_repeats.py` repeats the measurement.

use crate::Provider;

/// An operator that a provider computes wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderFault {
    /// The provider.
    pub provider: Provider,
    /// The operator's type, as in ONNX files.
    pub operator: &'static str,
    /// What goes wrong and when, as the end of a sentence.
    pub what: &'static str,
}

/// All known faults. Remove a row when `provider_repeats.py` finds no difference with the ONNX Runtime that the project
/// uses.
pub const PROVIDER_FAULTS: [ProviderFault; 1] = [ProviderFault {
    provider: Provider::WEBGPU,
    operator: "QMoE",
    what: "loses tokens of a prompt on their way to experts, at random: the same input gives other outputs from run to run",
}];

impl ProviderFault {
    /// The fault of an operator on a provider, if known.
    pub fn find(provider: Provider, operator: &str) -> Option<&'static ProviderFault> {
        PROVIDER_FAULTS.iter().find(|fault| fault.provider == provider && fault.operator == operator)
    }
}
