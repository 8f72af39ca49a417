//! Which providers the partitions of a plan list.

use hpp_schema::{Provider, ProviderOptions};
use std::collections::BTreeMap;

/// The providers of a plan's partitions.
#[derive(Clone, Debug, Default)]
pub struct ProviderPolicy {
    /// For each block, its provider where it computes on the host; empty for the CPU provider everywhere.
    pub host: Vec<Provider>,
    /// The providers of partitions on GPUs, best first; `None` for those of the table.
    pub gpus: Option<Vec<Provider>>,
    /// Options of providers, which the plan records where a partition lists the provider.
    pub options: BTreeMap<Provider, ProviderOptions>,
}
