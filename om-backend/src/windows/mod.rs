//! DOT windows: where the memory of a VM's memory functions lies in its address space, told to the EMs of the VM's RDMA
//! functions.
//!
//! The OM presents config space, so it knows where the guest placed a BAR and whether memory decode is on. One thread
//! for each VM ([`follow`]) tells the EMs, so that what is given and what is taken away goes in order, and a VM whose
//! EM does not answer holds up the windows of no other. A write of a guest that takes a window away waits until its EMs
//! have said that no transfer uses the window ([`Placement::follow`]), or for [`WRITE_PATIENCE`]; other writes to config
//! space that come by the same EM wait behind it.

mod plan;
mod vm;

use crate::control::FunctionControl;
use crate::vault::Vault;
use m2m_fabric::Fabric;
pub use plan::Range;
use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vm::Vm;

/// How long a guest's write waits for what it changes; the memory function's EM gives up after 1 s.
const WRITE_PATIENCE: Duration = Duration::from_millis(900);

/// How long after an EM came the memory functions of its VM may be unknown, because another EM has not returned yet.
const RETURN: Duration = Duration::from_secs(3);
/// How long the thread sleeps at most, when nothing happens.
const IDLE: Duration = Duration::from_secs(3600);

/// News for the thread of a VM.
pub enum News {
    /// The memory of a function is here now, or nowhere.
    Placed {
        /// The function.
        device: u32,
        /// Where.
        range: Option<Range>,
        /// What has its file.
        vault: Vault,
        /// Takes the word that all is done.
        done: SyncSender<()>,
    },
    /// An EM serves an RDMA function.
    Up {
        /// The function.
        function: u32,
        /// The way to its EM.
        fabric: Arc<dyn Fabric>,
    },
    /// The EM of an RDMA function is gone.
    Down {
        /// The function.
        function: u32,
    },
}

/// What the functions of one VM share.
#[derive(Debug, Clone)]
pub struct Windows(Sender<News>);

impl Windows {
    /// Starts the thread of a VM. It ends when no function has the windows any more. `returning`: RDMA functions whose
    /// EMs may still have windows of a former OM; a guest that takes memory away waits for them too.
    ///
    /// # Errors
    /// What the system said when there is no room for a thread.
    pub fn start(vm: &str, returning: BTreeSet<u32>) -> std::io::Result<Self> {
        let (sender, news) = channel();
        let name = vm.to_owned();
        std::thread::Builder::new()
            .name(format!("windows-{vm}"))
            .spawn(move || follow(&name, returning, &news))?;
        Ok(Self(sender))
    }

    /// An EM serves an RDMA function of the VM from now on, and knows of no window.
    pub fn up(&self, function: u32, fabric: Arc<dyn Fabric>) {
        self.tell(News::Up { function, fabric });
    }

    /// The EM of an RDMA function of the VM is gone.
    pub fn down(&self, function: u32) {
        self.tell(News::Down { function });
    }

    fn tell(&self, news: News) {
        // The thread lives as long as this handle.
        let _ = self.0.send(news);
    }
}

/// Tells the EMs of one VM what they have to know.
fn follow(name: &str, mut returning: BTreeSet<u32>, news: &Receiver<News>) {
    let mut vm = Vm::new(name);
    let mut sweep = (!returning.is_empty()).then(|| Instant::now() + RETURN);
    let mut waiting: Vec<SyncSender<()>> = Vec::new();
    loop {
        let now = Instant::now();
        if sweep.is_some_and(|at| at <= now) {
            vm.sweep();
            sweep = None;
            returning.clear();
        }
        if returning.is_empty() {
            // Whoever waited may have lost patience.
            for done in waiting.drain(..) {
                let _ = done.send(());
            }
        }
        let wait = sweep.map_or(IDLE, |at| at.saturating_duration_since(now));
        let news = match news.recv_timeout(wait) {
            Ok(news) => news,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        match news {
            News::Placed {
                device,
                range,
                vault,
                done,
            } => {
                vm.placed(device, range, vault);
                waiting.push(done);
            }
            News::Up { function, fabric } => {
                vm.up(function, fabric);
                returning.remove(&function);
                sweep = Some(Instant::now() + RETURN);
            }
            News::Down { function } => {
                vm.down(function);
                returning.remove(&function);
            }
        }
    }
}

/// Where the memory of one function was when its VM's thread was told last.
#[derive(Debug)]
pub struct Placement {
    windows: Windows,
    bar: u32,
    bytes: u64,
    told: Mutex<Option<Range>>,
}

impl Placement {
    /// Nowhere yet. The memory is all of `bar`.
    pub fn new(windows: Windows, bar: u32, bytes: u64) -> Self {
        Self {
            windows,
            bar,
            bytes,
            told: Mutex::default(),
        }
    }

    /// Where it is.
    pub fn range(&self) -> Option<Range> {
        *self.lock()
    }

    /// Config space may have changed: when the memory is elsewhere now, returns as soon as everybody knows and nobody
    /// uses the place where it was.
    pub fn follow(&self, device: u32, control: &FunctionControl, vault: &Vault) {
        let told = self.tell(device, control, vault);
        if told.is_some_and(|done| done.recv_timeout(WRITE_PATIENCE).is_err()) {
            log::error!("function {device}: an EM does not get done with the memory in time");
        }
    }

    /// The same for somebody who must not wait, because an EM may ask it something before it is done. Answers where the
    /// word comes that all is done, when there is something to do.
    pub fn tell(
        &self,
        device: u32,
        control: &FunctionControl,
        vault: &Vault,
    ) -> Option<Receiver<()>> {
        let mut told = self.lock();
        let start = control.decoded(self.bar);
        let range = start.and_then(|start| Range::new(start, self.bytes));
        if range == *told {
            return None;
        }
        *told = range;
        let (done, all_done) = sync_channel(1);
        self.windows.tell(News::Placed {
            device,
            range,
            vault: vault.clone(),
            done,
        });
        Some(all_done)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Range>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
