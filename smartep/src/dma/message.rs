//! DMA by messages to the client, for ranges that came without a descriptor.
//!
//! Requests are asynchronous: nobody waits, because the client may be unable to answer while it waits for an
//! access of its own. A request is cut into pieces of at most 64 KiB (QEMU corrupts its stream somewhere
//! above 208 KiB); the next piece goes out when the one before was answered. Requests do not wait for each other:
//! who needs an order submits the second when the first is done.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::conn::Sender;
use crate::proto::{DmaAccess, Header, command};

/// Largest piece, bytes.
const PIECE: usize = 64 << 10;
/// Requests that are on their way at once.
const IN_FLIGHT: usize = 16;
/// Bytes of writes that are on their way at once: no more than a socket's buffer holds, so that the thread that
/// reads the client's answers does not have to wait for it to read.
const WRITE_BYTES: usize = 128 << 10;
/// Requests that may wait.
const WAITING: usize = 1024;

/// Why a message DMA failed.
#[derive(Debug, Clone, Copy, Error, PartialEq, Eq)]
pub enum DmaError {
    /// The client refused, for instance because nothing is mapped there.
    #[error("the client refused the transfer: {0}")]
    Refused(Errno),
    /// The client's answer does not fit the request.
    #[error("the client's answer does not fit the request")]
    Answer,
    /// Too many requests wait.
    #[error("{WAITING} transfers wait already")]
    Full,
    /// The client is gone.
    #[error("the client is gone")]
    Gone,
    /// The client does not serve DMA messages.
    #[error("the client takes no DMA messages")]
    Unsupported,
}

/// Called once with the bytes read (empty for a write), by the thread that reads the client's socket or, when the
/// request fails at once, by the caller: it must not wait.
pub type Done = Box<dyn FnOnce(Result<Vec<u8>, DmaError>) + Send>;

/// Transfers through the client of one connection.
pub struct MessageDma {
    sender: Arc<Sender>,
    piece: usize,
    usable: bool,
    state: Mutex<State>,
}

impl std::fmt::Debug for MessageDma {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        write!(
            f,
            "MessageDma({} in flight, {} waiting)",
            state.flying.len(),
            state.waiting.len()
        )
    }
}

#[derive(Default)]
struct State {
    next_id: u16,
    gone: bool,
    flying: HashMap<u16, Job>,
    waiting: VecDeque<Job>,
}

struct Job {
    write: bool,
    address: u64,
    /// All bytes to write, or those read so far.
    data: Vec<u8>,
    done_bytes: usize,
    len: usize,
    done: Done,
}

impl State {
    /// Bytes of writes that the client has not answered.
    fn write_bytes(&self, most: usize) -> usize {
        let writes = self.flying.values().filter(|job| job.write);
        writes.map(|job| job.piece(most)).sum()
    }
}

impl Job {
    fn piece(&self, most: usize) -> usize {
        (self.len - self.done_bytes).min(most)
    }
}

impl MessageDma {
    pub(crate) fn new(sender: Arc<Sender>, max_data_xfer: usize) -> Arc<Self> {
        Arc::new(Self {
            sender,
            piece: PIECE.min(max_data_xfer).max(1),
            usable: true,
            state: Mutex::new(State::default()),
        })
    }

    /// The same for a client whose answers to another process's requests may still come: ids begin elsewhere.
    pub(crate) fn resumed(sender: Arc<Sender>, max_data_xfer: usize) -> Arc<Self> {
        let dma = Self::new(sender, max_data_xfer);
        dma.state().next_id = (std::process::id() as u16).wrapping_mul(2 * IN_FLIGHT as u16);
        dma
    }

    /// For a client that does not serve DMA messages: every request fails.
    pub(crate) fn unusable(sender: Arc<Sender>) -> Arc<Self> {
        Arc::new(Self {
            sender,
            piece: PIECE,
            usable: false,
            state: Mutex::new(State::default()),
        })
    }

    /// Whether the client serves DMA messages; without, memory that it maps without a descriptor is out of reach.
    pub fn is_usable(&self) -> bool {
        self.usable
    }

    /// Reads `len` bytes of guest memory.
    pub fn submit_read(&self, address: u64, len: usize, done: Done) {
        let data = Vec::with_capacity(len.min(1 << 20));
        self.submit(Job {
            write: false,
            address,
            data,
            done_bytes: 0,
            len,
            done,
        });
    }

    /// Writes guest memory.
    pub fn submit_write(&self, address: u64, data: Vec<u8>, done: Done) {
        let len = data.len();
        self.submit(Job {
            write: true,
            address,
            data,
            done_bytes: 0,
            len,
            done,
        });
    }

    fn submit(&self, job: Job) {
        let refused = {
            let mut state = self.state();
            if job.len == 0 || job.address.checked_add(job.len as u64 - 1).is_none() {
                Some((job, DmaError::Refused(Errno::INVAL)))
            } else if !self.usable {
                Some((job, DmaError::Unsupported))
            } else if state.gone {
                Some((job, DmaError::Gone))
            } else if state.waiting.len() >= WAITING {
                Some((job, DmaError::Full))
            } else {
                state.waiting.push_back(job);
                None
            }
        };
        if let Some((job, error)) = refused {
            return (job.done)(Err(error));
        }
        self.send_more();
    }

    /// Sends what waits, up to the limit in flight.
    fn send_more(&self) {
        loop {
            let (id, message) = {
                let mut state = self.state();
                if state.flying.len() >= IN_FLIGHT {
                    return;
                }
                let Some(job) = state.waiting.pop_front() else {
                    return;
                };
                if job.write && state.write_bytes(self.piece) + job.piece(self.piece) > WRITE_BYTES
                {
                    state.waiting.push_front(job);
                    return;
                }
                while state.flying.contains_key(&state.next_id) {
                    state.next_id = state.next_id.wrapping_add(1);
                }
                let id = state.next_id;
                state.next_id = id.wrapping_add(1);
                let message = self.message(id, &job);
                state.flying.insert(id, job);
                (id, message)
            };
            let (header, access, data) = message;
            if self
                .sender
                .send(header, &[access.as_bytes(), &data], &[])
                .is_err()
            {
                let failed = self.state().flying.remove(&id);
                if let Some(job) = failed {
                    (job.done)(Err(DmaError::Gone));
                }
            }
        }
    }

    fn message(&self, id: u16, job: &Job) -> (Header, DmaAccess, Vec<u8>) {
        let (from, count) = (job.done_bytes, job.piece(self.piece));
        let command = if job.write {
            command::DMA_WRITE
        } else {
            command::DMA_READ
        };
        let data = if job.write {
            job.data
                .get(from..from + count)
                .unwrap_or_default()
                .to_vec()
        } else {
            Vec::new()
        };
        let header = Header {
            id,
            command,
            size: 0,
            flags: 0,
            error: 0,
        };
        (
            header,
            DmaAccess {
                address: job.address + from as u64,
                count: count as u64,
            },
            data,
        )
    }

    /// Takes a reply of the client; false when nothing was asked with its id.
    pub(crate) fn reply(&self, header: &Header, body: &[u8]) -> bool {
        let Some(mut job) = self.state().flying.remove(&header.id) else {
            return false;
        };
        let count = job.piece(self.piece);
        let result = if header.flags & Header::ERROR != 0 {
            Err(DmaError::Refused(Errno::from_raw_os_error(
                header.error.clamp(1, 4095) as i32,
            )))
        } else {
            Self::take(&mut job, header, body, count)
        };
        match result {
            Err(error) => (job.done)(Err(error)),
            Ok(()) if job.done_bytes < job.len => self.state().waiting.push_front(job),
            Ok(()) if job.write => (job.done)(Ok(Vec::new())),
            Ok(()) => (job.done)(Ok(job.data)),
        }
        self.send_more();
        true
    }

    fn take(job: &mut Job, header: &Header, body: &[u8], count: usize) -> Result<(), DmaError> {
        let expected = if job.write {
            command::DMA_WRITE
        } else {
            command::DMA_READ
        };
        let (access, data) = DmaAccess::read_from_prefix(body).map_err(|_| DmaError::Answer)?;
        if header.command != expected || access.count != count as u64 {
            return Err(DmaError::Answer);
        }
        if !job.write {
            job.data
                .extend_from_slice(data.get(..count).ok_or(DmaError::Answer)?);
        }
        job.done_bytes += count;
        Ok(())
    }

    /// The client is gone: everything fails.
    pub(crate) fn close(&self) {
        let jobs: Vec<Job> = {
            let mut state = self.state();
            state.gone = true;
            let flying = std::mem::take(&mut state.flying);
            flying
                .into_values()
                .chain(state.waiting.drain(..))
                .collect()
        };
        for job in jobs {
            (job.done)(Err(DmaError::Gone));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
