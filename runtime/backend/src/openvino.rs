//! OpenVINO's options: its plug-in takes properties of OpenVINO as one JSON text, `load_config`.

use hpp_schema::ProviderOptions;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The option that holds properties, by device.
const LOAD_CONFIG: &str = "load_config";

/// Collects options in capitals, such as `NUM_STREAMS`, into `load_config` for a device, with HPP's defaults. A `load_config` of the user
/// stays as it is; with such options beside it, the error says what to do.
///
/// Defaults: on the CPU the threads of this process, and computation in 32 bits, because OpenVINO's own default rounds activations to 16
/// bits on processors with 16-bit matrix units; on every device, `compiled` as the directory of compiled models.
pub(crate) fn complete(
    options: &mut ProviderOptions,
    device: &str,
    threads: usize,
    compiled: Option<&Path>,
) -> Result<(), String> {
    let is_property = |key: &str| key.starts_with(|c: char| c.is_ascii_uppercase());
    let given: Vec<String> = options.keys().filter(|key| is_property(key)).cloned().collect();
    if options.contains_key(LOAD_CONFIG) {
        return match given.first() {
            None => Ok(()),
            Some(key) => Err(format!("both {LOAD_CONFIG} and {key} are given; put {key} into {LOAD_CONFIG}")),
        };
    }
    let mut properties = Map::new();
    if device == "CPU" {
        properties.insert("INFERENCE_NUM_THREADS".into(), json!(threads.to_string()));
        properties.insert("INFERENCE_PRECISION_HINT".into(), json!("f32"));
    }
    if let Some(dir) = compiled.and_then(Path::to_str) {
        properties.insert("CACHE_DIR".into(), json!(dir));
    }
    for key in given {
        if let Some(value) = options.remove(&key) {
            properties.insert(key, Value::String(value));
        }
    }
    if !properties.is_empty() {
        options.insert(LOAD_CONFIG.to_owned(), json!({ device: properties }).to_string());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(options: &[(&str, &str)], device: &str) -> ProviderOptions {
        let mut options = options.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        complete(&mut options, device, 3, None).unwrap();
        options
    }

    #[test]
    fn properties_become_one_option() {
        let config = completed(&[("NUM_STREAMS", "1"), ("INFERENCE_NUM_THREADS", "2"), ("other", "x")], "CPU");
        let expected = r#"{"CPU":{"INFERENCE_NUM_THREADS":"2","INFERENCE_PRECISION_HINT":"f32","NUM_STREAMS":"1"}}"#;
        assert_eq!(config.get(LOAD_CONFIG).map(String::as_str), Some(expected));
        assert_eq!(config.get("other").map(String::as_str), Some("x"));
        assert_eq!(config.len(), 2);
        assert!(completed(&[], "GPU").is_empty(), "a GPU's defaults are OpenVINO's");
        let (mut kept, mut given) =
            (ProviderOptions::new(), ProviderOptions::from([("CACHE_DIR".into(), "/own".into())]));
        complete(&mut kept, "GPU", 3, Some(Path::new("/cache"))).unwrap();
        assert_eq!(kept[LOAD_CONFIG], r#"{"GPU":{"CACHE_DIR":"/cache"}}"#);
        complete(&mut given, "GPU", 3, Some(Path::new("/cache"))).unwrap();
        assert_eq!(given[LOAD_CONFIG], r#"{"GPU":{"CACHE_DIR":"/own"}}"#);
        assert_eq!(completed(&[("load_config", "{}")], "CPU")["load_config"], "{}");
    }

    #[test]
    fn properties_beside_load_config_are_refused() {
        let mut options =
            ProviderOptions::from([(LOAD_CONFIG.into(), "{}".into()), ("NUM_STREAMS".into(), "1".into())]);
        let refused = complete(&mut options, "CPU", 3, None);
        assert!(refused.is_err_and(|why| why.contains("put NUM_STREAMS into load_config")));
    }
}
