//! `--objective throughput`: the number of sequences that share passes, and the place of their states.

use crate::cli::{KvHomeArg, SplitArgs};
use crate::error::SplitError;
use crate::partitioning::{DecidedBy, over_budget};
use crate::request::{PlanningRequest, max_host_bytes};
use hpp_partition::{Budget, KvHome, Mechanisms, Options, Problem, Solution, plan_throughput, tokens_per_second};
use hpp_schema::ByteSize;

/// Makes the request one for the number of sequences whose plan generates most tokens per second, and for the better place of their
/// states: with the layers, or in host memory.
pub fn choose_sequences(request: &mut PlanningRequest, args: &SplitArgs) -> Result<(), SplitError> {
    let mut single = request.problem.clone();
    let free = request.local.ram().filter(|_| args.ram.is_none());
    single.budget.ram = single.budget.ram.or(free);
    let mut found =
        plan_throughput(&single, &request.options).map(|(problem, solution)| (problem, solution, request.options));
    if args.kv == KvHomeArg::Follow && !single.gpus.is_empty() {
        let on_host = Problem { budget: Budget { kv: KvHome::Host, ..single.budget.clone() }, ..single.clone() };
        let mechanisms = match request.options.mechanisms {
            Mechanisms::All if !args.planning.requests_streaming() => Mechanisms::ResidentCpuDisk,
            mechanisms => mechanisms,
        };
        let options = Options { mechanisms, ..request.options };
        let rate = |problem: &Problem, solution: &Solution| {
            tokens_per_second(problem, solution.prefill_ms, solution.decode_ms)
        };
        let other = plan_throughput(&on_host, &options).map(|(problem, solution)| (problem, solution, options));
        let is_better = match (&found, &other) {
            (Ok((problem, solution, _)), Ok((other, others, _))) => rate(other, others) > rate(problem, solution),
            (Err(_), Ok(_)) => true,
            _ => false,
        };
        if is_better {
            (single, found) = (on_host, other);
        }
    }
    let (problem, _, options) = found.map_err(over_budget(request, DecidedBy::Planner))?;
    if let Some(ram) = free.filter(|ram| *ram < max_host_bytes(&problem)) {
        request.recorded_budgets.ram = Some(ByteSize(ram));
    }
    (request.problem, request.single, request.options) = (problem, Some(single), options);
    Ok(())
}
