//! Which collectives do the ranks enter in a step? The same ones, by construction: the list follows from
//! the combined record alone (`serving.md` a.12).
use crate::dp::DpStep;

/// How the model is spread over the ranks: what decides which collectives there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DpShape {
    /// Layers of the model.
    pub num_layers: u32,
    /// First layers without experts: they have no collectives.
    pub num_dense_layers: u32,
    /// First layer that runs tail rows only.
    pub first_tail_layer: u32,
    /// Stages of the draft model; 0 = none.
    pub num_draft_stages: u32,
    /// Whether experts are reached by an all-to-all, else by gathering rows and scattering sums.
    pub is_all_to_all: bool,
    /// Whether the output layer is spread over the groups.
    pub spreads_logits: bool,
}

/// One collective call; equal lists mean that no rank waits for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Collective {
    /// Rows of a batch (0 or 1) go to the experts of a layer.
    Dispatch {
        /// The layer.
        layer: u32,
        /// The batch.
        batch: u8,
    },
    /// Their results come back.
    Combine {
        /// The layer.
        layer: u32,
        /// The batch.
        batch: u8,
    },
    /// Rows of a batch are gathered before the experts of a layer.
    GatherRows {
        /// The layer.
        layer: u32,
        /// The batch.
        batch: u8,
    },
    /// Sums are scattered after them.
    ScatterSums {
        /// The layer.
        layer: u32,
        /// The batch.
        batch: u8,
    },
    /// Hidden states are gathered and logits scattered around the output layer.
    Logits,
    /// Rows go to the experts of a draft stage.
    DraftDispatch {
        /// The stage.
        stage: u32,
    },
    /// Their results come back.
    DraftCombine {
        /// The stage.
        stage: u32,
    },
}

impl DpStep {
    /// Rows that every rank runs where graphs are replayed: the smallest bucket that fits the largest
    /// group; none if there is no such bucket or no graph.
    ///
    /// `buckets` are ascending.
    #[must_use]
    pub fn padded_rows(&self, buckets: &[u32]) -> Option<u32> {
        if !(self.decode_graph || self.prefill_graph) {
            return None;
        }
        let most = self.rows.iter().copied().max().unwrap_or(0);
        buckets.iter().copied().find(|bucket| *bucket >= most)
    }

    /// The collectives of this step, in order. Every rank gets the same list, also one with no rows.
    #[must_use]
    pub fn collectives(&self, shape: &DpShape) -> Vec<Collective> {
        let batches: &[u8] = if self.two_batches { &[0, 1] } else { &[0] };
        let has_tail = self.tail_rows.iter().any(|rows| *rows > 0);
        let mut list = Vec::new();
        for layer in shape.num_dense_layers..shape.num_layers {
            // Open chunks everywhere: nobody runs the decoder half.
            if layer >= shape.first_tail_layer && !has_tail {
                break;
            }
            for batch in batches.iter().copied() {
                list.push(if shape.is_all_to_all {
                    Collective::Dispatch { layer, batch }
                } else {
                    Collective::GatherRows { layer, batch }
                });
            }
            for batch in batches.iter().copied() {
                list.push(if shape.is_all_to_all {
                    Collective::Combine { layer, batch }
                } else {
                    Collective::ScatterSums { layer, batch }
                });
            }
        }
        let has_logits = self.logits_rows.iter().any(|rows| *rows > 0);
        if has_logits && shape.spreads_logits {
            list.push(Collective::Logits);
        }
        if has_logits {
            for stage in 0..shape.num_draft_stages {
                list.push(Collective::DraftDispatch { stage });
                list.push(Collective::DraftCombine { stage });
            }
        }
        list
    }
}
