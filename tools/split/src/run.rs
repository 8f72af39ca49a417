//! The command that runs a plan: what it takes depends on the model.

use hpp_schema::{Dim, InputRole, ModelInput, ModelKind, Plan};
use std::path::Path;

/// `run it: hpp-exec ...`, with the inputs a person has to bring.
pub fn hint(path: &Path, plan: &Plan) -> String {
    let path = path.display();
    let brought = brought(plan);
    let inputs = if brought.is_empty() { "" } else { " --inputs in.npz" };
    let command = match plan.model.kind {
        ModelKind::SingleRun => format!("hpp-exec {path} --inputs in.npz --outputs out.npz"),
        _ => {
            let has_tokenizer = plan.generation.as_ref().is_some_and(|generation| generation.tokenizer.is_some());
            let prompt = if has_tokenizer { "--prompt \"...\"" } else { "--tokens 1,2,3" };
            let embeds = plan.model.inputs.iter().any(|input| input.role == InputRole::Embeddings);
            let table = if embeds { " --embeddings table.npy" } else { "" };
            format!("hpp-exec {path} {prompt}{inputs}{table}")
        }
    };
    let mut hint = format!("run it: {command}");
    if command.contains("--tokens") {
        hint += "\n  (the model has no tokenizer.json: tokens go in and come out as numbers)";
    }
    if command.contains("--embeddings") {
        hint +=
            "\n  (the model takes embeddings: table.npy holds one row for each token, floating-point [vocab, hidden])";
    }
    if !brought.is_empty() {
        hint += &format!("\n  (in.npz, made with numpy.savez, holds {})", brought.join(", "));
    }
    hint
}

/// Inputs that a person has to bring, as hpp-exec asks for them.
fn brought(plan: &Plan) -> Vec<String> {
    let once = plan.model.kind == ModelKind::SingleRun;
    let is_brought = |input: &&ModelInput| match input.role {
        InputRole::LogitPositions | InputRole::UseCacheBranch => false,
        InputRole::Free => true,
        _ => once,
    };
    let describe = |input: &ModelInput| {
        let sizes: Vec<String> = input.shape.iter().map(Dim::to_string).collect();
        format!("{}: {} [{}]", input.name, input.dtype, sizes.join(", "))
    };
    plan.model.inputs.iter().filter(is_brought).map(describe).collect()
}
