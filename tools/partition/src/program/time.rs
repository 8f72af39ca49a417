//! The time of a phase is at least each of these, for any order of blocks:
//!
//! - the chain: computing, launches, crossings and state swaps in sequence;
//! - each link: all copies to the GPU, and the contention with the host (see [`crate::bound`]);
//! - slots: while no streamed block computes, at most one ring of copies can be made, so the chain without the streamed blocks and the
//!   copies that do not fit into the rings before their bursts are sequential;
//! - the disk.

use super::Program;
use super::held::state_and_workspace;
use super::line::Line;
use super::order::Order;
use crate::memory::may_read_disk;
use crate::transfer::{Tensors, Way};
use crate::{Choice, Phase, Where};

/// Adds the time of a phase to the program; `cost` is the objective's factor for a millisecond.
pub(super) fn time(program: &mut Program, order: &Order, phase: Phase, cost: f64) {
    let passes = program.problem.passes(phase) as f64;
    let ms = program.lines.real(cost);
    let (mut chain, mut host) = (Line::constant(program.problem.pass_ms * passes), Line::default());
    let mut links = vec![Line::default(); program.problem.gpus.len()];
    let mut streamed = vec![Line::default(); program.problem.gpus.len()];
    for (at, place) in order.places.clone().into_iter().enumerate() {
        let compute = compute(program, order, phase, at);
        chain.add(&compute, 1.0);
        match place {
            Where::Cpu => host = compute,
            Where::Resident(_) => {}
            Where::Streamed(gpu) => streamed[gpu].add(&compute, 1.0),
        }
        let around = visits(program, phase, place, &mut links);
        chain.add(&around, 1.0);
        if let Where::Streamed(gpu) = place {
            streamed[gpu].add(&around, 1.0);
        }
    }
    cross(program, order, phase, &mut chain, &mut links);
    let mut handover = Line::default();
    if phase == Phase::Prefill {
        handover = hand_over(program);
    }
    let total = |line: &Line| line.clone().plus(&handover, 1.0);
    program.lines.at_least(&ms, &total(&chain));
    for gpu in 0..links.len() {
        if let Some(place) = order.places.iter().position(|place| *place == Where::Streamed(gpu)) {
            let copies = copies(program, phase, gpu);
            let link = links[gpu].clone().plus(&copies, 1.0);
            tail(program, phase, gpu, &ms, &total(&link));
            share(program, gpu, [&ms, &total(&chain), &total(&link), &host]);
            let gaps = chain.clone().plus(&streamed[gpu], -1.0).plus(&handover, 1.0);
            window(program, order, (gpu, place), phase, &ms, &gaps.plus(&copies, 1.0));
        }
    }
    disk(program, phase, &ms, &handover);
}

/// Compute time at a place, including launches.
fn compute(program: &Program, order: &Order, phase: Phase, at: usize) -> Line {
    let (problem, place) = (program.problem, order.places[at]);
    let start = problem.launch_ms(place) * problem.passes(phase) as f64;
    let mut compute = Line::default().plus(&order.partitions(program, at), start);
    for (region, class) in program.classes() {
        let there = program.count(region, class, |choice| choice.of(phase) == place);
        if !there.is_nothing() {
            compute.add(&there, program.least(region, class, |i| problem.block_ms_in_all(i, place, phase)));
        }
    }
    compute
}

/// Time of state swaps of the blocks at a place, both directions in all passes; adds copies to GPUs to `links`.
fn visits(program: &Program, phase: Phase, place: Where, links: &mut [Line]) -> Line {
    let problem = program.problem;
    let mut around = Line::default();
    for (region, class) in program.classes() {
        let there = program.counts[region][class].iter().filter(|(choice, _)| choice.of(phase) == place);
        for (choice, variable) in there {
            let there = Line::sum([*variable]);
            let least = |ms: &dyn Fn(Way) -> f64| {
                program.least(region, class, |i| problem.visits(i, *choice, phase).map(ms).sum::<f64>())
            };
            around.add(&there, least(&|way| problem.way_ms(way)));
            for (gpu, link) in links.iter_mut().enumerate() {
                let to = |way: Way| if way.to == Some(gpu) { problem.upload_ms(gpu, way.tensors) } else { 0.0 };
                link.add(&there, least(&to));
            }
        }
    }
    around
}

/// Adds the crossings.
fn cross(program: &Program, order: &Order, phase: Phase, chain: &mut Line, links: &mut [Line]) {
    let problem = program.problem;
    let in_all = |block: usize, ms: &dyn Fn(Tensors) -> f64| -> f64 {
        (0..problem.passes(phase)).map(|pass| ms(problem.boundary(block, phase, pass))).sum()
    };
    let mut add = |(a, b): (usize, usize), times: &Line, blocks: &mut dyn Iterator<Item = usize>| {
        let (from, to) = (order.places[a].gpu(), order.places[b].gpu());
        if from == to {
            return;
        }
        let blocks: Vec<usize> = blocks.collect();
        let least = |ms: &dyn Fn(Tensors) -> f64| blocks.iter().map(|i| in_all(*i, ms)).fold(f64::INFINITY, f64::min);
        if let Some(gpu) = from {
            chain.add(times, least(&|tensors| problem.download_ms(gpu, tensors)));
        }
        if let Some(gpu) = to {
            let ms = least(&|tensors| problem.upload_ms(gpu, tensors));
            chain.add(times, ms);
            links[gpu].add(times, ms);
        }
    };
    for (region, a, b, times) in &order.inside {
        let blocks = program.regions[*region].blocks.clone();
        add((*a, *b), times, &mut (blocks.start + 1..blocks.end));
    }
    for (region, a, b, times) in &order.between {
        add((*a, *b), times, &mut std::iter::once(program.regions[*region].blocks.start));
    }
}

/// Time of the handover of state after the prompt.
fn hand_over(program: &Program) -> Line {
    let mut all = Line::default();
    for (region, class) in program.classes() {
        for (choice, variable) in &program.counts[region][class] {
            let ms = program.least(region, class, |i| program.problem.handover_ms(i, *choice));
            all.add(&Line::sum([*variable]), ms);
        }
    }
    all
}

/// Time of the copies of weights to a GPU in all passes.
fn copies(program: &Program, phase: Phase, gpu: usize) -> Line {
    let passes = program.problem.passes(phase) as f64;
    let mut copies = Line::default();
    for (region, class) in program.classes() {
        let there = program.count(region, class, |choice| choice.of(phase) == Where::Streamed(gpu));
        if !there.is_nothing() {
            copies.add(&there, passes * program.least(region, class, |i| program.problem.stream_ms(i, gpu)));
        }
    }
    copies
}

/// Contention between streaming and the host: the three inequalities of [`crate::bound`], with the overlap as a variable.
fn share(program: &mut Program, gpu: usize, [ms, chain, link, host]: [&Line; 4]) {
    let costs = &program.problem.gpus[gpu];
    let (a, b) = (costs.compute_contention.max(1.0), costs.link_contention.max(1.0));
    if a == 1.0 && b == 1.0 {
        program.lines.at_least(ms, link);
        return;
    }
    let overlap = program.lines.real(0.0);
    let lines = &mut program.lines;
    lines.at_least(&Line::default().plus(host, a), &overlap);
    lines.at_least(ms, &chain.clone().plus(&overlap, 1.0 - 1.0 / a));
    lines.at_least(ms, &link.clone().plus(&overlap, 1.0 - 1.0 / b));
    lines.at_least(ms, &link.clone().plus(host, 1.0).plus(&overlap, 1.0 - 1.0 / a - 1.0 / b));
}

/// A prompt ends after the last copy, the last streamed block and all blocks after it. The solution decides which region streams last:
/// the tail of a region is reduced if a later region streams.
fn tail(program: &mut Program, phase: Phase, gpu: usize, ms: &Line, link: &Line) {
    let (problem, place) = (program.problem, Where::Streamed(gpu));
    if phase == Phase::Decode || problem.passes(phase) == 0 {
        return;
    }
    let last = problem.passes(phase) - 1;
    let mut behind = problem.pass_ms;
    let mut later: Vec<(f64, Line)> = Vec::new();
    for region in (0..program.regions.len()).rev() {
        let classes = 0..program.regions[region].classes.len();
        let there = |class: usize| program.count(region, class, |choice| choice.of(phase) == place);
        let streams: Vec<(usize, Line)> =
            classes.map(|class| (class, there(class))).filter(|(_, there)| !there.is_nothing()).collect();
        if !streams.is_empty() {
            let own = |class: usize| program.least(region, class, |i| problem.block_ms(i, place, phase, last));
            let own = streams.iter().map(|(class, _)| own(*class)).fold(f64::INFINITY, f64::min);
            let tail = own + problem.launch_ms(place) + behind;
            let all = streams.iter().fold(Line::default(), |sum, (_, there)| sum.plus(there, 1.0));
            let used = program.whether(region, all);
            let mut least = link.clone().plus(&used, tail);
            later.iter().for_each(|(theirs, used)| least.add(used, -(tail - theirs).max(0.0)));
            program.lines.at_least(ms, &least);
            later.push((tail, used));
        }
        behind += program.fastest(region, phase, last);
    }
}

/// Limit from the slots: before each burst of streamed blocks at most one ring of copies can be complete.
fn window(program: &mut Program, order: &Order, (gpu, place): (usize, usize), phase: Phase, ms: &Line, all: &Line) {
    let problem = program.problem;
    let could = |(region, class): &(usize, usize)| {
        !program.count(*region, *class, |choice| choice.of(phase) == Where::Streamed(gpu)).is_nothing()
    };
    let blocks = program.classes().into_iter().filter(could);
    let blocks = blocks.flat_map(|(region, class)| program.regions[region].classes[class].iter());
    let largest = blocks.map(|i| problem.stream_ms(*i, gpu)).fold(0.0, f64::max);
    let ring = f64::from(program.goal.slots[gpu]) * largest * problem.passes(phase) as f64;
    let least = all.clone().plus(&order.bursts(place), -ring);
    program.lines.at_least(ms, &least);
}

impl Program<'_> {
    /// 1 if the count of a region is above 0, else 0.
    fn whether(&mut self, region: usize, count: Line) -> Line {
        let blocks = self.regions[region].blocks.len();
        if blocks == 1 {
            return count;
        }
        let used = self.lines.whole(1);
        self.lines.at_least(&Line::default().plus(&used, blocks as f64), &count);
        self.lines.at_least(&count, &used);
        used
    }

    /// Compute time of a region in one pass with each block at its fastest place.
    fn fastest(&self, region: usize, phase: Phase, pass: usize) -> f64 {
        let of = |class: usize| {
            let members = self.regions[region].classes[class].len() as f64;
            let places = self.counts[region][class].iter().map(|(choice, _)| choice.of(phase));
            let ms = |place| self.least(region, class, |i| self.problem.block_ms(i, place, phase, pass));
            members * places.map(ms).fold(f64::INFINITY, f64::min)
        };
        (0..self.regions[region].classes.len()).map(of).sum()
    }
}

/// Time of reading the weights that exceed host memory: at most that of [`crate::Usage::missing`].
///
/// Let W be the packed weights of a phase, G the part of them that is copied to GPUs, B the other demand on host memory, M the memory,
/// f the share that stays pinned, c the part that is decompressed and d the bytes read for each of its bytes. The program has w and g
/// bytes of the model, at most those of the evaluator. Packed they are p times as large, rounded up: `W >= w p` and `G >= g p`.
///
/// - If all of W stays, nothing is read and `W + B <= M`: both lines below are at most `W + B - M`, not above 0.
/// - Else `f W <= M - B`, because the rest of the largest block and read-ahead reduce that room (or f is 0 and a
///   placement that fits has `B <= M`). The evaluator reads `W - f W - (1 - d) min(c (W - G), (1 - f) (W - G))`, which is
///   - at least `W - f W - (1 - d) c (W - G)`, so with `k = (1 - d) c` at least `(1 - k) w p + k g p + B - M`;
///   - at least `W - f W - (1 - d) (1 - f) W = d (W - f W)`, so at least `d (w p + B - M)`.
///
/// The evaluator also rounds up the bytes that are read.
fn disk(program: &mut Program, phase: Phase, ms: &Line, handover: &Line) {
    let problem = program.problem;
    let (Some(rate), Some(ram)) = (problem.disk_bytes_per_ms, problem.budget.host()) else { return };
    if !may_read_disk(problem, program.goal.mechanisms) {
        return;
    }
    let passes = problem.passes(phase) as f64;
    let per_unit = passes * program.bytes / rate;
    let is_read = |choice: Choice| !matches!(choice.of(phase), Where::Resident(_));
    let reads = program.distinct(|block| &block.weights, |i| !problem.reads_rows(i), is_read);
    let beside = state_and_workspace(program).plus(&Line::constant(ram as f64 / program.bytes), -1.0);
    let packing = problem.budget.packing;
    let (growth, unread) = (packing.growth(), packing.unread_share() * packing.made_share());
    let mut missing = beside.clone().plus(&reads, growth * (1.0 - unread));
    if unread > 0.0 {
        let is_copied = |choice: Choice| matches!(choice.of(phase), Where::Streamed(_));
        let copied = program.distinct(|block| &block.weights, |i| !problem.reads_rows(i), is_copied);
        missing.add(&copied, growth * unread);
        let made = beside.plus(&reads, growth);
        let per_unit = per_unit * (1.0 - packing.unread_share());
        program.lines.at_least(ms, &handover.clone().plus(&made, per_unit));
    }
    program.lines.at_least(ms, &handover.clone().plus(&missing, per_unit));
}
