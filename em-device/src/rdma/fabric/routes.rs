//! What the OM answered about destinations of datagrams.

use super::super::packet::Route;
use super::super::verbs::{Destination, Path, Peer};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Destinations remembered at most: a guest can make up as many as it likes.
const MAX_ROUTES: usize = 1024;
/// How long a refusal counts, and how long an answer is waited for before it is asked again.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy)]
enum Entry {
    Known(Path),
    Asked(Instant),
    Refused(Instant),
}

/// Destinations by address.
#[derive(Debug, Default)]
pub(super) struct Routes {
    entries: HashMap<Destination, Entry>,
}

impl Routes {
    /// What is known, and whether the OM is to be asked now.
    pub(super) fn look_up(&mut self, to: &Destination, now: Instant) -> (Route, bool) {
        let recent = |since: Instant| now.saturating_duration_since(since) < PATIENCE;
        match self.entries.get(to) {
            Some(Entry::Known(path)) => return (Route::Known(*path), false),
            Some(Entry::Asked(since)) if recent(*since) => return (Route::Asking, false),
            Some(Entry::Refused(since)) if recent(*since) => return (Route::Refused, false),
            _ => {}
        }
        if self.entries.len() >= MAX_ROUTES {
            self.entries.clear();
        }
        self.entries.insert(*to, Entry::Asked(now));
        (Route::Asking, true)
    }

    /// The OM's answer.
    pub(super) fn answered(&mut self, to: Destination, path: Option<Path>, now: Instant) {
        let entry = path.map_or(Entry::Refused(now), Entry::Known);
        // Nobody waits for what was forgotten meanwhile.
        if let Some(known) = self.entries.get_mut(&to) {
            *known = entry;
        }
    }

    /// The answers that count.
    pub(super) fn known(&self) -> impl Iterator<Item = Path> {
        self.entries.values().filter_map(|entry| match entry {
            Entry::Known(path) => Some(*path),
            Entry::Asked(_) | Entry::Refused(_) => None,
        })
    }

    /// Forgets answers about a peer, up to a generation.
    pub(super) fn forget(&mut self, peer: Peer, generation: u64) {
        self.entries.retain(|_, entry| {
            !matches!(entry, Entry::Known(path) if path.peer == peer && path.generation <= generation)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: Destination = Destination {
        lid: 3,
        gid: None,
        mac: [0; 6],
    };

    fn path(generation: u64) -> Path {
        Path {
            peer: Peer(2),
            generation,
        }
    }

    #[test]
    fn a_destination_is_asked_for_once_until_the_answer() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        assert_eq!(routes.look_up(&TO, now), (Route::Asking, true));
        assert_eq!(routes.look_up(&TO, now), (Route::Asking, false));
        let later = now + PATIENCE;
        assert_eq!(routes.look_up(&TO, later), (Route::Asking, true), "lost");
        routes.answered(TO, Some(path(1)), later);
        assert_eq!(routes.look_up(&TO, later), (Route::Known(path(1)), false));
    }

    #[test]
    fn a_refusal_counts_for_a_while() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        routes.look_up(&TO, now);
        routes.answered(TO, None, now);
        assert_eq!(routes.look_up(&TO, now), (Route::Refused, false));
        assert_eq!(routes.look_up(&TO, now + PATIENCE), (Route::Asking, true));
    }

    #[test]
    fn revoked_answers_are_forgotten() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        routes.look_up(&TO, now);
        routes.answered(TO, Some(path(5)), now);
        routes.forget(Peer(2), 4);
        routes.forget(Peer(1), 9);
        assert_eq!(routes.look_up(&TO, now).0, Route::Known(path(5)));
        routes.forget(Peer(2), 5);
        assert_eq!(routes.look_up(&TO, now), (Route::Asking, true));
    }

    #[test]
    fn made_up_destinations_do_not_fill_memory() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        for n in 0..10_000u32 {
            let mut to = TO;
            to.mac = [0, 0, 0, 0, (n >> 8) as u8, n as u8];
            routes.look_up(&to, now);
        }
        assert!(routes.entries.len() <= MAX_ROUTES);
    }
}
