//! Colours for light and dark pages, distinguishable with any colour vision.
//!
//! A figure is drawn once, in the light colours. On a dark page one style rule per colour replaces it (style rules override
//! attributes). Invariant: no light colour has two dark ones.

use hpp_schema::Provider;
use plotters::style::RGBColor;

/// A colour of a drawing on a light and on a dark page, `0xRRGGBB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ink {
    light: u32,
    dark: u32,
}

const fn ink(light: u32, dark: u32) -> Ink {
    Ink { light, dark }
}

/// Text.
pub const TEXT: Ink = ink(0x1F2933, 0xE6EAEF);
/// Secondary text.
pub const MUTED: Ink = ink(0x5B6672, 0xA3AEBA);
/// Grid lines.
pub const GRID: Ink = ink(0xE1E5EA, 0x2E3743);
/// Axes and limits.
pub const AXIS: Ink = ink(0x8A94A0, 0x6F7B88);

/// Series colours after Okabe and Ito, "Color Universal Design" (2008); yellow and orange are darkened for contrast on white.
pub const BLUE: Ink = ink(0x0072B2, 0x5BB8EE);
/// Second series colour.
pub const VERMILION: Ink = ink(0xD55E00, 0xFF9A5C);
/// Third series colour.
pub const GREEN: Ink = ink(0x009E73, 0x45D6A8);
/// Fourth series colour.
pub const PURPLE: Ink = ink(0xB0578D, 0xE9A3CB);
/// Fifth series colour.
pub const AMBER: Ink = ink(0xC08700, 0xF2C14E);
/// Sixth series colour.
pub const SKY: Ink = ink(0x4AA3DB, 0x8FD3FF);
/// Seventh series colour.
pub const SLATE: Ink = ink(0x6C7A89, 0xB8C4D0);

/// Order of the series colours.
pub const KINDS: [Ink; 7] = [BLUE, AMBER, GREEN, PURPLE, SKY, VERMILION, SLATE];

/// Heat map scale, ordered by lightness. The first colour is for zero.
pub const HEAT: [Ink; 9] = [
    ink(0xF1F3F5, 0x1A212A),
    ink(0xD3E4F3, 0x1C3550),
    ink(0xB3D2E9, 0x1E4A72),
    ink(0x8CBDDF, 0x1F6094),
    ink(0x64A4D0, 0x2B78B2),
    ink(0x428AC1, 0x4B93C8),
    ink(0x276FAE, 0x78B0DB),
    ink(0x125291, 0xABD0EC),
    ink(0x08305F, 0xE4F2FC),
];

impl Ink {
    /// The light colour for the drawing library.
    pub fn rgb(self) -> RGBColor {
        let [_, red, green, blue] = self.light.to_be_bytes();
        RGBColor(red, green, blue)
    }

    /// The light colour in the format that the drawing library writes.
    pub fn hex(self) -> String {
        format!("#{:06X}", self.light)
    }
}

/// The colour of a provider in every figure.
pub fn of_provider(provider: Provider) -> Ink {
    match provider {
        Provider::Cpu => BLUE,
        Provider::Webgpu => VERMILION,
        Provider::Cuda => GREEN,
    }
}

/// Style rules that replace every light colour by its dark one.
pub fn dark_rules() -> String {
    all().map(dark_rule).collect()
}

fn dark_rule(ink: Ink) -> String {
    let (light, dark) = (ink.hex(), format!("#{:06X}", ink.dark));
    format!("svg [fill=\"{light}\"]{{fill:{dark}}}svg [stroke=\"{light}\"]{{stroke:{dark}}}\n")
}

fn all() -> impl Iterator<Item = Ink> {
    [TEXT, MUTED, GRID, AXIS, VERMILION].into_iter().chain(KINDS).chain(HEAT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Relative luminance of `0xRRGGBB`, WCAG 2.2.
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
    fn no_light_colour_has_two_dark_partners() {
        let mut partners = BTreeMap::new();
        for ink in all() {
            assert_eq!(*partners.entry(ink.light).or_insert(ink.dark), ink.dark, "{}", ink.hex());
        }
    }

    #[test]
    fn words_and_kinds_stand_out_from_the_page() {
        let (white, night) = (0xFFFFFF, 0x161C24);
        for (inks, least) in [(&[TEXT, MUTED][..], 4.5), (&KINDS[..], 2.7)] {
            for ink in inks {
                let (light, dark) = (contrast(ink.light, white), contrast(ink.dark, night));
                assert!(light >= least && dark >= least, "{} {light:.2} {dark:.2}", ink.hex());
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
