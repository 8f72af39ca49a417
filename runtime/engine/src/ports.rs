//! A session's ports under the plan's names, or what stands in the way.

use crate::port::Port;
use hpp_schema::{DType, Form, Partition};

/// A name in the plan and the element type it says.
type Said<'a> = (&'a str, DType);

/// Inputs and outputs under the plan's names, in the session's order. In a file whose weights are inputs, both sides are meant
/// by position: inputs in the plan's order with the weights behind them, and outputs in the plan's order.
pub(crate) fn named(
    partition: &Partition,
    form: &Form<'_>,
    inputs: &[Port],
    outputs: &[Port],
) -> Result<(Vec<Port>, Vec<Port>), Vec<String>> {
    let mut said_in: Vec<Said> = partition.inputs.iter().map(|input| (&*input.name, input.dtype)).collect();
    let said_out: Vec<Said> = partition.outputs.iter().map(|output| (&*output.name, output.dtype)).collect();
    let mut problems = Vec::new();
    if form.weights.is_empty() {
        problems.extend(by_name("input", &said_in, inputs));
        problems.extend(by_name("output", &said_out, outputs));
        return if problems.is_empty() { Ok((inputs.to_vec(), outputs.to_vec())) } else { Err(problems) };
    }
    said_in.extend(form.weights.iter().map(|weight| (&*weight.name, weight.dtype)));
    problems.extend(by_position("input", &said_in, inputs));
    problems.extend(by_position("output", &said_out, outputs));
    if problems.is_empty() { Ok((renamed(&said_in, inputs), renamed(&said_out, outputs))) } else { Err(problems) }
}

fn renamed(said: &[Said], found: &[Port]) -> Vec<Port> {
    let rename = |((name, _), port): (&Said, &Port)| Port { name: (*name).to_owned(), ..port.clone() };
    said.iter().zip(found).map(rename).collect()
}

fn by_position(what: &str, said: &[Said], found: &[Port]) -> Vec<String> {
    if said.len() != found.len() {
        return vec![format!("the file has {} {what}s, the plan says {}", found.len(), said.len())];
    }
    let differs = |((name, dtype), port): (&Said, &Port)| {
        let text =
            || format!("{what} {name:?} is {} in the file, as {:?}, and {dtype} in the plan", port.dtype, port.name);
        (port.dtype != *dtype).then(text)
    };
    said.iter().zip(found).filter_map(differs).collect()
}

fn by_name(what: &str, said: &[Said], found: &[Port]) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, dtype) in said {
        match found.iter().find(|port| port.name == *name) {
            None => problems.push(format!("the file has no {what} {name:?}")),
            Some(port) if port.dtype != *dtype => {
                problems.push(format!("{what} {name:?} is {} in the file and {dtype} in the plan", port.dtype));
            }
            Some(_) => {}
        }
    }
    // An output nobody knows is left unbound; an input nobody feeds cannot run.
    if what == "input" {
        for port in found.iter().filter(|port| said.iter().all(|(name, _)| *name != port.name)) {
            problems.push(format!("the file has an {what} {:?} that the plan does not know", port.name));
        }
    }
    problems
}
