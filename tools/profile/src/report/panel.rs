//! One drawing: two axes and marks, as an SVG with a size readable on a phone.

use super::axis::Axis;
use super::palette::{AXIS, GRID, Ink, Look, MUTED, TEXT};
use maud::{Markup, html};

/// Natural width of a panel, pixels.
const WIDTH: f64 = 460.0;
/// Approximate width of a letter, pixels. The style sheet sets the size of the font.
const LETTER: f64 = 8.0;
/// Distance from the middle of a line of text to its baseline, pixels.
const HALF_LINE: f64 = 4.5;

/// A mark; coordinates are values of the axes.
#[derive(Clone, Debug)]
pub enum Mark {
    /// A line through points, its width in pixels.
    Line {
        points: Vec<(f64, f64)>,
        ink: Ink,
        width: u32,
    },
    Points {
        points: Vec<(f64, f64)>,
        look: Look,
    },
    /// Rectangles, each given by two corners.
    Bars {
        bars: Vec<[(f64, f64); 2]>,
        ink: Ink,
    },
    /// Text to the right of a point.
    Words {
        at: (f64, f64),
        words: String,
        ink: Ink,
    },
}

/// A drawing with its texts.
#[derive(Clone, Debug)]
pub struct Panel {
    pub title: String,
    /// Description for screen readers.
    pub text: String,
    pub x: Axis,
    pub y: Axis,
    pub marks: Vec<Mark>,
    pub height: f64,
}

/// The plot within a drawing, pixels.
struct Plot {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Panel {
    pub fn new(title: impl Into<String>, text: impl Into<String>, x: Axis, y: Axis, marks: Vec<Mark>) -> Panel {
        Panel { title: title.into(), text: text.into(), x, y, marks, height: 270.0 }
    }

    pub fn html(&self, id: &str) -> Markup {
        let plot = self.plot();
        let Plot { left, right, top, bottom } = plot;
        let columns: Vec<(f64, &str)> = self.x.ticks().into_iter().map(|(at, word)| (plot.x(at), word)).collect();
        let rows: Vec<(f64, &str)> = self.y.ticks().into_iter().map(|(at, word)| (plot.y(at), word)).collect();
        let across: String = columns.iter().map(|(x, _)| format!("M{x:.1} {top:.1}V{bottom:.1}")).collect();
        let along: String = rows.iter().map(|(y, _)| format!("M{left:.1} {y:.1}H{right:.1}")).collect();
        let (title, text) = (format!("{id}-title"), format!("{id}-text"));
        html! {
            svg id=(id) viewBox=(format!("0 0 {WIDTH} {}", self.height)) role="img" aria-labelledby=(title)
                aria-describedby=(text) {
                title id=(title) { (self.title) }
                desc id=(text) { (self.text) }
                @if !self.y.name.is_empty() { text x="0" y="13" fill=(MUTED) { (self.y.name) } }
                path d=(across + &along) stroke=(GRID) fill="none" shape-rendering="crispEdges" {}
                path d=(format!("M{left:.1} {top:.1}V{bottom:.1}H{right:.1}")) stroke=(AXIS) fill="none"
                    shape-rendering="crispEdges" {}
                g fill=(TEXT) text-anchor="end" {
                    @for (y, word) in rows {
                        text x=(px(left - 7.0)) y=(px(y + HALF_LINE)) { (word) }
                    }
                }
                g fill=(TEXT) text-anchor="middle" {
                    @for (x, word) in columns { text x=(px(x)) y=(px(bottom + 17.0)) { (word) } }
                }
                @if !self.x.name.is_empty() {
                    text x=(px((left + right) / 2.0)) y=(px(self.height - 6.0)) fill=(MUTED) text-anchor="middle" {
                        (self.x.name)
                    }
                }
                @for mark in &self.marks { (self.mark(&plot, mark)) }
            }
        }
    }

    /// The plot leaves room for the labels of the y axis and for the outer halves of labels at the ends of the x axis.
    fn plot(&self) -> Plot {
        let width = |word: &str| word.chars().count() as f64 * LETTER;
        let longest = self.y.ticks().into_iter().map(|(_, word)| width(word)).fold(0.0, f64::max);
        let (mut left, mut right) = ((longest + 16.0).clamp(30.0, 0.4 * WIDTH), 16f64);
        let plot = WIDTH - left - right;
        for (at, word) in self.x.ticks() {
            let half = width(word) / 2.0 + 4.0;
            left = left.max(half - plot * at);
            right = right.max(half - plot * (1.0 - at));
        }
        let top = if self.y.name.is_empty() { 10.0 } else { 24.0 };
        let below = if self.x.name.is_empty() { 24.0 } else { 44.0 };
        Plot { left, right: WIDTH - right, top, bottom: self.height - below }
    }

    fn mark(&self, plot: &Plot, mark: &Mark) -> Markup {
        let place = |(x, y): (f64, f64)| Some((plot.x(self.x.position(x)?), plot.y(self.y.position(y)?)));
        let path = |points: &[(f64, f64)], before: &str, after: &str| -> String {
            let points = points.iter().filter_map(|at| place(*at));
            points.map(|(x, y)| format!("{before}{x:.1} {y:.1}{after}")).collect()
        };
        match mark {
            Mark::Line { points, ink, width } => html! {
                polyline points=(path(points, " ", "").trim_start()) fill="none" stroke=(ink) stroke-width=(width) {}
            },
            Mark::Points { points, look: Look(ink, shape) } => html! {
                path d=(path(points, "M", shape.path())) fill=(ink) {}
            },
            Mark::Bars { bars, ink } => {
                let bars = bars.iter().filter_map(|[from, to]| Some((place(*from)?, place(*to)?)));
                let bars = bars.map(|((a, b), (c, d))| format!("M{a:.1} {b:.1}H{c:.1}V{d:.1}H{a:.1}z"));
                html! { path d=(bars.collect::<String>()) fill=(ink) shape-rendering="crispEdges" {} }
            }
            Mark::Words { at, words, ink } => html! {
                @if let Some((x, y)) = place(*at) { text x=(px(x)) y=(px(y + HALF_LINE)) fill=(ink) { (words) } }
            },
        }
    }
}

impl Plot {
    fn x(&self, position: f64) -> f64 {
        self.left + position * (self.right - self.left)
    }

    fn y(&self, position: f64) -> f64 {
        self.bottom - position * (self.bottom - self.top)
    }
}

fn px(pixels: f64) -> String {
    format!("{pixels:.1}")
}

/// A line through points.
pub fn curve(points: Vec<(f64, f64)>, look: Look) -> [Mark; 2] {
    [Mark::Line { points: points.clone(), ink: look.0, width: 2 }, Mark::Points { points, look }]
}
