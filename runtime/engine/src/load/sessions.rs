//! Loading the sessions of a plan, and resolving them to stages.

use super::files;
use crate::cancel::CancelHandle;
use crate::error::{BackendError, EngineError};
use crate::ids::{Id, PartitionId, SessionId, StageId, Table};
use crate::options::{EngineOptions, Verify};
use crate::port::{Backend, ExpertWeights, Fallback, Loaded, Prepared, Session, SessionSpec};
use crate::program::{InputSource, NameResolver, OutputSink, Route, Routing, Stage, StageInput, StageOutput, match_ports};
use crate::reporter::Reporter;
use crate::telemetry::StageTelemetry;
use crate::weights::budget::HostMemoryBudget;
use hpp_schema::{Form, Partition, Plan, Provider, Residency};
use std::path::Path;
use std::time::Duration;
use tracing::info;

/// Directory beside the plan for weights in the layout that kernels want.
const PREPARED: &str = "prepared";

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
    pub stages: Table<StageId, Stage>,
    pub sessions: Table<SessionId, B::Session>,
    pub streams: Table<SessionId, B::WeightStream>,
    /// One entry for each stage.
    pub telemetry: Vec<StageTelemetry>,
    pub route: Route,
}

/// What a stage was loaded from. Stages with the same class file share its session, and two forms of a partition with the same file
/// are one stage.
struct LoadedForm<'a> {
    file: &'a str,
    device: &'a str,
    partition: PartitionId,
    stage: StageId,
}

/// A session as the backend loads it.
type LoadedSession<B> = Loaded<<B as Backend>::Session, <B as Backend>::WeightStream>;

/// A partition in one of its forms.
#[derive(Clone, Copy)]
struct FormToLoad<'a> {
    id: PartitionId,
    partition: &'a Partition,
    form: Form<'a>,
}

const HOST_PROVIDERS: &[Provider] = &[Provider::Cpu];

impl<'a, B: Backend> SessionLoader<'a, B> {
    pub fn load(&self) -> Result<LoadedSessions<B>, EngineError> {
        let mut loaded = LoadedSessions {
            stages: Table::default(),
            sessions: Table::default(),
            streams: Table::default(),
            telemetry: vec![],
            route: Route::default(),
        };
        let mut forms = Vec::new();
        for (index, partition) in self.plan.partitions.iter().enumerate() {
            if self.cancel.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            self.reporter.loading(&partition.name, index, self.plan.partitions.len());
            let load = |form| FormToLoad { id: PartitionId::new(index), partition, form };
            let mut stages = Vec::with_capacity(2);
            for form in partition.forms() {
                stages.push(self.load_form(load(form), &mut loaded, &mut forms)?);
            }
            // Decode's form comes first; prefill's is the same unless there are two.
            loaded.route.decode.push(stages[0]);
            loaded.route.prefill.push(stages[stages.len() - 1]);
        }
        Ok(loaded)
    }

    /// The stage of a form. If weights are inputs and the device is unavailable, the file for the host is loaded instead.
    fn load_form(
        &self,
        wanted: FormToLoad<'a>,
        loaded: &mut LoadedSessions<B>,
        forms: &mut Vec<LoadedForm<'a>>,
    ) -> Result<StageId, EngineError> {
        let FormToLoad { id, partition, form } = wanted;
        let has_class_file = !form.weights.is_empty();
        let known = forms.iter().find(|known| {
            let same_owner = if has_class_file { known.device == form.device } else { known.partition == id };
            known.file == form.file && same_owner
        });
        let (session, telemetry) = match known.map(|known| known.stage) {
            Some(stage) if !has_class_file => return Ok(stage),
            Some(stage) => {
                let first = &loaded.telemetry[stage.index()];
                let own = StageTelemetry { partition: partition.name.clone(), load: Duration::ZERO, ..first.clone() };
                (loaded.stages[stage].session, own)
            }
            None => match self.load_session(partition, &form) {
                Ok((Loaded { session, weights, .. }, telemetry)) => {
                    loaded.streams.push(weights);
                    (loaded.sessions.push(session), telemetry)
                }
                Err(EngineError::Load { source: BackendError::NoProvider { refused }, .. })
                    if form.host_file.is_some() && self.options.fallback == Fallback::Report =>
                {
                    return self.load_on_host(wanted, refused, loaded, forms);
                }
                Err(error) => return Err(error),
            },
        };
        let stage = self.resolve_stage(wanted, session, &loaded.sessions[session])?;
        let stage = loaded.stages.push(stage);
        loaded.telemetry.push(telemetry);
        forms.push(LoadedForm { file: form.file, device: form.device, partition: id, stage });
        Ok(stage)
    }

    /// Loads a form whose device is unavailable with its weights as constants on the host.
    fn load_on_host(
        &self,
        wanted: FormToLoad<'a>,
        refused: Vec<(Provider, String)>,
        loaded: &mut LoadedSessions<B>,
        forms: &mut Vec<LoadedForm<'a>>,
    ) -> Result<StageId, EngineError> {
        let FormToLoad { partition, form, .. } = wanted;
        for (provider, reason) in &refused {
            self.reporter.fallback(&partition.name, *provider, Provider::Cpu, reason);
        }
        info!(
            partition = partition.name,
            host_file = form.host_file,
            "device unavailable, loading the file for the host"
        );
        let file = form.host_file.unwrap_or(form.file);
        let form = Form {
            file,
            residency: Residency::Resident,
            providers: HOST_PROVIDERS,
            weights: &[],
            host_file: None,
            ..form
        };
        let stage = self.load_form(FormToLoad { form, ..wanted }, loaded, forms)?;
        loaded.telemetry[stage.index()].refused.extend(refused);
        Ok(stage)
    }

    fn load_session(
        &self,
        partition: &Partition,
        form: &Form<'_>,
    ) -> Result<(LoadedSession<B>, StageTelemetry), EngineError> {
        let started = self.backend.now();
        let file = self.dir.join(form.file);
        let failed = |source| match source {
            BackendError::Stopped => EngineError::Cancelled,
            source => EngineError::Load { partition: partition.name.clone(), file: file.clone(), source },
        };
        let device = self.plan.devices.iter().find(|device| device.name == form.device);
        let unknown_device =
            || BackendError::Misfit { what: form.device.to_owned(), why: "the plan has no such device".into() };
        let spec = SessionSpec {
            partition: &partition.name,
            file: &file,
            host_kernels: &partition.host_kernels,
            weight_bytes: self.plan.partitions.iter().map(|p| p.bytes.weights.0).fold(0, u64::saturating_add),
            weights_dir: &self.dir.join(&partition.weights_dir),
            device: device.ok_or_else(unknown_device).map_err(failed)?,
            providers: form.providers,
            fallback: self.options.fallback,
            residency: self.budget.residency(self.plan, form),
            experts: partition.experts.as_ref().map(|experts| ExpertWeights {
                names: &experts.weights,
                count: usize::try_from(experts.count).unwrap_or(usize::MAX),
            }),
            weights_are_inputs: !form.weights.is_empty(),
            has_host_file: form.host_file.is_some() && !self.options.slots_on_host,
            prepared: Some(Prepared {
                dir: &self.dir.join(PREPARED),
                contents: &files::contents(self.plan, form.file),
                verify: self.options.verify == Verify::Full,
            }),
        };
        let loaded = self.backend.load(&spec, self.control, self.reporter).map_err(failed)?;
        for (provider, reason) in &loaded.refused {
            self.reporter.fallback(&partition.name, *provider, loaded.provider, reason);
        }
        let load = self.backend.now().saturating_sub(started);
        info!(
            partition = partition.name,
            device = form.device,
            provider = loaded.provider.name(),
            processor = loaded.processor,
            residency = ?spec.residency,
            bytes = partition.bytes.weights.0,
            ms = load.as_millis(),
            "session loaded"
        );
        let telemetry = StageTelemetry {
            partition: partition.name.clone(),
            device: form.device.to_owned(),
            provider: loaded.provider,
            processor: loaded.processor.clone(),
            refused: loaded.refused.clone(),
            load,
            prefill: Default::default(),
            decode: Default::default(),
        };
        Ok((loaded, telemetry))
    }

    /// The stage of a form, with every input and output resolved.
    fn resolve_stage(
        &self,
        FormToLoad { id, partition, form }: FormToLoad<'_>,
        session: SessionId,
        ports: &B::Session,
    ) -> Result<Stage, EngineError> {
        let mismatch = |problems| EngineError::Mismatch { partition: partition.name.clone(), problems };
        let ports = match_ports(partition, &form, ports.inputs(), ports.outputs()).map_err(mismatch)?;
        // Weights come after all other inputs.
        let first_weight = ports.inputs.len() - form.weights.len();
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
            device: form.device.to_owned(),
            session,
            inputs,
            outputs: outputs.collect(),
            routing,
        })
    }

    /// How tokens select experts of a partition that fetches them by demand; an error if the router is not among its inputs.
    fn routing(&self, partition: &Partition, inputs: &[StageInput]) -> Result<Option<Routing>, Vec<String>> {
        let Some(experts) = &partition.experts else { return Ok(None) };
        let input = inputs.iter().find(|input| input.port.name == experts.router);
        let Some(InputSource::Boundary(router)) = input.map(|input| input.source) else {
            return Err(vec![format!("no partition before it produces the router's logits {:?}", experts.router)]);
        };
        let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        Ok(Some(Routing { router, count: size(experts.count), active: size(experts.active) }))
    }
}
