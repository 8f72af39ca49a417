//! Colours for light and dark pages, distinguishable with any colour vision.
//!
//! A figure is drawn once: its colours are CSS variables, and each theme gives them other values.

use hpp_schema::Provider;
use std::fmt;

/// A colour: a CSS variable with its value on a light and on a dark page, `0xRRGGBB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ink {
    name: &'static str,
    light: u32,
    dark: u32,
}

const fn ink(name: &'static str, light: u32, dark: u32) -> Ink {
    Ink { name, light, dark }
}

/// Background of the page, and of its figures.
const PAGE: Ink = ink("page", 0xF4F6F8, 0x0F141A);
const CARD: Ink = ink("card", 0xFFFFFF, 0x161C24);
const LINK: Ink = ink("link", 0x0A5C91, 0x8FD3FF);
pub const TEXT: Ink = ink("text", 0x1F2933, 0xE6EAEF);
/// Secondary text.
pub const MUTED: Ink = ink("muted", 0x5B6672, 0xA3AEBA);
/// Grid lines and frames.
pub const GRID: Ink = ink("grid", 0xE1E5EA, 0x2E3743);
/// Axes and limits.
pub const AXIS: Ink = ink("axis", 0x8A94A0, 0x6F7B88);

// Series colours after Okabe and Ito, "Color Universal Design" (2008); yellow and orange are darkened for contrast on white.
pub const BLUE: Ink = ink("blue", 0x0072B2, 0x5BB8EE);
pub const VERMILION: Ink = ink("vermilion", 0xD55E00, 0xFF9A5C);
pub const GREEN: Ink = ink("green", 0x009E73, 0x45D6A8);
pub const PURPLE: Ink = ink("purple", 0xB0578D, 0xE9A3CB);
pub const AMBER: Ink = ink("amber", 0xC08700, 0xF2C14E);
pub const SKY: Ink = ink("sky", 0x4AA3DB, 0x8FD3FF);
pub const SLATE: Ink = ink("slate", 0x6C7A89, 0xB8C4D0);

/// Order of the series colours.
pub const KINDS: [Ink; 7] = [BLUE, AMBER, GREEN, PURPLE, SKY, VERMILION, SLATE];

/// Heat map scale, ordered by lightness. The first colour is for zero.
pub const HEAT: [Ink; 9] = [
    ink("heat0", 0xF1F3F5, 0x1A212A),
    ink("heat1", 0xD3E4F3, 0x1C3550),
    ink("heat2", 0xB3D2E9, 0x1E4A72),
    ink("heat3", 0x8CBDDF, 0x1F6094),
    ink("heat4", 0x64A4D0, 0x2B78B2),
    ink("heat5", 0x428AC1, 0x4B93C8),
    ink("heat6", 0x276FAE, 0x78B0DB),
    ink("heat7", 0x125291, 0xABD0EC),
    ink("heat8", 0x08305F, 0xE4F2FC),
];

impl fmt::Display for Ink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "var(--{})", self.name)
    }
}

fn all() -> impl Iterator<Item = Ink> {
    [PAGE, CARD, LINK, TEXT, MUTED, GRID, AXIS].into_iter().chain(KINDS).chain(HEAT)
}

/// The style rules that define the variables for both themes.
pub fn style() -> String {
    let values = |of: fn(Ink) -> u32| all().map(|ink| format!("--{}:#{:06x};", ink.name, of(ink))).collect::<String>();
    let (light, dark) = (values(|ink| ink.light), values(|ink| ink.dark));
    format!(":root{{{light}}}\n@media (prefers-color-scheme: dark) {{ :root{{{dark}}} }}\n")
}

/// The colour of a series by its position; from the seventh on all are slate.
pub fn kind(at: usize) -> Ink {
    KINDS.get(at).copied().unwrap_or(SLATE)
}

/// Shape of a point, so that series differ in more than colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkerShape {
    Circle,
    Square,
    Triangle,
    Diamond,
}

impl MarkerShape {
    /// An SVG path relative to the centre, 8 pixels across.
    pub fn path(self) -> &'static str {
        match self {
            MarkerShape::Circle => "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
            MarkerShape::Square => "m-4-4h8v8h-8z",
            MarkerShape::Triangle => "m-4 4h8l-4-8z",
            MarkerShape::Diamond => "m-4 0l4-4l4 4l-4 4z",
        }
    }
}

/// Colour and shape of a series of points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look(pub Ink, pub MarkerShape);

/// The look of a provider in every figure.
pub fn provider_look(provider: Provider) -> Look {
    match provider {
        Provider::CPU => Look(BLUE, MarkerShape::Circle),
        Provider::WEBGPU => Look(VERMILION, MarkerShape::Triangle),
        Provider::CUDA => Look(GREEN, MarkerShape::Square),
        _ => Look(PURPLE, MarkerShape::Diamond),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Relative luminance as WCAG 2.1 defines it.
    fn luminance(colour: u32) -> f64 {
        let part = |byte: u8| match f64::from(byte) / 255.0 {
            c if c <= 0.04045 => c / 12.92,
            c => ((c + 0.055) / 1.055).powf(2.4),
        };
        let [_, red, green, blue] = colour.to_be_bytes();
        0.2126 * part(red) + 0.7152 * part(green) + 0.0722 * part(blue)
    }

    fn contrast(one: u32, other: u32) -> f64 {
        let (a, b) = (luminance(one), luminance(other));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn each_colour_has_a_name_of_its_own_in_both_themes() {
        let names: BTreeSet<&str> = all().map(|ink| ink.name).collect();
        assert_eq!(names.len(), all().count());
        assert!(names.iter().all(|name| style().matches(&format!("--{name}:#")).count() == 2));
    }

    #[test]
    fn words_and_kinds_stand_out_from_the_page() {
        for (inks, least) in [(&[TEXT, MUTED][..], 4.5), (&KINDS[..], 2.7)] {
            for ink in inks {
                let (light, dark) = (contrast(ink.light, CARD.light), contrast(ink.dark, CARD.dark));
                assert!(light >= least && dark >= least, "{ink} {light:.2} {dark:.2}");
            }
        }
    }

    #[test]
    fn heat_is_told_by_lightness_alone() {
        let falling = HEAT.windows(2).all(|pair| luminance(pair[0].light) > luminance(pair[1].light));
        let rising = HEAT.windows(2).all(|pair| luminance(pair[0].dark) < luminance(pair[1].dark));
        assert!(falling && rising);
    }
}
