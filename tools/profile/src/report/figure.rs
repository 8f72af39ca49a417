//! The elements of the page as HTML: sections, figures, tables.

use super::palette::{Ink, Look};
use super::panel::Panel;
use maud::{Markup, html};
use std::borrow::Cow;

/// A section of the page.
#[derive(Debug)]
pub struct Section {
    pub id: &'static str,
    pub title: &'static str,
    pub parts: Vec<SectionItem>,
}

/// A part of a section.
#[derive(Debug)]
pub enum SectionItem {
    Figure(Figure),
    Table(Table),
    Note(String),
    List(Vec<String>),
    /// The reason why something is missing.
    Absent(String),
}

/// A figure: one or more drawings with a legend, a caption and a table.
#[derive(Debug)]
pub struct Figure {
    pub id: Cow<'static, str>,
    pub title: String,
    /// Caption: what is drawn, with units.
    pub caption: String,
    /// Conclusions, one sentence each.
    pub findings: Vec<String>,
    pub legend: Vec<Key>,
    pub panels: Vec<Panel>,
    pub table: Table,
}

/// An entry of a legend: its marker and its text.
#[derive(Debug)]
pub enum Key {
    Line(Ink, String),
    Area(Ink, String),
    Point(Look, String),
}

/// A table; the first column is the row's name.
#[derive(Debug, Default)]
pub struct Table {
    pub title: String,
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

/// A column of a table: its name, and the cell of an item.
pub type Column<'a, T> = (&'a str, fn(&T) -> String);

/// Most rows that are shown; the profile has all.
const MOST_ROWS: usize = 300;

impl Table {
    /// A table with one row for each item.
    pub fn of<T>(title: impl Into<String>, items: &[T], columns: &[Column<'_, T>]) -> Table {
        let row = |item: &T| columns.iter().map(|(_, cell)| cell(item)).collect();
        Table {
            title: title.into(),
            head: columns.iter().map(|(name, _)| (*name).to_owned()).collect(),
            rows: items.iter().map(row).collect(),
        }
    }

    fn html(&self) -> Markup {
        let rest = self.rows.len().saturating_sub(MOST_ROWS);
        html! {
            details {
                summary { (self.title) }
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
    }
}

impl Section {
    /// The reasons for missing content, if the section has no other content.
    pub fn why_empty(&self) -> Option<String> {
        let mut reasons = Vec::new();
        for part in &self.parts {
            match part {
                SectionItem::Absent(why) => reasons.push(why.as_str()),
                SectionItem::List(texts) if texts.is_empty() => {}
                _ => return None,
            }
        }
        Some(reasons.join(" "))
    }

    pub fn html(&self) -> Markup {
        html! { section id=(self.id) { h2 { (self.title) } @for part in &self.parts { (part.html()) } } }
    }
}

impl SectionItem {
    fn html(&self) -> Markup {
        match self {
            SectionItem::Figure(figure) => figure.html(),
            SectionItem::Table(table) => table.html(),
            SectionItem::Note(text) => html! { p { (text) } },
            SectionItem::List(texts) => html! { @if !texts.is_empty() { (list(texts)) } },
            SectionItem::Absent(why) => html! { p.absent { (why) } },
        }
    }
}

fn list(texts: &[String]) -> Markup {
    html! { ul { @for text in texts { li { (text) } } } }
}

impl Figure {
    fn html(&self) -> Markup {
        // An even number of drawings fills rows of two; next to an odd last one there is room for the caption.
        let beside = self.panels.len() % 2 == 1;
        let caption = html! {
            figcaption { p { (self.caption) } @if !self.findings.is_empty() { (list(&self.findings)) } }
        };
        html! {
            figure id=(self.id) {
                h3 { (self.title) }
                @if !self.legend.is_empty() { ul.legend { @for key in &self.legend { (key.html()) } } }
                div.panels {
                    @for (at, panel) in self.panels.iter().enumerate() {
                        div.panel { p.over { (panel.title) } (panel.html(&format!("{}-{at}", self.id))) }
                    }
                    @if beside { (caption) }
                }
                @if !beside { (caption) }
                (self.table.html())
            }
        }
    }
}

impl Key {
    fn html(&self) -> Markup {
        let (marker, text) = match self {
            Key::Line(ink, text) => (html! { path d="M1 6h18" stroke-width="2.5" stroke=(ink) {} }, text),
            Key::Area(ink, text) => (html! { path d="M3 0h14v12h-14z" fill=(ink) {} }, text),
            Key::Point(Look(ink, shape), text) => {
                (html! { path d=(format!("M10 6{}", shape.path())) fill=(ink) {} }, text)
            }
        };
        html! { li { svg.key viewBox="0 0 20 12" aria-hidden="true" { (marker) } (text) } }
    }
}
