//! Providers on command lines: `--ep-lib NAME=PATH` and `--ep-option NAME.KEY=VALUE`.

use super::{Provider, ProviderNameError, ProviderOptions};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The library of a provider, as `NAME=PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderLibraryArg {
    /// The provider.
    pub provider: Provider,
    /// Its library.
    pub path: PathBuf,
}

/// An option of a provider, as `NAME.KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderOptionArg {
    /// The provider.
    pub provider: Provider,
    /// The option.
    pub key: String,
    /// Its value.
    pub value: String,
}

/// An argument that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProviderArgError {
    /// The name of the provider.
    #[error(transparent)]
    Name(#[from] ProviderNameError),
    /// `NAME=PATH` was expected.
    #[error("{0:?} is not NAME=PATH, such as npu=/opt/npu/libonnxruntime_providers_npu.so")]
    Library(String),
    /// `NAME.KEY=VALUE` was expected.
    #[error("{0:?} is not NAME.KEY=VALUE, such as openvino.device_type=GPU")]
    Option(String),
    /// The CPU provider has no library and no options.
    #[error(
        "the cpu provider is part of ONNX Runtime, which HPP configures: it has no library and no options of its own"
    )]
    Cpu,
    /// HPP configures this provider itself.
    #[error("{0} takes no options from HPP's command line: HPP configures it")]
    Configured(&'static str),
}

impl FromStr for ProviderLibraryArg {
    type Err = ProviderArgError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('=').filter(|(_, path)| !path.is_empty());
        let (name, path) = parts.ok_or_else(|| ProviderArgError::Library(text.to_owned()))?;
        let provider: Provider = name.trim().parse()?;
        if provider == Provider::CPU {
            return Err(ProviderArgError::Cpu);
        }
        Ok(ProviderLibraryArg { provider, path: PathBuf::from(path) })
    }
}

impl FromStr for ProviderOptionArg {
    type Err = ProviderArgError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ProviderArgError::Option(text.to_owned());
        let (name, option) = text.split_once('.').ok_or_else(wrong)?;
        let (key, value) = option.split_once('=').ok_or_else(wrong)?;
        let provider: Provider = name.trim().parse()?;
        if key.is_empty() || key.contains('\0') || value.contains('\0') {
            return Err(wrong());
        }
        match provider.facts().title {
            Some(_) if provider == Provider::CPU => Err(ProviderArgError::Cpu),
            Some(title) if !provider.facts().takes_options => Err(ProviderArgError::Configured(title)),
            _ => Ok(ProviderOptionArg { provider, key: key.to_owned(), value: value.to_owned() }),
        }
    }
}

impl fmt::Display for ProviderLibraryArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.provider.id(), self.path.display())
    }
}

impl fmt::Display for ProviderOptionArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}={}", self.provider.id(), self.key, self.value)
    }
}

/// The libraries by provider; of several for one provider, the last.
pub fn provider_libraries(arguments: &[ProviderLibraryArg]) -> BTreeMap<Provider, PathBuf> {
    arguments.iter().map(|argument| (argument.provider, argument.path.clone())).collect()
}

/// The options by provider; of several for one key, the last.
pub fn provider_options(arguments: &[ProviderOptionArg]) -> BTreeMap<Provider, ProviderOptions> {
    let mut all: BTreeMap<Provider, ProviderOptions> = BTreeMap::new();
    for ProviderOptionArg { provider, key, value } in arguments {
        all.entry(*provider).or_default().insert(key.clone(), value.clone());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_has_a_name_and_a_path() {
        let argument: ProviderLibraryArg = "npu=/x/y=z.so".parse().unwrap();
        assert_eq!((argument.provider.id(), argument.to_string()), ("npu", "npu=/x/y=z.so".to_owned()));
        for (text, why) in
            [("npu", "NAME=PATH"), ("npu=", "NAME=PATH"), ("N P=x", "cannot be the name"), ("cpu=x", "part of")]
        {
            let error = text.parse::<ProviderLibraryArg>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn an_option_has_a_provider_a_key_and_a_value() {
        let argument: ProviderOptionArg = "openvino.load_config={\"CPU\":{\"A.B\":\"=\"}}".parse().unwrap();
        assert_eq!((argument.key.as_str(), argument.value.as_str()), ("load_config", "{\"CPU\":{\"A.B\":\"=\"}}"));
        assert_eq!(argument.to_string().parse(), Ok(argument));
        for (text, why) in [
            ("device_type=GPU", "NAME.KEY=VALUE"),
            ("openvino.device_type", "NAME.KEY=VALUE"),
            ("openvino.=GPU", "NAME.KEY=VALUE"),
            ("Open VINO.a=b", "cannot be the name"),
            ("cuda.device_id=1", "CUDA takes no options"),
            ("cpu.threads=1", "part of ONNX Runtime"),
        ] {
            let error = text.parse::<ProviderOptionArg>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        let all = ["a.x=1", "a.x=2", "b.y=3"].map(|text| text.parse().unwrap());
        let options = provider_options(&all);
        assert_eq!((options.len(), options[&"a".parse().unwrap()]["x"].as_str()), (2, "2"));
    }
}
