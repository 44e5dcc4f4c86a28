//! How an EM comes to its OM, and to the next one.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use m2m_fabric::Fabric;
use m2m_fabric::proto::{Hello, Reply, Request};

use super::om::{Pauses, may_pass};
use super::{EmError, FromOm, Phase, Returning, Shared, lock};
use crate::endpoint::{Endpoint, Patient};

/// How long the OM may take to answer.
const HELLO: Duration = Duration::from_secs(5);

impl Shared {
    /// Connects to the OM and introduces the EM. While an OM on another host cannot be reached it tries again, until
    /// the EM is to stop.
    pub(super) fn introduce(self: &Arc<Self>) -> Result<(), EmError> {
        // A connection that ends before it counts is no reason to look for another OM.
        self.looking.store(true, Ordering::SeqCst);
        let introduced = self.introduce_patiently();
        self.looked(&introduced);
        introduced
    }

    fn introduce_patiently(self: &Arc<Self>) -> Result<(), EmError> {
        let mut pauses = Pauses::new(&self.settings.om);
        loop {
            let error = match self.connect() {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let passes = matches!(&error, EmError::Om { source, .. } if may_pass(source));
            if !passes || !self.settings.om.is_remote() {
                return Err(error);
            }
            let pause = pauses.next();
            log::warn!("{error}; trying again after {pause:?}");
            if !self.pause(pause) {
                return Ok(());
            }
        }
    }

    /// This thread does not look for an OM any more; one that was found may have gone meanwhile.
    fn looked(self: &Arc<Self>, result: &Result<(), EmError>) {
        self.looking.swap(false, Ordering::SeqCst);
        if result.is_ok() && *lock(&self.phase) == Phase::Orphan {
            self.look_for_another();
        }
    }

    /// There is an OM, unless it went in this moment.
    fn serve(&self) {
        self.set_phase(Phase::Serving);
        if self.om.get().is_none() {
            self.set_phase(Phase::Orphan);
        }
    }

    /// Waits; `false` when the EM is to stop.
    fn pause(&self, pause: Duration) -> bool {
        self.phase_after(pause, |phase| phase != Phase::Stop) != Phase::Stop
    }

    /// Waits, and answers whether there was no OM all the time.
    fn is_orphan_for(&self, time: Duration) -> bool {
        self.phase_after(time, |phase| phase == Phase::Orphan) == Phase::Orphan
    }

    /// The phase after a time, or as soon as it is none to `stay` in.
    fn phase_after(&self, time: Duration, stay: impl Fn(Phase) -> bool) -> Phase {
        let phase = lock(&self.phase);
        let waited = self
            .changed
            .wait_timeout_while(phase, time, |phase| stay(*phase));
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn hello(self: &Arc<Self>, returns: bool) -> Result<Arc<dyn Fabric>, EmError> {
        let failed = |source| EmError::Om {
            place: self.settings.om.to_string(),
            source,
        };
        let handler = Arc::new(FromOm(self.clone()));
        let fabric = self.settings.om.connect(handler).map_err(failed)?;
        if !returns {
            // Nobody misses them, and the OM gives what its configuration says now.
            self.drop_functions();
            // Orders may come before the answer does.
            self.om.set(Some(fabric.clone()));
        }
        let hello = Request::Hello(Hello {
            em: self.settings.name.clone(),
            pid: std::process::id(),
            program: concat!("em ", env!("CARGO_PKG_VERSION")).into(),
            returns,
        });
        let answer = fabric.call(hello, &[], HELLO).map_err(failed);
        match answer.and_then(accepted) {
            Ok(()) => Ok(fabric),
            Err(error) => {
                if !returns {
                    self.om.set(None);
                }
                Err(error)
            }
        }
    }

    /// Comes to an OM with nothing.
    fn connect(self: &Arc<Self>) -> Result<(), EmError> {
        self.hello(false)?;
        self.serve();
        Ok(())
    }

    /// Looks for an OM that took the place of the one that is gone: as long as there are guests, or for ever when it
    /// is on another host.
    pub(super) fn look_for_another(self: &Arc<Self>) {
        // A connection that a look made and that was refused ends here too.
        if self.looking.swap(true, Ordering::SeqCst) {
            return;
        }
        let shared = self.clone();
        let spawned = std::thread::Builder::new()
            .name("return".into())
            .spawn(move || {
                let mut pauses = Pauses::new(&shared.settings.om);
                let mut said = String::new();
                while shared.is_orphan_for(pauses.next()) {
                    let waits = lock(&shared.returning).is_some();
                    if let Some(Err(why)) = (!waits).then(|| shared.come_back()) {
                        shared.do_not_return();
                        let why = format!("no OM takes this EM: {why}");
                        match shared.settings.om.is_remote() && why != said {
                            true => log::warn!("{why}"),
                            false => log::debug!("{why}"),
                        }
                        said = why;
                    }
                }
                shared.looked(&Ok(()));
                // The data path does not wait for this, and the OM answers others meanwhile.
                let functions: Vec<_> = lock(&shared.functions)
                    .values()
                    .map(Endpoint::patient)
                    .collect();
                functions.iter().for_each(Patient::tell_all);
            });
        if let Err(error) = spawned {
            log::error!("no thread to look for an OM: {error}");
        }
    }

    fn come_back(self: &Arc<Self>) -> Result<(), EmError> {
        match self.settings.om.is_remote() && !self.has_guests() {
            true => self.connect(),
            false => self.return_to_om(),
        }
    }

    /// Gives everything back that an OM has to know. The OM then adopts the functions.
    fn return_to_om(self: &Arc<Self>) -> Result<(), EmError> {
        let failed = |source| EmError::Om {
            place: self.settings.om.to_string(),
            source,
        };
        let fabric = self.hello(true)?;
        let call = |request, fds: &[BorrowedFd<'_>]| {
            accepted(fabric.call(request, fds, HELLO).map_err(failed)?)
        };
        // Until all functions are adopted, what guests write waits.
        *lock(&self.returning) = Some(Returning {
            fabric: fabric.clone(),
            missing: lock(&self.functions)
                .keys()
                .copied()
                .collect::<BTreeSet<_>>(),
        });
        for (&function, endpoint) in &*lock(&self.functions) {
            let request = Request::ReturnFunction {
                function,
                state: endpoint.state(),
            };
            if fabric.carries_fds() {
                endpoint.with_belongings(|listener, shadow| {
                    call(request, &[listener.as_fd(), shadow.as_fd()])
                })?;
            } else {
                if let Some(image) = self.shadows.image(function) {
                    fabric.show(image).map_err(failed)?;
                }
                call(request, &[])?;
            }
        }
        for (link, fds) in lock(&self.links).values() {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            call(Request::ReturnLink(link.clone()), &fds)?;
        }
        call(Request::Returned, &[])
    }

    /// The OM that was to adopt this EM does not.
    pub(super) fn do_not_return(&self) {
        let gone = lock(&self.returning).take();
        // Not under the lock: the end of a connection waits for a thread that comes here too.
        drop(gone);
    }

    /// An OM took a function over that was returned.
    pub(super) fn adopted(&self, id: u32, fds: Vec<OwnedFd>) -> Result<(), String> {
        let fds = match fds.is_empty() && self.settings.om.is_remote() {
            true => None,
            false => Some(
                <[OwnedFd; 2]>::try_from(fds)
                    .map_err(|fds| format!("an adoption is 2 descriptors, not {}", fds.len()))?,
            ),
        };
        let functions = lock(&self.functions);
        let endpoint = functions
            .get(&id)
            .ok_or_else(|| format!("there is no function {id}"))?;
        endpoint.adopted(fds)?;
        let mut returning = lock(&self.returning);
        if let Some(state) = returning.as_mut() {
            state.missing.remove(&id);
            if state.missing.is_empty() {
                self.om.set(Some(state.fabric.clone()));
                *returning = None;
                self.serve();
                log::info!("another OM has adopted this EM");
                functions.values().for_each(Endpoint::config_changed);
            }
        }
        Ok(())
    }
}

/// An answer that can only be yes or no.
fn accepted(reply: Reply) -> Result<(), EmError> {
    match reply {
        Reply::Ok => Ok(()),
        Reply::Failed(why) => Err(EmError::Refused(why)),
        Reply::Stats(_) | Reply::Path(_) => {
            Err(EmError::Refused("it answers something else".into()))
        }
    }
}
