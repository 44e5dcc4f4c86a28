//! An OM with its EMs, as the processes that users run.

use crate::manager::ServiceManager;
use crate::time::{SOON, wait_for};
use crate::{Error, Result};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A virtio-net function for the OM's file, in an EM of its own.
#[derive(Debug, Clone)]
pub struct Net {
    /// MTU.
    pub mtu: u16,
    /// Queue pairs.
    pub pairs: u16,
    /// Queue size.
    pub queue_size: u16,
    /// Value of the key `port` as TOML; without, the function is on the common network.
    pub port: Option<&'static str>,
    /// File name of a pcap file, in the DPU's directory.
    pub capture: Option<&'static str>,
    /// What a VMM sees of it.
    pub face: Face,
}

/// What a VMM sees of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Face {
    /// A PCIe function.
    #[default]
    VfioUser,
    /// Virtqueues.
    VhostUser,
    /// Virtqueues, and the EM connects to the socket.
    VhostUserClient,
}

impl Default for Net {
    fn default() -> Self {
        Self {
            mtu: 9000,
            pairs: 1,
            queue_size: 256,
            port: None,
            capture: None,
            face: Face::VfioUser,
        }
    }
}

/// RDMA functions of a network, by default InfiniBand, `rdma0` and so on, for the OM's file.
#[derive(Debug, Clone, Copy)]
pub struct Rdma {
    /// How many.
    pub functions: usize,
    /// Whether the network is an Ethernet (RoCE v2).
    pub ethernet: bool,
    /// Whether one EM has all of them, instead of one each.
    pub together: bool,
    /// Whether the VMM may map the doorbell pages.
    pub mapped_doorbells: bool,
    /// Memory functions of each VM, in an EM of their own: `gpu0-0` and so on in `gpu0`.
    pub memory: usize,
    /// MiB of each of them.
    pub memory_mib: u64,
    /// Longest time in microseconds that an EM looks for work before it sleeps, if not the usual.
    pub poll_us: Option<u64>,
}

impl Rdma {
    /// `functions` in an EM each, as an OM has them by itself.
    pub fn new(functions: usize) -> Self {
        Self {
            functions,
            ethernet: false,
            together: false,
            mapped_doorbells: false,
            memory: 0,
            memory_mib: 64,
            poll_us: None,
        }
    }
}

/// What a guest sees of its RDMA function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RdmaFace {
    /// `rdma0` and so on: a ConnectX with an Ethernet port.
    Mlx5,
    /// `erdma0` and so on: Alibaba's erdma, with the virtio-net function `net0` and so on of the same MAC address.
    Erdma,
}

/// A running DPU. Dropping it ends its processes and removes its files.
#[derive(Debug)]
pub struct Dpu {
    directory: TempDir,
    om: Child,
    functions: usize,
    manager: Option<ServiceManager>,
}

impl Dpu {
    /// Starts an OM for these functions (`em0` has `net0` and so on) and waits until all EMs are up.
    ///
    /// # Errors
    /// The programs are not built, or did not come up; with the end of their log.
    pub fn start(functions: &[Net]) -> Result<Self> {
        Self::with_config(functions.len(), |directory| config(directory, functions))
    }

    /// The same with variables in the environment of OM and EMs.
    ///
    /// # Errors
    /// The programs are not built, or did not come up.
    pub fn start_with_env(functions: &[Net], env: &[(&str, &str)]) -> Result<Self> {
        Self::run(
            functions.len(),
            |directory| config(directory, functions),
            env,
            false,
        )
    }

    /// The same under a service manager that keeps descriptors.
    ///
    /// # Errors
    /// The programs are not built, or did not come up.
    pub fn start_under_manager(functions: &[Net]) -> Result<Self> {
        let text = |directory: &Path| config(directory, functions);
        Self::run(functions.len(), text, &[], true)
    }

    /// The same with a configuration text of the caller's; `functions` of them are waited for.
    ///
    /// # Errors
    /// The programs are not built, or did not come up.
    pub fn with_config(functions: usize, text: impl FnOnce(&Path) -> String) -> Result<Self> {
        Self::run(functions, text, &[], false)
    }

    fn run(
        functions: usize,
        text: impl FnOnce(&Path) -> String,
        env: &[(&str, &str)],
        managed: bool,
    ) -> Result<Self> {
        program("em")?;
        let directory = TempDir::with_prefix("distdpu-test-")?;
        let file = directory.path().join("distdpu.toml");
        std::fs::write(&file, text(directory.path()))?;
        let socket = directory.path().join("notify.sock");
        let manager = managed
            .then(|| ServiceManager::start(&socket))
            .transpose()?;
        let om = start_om(directory.path(), env, manager.as_ref())?;
        let mut dpu = Self {
            directory,
            om,
            functions,
            manager,
        };
        dpu.wait_up()?;
        Ok(dpu)
    }

    /// Ends the OM as abruptly as can be; its EMs stay.
    ///
    /// # Errors
    /// The system refused.
    pub fn kill_om(&mut self) -> Result<()> {
        self.om.kill()?;
        self.om.wait()?;
        Ok(())
    }

    /// Starts an OM on the files of the one that was killed.
    ///
    /// # Errors
    /// It did not come up.
    pub fn start_another_om(&mut self) -> Result<()> {
        self.om = start_om(self.directory.path(), &[], self.manager.as_ref())?;
        self.wait_up()
    }

    /// Kills everything at once, the OM first; answers who the EMs were.
    ///
    /// # Errors
    /// dpuctl failed, or the system refused.
    pub fn kill_all(&mut self) -> Result<Vec<u32>> {
        let pids = (0..self.functions).map(|index| self.em_pid(index));
        let pids = pids.collect::<Result<Vec<_>>>()?;
        self.om.kill()?;
        for pid in pids.iter().filter_map(|&pid| Pid::from_raw(pid as i32)) {
            kill_process(pid, Signal::KILL).map_err(std::io::Error::from)?;
        }
        self.om.wait()?;
        Ok(pids)
    }

    /// The service manager, if there is one.
    pub fn manager(&self) -> Option<&ServiceManager> {
        self.manager.as_ref()
    }

    /// Waits until every function waits for its VMM or has one.
    ///
    /// # Errors
    /// [`Error::Harness`] with the end of the log.
    pub fn wait_up(&mut self) -> Result<()> {
        let functions = self.functions;
        let up = wait_for("the EMs", SOON, || {
            if let Ok(Some(status)) = self.om.try_wait() {
                return Some(Err(status));
            }
            let answer = self.ctl(&["functions"]).ok()?;
            let list = answer["functions"].as_array()?;
            let present = list
                .iter()
                .filter(|f| !matches!(f["state"].as_str(), None | Some("absent")))
                .count();
            (present == functions).then_some(Ok(()))
        });
        match up {
            Ok(Ok(())) => Ok(()),
            Ok(Err(status)) => Err(Error::Harness(format!(
                "the OM ended with {status}:\n{}",
                self.log_end()
            ))),
            Err(_) => Err(Error::Harness(format!(
                "the EMs did not come up; functions: {:?}; log:\n{}",
                self.ctl(&["functions"]),
                self.log_end()
            ))),
        }
    }

    /// `dpuctl --json` with these words, parsed.
    ///
    /// # Errors
    /// What dpuctl says on its standard error.
    pub fn ctl(&self, words: &[&str]) -> Result<Value> {
        let done = Command::new(program("dpuctl")?)
            .arg("--socket")
            .arg(self.directory.path().join("dpuctl.sock"))
            .arg("--json")
            .args(words)
            .stdin(Stdio::null())
            .output()?;
        if !done.status.success() {
            return Err(Error::Harness(
                String::from_utf8_lossy(&done.stderr).trim().into(),
            ));
        }
        serde_json::from_slice(&done.stdout)
            .map_err(|e| Error::Harness(format!("dpuctl's JSON: {e}")))
    }

    /// Counters of function `netN`.
    ///
    /// # Errors
    /// dpuctl failed or does not know the function.
    pub fn function_stats(&self, index: usize) -> Result<Value> {
        let answer = self.ctl(&["stats"])?;
        let name = format!("net{index}");
        answer["functions"]
            .as_array()
            .and_then(|list| list.iter().find(|f| f["name"] == name.as_str()))
            .cloned()
            .ok_or_else(|| Error::Harness(format!("dpuctl stats has no {name}: {answer}")))
    }

    /// Process id of `emN`.
    ///
    /// # Errors
    /// dpuctl failed or the EM is not there.
    pub fn em_pid(&self, index: usize) -> Result<u32> {
        self.pid_of(&format!("em{index}"))
    }

    /// Process id of an EM by its name.
    ///
    /// # Errors
    /// dpuctl failed or the EM is not there.
    pub fn pid_of(&self, name: &str) -> Result<u32> {
        let answer = self.ctl(&["status"])?;
        answer["ems"]
            .as_array()
            .and_then(|list| list.iter().find(|em| em["name"] == name))
            .and_then(|em| em["pid"].as_u64())
            .map(|pid| pid as u32)
            .ok_or_else(|| Error::Harness(format!("dpuctl status has no pid of {name}: {answer}")))
    }

    /// Process id of the OM.
    pub fn om_pid(&self) -> u32 {
        self.om.id()
    }

    /// Starts an OM for RDMA functions on one network.
    ///
    /// # Errors
    /// The programs are not built, or did not come up.
    pub fn start_rdma(plan: Rdma) -> Result<Self> {
        Self::start_rdma_with_env(plan, &[])
    }

    /// The same with variables in the environment of OM and EMs.
    ///
    /// # Errors
    /// The programs are not built, or did not come up.
    pub fn start_rdma_with_env(plan: Rdma, env: &[(&str, &str)]) -> Result<Self> {
        let em = program("em")?;
        let text = |directory: &Path| rdma_config(directory, plan, &em);
        Self::run(plan.functions * (1 + plan.memory), text, env, false)
    }

    /// Starts an OM for RDMA functions of these faces on one Ethernet, each in the EM `em0` and so on. Doorbell pages
    /// of a ConnectX may be mapped.
    ///
    /// # Errors
    /// The programs are not built, or did not come up.
    pub fn start_faces(faces: &[RdmaFace], mapped_doorbells: bool) -> Result<Self> {
        let of = |face: &RdmaFace| match face {
            RdmaFace::Mlx5 => 1,
            RdmaFace::Erdma => 2,
        };
        let text = |directory: &Path| faces_config(directory, faces, mapped_doorbells);
        Self::run(faces.iter().map(of).sum(), text, &[], false)
    }

    /// The vfio-user socket of function `erdmaN`.
    pub fn erdma_socket(&self, index: usize) -> PathBuf {
        self.directory.path().join(format!("erdma{index}.sock"))
    }

    /// The vfio-user socket of function `rdmaN`.
    pub fn rdma_socket(&self, index: usize) -> PathBuf {
        self.directory.path().join(format!("rdma{index}.sock"))
    }

    /// The vfio-user socket of memory function `index` of the VM with `rdmaN`.
    pub fn memory_socket(&self, vm: usize, index: usize) -> PathBuf {
        self.directory.path().join(format!("gpu{vm}-{index}.sock"))
    }

    /// The vfio-user socket of function `netN`.
    pub fn socket(&self, index: usize) -> PathBuf {
        self.directory.path().join(format!("net{index}.sock"))
    }

    /// The directory of the DPU's files.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The last lines that OM and EMs logged.
    pub fn log_end(&self) -> String {
        let mut text = String::new();
        let Ok(entries) = std::fs::read_dir(self.directory.path()) else {
            return text;
        };
        for path in entries.flatten().map(|e| e.path()) {
            if path.extension().is_some_and(|e| e == "log") {
                let log = std::fs::read(&path).unwrap_or_default();
                let log = String::from_utf8_lossy(&log);
                let lines: Vec<&str> = log.lines().collect();
                let _ = writeln!(text, "--- {}", path.display());
                for line in lines.iter().skip(lines.len().saturating_sub(30)) {
                    let _ = writeln!(text, "{line}");
                }
            }
        }
        text
    }

    /// Whether the OM runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.om.try_wait(), Ok(None))
    }
}

impl Drop for Dpu {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.log_end());
            match self.ctl(&["stats"]) {
                Ok(stats) => eprintln!("counters: {stats}"),
                Err(e) => eprintln!("no counters: {e}"),
            }
        }
        if let Some(pid) = Pid::from_raw(self.om.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let ended = wait_for("the OM to end", Duration::from_secs(5), || {
            self.om.try_wait().ok().flatten()
        });
        if ended.is_err() {
            eprintln!(
                "the OM did not end on SIGTERM within 5 s:\n{}",
                self.log_end()
            );
            let _ = self.om.kill();
            let _ = self.om.wait();
        }
    }
}

fn start_om(
    directory: &Path,
    env: &[(&str, &str)],
    manager: Option<&ServiceManager>,
) -> Result<Child> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(directory.join("om.log"))?;
    let level = std::env::var("RUST_LOG").unwrap_or_else(|_| "info".into());
    let mut command = match manager {
        Some(manager) => manager.command(program("om")?)?,
        None => Command::new(program("om")?),
    };
    let om = command
        .arg("--config")
        .arg(directory.join("distdpu.toml"))
        .env("RUST_LOG", level)
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    Ok(om)
}

/// The OM's file for functions `net0`…, each in its EM.
pub fn config(directory: &Path, functions: &[Net]) -> String {
    let mut text = format!(
        "[dpu]\nrun_dir = \"{}\"\n\n[[network]]\nname = \"lab\"\n",
        directory.display()
    );
    for (index, net) in functions.iter().enumerate() {
        let mut wire = match net.port {
            Some(port) => format!("port = {port}"),
            None => "network = \"lab\"".into(),
        };
        if let Some(capture) = net.capture {
            let path = directory.join(capture);
            let _ = write!(wire, "\n  capture = \"{}\"", path.display());
        }
        wire += match net.face {
            Face::VfioUser => "",
            Face::VhostUser => "\n  face = \"vhost-user\"",
            Face::VhostUserClient => "\n  face = \"vhost-user\"\n  vhost_mode = \"client\"",
        };
        let _ = write!(
            text,
            "\n[[em]]\nname = \"em{index}\"\n\n  [[em.function]]\n  name = \"net{index}\"\n  \
             kind = \"virtio-net\"\n  mac = \"02:00:00:00:00:{:02x}\"\n  ip = \"10.0.0.{}/24\"\n  \
             mtu = {}\n  queue_pairs = {}\n  queue_size = {}\n  {wire}\n",
            index + 1,
            index + 1,
            net.mtu,
            net.pairs,
            net.queue_size,
        );
    }
    text
}

/// The OM's file for RDMA functions; `em` is the program.
fn rdma_config(directory: &Path, plan: Rdma, em: &Path) -> String {
    let mut text = format!("[dpu]\nrun_dir = \"{}\"\n", directory.display());
    if let Some(poll_us) = plan.poll_us {
        let start = directory.join("em");
        let script = format!(
            "#!/bin/sh\nexec {} --poll-us {poll_us} \"$@\"\n",
            em.display()
        );
        // Without it the EMs do not come up, which is told.
        let _ = std::fs::write(&start, script);
        let _ = std::fs::set_permissions(&start, Permissions::from_mode(0o755));
        let _ = writeln!(text, "em_binary = \"{}\"", start.display());
    }
    text += "\n[[network]]\nname = \"lab\"\n";
    for index in 0..plan.functions {
        if index == 0 || !plan.together {
            let _ = write!(text, "\n[[em]]\nname = \"em{index}\"\n");
        }
        let _ = write!(
            text,
            "\n  [[em.function]]\n  name = \"rdma{index}\"\n  kind = \"rdma\"\n  \
             link_type = \"{}\"\n  mac = \"02:00:00:00:01:{:02x}\"\n  network = \"lab\"\n  \
             mapped_doorbells = {}\n  vm = \"vm{index}\"\n",
            if plan.ethernet {
                "ethernet"
            } else {
                "infiniband"
            },
            index + 1,
            plan.mapped_doorbells,
        );
    }
    for vm in (0..plan.functions).filter(|_| plan.memory != 0) {
        let _ = write!(text, "\n[[em]]\nname = \"gpu{vm}\"\n");
        for index in 0..plan.memory {
            let _ = write!(
                text,
                "\n  [[em.function]]\n  name = \"gpu{vm}-{index}\"\n  kind = \"memory\"\n  \
                 vm = \"vm{vm}\"\n  size_mib = {}\n",
                plan.memory_mib,
            );
        }
    }
    text
}

/// The OM's file for RDMA functions of these faces.
fn faces_config(directory: &Path, faces: &[RdmaFace], mapped_doorbells: bool) -> String {
    let mut text = format!(
        "[dpu]\nrun_dir = \"{}\"\n\n[[network]]\nname = \"lab\"\n",
        directory.display()
    );
    for (index, face) in faces.iter().enumerate() {
        let _ = write!(text, "\n[[em]]\nname = \"em{index}\"\n");
        let mapped = format!("rdma\"\n  mapped_doorbells = {mapped_doorbells}\n");
        let functions = match face {
            RdmaFace::Mlx5 => vec![("rdma", mapped.as_str())],
            RdmaFace::Erdma => vec![("net", "virtio-net\"\n"), ("erdma", "erdma\"\n")],
        };
        for (name, kind) in functions {
            let _ = write!(
                text,
                "\n  [[em.function]]\n  name = \"{name}{index}\"\n  mac = \"02:00:00:00:01:{:02x}\"\n  \
                 network = \"lab\"\n  vm = \"vm{index}\"\n  kind = \"{kind}",
                index + 1,
            );
        }
    }
    text
}

/// MAC address of `rdmaN` and `erdmaN`.
pub fn rdma_mac(index: usize) -> [u8; 6] {
    [2, 0, 0, 0, 1, index as u8 + 1]
}

/// MAC address of `netN`.
pub fn mac(index: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, index as u8 + 1]
}

/// Path of a program of this workspace, built into the same target directory as this test.
///
/// # Errors
/// It is not built.
pub fn program(name: &str) -> Result<PathBuf> {
    let here = std::env::current_exe()?;
    let profile = here
        .ancestors()
        .skip(1)
        .find(|d| d.file_name().is_some_and(|n| n != "deps"))
        .unwrap_or(Path::new("."));
    let path = profile.join(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(Error::Harness(format!(
        "{} is not there: build it first with `cargo build -p em-device -p om-backend` \
         (with --release for a release test or a benchmark)",
        path.display()
    )))
}
