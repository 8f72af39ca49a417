//! Linear expressions, and a linear model of constraints on them.

use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};
use std::collections::BTreeMap;

/// A linear expression: a sum of variables with factors, and a constant.
#[derive(Clone, Debug, Default)]
pub(super) struct LinearExpr {
    terms: BTreeMap<Variable, f64>,
    constant: f64,
}

impl LinearExpr {
    pub fn constant(constant: f64) -> LinearExpr {
        LinearExpr { terms: BTreeMap::new(), constant }
    }

    pub fn sum(variables: impl IntoIterator<Item = Variable>) -> LinearExpr {
        let mut expr = LinearExpr::default();
        variables.into_iter().for_each(|variable| *expr.terms.entry(variable).or_default() += 1.0);
        expr
    }

    /// Adds `factor` times another expression.
    pub fn add(&mut self, other: &LinearExpr, factor: f64) {
        if factor != 0.0 {
            other.terms.iter().for_each(|(variable, by)| *self.terms.entry(*variable).or_default() += by * factor);
            self.constant += other.constant * factor;
        }
    }

    /// This expression plus `factor` times another.
    pub fn plus(mut self, other: &LinearExpr, factor: f64) -> LinearExpr {
        self.add(other, factor);
        self
    }

    /// Whether the expression is 0 for all values of the variables.
    pub fn is_zero(&self) -> bool {
        self.constant == 0.0 && self.terms.values().all(|by| *by == 0.0)
    }
}

/// A minimization problem under construction: non-negative variables and constraints.
pub(super) struct LinearModel {
    pub lp: Problem,
}

impl LinearModel {
    pub fn new() -> Self {
        LinearModel { lp: Problem::new(OptimizationDirection::Minimize) }
    }

    /// A new integer variable from 0 to `max`.
    pub fn integer(&mut self, max: usize) -> LinearExpr {
        LinearExpr::sum([self.integer_variable(max)])
    }

    /// Like [`integer`](Self::integer), as a variable.
    pub fn integer_variable(&mut self, max: usize) -> Variable {
        self.lp.add_integer_var(0.0, (0, i32::try_from(max).unwrap_or(i32::MAX)))
    }

    /// A new real variable of at least 0, with this factor in the objective.
    pub fn nonnegative(&mut self, cost: f64) -> LinearExpr {
        LinearExpr::sum([self.lp.add_var(cost, (0.0, f64::INFINITY))])
    }

    /// `expr <= limit`.
    pub fn at_most(&mut self, expr: &LinearExpr, limit: f64) {
        self.constrain(expr, ComparisonOp::Le, limit);
    }

    /// `a >= b`.
    pub fn at_least(&mut self, a: &LinearExpr, b: &LinearExpr) {
        self.constrain(&a.clone().plus(b, -1.0), ComparisonOp::Ge, 0.0);
    }

    /// `expr = value`.
    pub fn equal(&mut self, expr: &LinearExpr, value: f64) {
        self.constrain(expr, ComparisonOp::Eq, value);
    }

    fn constrain(&mut self, expr: &LinearExpr, op: ComparisonOp, value: f64) {
        let terms = expr.terms.iter().filter(|(_, by)| **by != 0.0);
        self.lp.add_constraint(terms.map(|(variable, by)| (*variable, *by)), op, value - expr.constant);
    }
}
