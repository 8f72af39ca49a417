//! Names in `--providers` that may be mistyped. Any name is possible: the machine that runs the plan may have a library of that provider.

use hpp_schema::{PROVIDER_FACTS, Profile, Provider};

/// A sentence for each provider that neither HPP's table nor the profile has.
pub fn notes(providers: &[Provider], profile: Option<&Profile>) -> Vec<String> {
    let known: Vec<Provider> = PROVIDER_FACTS.iter().filter_map(|facts| facts.provider).collect();
    let known: Vec<&str> = known.iter().map(Provider::id).collect();
    let is_measured = |provider: &Provider| profile.is_some_and(|p| p.settings.providers.contains(provider));
    let unknown = providers.iter().filter(|provider| provider.facts().provider.is_none() && !is_measured(provider));
    let note = |provider: &Provider| {
        let name = provider.id();
        let meant = hpp_cli::nearest(name, known.iter().copied());
        let meant = meant.map_or(String::new(), |meant| format!("; did you mean {meant}?"));
        format!(
            "--providers: {name} is no provider that hpp-split knows (known: {}): hpp-exec needs its library, --ep-lib \
             {name}=PATH{meant}",
            known.join(", ")
        )
    };
    unknown.map(note).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unknown_providers_are_noted_and_close_names_suggested() {
        let of = |names: &[&str]| {
            let providers: Vec<Provider> = names.iter().map(|name| name.parse().unwrap()).collect();
            notes(&providers, None)
        };
        assert!(of(&["cuda", "openvino", "cpu"]).is_empty());
        let notes = of(&["openvno", "cpu", "foo"]);
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].contains("--ep-lib openvno=PATH; did you mean openvino?"), "{notes:?}");
        assert!(notes[1].starts_with("--providers: foo is no provider") && !notes[1].contains("mean"), "{notes:?}");
    }
}
