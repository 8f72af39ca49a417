//! Makes new profiles: an entry for everything to measure, and no measurements yet.

use crate::derive::{PHASES, phase_costs_mut};
use crate::settings::Settled;
use crate::targets::{BlockFacts, BlockTarget};
use hpp_model::Analysis;
use hpp_schema::{
    ByteSize, ClassCosts, Host, MeasuredMachine, PROFILE_VERSION, PhaseCosts, Profile, ProfileSettings, ProfiledBlock,
    ProfiledModel, Provider, ProviderCosts,
};

/// Describes the model for a profile.
pub fn profiled_model(analysis: &Analysis, blocks: &[BlockFacts], hash: String, weight_bytes: u64) -> ProfiledModel {
    let block = |(block, facts): (&hpp_graph::Block, &BlockFacts)| ProfiledBlock {
        label: block.label.clone(),
        class: facts.class,
        weight_bytes: ByteSize(facts.weight_bytes),
    };
    ProfiledModel {
        name: analysis.name.clone(),
        hash,
        weight_bytes: ByteSize(weight_bytes),
        blocks: analysis.segmentation.blocks.iter().zip(blocks).map(block).collect(),
    }
}

/// Makes a new profile without measurements.
pub fn begin(model: ProfiledModel, host: Host, date: String, settled: Settled, targets: &[BlockTarget]) -> Profile {
    let mut profile = Profile {
        hpp_profile: PROFILE_VERSION,
        model,
        host,
        date,
        settings: settled.settings,
        machine: MeasuredMachine {
            rates: None,
            curves: vec![],
            tflops: None,
            contention: vec![],
            disk_contention: None,
            failures: vec![],
        },
        pass: None,
        classes: vec![],
        corpus: None,
        sensitivity: vec![],
        hotness: vec![],
        others_cpu_share: None,
        notes: settled.notes,
    };
    add_entries(&mut profile, targets);
    profile
}

/// Adds the missing entries for targets and providers; existing entries stay.
pub fn add_entries(profile: &mut Profile, targets: &[BlockTarget]) {
    let ProfileSettings { providers, all_blocks, .. } = profile.settings.clone();
    for target in targets {
        let block = profile.model.blocks[target.block].label.clone();
        let known = profile.classes.iter().any(|entry| match all_blocks {
            true => entry.block == block,
            false => entry.class == target.class,
        });
        if !known {
            profile.classes.push(ClassCosts { class: target.class, block, providers: vec![] });
        }
    }
    for entry in &mut profile.classes {
        let target = targets.iter().find(|target| profile.model.blocks[target.block].label == entry.block);
        let chosen = target.map_or(1, |target| u32::try_from(target.run_length).unwrap_or(1));
        let run_length = entry.providers.first().map_or(chosen, |costs| costs.run_length);
        for provider in &providers {
            if entry.providers.iter().all(|costs| costs.provider != *provider) {
                entry.providers.push(unmeasured(*provider, run_length));
            }
        }
    }
}

fn unmeasured(provider: Provider, run_length: u32) -> ProviderCosts {
    ProviderCosts {
        provider,
        run_length,
        launch_ms: None,
        decode: PhaseCosts::default(),
        prefill: PhaseCosts::default(),
        memory: None,
        failure: None,
    }
}

/// Removes recorded failures, so that those measurements are tried again.
pub fn clear_failures(profile: &mut Profile) {
    profile.machine.failures.clear();
    profile.pass.take_if(|pass| pass.failure.is_some());
    profile.sensitivity.retain(|entry| entry.failure.is_none());
    for costs in profile.classes.iter_mut().flat_map(|entry| &mut entry.providers) {
        costs.failure = None;
        for phase in PHASES {
            let points = &mut phase_costs_mut(costs, phase).points;
            points.iter_mut().for_each(|point| point.failure = None);
            points.retain(|point| point.single.is_some() || point.run.is_some());
        }
    }
}
