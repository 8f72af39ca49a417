//! Spellings of other programs.

use std::ffi::OsString;

/// Replaces spellings that clap cannot express, such as llama.cpp's `-ngl 20`, by ours.
pub fn normalize_spellings(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut options_ended = false;
    let normalize = |arg: OsString| {
        options_ended |= arg == "--";
        match arg.to_str() {
            Some("-ngl" | "--ngl") if !options_ended => "--gpu-layers".into(),
            Some("-sm" | "--sm") if !options_ended => "--split-mode".into(),
            Some("-cmoe") if !options_ended => "--cpu-moe".into(),
            Some("-ncmoe") if !options_ended => "--n-cpu-moe".into(),
            // clap would read these as a short option with a value.
            Some("-fa") if !options_ended => "--flash-attn".into(),
            Some("-md") if !options_ended => "--model-draft".into(),
            _ => arg,
        }
    };
    args.into_iter().map(normalize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spelling_is_replaced_before_the_end_of_options() {
        let ours = normalize_spellings(
            ["p", "-ngl", "20", "-sm", "row", "-cmoe", "-ncmoe", "2", "-fa", "--", "-ngl"].map(OsString::from),
        );
        assert_eq!(
            ours,
            [
                "p",
                "--gpu-layers",
                "20",
                "--split-mode",
                "row",
                "--cpu-moe",
                "--n-cpu-moe",
                "2",
                "--flash-attn",
                "--",
                "-ngl"
            ]
        );
    }
}
