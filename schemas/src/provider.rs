//! Execution providers by name, and what is known about each.
//!
//! A name is open: any provider that is installed or that the user names can be planned for and run. [`ProviderFacts`] holds what is known about a
//! provider. Providers that are not in the table get [safe defaults](ProviderFacts::UNKNOWN). docs/PROVIDERS.md shows the table.

mod arguments;

pub use arguments::*;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Most characters of a provider's name.
const LONGEST_NAME: usize = 31;

/// An ONNX Runtime execution provider, by its name in plans and options: `cpu`, `cuda`, `openvino`, ...
///
/// Lower-case letters, digits, `-` and `_`, at most 31 characters, beginning with a letter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Provider {
    /// The name, padded with zeros.
    letters: [u8; LONGEST_NAME],
}

/// Options of one provider: key -> value, as the provider itself documents them.
pub type ProviderOptions = BTreeMap<String, String>;

impl Provider {
    /// The CPU provider, which every ONNX Runtime has.
    pub const CPU: Provider = Provider::known("cpu");
    /// NVIDIA CUDA.
    pub const CUDA: Provider = Provider::known("cuda");
    /// NVIDIA TensorRT for RTX.
    pub const TENSORRT_RTX: Provider = Provider::known("tensorrt-rtx");
    /// The WebGPU plug-in (Vulkan, Metal or Direct3D 12 underneath).
    pub const WEBGPU: Provider = Provider::known("webgpu");
    /// DirectML, on Windows.
    pub const DIRECTML: Provider = Provider::known("directml");
    /// Intel's OpenVINO plug-in.
    pub const OPENVINO: Provider = Provider::known("openvino");

    const fn known(name: &str) -> Provider {
        let (bytes, mut letters, mut at) = (name.as_bytes(), [0; LONGEST_NAME], 0);
        while at < bytes.len() {
            letters[at] = bytes[at];
            at += 1;
        }
        Provider { letters }
    }

    /// Its name in plans and options.
    pub fn id(&self) -> &str {
        let length = self.letters.iter().position(|letter| *letter == 0).unwrap_or(LONGEST_NAME);
        std::str::from_utf8(&self.letters[..length]).unwrap_or_default()
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        self.facts().title.unwrap_or_else(|| self.id())
    }

    /// What is known about it.
    pub fn facts(self) -> &'static ProviderFacts {
        PROVIDER_FACTS.iter().find(|facts| facts.provider == Some(self)).unwrap_or(&ProviderFacts::UNKNOWN)
    }

    /// Whether its sessions take tensors in host memory, so that it can compute partitions of the host.
    pub fn uses_host_memory(self) -> bool {
        self.facts().tensors == TensorMemory::Host
    }

    /// The providers to try for a partition on a GPU, best first, the CPU last. All partitions of a GPU share its memory. So if some of them have
    /// weights as inputs (`weights_are_inputs`), providers that do not accept such weights are left out.
    pub fn for_gpus(weights_are_inputs: bool) -> Vec<Provider> {
        let mut ranked: Vec<(u8, Provider)> = PROVIDER_FACTS
            .iter()
            .filter(|facts| facts.weights_as_inputs || !weights_are_inputs)
            .filter_map(|facts| facts.rank_on_gpus.zip(facts.provider))
            .collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, provider)| provider).chain([Provider::CPU]).collect()
    }
}

/// A name that no provider can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} cannot be the name of a provider: at most {LONGEST_NAME} lower-case letters, digits, '-' and '_', beginning with a letter"
)]
pub struct ProviderNameError {
    name: String,
}

impl FromStr for Provider {
    type Err = ProviderNameError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let is_letter = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(byte);
        let starts = name.as_bytes().first().is_some_and(u8::is_ascii_lowercase);
        if !starts || name.len() > LONGEST_NAME || !name.as_bytes().iter().all(is_letter) {
            return Err(ProviderNameError { name: name.chars().take(2 * LONGEST_NAME).collect() });
        }
        Ok(Provider::known(name))
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

impl Serialize for Provider {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.id())
    }
}

impl<'de> Deserialize<'de> for Provider {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl JsonSchema for Provider {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Provider".into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let known: Vec<&str> =
            PROVIDER_FACTS.iter().filter_map(|facts| facts.provider.as_ref()).map(Provider::id).collect();
        schemars::json_schema!({
            "description": "An ONNX Runtime execution provider by name. Any name is possible; the examples are those in HPP's table (docs/PROVIDERS.md).",
            "type": "string",
            "pattern": "^[a-z][a-z0-9_-]{0,30}$",
            "examples": known
        })
    }
}

/// The memory in which sessions of a provider expect their inputs and leave their outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMemory {
    /// Host memory. If the provider computes elsewhere, it copies by itself in each run.
    Host,
    /// The memory of its device: states, boundaries and streamed weights stay there.
    Device,
}

/// How far HPP's use of a provider has been tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// Every run of the test suite.
    InCi,
    /// Test runs on machines where the plug-in offers a device. Elsewhere, the suite says that it does not.
    WhereOffered,
    /// By hand on one machine. The test suite has no such device.
    ByHand,
    /// Never run.
    NeverRun,
}

/// How to find the library of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProviderLibrary {
    /// In ONNX Runtime's own library, if that was built with it.
    BuiltIn,
    /// Beside ONNX Runtime's library; the name lacks the system's prefix and suffix.
    Beside(&'static str),
    /// In the folder of a Python package of its own.
    Package {
        /// The folder in `site-packages`.
        folder: &'static str,
        /// The library without the system's prefix and suffix.
        library: &'static str,
    },
    /// Only where the user says, or in a Python package `onnxruntime_ep_NAME`.
    Named,
}

/// What is known about a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderFacts {
    /// The provider. `None` in the defaults for providers that are not in the table.
    pub provider: Option<Provider>,
    /// Its name in messages.
    pub title: Option<&'static str>,
    /// ONNX Runtime's name for it.
    pub ort_name: Option<&'static str>,
    /// Where its sessions expect tensors.
    pub tensors: TensorMemory,
    /// Whether weights may be inputs of a session, so that they can be streamed.
    pub weights_as_inputs: bool,
    /// Whether sessions take a stream of the caller, so that runs are asynchronous.
    pub user_streams: bool,
    /// Whether only one thread of a process may use it at a time.
    pub exclusive: bool,
    /// Its library.
    pub library: ProviderLibrary,
    /// The package on PyPI that has the library.
    pub package: Option<&'static str>,
    /// Its rank among the providers to try for a GPU, 0 first. `None` if plans name it only where the user asks for it or a profile measured it.
    pub rank_on_gpus: Option<u8>,
    /// A word in device names. The provider is tried only for devices whose name has it.
    pub only_on: Option<&'static str>,
    /// Options that HPP passes to it. The user's options replace them.
    pub default_options: &'static [(&'static str, &'static str)],
    /// Whether it takes the user's options in the session's provider options. HPP configures other providers itself.
    pub takes_options: bool,
    /// How far its use was tested.
    pub evidence: Evidence,
}

impl ProviderFacts {
    /// What is assumed of a provider that is not in the table: tensors in host memory, no weights as inputs, no streams, one thread at a time.
    pub const UNKNOWN: ProviderFacts = ProviderFacts {
        provider: None,
        title: None,
        ort_name: None,
        tensors: TensorMemory::Host,
        weights_as_inputs: false,
        user_streams: false,
        exclusive: true,
        library: ProviderLibrary::Named,
        package: None,
        rank_on_gpus: None,
        only_on: None,
        default_options: &[],
        takes_options: true,
        evidence: Evidence::NeverRun,
    };
}

/// The table of known providers, in the order in which they are listed.
pub const PROVIDER_FACTS: [ProviderFacts; 6] = [
    ProviderFacts {
        provider: Some(Provider::TENSORRT_RTX),
        title: Some("TensorRT-RTX"),
        ort_name: Some("NvTensorRTRTXExecutionProvider"),
        tensors: TensorMemory::Device,
        library: ProviderLibrary::Package {
            folder: "onnxruntime_ep_nv_tensorrt_rtx",
            library: "onnxruntime_providers_nv_tensorrt_rtx",
        },
        package: Some("onnxruntime-ep-nv-tensorrt-rtx"),
        rank_on_gpus: Some(0),
        only_on: Some("RTX"),
        ..ProviderFacts::UNKNOWN
    },
    ProviderFacts {
        provider: Some(Provider::CUDA),
        title: Some("CUDA"),
        ort_name: Some("CUDAExecutionProvider"),
        tensors: TensorMemory::Device,
        weights_as_inputs: true,
        user_streams: true,
        exclusive: false,
        library: ProviderLibrary::Beside("onnxruntime_providers_cuda"),
        package: Some("onnxruntime-gpu"),
        rank_on_gpus: Some(1),
        takes_options: false,
        evidence: Evidence::ByHand,
        ..ProviderFacts::UNKNOWN
    },
    ProviderFacts {
        provider: Some(Provider::WEBGPU),
        title: Some("WebGPU"),
        ort_name: Some("WebGpuExecutionProvider"),
        tensors: TensorMemory::Device,
        weights_as_inputs: true,
        library: ProviderLibrary::Package { folder: "onnxruntime_ep_webgpu", library: "onnxruntime_providers_webgpu" },
        package: Some("onnxruntime-ep-webgpu"),
        rank_on_gpus: Some(2),
        evidence: Evidence::InCi,
        ..ProviderFacts::UNKNOWN
    },
    ProviderFacts {
        provider: Some(Provider::DIRECTML),
        title: Some("DirectML"),
        ort_name: Some("DmlExecutionProvider"),
        library: ProviderLibrary::BuiltIn,
        package: Some("onnxruntime-directml"),
        rank_on_gpus: Some(3),
        ..ProviderFacts::UNKNOWN
    },
    ProviderFacts {
        provider: Some(Provider::OPENVINO),
        title: Some("OpenVINO"),
        ort_name: Some("OpenVINOExecutionProvider"),
        exclusive: false,
        library: ProviderLibrary::Package {
            folder: "onnxruntime_ep_openvino",
            library: "onnxruntime_providers_openvino_plugin",
        },
        package: Some("onnxruntime-ep-openvino"),
        evidence: Evidence::WhereOffered,
        ..ProviderFacts::UNKNOWN
    },
    ProviderFacts {
        provider: Some(Provider::CPU),
        title: Some("CPU"),
        ort_name: Some("CPUExecutionProvider"),
        exclusive: false,
        library: ProviderLibrary::BuiltIn,
        package: Some("onnxruntime"),
        takes_options: false,
        evidence: Evidence::InCi,
        ..ProviderFacts::UNKNOWN
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_open_and_bounded() {
        for name in ["cpu", "openvino", "nv-tensorrt_rtx-2", "a", "abcdefghijklmnopqrstuvwxyz01234"] {
            let provider: Provider = name.parse().unwrap();
            assert_eq!(provider.id(), name);
            assert_eq!(serde_json::from_value::<Provider>(serde_json::to_value(provider).unwrap()).unwrap(), provider);
        }
        for name in ["", "CPU", "1st", "-x", "a b", "a/b", "a.b", "ü", "abcdefghijklmnopqrstuvwxyz012345"] {
            assert!(name.parse::<Provider>().is_err(), "{name}");
        }
        assert_eq!("openvino".parse(), Ok(Provider::OPENVINO));
    }

    #[test]
    fn unknown_providers_get_safe_defaults() {
        let unknown: Provider = "mystery".parse().unwrap();
        assert_eq!((unknown.name(), Provider::CUDA.name()), ("mystery", "CUDA"));
        let facts = unknown.facts();
        assert_eq!((facts.tensors, facts.weights_as_inputs, facts.user_streams), (TensorMemory::Host, false, false));
        assert!(facts.exclusive && facts.rank_on_gpus.is_none());
    }

    #[test]
    fn the_documented_table_is_this_one() {
        let text = include_str!("../../docs/PROVIDERS.md");
        let yes_or_no = |yes: bool| if yes { "yes" } else { "no" };
        for facts in &PROVIDER_FACTS {
            let provider = facts.provider.unwrap();
            let start = format!("| `{}` |", provider.id());
            let row = text.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no row {start}"));
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let memory = if provider.uses_host_memory() { "host memory" } else { "device memory" };
            let flags = [facts.weights_as_inputs || provider == Provider::CPU, facts.user_streams, facts.exclusive];
            assert_eq!([&cells[2..3], &cells[3..6]].concat(), [&[memory][..], &flags.map(yes_or_no)].concat(), "{row}");
            let package = facts.package.filter(|_| provider != Provider::CPU);
            assert!(package.is_none_or(|package| row.contains(package)), "{row}");
            assert_eq!(row.contains("never run"), facts.evidence == Evidence::NeverRun, "{row}");
        }
    }

    #[test]
    fn the_policy_for_gpus_follows_the_table() {
        use Provider as P;
        assert_eq!(P::for_gpus(false), [P::TENSORRT_RTX, P::CUDA, P::WEBGPU, P::DIRECTML, P::CPU]);
        assert_eq!(P::for_gpus(true), [P::CUDA, P::WEBGPU, P::CPU], "streamed weights are inputs");
        assert_eq!(P::TENSORRT_RTX.facts().only_on, Some("RTX"));
    }
}
