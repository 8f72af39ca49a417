//! The `hpp-exec` command line that runs a written plan, with the options its model needs.

use hpp_schema::{Dim, GenerationConfig, InputRole, ModelInput, ModelKind, Plan};
use std::path::Path;

/// `run it: hpp-exec ...`, with placeholders for the inputs that the user must supply.
pub fn run_hint(path: &Path, plan: &Plan) -> String {
    let path = quoted(&path.to_string_lossy());
    let user_inputs: Vec<String> = plan.user_inputs().iter().map(described).collect();
    let inputs = if user_inputs.is_empty() { "" } else { " --inputs in.npz" };
    let command = match plan.model.kind {
        ModelKind::SingleRun => format!("hpp-exec {path} --inputs in.npz --outputs out.npz"),
        _ => {
            let prompt = match &plan.generation {
                Some(GenerationConfig { tokenizer: Some(_), chat_template: Some(_), .. }) => "--chat --prompt \"...\"",
                Some(GenerationConfig { tokenizer: Some(_), .. }) => "--prompt \"...\"",
                _ => "--tokens 1,2,3",
            };
            let embeds = plan.model.inputs.iter().any(|input| input.role == InputRole::Embeddings);
            let table = if embeds { " --embeddings table.npy" } else { "" };
            format!("hpp-exec {path} {prompt}{inputs}{table}")
        }
    };
    let mut hint = format!("run it: {command}");
    if command.contains("--tokens") {
        hint += "\n  (the model has no tokenizer.json: give and read token ids as numbers)";
    }
    if command.contains("--embeddings") {
        hint +=
            "\n  (the model takes embeddings: table.npy holds one row for each token, floating-point [vocab, hidden])";
    }
    if !user_inputs.is_empty() {
        hint += &format!("\n  (in.npz, made with numpy.savez, holds {})", user_inputs.join(", "));
    }
    if plan.model.kind == ModelKind::SingleRun && !plan.states.is_empty() {
        hint += "\n  (hpp-exec computes one step of this model and keeps no state: give its caches. Those of the decoder are empty before the first \
                 step; those of an encoder come from the model that computes them, such as decoder_model.onnx beside a T5)";
    }
    hint
}

/// A path as a word of a POSIX shell, in single quotes where it has other characters than letters, digits and `/._-+@%:,=`, or
/// begins like an option.
fn quoted(path: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+@%:,=".contains(c);
    match path {
        "" => "''".to_owned(),
        _ if path.starts_with('-') => quoted(&format!("./{path}")),
        _ if path.chars().all(is_plain) => path.to_owned(),
        _ => format!("'{}'", path.replace('\'', r"'\''")),
    }
}

/// `name: dtype [shape]`.
fn described(input: &ModelInput) -> String {
    let sizes: Vec<String> = input.shape.iter().map(Dim::to_string).collect();
    format!("{}: {} [{}]", input.name, input.dtype, sizes.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_for_the_shell_where_needed() {
        for (path, word) in [
            ("a/my-model.hpp/plan.yaml", "a/my-model.hpp/plan.yaml"),
            ("my model.hpp/plan.yaml", "'my model.hpp/plan.yaml'"),
            ("it's/$HOME", r"'it'\''s/$HOME'"),
            ("-p/plan.yaml", "./-p/plan.yaml"),
        ] {
            assert_eq!(quoted(path), word);
        }
    }
}
