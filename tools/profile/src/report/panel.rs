//! One drawing: two axes and marks, as SVG text with a size readable on a phone.

use super::axis::Axis;
use super::palette::{AXIS, GRID, Ink, MUTED, TEXT};
use plotters::chart::ChartContext;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::error::Error;
use std::ops::Range;

/// Drawing units per pixel at natural size; the library supports integer coordinates only.
const UNITS: i32 = 4;
/// Natural width of a panel, pixels.
pub const WIDTH: i32 = 460;
/// Font size, pixels.
const FONT: f64 = 12.5;
/// Radius of points, units.
const RADIUS: i32 = 4 * UNITS;
/// The library's SVG writer divides every font size by this.
const FONT_FACTOR: f64 = 1.24;
/// Approximate width of a letter, pixels.
const LETTER: f64 = 8.0;

/// Shape of a point, so that series differ in more than colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A disc.
    Circle,
    /// A square on its side.
    Square,
    /// A triangle on its base.
    Triangle,
    /// A square on its corner.
    Diamond,
}

/// A mark; coordinates are values of the axes.
#[derive(Clone, Debug)]
pub enum Mark {
    /// A line through points.
    Line { points: Vec<(f64, f64)>, ink: Ink, width: u32 },
    /// Points.
    Points { points: Vec<(f64, f64)>, ink: Ink, shape: Shape },
    /// Rectangles, each given by two corners.
    Bars { bars: Vec<[(f64, f64); 2]>, ink: Ink },
    /// Text to the right of a point.
    Words { at: (f64, f64), words: String, ink: Ink },
}

/// A drawing with its texts.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Title above it.
    pub title: String,
    /// Description for screen readers.
    pub text: String,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Marks, in drawing order.
    pub marks: Vec<Mark>,
    /// Natural height, pixels.
    pub height: i32,
}

type Failure = Box<dyn Error + Send + Sync>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Ticked, Ticked>>;

impl Panel {
    /// A panel of default height.
    pub fn new(title: impl Into<String>, text: impl Into<String>, x: Axis, y: Axis, marks: Vec<Mark>) -> Panel {
        Panel { title: title.into(), text: text.into(), x, y, marks, height: 270 }
    }

    /// The SVG view box.
    pub fn view_box(&self) -> String {
        format!("0 0 {} {}", WIDTH * UNITS, self.height * UNITS)
    }

    /// The content of the `svg` element.
    pub fn drawing(&self) -> Result<String, Failure> {
        let mut text = String::new();
        let size = ((WIDTH * UNITS) as u32, (self.height * UNITS) as u32);
        {
            let root = SVGBackend::with_string(&mut text, size).into_drawing_area();
            self.draw(&root)?;
            root.present()?;
        }
        Ok(inside(&text))
    }

    fn draw(&self, root: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) -> Result<(), Failure> {
        let (left, right) = self.room();
        let mut chart = ChartBuilder::on(root)
            .margin_top(if self.y.name.is_empty() { 10 * UNITS } else { 24 * UNITS })
            .margin_right(units(right))
            .x_label_area_size(if self.x.name.is_empty() { 24 * UNITS } else { 44 * UNITS })
            .y_label_area_size(units(left))
            .build_cartesian_2d(Ticked::new(&self.x), Ticked::new(&self.y))?;
        self.draw_axes(&mut chart)?;
        if !self.y.name.is_empty() {
            root.draw(&Text::new(self.y.name.clone(), (0, 3 * UNITS), words_style(MUTED)))?;
        }
        self.marks.iter().try_for_each(|mark| self.draw_mark(&mut chart, mark))
    }

    /// Margins to the left and right of the plot, pixels: room for the labels of the y axis and for the outer halves of labels at the
    /// ends of the x axis.
    fn room(&self) -> (f64, f64) {
        let width = |word: &str| word.chars().count() as f64 * LETTER;
        let longest = self.y.ticks().iter().map(|(_, word)| width(word)).fold(0.0, f64::max);
        let (low, high) = self.x.range();
        let (mut left, mut right) = ((longest + 16.0).clamp(30.0, 0.4 * f64::from(WIDTH)), 16f64);
        let plot = f64::from(WIDTH) - left - right;
        for (at, word) in self.x.ticks() {
            let (before, half) = (plot * (at - low) / (high - low), width(&word) / 2.0 + 4.0);
            left = left.max(half - before);
            right = right.max(half - (plot - before));
        }
        (left, right)
    }

    fn draw_axes(&self, chart: &mut Chart<'_, '_>) -> Result<(), Failure> {
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID.rgb().stroke_width(UNITS as u32))
            .axis_style(AXIS.rgb().stroke_width(UNITS as u32))
            .label_style(words_style(TEXT))
            .axis_desc_style(words_style(MUTED))
            .set_all_tick_mark_size(3 * UNITS)
            .x_desc(self.x.name.clone())
            .draw()?;
        Ok(())
    }

    fn draw_mark(&self, chart: &mut Chart<'_, '_>, mark: &Mark) -> Result<(), Failure> {
        let all = |points: &[(f64, f64)]| points.iter().filter_map(|at| self.place(*at)).collect::<Vec<_>>();
        match mark {
            Mark::Line { points, ink, width } => {
                let style = ink.rgb().stroke_width(width * UNITS as u32);
                chart.draw_series([PathElement::new(all(points), style)])?;
            }
            Mark::Bars { bars, ink } => {
                let corners = bars.iter().filter_map(|[from, to]| Some([self.place(*from)?, self.place(*to)?]));
                chart.draw_series(corners.map(|corners| Rectangle::new(corners, ink.rgb().filled())))?;
            }
            Mark::Points { points, ink, shape } => {
                let (points, style) = (all(points).into_iter().map(EmptyElement::at), ink.rgb().filled());
                match outline(*shape) {
                    None => chart.draw_series(points.map(|at| at + Circle::new((0, 0), RADIUS, style)))?,
                    Some(corners) => chart.draw_series(points.map(|at| at + Polygon::new(corners.clone(), style)))?,
                };
            }
            Mark::Words { at, words, ink } => {
                let style = words_style(*ink).pos(Pos::new(HPos::Left, VPos::Center));
                chart.draw_series(self.place(*at).map(|at| Text::new(words.clone(), at, style)))?;
            }
        }
        Ok(())
    }

    fn place(&self, (x, y): (f64, f64)) -> Option<(f64, f64)> {
        Some((self.x.position(x)?, self.y.position(y)?))
    }
}

fn units(pixels: f64) -> i32 {
    (pixels * f64::from(UNITS)).round() as i32
}

/// An axis for the drawing library: positions, with our ticks and labels.
struct Ticked {
    positions: RangedCoordf64,
    ticks: Vec<(f64, String)>,
}

impl Ticked {
    fn new(axis: &Axis) -> Ticked {
        let (low, high) = axis.range();
        Ticked { positions: (low..high).into(), ticks: axis.ticks() }
    }
}

impl Ranged for Ticked {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn range(&self) -> Range<f64> {
        self.positions.range()
    }

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.positions.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|(at, _)| *at).collect()
    }
}

impl ValueFormatter<f64> for Ticked {
    fn format_ext(&self, value: &f64) -> String {
        self.ticks.iter().find(|(at, _)| at == value).map(|(_, word)| word.clone()).unwrap_or_default()
    }
}

fn words_style(ink: Ink) -> TextStyle<'static> {
    let size = FONT * FONT_FACTOR * f64::from(UNITS);
    let color = ink.rgb().to_backend_color();
    TextStyle { font: ("sans-serif", size).into_font(), color, pos: Pos::new(HPos::Left, VPos::Top) }
}

/// Corners relative to the centre; `None` for a circle.
fn outline(shape: Shape) -> Option<Vec<(i32, i32)>> {
    let r = RADIUS;
    match shape {
        Shape::Circle => None,
        Shape::Square => Some(vec![(-r, -r), (r, -r), (r, r), (-r, r)]),
        Shape::Triangle => Some(vec![(-r, r), (r, r), (0, -r)]),
        Shape::Diamond => Some(vec![(-r, 0), (0, -r), (r, 0), (0, r)]),
    }
}

/// The drawing without the library's `svg` element and default attributes.
fn inside(text: &str) -> String {
    let body = text.split_once('>').map_or("", |(_, body)| body).trim_end();
    let body = body.strip_suffix("</svg>").unwrap_or(body);
    // Quotes in text are escaped, so these occur in tags only.
    let body = body.replace(" opacity=\"1\"", "").replace(" stroke=\"none\"", "");
    body.replace(" font-family=\"sans-serif\"", "").replace(">\n", ">").replace("\n<", "<")
}
