//! The machine's rates for planning, taken from the bandwidth curves and, for a device's memory and arithmetic, from the measured
//! blocks.

use crate::derive::{PHASES, median, phase_costs};
use crate::estimate::RooflineEstimator;
use crate::fit::{CurveTerms, Sample, fit};
use hpp_schema::{
    BandwidthCurve, BandwidthPath, BandwidthPoint, Contention, CpuRates, DiskRates, GpuRates, HostDevice, Link,
    MACHINE_VERSION, Machine, Profile, Provider,
};

/// The rates; `None` until memory bandwidth, arithmetic and launch cost of the host are measured.
pub fn rates(profile: &Profile, roofline: &RooflineEstimator) -> Option<Machine> {
    let of_host = curve(profile, |path| *path == BandwidthPath::RamRead)?;
    let cpu = CpuRates {
        memory: profile.host.memory,
        memory_gb_per_s: planning_point(of_host)?.gb_per_s,
        tflops: profile.machine.tflops?,
        launch_us: launch_us(profile, Provider::CPU)?,
    };
    let disk = curve(profile, |path| *path == BandwidthPath::DiskRead).and_then(rate);
    let providers = profile.settings.providers.iter().filter(|provider| !provider.uses_host_memory());
    let gpus: Vec<GpuRates> = providers.filter_map(|provider| gpu(profile, roofline, *provider)).collect();
    let mut sources = vec!["host: reading memory and matrix products with the threads used, measured".to_owned()];
    sources.extend(gpus.iter().map(|gpu| {
        let name = gpu.provider.id();
        format!("{name}: link measured; memory and arithmetic are what the model's own blocks get there")
    }));
    let name = format!("{}, {} threads", profile.host.cpu, profile.host.threads);
    let decompress_gb_per_s = curve(profile, |path| *path == BandwidthPath::Decompress).and_then(rate);
    let disk = disk.map(|read_gb_per_s| DiskRates {
        read_gb_per_s,
        decompress_gb_per_s,
        contention: profile.machine.disk_contention,
    });
    Some(Machine { hpp_machine: MACHINE_VERSION, name, sources, cpu, gpus, disk })
}

fn gpu(profile: &Profile, roofline: &RooflineEstimator, provider: Provider) -> Option<GpuRates> {
    let device = profile.host.devices.iter().find(|device| device.provider == provider)?;
    let (memory_gb_per_s, tflops) = achieved(profile, roofline, provider)?;
    let contention = profile.machine.contention.iter().find(|found| found.provider == provider);
    Some(GpuRates {
        name: device.name.clone(),
        provider,
        memory: memory(device, profile),
        memory_gb_per_s,
        tflops,
        launch_us: launch_us(profile, provider)?,
        link: link(profile, provider)?,
        // A factor below 1 is noise: sharing makes nothing faster.
        contention: contention.map(|c| Contention { compute: c.compute.max(1.0), link: c.link.max(1.0) }),
    })
}

/// The device's memory; a device without its own memory shares the host's.
fn memory(device: &HostDevice, profile: &Profile) -> hpp_schema::ByteSize {
    device.memory.filter(|memory| memory.0 > 0).unwrap_or(profile.host.memory)
}

/// The highest memory bandwidth (1e9 bytes per second) and arithmetic rate (1e12 operations per second) of any measured block.
fn achieved(profile: &Profile, roofline: &RooflineEstimator, provider: Provider) -> Option<(f64, f64)> {
    let (mut bandwidth, mut tflops) = (0.0f64, 0.0f64);
    for entry in &profile.classes {
        let block = profile.model.blocks.iter().position(|block| block.label == entry.block)?;
        let Some(costs) = entry.providers.iter().find(|costs| costs.provider == provider) else { continue };
        for phase in PHASES {
            for point in &phase_costs(costs, phase).points {
                let Some(ms) = point.ms.filter(|ms| *ms > 0.0) else { continue };
                let work = roofline.work(phase, point.tokens, block);
                // The time of a small block is mostly launch cost and has no information about rates.
                if point.single.is_some_and(|single| ms > single.median_ms / 4.0) {
                    bandwidth = bandwidth.max(work.bytes as f64 / ms / 1e6);
                    tflops = tflops.max(work.flops as f64 / ms / 1e9);
                }
            }
        }
    }
    (bandwidth > 0.0 && tflops > 0.0).then_some((bandwidth, tflops))
}

/// The median launch cost of the measured runs; without runs, the time of the fastest partition, which is mostly launch cost.
fn launch_us(profile: &Profile, provider: Provider) -> Option<f64> {
    let costs = || profile.classes.iter().flat_map(|entry| &entry.providers).filter(|costs| costs.provider == provider);
    let shown = median(costs().filter_map(|costs| costs.launch_ms).collect());
    let singles = costs().flat_map(|costs| &costs.decode.points).filter_map(|point| point.single);
    let shortest = singles.map(|single| single.median_ms).reduce(f64::min);
    shown.or(shortest).map(|ms| ms * 1e3)
}

/// The link's rates from pinned memory if measured, else from pageable memory.
fn link(profile: &Profile, provider: Provider) -> Option<Link> {
    let link_rate = |to: bool| {
        let pinned = |is: bool| {
            let path = BandwidthPath::Link { provider, to_device: to, pinned: is };
            curve(profile, |other| *other == path)
        };
        pinned(true).or_else(|| pinned(false))
    };
    let (to, from) = (link_rate(true)?, link_rate(false)?);
    Some(Link {
        to_device_gb_per_s: rate(to)?,
        from_device_gb_per_s: rate(from)?,
        latency_us: f64::midpoint(latency_us(to)?, latency_us(from)?),
    })
}

/// Latency of a copy: the intercept of the line fitted to copy time over bytes.
fn latency_us(curve: &BandwidthCurve) -> Option<f64> {
    let ms = |bytes: u64, gb_per_s: f64| bytes as f64 / gb_per_s / 1e6;
    let times = curve.points.iter().map(|p| Sample { tokens: p.bytes, ms: ms(p.bytes, p.gb_per_s) });
    let line = fit(CurveTerms::Decode, &times.collect::<Vec<_>>())?;
    // One size alone does not separate latency from bandwidth.
    Some(if curve.points.len() > 1 { line.constant_ms * 1e3 } else { 0.0 })
}

fn curve(profile: &Profile, is: impl Fn(&BandwidthPath) -> bool) -> Option<&BandwidthCurve> {
    profile.machine.curves.iter().find(|curve| is(&curve.path) && !curve.points.is_empty())
}

fn rate(curve: &BandwidthCurve) -> Option<f64> {
    planning_point(curve).map(|point| point.gb_per_s)
}

/// The point of a curve that planning uses and tables show. For memory the largest array, because weights are read
/// sequentially and exceed every cache; for links and disk the fastest, because the runtime chooses the size of a transfer.
pub fn planning_point(curve: &BandwidthCurve) -> Option<&BandwidthPoint> {
    match curve.path {
        BandwidthPath::RamRead => curve.points.last(),
        _ => curve.points.iter().max_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s)),
    }
}

#[cfg(test)]
mod tests;
