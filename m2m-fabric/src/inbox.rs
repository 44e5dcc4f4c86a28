//! Messages that wait for the handler thread.

use crate::error::FabricError;
use crate::proto::{Event, Request};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Requests that may wait. Each may hold 16 descriptors of this process's table.
pub(crate) const MAX_REQUESTS: usize = 16;
/// Events that may wait.
pub(crate) const MAX_EVENTS: usize = 256;

/// A message for the handler.
#[derive(Debug)]
pub(crate) enum Message {
    Request(u32, Request, Vec<OwnedFd>),
    Event(Event),
}

/// A bounded queue between the reader and the handler thread.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Message>,
    requests: usize,
    closed: bool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message; never blocks. A heartbeat replaces one that still waits.
    pub(crate) fn push(&self, message: Message) -> Result<(), FabricError> {
        let mut state = self.lock();
        if state.closed {
            return Ok(());
        }
        match &message {
            Message::Request(..) if state.requests >= MAX_REQUESTS => {
                return Err(FabricError::Overflow {
                    what: "requests",
                    max: MAX_REQUESTS,
                });
            }
            Message::Request(..) => state.requests += 1,
            Message::Event(event) => {
                if matches!(event, Event::Heartbeat { .. }) {
                    state
                        .queue
                        .retain(|old| !matches!(old, Message::Event(Event::Heartbeat { .. })));
                }
                if state.queue.len() - state.requests >= MAX_EVENTS {
                    return Err(FabricError::Overflow {
                        what: "events",
                        max: MAX_EVENTS,
                    });
                }
            }
        }
        state.queue.push_back(message);
        drop(state);
        self.news.notify_one();
        Ok(())
    }

    /// Waits for the next message; `None` when closed.
    pub(crate) fn pop(&self) -> Option<Message> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(message) = state.queue.pop_front() {
                if matches!(message, Message::Request(..)) {
                    state.requests -= 1;
                }
                return Some(message);
            }
            state = self
                .news
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Drops what waits, and everything that comes.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.queue.clear();
        state.requests = 0;
        drop(state);
        self.news.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heartbeat(sequence: u64) -> Message {
        Message::Event(Event::Heartbeat {
            sequence,
            progress: 0,
            backlog: false,
        })
    }

    fn event() -> Message {
        Message::Event(Event::ConfigChanged { function: 0 })
    }

    #[test]
    fn requests_beyond_the_bound_are_refused() {
        let inbox = Inbox::default();
        let request = || Message::Request(0, Request::Stats, Vec::new());
        for _ in 0..MAX_REQUESTS {
            inbox.push(request()).unwrap();
        }
        assert!(matches!(
            inbox.push(request()),
            Err(FabricError::Overflow { .. })
        ));
        assert!(inbox.pop().is_some());
        inbox.push(request()).unwrap();
    }

    #[test]
    fn events_beyond_the_bound_are_refused() {
        let inbox = Inbox::default();
        for _ in 0..MAX_EVENTS {
            inbox.push(event()).unwrap();
        }
        assert!(matches!(
            inbox.push(event()),
            Err(FabricError::Overflow { .. })
        ));
    }

    #[test]
    fn only_the_newest_heartbeat_waits() {
        let inbox = Inbox::default();
        for sequence in 0..1000 {
            inbox.push(heartbeat(sequence)).unwrap();
        }
        let newest = Event::Heartbeat {
            sequence: 999,
            progress: 0,
            backlog: false,
        };
        assert!(matches!(inbox.pop(), Some(Message::Event(event)) if event == newest));
        inbox.close();
        assert!(inbox.pop().is_none());
    }
}
