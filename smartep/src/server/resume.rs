//! Takes the place of a process that was killed while it served a client.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use log::{debug, info, warn};
use rustix::io::Errno;
use thiserror::Error;

use super::{End, ServeError, Server, Session, StopFd, read};
use crate::conn::{Receiver, Sender};
use crate::dma::MessageDma;
use crate::keep::{Keep, Kept};
use crate::proto::{Capabilities, DmaMap, DmaUnmap, Header, command};
use crate::state::{Pending, State};
use crate::window::ConfigWindow;

/// What was kept of a function beside its [`State`].
#[derive(Debug)]
pub struct Resume {
    /// The client's connection.
    pub stream: UnixStream,
    /// Files of its memory by number.
    pub files: HashMap<u32, OwnedFd>,
    /// Eventfds by vector.
    pub vectors: Vec<(u16, OwnedFd)>,
}

/// Why a client cannot be taken over.
#[derive(Debug, Error)]
pub(super) enum ResumeError {
    #[error("its memory cannot be mapped again: {0}")]
    Memory(Errno),
    #[error("an eventfd is of no use: {0}")]
    Vector(std::io::Error),
    #[error("its connection is of no use: {0}")]
    Connection(std::io::Error),
}

/// Where a server notes what the next one needs.
#[derive(Clone)]
pub(super) struct Notes {
    pub(super) state: Arc<State>,
    pub(super) keep: Arc<dyn Keep>,
}

impl Notes {
    pub(super) fn keep(&self, what: Kept, fd: impl AsFd) {
        if !self.keep.keep(what, fd.as_fd()) {
            self.state.set_broken();
        }
    }

    pub(super) fn forget(&self, what: Kept) {
        if !self.keep.forget(what) {
            self.state.set_broken();
        }
    }
}

impl Server {
    /// Notes everything in `state` and with `keep`, for a process that takes the place of this one. Whoever calls
    /// this has the memory of `state` kept as [`Kept::State`].
    pub fn kept(mut self, state: Arc<State>, keep: Arc<dyn Keep>) -> Self {
        self.dma.record(state.clone(), keep.clone());
        self.notes = Some(Notes { state, keep });
        self
    }

    /// As [`Self::run`], but first serves a client that another process served before. [`Self::kept`] gave the
    /// state that process noted things in.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn resume(
        &mut self,
        resume: Resume,
        listener: &UnixListener,
        stop: &StopFd,
    ) -> Result<(), ServeError> {
        listener.set_nonblocking(true).map_err(ServeError::Listen)?;
        match self.serve_resumed(resume, listener, stop) {
            Ok(End::Stopped) => return Ok(()),
            Ok(End::Disconnected) => info!("the client disconnected"),
            Err(e) => warn!("the client is cut off: {e}"),
        }
        self.run(listener, stop)
    }

    fn serve_resumed(
        &mut self,
        resume: Resume,
        listener: &UnixListener,
        stop: &StopFd,
    ) -> Result<End, ServeError> {
        let Some(notes) = self.notes.clone() else {
            return Err(ServeError::Protocol("nothing was noted of it".into()));
        };
        let pending = notes.state.pending();
        let unagreed = pending.is_some_and(|p| p.command == command::VERSION && !p.replied);
        let agreed = notes.state.agreed().filter(|_| !unagreed);
        let (stream, mut session) = match self.rebuild(resume, &notes.state, agreed) {
            Ok(built) => built,
            Err(e) => {
                self.take_leave(None);
                return Err(ServeError::Resume(e.to_string()));
            }
        };
        info!("a client is taken over, {} maps", self.dma.len());
        let mut receiver = Receiver::new(&stream, stop, Some(listener));
        // A request that was not taken is there already. One that comes later is another, whatever its id.
        if receiver.is_empty() {
            notes.state.end();
        } else {
            session.pending = pending;
        }
        let result = self.read_all(&mut receiver, &mut session);
        self.take_leave(Some(&session));
        result
    }

    fn rebuild(
        &mut self,
        resume: Resume,
        state: &State,
        agreed: Option<Capabilities>,
    ) -> Result<(UnixStream, Session), ResumeError> {
        let new = self
            .dma
            .resume(&state.maps(), resume.files)
            .map_err(ResumeError::Memory)?;
        for (vector, fd) in resume.vectors {
            let set = self.irqs.set(vector, Some(fd));
            set.map_err(ResumeError::Vector)?;
        }
        let registers = state.window();
        self.window
            .iter_mut()
            .for_each(|window: &mut ConfigWindow| window.set_registers(registers));
        let own = resume.stream.try_clone().map_err(ResumeError::Connection)?;
        let sender = Arc::new(Sender::new(own));
        let messages = match agreed.filter(|a| a.message_dma) {
            Some(agreed) => MessageDma::resumed(sender.clone(), agreed.max_data_xfer),
            None => MessageDma::unusable(sender.clone()),
        };
        self.state = self.control.state();
        if let Some(agreed) = agreed {
            self.dma.limit(agreed.max_dma_maps);
            for file in &new {
                self.data.memory_added(&file.mapping, file.fd.as_fd());
            }
            self.data.resumed(messages.clone(), self.state);
        } else {
            self.reset();
        }
        let session = Session {
            sender,
            messages,
            negotiated: agreed,
            notes: self.notes.clone(),
            pending: None,
            resumed: true,
        };
        Ok((resume.stream, session))
    }

    /// What is to be done with the request at the socket's head, when a former process may have dealt with it:
    /// `true` if nothing but taking it out.
    pub(super) fn is_done(&mut self, pending: Pending, header: &Header, body: &[u8]) -> bool {
        if pending.id != header.id || pending.command != header.command {
            return false;
        }
        debug!(
            "request {} (command {}) was {}",
            header.id,
            header.command,
            if pending.replied {
                "replied to"
            } else {
                "begun"
            }
        );
        if !pending.replied && header.command == command::DMA_MAP {
            // The range may be mapped; then it would overlap with itself.
            if let Ok(map) = read::<DmaMap>(body) {
                let mut unmap = DmaUnmap::default();
                (unmap.address, unmap.size) = (map.address, map.size);
                if self.dma.has(map.address, map.size) {
                    let gone = self.dma.unmap(&unmap).unwrap_or_default();
                    self.data.memory_removed(&gone);
                }
            }
        }
        pending.replied
    }
}
