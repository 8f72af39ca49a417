//! Has host partitions compute only the neurons that a ReLU leaves active.

use crate::{Analysis, ModelError};
use hpp_onnx::ActiveNeurons;

impl Analysis {
    /// Has partitions on the host compute only active neurons.
    ///
    /// # Errors
    /// No layer has a product of a ReLU's output with a matrix in float32 or float16.
    pub fn compute_active_neurons(&mut self) -> Result<(), ModelError> {
        let found = ActiveNeurons::find(&self.model, &self.graph, &self.segmentation.blocks)?;
        let found = found.ok_or_else(|| {
            ModelError::setting(
                "--active-neurons leaves out neurons that a ReLU switches off, and no matrix of this model in float32 or float16 is multiplied \
                 with the output of a ReLU (or its square, or its product with a gate)",
                "omit --active-neurons",
            )
        })?;
        self.active_neurons = Some(found);
        Ok(())
    }
}
