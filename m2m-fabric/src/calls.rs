//! Calls that wait for their reply.

use crate::error::FabricError;
use crate::proto::Reply;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Joins replies to the threads that wait for them.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next_id: u32,
    waiting: HashMap<u32, SyncSender<Reply>>,
    ended: Option<Arc<FabricError>>,
}

/// A place for one reply; dropping it forgets the call.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    calls: &'a Calls,
    pub(crate) id: u32,
    /// Disconnected when the connection ended.
    pub(crate) reply: Receiver<Reply>,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.calls.lock().waiting.remove(&self.id);
    }
}

impl Calls {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new call with an id that no waiting call has.
    pub(crate) fn begin(&self) -> Result<Call<'_>, FabricError> {
        let mut state = self.lock();
        if let Some(reason) = &state.ended {
            return Err(FabricError::Down(Arc::clone(reason)));
        }
        let id = loop {
            let id = state.next_id;
            state.next_id = id.wrapping_add(1);
            if !state.waiting.contains_key(&id) {
                break id;
            }
        };
        let (sender, reply) = sync_channel(1);
        state.waiting.insert(id, sender);
        Ok(Call {
            calls: self,
            id,
            reply,
        })
    }

    /// Hands a reply to its call. One that nobody waits for is the late answer to a call that gave
    /// up, and is dropped.
    pub(crate) fn finish(&self, id: u32, reply: Reply) {
        let waiting = self.lock().waiting.remove(&id);
        match waiting {
            Some(sender) => {
                // The caller may have given up just now.
                let _ = sender.try_send(reply);
            }
            None => log::debug!("reply {id} came too late"),
        }
    }

    /// Fails all calls, now and later.
    pub(crate) fn end(&self, reason: Arc<FabricError>) {
        let mut state = self.lock();
        state.ended.get_or_insert(reason);
        state.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_to_a_call_that_gave_up_goes_to_nobody_else() {
        let calls = Calls::default();
        let gave_up = calls.begin().unwrap();
        let id = gave_up.id;
        drop(gave_up);
        let later = calls.begin().unwrap();
        calls.finish(id, Reply::Ok);
        assert!(later.reply.try_recv().is_err());
        calls.finish(later.id, Reply::Ok);
        assert_eq!(later.reply.try_recv(), Ok(Reply::Ok));
    }

    #[test]
    fn ids_of_waiting_calls_are_not_given_again_after_wrapping() {
        let calls = Calls::default();
        let first = calls.begin().unwrap();
        calls.lock().next_id = u32::MAX;
        let ids = [calls.begin().unwrap(), calls.begin().unwrap()].map(|call| call.id);
        assert_eq!(ids, [u32::MAX, first.id + 1]);
    }

    #[test]
    fn end_disconnects_waiting_calls_and_refuses_new_ones() {
        let calls = Calls::default();
        let call = calls.begin().unwrap();
        calls.end(Arc::new(FabricError::PeerClosed));
        assert!(call.reply.recv().is_err());
        assert!(matches!(calls.begin(), Err(FabricError::Down(_))));
    }
}
