//! Reads the values of options.

use hpp_cli::tokens;
use hpp_generate::sampling::{SettingRange, new_seed};
use std::str::FromStr;

/// Parses a number of tokens: 4096 or 4k.
pub fn context(text: &str) -> Result<u64, String> {
    tokens(text).filter(|tokens| *tokens > 0).ok_or_else(|| "write a number of tokens, such as 4096 or 4k".to_owned())
}

pub fn max_new(text: &str) -> Result<u64, String> {
    if text == "-1" {
        return Ok(u64::MAX);
    }
    tokens(text).ok_or_else(|| "write a number of tokens, such as 512 or 8k, or -1 for no limit".to_owned())
}

/// Parses a whole number above 0.
pub fn at_least_one<T: FromStr + PartialEq + Default>(text: &str) -> Result<T, String> {
    let number = text.parse().ok().filter(|number| *number != T::default());
    number.ok_or_else(|| "it is a whole number, 1 or more".to_owned())
}

/// Most threads on machines with few processors: starting and ending a thousand took minutes on two.
const MOST_THREADS: usize = 128;

/// Parses the origin of web pages: a scheme, a host and perhaps a port, as browsers send it, `null` (pages from files), or `*`. A `/` behind it is removed.
pub fn origin(text: &str) -> Result<String, String> {
    let origin = text.strip_suffix('/').unwrap_or(text);
    let host = origin.split_once("://").map_or("", |(_, host)| host);
    match matches!(origin, "*" | "null") || !host.is_empty() && !host.contains(['/', '?', '#', ' ']) {
        true => Ok(origin.to_owned()),
        false => Err("write scheme, host and port, such as http://localhost:3000, or `*`".to_owned()),
    }
}

/// Parses the name of a host, or an address (of IPv6 in brackets), without a scheme or port.
pub fn host_name(text: &str) -> Result<String, String> {
    let in_brackets = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let is_address = in_brackets.is_some_and(|text| text.parse::<std::net::Ipv6Addr>().is_ok());
    match is_address || !text.is_empty() && !text.contains(['/', ':', ' ']) {
        true => Ok(text.to_owned()),
        false => Err("write the name alone, such as box.local, without http:// and port".to_owned()),
    }
}

/// Parses a number of threads.
pub fn threads(text: &str) -> Result<u16, String> {
    let most = MOST_THREADS.max(4 * hpp_backend::machine_cores());
    let number = text.parse().ok().filter(|number| (1..=most).contains(&usize::from(*number)));
    number.ok_or_else(|| format!("it is a whole number from 1 to {most} here"))
}

/// Parses the length of a prompt. `-p` is a text in the command without a subcommand.
pub fn prompt_tokens(text: &str) -> Result<u64, String> {
    match tokens(text) {
        Some(0) => Err("give at least one token".to_owned()),
        Some(tokens) => Ok(tokens),
        None => {
            Err("here it is the number of tokens in the prompt, not a text; write 512 or 4k, for example".to_owned())
        }
    }
}

/// Parses a number of most likely tokens: -1 stands for all, as 0 does.
pub fn top_k(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(0),
        _ => text.parse().map_err(|_| "it is a whole number, 0 or -1 for all tokens".to_owned()),
    }
}

pub fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "token ids are whole numbers from 0 to 4294967295, such as 1,2,3".to_owned())
}

/// Parses a number that a setting may have.
fn setting(text: &str, range: &SettingRange) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| range.contains(*number));
    number.ok_or_else(|| format!("it must be {}", range.expected))
}

pub fn temperature(text: &str) -> Result<f64, String> {
    setting(text, &SettingRange::TEMPERATURE)
}

pub fn probability(text: &str) -> Result<f64, String> {
    setting(text, &SettingRange::PROBABILITY)
}

pub fn above_zero(text: &str) -> Result<f64, String> {
    setting(text, &SettingRange::PENALTY)
}

/// The seed of random numbers, as it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeedArg {
    /// A new seed for each answer: -1.
    New,
    /// The same seed for each answer.
    Fixed(u64),
}

impl SeedArg {
    /// The seed of one answer.
    pub fn seed(self) -> u64 {
        match self {
            SeedArg::New => new_seed(),
            SeedArg::Fixed(seed) => seed,
        }
    }
}

impl FromStr for SeedArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "-1" => Ok(SeedArg::New),
            _ => text
                .parse()
                .map(SeedArg::Fixed)
                .map_err(|_| "it is -1 or a whole number from 0 to 18446744073709551615".to_owned()),
        }
    }
}

pub fn stop_text(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("a stop text cannot be empty".to_owned()) } else { Ok(text.to_owned()) }
}

pub fn not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "it must be a number from 0 up".to_owned())
}
