//! What a machine does in a second: the keys of a file of costs from which the times of any model's
//! stages follow.
//!
//! ```toml
//! source = "public figures, not measurements"
//! flops_per_s = 312e12        # products at their peak; this one is needed
//! flops_share = 0.6           # of it that large products reach
//! memory_bytes = 80e9         # of each rank's device; this one is needed
//! memory_bytes_per_s = 1.6e12 # of passes over tensors; this one is needed
//! per_node = 8                # devices in a node
//! zero3_bytes_per_s = 240e9   # collectives inside a node; this one is needed
//! replica_bytes_per_s = 20e9  # collectives between nodes; missing: those inside
//! bytes_per_s = 20e9          # messages between nodes; missing: collectives between nodes
//! file_bytes_per_s = 2e9      # a rank's file of activations, both ways; missing: infinite
//! host_bytes = 1e12           # of a node, for activations that devices put out; missing: none
//! host_bytes_per_s = 24e9     # between host and devices, each way of a link; missing: none
//! host_share = 2              # devices on such a link; missing: one
//! t_comm = 10                 # us, latency of a message
//! t_collective = 20           # us, latency of a collective
//! t_layer = 400               # us of a block's F or R beside products and passes; twice in B
//! contention = 0.5            # what compute loses while a collective runs; missing: nothing
//! reserve_bytes = 6e9         # of memory, for the driver, NCCL, gaps; missing: a twentieth
//! margin = 0.1                # how far published runs are off at worst; missing: 0.2
//! ```
//!
//! A machine that was measured also has what its layers did, in place of products and passes:
//!
//! ```toml
//! block_flops_per_s = [3e10, 3e10, 4e10, 3e10] # F, B, W and R of a block, all that they do
//! t_block = [50, 80, 20, 40]  # us of a block's F, B, W and R beside its FLOP; missing: none
//! head_flops_per_s = 4e10     # a head's F, with its gradients
//! ranks_at_once = 2           # of a node, for whom it has cores; missing: each has a device
//! update_bytes_per_s = 5e9    # the optimizer; missing: memory_bytes_per_s
//! t_step_end = 500            # us of a step beside its actions
//! reduce_bytes_per_s = 2e9    # reduce-scatters inside a node; missing: zero3_bytes_per_s
//! ```

use serde_json::Value;

use super::{CostsError, Table};

/// Keys that only a machine has. `zero3_bytes_per_s`, `replica_bytes_per_s`, `bytes_per_s`,
/// `file_bytes_per_s` and `t_comm` are those of stages, too.
const KEYS: [&str; 21] = [
    "source",
    "flops_per_s",
    "flops_share",
    "memory_bytes",
    "memory_bytes_per_s",
    "per_node",
    "t_collective",
    "t_layer",
    "contention",
    "reserve_bytes",
    "margin",
    "block_flops_per_s",
    "t_block",
    "head_flops_per_s",
    "ranks_at_once",
    "update_bytes_per_s",
    "t_step_end",
    "reduce_bytes_per_s",
    "host_bytes",
    "host_bytes_per_s",
    "host_share",
];
const SHARED: [&str; 6] = [
    "zero3_bytes_per_s",
    "replica_bytes_per_s",
    "bytes_per_s",
    "file_bytes_per_s",
    "t_comm",
    "measured",
];
/// No device does as much in a second.
const RATE_MAX: f64 = 1e21;
/// Floating-point operations in a second: less than this is another unit.
const FLOPS: Range = Range {
    least: 1e6,
    most: RATE_MAX,
    what: "a rate in FLOP/s, from 1e6 to 1e21: 312 TFLOP/s is 312e12",
};
/// Bytes in a second.
const BYTES_PER_S: Range = Range {
    least: 1e3,
    most: RATE_MAX,
    what: "a rate in bytes/s, from 1e3 to 1e21: 300 GB/s is 300e9",
};
/// Bytes.
const MEMORY: Range =
    Range { least: 1e6, most: RATE_MAX, what: "bytes, from 1e6 to 1e21: 80 GB is 80e9" };
/// A day, in us.
const LATENCY: Range = Range {
    least: 0.0,
    most: 86_400e6,
    what: "microseconds, from 0 to 86400e6, which is a day: 2 ms is 2000",
};
const SHARE: Range =
    Range { least: f64::MIN_POSITIVE, most: 1.0, what: "a share, more than 0 and at most 1" };
/// A share that there may be nothing of.
const PART: Range = Range { least: 0.0, most: 1.0, what: "a share, from 0 to 1" };
/// Bytes of a device that no run can have, if the file does not say.
const RESERVE: f64 = 0.05;
/// How far plans are off at worst, if the file does not say: a little more than those that were
/// held against runs on measured machines (docs/plan.md).
const MARGIN: f64 = 0.2;
/// Devices or ranks of a node.
const OF_NODE: Range =
    Range { least: 1.0, most: 65536.0, what: "how many there are in a node, from 1 to 65536" };

/// The numbers that a key takes, and in words with their unit.
#[derive(Clone, Copy)]
struct Range {
    least: f64,
    most: f64,
    what: &'static str,
}

impl Range {
    fn has(&self, number: f64) -> bool {
        (self.least..=self.most).contains(&number)
    }
}

/// The rates of one machine. All are those of one rank, which has a device of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Where the numbers are from, in words.
    pub source: String,
    /// Floating-point operations in a second of matrix products at their peak.
    pub flops_per_s: f64,
    /// Share of that which large products reach, above 0 and at most 1.
    pub flops_share: f64,
    /// Bytes of memory.
    pub memory_bytes: f64,
    /// Bytes in a second that a pass over a tensor reads and writes.
    pub memory_bytes_per_s: f64,
    /// Devices in a node.
    pub per_node: usize,
    /// Bytes in a second of a collective inside a node: what a rank sends and receives at once.
    pub zero3_bytes_per_s: f64,
    /// The same of a reduce-scatter.
    pub reduce_bytes_per_s: f64,
    /// Bytes in a second of a collective between nodes, with one rank a node.
    pub replica_bytes_per_s: f64,
    /// Bytes in a second of a message between nodes.
    pub bytes_per_s: f64,
    /// Bytes in a second of the file that a rank's activations are copied out to, both ways
    /// together; none where it is not known.
    pub file_bytes_per_s: Option<f64>,
    /// Bytes of a node's memory for activations that its devices put out; none where there is none.
    pub host_bytes: Option<f64>,
    /// Bytes in a second between the host and a device, each way, while all of its link copy.
    pub host_bytes_per_s: Option<f64>,
    /// Latency of a message, in seconds.
    pub message_s: f64,
    /// Latency of a collective, in seconds.
    pub collective_s: f64,
    /// Seconds of a block's F, or R, beside its products and its passes over tensors: gaps between
    /// kernels. B takes them twice.
    pub layer_s: f64,
    /// By how much of its time compute takes longer while a gather, a reduction or a sum runs on
    /// the same device: kernels of collectives take cores and bandwidth from it.
    pub contention: f64,
    /// Bytes of memory that a run cannot have: the driver's context, buffers of NCCL, gaps between
    /// what is allocated.
    pub reserve_bytes: f64,
    /// How far the times that follow from these rates were off at worst, as a share.
    pub margin: f64,
    /// Floating-point operations in a second of a block's F, B, W and R, all that they do included;
    /// none where they follow from products and passes.
    pub block_flops_per_s: Option<[f64; 4]>,
    /// Seconds of a block's F, B, W and R beside its operations at that rate, whatever the size of
    /// a micro-batch.
    pub block_s: [f64; 4],
    /// The same rate of a head's F, which makes its gradients.
    pub head_flops_per_s: Option<f64>,
    /// Ranks of a node that compute at these rates at the same time; more of them share its cores.
    /// None where each rank has a device of its own.
    pub ranks_at_once: Option<usize>,
    /// Bytes in a second that the optimizer reads and writes.
    pub update_bytes_per_s: f64,
    /// Seconds of a step that no action takes.
    pub step_end_s: f64,
}

/// Whether only a machine has a key of this name.
pub(super) fn is_key(key: &str) -> bool {
    KEYS.contains(&key)
}

impl Table {
    /// The machine that the file is about.
    ///
    /// # Errors
    /// A rate that is missing or does not work, or a key that no file of costs has.
    pub fn machine(&self) -> Result<Machine, CostsError> {
        let known = |key: &str| {
            KEYS.contains(&key) || SHARED.contains(&key) || super::is_key_of_stages(key)
        };
        if let Some(key) = self.keys.keys().find(|key| !known(key)) {
            return Err(CostsError(format!(
                "{key}: not a key of a machine; the keys are {} and {}",
                KEYS.join(", "),
                SHARED.join(", ")
            )));
        }
        let bytes = |key, missing| self.number(key, missing, BYTES_PER_S);
        let flops = |key| self.number(key, None, FLOPS);
        let latency = |key| Ok::<_, CostsError>(self.number(key, Some(0.0), LATENCY)? / 1e6);
        let inside = bytes("zero3_bytes_per_s", None)?;
        let between = bytes("replica_bytes_per_s", Some(inside))?;
        let text = |key: &str| self.keys.get(key).and_then(Value::as_str).map(String::from);
        let source = text("source").or_else(|| self.measured.clone());
        let passes = bytes("memory_bytes_per_s", None)?;
        let memory = self.number("memory_bytes", None, MEMORY)?;
        let what = "bytes, less than half of memory_bytes: 6 GB is 6e9";
        let reserve = Range { least: 0.0, most: 0.5 * memory, what };
        let has = |key: &str| self.keys.contains_key(key);
        let (head, at_once) = (has("head_flops_per_s"), has("ranks_at_once"));
        let ranks = || self.number("ranks_at_once", None, OF_NODE);
        Ok(Machine {
            source: source.unwrap_or_else(|| "given by hand".into()),
            flops_per_s: flops("flops_per_s")?,
            flops_share: self.number("flops_share", Some(1.0), SHARE)?,
            memory_bytes: memory,
            memory_bytes_per_s: passes,
            per_node: self.number("per_node", Some(8.0), OF_NODE)? as usize,
            zero3_bytes_per_s: inside,
            reduce_bytes_per_s: bytes("reduce_bytes_per_s", Some(inside))?,
            replica_bytes_per_s: between,
            bytes_per_s: bytes("bytes_per_s", Some(between))?,
            file_bytes_per_s: match has("file_bytes_per_s") {
                true => Some(bytes("file_bytes_per_s", None)?),
                false => None,
            },
            host_bytes: has("host_bytes")
                .then(|| self.number("host_bytes", None, MEMORY))
                .transpose()?,
            host_bytes_per_s: match has("host_bytes_per_s") {
                true => Some(
                    bytes("host_bytes_per_s", None)?
                        / self.number("host_share", Some(1.0), OF_NODE)?,
                ),
                false => None,
            },
            message_s: latency("t_comm")?,
            collective_s: latency("t_collective")?,
            layer_s: latency("t_layer")?,
            contention: self.number("contention", Some(0.0), PART)?,
            reserve_bytes: self.number("reserve_bytes", Some(RESERVE * memory), reserve)?,
            margin: self.number("margin", Some(MARGIN), PART)?,
            block_flops_per_s: self.of_block("block_flops_per_s", FLOPS)?,
            block_s: self.of_block("t_block", LATENCY)?.map_or([0.0; 4], |us| us.map(|t| t / 1e6)),
            head_flops_per_s: head.then(|| flops("head_flops_per_s")).transpose()?,
            ranks_at_once: at_once.then(ranks).transpose()?.map(|n| n as usize),
            step_end_s: latency("t_step_end")?,
            update_bytes_per_s: bytes("update_bytes_per_s", Some(passes))?,
        })
    }

    /// A list of four numbers, of F, B, W and R of a block, if the file has the key.
    fn of_block(&self, key: &str, range: Range) -> Result<Option<[f64; 4]>, CostsError> {
        let Some(value) = self.keys.get(key) else { return Ok(None) };
        let numbers = value.as_array().map(|all| all.iter().filter_map(Value::as_f64).collect());
        let good = |all: &Vec<f64>| all.iter().all(|x| range.has(*x));
        let four: Option<[f64; 4]> = numbers.filter(good).and_then(|all| all.try_into().ok());
        let works = || format!("a list of four, of F, B, W and R of a block, each {}", range.what);
        four.map(Some).ok_or_else(|| CostsError::found(key, value, &works()))
    }

    fn number(&self, key: &str, missing: Option<f64>, range: Range) -> Result<f64, CostsError> {
        match (self.keys.get(key), missing) {
            (None, Some(value)) => Ok(value),
            (None, None) => {
                Err(CostsError(format!("{key} is missing: a machine file gives {}", range.what)))
            }
            (Some(value), _) => {
                let good = value.as_f64().filter(|x| range.has(*x));
                good.ok_or_else(|| CostsError::found(key, value, range.what))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ALONE;
    use super::super::tests::table;
    use super::*;

    const GOOD: &str = "flops_per_s = 1e12\nmemory_bytes = 1e9\nmemory_bytes_per_s = 1e10\n\
                        zero3_bytes_per_s = 5e9\nt_comm = 7\n";

    fn machine(text: &str) -> Result<Machine, CostsError> {
        table(text)?.machine()
    }

    #[test]
    fn missing_machine_values_follow_or_are_asked_for() {
        let m = machine(GOOD).unwrap();
        assert_eq!((m.flops_share, m.per_node), (1.0, 8));
        assert_eq!((m.replica_bytes_per_s, m.bytes_per_s), (5e9, 5e9));
        assert_eq!((m.file_bytes_per_s, m.host_bytes, m.host_bytes_per_s), (None, None, None));
        let shared = machine(&format!("{GOOD}host_bytes_per_s = 24e9\nhost_share = 2\n")).unwrap();
        assert_eq!(shared.host_bytes_per_s, Some(12e9));
        assert_eq!((m.message_s, m.collective_s, m.layer_s), (7e-6, 0.0, 0.0));
        assert_eq!((m.reduce_bytes_per_s, m.update_bytes_per_s), (5e9, 1e10));
        let measured = (m.block_flops_per_s, m.head_flops_per_s, m.ranks_at_once);
        assert_eq!(measured, (None, None, None));
        for key in ["flops_per_s", "memory_bytes", "memory_bytes_per_s", "zero3_bytes_per_s"] {
            let lines = GOOD.lines().filter(|l| l.split(' ').next() != Some(key));
            let text = lines.collect::<Vec<_>>().join("\n");
            let said = machine(&text).unwrap_err().to_string();
            assert!(said.starts_with(&format!("{key} is missing")), "{said}");
        }
    }

    #[test]
    fn invalid_machine_values_name_valid_ones() {
        for (line, start) in [
            ("flops_share = 0.0", "flops_share: found 0.0"),
            ("flops_share = 1.5", "flops_share: found 1.5"),
            ("per_node = 0", "per_node: found 0"),
            ("contention = 1.5", "contention: found 1.5"),
            ("reserve_bytes = 1e9", "reserve_bytes: found 1000000000"),
            ("margin = -0.1", "margin: found -0.1"),
            ("bytes_per_s = -1", "bytes_per_s: found -1"),
            ("file_bytes_per_s = 2", "file_bytes_per_s: found 2; a rate in bytes/s"),
            ("t_comm = -1", "t_comm: found -1"),
            ("t_collective = null", "t_collective: found null"),
            ("t_layer = -1", "t_layer: found -1"),
            ("replica_bytes_per_s = \"fast\"", "replica_bytes_per_s: found \"fast\""),
            ("flop_per_s = 1", "flop_per_s: not a key of a machine"),
            (
                "block_flops_per_s = [1e9, 1e9]",
                "block_flops_per_s: found [1000000000.0,1000000000.0]",
            ),
            ("block_flops_per_s = [1e9, -1, 1e9, 1e9]", "block_flops_per_s: found ["),
            ("t_block = 7", "t_block: found 7; a list of four"),
            ("head_flops_per_s = 0", "head_flops_per_s: found 0"),
            (
                "block_flops_per_s = [1e13, 256, 1e13, 1e13]",
                "block_flops_per_s: found [10000000000000.0,256,10000000000000.0,",
            ),
            ("head_flops_per_s = 312", "head_flops_per_s: found 312; a rate in FLOP/s, from 1e6"),
            ("replica_bytes_per_s = 300", "replica_bytes_per_s: found 300; a rate in bytes/s"),
            ("ranks_at_once = 0", "ranks_at_once: found 0"),
            ("host_bytes = 64", "host_bytes: found 64; bytes"),
            ("host_bytes_per_s = 24", "host_bytes_per_s: found 24; a rate in bytes/s"),
            ("host_bytes_per_s = 24e9\nhost_share = 0", "host_share: found 0"),
        ] {
            let text = format!("{}{line}", GOOD.replace("t_comm = 7\n", ""));
            let said = machine(&text).unwrap_err().to_string();
            assert!(said.starts_with(start), "{said}");
        }
    }

    #[test]
    fn one_file_may_hold_both_and_a_machine_is_not_taken_for_times() {
        let both = format!("{GOOD}t_f = 1\nt_b = 1\nt_w = 1\n");
        let both = table(&both).unwrap();
        assert_eq!(both.of(2, ALONE, None).unwrap().stages[0].f_ns, 1000);
        assert!(both.machine().is_ok());
        let said = table(GOOD).unwrap().of(2, ALONE, None).unwrap_err();
        assert!(said.to_string().contains("zeropp plan"), "{said}");
    }
}
