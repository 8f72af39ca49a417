//! Measures the machine: memory bandwidth, arithmetic, disk, links, and contention of links and disk with the host.

use super::ProfilingRun;
use crate::effort::Effort;
use crate::error::ProfileError;
use crate::pieces::absolute;
use crate::settings::unusable;
use hpp_schema::probe::{MachineProbe, Reply, Request};
use hpp_schema::{BandwidthCurve, BandwidthPath, DiskContention, MeasuredContention, MeasuredMachine, Provider};
use std::path::PathBuf;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Expected seconds of one path.
const SECONDS: f64 = 3.0;

/// One property of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ability {
    Memory,
    Arithmetic,
    Disk,
    DiskContention,
    Decompression,
    Link(Provider),
    Contention(Provider),
}

impl Ability {
    /// Name for users. A recorded failure starts with it.
    fn title(self) -> String {
        match self {
            Ability::Memory => "reading memory".to_owned(),
            Ability::Arithmetic => "arithmetic".to_owned(),
            Ability::Disk => "reading the disk".to_owned(),
            Ability::DiskContention => "reading from disk while the host computes".to_owned(),
            Ability::Decompression => "decompressing weights".to_owned(),
            Ability::Link(provider) => format!("copies to and from the {} device", provider.id()),
            Ability::Contention(provider) => {
                format!("copies to the {} device while the host computes", provider.id())
            }
        }
    }

    fn is_known(self, machine: &MeasuredMachine) -> bool {
        let curve = |is: &dyn Fn(&BandwidthPath) -> bool| machine.curves.iter().any(|curve| is(&curve.path));
        let measured = match self {
            Ability::Memory => curve(&|path| *path == BandwidthPath::RamRead),
            Ability::Arithmetic => machine.tflops.is_some(),
            Ability::Disk => curve(&|path| *path == BandwidthPath::DiskRead),
            Ability::DiskContention => machine.disk_contention.is_some(),
            Ability::Decompression => curve(&|path| *path == BandwidthPath::Decompress),
            Ability::Link(of) => curve(&|path| matches!(path, BandwidthPath::Link { provider, .. } if *provider == of)),
            Ability::Contention(of) => machine.contention.iter().any(|contention| contention.provider == of),
        };
        measured || machine.failures.iter().any(|failure| failure.starts_with(&format!("{}: ", self.title())))
    }
}

impl ProfilingRun<'_> {
    /// Measures every missing property of the machine.
    pub fn machine(&mut self) -> Result<(), ProfileError> {
        for ability in self.missing_abilities() {
            self.progress.begin(&ability.title());
            if let Err(why) = self.ability(ability)? {
                self.progress.warn(&format!("{}: {why}", ability.title()));
                self.profile.machine.failures.push(format!("{}: {why}", ability.title()));
            }
            self.save()?;
            self.progress.end(SECONDS);
        }
        // Killing the child frees its buffers.
        self.prober.restart();
        Ok(())
    }

    /// Expected seconds of the missing properties.
    pub fn machine_seconds(&self) -> f64 {
        self.missing_abilities().len() as f64 * SECONDS
    }

    fn missing_abilities(&self) -> Vec<Ability> {
        let mut abilities =
            vec![Ability::Memory, Ability::Arithmetic, Ability::Disk, Ability::DiskContention, Ability::Decompression];
        for provider in &self.profile.settings.providers {
            if !provider.uses_host_memory() && unusable(*provider, &self.profile.host).is_none() {
                abilities.extend([Ability::Link(*provider), Ability::Contention(*provider)]);
            }
        }
        abilities.retain(|ability| !ability.is_known(&self.profile.machine));
        abilities
    }

    fn ability(&mut self, ability: Ability) -> Result<Result<(), String>, ProfileError> {
        let Some(probe) = self.probe(ability) else { return Ok(Err("the model has no file of weights".into())) };
        let mut measured = Err("hpp-exec did not answer".to_owned());
        let failure = self.request(&Request::Machine(probe), |measure, reply| {
            measured = measure.keep(ability, reply);
            Ok(())
        })?;
        Ok(failure.map_or(measured, Err))
    }

    fn probe(&self, ability: Ability) -> Option<MachineProbe> {
        let quick = self.effort == Effort::Quick;
        let some = |quick_ones: &[u64], all: &[u64]| if quick { quick_ones.to_vec() } else { all.to_vec() };
        Some(match ability {
            Ability::Memory => MachineProbe::RamRead { bytes: self.memory_sizes() },
            Ability::Arithmetic => MachineProbe::Arithmetic,
            Ability::Disk => MachineProbe::DiskRead {
                file: self.largest_file()?,
                bytes: some(
                    // The runtime reads weights in pieces of at most 2 MiB.
                    &[64 * KIB, MIB, 2 * MIB],
                    &[4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB],
                ),
            },
            Ability::DiskContention => MachineProbe::DiskContention { file: self.largest_file()? },
            Ability::Decompression => MachineProbe::Decompress,
            Ability::Link(provider) => MachineProbe::Link {
                provider,
                bytes: some(
                    &[4 * KIB, 64 * KIB, MIB, 16 * MIB],
                    &[4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB],
                ),
            },
            Ability::Contention(provider) => MachineProbe::Contention { provider, bytes: 16 * MIB },
        })
    }

    /// Sizes of arrays, up to several times the last-level cache. With `--quick` none is larger than the model, which bounds the
    /// memory of this command.
    fn memory_sizes(&self) -> Vec<u64> {
        let beyond_caches = (4 * self.cache).clamp(256 * MIB, 2048 * MIB);
        let room = (self.profile.host.memory.0 / 8).max(16 * MIB);
        let model = self.profile.model.weight_bytes.0.max(64 * MIB);
        let (smallest, largest) = match self.effort {
            Effort::Quick => (64 * MIB, beyond_caches.min(model)),
            Effort::Thorough => (MIB, beyond_caches),
        };
        let mut sizes: Vec<u64> = std::iter::successors(Some(smallest), |size| Some(size * 4))
            .take_while(|size| *size < largest.min(room))
            .collect();
        sizes.push(largest.min(room));
        sizes
    }

    /// The largest file of the model, which holds weights.
    fn largest_file(&self) -> Option<PathBuf> {
        let model = &self.analysis.model;
        let files = model.weights().files.iter().map(|file| file.path.as_path()).chain([model.path()]);
        let size = |path: &std::path::Path| std::fs::metadata(path).map_or(0, |data| data.len());
        files.max_by_key(|path| size(path)).map(absolute)
    }

    /// Stores an answer, or returns why it is invalid.
    fn keep(&mut self, ability: Ability, reply: Reply) -> Result<(), String> {
        let good = |number: f64| number.is_finite() && number > 0.0;
        let machine = &mut self.profile.machine;
        match (ability, reply) {
            (_, Reply::Bandwidth { curves }) => {
                if curves.iter().flat_map(|curve| &curve.points).any(|point| !good(point.gb_per_s)) {
                    return Err("a bandwidth that cannot have been measured".into());
                }
                machine.curves.extend(curves.into_iter().map(in_order));
                if ability.is_known(machine) { Ok(()) } else { Err("hpp-exec measured something else".into()) }
            }
            (Ability::Arithmetic, Reply::Arithmetic { tflops }) if good(tflops) => {
                machine.tflops = Some(tflops);
                Ok(())
            }
            (Ability::Contention(provider), Reply::Contention { compute, link }) if good(compute) && good(link) => {
                machine.contention.push(MeasuredContention { provider, compute, link });
                Ok(())
            }
            (Ability::DiskContention, Reply::Contention { compute, link }) if good(compute) && good(link) => {
                machine.disk_contention = Some(DiskContention { compute: compute.max(1.0), read: link.max(1.0) });
                Ok(())
            }
            (_, other) => Err(format!("hpp-exec answered {other:?}")),
        }
    }
}

fn in_order(mut curve: BandwidthCurve) -> BandwidthCurve {
    curve.points.sort_by_key(|point| point.bytes);
    curve.points.dedup_by_key(|point| point.bytes);
    curve
}
