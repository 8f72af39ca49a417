//! Costs from a machine's rates with the roofline model: the maximum of the time to move the bytes and the time to
//! compute.

use super::{DeviceCosts, gpu_costs, passes, per_ms};
use crate::Analysis;
use hpp_partition::{BlockSpec, Cost, SHORT_PASS_TOKENS, Work, Workload};
use hpp_schema::{Machine, Provider};

/// Rates of one processor.
#[derive(Clone, Copy)]
pub(super) struct Roofline {
    /// Memory bandwidth, bytes per millisecond.
    bytes: f64,
    /// Arithmetic, operations per millisecond.
    flops: f64,
}

impl Roofline {
    fn new(memory_gb_per_s: f64, tflops: f64) -> Self {
        Roofline { bytes: per_ms(memory_gb_per_s), flops: tflops * 1e9 }
    }

    /// The rates of the processor of a provider; without its rates only bytes count.
    pub fn of(machine: Option<&Machine>, provider: Provider) -> Self {
        let gpu = machine.and_then(|machine| machine.gpus.iter().find(|gpu| gpu.provider == provider));
        match (gpu, machine) {
            (Some(gpu), _) => Roofline::new(gpu.memory_gb_per_s, gpu.tflops),
            (None, Some(machine)) if provider.uses_host_memory() => {
                Roofline::new(machine.cpu.memory_gb_per_s, machine.cpu.tflops)
            }
            _ => Roofline { bytes: 1.0, flops: f64::INFINITY },
        }
    }

    /// Milliseconds.
    pub fn ms(self, work: Work) -> f64 {
        (work.bytes as f64 / self.bytes).max(work.flops as f64 / self.flops)
    }

    fn costs(self, blocks: &[BlockSpec], prefill: &[Vec<Work>]) -> Vec<Cost> {
        let cost = |(index, block): (usize, &BlockSpec)| Cost {
            decode_ms: self.ms(block.decode),
            short_pass_ms: SHORT_PASS_TOKENS.iter().map(|tokens| self.ms(times(block.decode, *tokens))).collect(),
            prefill_ms: prefill.iter().map(|pass| self.ms(pass[index])).collect(),
        };
        blocks.iter().enumerate().map(cost).collect()
    }
}

/// The work of several tokens at once: the weights and the state are read once.
fn times(work: Work, tokens: u64) -> Work {
    Work { flops: work.flops.saturating_mul(tokens), ..work }
}

/// Costs on this machine with its first `gpus` GPUs.
pub fn costs(
    analysis: &Analysis,
    blocks: &[BlockSpec],
    workload: &Workload,
    machine: &Machine,
    gpus: usize,
) -> DeviceCosts {
    let prefill = passes::work(analysis, workload.batch, &workload.passes);
    let cpu = &machine.cpu;
    let on_gpu = |gpu: &hpp_schema::GpuRates| {
        let blocks = Roofline::new(gpu.memory_gb_per_s, gpu.tflops).costs(blocks, &prefill);
        gpu_costs(gpu, blocks, gpu.launch_us / 1e3)
    };
    DeviceCosts {
        cpu: Roofline::new(cpu.memory_gb_per_s, cpu.tflops).costs(blocks, &prefill),
        gpus: machine.gpus.iter().take(gpus).map(on_gpu).collect(),
        cpu_launch_ms: cpu.launch_us / 1e3,
    }
}
