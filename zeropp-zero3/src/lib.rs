//! ZeRO-3 for the stages of one rank: sharded fp32 parameters, gathered weights, reduced
//! gradients, the optimizer.
//!
//! Only this crate knows what a shard is. A rank owns 1/D of each of its layers' flat buffers;
//! with ZeRO-1 between replicas the optimizer state is cut once more by K.

pub mod adafactor;
pub mod adamw;
pub mod adamw8bit;
mod ahead;
pub mod balanced;
mod behind;
pub mod checkpoint;
pub mod exact;
mod fill;
mod late;
mod layer_shard;
mod layer_state;
pub mod layer_sums;
pub mod lion;
pub mod lr;
pub mod muon;
pub mod norm;
pub mod optimizer;
mod returning;
mod rollback;
pub mod rule;
pub mod sgd;
mod sharers;
pub mod stage;
pub mod state_file;
mod streamed;
mod tied;
mod tied_rows;
mod under_way;
mod words;

pub use layer_sums::LayerSums;
pub use optimizer::{Optimizer, StepOutcome};
pub use stage::{ParamExport, ShardedStage};
pub use tied::Tie;
pub use tied_rows::TiedRows;
