//! An EM that is connected: a thread of its own tells it what the OM decided, so that an EM that does
//! not answer holds up nobody else.

use crate::conductor::Message;
use crate::peer::Peer;
use m2m_fabric::Fabric;
use m2m_fabric::proto::{Event, Reply, Request};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// How long an EM may take for an order.
const ORDER: Duration = Duration::from_secs(3);

/// What an answer is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A function was to be served.
    Function(u32),
    /// A wire was to be joined.
    AddLink(u32),
    /// A function was told that its wires are there.
    Wired,
    /// A function that was returned was adopted.
    Adopt(u32),
    /// A wire was to be left.
    RemoveLink(u32),
    /// The EM was told something about RDMA.
    Rdma,
    /// The EM was to end.
    Shutdown,
}

/// Something to ask of the EM.
struct Task {
    subject: Subject,
    request: Request,
    fds: Vec<OwnedFd>,
}

/// The OM's handle on a connected EM.
pub struct Session {
    /// See [`crate::peer::Binding::epoch`].
    pub epoch: u64,
    /// When it came.
    pub since: Instant,
    /// Process id, as the system says.
    pub pid: u32,
    /// Where it is, when it is on another host.
    pub address: Option<SocketAddr>,
    fabric: Arc<dyn Fabric>,
    peer: Arc<Peer>,
    tasks: Sender<Task>,
}

impl Session {
    /// Starts the thread that talks to the EM.
    ///
    /// # Errors
    /// What the system said when there is no room for a thread.
    pub fn start(
        em: usize,
        name: &str,
        epoch: u64,
        fabric: Arc<dyn Fabric>,
        peer: Arc<Peer>,
        conductor: Sender<Message>,
    ) -> std::io::Result<Self> {
        let (tasks, queue) = channel::<Task>();
        let calls = fabric.clone();
        std::thread::Builder::new()
            .name(format!("orders-{name}"))
            .spawn(move || {
                for task in queue {
                    let fds: Vec<_> = task.fds.iter().map(AsFd::as_fd).collect();
                    let result = match calls.call(task.request, &fds, ORDER) {
                        Ok(Reply::Ok) => Ok(()),
                        Ok(Reply::Failed(reason)) => Err(reason),
                        Ok(Reply::Stats(_) | Reply::Path(_)) => {
                            Err("it answered something else".to_owned())
                        }
                        Err(e) => Err(e.to_string()),
                    };
                    let answer = Message::Answer {
                        em,
                        epoch,
                        subject: task.subject,
                        result,
                    };
                    if conductor.send(answer).is_err() {
                        break;
                    }
                }
            })?;
        Ok(Self {
            epoch,
            since: Instant::now(),
            pid: fabric.peer().pid,
            address: fabric.peer().address,
            fabric,
            peer,
            tasks,
        })
    }

    /// Queues an order; its answer comes as [`Message::Answer`].
    pub fn order(&self, subject: Subject, request: Request, fds: Vec<OwnedFd>) {
        let task = Task {
            subject,
            request,
            fds,
        };
        // The thread lives as long as this handle; without the OM's thread nobody wants an answer.
        let _ = self.tasks.send(task);
    }

    /// Sends an event; `false` when it has to be sent again later.
    pub fn notify(&self, event: Event) -> bool {
        !matches!(
            self.fabric.notify(event),
            Err(m2m_fabric::FabricError::Full)
        )
    }

    /// How long nothing came from the EM.
    pub fn silent_for(&self) -> Duration {
        self.fabric.last_heard().elapsed()
    }

    /// How long its data path did not come round although it had something to do.
    pub fn stuck_for(&self) -> Duration {
        self.peer.stuck_for()
    }

    /// Whether descriptors can go along with orders.
    pub fn takes_fds(&self) -> bool {
        self.fabric.carries_fds()
    }

    /// What a function presented under a former OM, if an EM of another host said so.
    pub fn former(&self, function: u32) -> Option<Vec<u8>> {
        self.peer.former(function)
    }

    /// The connection, for questions from other threads.
    pub fn fabric(&self) -> Arc<dyn Fabric> {
        self.fabric.clone()
    }
}

impl Drop for Session {
    /// Closes the connection without waiting for it: what still runs in the connection's handler may
    /// be waiting for the OM's thread.
    fn drop(&mut self) {
        self.peer.set_down();
        let fabric = self.fabric.clone();
        let closer = std::thread::Builder::new()
            .name("close-m2m".to_owned())
            .spawn(move || fabric.close());
        if let Err(e) = closer {
            log::warn!("a connection closes late: {e}");
        }
    }
}
