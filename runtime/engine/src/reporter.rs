//! Progress and warnings of the engine. The engine reports them; the binary decides what to draw and where.

use hpp_schema::Provider;
use std::collections::BTreeMap;
use std::path::Path;

/// Receives progress, warnings and the reasons of fallbacks. Every method may be ignored.
pub trait Reporter: Send + Sync {
    /// Files are being compared with what the plan recorded.
    fn checking_files(&self, _files: usize) {}
    /// Every byte of a file is being compared with the plan.
    fn comparing(&self, _file: &str, _bytes: u64) {}
    /// Partition `index` of `count` is being loaded.
    fn loading(&self, _partition: &str, _index: usize, _count: usize) {}
    /// The weights of a partition that is being loaded are written in the layout that kernels want, once for all later starts. `dir`
    /// holds those of all partitions.
    fn preparing(&self, _partition: &str, _dir: &Path) {}
    /// A partition runs on another provider than the plan prefers.
    fn fallback(&self, _partition: &str, _wanted: Provider, _got: Provider, _reason: &str) {}
    /// Something a person should know, once.
    fn warning(&self, _message: &str) {}
}

/// Discards all reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Reporter for Silent {}

/// Names for people, separated by commas. Of three or more with consecutive numbers (`gpu_0`, `gpu_1`, `gpu_2`) only the first and
/// last are listed.
pub fn listed<S: AsRef<str>>(names: &[S]) -> String {
    let counts_on = |a: &S, b: &S| {
        let (Some((own, a)), Some((same, b))) = (numbered(a.as_ref()), numbered(b.as_ref())) else { return false };
        own == same && a.checked_add(1) == Some(b)
    };
    let runs = names.chunk_by(counts_on).flat_map(|run| match run {
        [first, _, .., last] => vec![format!("{} to {}", first.as_ref(), last.as_ref())],
        few => few.iter().map(|name| name.as_ref().to_owned()).collect(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

/// A name and the number it ends with.
fn numbered(name: &str) -> Option<(&str, u64)> {
    let text = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
    Some((text, name[text.len()..].parse().ok()?))
}

/// A partition that does not run on a provider that the plan prefers ([`Reporter::fallback`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderFallback {
    /// The partition.
    pub partition: String,
    /// The provider that the plan prefers.
    pub wanted: Provider,
    /// The provider that it runs on.
    pub got: Provider,
    /// Why.
    pub reason: String,
}

/// One line for each reason why partitions do not run on the device of the plan. `has_device`: whether a provider has a device on this
/// machine. Partitions whose providers have no device on this machine share a line, whatever each provider reports.
pub fn fallback_warnings(fallbacks: &[ProviderFallback], has_device: impl Fn(Provider) -> bool) -> Vec<String> {
    let mut absent: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut failed: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for partition in fallbacks.chunk_by(|a, b| a.partition == b.partition) {
        let Some(ProviderFallback { partition: name, got, .. }) = partition.last() else { continue };
        let got_is_host = got.uses_host_memory();
        let got = if *got == Provider::CPU { "the CPU" } else { got.name() };
        let (with_device, without_device): (Vec<_>, Vec<_>) =
            partition.iter().partition(|fallback| has_device(fallback.wanted));
        for ProviderFallback { wanted, reason, .. } in &with_device {
            let why = format!("{got} instead of {}: {reason}", wanted.name());
            failed.entry(why).or_default().push(name);
        }
        // Plans list the providers of all GPUs: one that is not here is no news if another one's GPU computes.
        if with_device.is_empty() && got_is_host {
            let why = match &without_device[..] {
                [only] if only.wanted.uses_host_memory() => format!("{} is not usable here", only.wanted.name()),
                [only] => format!("{} finds no usable GPU here", only.wanted.name()),
                _ => "no usable GPU here".to_owned(),
            };
            absent.entry(format!("{got}: {why} (hpp-exec devices says why)")).or_default().push(name);
        }
    }
    let line = |(what, mut names): (String, Vec<&str>)| {
        names.dedup();
        names.sort_by_key(|name| numbered(name));
        format!("{} {} on {what}", listed(&names), if names.len() == 1 { "runs" } else { "run" })
    };
    failed.into_iter().chain(absent).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_count_on_are_their_first_and_last() {
        assert_eq!(listed(&["gpu_9", "gpu_10", "gpu_11", "cpu_12"]), "gpu_9 to gpu_11, cpu_12");
        assert_eq!(listed(&["gpu_0", "gpu_1", "gpu_3", "head"]), "gpu_0, gpu_1, gpu_3, head");
        assert_eq!(listed(&["2", "3", "4", "4"]), "2 to 4, 4");
        assert_eq!(listed::<&str>(&[]), "");
    }

    fn fallback(partition: &str, wanted: Provider, reason: &str) -> ProviderFallback {
        ProviderFallback { partition: partition.into(), wanted, got: Provider::CPU, reason: reason.into() }
    }

    #[test]
    fn partitions_without_a_usable_gpu_share_a_line() {
        let both = |name: &str| [Provider::CUDA, Provider::WEBGPU].map(|wanted| fallback(name, wanted, "no library"));
        let all: Vec<ProviderFallback> = ["gpu_0", "gpu_1", "gpu_2", "gpu_3"].into_iter().flat_map(both).collect();
        let one = ["gpu_0 to gpu_3 run on the CPU: no usable GPU here (hpp-exec devices says why)"];
        assert_eq!(fallback_warnings(&all, |_| false), one);
        let alternating = ["gpu_0", "cpu_0", "gpu_9", "cpu_1", "gpu_10", "cpu_2", "gpu_11"];
        let all: Vec<ProviderFallback> = alternating.into_iter().flat_map(both).collect();
        let lines =
            ["cpu_0 to cpu_2, gpu_0, gpu_9 to gpu_11 run on the CPU: no usable GPU here (hpp-exec devices says why)"];
        assert_eq!(fallback_warnings(&all, |_| false), lines);
        let only = [fallback("gpu_0", Provider::CUDA, "no library")];
        let lines = ["gpu_0 runs on the CPU: CUDA finds no usable GPU here (hpp-exec devices says why)"];
        assert_eq!(fallback_warnings(&only, |_| false), lines);
        let lines = ["cpu_0 runs on the CPU: OpenVINO is not usable here (hpp-exec devices says why)"];
        assert_eq!(fallback_warnings(&[fallback("cpu_0", Provider::OPENVINO, "no library")], |_| false), lines);
    }

    #[test]
    fn a_gpu_of_a_later_provider_is_what_the_plan_wants() {
        let cuda = ProviderFallback { got: Provider::WEBGPU, ..fallback("gpu_0", Provider::CUDA, "no library") };
        assert_eq!(fallback_warnings(std::slice::from_ref(&cuda), |_| false), [""; 0]);
        let lines = ["gpu_0 runs on WebGPU instead of CUDA: no library"];
        assert_eq!(fallback_warnings(&[cuda], |_| true), lines);
    }

    #[test]
    fn the_reason_of_a_provider_with_a_device_is_reported() {
        let all = [
            fallback("gpu_0", Provider::CUDA, "no library"),
            fallback("gpu_0", Provider::WEBGPU, "it does not compute in 16 bits"),
        ];
        let lines = ["gpu_0 runs on the CPU instead of WebGPU: it does not compute in 16 bits"];
        assert_eq!(fallback_warnings(&all, |provider| provider == Provider::WEBGPU), lines);
    }
}
