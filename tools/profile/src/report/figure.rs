//! The elements of the page as HTML: sections, figures, tables.

use super::ReportError;
use super::palette::Ink;
use super::panel::{Panel, Shape};
use maud::{Markup, PreEscaped, html};

/// A section of the page.
#[derive(Debug)]
pub struct Section {
    /// Its anchor.
    pub id: &'static str,
    /// Heading.
    pub title: &'static str,
    /// Content.
    pub parts: Vec<Part>,
}

/// A part of a section.
#[derive(Debug)]
pub enum Part {
    /// A figure.
    Figure(Figure),
    /// A table without a drawing.
    Table(Table),
    /// A paragraph.
    Note(String),
    /// A list.
    List(Vec<String>),
    /// The reason why something is missing.
    Absent(String),
}

/// A figure: one or more drawings with a legend, a caption and a table.
#[derive(Debug)]
pub struct Figure {
    /// Its anchor.
    pub id: &'static str,
    /// Heading.
    pub title: String,
    /// Caption: what is drawn, with units.
    pub caption: String,
    /// Conclusions, one sentence each.
    pub findings: Vec<String>,
    /// Legend.
    pub legend: Vec<Key>,
    /// The drawings.
    pub panels: Vec<Panel>,
    /// The numbers of the drawings.
    pub table: Option<Table>,
}

/// An entry of a legend.
#[derive(Debug)]
pub struct Key {
    /// Colour.
    pub ink: Ink,
    /// Marker.
    pub form: Form,
    /// Text.
    pub text: String,
}

/// The marker of a legend entry.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    /// A line.
    Line,
    /// A point.
    Point(Shape),
    /// An area.
    Area,
}

/// A table; the first column is the row's name.
#[derive(Debug, Default)]
pub struct Table {
    /// Title.
    pub title: String,
    /// Column names.
    pub head: Vec<String>,
    /// Rows.
    pub rows: Vec<Vec<String>>,
}

/// Most rows that are shown; the profile has all.
const MOST_ROWS: usize = 300;

impl Key {
    /// Makes an entry.
    pub fn new(ink: Ink, form: Form, text: impl Into<String>) -> Key {
        Key { ink, form, text: text.into() }
    }
}

impl Table {
    /// A table without rows.
    pub fn new<S: Into<String>>(title: impl Into<String>, head: impl IntoIterator<Item = S>) -> Table {
        Table { title: title.into(), head: head.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// The table as HTML.
    pub fn html(&self) -> Markup {
        let rest = self.rows.len().saturating_sub(MOST_ROWS);
        html! {
            div.scroll tabindex="0" role="region" aria-label=(self.title) {
                table {
                    thead { tr { @for name in &self.head { th scope="col" { (name) } } } }
                    tbody {
                        @for row in self.rows.iter().take(MOST_ROWS) {
                            tr { @for (at, cell) in row.iter().enumerate() {
                                @if at == 0 { th scope="row" { (cell) } } @else { td { (cell) } }
                            } }
                        }
                    }
                }
            }
            @if rest > 0 { p.absent { (rest) " more rows are in the profile." } }
        }
    }

    fn folded(&self) -> Markup {
        html! { details { summary { (self.title) } (self.html()) } }
    }
}

impl Section {
    /// Whether it has content other than reasons for missing content.
    pub fn shows_something(&self) -> bool {
        self.parts.iter().any(|part| match part {
            Part::Absent(_) => false,
            Part::List(texts) => !texts.is_empty(),
            _ => true,
        })
    }

    /// Reasons for missing content.
    pub fn reasons(&self) -> Vec<&str> {
        let absent = self.parts.iter().filter_map(|part| match part {
            Part::Absent(why) => Some(why.as_str()),
            _ => None,
        });
        absent.collect()
    }

    /// The section as HTML.
    pub fn html(&self) -> Result<Markup, ReportError> {
        let parts = self.parts.iter().map(Part::html).collect::<Result<Vec<_>, _>>()?;
        Ok(html! { section id=(self.id) { h2 { (self.title) } @for part in parts { (part) } } })
    }
}

impl Part {
    fn html(&self) -> Result<Markup, ReportError> {
        Ok(match self {
            Part::Figure(figure) => figure.html()?,
            Part::Table(table) => table.folded(),
            Part::Note(text) => html! { p { (text) } },
            Part::List(texts) if texts.is_empty() => html! {},
            Part::List(texts) => html! { ul { @for text in texts { li { (text) } } } },
            Part::Absent(why) => html! { p.absent { (why) } },
        })
    }
}

impl Figure {
    fn html(&self) -> Result<Markup, ReportError> {
        let panels = self.panels.iter().enumerate().map(|(at, panel)| self.panel(at, panel));
        let panels = panels.collect::<Result<Vec<_>, _>>()?;
        // An even number of drawings fills rows of two; next to an odd last one there is room for the caption.
        let beside = panels.len() % 2 == 1;
        Ok(html! {
            figure id=(self.id) {
                h3 { (self.title) }
                @if !self.legend.is_empty() { ul.legend { @for key in &self.legend { (key.html()) } } }
                div.panels {
                    @for panel in &panels { (panel) }
                    @if beside { (self.caption()) }
                }
                @if !beside { (self.caption()) }
                @if let Some(table) = &self.table { (table.folded()) }
            }
        })
    }

    fn caption(&self) -> Markup {
        html! {
            figcaption {
                p { (self.caption) }
                @if !self.findings.is_empty() { ul { @for finding in &self.findings { li { (finding) } } } }
            }
        }
    }

    fn panel(&self, at: usize, panel: &Panel) -> Result<Markup, ReportError> {
        let drawing = panel.drawing().map_err(|source| ReportError::Draw {
            figure: self.id,
            title: panel.title.clone(),
            source,
        })?;
        let (title, text) = (format!("{}-{at}-title", self.id), format!("{}-{at}-text", self.id));
        Ok(html! {
            div.panel {
                p.over { (panel.title) }
                svg id=(format!("{}-{at}", self.id)) viewBox=(panel.view_box()) role="img" aria-labelledby=(title)
                    aria-describedby=(text) {
                    title id=(title) { (panel.title) }
                    desc id=(text) { (panel.text) }
                    (PreEscaped(drawing))
                }
            }
        })
    }
}

impl Key {
    fn html(&self) -> Markup {
        let ink = self.ink.hex();
        html! {
            li {
                svg.key viewBox="0 0 20 12" aria-hidden="true" {
                    @match self.form {
                        Form::Line => line x1="1" y1="6" x2="19" y2="6" stroke-width="2.5" stroke=(ink) {},
                        Form::Area => rect x="3" y="0" width="14" height="12" fill=(ink) {},
                        Form::Point(Shape::Circle) => circle cx="10" cy="6" r="5" fill=(ink) {},
                        Form::Point(Shape::Square) => rect x="5" y="1" width="10" height="10" fill=(ink) {},
                        Form::Point(Shape::Triangle) => polygon points="4,11 16,11 10,1" fill=(ink) {},
                        Form::Point(Shape::Diamond) => polygon points="4,6 10,0 16,6 10,12" fill=(ink) {},
                    }
                }
                (self.text)
            }
        }
    }
}
