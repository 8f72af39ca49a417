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
                "--active-neurons leaves out neurons that a ReLU switches off, and this model multiplies the output of no ReLU (or its square, or its \
                 product with a gate) directly with a matrix that is stored in float32 or float16",
                "omit --active-neurons",
            )
        })?;
        self.active_neurons = Some(found);
        Ok(())
    }
}
