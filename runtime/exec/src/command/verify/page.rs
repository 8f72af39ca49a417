//! `--report`: a page with the result of `--kl` and a picture of how the divergence is distributed. It needs no other file.

use super::divergence::Report;
use crate::numbers::counted;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use std::fmt::Write;

/// How a page begins. An existing file is replaced only if it begins like this.
pub const START: &[u8] = b"<!DOCTYPE html>";

/// Size of the picture, and what its axes take of it on the left and below, in pixels.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 64.0;
const BELOW: f64 = 48.0;
const MARGIN: f64 = 16.0;
/// Divergences below this are rounding errors and are drawn on the left edge.
const SMALLEST: f64 = 1e-9;
/// Most points of the curve: every position of the tail is drawn, and every n-th of the others.
const MOST_POINTS: usize = 2000;

const STYLE: &str = "
:root { color-scheme: light dark; --text: #1d2129; --faint: #6b7280; --line: #d5d9e0; --curve: #1f6feb; --back: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8ec; --faint: #9aa3b2; --line: #333a46; --curve: #6cb0ff; --back: #14171c; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 800px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th { color: var(--faint); font-weight: 500; }
figure { margin: 0; }
svg { width: 100%; height: auto; }
svg text { fill: var(--faint); font: 13px system-ui, sans-serif; }
.grid { stroke: var(--line); } .curve { stroke: var(--curve); stroke-width: 2; fill: none; }
.mark { fill: var(--curve); } figcaption, p { color: var(--faint); }
";

/// The page. `sorted`: the divergence of each position, nats, in ascending order.
pub fn page(name: &str, report: &Report, sorted: &[f64]) -> String {
    let title = format!("{name} against {}", report.reference);
    let perplexity = report.reference_perplexity.zip(report.perplexity).zip(report.perplexity_ratio);
    let kl = &report.kl;
    let quantiles =
        [("mean", kl.mean), ("median", kl.median), ("99 %", kl.p99), ("99.9 %", kl.p99_9), ("largest", kl.max)];
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                p {
                    "Distributions of the next token over " (counted(report.prompts as u64, "prompt")) ", "
                    (counted(report.positions as u64, "position")) "."
                }
                table {
                    @for (name, value) in quantiles { tr { th { "KL divergence, " (name) } td { (format!("{value:.6} nats")) } } }
                    tr { th { "same most likely token" } td { (format!("{:.2} %", report.same_top1 * 100.0)) } }
                    @if let Some(((reference, plan), ratio)) = perplexity {
                        tr { th { "perplexity of the plan" } td { (format!("{plan:.4}")) } }
                        tr { th { "perplexity of the reference" } td { (format!("{reference:.4}")) } }
                        tr { th { "ratio of both" } td { (format!("{ratio:.4}")) } }
                    }
                }
                @match Axes::of(sorted) {
                    Some(axes) => {
                        figure {
                            (picture(&axes, sorted, &quantiles[1..4]))
                            figcaption {
                                "How many positions diverge at least so much. The curve of a better plan lies further left; its right end "
                                "is the worst position."
                            }
                        }
                    }
                    None => { p { "No position diverges: both give the same distributions." } }
                }
            }
        }
    }
    .into_string()
}

/// Logarithmic axes: divergence to the right, share of positions upwards.
struct Axes {
    /// Powers of ten at the left and right end.
    x: (i32, i32),
    /// The power of ten at the lower end; the upper end is 1.
    y: i32,
}

impl Axes {
    /// Axes for sorted divergences; `None` if none is above 0.
    fn of(sorted: &[f64]) -> Option<Self> {
        let largest = sorted.last().copied().filter(|value| *value > 0.0)?.max(SMALLEST);
        let least = sorted.iter().copied().find(|value| *value > 0.0)?.max(SMALLEST);
        let left = least.log10().floor() as i32;
        let right = (largest.log10().ceil() as i32).max(left + 1);
        let lower = (-(sorted.len() as f64).log10()).floor() as i32;
        Some(Axes { x: (left, right), y: lower.min(-1) })
    }

    /// Pixels from the left.
    fn x(&self, divergence: f64) -> f64 {
        let (left, right) = (f64::from(self.x.0), f64::from(self.x.1));
        let share = (divergence.max(10f64.powf(left)).log10() - left) / (right - left);
        LEFT + share * (WIDTH - LEFT - MARGIN)
    }

    /// Pixels from above.
    fn y(&self, share: f64) -> f64 {
        MARGIN + share.log10() / f64::from(self.y) * (HEIGHT - MARGIN - BELOW)
    }
}

/// The curve: for each divergence, the share of positions that diverge at least as much. `marks` are drawn with their names.
fn picture(axes: &Axes, sorted: &[f64], marks: &[(&str, f64)]) -> Markup {
    let bottom = HEIGHT - BELOW;
    let share = |index: usize| (sorted.len() - index) as f64 / sorted.len() as f64;
    let mut curve = String::new();
    for index in points(sorted.len()) {
        let command = if curve.is_empty() { 'M' } else { 'L' };
        let _ = write!(curve, "{command}{:.1} {:.1}", axes.x(sorted[index]), axes.y(share(index)));
    }
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label="Share of positions over their divergence" {
            @for power in axes.x.0..=axes.x.1 {
                @let x = axes.x(10f64.powi(power));
                line class="grid" x1=(x) x2=(x) y1=(MARGIN) y2=(bottom) {}
                text x=(x) y=(bottom + 18.0) text-anchor="middle" { (decimal(power)) }
            }
            @for power in axes.y..=0 {
                @let y = axes.y(10f64.powi(power));
                line class="grid" x1=(LEFT) x2=(WIDTH - MARGIN) y1=(y) y2=(y) {}
                text x=(LEFT - 8.0) y=(y + 4.0) text-anchor="end" { (decimal(power + 2)) " %" }
            }
            text x=(f64::midpoint(LEFT, WIDTH - MARGIN)) y=(HEIGHT - 8.0) text-anchor="middle" { "KL divergence of a position, nats" }
            path class="curve" d=(curve) {}
            @for (name, value) in marks {
                @let index = sorted.partition_point(|other| other < value);
                @let (x, y) = (axes.x(*value), axes.y(share(index.min(sorted.len() - 1))));
                circle class="mark" cx=(x) cy=(y) r="4" {}
                text x=(x - 8.0) y=(y + 16.0) text-anchor="end" { (name) }
            }
        }
    }
}

/// Which of `count` sorted positions are drawn.
fn points(count: usize) -> Vec<usize> {
    let tail = count.saturating_sub(MOST_POINTS / 2);
    let step = tail.div_ceil(MOST_POINTS / 2).max(1);
    (0..tail).step_by(step).chain(tail..count).collect()
}

/// A power of ten as people write it: 0.001, 1, 100, or 1e-6.
fn decimal(power: i32) -> String {
    match power {
        -4..=4 => format!("{}", 10f64.powi(power)),
        _ => format!("1e{power}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::divergence::Quantiles;
    use super::*;

    fn report(sorted: &[f64]) -> Report {
        Report {
            reference: "a <b>".into(),
            prompts: 2,
            positions: sorted.len(),
            kl: Quantiles::of(sorted),
            same_top1: 0.5,
            reference_perplexity: Some(3.0),
            perplexity: Some(4.5),
            perplexity_ratio: Some(1.5),
        }
    }

    #[test]
    fn the_page_has_every_figure_and_needs_no_other_file() {
        let sorted: Vec<f64> = (0..5000).map(|number| f64::from(number) / 1e4).collect();
        let page = page("plan", &report(&sorted), &sorted);
        assert!(page.as_bytes().starts_with(START));
        for words in ["plan against a &lt;b&gt;", "5000 positions", "0.499900", "50.00 %", "1.5000", "<path", "99.9 %"]
        {
            assert!(page.contains(words), "{words}");
        }
        assert!(!page.contains("href") && !page.contains("src="));
        let curve = page.split("class=\"curve\" d=\"").nth(1).unwrap().split('"').next().unwrap();
        let numbers: Vec<f64> =
            curve.split(['M', 'L', ' ']).filter(|part| !part.is_empty()).map(|part| part.parse().unwrap()).collect();
        assert!((1000..=2 * MOST_POINTS).contains(&(numbers.len() / 2)), "{}", numbers.len());
        let is_right = |pair: &[f64]| (LEFT..=WIDTH).contains(&pair[0]) && (0.0..=HEIGHT).contains(&pair[1]);
        assert!(numbers.chunks(2).all(is_right));
        assert!(numbers.chunks(2).is_sorted_by(|a, b| a[0] <= b[0] && a[1] <= b[1]), "it falls to the right");
    }

    #[test]
    fn equal_distributions_and_a_single_position_have_a_page_too() {
        let same = page("plan", &report(&[0.0, 0.0]), &[0.0, 0.0]);
        assert!(same.contains("No position diverges") && !same.contains("<svg"));
        let one = page("plan", &report(&[0.25]), &[0.25]);
        assert!(one.contains("<svg") && !one.contains("NaN") && !one.contains("inf"));
        let tiny = page("plan", &report(&[1e-300, 5.0]), &[1e-300, 5.0]);
        assert!(tiny.contains(">1e-9<") && !tiny.contains("NaN"));
    }
}
