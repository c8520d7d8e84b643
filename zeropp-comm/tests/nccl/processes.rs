//! Ranks that are processes: this test's own program, started again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use zeropp_comm::CommError;
use zeropp_comm::rendezvous::RendezvousError;

use super::*;

/// A rendezvous of processes of one machine: a file for each value.
struct Folder(PathBuf);

impl Folder {
    fn file(&self, key: &str) -> PathBuf {
        self.0.join(key.replace('/', "-"))
    }
}

impl Rendezvous for Folder {
    fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        let part = self.file(&format!("{key}.{}", std::process::id()));
        fs::write(&part, value).unwrap();
        fs::rename(part, self.file(key)).unwrap();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError> {
        let deadline = Instant::now() + timeout;
        loop {
            match fs::read(self.file(key)) {
                Ok(value) => return Ok(value),
                Err(_) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(_) => {
                    let after_s = timeout.as_secs();
                    return Err(RendezvousError::Timeout { key: key.into(), after_s });
                }
            }
        }
    }

    fn key(&self) -> [u8; 32] {
        [5; 32]
    }
}

/// The body of a started process; does nothing in an ordinary run of the tests.
#[test]
fn as_a_process() {
    let Ok(role) = std::env::var("NCCL_TEST_ROLE") else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let folder = PathBuf::from(std::env::var("NCCL_TEST_FOLDER").unwrap());
    let (first, count, size) =
        (number("NCCL_TEST_FIRST"), number("NCCL_TEST_COUNT"), number("NCCL_TEST_SIZE"));
    let rendezvous = &Folder(folder.clone());
    let role = role.as_str();
    std::thread::scope(|scope| {
        for place in first..first + count {
            let folder = &folder;
            scope.spawn(move || {
                let options = if role == "check" { patient() } else { impatient() };
                let device = Arc::new(Host::new());
                let reported =
                    rank(options, (place, size), rendezvous, device, |all, _| match role {
                        "check" => {
                            results::check(&all, &[0, 7, 20_000]);
                            "done".to_owned()
                        }
                        _ => run_on(&all, folder).to_string(),
                    });
                fs::write(folder.join(format!("told-{place}")), reported.unwrap()).unwrap();
            });
        }
    });
}

/// Works until the world fails.
fn run_on(all: &Group, folder: &Path) -> CommError {
    let ring = all.split("ring", 0, 0).unwrap();
    let mut step = 0u64;
    loop {
        let (next, last) =
            ((all.rank() + 1) % all.size(), (all.rank() + all.size() - 1) % all.size());
        let sum = ring.all_reduce(tensor(&[1.0; 1000], DType::F32)).wait();
        let sent = sum.and_then(|_| ring.send(next, step, tensor(&[2.0; 500], DType::F32)).wait());
        let got = sent.and_then(|()| ring.recv(last, step, 500, DType::F32).wait());
        if let Err(error) = got.and_then(|_| all.barrier()) {
            return error;
        }
        step += 1;
        if step == 5 {
            fs::write(folder.join(format!("going-{}", all.rank())), "").unwrap();
        }
    }
}

/// Processes that are killed with their test.
struct Job {
    processes: Vec<Child>,
    folder: tempfile::TempDir,
    size: usize,
}

impl Job {
    /// Starts processes with so many ranks each.
    fn start(role: &str, counts: &[usize]) -> Job {
        let folder = tempfile::tempdir().unwrap();
        let size: usize = counts.iter().sum();
        let mut first = 0;
        let processes = counts.iter().map(|count| {
            let mut process = Command::new(std::env::current_exe().unwrap());
            process.args(["--exact", "processes::as_a_process", "--nocapture"]);
            process.env("NCCL_TEST_ROLE", role).env("NCCL_TEST_FOLDER", folder.path());
            process.env("NCCL_TEST_FIRST", first.to_string());
            process.env("NCCL_TEST_COUNT", count.to_string());
            process.env("NCCL_TEST_SIZE", size.to_string());
            first += count;
            process.stdout(Stdio::null()).spawn().unwrap()
        });
        Job { processes: processes.collect(), size, folder }
    }

    fn wait_for(&self, what: &str, ranks: impl Iterator<Item = usize>) -> Vec<String> {
        let start = Instant::now();
        let file = |rank| self.folder.path().join(format!("{what}-{rank}"));
        ranks
            .map(|rank| {
                while !file(rank).exists() {
                    assert!(start.elapsed() < Duration::from_secs(60), "no {what} of rank {rank}");
                    std::thread::sleep(Duration::from_millis(5));
                }
                std::thread::sleep(Duration::from_millis(5));
                fs::read_to_string(file(rank)).unwrap()
            })
            .collect()
    }

    fn signal(&self, process: usize, signal: &str) {
        let pid = self.processes[process].id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

#[test]
fn processes_and_threads_of_processes_agree() {
    for counts in [vec![1, 1, 1], vec![2, 2]] {
        let mut job = Job::start("check", &counts);
        let reported = job.wait_for("told", 0..job.size);
        assert!(reported.iter().all(|text| text == "done"), "{reported:?}");
        for process in &mut job.processes {
            assert!(process.wait().unwrap().success());
        }
    }
}

#[test]
fn a_killed_process_is_named_by_the_others() {
    let job = Job::start("run", &[1, 1, 1]);
    job.wait_for("going", 0..3);
    job.signal(1, "-KILL");
    for text in job.wait_for("told", [0, 2].into_iter()) {
        assert!(text.contains("lost rank 1"), "{text}");
    }
}

#[test]
fn a_frozen_process_is_named_by_the_others() {
    for frozen in [0, 1] {
        let job = Job::start("run", &[1, 1, 1]);
        job.wait_for("going", 0..3);
        job.signal(frozen, "-STOP");
        let others: Vec<usize> = (0..3).filter(|rank| *rank != frozen).collect();
        let reported = job.wait_for("told", others.into_iter());
        let named = format!("rank {frozen} has not arrived");
        assert!(reported.iter().any(|text| text.contains(&named)), "{reported:?}");
    }
}
