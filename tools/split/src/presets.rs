//! Built-in machine descriptions: `--machine rtx4090`, `--machine list`.

use crate::amount::{MEASURED, digits};
use hpp_schema::Machine;
use std::collections::BTreeMap;

/// File names without `.yaml`, and contents.
const PRESETS: [(&str, &str); 4] = [
    ("h200-small-vram", include_str!("../../../fixtures/machines/h200-small-vram.yaml")),
    ("mini-pc", include_str!("../../../fixtures/machines/mini-pc.yaml")),
    ("rtx4060-laptop", include_str!("../../../fixtures/machines/rtx4060-laptop.yaml")),
    ("rtx4090-desktop", include_str!("../../../fixtures/machines/rtx4090-desktop.yaml")),
];

/// The value of `--machine` that lists the presets.
pub const LIST: &str = "list";

/// The text of the preset with this name, or of the only one whose name starts with these words.
pub fn find(name: &str) -> Option<&'static str> {
    let exact = PRESETS.iter().find(|(known, _)| *known == name);
    let begins = |known: &str| known.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'));
    let mut matches = PRESETS.iter().filter(|(known, _)| begins(known));
    let only = matches.next().filter(|_| matches.next().is_none());
    exact.or(only).map(|(_, text)| *text)
}

/// The names, separated by commas.
pub fn names() -> String {
    PRESETS.map(|(name, _)| name).join(", ")
}

/// One line for each preset.
pub fn list() -> String {
    let line = |(name, text): (&str, &str)| {
        let machine = Machine::from_yaml(text).ok()?;
        let gpus = machine.gpus.iter().map(|gpu| {
            let rate = digits(gpu.memory_gb_per_s, MEASURED);
            format!("{} with {} at {rate} GB/s", gpu.name, gpu.memory.human())
        });
        let gpus: Vec<String> = gpus.collect();
        let gpus = if gpus.is_empty() { "no GPU".to_owned() } else { gpus.join(", ") };
        let (ram, rate) = (machine.cpu.memory.human(), digits(machine.cpu.memory_gb_per_s, MEASURED));
        Some(format!("{name:<16}  {ram} of host memory at {rate} GB/s; {gpus}"))
    };
    PRESETS.into_iter().filter_map(line).collect::<Vec<_>>().join("\n")
}

/// The machine files of all presets as one JSON object, by name.
pub fn json() -> String {
    let machines = PRESETS.iter().filter_map(|(name, text)| Some((*name, Machine::from_yaml(text).ok()?)));
    serde_json::to_string_pretty(&machines.collect::<BTreeMap<_, _>>()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_valid_and_listed() {
        for (name, text) in PRESETS {
            assert_eq!(Machine::from_yaml(text).unwrap().check(), [], "{name}");
        }
        assert_eq!(list().lines().count(), PRESETS.len());
        let listed: BTreeMap<String, Machine> = serde_json::from_str(&json()).unwrap();
        assert!(listed.keys().map(String::as_str).eq(PRESETS.map(|(name, _)| name)));
    }

    #[test]
    fn the_first_words_of_a_name_are_enough() {
        assert_eq!(find("rtx4090"), find("rtx4090-desktop"));
        assert!(find("rtx4090").is_some_and(|text| text.contains("RTX 4090")));
        assert_eq!([find("rtx409"), find("rtx40"), find("rtx5090"), find("")], [None; 4]);
    }
}
