//! Whether a model generates text, as its `config.json` says: by the class of its architecture, else by its type.

use serde_json::Value;

/// Endings of the classes of models that predict the next token.
const GENERATING: [&str; 3] = ["ForCausalLM", "LMHeadModel", "ForConditionalGeneration"];

/// Endings of the classes of models that predict masked tokens or classify tokens or texts.
const OTHER_TASKS: [&str; 5] =
    ["ForMaskedLM", "ForTokenClassification", "ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice"];

/// Types of models whose tokens attend to later ones, unless `is_decoder` is set.
const ENCODERS: [&str; 32] = [
    "albert",
    "bert",
    "big_bird",
    "camembert",
    "canine",
    "convbert",
    "data2vec-text",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "esm",
    "eurobert",
    "fnet",
    "ibert",
    "longformer",
    "luke",
    "megatron-bert",
    "mobilebert",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "nystromformer",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "squeezebert",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
];

/// Whether a model with this `config.json` generates text; `None` if it does not say.
pub fn generates(config: &Value) -> Option<bool> {
    let classes = config["architectures"].as_array();
    let named = |endings: &[&str]| {
        let mut names = classes.into_iter().flatten().filter_map(Value::as_str);
        names.any(|name| endings.iter().any(|ending| name.ends_with(ending)))
    };
    let is_encoder = config["model_type"].as_str().is_some_and(|name| ENCODERS.contains(&name));
    match () {
        () if named(&GENERATING) => Some(true),
        () if named(&OTHER_TASKS) => Some(false),
        () if config["is_decoder"] == true => Some(true),
        () if is_encoder => Some(false),
        () => None,
    }
}
