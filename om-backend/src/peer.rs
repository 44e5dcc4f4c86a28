//! The OM's end of a connection to an EM: who it is, and what it may ask.

use crate::conductor::Message;
use crate::function::{Function, Life};
use crate::supervisor::progress::Progress;
use m2m_fabric::proto::{ControlAddress, Event, Hello, Image, Reply, Request};
use m2m_fabric::{Fabric, FabricError, Handler, PeerInfo};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long an EM waits for the OM's thread to say whether it is welcome.
const HELLO_ANSWER: Duration = Duration::from_secs(4);

/// How long an EM waits for what the OM's thread says to its requests.
const REQUEST_ANSWER: Duration = Duration::from_secs(4);

/// Register reads that nothing answers, as on PCI.
const ALL_ONES: u32 = u32::MAX;

/// Which EM a connection belongs to, once that is known.
pub struct Binding {
    /// The EM, by its place in the configuration.
    pub em: usize,
    /// Counts the connections of the OM's life; tells a new one of an EM from its last.
    pub epoch: u64,
    /// The functions it may touch.
    pub functions: Vec<Arc<Function>>,
    /// The connection, which owns what refers to this.
    pub fabric: Weak<dyn Fabric>,
}

/// Handles what one EM asks. Register accesses are answered here, on the fabric's thread; everything
/// else is the OM's own thread's.
pub struct Peer {
    info: PeerInfo,
    conductor: Sender<Message>,
    fabric: Mutex<Option<Arc<dyn Fabric>>>,
    fabric_came: Condvar,
    binding: OnceLock<Binding>,
    down: AtomicBool,
    progress: Mutex<Progress>,
    /// What functions presented under a former OM, as an EM says that returns from another host.
    former: Mutex<BTreeMap<u32, Vec<u8>>>,
}

/// An EM that said who it is, for the OM to judge.
pub struct Introduction {
    /// What it said.
    pub hello: Hello,
    /// Who it is for the system.
    pub info: PeerInfo,
    /// Its connection.
    pub fabric: Arc<dyn Fabric>,
    /// Where its binding goes before the first order does.
    pub peer: Arc<Peer>,
    /// Takes the judgement; the error is a sentence for the EM's log.
    pub answer: SyncSender<Result<(), String>>,
}

impl Peer {
    /// For a connection that is about to start.
    pub fn new(info: PeerInfo, conductor: Sender<Message>) -> Arc<Self> {
        Arc::new(Self {
            info,
            conductor,
            fabric: Mutex::new(None),
            fabric_came: Condvar::new(),
            binding: OnceLock::new(),
            down: AtomicBool::new(false),
            progress: Mutex::default(),
            former: Mutex::default(),
        })
    }

    /// The connection started.
    pub fn started(&self, fabric: Arc<dyn Fabric>) {
        *self.fabric.lock().unwrap_or_else(PoisonError::into_inner) = Some(fabric);
        self.fabric_came.notify_all();
    }

    /// Waits until it is known which EM this is or the connection is down, at most for `timeout`;
    /// then closes the connection of a stranger.
    pub fn turn_away_strangers(&self, timeout: Duration) {
        let (mut slot, _) = self
            .fabric_came
            .wait_timeout_while(
                self.fabric.lock().unwrap_or_else(PoisonError::into_inner),
                timeout,
                |_| self.binding.get().is_none() && !self.down.load(Ordering::Acquire),
            )
            .unwrap_or_else(PoisonError::into_inner);
        let stranger = slot.take();
        drop(slot);
        if let Some(fabric) = stranger {
            fabric.close();
        }
    }

    /// Says which EM this is; `false` if that was said before.
    pub fn bind(&self, binding: Binding) -> bool {
        let first = self.binding.set(binding).is_ok();
        self.wake_waiters();
        first
    }

    /// From now on nothing that still comes from the connection counts.
    pub fn set_down(&self) {
        self.down.store(true, Ordering::Release);
        self.wake_waiters();
    }

    /// How long its data path did not come round although it had something to do.
    pub fn stuck_for(&self) -> Duration {
        self.progress().stuck_for()
    }

    /// What a function presented under a former OM, if the EM said so.
    pub fn former(&self, function: u32) -> Option<Vec<u8>> {
        let mut former = self.former.lock().unwrap_or_else(PoisonError::into_inner);
        former.remove(&function)
    }

    /// Tells the EM what a function presents now, if it does not see for itself.
    fn show(&self, function: &Function) {
        if let Some(fabric) = self.bound().and_then(|binding| binding.fabric.upgrade()) {
            function.show(&*fabric);
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_waiters(&self) {
        // With the lock held nobody is between looking and waiting.
        let _slot = self.fabric.lock().unwrap_or_else(PoisonError::into_inner);
        self.fabric_came.notify_all();
    }

    fn bound(&self) -> Option<&Binding> {
        self.binding
            .get()
            .filter(|_| !self.down.load(Ordering::Acquire))
    }

    fn function(&self, id: u32) -> Option<&Arc<Function>> {
        self.bound()?.functions.iter().find(|f| f.id() == id)
    }

    fn hello(self: &Arc<Self>, hello: Hello) -> Result<(), String> {
        // The connection can be heard before whoever started it has it in hand.
        let (mut slot, _) = self
            .fabric_came
            .wait_timeout_while(
                self.fabric.lock().unwrap_or_else(PoisonError::into_inner),
                HELLO_ANSWER,
                |fabric| fabric.is_none() && self.binding.get().is_none(),
            )
            .unwrap_or_else(PoisonError::into_inner);
        let fabric = slot
            .take()
            .ok_or("this connection has introduced itself before")?;
        drop(slot);
        let stopping = |_| "the OM is stopping".to_owned();
        let (answer, answered) = sync_channel(1);
        self.conductor
            .send(Message::Introduction(Box::new(Introduction {
                hello,
                info: self.info,
                fabric,
                peer: self.clone(),
                answer,
            })))
            .map_err(|_| "the OM is stopping".to_owned())?;
        answered.recv_timeout(HELLO_ANSWER).map_err(stopping)?
    }

    /// Asks the OM's thread, which gets `message` of EM, connection and where the answer goes.
    fn ask(&self, message: impl FnOnce(usize, u64, SyncSender<Reply>) -> Message) -> Reply {
        let Some(binding) = self.bound() else {
            return Reply::Failed("this connection is not that of an EM".to_owned());
        };
        let (answer, answered) = sync_channel(1);
        let message = message(binding.em, binding.epoch, answer);
        let sent = self.conductor.send(message).ok();
        sent.and_then(|()| answered.recv_timeout(REQUEST_ANSWER).ok())
            .unwrap_or_else(|| Reply::Failed("the OM is stopping or busy".to_owned()))
    }
}

/// The [`Handler`] around a [`Peer`].
pub struct PeerHandler(pub Arc<Peer>);

impl Handler for PeerHandler {
    fn request(&self, request: Request, fds: Vec<OwnedFd>) -> Reply {
        match request {
            Request::Rdma(request) => self.0.ask(|em, epoch, answer| Message::Rdma {
                em,
                epoch,
                request,
                fds,
                answer,
            }),
            Request::ReturnFunction { .. } | Request::ReturnLink(_) | Request::Returned => {
                self.0.ask(|em, epoch, answer| Message::Return {
                    em,
                    epoch,
                    request,
                    fds,
                    answer,
                })
            }
            Request::Hello(hello) => match self.0.hello(hello) {
                Ok(()) => Reply::Ok,
                Err(reason) => Reply::Failed(reason),
            },
            _ => Reply::Failed("the OM takes no such request".to_owned()),
        }
    }

    fn event(&self, event: Event) {
        match event {
            Event::Function { function, state } => {
                if let Some(function) = self.0.function(function) {
                    log::info!(
                        "{} is {}",
                        function.config.name,
                        Life::Served(state).as_str()
                    );
                    function.set_life(Life::Served(state));
                }
            }
            Event::Heartbeat {
                progress, backlog, ..
            } => self.0.progress().heard(progress, backlog, Instant::now()),
            Event::ConfigChanged { .. } => {}
        }
    }

    fn register_read(&self, address: u32) -> u32 {
        let address = ControlAddress::from_bits(address);
        match self.0.function(address.function) {
            Some(function) => function.control.read(address.region, address.offset),
            None => ALL_ONES,
        }
    }

    fn register_write(&self, address: u32, byte_enable: u8, value: u32) -> u32 {
        let address = ControlAddress::from_bits(address);
        let Some(function) = self.0.function(address.function) else {
            return 0;
        };
        if address.region == ControlAddress::RESET_REGION {
            let state = function.control.reset();
            function.follow();
            self.0.show(function);
            return state;
        }
        let state = function
            .control
            .write(address.region, address.offset, byte_enable, value);
        function.follow();
        // Before the completion, so that the guest reads what it wrote.
        self.0.show(function);
        state
    }

    fn image(&self, image: Image) {
        // Only of its own functions, so that it cannot have the OM keep more.
        if self.0.function(image.function).is_some() {
            let former = self.0.former.lock();
            let mut former = former.unwrap_or_else(PoisonError::into_inner);
            former.insert(image.function, image.bytes);
        }
    }

    fn down(&self, reason: &FabricError) {
        // A stranger's connection is dropped, and with it the cycle of connection and handler, by
        // `turn_away_strangers`.
        self.0.set_down();
        if let Some(binding) = self.0.binding.get() {
            let _ = self.0.conductor.send(Message::Down {
                em: binding.em,
                epoch: binding.epoch,
                reason: reason.to_string(),
            });
        }
    }
}
