//! Panels with one value for each block, in execution order.

use crate::report::axis::{Axis, Scale};
use crate::report::palette::{Ink, Look};
use crate::report::panel::{Mark, Panel};
use crate::report::view::ReportView;

/// Values as (position of the block, value).
pub struct Series {
    pub look: Look,
    pub values: Vec<(f64, f64)>,
}

/// Points over depth; a thin line joins neighbours.
pub fn points(view: &ReportView<'_>, title: &str, unit: &str, scale: Scale, series: &[Series]) -> Panel {
    let y = Axis::scaled(scale, unit, series.iter().flat_map(|series| series.values.iter().map(|(_, value)| *value)));
    let mut marks = Vec::new();
    for Series { look, values } in series {
        let points: Vec<_> = values.iter().copied().filter(|(_, value)| y.position(*value).is_some()).collect();
        let runs = points.chunk_by(|a, b| b.0 - a.0 < 1.5).filter(|run| run.len() > 1);
        marks.extend(runs.map(|run| Mark::Line { points: run.to_vec(), ink: look.0, width: 1 }));
        marks.push(Mark::Points { points, look: *look });
    }
    panel(view, title, y, marks)
}

/// A bar for each block.
pub fn bars(view: &ReportView<'_>, title: &str, unit: &str, ink: Ink, values: &[(f64, f64)]) -> Panel {
    let bars = values.iter().map(|(at, value)| [(at - 0.4, 0.0), (at + 0.4, *value)]).collect();
    let y = Axis::from_zero(unit, values.iter().map(|(_, value)| *value));
    panel(view, title, y, vec![Mark::Bars { bars, ink }])
}

fn panel(view: &ReportView<'_>, title: &str, y: Axis, marks: Vec<Mark>) -> Panel {
    let labels = view.labels();
    let text = format!("{title}: {} over {} blocks in execution order.", y.name, labels.len());
    Panel::new(title, text, Axis::depth(&labels), y, marks)
}
