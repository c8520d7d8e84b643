//! Files that start the run of a layout on a cluster. The examples in docs/launch are made of the
//! same templates.

use crate::PlanError;

/// Cores for each GPU: its rank computes in one, and talks, saves and reads in others.
const CORES: usize = 4;

/// What starts the processes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// sbatch and srun: a process for each node.
    Slurm,
    /// An indexed Job: a pod for each node.
    Kubernetes,
    /// A process for each GPU.
    Torchrun,
}

impl Launcher {
    /// All of them, by name.
    pub const ALL: [(&'static str, Launcher); 3] = [
        ("slurm", Launcher::Slurm),
        ("k8s", Launcher::Kubernetes),
        ("torchrun", Launcher::Torchrun),
    ];

    fn template(self) -> &'static str {
        match self {
            Launcher::Slurm => include_str!("../launch/slurm.sbatch"),
            Launcher::Kubernetes => include_str!("../launch/k8s.yaml"),
            Launcher::Torchrun => include_str!("../launch/torchrun.sh"),
        }
    }

    /// The file that runs `command`, which a plan printed, on so many nodes of so many GPUs.
    pub fn file(self, command: &str, [nodes, gpus]: [usize; 2]) -> String {
        let words = command.strip_prefix("zeropp ").unwrap_or(command);
        let words = words.replace(" --engine nccl", "");
        let words = match self {
            // The manifest has these already.
            Launcher::Kubernetes => {
                words.strip_prefix("run ").unwrap_or(&words).replace("--device cuda ", "")
            }
            _ if words.is_empty() => words,
            _ => format!("{words} "),
        };
        self.template()
            .replace("{{nodes}}", &nodes.to_string())
            .replace("{{gpus}}", &gpus.to_string())
            .replace("{{cpus}}", &(CORES * gpus).to_string())
            .replace("{{words}}", &words)
    }
}

/// Nodes, and GPUs in each, of a run on so many GPUs.
///
/// # Errors
/// GPUs that do not fill nodes.
pub fn nodes(gpus: usize, per_node: usize) -> Result<[usize; 2], PlanError> {
    let each = per_node.min(gpus);
    if !gpus.is_multiple_of(each) {
        return Err(PlanError::new(format!(
            "gpus = {gpus}: do not fill nodes of {per_node}; use a multiple of {per_node}, or \
             --per-node with a number that divides them"
        )));
    }
    Ok([gpus / each, each])
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const COMMAND: &str = "zeropp run --model gpt2 --precision bf16 --device cuda --engine nccl \
                           --pp 4 --zero3 8 --dp 2 --virtual 2";

    #[test]
    fn examples_in_docs_are_made_of_the_templates() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/launch/");
        for (launcher, file, command) in [
            (Launcher::Slurm, "nccl.sbatch", ""),
            (Launcher::Kubernetes, "nccl-job.yaml", "zeropp run --pp 2 --zero3 8"),
            (Launcher::Torchrun, "nccl-torchrun.sh", ""),
        ] {
            // A package has no docs.
            let Ok(text) = std::fs::read_to_string(format!("{folder}{file}")) else { return };
            assert_eq!(launcher.file(command, [2, 8]), text, "{file}");
        }
    }

    /// The settings of `#SBATCH` lines, and the words of the line that starts zeropp.
    #[test]
    fn a_file_for_slurm_has_the_nodes_and_the_words_of_the_layout() {
        let file = Launcher::Slurm.file(COMMAND, nodes(64, 8).unwrap());
        let lines = file.lines().filter_map(|line| line.strip_prefix("#SBATCH --"));
        let settings: HashMap<&str, &str> =
            lines.map(|line| line.split_once('=').unwrap_or((line, ""))).collect();
        for (key, value) in [
            ("nodes", "8"),
            ("gpus-per-node", "8"),
            ("ntasks-per-node", "1"),
            ("cpus-per-task", "32"),
            ("exclusive", ""),
        ] {
            assert_eq!(settings.get(key), Some(&value), "{key}");
        }
        let start = file.lines().find(|line| line.starts_with("srun ")).unwrap();
        let words: Vec<&str> = start.split(' ').collect();
        let of_command: Vec<&str> = COMMAND.split(' ').skip(1).collect();
        let without_engine = of_command.join(" ").replace(" --engine nccl", "");
        assert!(start.contains(&format!("\"$zeropp\" {without_engine} \"$@\" ")), "{start}");
        assert_eq!(words.iter().filter(|word| **word == "--engine").count(), 1);
        is_a_script(&file);
    }

    #[test]
    fn a_file_for_torchrun_has_a_process_for_each_gpu() {
        let file = Launcher::Torchrun.file(COMMAND, nodes(64, 8).unwrap());
        let start = file.split("exec torchrun ").nth(1).unwrap().replace("\\\n", " ");
        let words: Vec<&str> = start.split_whitespace().collect();
        let after = |flag: &str| words[words.iter().position(|word| *word == flag).unwrap() + 1];
        assert_eq!((after("--nnodes"), after("--nproc-per-node")), ("8", "8"));
        assert_eq!((after("--pp"), after("--zero3"), after("--engine")), ("4", "8", "nccl"));
        is_a_script(&file);
    }

    /// Bash reads it to its end.
    fn is_a_script(file: &str) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.sh");
        std::fs::write(&path, file).unwrap();
        let read = std::process::Command::new("bash").arg("-n").arg(&path).output().unwrap();
        assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
        assert!(!file.contains("{{"), "{file}");
    }

    #[test]
    fn a_manifest_has_a_pod_for_each_node_with_its_gpus_and_locked_memory() {
        let file = Launcher::Kubernetes.file(COMMAND, nodes(64, 8).unwrap());
        assert!(!file.contains("{{"), "{file}");
        let job = file.split("\n---\n").nth(1).unwrap();
        let mut of = paths(job);
        let mut one = |path: &str| of.remove(path).unwrap_or_else(|| panic!("no {path}: {job}"));
        assert_eq!((one("spec.completions"), one("spec.parallelism")), ("8".into(), "8".into()));
        let container = "spec.template.spec.containers.-";
        assert_eq!(one(&format!("{container}.resources.limits.nvidia.com/gpu")), "8");
        assert_eq!(one(&format!("{container}.resources.limits.rdma/hca")), "1");
        assert_eq!(one(&format!("{container}.resources.requests.cpu")), "32");
        assert_eq!(one(&format!("{container}.securityContext.capabilities.add")), "[IPC_LOCK]");
        let words = one(&format!("{container}.args.-"));
        assert!(words.starts_with("exec zeropp run --engine nccl --device cuda --model gpt2"));
        for (flag, times) in [("--device", 1), ("--engine", 1), ("--pp 4 ", 1), ("--nodes 8 ", 1)] {
            assert_eq!(words.matches(flag).count(), times, "{flag} in {words}");
        }
    }

    /// The values of a block of YAML by their paths, an item of a list as `-`: of maps, lists and
    /// folded text, which is all that the manifest has. Of a path that is there twice the first.
    fn paths(text: &str) -> HashMap<String, String> {
        let mut all: HashMap<String, String> = HashMap::new();
        // The indents and names of the maps and lists that a line is in.
        let mut inside: Vec<(usize, String)> = Vec::new();
        let mut folded: Option<(usize, String)> = None;
        for line in text.lines() {
            let mut rest = line.trim_start();
            let mut indent = line.len() - rest.len();
            assert!(indent % 2 == 0 && !line.contains('\t'), "{line}");
            if let Some((of, path)) = folded.clone() {
                if indent > of {
                    let value = all.entry(path).or_default();
                    value.push_str(if value.is_empty() { "" } else { " " });
                    value.push_str(rest);
                    continue;
                }
                folded = None;
            }
            if rest.is_empty() || rest.starts_with('#') {
                continue;
            }
            while let Some(item) = rest.strip_prefix("- ") {
                inside.retain(|(at, _)| *at < indent);
                inside.push((indent, "-".into()));
                (rest, indent) = (item, indent + 2);
            }
            inside.retain(|(at, _)| *at < indent);
            let path = |name: Option<&str>| {
                let names = inside.iter().map(|(_, name)| name.as_str()).chain(name);
                names.collect::<Vec<_>>().join(".")
            };
            if rest == ">-" {
                folded = Some((indent - 2, path(None)));
                continue;
            }
            let (name, value) = rest.split_once(':').unwrap_or(("", rest));
            let path = path((!name.is_empty()).then_some(name));
            match value.trim() {
                "" => inside.push((indent, name.into())),
                value => drop(all.entry(path).or_insert_with(|| value.into())),
            }
        }
        all
    }

    #[test]
    fn gpus_that_do_not_fill_nodes_are_refused() {
        assert_eq!(nodes(4, 8).unwrap(), [1, 4]);
        assert_eq!(nodes(1024, 8).unwrap(), [128, 8]);
        let said = nodes(12, 8).unwrap_err().to_string();
        assert!(said.starts_with("gpus = 12: do not fill nodes of 8; use a multiple"), "{said}");
    }
}
