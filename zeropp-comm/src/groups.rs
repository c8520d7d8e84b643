//! The groups of one rank: what the mesh makes of the world.

use std::sync::Arc;

use crate::{CommResult, CommStats, Communicator};
use zeropp_failures::mesh::{Coords, Mesh};

/// One rank's communicators.
#[derive(Clone)]
pub struct Groups {
    /// Shape of the world.
    pub mesh: Mesh,
    /// This rank's place in it.
    pub coords: Coords,
    /// All ranks.
    pub world: Arc<dyn Communicator>,
    /// Ranks that share this rank's stages and replica: gather and reduce-scatter.
    pub zero3: Arc<dyn Communicator>,
    /// Ranks of this rank's pipeline, by stage order: send and receive.
    pub pipeline: Arc<dyn Communicator>,
    /// Ranks that hold the same shard in other replicas.
    pub replica: Arc<dyn Communicator>,
}

impl Groups {
    /// Splits `world` by the mesh. Blocks until all ranks have called it.
    ///
    /// # Errors
    /// The world's first error, or a timeout.
    ///
    /// # Panics
    /// Panics if the world does not have the mesh's size.
    pub fn new(world: Arc<dyn Communicator>, mesh: Mesh) -> CommResult<Groups> {
        assert_eq!(world.size(), mesh.world(), "world does not fit mesh {mesh}");
        let rank = world.rank();
        let c = mesh.coords(rank);
        let zero3_id = c.dp * mesh.pp + c.pp;
        let pipeline_id = c.dp * mesh.zero3 + c.zero3;
        let replica_id = c.pp * mesh.zero3 + c.zero3;
        let zero3 = world.split(&format!("zero3[{zero3_id}]"), zero3_id, c.zero3)?;
        let pipeline = world.split(&format!("pipeline[{pipeline_id}]"), pipeline_id, c.pp)?;
        let replica = world.split(&format!("replica[{replica_id}]"), replica_id, c.dp)?;
        Ok(Groups { mesh, coords: c, world, zero3, pipeline, replica })
    }

    /// Bytes that this rank's communicators hold beyond the requested ones: the largest bytes so
    /// far of messages that came before they were asked for, and those of idle buffers now.
    pub fn held_aside(&self) -> (u64, u64) {
        let all = [&self.world, &self.zero3, &self.pipeline, &self.replica];
        let all = all.map(|communicator| communicator.stats());
        let sum = |of: fn(&CommStats) -> u64| all.iter().map(of).sum();
        (sum(|stats| stats.early_bytes), sum(|stats| stats.idle_bytes))
    }
}
