//! Panels with one value for each block, in execution order.

use crate::report::axis::Axis;
use crate::report::palette::Ink;
use crate::report::panel::{Mark, Panel, Shape};

/// A series of values.
pub struct Series {
    /// Colour of its points.
    pub ink: Ink,
    /// Shape of its points.
    pub shape: Shape,
    /// (Index of the block, value).
    pub values: Vec<(usize, f64)>,
}

/// Scale of the vertical axis.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Height {
    /// Logarithmic; shows only positive values.
    Log,
    /// Linear, from 0.
    Linear,
}

/// Points over depth; a thin line joins neighbours.
pub fn points(title: &str, unit: &str, labels: &[&str], series: &[Series], height: Height) -> Panel {
    let values = series.iter().flat_map(|series| series.values.iter().map(|(_, value)| *value));
    let y = match height {
        Height::Log => Axis::log(unit, values),
        Height::Linear => Axis::from_zero(unit, values),
    };
    let shows = |value: f64| value.is_finite() && (height == Height::Linear || value > 0.0);
    let mut marks = Vec::new();
    for series in series {
        let points: Vec<(f64, f64)> =
            series.values.iter().filter(|(_, value)| shows(*value)).map(|(at, value)| (*at as f64, *value)).collect();
        let runs = points.chunk_by(|a, b| b.0 - a.0 < 1.5).filter(|run| run.len() > 1);
        marks.extend(runs.map(|run| Mark::Line { points: run.to_vec(), ink: series.ink, width: 1 }));
        marks.push(Mark::Points { points, ink: series.ink, shape: series.shape });
    }
    let text = format!("{title}: {unit} over {} blocks in execution order.", labels.len());
    Panel::new(title, text, Axis::depth(labels), y, marks)
}

/// A bar for each block.
pub fn bars(title: &str, unit: &str, labels: &[&str], ink: Ink, values: &[(usize, f64)]) -> Panel {
    let bar = |(at, value): &(usize, f64)| [(*at as f64 - 0.4, 0.0), (*at as f64 + 0.4, *value)];
    let marks = vec![Mark::Bars { bars: values.iter().map(bar).collect(), ink }];
    let y = Axis::around_zero(unit, values.iter().map(|(_, value)| *value));
    let text = format!("{title}: {unit} over {} blocks in execution order.", labels.len());
    Panel::new(title, text, Axis::depth(labels), y, marks)
}
