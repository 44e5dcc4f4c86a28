//! Serves one function to one vfio-user client at a time.
//!
//! One thread reads the socket and answers from state alone; whatever takes longer belongs to the data side's
//! threads. Nothing here waits for the client.

mod access;
mod describe;
mod interrupts;
mod resume;

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use dot_iommu::DotTable;
use log::{debug, info, warn};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::config::ConfigState;
pub use crate::conn::StopFd;
use crate::conn::{ConnError, Incoming, Receiver, Sender};
use crate::dma::{DmaSpace, MessageDma};
use crate::fault;
use crate::function::FunctionInfo;
use crate::irq::Irqs;
use crate::keep::Kept;
use crate::proto::{
    Capabilities, DmaMap, DmaUnmap, HEADER_SIZE, Header, VersionError, answer_version, command,
};
use crate::state::Pending;
use crate::window::ConfigWindow;
use crate::{ControlSide, DataSide};
use resume::Notes;
pub use resume::Resume;

/// Pause after a client could not be accepted, so that a lack of descriptors is no busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How serving one client ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The client closed its connection.
    Disconnected,
    /// [`StopFd::stop`] was called.
    Stopped,
}

/// Why a client was cut off, or serving ended.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The socket or its framing failed.
    #[error(transparent)]
    Conn(#[from] ConnError),
    /// The listening socket failed.
    #[error("the listening socket failed: {0}")]
    Listen(#[source] std::io::Error),
    /// The client does not follow the protocol.
    #[error("the client broke the protocol: {0}")]
    Protocol(String),
    /// Versions do not fit.
    #[error("no common version: {0}")]
    Version(#[from] VersionError),
    /// A client of a former process cannot be taken over.
    #[error("it cannot be taken over: {0}")]
    Resume(String),
}

/// A function with its two sides, ready for clients.
pub struct Server {
    info: FunctionInfo,
    irqs: Arc<Irqs>,
    control: Box<dyn ControlSide>,
    data: Arc<dyn DataSide>,
    dma: DmaSpace,
    state: ConfigState,
    window: Option<ConfigWindow>,
    notes: Option<Notes>,
    /// Accesses outside every region, since the start.
    strays: u64,
}

/// Between two attempts at what the control side could not do at once.
const RETRY: Duration = Duration::from_millis(5);

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

/// What belongs to one connection.
struct Session {
    sender: Arc<Sender>,
    messages: Arc<MessageDma>,
    negotiated: Option<Capabilities>,
    notes: Option<Notes>,
    /// A request that a former process may have dealt with.
    pending: Option<Pending>,
    /// Whether a former process served the client.
    resumed: bool,
}

impl Server {
    /// Joins the parts of a function. `table` receives the client's memory, `irqs` its eventfds.
    pub fn new(
        info: FunctionInfo,
        table: Arc<DotTable>,
        irqs: Arc<Irqs>,
        control: Box<dyn ControlSide>,
        data: Arc<dyn DataSide>,
    ) -> Self {
        let state = control.state();
        Self {
            window: info.window().cloned(),
            info,
            irqs,
            control,
            data,
            dma: DmaSpace::new(table),
            state,
            notes: None,
            strays: 0,
        }
    }

    /// Accepts and serves clients, one after the other, until stopped. A client's fault ends its connection
    /// only.
    pub fn run(&mut self, listener: &UnixListener, stop: &StopFd) -> Result<(), ServeError> {
        listener.set_nonblocking(true).map_err(ServeError::Listen)?;
        loop {
            let mut fds = [
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(stop, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(ServeError::Listen(e.into())),
            }
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            match listener.accept() {
                Ok((stream, _)) => match self.serve_one(stream, Some(listener), stop) {
                    Ok(End::Stopped) => return Ok(()),
                    Ok(End::Disconnected) => info!("the client disconnected"),
                    Err(e) => warn!("the client is cut off: {e}"),
                },
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) if passes(&e) => {
                    warn!("a client is not accepted: {e}");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
                Err(e) => return Err(ServeError::Listen(e)),
            }
        }
    }

    /// Serves one client on a connected socket until it leaves, breaks the protocol, or `stop`. Maps and
    /// eventfds are gone afterwards.
    pub fn serve(&mut self, stream: UnixStream, stop: &StopFd) -> Result<End, ServeError> {
        self.serve_one(stream, None, stop)
    }

    fn serve_one(
        &mut self,
        stream: UnixStream,
        listener: Option<&UnixListener>,
        stop: &StopFd,
    ) -> Result<End, ServeError> {
        let sender = Arc::new(Sender::new(stream.try_clone().map_err(|e| {
            ConnError::System(Errno::from_io_error(&e).unwrap_or(Errno::IO))
        })?));
        let messages = MessageDma::unusable(sender.clone());
        let mut session = Session {
            sender,
            messages,
            negotiated: None,
            notes: self.notes.clone(),
            pending: None,
            resumed: false,
        };
        // A new client finds a function after power-on, whatever the one before did.
        self.reset();
        if let Some(notes) = &self.notes {
            notes.keep(Kept::Connection, &stream);
        }
        fault::point("accepted");
        let mut receiver = Receiver::new(&stream, stop, listener);
        let result = self.read_all(&mut receiver, &mut session);
        self.take_leave(Some(&session));
        result
    }

    /// The client is gone or is to go.
    fn take_leave(&mut self, session: Option<&Session>) {
        // What waits for the client fails first, so that the data side does not wait for it. Then: stop DMA, drop
        // the interrupts and maps, present the function as after power-on.
        if let Some(session) = session {
            session.messages.close();
            if session.negotiated.is_some() {
                self.data.disconnected();
            }
        }
        self.irqs.clear();
        self.dma.clear();
        self.reset_control();
        if let Some(notes) = &self.notes {
            // Forgetting the connection comes first: without it nobody looks at the rest.
            notes.forget(Kept::Connection);
            let vectors = (0..self.irqs.count()).map(Kept::Vector);
            vectors.for_each(|vector| notes.forget(vector));
            for (_, map) in notes.state.maps() {
                map.file
                    .into_iter()
                    .for_each(|n| notes.forget(Kept::File(n)));
            }
            notes.state.clear();
        }
        // Last, so that a client that is cut off learns of it when nothing touches its memory any more.
        if let Some(session) = session {
            session.sender.close();
        }
    }

    fn read_all(
        &mut self,
        receiver: &mut Receiver<'_>,
        session: &mut Session,
    ) -> Result<End, ServeError> {
        let mut buffer = Vec::new();
        loop {
            let waits = self.control.waits();
            if waits {
                let state = self.control.retry();
                self.control_changed(state);
            }
            let (header, fds) = match receiver.next(&mut buffer, waits.then_some(RETRY))? {
                Incoming::Nothing => continue,
                Incoming::Closed => return Ok(End::Disconnected),
                Incoming::Stopped => return Ok(End::Stopped),
                Incoming::Message(header, fds) => (header, fds),
            };
            let body = buffer.get(HEADER_SIZE..header.size as usize);
            let body = body.unwrap_or_default();
            fault::point("shown");
            if header.is_command() {
                self.take_command(receiver, session, &header, body, fds)?;
            } else if header.is_reply() {
                // A former process may have asked.
                if !session.messages.reply(&header, body) && !session.resumed {
                    return Err(ServeError::Protocol(format!(
                        "a reply with id {} that nothing asked for",
                        header.id
                    )));
                }
                receiver.done()?;
            } else {
                return Err(ServeError::Protocol(format!(
                    "message type {} is unknown",
                    header.flags & 15
                )));
            }
            // A single huge message must not keep its memory for the connection's life.
            if buffer.len() > 64 << 10 {
                buffer = Vec::new();
            }
        }
    }

    /// Executes a command and takes it out of the socket; see [`crate::state`] for the order.
    fn take_command(
        &mut self,
        receiver: &mut Receiver<'_>,
        session: &mut Session,
        header: &Header,
        body: &[u8],
        fds: Vec<std::os::fd::OwnedFd>,
    ) -> Result<(), ServeError> {
        let former = session.pending.take();
        let done = former.is_some_and(|pending| self.is_done(pending, header, body));
        let noted = self.notes.clone().filter(|_| header.wants_reply());
        if !done {
            if let Some(notes) = &noted {
                notes.state.begin(header.id, header.command);
            }
            fault::point("begun");
            self.command(session, header, body, fds)?;
            fault::point("executed");
        }
        receiver.done()?;
        fault::point("taken");
        if let Some(notes) = &noted {
            notes.state.end();
        }
        Ok(())
    }

    fn command(
        &mut self,
        session: &mut Session,
        header: &Header,
        body: &[u8],
        fds: Vec<std::os::fd::OwnedFd>,
    ) -> Result<(), ServeError> {
        let Some(agreed) = session.negotiated else {
            return self.version(session, header, body);
        };
        match header.command {
            command::VERSION => session.fail(header, Errno::INVAL, &[]),
            command::DMA_MAP => {
                let result = read::<DmaMap>(body).and_then(|map| self.dma.map(&map, fds));
                match &result {
                    Ok(Some(new)) => self.data.memory_added(&new.mapping, new.fd.as_fd()),
                    Ok(None) => {}
                    Err(e) => debug!("a DMA map is refused: {e}"),
                }
                session.answer(header, result.map(|_| ()), &[])
            }
            command::DMA_UNMAP => self.unmap(session, header, body),
            command::DEVICE_GET_INFO => describe::device(session, header, body),
            command::DEVICE_GET_REGION_INFO => describe::region(&self.info, session, header, body),
            command::DEVICE_GET_IRQ_INFO => describe::irq(&self.info, session, header, body),
            command::DEVICE_SET_IRQS => {
                let notes = self.notes.as_ref();
                let result = interrupts::set(&self.irqs, notes, body, fds, agreed.max_fds);
                session.answer(header, result, &[])
            }
            command::REGION_READ => self.region_read(session, header, body, agreed.max_data_xfer),
            command::REGION_WRITE => self.region_write(session, header, body, agreed.max_data_xfer),
            command::REGION_WRITE_MULTI => self.write_multi(session, header, body),
            command::DEVICE_RESET => {
                self.reset();
                session.answer(header, Ok(()), &[])
            }
            unknown => {
                debug!("command {unknown} is not supported");
                session.fail(header, Errno::NOTSUP, &[])
            }
        }
    }

    fn version(
        &mut self,
        session: &mut Session,
        header: &Header,
        body: &[u8],
    ) -> Result<(), ServeError> {
        if header.command != command::VERSION {
            return Err(ServeError::Protocol(format!(
                "command {} before the version was negotiated",
                header.command
            )));
        }
        match answer_version(body) {
            Ok((agreed, reply)) => {
                session.messages = if agreed.message_dma {
                    MessageDma::new(session.sender.clone(), agreed.max_data_xfer)
                } else {
                    MessageDma::unusable(session.sender.clone())
                };
                self.data.connected(session.messages.clone());
                self.dma.limit(agreed.max_dma_maps);
                if let Some(notes) = &self.notes {
                    notes.state.set_agreed(&agreed);
                }
                session.negotiated = Some(agreed);
                session.answer(header, Ok(()), &[&reply])
            }
            Err(e) => {
                session.fail(header, Errno::INVAL, &[])?;
                Err(e.into())
            }
        }
    }

    fn unmap(&mut self, session: &Session, header: &Header, body: &[u8]) -> Result<(), ServeError> {
        let parsed = read::<DmaUnmap>(body);
        let result = parsed.and_then(|unmap| self.dma.unmap(&unmap));
        let result = result.map(|gone| self.data.memory_removed(&gone));
        // The whole structure comes back even with an error: Cloud Hypervisor waits for 40 bytes.
        let echo = parsed.unwrap_or_default();
        session.answer_with(header, result, echo.as_bytes())
    }

    /// FLR, DEVICE_RESET and a new client.
    fn reset(&mut self) {
        self.data.reset();
        self.reset_control();
    }

    fn reset_control(&mut self) {
        let state = self.control.reset();
        self.window.iter_mut().for_each(ConfigWindow::reset);
        self.note_window();
        self.set_state(state);
    }

    /// Saves the window's registers.
    fn note_window(&self) {
        if let (Some(notes), Some(window)) = (&self.notes, &self.window) {
            notes.state.set_window(window.registers());
        }
    }

    /// What a write of the control side has to tell.
    fn control_changed(&mut self, new: ConfigState) {
        if new.flr {
            debug!("function-level reset");
            self.reset();
        } else {
            self.set_state(new);
        }
    }

    fn set_state(&mut self, new: ConfigState) {
        if new != self.state {
            self.data.config_changed(self.state, new);
            self.state = new;
        }
    }
}

impl Session {
    /// A reply with a body, or an errno alone.
    fn answer(
        &self,
        to: &Header,
        result: Result<(), Errno>,
        parts: &[&[u8]],
    ) -> Result<(), ServeError> {
        match result {
            Ok(()) => self.send(to, 0, parts, &[]),
            Err(e) => self.fail(to, e, &[]),
        }
    }

    /// A reply whose body is there in either case.
    fn answer_with(
        &self,
        to: &Header,
        result: Result<(), Errno>,
        body: &[u8],
    ) -> Result<(), ServeError> {
        match result {
            Ok(()) => self.send(to, 0, &[body], &[]),
            Err(e) => self.fail(to, e, body),
        }
    }

    fn fail(&self, to: &Header, errno: Errno, body: &[u8]) -> Result<(), ServeError> {
        self.send(to, errno.raw_os_error() as u32, &[body], &[])
    }

    fn send(
        &self,
        to: &Header,
        error: u32,
        parts: &[&[u8]],
        fds: &[std::os::fd::BorrowedFd<'_>],
    ) -> Result<(), ServeError> {
        if !to.wants_reply() {
            return Ok(());
        }
        let flags = Header::REPLY | if error == 0 { 0 } else { Header::ERROR };
        let header = Header {
            id: to.id,
            command: to.command,
            size: 0,
            flags,
            error,
        };
        let state = self.notes.as_ref().map(|notes| &*notes.state);
        Ok(self.sender.send_noted(header, parts, fds, state)?)
    }
}

/// Whether accepting may work again later (accept(2)): the client gave up, or the system is short of something.
fn passes(error: &std::io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    [
        Errno::CONNABORTED,
        Errno::INTR,
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOBUFS,
        Errno::NOMEM,
    ]
    .iter()
    .any(|e| errno == Some(*e))
}

/// The fixed part of a body; EINVAL when it is not all there.
fn read<T: FromBytes>(body: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(body)
        .map(|(value, _)| value)
        .map_err(|_| Errno::INVAL)
}
