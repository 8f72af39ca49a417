//! Profiles as real runs would produce them, with numbers that fit together, made without a run.

use crate::report::{BlockWork, Sweep};
use hpp_partition::{BlockPlacement, DeviceId, OverBudget, Phase, Placement, Solution, SweepPoint, Work, Workload};
use hpp_schema::*;

pub mod corpus;

/// What the profile contains besides times.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Repeated layers.
    pub layers: u32,
    /// Experts of each layer; 0 for a dense model.
    pub experts: usize,
    /// Whether a WebGPU device was measured.
    pub device: bool,
    /// Whether a corpus was run.
    pub corpus: bool,
    /// Whether the networks are ReLU networks.
    pub relu: bool,
    /// Whether attention entropy was asked for.
    pub attention: bool,
    /// Whether rounding was tried.
    pub sensitivity: bool,
    /// Whether some measurements failed.
    pub failures: bool,
}

/// Everything a report can show.
pub const FULL: Sample = Sample {
    layers: 24,
    experts: 32,
    device: true,
    corpus: true,
    relu: true,
    attention: true,
    sensitivity: true,
    failures: true,
};

/// The least a profile holds: times on the CPU.
pub const BARE: Sample = Sample {
    layers: 12,
    experts: 0,
    device: false,
    corpus: false,
    relu: false,
    attention: false,
    sensitivity: false,
    failures: false,
};

/// Contexts and prompts of the sample.
const CONTEXTS: [u64; 4] = [128, 512, 1024, 2048];
const PROMPTS: [u64; 4] = [16, 64, 128, 512];

/// A number between 0 and 1 that depends on the arguments alone and looks random (the finaliser of SplitMix64).
pub fn noise(a: usize, b: usize) -> f64 {
    let mut x = (a as u64) << 32 | b as u64;
    x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x ^ (x >> 31)) as f64 / u64::MAX as f64
}

/// Bytes, operations per token and state per token of a block of a class: embedding, layer, head.
fn size(class: u32) -> (u64, u64, u64) {
    match class {
        0 => (298 << 20, 0, 0),
        1 => (15 << 20, 2 * (15 << 20) / 2, 4096),
        _ => (149 << 20, 2 * (149 << 20) / 2, 0),
    }
}

struct Speed {
    bandwidth: f64,
    flops: f64,
    launch: f64,
}

fn speed(provider: Provider) -> Speed {
    match provider {
        Provider::CPU => Speed { bandwidth: 11.2e9 * 0.86, flops: 180e9 * 0.7, launch: 0.021 },
        _ => Speed { bandwidth: 96e9 * 0.55, flops: 2.1e12 * 0.4, launch: 0.31 },
    }
}

/// Operations and bytes of a block.
fn work(class: u32, phase: Phase, tokens: u64) -> Work {
    let (bytes, flops, state) = size(class);
    if class == 0 {
        return Work { flops: 0, bytes: 2048 * if phase == Phase::Decode { 1 } else { tokens } };
    }
    match phase {
        Phase::Decode => Work { flops: flops + tokens * state, bytes: bytes + tokens * state },
        Phase::Prefill => Work { flops: flops * tokens + tokens * tokens * state / 2, bytes },
    }
}

fn ms(class: u32, provider: Provider, phase: Phase, tokens: u64) -> f64 {
    let (speed, work) = (speed(provider), work(class, phase, tokens));
    let least = 1e3 * (work.bytes as f64 / speed.bandwidth).max(work.flops as f64 / speed.flops);
    least * (1.0 + 0.06 * noise(class as usize, tokens as usize)) + 0.004
}

impl Sample {
    /// Labels of the blocks, in order.
    pub fn labels(&self) -> Vec<String> {
        let layers = (0..self.layers).map(|layer| format!("layers.{layer}"));
        std::iter::once("embedding".to_owned()).chain(layers).chain(["head".to_owned()]).collect()
    }

    /// Labels of the layers, in order.
    pub fn layers(&self) -> Vec<String> {
        self.labels()[1..=self.layers as usize].to_vec()
    }

    fn class(&self, block: usize) -> u32 {
        if block == 0 {
            0
        } else if block <= self.layers as usize {
            1
        } else {
            2
        }
    }

    fn providers(&self) -> Vec<Provider> {
        if self.device { vec![Provider::CPU, Provider::WEBGPU] } else { vec![Provider::CPU] }
    }

    /// The profile.
    pub fn profile(&self) -> Profile {
        let labels = self.labels();
        let block = |(at, label): (usize, &String)| {
            let class = self.class(at);
            ProfiledBlock { label: label.clone(), class, weight_bytes: ByteSize(size(class).0) }
        };
        let blocks: Vec<ProfiledBlock> = labels.iter().enumerate().map(block).collect();
        Profile {
            hpp_profile: PROFILE_VERSION,
            model: ProfiledModel {
                name: "sample-0.6b-int4".into(),
                hash: "5f0c2ab19e77d3416680".into(),
                weight_bytes: ByteSize(blocks.iter().map(|block| block.weight_bytes.0).sum()),
                blocks,
            },
            host: self.host(),
            date: "2025-11-21T12:00:00Z".into(),
            settings: ProfileSettings {
                provider_options: Default::default(),
                providers: self.providers(),
                contexts: CONTEXTS.into(),
                prefill_tokens: PROMPTS.into(),
                quick: false,
                all_blocks: false,
                activations: Default::default(),
                decode_tokens: 32,
            },
            machine: self.machine(),
            pass: None,
            classes: (0..3).map(|class| self.costs(class)).collect(),
            corpus: self.corpus.then(|| corpus::statistics(self)),
            sensitivity: if self.sensitivity { corpus::sensitivity(self) } else { Vec::new() },
            hotness: if self.device { self.hotness() } else { Vec::new() },
            others_cpu_share: None,
            notes: Vec::new(),
        }
    }

    fn host(&self) -> Host {
        let device = |provider, name: &str| HostDevice { provider, name: name.into(), memory: None };
        Host {
            cpu: "Sample CPU @ 2.1 GHz".into(),
            cores: 8,
            memory: ByteSize(32 << 30),
            system: "linux x86_64".into(),
            threads: 8,
            onnxruntime: "1.31.1".into(),
            hpp: "0.1.0".into(),
            devices: if self.device { vec![device(Provider::WEBGPU, "Sample GPU")] } else { Vec::new() },
        }
    }

    fn costs(&self, class: u32) -> ClassCosts {
        let block = ["embedding", "layers.0", "head"][class as usize];
        let provider_costs = |provider| {
            let fails = self.failures && provider == Provider::WEBGPU;
            let phase = |phase, tokens: &[u64]| {
                let point = |tokens: &u64| {
                    let failure = (fails && class == 2 && *tokens == 512 && phase == Phase::Prefill)
                        .then(|| "out of memory: 1.2 GiB asked for, 0.9 GiB free".to_owned());
                    let time = ms(class, provider, phase, *tokens);
                    let timing = TimingStats { runs: 20, median_ms: time, p10_ms: 0.97 * time, p90_ms: 1.08 * time };
                    let single = failure.is_none().then_some(timing);
                    CostPoint { tokens: *tokens, ms: single.map(|t| t.median_ms), single, run: single, failure }
                };
                let points: Vec<CostPoint> = tokens.iter().map(point).collect();
                PhaseCosts { fit: fit(&points), points }
            };
            ProviderCosts {
                provider,
                run_length: if class == 1 { 4 } else { 1 },
                launch_ms: (class == 1).then_some(speed(provider).launch),
                decode: phase(Phase::Decode, &CONTEXTS),
                prefill: phase(Phase::Prefill, &PROMPTS),
                memory: None,
                failure: None,
            }
        };
        ClassCosts { class, block: block.into(), providers: self.providers().into_iter().map(provider_costs).collect() }
    }

    fn machine(&self) -> MeasuredMachine {
        let curve = |path, top: f64, half: f64| {
            let point = |power: u32| {
                let bytes = 1u64 << power;
                BandwidthPoint { bytes, gb_per_s: top * bytes as f64 / (bytes as f64 + half) }
            };
            BandwidthCurve { path, points: (12..=28).step_by(2).map(point).collect() }
        };
        let mut curves = vec![curve(BandwidthPath::RamRead, 11.2, 1e5), curve(BandwidthPath::DiskRead, 2.1, 4e5)];
        if self.device {
            for (to_device, pinned, top) in
                [(true, true, 12.4), (true, false, 6.1), (false, true, 11.7), (false, false, 4.9)]
            {
                curves.push(curve(BandwidthPath::Link { provider: Provider::WEBGPU, to_device, pinned }, top, 3e5));
            }
        }
        let gpu = || GpuRates {
            name: "Sample GPU".into(),
            provider: Provider::WEBGPU,
            memory: ByteSize(8 << 30),
            memory_gb_per_s: 96.0,
            tflops: 2.1,
            launch_us: 310.0,
            link: Link { to_device_gb_per_s: 12.4, from_device_gb_per_s: 11.7, latency_us: 24.0 },
            contention: Some(Contention { compute: 1.18, link: 1.32 }),
        };
        let rates = Machine {
            hpp_machine: MACHINE_VERSION,
            name: "this machine".into(),
            sources: Vec::new(),
            cpu: CpuRates { memory: ByteSize(32 << 30), memory_gb_per_s: 11.2, tflops: 0.18, launch_us: 21.0 },
            gpus: if self.device { vec![gpu()] } else { Vec::new() },
            disk: Some(DiskRates { read_gb_per_s: 2.1, decompress_gb_per_s: Some(8.0), contention: None }),
        };
        let failures = if self.failures { vec!["disk at 1 GiB: the file is smaller".to_owned()] } else { Vec::new() };
        let contention = MeasuredContention { provider: Provider::WEBGPU, compute: 1.18, link: 1.32 };
        MeasuredMachine {
            rates: Some(rates),
            curves,
            tflops: Some(0.18),
            contention: if self.device { vec![contention] } else { Vec::new() },
            disk_contention: self.device.then_some(DiskContention { compute: 1.4, read: 1.1 }),
            failures,
        }
    }

    fn hotness(&self) -> Vec<BlockHotness> {
        let terms = |class: u32, phase, tokens| {
            let (bytes, _, state) = size(class);
            let (cpu_ms, gpu_ms) =
                (ms(class, Provider::CPU, phase, tokens), ms(class, Provider::WEBGPU, phase, tokens));
            let kv_bytes = state * 2048;
            let ms_per_gib = (cpu_ms - gpu_ms) / (bytes + kv_bytes) as f64 * (1u64 << 30) as f64;
            HotnessTerms { cpu_ms, gpu_ms, weight_bytes: bytes, kv_bytes, ms_per_gib }
        };
        let block_hotness = |(at, block): (usize, String)| BlockHotness {
            block,
            provider: Provider::WEBGPU,
            decode: terms(self.class(at), Phase::Decode, 2048),
            prefill: terms(self.class(at), Phase::Prefill, 512),
        };
        self.labels().into_iter().enumerate().map(block_hotness).collect()
    }

    /// Work of every block at the measured token counts.
    pub fn work(&self) -> Vec<BlockWork> {
        let block_work = |(at, block): (usize, String)| {
            let list = |phase, tokens: &[u64]| tokens.iter().map(|t| (*t, work(self.class(at), phase, *t))).collect();
            let (decode, prefill) = (list(Phase::Decode, &CONTEXTS), list(Phase::Prefill, &PROMPTS));
            BlockWork { block, decode, prefill }
        };
        self.labels().into_iter().enumerate().map(block_work).collect()
    }

    /// Plans for 1 to 8 GiB in steps of a quarter. The first one holds no block on the device.
    pub fn sweep(&self) -> Sweep {
        if !self.device {
            return Sweep::Absent("This machine has no device to plan for.".into());
        }
        let blocks = self.labels().len();
        let point = |at: u64| {
            let vram = at << 28;
            let held = (blocks as u64 * at / 16).min(blocks as u64) as usize;
            SweepPoint { vram, solution: if at == 1 { Err(too_small(vram)) } else { Ok(solution(blocks, held)) } }
        };
        Sweep::Done {
            points: (1..=20).map(point).collect(),
            load: Workload { batch: 1, sequences: 1, prompt_tokens: 512, new_tokens: 256, passes: vec![512] },
            gpu: "Sample GPU".into(),
        }
    }
}

fn too_small(vram: u64) -> OverBudget {
    OverBudget { device: DeviceId::Gpu(0), demand: Default::default(), budget: vram, margin: vram + 1, draft: 0 }
}

fn solution(blocks: usize, held: usize) -> Solution {
    let place = |at| if at < held { Placement::Resident(0) } else { Placement::Cpu };
    let decode_ms = 52.0 - 38.0 * held as f64 / blocks as f64;
    let prefill_ms = 2900.0 - 2300.0 * held as f64 / blocks as f64;
    Solution {
        placements: (0..blocks).map(|at| BlockPlacement::both(place(at))).collect(),
        slots: vec![0],
        decode_ms,
        prefill_ms,
        objective_ms: decode_ms,
        bound_ms: decode_ms,
        proven: true,
    }
}

/// The line through the first and the last point, with its largest distance from the others.
fn fit(points: &[CostPoint]) -> Option<Fit> {
    let known: Vec<(f64, f64)> = points.iter().filter_map(|p| Some((p.tokens as f64, p.ms?))).collect();
    let ([first, .., last], true) = (known.as_slice(), known.len() > 2) else { return None };
    let linear_ms = ((last.1 - first.1) / (last.0 - first.0)).max(0.0);
    let constant_ms = (first.1 - linear_ms * first.0).max(0.0);
    let error = |(tokens, ms): &(f64, f64)| ((constant_ms + linear_ms * tokens - ms) / ms).abs();
    let worst_relative_error = known.iter().map(error).fold(0.0, f64::max);
    Some(Fit { constant_ms, linear_ms, quadratic_ms: 0.0, worst_relative_error, r2: 0.997 })
}
