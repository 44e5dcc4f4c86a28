//! The systems that are compared: OM and EMs apart, in one process, or as many of both; with two guests on each EM.

use crate::figures::Outcome;
use crate::monolith;
use crate::traffic::{Guests, Kind};
use distdpu_tests::dpu::Dpu;
use distdpu_tests::time::{SOON, wait_for};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;
use tempfile::TempDir;

/// What a system consists of.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Whole {
    /// An OM and its EMs, a process each.
    Split,
    /// One process.
    Monolith,
    /// A `Split` of its own for each EM.
    Pairs,
}

enum Running {
    Dpu(Dpu, usize),
    Monolith(Monolith),
}

/// See the module.
pub(crate) struct System {
    /// Before the DPUs: guests leave first.
    guests: Vec<Guests>,
    running: Vec<Running>,
}

/// A process with OM and EM. It ends with its standard input.
struct Monolith {
    child: Child,
    directory: TempDir,
}

impl Drop for Monolith {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

impl System {
    /// Starts a system with `ems` EMs and two guests on each.
    pub(crate) fn start(whole: Whole, ems: usize) -> Outcome<Self> {
        let running = match whole {
            Whole::Split => vec![apart(ems)?],
            Whole::Pairs => (0..ems).map(|_| apart(1)).collect::<Outcome<_>>()?,
            Whole::Monolith => vec![Running::Monolith(together(ems)?)],
        };
        let mut guests = Vec::new();
        for one in &running {
            let (directory, ems) = match one {
                Running::Dpu(dpu, ems) => (dpu.directory(), *ems),
                Running::Monolith(monolith) => (monolith.directory.path(), ems),
            };
            for em in 0..ems {
                guests.push(Guests::on(socket(directory, em))?);
            }
        }
        Ok(Self { guests, running })
    }

    /// The OMs that are processes of their own.
    pub(crate) fn oms(&self) -> Vec<u32> {
        let all = self.running.iter();
        all.filter_map(|one| match one {
            Running::Dpu(dpu, _) => Some(dpu.om_pid()),
            Running::Monolith(_) => None,
        })
        .collect()
    }

    /// The EMs that are processes of their own.
    pub(crate) fn ems(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        for one in &self.running {
            if let Running::Dpu(dpu, ems) = one {
                pids.extend((0..*ems).filter_map(|em| dpu.em_pid(em).ok()));
            }
        }
        pids
    }

    /// What all guests together reach in `time`, in the kind's unit.
    pub(crate) fn load(&mut self, kind: Kind, time: Duration) -> Outcome<f64> {
        let begin = Barrier::new(self.guests.len());
        let rates = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .guests
                .iter_mut()
                .map(|guests| {
                    scope.spawn(|| {
                        begin.wait();
                        guests.run(kind, time).map_err(|e| e.to_string())
                    })
                })
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            let rates = joined.map(|rate| rate.unwrap_or_else(|_| Err("a guest panicked".into())));
            rates.collect::<Result<Vec<f64>, String>>()
        })?;
        Ok(rates.into_iter().sum())
    }
}

fn apart(ems: usize) -> Outcome<Running> {
    let dpu = Dpu::with_config(4 * ems, |directory| config(directory, ems, true))?;
    Ok(Running::Dpu(dpu, ems))
}

fn together(ems: usize) -> Outcome<Monolith> {
    let directory = TempDir::with_prefix("distdpu-bench-")?;
    let file = directory.path().join("distdpu.toml");
    std::fs::write(&file, config(directory.path(), ems, false))?;
    let child = Command::new(std::env::current_exe()?)
        .arg(monolith::WORD)
        .arg(&file)
        .stdin(Stdio::piped())
        .spawn()?;
    let monolith = Monolith { child, directory };
    let last = socket(monolith.directory.path(), ems - 1)("rdma", 1);
    wait_for("the single process", SOON, || last.exists().then_some(()))?;
    Ok(monolith)
}

/// Path of a function of an EM by its kind and number.
fn socket(directory: &Path, em: usize) -> impl Fn(&str, usize) -> PathBuf {
    let directory = directory.to_owned();
    move |kind, n| directory.join(format!("{kind}{em}-{n}.sock"))
}

/// Each EM has two RDMA and two network functions, and a network of its own.
fn config(directory: &Path, ems: usize, managed: bool) -> String {
    let mut text = format!("[dpu]\nrun_dir = \"{}\"\n", directory.display());
    for em in 0..ems {
        let _ = write!(text, "\n[[network]]\nname = \"lab{em}\"\n");
    }
    for em in 0..ems {
        let _ = write!(text, "\n[[em]]\nname = \"em{em}\"\nmanaged = {managed}\n");
        for n in 0..2 {
            let _ = write!(
                text,
                "\n  [[em.function]]\n  name = \"rdma{em}-{n}\"\n  kind = \"rdma\"\n  \
                 link_type = \"infiniband\"\n  mac = \"02:00:00:01:{em:02x}:{n:02x}\"\n  network = \"lab{em}\"\n\
                 \n  [[em.function]]\n  name = \"net{em}-{n}\"\n  kind = \"virtio-net\"\n  \
                 mac = \"02:00:00:00:{em:02x}:{n:02x}\"\n  network = \"lab{em}\"\n",
            );
        }
    }
    text
}
