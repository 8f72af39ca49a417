//! Linear expressions, and constraints on them.

use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};
use std::collections::BTreeMap;

/// A linear expression: a sum of variables with factors, and a constant.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    terms: BTreeMap<Variable, f64>,
    constant: f64,
}

impl Line {
    pub fn constant(constant: f64) -> Line {
        Line { terms: BTreeMap::new(), constant }
    }

    pub fn sum(variables: impl IntoIterator<Item = Variable>) -> Line {
        let mut line = Line::default();
        variables.into_iter().for_each(|variable| *line.terms.entry(variable).or_default() += 1.0);
        line
    }

    /// Adds another sum `factor` times.
    pub fn add(&mut self, other: &Line, factor: f64) {
        if factor != 0.0 {
            other.terms.iter().for_each(|(variable, by)| *self.terms.entry(*variable).or_default() += by * factor);
            self.constant += other.constant * factor;
        }
    }

    /// The sum with another added `factor` times.
    pub fn plus(mut self, other: &Line, factor: f64) -> Line {
        self.add(other, factor);
        self
    }

    /// Whether it is 0 for all values of the variables.
    pub fn is_nothing(&self) -> bool {
        self.constant == 0.0 && self.terms.values().all(|by| *by == 0.0)
    }
}

/// The program under construction: non-negative variables and constraints.
pub(super) struct Lines {
    pub lp: Problem,
}

impl Lines {
    pub fn new() -> Self {
        Lines { lp: Problem::new(OptimizationDirection::Minimize) }
    }

    /// An integer variable from 0 to `most`.
    pub fn whole(&mut self, most: usize) -> Line {
        Line::sum([self.whole_variable(most)])
    }

    pub fn whole_variable(&mut self, most: usize) -> Variable {
        self.lp.add_integer_var(0.0, (0, i32::try_from(most).unwrap_or(i32::MAX)))
    }

    /// A real variable of at least 0 with this cost in the objective.
    pub fn real(&mut self, cost: f64) -> Line {
        Line::sum([self.lp.add_var(cost, (0.0, f64::INFINITY))])
    }

    /// `line <= limit`.
    pub fn at_most(&mut self, line: &Line, limit: f64) {
        self.constrain(line, ComparisonOp::Le, limit);
    }

    /// `a >= b`.
    pub fn at_least(&mut self, a: &Line, b: &Line) {
        self.constrain(&a.clone().plus(b, -1.0), ComparisonOp::Ge, 0.0);
    }

    /// `line = value`.
    pub fn equal(&mut self, line: &Line, value: f64) {
        self.constrain(line, ComparisonOp::Eq, value);
    }

    fn constrain(&mut self, line: &Line, op: ComparisonOp, value: f64) {
        let terms = line.terms.iter().filter(|(_, by)| **by != 0.0);
        self.lp.add_constraint(terms.map(|(variable, by)| (*variable, *by)), op, value - line.constant);
    }
}
