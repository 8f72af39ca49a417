//! How a plan directory is written.

use hpp_model::Analysis;

/// Options for writing a plan directory.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteOptions {
    /// Replace an existing plan.
    pub force: bool,
    /// Copy the weight bytes that the partitions read into the directory.
    pub pack: bool,
    /// Refer to weight files by path, unless another file must be beside them.
    pub in_place: bool,
    /// Record full hashes of all weight files.
    pub hash_weights: bool,
    /// Give single-block partitions on a GPU their weights as inputs, so that they can move at run time.
    pub movable: bool,
}

impl WriteOptions {
    /// Quantized weights, parts of weights and transposed weights are in no file of the model, so a plan of them is always packed.
    pub fn for_analysis(self, analysis: &Analysis) -> Self {
        let transposes = analysis.active_neurons.as_ref().is_some_and(|active| active.file(&analysis.model).is_some());
        let pack = self.pack || analysis.quantized.is_some() || analysis.has_parts_of_weights() || transposes;
        WriteOptions { pack, ..self }
    }

    /// Whether a plan has an unsplit model of its own: where the user wants it packed, and where the exported model computes with other weights or
    /// activations.
    pub fn has_own_whole(self, analysis: &Analysis) -> bool {
        self.pack || analysis.quantized.is_some() || !analysis.activations().are_exported()
    }
}
