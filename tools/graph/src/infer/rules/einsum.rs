//! The rule for `Einsum`: letters of the equation name dimensions of the inputs.

use super::broadcast::{broadcast, broadcast_dim};
use crate::infer::context::Context;
use crate::infer::fact::{Facts, one};
use hpp_schema::{Dim, Shape};
use std::collections::BTreeMap;

pub(super) fn einsum(cx: &Context) -> Facts {
    one(cx.dtype(0), cx.text("equation").and_then(|equation| Axes::read(cx, equation)?.output(equation)))
}

/// The sizes behind the letters and the ellipsis of an equation.
pub(in crate::infer) struct Axes {
    /// Size of each letter.
    pub letters: BTreeMap<char, Dim>,
    /// Broadcast shape behind `...`.
    pub ellipsis: Shape,
}

impl Axes {
    /// Matches the terms of an equation with the shapes of the inputs; `None` if they do not match or a shape is
    /// unknown.
    pub(in crate::infer) fn read(cx: &Context, equation: &str) -> Option<Axes> {
        let shapes: Vec<&Shape> = (0..cx.node.inputs.len()).map(|at| cx.shape(at)).collect::<Option<_>>()?;
        Axes::bind(equation, &shapes)
    }

    /// Matches the terms of an equation with shapes.
    pub(in crate::infer) fn bind(equation: &str, shapes: &[&Shape]) -> Option<Axes> {
        let inputs = equation.split("->").next()?;
        let mut axes = Axes { letters: BTreeMap::new(), ellipsis: vec![] };
        let terms: Vec<String> = inputs.split(',').map(without_spaces).collect();
        if terms.len() != shapes.len() {
            return None;
        }
        for (term, shape) in terms.iter().zip(shapes) {
            axes.bind_term(term, shape)?;
        }
        Some(axes)
    }

    fn bind_term(&mut self, term: &str, shape: &[Dim]) -> Option<()> {
        let (before, after) = term.split_once("...").unwrap_or((term, ""));
        let hidden = shape.len().checked_sub(before.chars().count() + after.chars().count())?;
        if hidden > 0 && !term.contains("...") {
            return None;
        }
        let mut dims = shape.iter();
        before.chars().for_each(|letter| self.bind_letter(letter, dims.next()));
        let spread: Shape = dims.by_ref().take(hidden).cloned().collect();
        self.ellipsis = broadcast(&self.ellipsis, &spread);
        after.chars().for_each(|letter| self.bind_letter(letter, dims.next()));
        Some(())
    }

    fn bind_letter(&mut self, letter: char, dim: Option<&Dim>) {
        let Some(dim) = dim else { return };
        match self.letters.remove(&letter) {
            Some(Dim::Unknown) => self.letters.insert(letter, dim.clone()),
            Some(known) if *dim == Dim::Unknown => self.letters.insert(letter, known),
            Some(known) => self.letters.insert(letter, broadcast_dim(known, dim.clone())),
            None => self.letters.insert(letter, dim.clone()),
        };
    }

    /// The output shape: the letters after the arrow, or, without an arrow, the letters that occur once, in
    /// alphabetical order.
    fn output(&self, equation: &str) -> Option<Shape> {
        let Some((_, output)) = equation.split_once("->") else { return Some(self.implicit(equation)) };
        let output = without_spaces(output);
        let (before, after) = output.split_once("...").unwrap_or((output.as_str(), ""));
        let named = |part: &str| part.chars().map(|c| self.letters.get(&c).cloned()).collect::<Option<Shape>>();
        let middle = if output.contains("...") { self.ellipsis.as_slice() } else { &[] };
        Some([named(before)?.as_slice(), middle, named(after)?.as_slice()].concat())
    }

    fn implicit(&self, equation: &str) -> Shape {
        let once = |letter: &&char| equation.chars().filter(|c| c == *letter).count() == 1;
        let letters = self.letters.keys().filter(once).map(|letter| self.letters[letter].clone());
        self.ellipsis.iter().cloned().chain(letters).collect()
    }
}

fn without_spaces(term: &str) -> String {
    term.chars().filter(|c| !c.is_whitespace()).collect()
}
