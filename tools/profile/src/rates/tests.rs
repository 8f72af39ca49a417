//! The machine's rates from its bandwidth curves.

use super::*;
use crate::derive::derive;
use crate::effort::Effort;
use crate::sample;
use hpp_schema::{BandwidthPoint, ByteSize, DiskContention, MeasuredContention};

fn curve_of(path: BandwidthPath, points: &[(u64, f64)]) -> BandwidthCurve {
    let points = points.iter().map(|(bytes, gb_per_s)| BandwidthPoint { bytes: *bytes, gb_per_s: *gb_per_s }).collect();
    BandwidthCurve { path, points }
}

/// A link with 10 us and 5 GB/s.
fn link_curve(to_device: bool, pinned: bool) -> BandwidthCurve {
    let path = BandwidthPath::Link { provider: Provider::WEBGPU, to_device, pinned };
    let gb_per_s = |bytes: f64| bytes / (10e-6 + bytes / 5e9) / 1e9;
    curve_of(path, &[4096.0, 65536.0, 1e6, 16e6].map(|bytes| (bytes as u64, gb_per_s(bytes))))
}

fn profile(providers: &[Provider]) -> (hpp_model::Analysis, Profile) {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(providers));
    providers.iter().for_each(|provider| sample::time_all(&mut profile, *provider, 2.0));
    derive(&mut profile);
    (analysis, profile)
}

#[test]
fn there_are_no_rates_before_all_of_the_host_is_measured() {
    let (analysis, mut profile) = profile(&[Provider::CPU]);
    let roofline = RooflineEstimator::new(&analysis, Effort::Quick, 0);
    assert_eq!(rates(&profile, &roofline), None);
    profile.machine.curves.push(curve_of(BandwidthPath::RamRead, &[(1 << 20, 90.0), (1 << 28, 20.0)]));
    assert_eq!(rates(&profile, &roofline), None);
    profile.machine.tflops = Some(0.25);
    let machine = rates(&profile, &roofline).unwrap();
    assert_eq!((machine.cpu.memory_gb_per_s, machine.cpu.tflops), (20.0, 0.25), "memory, not caches");
    assert!((machine.cpu.launch_us - 100.0).abs() < 1e-6, "{}", machine.cpu.launch_us);
    assert!(machine.gpus.is_empty() && machine.disk.is_none());
    profile.machine.curves.push(curve_of(BandwidthPath::DiskRead, &[(4096, 0.1), (1 << 20, 1.5), (1 << 24, 1.4)]));
    let disk = rates(&profile, &roofline).unwrap().disk.unwrap();
    assert_eq!((disk.read_gb_per_s, disk.decompress_gb_per_s), (1.5, None));
    profile.machine.curves.push(curve_of(BandwidthPath::Decompress, &[(2 << 20, 8.5)]));
    profile.machine.disk_contention = Some(DiskContention { compute: 1.4, read: 1.1 });
    let disk = rates(&profile, &roofline).unwrap().disk.unwrap();
    assert_eq!((disk.decompress_gb_per_s, disk.contention), (Some(8.5), profile.machine.disk_contention));
    assert_eq!(rates(&profile, &roofline).unwrap().check(), []);
}

#[test]
fn a_device_is_described_by_its_link_and_by_what_blocks_get_there() {
    let (analysis, mut profile) = profile(&[Provider::CPU, Provider::WEBGPU]);
    let roofline = RooflineEstimator::new(&analysis, Effort::Quick, 0);
    profile.machine.tflops = Some(0.25);
    profile.machine.curves =
        vec![curve_of(BandwidthPath::RamRead, &[(1 << 28, 20.0)]), link_curve(true, false), link_curve(false, false)];
    let gpu = rates(&profile, &roofline).unwrap().gpus[0].clone();
    assert_eq!((gpu.memory, gpu.contention), (ByteSize(8 << 30), None), "it shares the host's memory");
    assert!((gpu.link.latency_us - 10.0).abs() < 0.1, "{:?}", gpu.link);
    assert!((gpu.link.to_device_gb_per_s - 5.0).abs() < 0.1, "{:?}", gpu.link);
    assert!(gpu.memory_gb_per_s > 0.0 && gpu.tflops > 0.0);
    // Rates of pinned memory are used if they were measured.
    profile.machine.curves.insert(
        1,
        curve_of(
            BandwidthPath::Link { provider: Provider::WEBGPU, to_device: true, pinned: true },
            &[(4096, 1.0), (1 << 24, 25.0)],
        ),
    );
    profile.machine.contention = vec![MeasuredContention { provider: Provider::WEBGPU, compute: 1.3, link: 0.97 }];
    let machine = rates(&profile, &roofline).unwrap();
    let gpu = &machine.gpus[0];
    assert_eq!(gpu.link.to_device_gb_per_s, 25.0);
    assert_eq!((gpu.contention.unwrap().compute, gpu.contention.unwrap().link), (1.3, 1.0));
    assert_eq!(machine.check(), []);
}

#[test]
fn a_device_without_a_link_is_left_out() {
    let (analysis, mut profile) = profile(&[Provider::CPU, Provider::WEBGPU]);
    profile.machine.tflops = Some(0.25);
    profile.machine.curves = vec![curve_of(BandwidthPath::RamRead, &[(1 << 28, 20.0)]), link_curve(true, false)];
    assert!(rates(&profile, &RooflineEstimator::new(&analysis, Effort::Quick, 0)).unwrap().gpus.is_empty());
}

#[test]
fn where_no_run_was_measured_the_shortest_partition_stands_for_a_launch() {
    let (_, mut profile) = profile(&[Provider::CPU]);
    for costs in profile.classes.iter_mut().flat_map(|entry| &mut entry.providers) {
        costs.launch_ms = None;
    }
    // Half a layer of 2 ms at 100 tokens, and a launch of 0.1 ms.
    assert!((launch_us(&profile, Provider::CPU).unwrap() - (1100.0 + 100.0)).abs() < 1e-6);
    assert_eq!(launch_us(&profile, Provider::CUDA), None);
}
