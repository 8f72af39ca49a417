//! How a model writes calls.

/// The form of calls in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times (Hermes, Qwen and many others).
    Hermes,
    /// The answer is `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>` (Llama 3).
    Llama,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` (Mistral).
    Mistral,
    /// `[TOOL_CALLS]name[ARGS]{...}`, any number of times (Mistral since version 11 of its tokenizer).
    MistralArgs,
}

impl ToolFormat {
    /// The format that a chat template shows to the model.
    pub fn of_template(source: &str) -> Self {
        if source.contains("[TOOL_CALLS]") {
            return if source.contains("[ARGS]") { ToolFormat::MistralArgs } else { ToolFormat::Mistral };
        }
        let is_llama = ["<|python_tag|>", "<|eom_id|>", "\"parameters\": dictionary of argument"];
        match is_llama.iter().any(|text| source.contains(text)) && !source.contains("<tool_call>") {
            true => ToolFormat::Llama,
            false => ToolFormat::Hermes,
        }
    }

    /// What stands before a call.
    pub fn open_marker(self) -> &'static str {
        match self {
            ToolFormat::Hermes => "<tool_call>",
            ToolFormat::Llama => "<|python_tag|>",
            ToolFormat::Mistral | ToolFormat::MistralArgs => "[TOOL_CALLS]",
        }
    }

    /// What stands after a call.
    pub fn close_marker(self) -> Option<&'static str> {
        (self == ToolFormat::Hermes).then_some("</tool_call>")
    }

    /// All markers. A vocabulary may have a special token for each, which must be part of the answer's text then.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            ToolFormat::Hermes => &["<tool_call>", "</tool_call>"],
            ToolFormat::Llama => &["<|python_tag|>"],
            ToolFormat::Mistral => &["[TOOL_CALLS]"],
            ToolFormat::MistralArgs => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        }
    }

    /// The name of the field with the arguments.
    pub fn arguments_field(self) -> &'static str {
        if self == ToolFormat::Llama { "parameters" } else { "arguments" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_show_their_format() {
        for (source, format) in [
            ("...within <tool_call></tool_call> XML tags:\n<tool_call>", ToolFormat::Hermes),
            ("{{- \"[TOOL_CALLS] [\" }}", ToolFormat::Mistral),
            ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", ToolFormat::MistralArgs),
            ("{{- '<|python_tag|>' + ... }} {% if tools %}", ToolFormat::Llama),
            ("{% if tools %}{{ tools }}", ToolFormat::Hermes),
        ] {
            assert_eq!(ToolFormat::of_template(source), format, "{source}");
        }
    }
}
