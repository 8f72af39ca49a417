//! Combines the sampling settings of a request with the defaults of the model's authors.

use super::{RandomSampling, SamplingMethod, SamplingParams};
use hpp_schema::SamplingDefaults;
use serde::Deserialize;
use std::hash::{BuildHasher, Hasher, RandomState};

/// The settings that a request gives. `None` takes the authors' default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingOverrides {
    /// See [`RandomSampling::temperature`]; 0 is a greedy choice.
    pub temperature: Option<f64>,
    /// See [`RandomSampling::top_k`].
    pub top_k: Option<usize>,
    /// See [`RandomSampling::top_p`].
    pub top_p: Option<f64>,
    /// See [`RandomSampling::min_p`].
    pub min_p: Option<f64>,
    /// See [`SamplingParams::repetition_penalty`].
    pub repetition_penalty: Option<f64>,
    /// See [`RandomSampling::seed`]; by default a new one.
    pub seed: Option<u64>,
}

/// A seed in JSON: any whole number of 64 bits, with or without a sign, because clients send both. -1 asks for a new seed, as in vLLM and
/// llama.cpp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "expected a whole number of 64 bits")]
pub enum JsonSeed {
    /// From 0 on.
    Unsigned(u64),
    /// Below 0.
    Signed(i64),
}

/// `top_k` in JSON: a whole number from 0 on, or -1, which other programs write for all tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "i64")]
pub struct JsonTopK(usize);

impl TryFrom<i64> for JsonTopK {
    type Error = &'static str;
    fn try_from(number: i64) -> Result<Self, Self::Error> {
        let number = if number == -1 { 0 } else { number };
        number.try_into().map(JsonTopK).map_err(|_| "it is a whole number, 0 or -1 for all tokens")
    }
}

impl JsonTopK {
    /// The number of most likely tokens; 0 stands for all.
    pub fn value(self) -> usize {
        self.0
    }
}

impl JsonSeed {
    /// The seed: a negative number in two's complement, but a new seed for -1.
    pub fn value(self) -> u64 {
        match self {
            JsonSeed::Unsigned(seed) => seed,
            JsonSeed::Signed(-1) => new_seed(),
            JsonSeed::Signed(seed) => seed.cast_unsigned(),
        }
    }
}

/// The numbers that a setting may have.
#[derive(Clone, Copy, Debug)]
pub struct SettingRange {
    accepts: fn(f64) -> bool,
    /// The numbers, in words.
    pub expected: &'static str,
}

impl SettingRange {
    /// The range of [`SamplingOverrides::temperature`].
    pub const TEMPERATURE: Self =
        Self { accepts: |n| n == 0.0 || n >= 1e-6, expected: "zero or a number from 0.000001 up" };
    /// The range of [`SamplingOverrides::top_p`] and [`SamplingOverrides::min_p`].
    pub const PROBABILITY: Self = Self { accepts: |n| (0.0..=1.0).contains(&n), expected: "a number from 0 to 1" };
    /// The range of [`SamplingOverrides::repetition_penalty`].
    pub const PENALTY: Self = Self { accepts: |n| n > 0.0, expected: "a number above 0" };

    /// Whether a setting may have this number.
    pub fn contains(&self, number: f64) -> bool {
        number.is_finite() && (self.accepts)(number)
    }
}

impl SamplingOverrides {
    /// These settings; where a setting is not given, that of `defaults`.
    pub fn or(self, defaults: Self) -> Self {
        Self {
            temperature: self.temperature.or(defaults.temperature),
            top_k: self.top_k.or(defaults.top_k),
            top_p: self.top_p.or(defaults.top_p),
            min_p: self.min_p.or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty),
            seed: self.seed.or(defaults.seed),
        }
    }

    /// An error if a setting is out of range: its name, and the numbers that it may have, in words.
    pub fn check(&self) -> Result<(), (&'static str, &'static str)> {
        let settings = [
            ("temperature", self.temperature, SettingRange::TEMPERATURE),
            ("top_p", self.top_p, SettingRange::PROBABILITY),
            ("min_p", self.min_p, SettingRange::PROBABILITY),
            ("repetition_penalty", self.repetition_penalty, SettingRange::PENALTY),
        ];
        let wrong = settings.iter().find(|(_, value, range)| value.is_some_and(|value| !range.contains(value)));
        wrong.map_or(Ok(()), |(name, _, range)| Err((name, range.expected)))
    }

    /// Completes the settings with the authors' defaults.
    ///
    /// The choice is greedy unless the authors set `do_sample`, as in Hugging Face's `generation_config.json`, or the request gives a
    /// setting that makes sense for random choices only.
    pub fn resolve(&self, authors: &SamplingDefaults) -> SamplingParams {
        let asked = self.top_p.is_some() || self.min_p.is_some() || self.top_k.is_some() || self.seed.is_some();
        let is_random = match self.temperature {
            Some(temperature) => temperature > 0.0,
            None => authors.temperature != Some(0.0) && (asked || authors.do_sample == Some(true)),
        };
        let repetition_penalty =
            self.repetition_penalty.or(authors.repetition_penalty.filter(|p| *p > 0.0)).unwrap_or(1.0);
        if !is_random {
            return SamplingParams { choice: SamplingMethod::Greedy, repetition_penalty };
        }
        let choice = RandomSampling {
            temperature: self.temperature.or(authors.temperature.filter(|t| *t > 0.0)).unwrap_or(1.0),
            top_k: self.top_k.or(authors.top_k.map(|k| k as usize)).unwrap_or(0),
            top_p: self.top_p.or(authors.top_p).unwrap_or(1.0),
            min_p: self.min_p.or(authors.min_p).unwrap_or(0.0),
            seed: self.seed.unwrap_or_else(new_seed),
        };
        SamplingParams { choice: SamplingMethod::Random(choice), repetition_penalty }
    }
}

/// A random seed, of at most 53 bits.
pub fn new_seed() -> u64 {
    // The keys of the standard library's hasher are random. JSON readers keep integers exact up to 53 bits.
    RandomState::new().build_hasher().finish() >> 11
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authors(do_sample: Option<bool>) -> SamplingDefaults {
        SamplingDefaults {
            do_sample,
            temperature: Some(0.6),
            top_k: Some(50),
            top_p: Some(0.9),
            min_p: None,
            repetition_penalty: Some(1.1),
        }
    }

    #[test]
    fn choices_are_greedy_unless_the_request_or_the_authors_ask_for_random_ones() {
        let nothing = SamplingOverrides::default();
        assert_eq!(nothing.resolve(&SamplingDefaults::default()).choice, SamplingMethod::Greedy);
        assert_eq!(nothing.resolve(&authors(Some(false))).choice, SamplingMethod::Greedy);
        assert_eq!(nothing.resolve(&authors(None)).choice, SamplingMethod::Greedy);
        assert!(matches!(nothing.resolve(&authors(Some(true))).choice, SamplingMethod::Random(_)));
        let zero = SamplingOverrides { temperature: Some(0.0), top_p: Some(0.5), ..Default::default() };
        assert_eq!(zero.resolve(&authors(Some(true))).choice, SamplingMethod::Greedy);
    }

    #[test]
    fn minus_one_is_a_new_seed() {
        let seed = |text: &str| serde_json::from_str::<JsonSeed>(text).unwrap().value();
        assert_eq!((seed("7"), seed("-2")), (7, u64::MAX - 1));
        assert!(seed("-1") != seed("-1") && seed("-1") < 1 << 53);
    }

    #[test]
    fn the_request_takes_precedence_over_the_authors_defaults() {
        let request = SamplingOverrides { top_p: Some(0.5), seed: Some(9), ..Default::default() };
        let sampling = request.resolve(&authors(None));
        let want = RandomSampling { temperature: 0.6, top_k: 50, top_p: 0.5, min_p: 0.0, seed: 9 };
        assert_eq!(sampling, SamplingParams { choice: SamplingMethod::Random(want), repetition_penalty: 1.1 });
    }
}
