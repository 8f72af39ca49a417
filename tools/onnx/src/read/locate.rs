//! Finds the ONNX file for a path: a file, or a directory in the layout of an exporter.

use super::formats::Format;
use crate::weights::directory_of;
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

/// File names that exporters use for the generating model, in order of preference.
const KNOWN: [&str; 4] =
    ["model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx", "decoder_model.onnx"];

/// The file in a directory that hpp-split wrote.
const PLAN: &str = "plan.yaml";
/// The unsplit model in that directory, where the plan holds weights of its own.
const WHOLE: &str = "whole.onnx";

/// Maximum size of a configuration; real ones have a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The reason why no ONNX file was chosen.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LocateError {
    #[error("cannot look for a model at {path}")]
    Io { path: PathBuf, source: io::Error },
    #[error("there is no model at {path}: no such file or directory")]
    Missing { path: PathBuf },
    #[error("there is no ONNX file in {dir} (looked for {}, and any other *.onnx)", KNOWN.join(", "))]
    NoneIn { dir: PathBuf },
    #[error("{dir} holds several ONNX files and none has a usual name; give one of: {}", names.join(", "))]
    Several { dir: PathBuf, names: Vec<String> },
    #[error("{config} names the model file {filename:?}, which is not a file inside that directory")]
    ConfigNames { config: PathBuf, filename: String },
    #[error("{path} is a plan, not a model")]
    IsPlan { path: PathBuf },
    #[error("{dir} looks like the directory of a plan that lost its plan.yaml: it holds {}", names.join(", "))]
    LostPlan { dir: PathBuf, names: Vec<String> },
    #[error("{path} is {format}, not an ONNX model")]
    OtherFormat { path: PathBuf, format: Format },
}

const GIVE_MODEL: &str = "give an ONNX file, or the directory that an exporter wrote";

impl LocateError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            LocateError::OtherFormat { path, format } => Some(match format {
                Format::Json(_) => hint_beside(path).unwrap_or_else(|| format.export(path)),
                _ => format.export(path),
            }),
            LocateError::Missing { path } => Some(hpp_io::hub_hint(path).unwrap_or_else(|| GIVE_MODEL.to_owned())),
            LocateError::NoneIn { .. } => {
                Some("give the directory of one model, which holds an .onnx file, or the file itself".to_owned())
            }
            LocateError::ConfigNames { .. } => {
                Some("correct model.decoder.filename in it, or give the ONNX file itself".to_owned())
            }
            LocateError::IsPlan { path } => {
                let dir = if path.is_dir() { Some(path.as_path()) } else { path.parent() };
                let whole = dir.map(|dir| dir.join(WHOLE)).filter(|whole| whole.is_file());
                let run = "hpp-exec runs it; here, give the model that it was made from";
                Some(match whole {
                    Some(whole) => format!("{run}; its unsplit model is {}", whole.display()),
                    None => run.to_owned(),
                })
            }
            LocateError::LostPlan { .. } => {
                Some("make the plan again from its model with hpp-split, or put its plan.yaml back".to_owned())
            }
            LocateError::Io { .. } | LocateError::Several { .. } => None,
        }
    }
}

/// A hint for a file that lies beside a model: which path to give instead.
fn hint_beside(file: &Path) -> Option<String> {
    let dir = directory_of(file);
    match in_directory(dir) {
        Ok(model) => Some(format!("give the model's directory, {}, or its file, {}", dir.display(), model.display())),
        Err(LocateError::OtherFormat { path, format }) if !matches!(format, Format::Json(_)) => {
            Some(format!("{} is {format}: {}", path.display(), format.export(&path)))
        }
        Err(_) => None,
    }
}

/// The ONNX file at or below `path`.
pub fn locate(path: &Path) -> Result<PathBuf, LocateError> {
    let found = match fs::metadata(path) {
        Ok(about) if about.is_dir() => in_directory(path),
        Ok(_) if path.file_name().is_some_and(|name| name == PLAN) => {
            Err(LocateError::IsPlan { path: path.to_owned() })
        }
        Ok(_) => Ok(path.to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(LocateError::Missing { path: path.to_owned() }),
        Err(source) => Err(LocateError::Io { path: path.to_owned(), source }),
    };
    let path = found?;
    match Format::of_file(&path) {
        Some(format) => Err(LocateError::OtherFormat { path, format }),
        None => Ok(path),
    }
}

fn in_directory(dir: &Path) -> Result<PathBuf, LocateError> {
    if let Some(named) = named_by_genai(dir)? {
        return Ok(named);
    }
    if let Some(known) = KNOWN.iter().map(|name| dir.join(name)).find(|path| path.is_file()) {
        return Ok(known);
    }
    let mut names = onnx_files(dir)?;
    match names.len() {
        1.. if !dir.join(PLAN).is_file() && names.iter().any(|name| is_of_plan(name)) => {
            Err(LocateError::LostPlan { dir: dir.to_owned(), names })
        }
        1 => Ok(dir.join(names.remove(0))),
        0 if dir.join("onnx").is_dir() => in_directory(&dir.join("onnx")),
        0 => Err(match Format::of_directory(dir) {
            Some((path, format)) => LocateError::OtherFormat { path, format },
            None => LocateError::NoneIn { dir: dir.to_owned() },
        }),
        _ if dir.join(PLAN).is_file() => Err(LocateError::IsPlan { path: dir.to_owned() }),
        _ => Err(LocateError::Several { dir: dir.to_owned(), names }),
    }
}

/// Whether hpp-split gives partitions this name: `cpu_0.onnx`, `gpu_12.onnx`.
fn is_of_plan(name: &str) -> bool {
    let number = name.strip_suffix(".onnx").and_then(|name| name.strip_prefix("gpu_").or(name.strip_prefix("cpu_")));
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// The other ONNX files in the directory in which [`locate`] chose `chosen` by its name. Empty if a configuration names the file.
pub fn passed_over(path: &Path, chosen: &Path) -> Vec<String> {
    let dir = directory_of(chosen);
    if !path.is_dir() || dir.join("genai_config.json").is_file() {
        return vec![];
    }
    let mut names = onnx_files(dir).unwrap_or_default();
    names.retain(|name| chosen.file_name() != Some(name.as_ref()));
    names
}

/// The decoder's file according to the configuration of ONNX Runtime GenAI, if there is one.
fn named_by_genai(dir: &Path) -> Result<Option<PathBuf>, LocateError> {
    let config = dir.join("genai_config.json");
    let text = match hpp_io::read_text(&config, MAX_CONFIG_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(LocateError::Io { path: config, source }),
    };
    let json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let Some(filename) = json["model"]["decoder"]["filename"].as_str() else { return Ok(None) };
    let inside = Path::new(filename).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    let path = dir.join(filename);
    if !inside || !path.is_file() {
        // A plan has a copy of its model's configuration.
        if dir.join(PLAN).is_file() {
            return Err(LocateError::IsPlan { path: dir.to_owned() });
        }
        let names = onnx_files(dir)?;
        if names.iter().any(|name| is_of_plan(name)) {
            return Err(LocateError::LostPlan { dir: dir.to_owned(), names });
        }
        return Err(LocateError::ConfigNames { config, filename: filename.into() });
    }
    Ok(Some(path))
}

fn onnx_files(dir: &Path) -> Result<Vec<String>, LocateError> {
    let failed = |source| LocateError::Io { path: dir.to_owned(), source };
    let mut names = vec![];
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|e| e == "onnx") && path.is_file() {
            names.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir_with(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, if path.extension().is_some_and(|e| e == "onnx") { "\x08" } else { "{}" }).unwrap();
        }
        dir
    }

    fn chosen(names: &[&str]) -> String {
        let dir = dir_with(names);
        locate(dir.path()).unwrap().strip_prefix(dir.path()).unwrap().to_string_lossy().into_owned()
    }

    #[test]
    fn directories_as_exporters_leave_them() {
        assert_eq!(chosen(&["model.onnx", "other.onnx"]), "model.onnx");
        assert_eq!(
            chosen(&["decoder_model.onnx", "decoder_model_merged.onnx", "encoder_model.onnx"]),
            "decoder_model_merged.onnx"
        );
        assert_eq!(chosen(&["decoder_model.onnx", "decoder_with_past_model.onnx"]), "decoder_with_past_model.onnx");
        assert_eq!(chosen(&["odd_name.onnx", "config.json"]), "odd_name.onnx");
        assert_eq!(chosen(&["config.json", "onnx/model.onnx", "onnx/model_q4.onnx"]), "onnx/model.onnx");
    }

    #[test]
    fn files_that_were_passed_over_are_known() {
        let names = ["decoder_model.onnx", "decoder_model_merged.onnx", "encoder_model.onnx"];
        let dir = dir_with(&names);
        let chosen = locate(dir.path()).unwrap();
        assert_eq!(passed_over(dir.path(), &chosen), ["decoder_model.onnx", "encoder_model.onnx"]);
        assert!(passed_over(&chosen, &chosen).is_empty(), "the user chose it");
    }

    #[test]
    fn several_unknown_names_are_listed() {
        let dir = dir_with(&["b.onnx", "a.onnx"]);
        let error = locate(dir.path()).unwrap_err();
        assert!(error.to_string().contains("a.onnx, b.onnx"), "{error}");
        let empty = dir_with(&["README.md"]);
        assert!(matches!(locate(empty.path()), Err(LocateError::NoneIn { .. })));
        assert!(matches!(locate(&empty.path().join("absent")), Err(LocateError::Missing { .. })));
    }

    #[test]
    fn a_plan_without_its_plan_file_is_recognised() {
        for names in [&["cpu_0.onnx"][..], &["cpu_0.onnx", "gpu_12.onnx", "tapped.onnx"]] {
            let error = locate(dir_with(names).path()).unwrap_err();
            assert!(error.to_string().contains("plan.yaml") && error.to_string().contains(names[0]), "{error}");
            assert!(error.hint().is_some_and(|hint| hint.contains("hpp-split")), "{error}");
        }
        // A plan has a copy of its model's configuration.
        let dir = dir_with(&["cpu_0.onnx"]);
        fs::write(dir.path().join("genai_config.json"), r#"{"model":{"decoder":{"filename":"m.onnx"}}}"#).unwrap();
        assert!(matches!(locate(dir.path()), Err(LocateError::LostPlan { .. })));
        assert_eq!(chosen(&["cpu_int4.onnx"]), "cpu_int4.onnx");
    }

    #[test]
    fn the_genai_configuration_names_the_decoder_but_cannot_leave() {
        let dir = dir_with(&["model.onnx", "text.onnx"]);
        let config = |name: &str| format!(r#"{{"model":{{"decoder":{{"filename":{name:?}}}}}}}"#);
        fs::write(dir.path().join("genai_config.json"), config("text.onnx")).unwrap();
        assert!(locate(dir.path()).unwrap().ends_with("text.onnx"));
        for hostile in ["../model.onnx", "/etc/passwd", "absent.onnx"] {
            fs::write(dir.path().join("genai_config.json"), config(hostile)).unwrap();
            assert!(matches!(locate(dir.path()), Err(LocateError::ConfigNames { .. })), "{hostile}");
        }
    }

    #[test]
    fn plans_texts_and_lfs_pointers_are_recognised() {
        let dir = dir_with(&["cpu_0.onnx", "tapped.onnx", "plan.yaml"]);
        for path in [dir.path().to_owned(), dir.path().join("plan.yaml")] {
            let error = locate(&path).unwrap_err();
            assert!(matches!(error, LocateError::IsPlan { .. }) && error.hint().is_some(), "{error}");
        }
        let refusal_of = |contents: &str| {
            let file = dir.path().join("model.onnx");
            fs::write(&file, contents).unwrap();
            locate(&file).unwrap_err()
        };
        let pointer = refusal_of("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n");
        assert!(pointer.hint().is_some_and(|hint| hint.contains("git lfs pull")), "{pointer}");
        assert!(refusal_of("<!DOCTYPE html>").to_string().contains("a text file"));
        // The same where the directory is given.
        fs::remove_file(dir.path().join("plan.yaml")).unwrap();
        assert!(locate(dir.path()).unwrap_err().to_string().contains("a text file"));
    }

    #[test]
    fn a_json_file_of_a_model_is_named_with_the_model_beside_it() {
        let names = ["tokenizer.json", "config.json", "generation_config.json", "genai_config.json"];
        let kinds =
            ["tokenizer", "configuration", "settings of text generation", "configuration of ONNX Runtime GenAI"];
        let dir = dir_with(&[&names[..], &["model.onnx"]].concat());
        for (name, kind) in names.into_iter().zip(kinds) {
            let error = locate(&dir.path().join(name)).unwrap_err();
            let (said, hint) = (error.to_string(), error.hint().unwrap_or_default());
            assert!(said.contains(name) && said.contains(kind), "{said}");
            assert!(hint.contains(&*dir.path().to_string_lossy()) && hint.contains("model.onnx"), "{name}: {hint}");
        }
        assert!(locate(dir.path()).unwrap().ends_with("model.onnx"), "the directory's texts are not its model");
        let alone = dir_with(&["tokenizer.json"]);
        let hint = locate(&alone.path().join("tokenizer.json")).unwrap_err().hint().unwrap_or_default();
        assert!(hint.contains("the directory of the model") && hint.contains(".onnx"), "{hint}");
        // A checkpoint's configuration: the checkpoint must be exported.
        let checkpoint = dir_with(&["config.json"]);
        let hint = locate(&checkpoint.path().join("config.json")).unwrap_err().hint().unwrap_or_default();
        assert!(hint.contains("a Hugging Face checkpoint") && hint.contains("export it"), "{hint}");
    }
}
