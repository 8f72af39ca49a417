//! Loads the sessions of a plan and resolves them to stages.

use super::files;
use crate::cancel::CancelHandle;
use crate::error::{BackendError, EngineError};
use crate::ids::{BoundaryId, Id, IndexVec, PartitionId, SessionId, StageId};
use crate::options::{EngineOptions, Verify};
use crate::port::{Backend, ExpertWeights, Fallback, Loaded, Prepared, Session, SessionSpec};
use crate::program::{
    InputSource, NameResolver, NextRouting, OutputSink, Route, Routing, Stage, StageInput, StageOutput, match_ports,
};
use crate::reporter::Reporter;
use crate::telemetry::StageTelemetry;
use crate::weights::budget::HostMemoryBudget;
use hpp_schema::{PREPARED_DIR, Partition, PartitionVariant, Plan, Provider, Residency};
use std::path::Path;
use std::time::Duration;
use tracing::info;

/// Loads the sessions of a plan.
pub(super) struct SessionLoader<'a, B: Backend> {
    pub plan: &'a Plan,
    pub dir: &'a Path,
    pub backend: &'a B,
    pub budget: HostMemoryBudget,
    pub control: &'a B::Control,
    pub options: &'a EngineOptions,
    pub cancel: &'a CancelHandle,
    pub reporter: &'a dyn Reporter,
    pub names: &'a NameResolver<'a>,
}

/// The sessions of a plan and the stages that run them.
pub(super) struct LoadedSessions<B: Backend> {
    pub stages: IndexVec<StageId, Stage>,
    pub sessions: IndexVec<SessionId, B::Session>,
    pub pagers: IndexVec<SessionId, B::WeightPager>,
    /// One entry for each stage.
    pub telemetry: Vec<StageTelemetry>,
    pub route: Route,
}

/// What a stage was loaded from. Stages with the same class file share its session, and two variants of a partition with the same file
/// are one stage.
struct LoadedVariant<'a> {
    file: &'a str,
    device: &'a str,
    partition: PartitionId,
    stage: StageId,
}

/// A session as the backend loads it.
type LoadedSession<B> = Loaded<<B as Backend>::Session, <B as Backend>::WeightPager>;

/// A partition in one of its variants.
#[derive(Clone, Copy)]
struct VariantToLoad<'a> {
    id: PartitionId,
    partition: &'a Partition,
    variant: PartitionVariant<'a>,
}

const HOST_PROVIDERS: &[Provider] = &[Provider::CPU];

impl<'a, B: Backend> SessionLoader<'a, B> {
    pub fn load(&self) -> Result<LoadedSessions<B>, EngineError> {
        let mut loaded = LoadedSessions {
            stages: IndexVec::default(),
            sessions: IndexVec::default(),
            pagers: IndexVec::default(),
            telemetry: vec![],
            route: Route::default(),
        };
        let mut variants = Vec::new();
        for (index, partition) in self.plan.partitions.iter().enumerate() {
            if self.cancel.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            self.reporter.loading(&partition.name, index, self.plan.partitions.len());
            let load = |variant| VariantToLoad { id: PartitionId::new(index), partition, variant };
            let mut stages = Vec::with_capacity(2);
            for variant in partition.variants() {
                stages.push(self.load_variant(load(variant), &mut loaded, &mut variants)?);
            }
            // Decode's variant comes first; prefill's is the same unless there are two.
            loaded.route.decode.push(stages[0]);
            loaded.route.prefill.push(stages[stages.len() - 1]);
        }
        Ok(loaded)
    }

    /// The stage of a variant. If weights are inputs and the device is unavailable, the file for the host is loaded instead.
    fn load_variant(
        &self,
        wanted: VariantToLoad<'a>,
        loaded: &mut LoadedSessions<B>,
        variants: &mut Vec<LoadedVariant<'a>>,
    ) -> Result<StageId, EngineError> {
        let VariantToLoad { id, partition, variant } = wanted;
        let has_class_file = !variant.weights.is_empty();
        let known = variants.iter().find(|known| {
            let same_owner = if has_class_file { known.device == variant.device } else { known.partition == id };
            known.file == variant.file && same_owner
        });
        let (session, telemetry) = match known.map(|known| known.stage) {
            Some(stage) if !has_class_file => return Ok(stage),
            Some(stage) => {
                let first = &loaded.telemetry[stage.index()];
                let own = StageTelemetry { partition: partition.name.clone(), load: Duration::ZERO, ..first.clone() };
                (loaded.stages[stage].session, own)
            }
            None => match self.load_session(partition, &variant) {
                Ok((Loaded { session, weights, .. }, telemetry)) => {
                    loaded.pagers.push(weights);
                    (loaded.sessions.push(session), telemetry)
                }
                Err(EngineError::Load { source: BackendError::NoProvider { refused }, .. })
                    if variant.host_file.is_some() && self.options.fallback == Fallback::Report =>
                {
                    return self.load_on_host(wanted, refused, loaded, variants);
                }
                Err(error) => return Err(error),
            },
        };
        let stage = self.resolve_stage(wanted, session, &loaded.sessions[session])?;
        let stage = loaded.stages.push(stage);
        loaded.telemetry.push(telemetry);
        variants.push(LoadedVariant { file: variant.file, device: variant.device, partition: id, stage });
        Ok(stage)
    }

    /// Loads a variant whose device is unavailable with its weights as constants on the host.
    fn load_on_host(
        &self,
        wanted: VariantToLoad<'a>,
        refused: Vec<(Provider, String)>,
        loaded: &mut LoadedSessions<B>,
        variants: &mut Vec<LoadedVariant<'a>>,
    ) -> Result<StageId, EngineError> {
        let VariantToLoad { partition, variant, .. } = wanted;
        for (provider, reason) in &refused {
            self.reporter.fallback(&partition.name, *provider, Provider::CPU, reason);
        }
        info!(
            partition = partition.name,
            host_file = variant.host_file,
            "device unavailable, loading the file for the host"
        );
        let file = variant.host_file.unwrap_or(variant.file);
        let variant = PartitionVariant {
            file,
            residency: Residency::Resident,
            providers: HOST_PROVIDERS,
            weights: &[],
            host_file: None,
            ..variant
        };
        let stage = self.load_variant(VariantToLoad { variant, ..wanted }, loaded, variants)?;
        loaded.telemetry[stage.index()].refused.extend(refused);
        Ok(stage)
    }

    fn load_session(
        &self,
        partition: &Partition,
        variant: &PartitionVariant<'_>,
    ) -> Result<(LoadedSession<B>, StageTelemetry), EngineError> {
        let started = self.backend.now();
        let file = self.dir.join(variant.file);
        let failed = |source| match source {
            BackendError::Stopped => EngineError::Cancelled,
            source => EngineError::Load { partition: partition.name.clone(), file: file.clone(), source },
        };
        let device = self.plan.devices.iter().find(|device| device.name == variant.device);
        let unknown_device =
            || BackendError::Misfit { what: variant.device.to_owned(), why: "the plan has no such device".into() };
        let spec = SessionSpec {
            partition: &partition.name,
            file: &file,
            host_kernels: &partition.host_kernels,
            weight_bytes: self.plan.partitions.iter().map(|p| p.bytes.weights.0).fold(0, u64::saturating_add),
            weights_dir: &self.dir.join(&partition.weights_dir),
            device: device.ok_or_else(unknown_device).map_err(failed)?,
            providers: variant.providers,
            fallback: self.options.fallback,
            residency: self.budget.residency(self.plan, variant),
            locks_weights: self.options.lock_weights,
            experts: partition.experts.as_ref().map(|experts| ExpertWeights {
                names: &experts.weights,
                count: usize::try_from(experts.count).unwrap_or(usize::MAX),
                are_apart: experts.apart,
            }),
            weights_are_inputs: !variant.weights.is_empty(),
            has_host_file: variant.host_file.is_some() && !self.options.slots_on_host,
            prepared: Some(Prepared {
                dir: &self.dir.join(PREPARED_DIR),
                contents: &files::contents(self.plan, variant.file),
                verify: self.options.verify == Verify::Full,
            }),
            compress_permille: self.plan.devices.iter().find_map(|device| device.compress_permille),
        };
        let loaded = self.backend.load(&spec, self.control, self.reporter).map_err(failed)?;
        for (provider, reason) in &loaded.refused {
            self.reporter.fallback(&partition.name, *provider, loaded.provider, reason);
        }
        let load = self.backend.now().saturating_sub(started);
        info!(
            partition = partition.name,
            device = variant.device,
            provider = loaded.provider.name(),
            processor = loaded.processor,
            residency = ?spec.residency,
            bytes = partition.bytes.weights.0,
            ms = load.as_millis(),
            "session loaded"
        );
        let telemetry = StageTelemetry {
            partition: partition.name.clone(),
            device: variant.device.to_owned(),
            provider: loaded.provider,
            processor: loaded.processor.clone(),
            packs_weights: loaded.packs_weights,
            residency: spec.residency,
            refused: loaded.refused.clone(),
            load,
            prefill: Default::default(),
            decode: Default::default(),
        };
        Ok((loaded, telemetry))
    }

    /// The stage of a variant, with every input and output resolved.
    fn resolve_stage(
        &self,
        VariantToLoad { id, partition, variant }: VariantToLoad<'_>,
        session: SessionId,
        ports: &B::Session,
    ) -> Result<Stage, EngineError> {
        let mismatch = |problems| EngineError::Mismatch { partition: partition.name.clone(), problems };
        let ports = match_ports(partition, &variant, ports.inputs(), ports.outputs()).map_err(mismatch)?;
        // Weights come after all other inputs.
        let first_weight = ports.inputs.len() - variant.weights.len();
        let mut inputs = Vec::with_capacity(ports.inputs.len());
        for (index, port) in ports.inputs.into_iter().enumerate() {
            let source = match index.checked_sub(first_weight) {
                Some(weight) => Some(InputSource::Weight(weight)),
                None => self.names.input(partition, &port.name),
            };
            let source = source.ok_or_else(|| mismatch(vec![format!("nothing provides input {:?}", port.name)]))?;
            inputs.push(StageInput { port, source });
        }
        let routing = self.routing(partition, &inputs).map_err(mismatch)?;
        let outputs = ports
            .outputs
            .into_iter()
            .map(|port| StageOutput { sink: self.names.output(id, &port.name).unwrap_or(OutputSink::Unknown), port });
        Ok(Stage {
            name: partition.name.clone(),
            partition: id,
            device: variant.device.to_owned(),
            session,
            inputs,
            outputs: outputs.collect(),
            routing,
        })
    }

    /// How tokens select experts of a partition that fetches them by demand; an error if the router is not among its inputs.
    fn routing(&self, partition: &Partition, inputs: &[StageInput]) -> Result<Option<Routing>, Vec<String>> {
        let Some(experts) = &partition.experts else { return Ok(None) };
        let router = boundary_input(inputs, &experts.router, "selects its experts")?;
        let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let (count, active, selected_by) = (size(experts.count), size(experts.active), experts.selected_by);
        let next = experts.next.as_ref().map(|next| -> Result<_, Vec<String>> {
            let router = boundary_input(inputs, &next.router, "predicts experts")?;
            let partition = self.plan.partitions.iter().position(|other| other.name == next.partition);
            let partition = partition.ok_or_else(|| vec![format!("there is no partition {:?}", next.partition)])?;
            Ok(NextRouting { partition: PartitionId::new(partition), router })
        });
        Ok(Some(Routing { router, count, active, selected_by, next: next.transpose()? }))
    }
}

/// The boundary that the input of this name reads; an error if there is none.
fn boundary_input(inputs: &[StageInput], name: &str, what: &str) -> Result<BoundaryId, Vec<String>> {
    match inputs.iter().find(|input| input.port.name == name).map(|input| input.source) {
        Some(InputSource::Boundary(boundary)) => Ok(boundary),
        _ => Err(vec![format!("no partition before it produces {name:?}, which {what}")]),
    }
}
