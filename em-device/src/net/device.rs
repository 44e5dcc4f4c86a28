//! The network function as the data path holds it.

mod by_queue;

use super::config::ConfigOverride;
use super::dirty::DirtyLog;
use super::features;
use super::lanes::Lanes;
use super::links::Links;
use super::queue::{NetQueue, drop_reason};
use super::receive::{self, Learner, Pool, Sink};
use super::saved;
use super::session::{self, Others, Scratch, Session};
use super::transmit::{self, Limits};
use crate::frame::Frame;
use crate::port::{Rx, RxSink as _};
use crate::virtio::chain::Parts;
use crate::virtio::common::QueueSetup;
use crate::virtio::ring::{QueueNote, Ring, RingError, RingFeatures};
use crate::virtio::signals::Signals;
use dot_iommu::{DotReader, DotView};
use m2m_fabric::proto::{FunctionState, FunctionStats, VirtioNetSpec};
use smartep::state::{Section, State};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Frames a queue or wire may move in one turn.
const BUDGET: usize = 64;

/// How long a function that took the place of another waits for its wires, so that it does not drop frames that
/// its driver gave to the one before.
const WIRING: Duration = Duration::from_millis(500);

/// What the data path tells the rest of the EM about a function. Called on the data path: must not
/// wait.
pub type Report = Arc<dyn Fn(FunctionState) + Send + Sync>;

/// The function on the data path.
pub struct NetDevice {
    id: u32,
    spec: VirtioNetSpec,
    signals: Arc<Signals>,
    memory: DotReader,
    config: Arc<ConfigOverride>,
    report: Report,
    queues: Vec<NetQueue>,
    session: Option<Session>,
    bus_master: bool,
    link_up: bool,
    /// Some ring is not in mapped memory at present.
    stalled: bool,
    /// Whether all wires were given.
    wired: bool,
    /// Whether a former process left a driver that is not taken over yet.
    resumes: bool,
    /// Until when it waits for that and for its wires.
    unwired: Option<Instant>,
    /// The driver is to be asked to announce itself where nobody else tells who is where.
    announce: bool,
    /// Where settings are noted for the next process.
    state: Option<Arc<State>>,
    pool: Pool,
    command: Vec<u8>,
    result: Vec<u8>,
    log: Option<DirtyLog>,
}

impl std::fmt::Debug for NetDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NetDevice")
            .field("id", &self.id)
            .field("session", &self.session)
            .field("bus_master", &self.bus_master)
            .field("link_up", &self.link_up)
            .finish_non_exhaustive()
    }
}

impl NetDevice {
    /// Function `id` without a driver.
    pub fn new(
        id: u32,
        spec: VirtioNetSpec,
        signals: Arc<Signals>,
        memory: DotReader,
        config: Arc<ConfigOverride>,
        report: Report,
    ) -> Self {
        let queues = (0..queue_count(&spec))
            .map(|index| NetQueue::new(index, spec.queue_pairs))
            .collect();
        Self {
            id,
            spec,
            signals,
            memory,
            config,
            report,
            queues,
            session: None,
            bus_master: false,
            link_up: false,
            stalled: false,
            wired: false,
            resumes: false,
            unwired: None,
            announce: false,
            state: None,
            pool: Pool::default(),
            command: Vec::new(),
            result: Vec::new(),
            log: None,
        }
    }

    /// The same with a place where settings are noted for the next process.
    pub fn noted_in(self, state: Arc<State>) -> Self {
        Self {
            state: Some(state),
            ..self
        }
    }

    /// Id in the DPU.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The driver is ready with these features and queues.
    pub fn start(&mut self, features: u64, setups: &[QueueSetup], links: &mut Links) {
        self.stop(links);
        self.begin(features, setups, Ring::new);
    }

    /// A former process left a client: nothing is taken from the wires until [`Self::taken_over`].
    pub fn resuming(&mut self) {
        self.resumes = true;
        self.unwired = Instant::now().checked_add(WIRING);
    }

    /// What a former process left was taken over, or there was nothing.
    pub fn taken_over(&mut self) {
        self.resumes = false;
        self.settle();
    }

    fn settle(&mut self) {
        if self.wired && !self.resumes {
            self.unwired = None;
        }
    }

    /// Goes on where a former process was killed, as soon as the wires are there ([`Self::wired`]).
    pub fn resume(&mut self, features: u64, setups: &[QueueSetup]) {
        self.begin(features, setups, Ring::resumed);
        let noted = self.state.as_ref().and_then(|s| s.load(Section::DataPath));
        if let (Some(session), Some(noted)) = (&mut self.session, noted) {
            if saved::apply(&noted, &mut session.settings).is_none() {
                log::error!("function {}: settings of the driver are lost", self.id);
            }
            session::apply_settings(session, &mut self.queues, &self.config, self.spec.mac);
        }
        self.announce = features & features::GUEST_ANNOUNCE != 0;
        // They may have come before this.
        self.unwired = (!self.wired).then(|| Instant::now() + WIRING);
        // Some may have been due.
        for queue in self.queues.iter_mut().filter(|queue| queue.is_enabled()) {
            queue.count_interrupt();
            self.signals.interrupt_queue(queue.index);
        }
    }

    /// All wires are there.
    pub fn wired(&mut self) {
        self.wired = true;
        self.settle();
    }

    fn begin(
        &mut self,
        features: u64,
        setups: &[QueueSetup],
        ring: fn(QueueSetup, RingFeatures, Option<QueueNote>) -> Ring,
    ) {
        let negotiated = RingFeatures::of(features);
        for (queue, setup) in self.queues.iter_mut().zip(setups) {
            let note = note_of(self.state.as_ref(), queue.index);
            queue.set_ring(setup.enabled.then(|| ring(*setup, negotiated, note)));
        }
        for queue in &mut self.queues {
            queue.begin_figures(self.signals.kicks(queue.index));
            queue.moderation.set_wish(queue.index % 2 == 1, None);
        }
        self.session = Some(Session::new(&self.spec, features));
    }

    /// Lets go of all queues; nothing of the driver's memory is touched after this.
    pub fn stop(&mut self, links: &mut Links) {
        for queue in &mut self.queues {
            queue.log_ring(self.log.as_ref());
            queue.set_ring(None);
        }
        links.forget_blocked();
        self.session = None;
        self.stalled = false;
        self.resumes = false;
        self.unwired = None;
        self.announce = false;
        self.config.set_mac(None);
        self.config.set_announce(false);
        if let Some(state) = &self.state {
            state.drop_section(Section::DataPath);
        }
    }

    /// Whether the function may use guest memory (command register, bus master enable).
    pub fn set_bus_master(&mut self, on: bool) {
        self.bus_master = on;
    }

    /// Whether the link carries frames.
    pub fn set_link_up(&mut self, up: bool) {
        self.link_up = up;
    }

    /// One round over all queues and wires. Answers whether anything was done.
    pub fn turn(&mut self, links: &mut Links) -> bool {
        if self.unwired.is_some_and(|until| links.now() < until) {
            return false;
        }
        self.unwired = None;
        if std::mem::take(&mut self.announce) {
            self.ask_to_announce(links);
        }
        if self.session.is_none() || !self.bus_master {
            return self.discard(links);
        }
        self.stalled = false;
        let worked = self.work(links);
        self.log_writes();
        match worked {
            Ok(worked) => worked,
            Err((_, RingError::Unmapped)) => {
                self.stalled = true;
                false
            }
            Err((queue, error)) => {
                self.fail(queue, error, links);
                true
            }
        }
    }

    /// Asks the driver to tell the network behind wires that learn addresses where it is.
    fn ask_to_announce(&self, links: &Links) {
        if links.iter().any(|link| link.learning_slot().is_some()) {
            self.config.set_announce(true);
            self.signals.config_changed();
        }
    }

    /// The queue, and it alone, stops; the driver is asked for a reset.
    fn fail(&mut self, index: u16, error: RingError, links: &mut Links) {
        log::warn!("function {}: queue {index} stopped: {error}", self.id);
        if let Some(queue) = self.queues.get_mut(usize::from(index)) {
            queue.count_drop(error.name());
        }
        self.stop_queue(index, links);
        self.signals.queue_failed(index);
        if self.signals.set_needs_reset() {
            (self.report)(FunctionState::NeedsReset);
        }
    }

    /// Without a driver frames go nowhere.
    fn discard(&mut self, links: &mut Links) -> bool {
        let mut frames = 0;
        for link in links.split().wires {
            frames += link.port.receive(BUDGET, &mut |_: &Frame<'_>| Rx::Taken);
        }
        if let Some(queue) = self.queues.first_mut() {
            for _ in 0..frames {
                queue.count_drop(drop_reason::NOT_RUNNING);
            }
        }
        frames != 0
    }

    fn work(&mut self, links: &mut Links) -> Result<bool, (u16, RingError)> {
        let Self {
            session: Some(session),
            memory,
            queues,
            signals,
            pool,
            state,
            ..
        } = self
        else {
            return Ok(false);
        };
        let view = memory.pin();
        let mut unmapped = None;
        // An unmapped ring does not hold up the others.
        let mut note = |queue: u16, result: Result<usize, RingError>| match result {
            Ok(done) => Ok(done),
            Err(RingError::Unmapped) => {
                unmapped.get_or_insert((queue, RingError::Unmapped));
                Ok(0)
            }
            Err(error) => Err((queue, error)),
        };
        let mut done = 0;
        let at = usize::from(session.control).min(queues.len());
        if let (others, [queue, ..]) = queues.split_at_mut(at) {
            let mut scratch = Scratch {
                pool,
                command: &mut self.command,
                result: &mut self.result,
            };
            let source = Others {
                queues: others,
                signals,
                control: session.control,
            };
            let notes = state.as_deref();
            let before = session.settings.commands.all;
            let commands = session::commands(queue, &view, &source, session, notes, &mut scratch);
            if session.settings.commands.all != before {
                session::apply_settings(session, others, &self.config, self.spec.mac);
            }
            done += note(queue.index, commands)?;
            interrupt(queue, &view, signals);
        }
        let limits = Limits {
            features: session.features,
            header: session.header,
            mtu: self.spec.mtu,
            link_up: self.link_up,
        };
        let pairs = usize::from(session.settings.pairs);
        // One that is not in use any more may owe an interrupt.
        let receivers = usize::from(session.control / 2).min(queues.len() / 2);
        for (pair, queue) in queues.iter_mut().skip(1).step_by(2).enumerate() {
            settle(queue, &view);
            let (_, before) = queue.moved();
            let mut frames = 0;
            if pair < pairs || session.sends_from_all {
                let sent = transmit::burst(queue, &view, links, &limits, &mut pool.parts, BUDGET);
                frames = note(queue.index, sent)?;
                done += frames;
            }
            let bytes = queue.moved().1 - before;
            tell(queue, &view, signals, (frames as u64, bytes), links.now());
        }
        for queue in queues.iter_mut().step_by(2).take(receivers) {
            settle(queue, &view);
            queue.mark();
        }
        let split = links.split();
        for link in split.wires {
            let learner = Learner {
                table: split.table,
                slot: link.learning_slot(),
                now: split.now,
            };
            let mut sink = Sink {
                lanes: Lanes::new(&view, queues),
                settings: &session.settings,
                receiver: session.receiver,
                mergeable: session.mergeable,
                header: session.header,
                link_up: self.link_up,
                parts: Parts::reuse(std::mem::take(&mut pool.parts)),
                heads: &mut pool.heads,
                segmenter: &mut pool.segmenter,
                blocked: &mut link.blocked,
                segments_done: &mut link.segments_done,
                recorders: split.recorders,
                learner,
                error: None,
            };
            sink.parts.remember_written(pool.written.take());
            let received = link.port.receive(BUDGET, &mut sink);
            sink.done();
            let error = sink.error;
            pool.written = sink.parts.take_written();
            pool.parts = sink.parts.retire();
            done += received;
            if let Some((queue, error)) = error {
                note(queue, Err(error))?;
            }
        }
        for queue in queues.iter_mut().step_by(2).take(receivers) {
            let moved = queue.moved_since_mark();
            tell(queue, &view, signals, moved, links.now());
        }
        links.flush();
        match unmapped {
            Some(error) if done == 0 => Err(error),
            _ => Ok(done != 0),
        }
    }

    /// Before sleep: asks for notifications and wake-ups. Answers whether there is work already.
    pub fn arm(&mut self, links: &mut Links) -> bool {
        if self.unwired.is_some() {
            return false;
        }
        for link in links.iter_mut() {
            // The frame that waits is known; what it waits for is asked of the queue below.
            if link.blocked.is_none() && link.port.arm() {
                return true;
            }
        }
        if !self.bus_master {
            return false;
        }
        let Some(session) = &self.session else {
            return false;
        };
        let pairs = 2 * session.settings.pairs;
        let view = self.memory.pin();
        let (control, all) = (session.control, session.sends_from_all);
        for queue in &mut self.queues {
            let asks = match queue.index {
                index if index == control => true,
                index if index >= pairs && (index % 2 == 0 || !all) => false,
                index if index % 2 == 1 => queue.blocked.is_none(),
                index => links
                    .iter()
                    .any(|l| l.blocked.is_some_and(|b| b.queue == index)),
            };
            let Some(mut ring) = queue.attach(&view).filter(|_| asks) else {
                continue;
            };
            let enabled = ring.enable_notification();
            queue.log_ring(self.log.as_ref());
            match enabled {
                Ok(false) => {}
                Ok(true) => return true,
                Err(RingError::Unmapped) => self.stalled = true,
                // The next turn meets the error and deals with it.
                Err(_) => return true,
            }
        }
        false
    }

    /// After sleep.
    pub fn disarm(&mut self, links: &mut Links) {
        for link in links.iter_mut() {
            link.port.disarm();
        }
        if self.session.is_none() || !self.bus_master {
            return;
        }
        let view = self.memory.pin();
        for queue in &mut self.queues {
            if let Some(mut ring) = queue.attach(&view) {
                // Only spares notifications; where it fails there are none to spare.
                let _ = ring.disable_notification();
                queue.log_ring(self.log.as_ref());
            }
        }
    }

    /// Until when the data path may sleep for this function.
    pub fn deadline(&self, links: &Links, now: Instant) -> Option<Instant> {
        /// How soon memory that went away is looked for.
        const STALLED: Duration = Duration::from_millis(2);
        /// What waits for others is not looked at more often than this.
        const LEAST: Duration = Duration::from_millis(1);
        let queues = self.queues.iter().filter_map(|queue| queue.blocked);
        let transmit = queues.map(|since| since + transmit::PATIENCE);
        let links = links.iter().filter_map(|link| link.blocked);
        let receive = links.map(|b| b.since + receive::PATIENCE);
        let running = self.bus_master && self.session.is_some();
        let interrupts = self.queues.iter().filter(|_| running);
        let interrupts = interrupts.filter_map(|q| q.moderation.deadline());
        // One that is over by now was not possible for a reason that takes its time.
        let interrupts = interrupts.map(|at| if at > now { at } else { now + LEAST });
        transmit
            .chain(receive)
            .map(|at| at.max(now + LEAST))
            .chain(self.stalled.then_some(now + STALLED))
            .chain(self.unwired)
            .chain(interrupts)
            .min()
    }

    /// A snapshot of the counters.
    pub fn stats(&self) -> FunctionStats {
        FunctionStats {
            function: self.id,
            queues: self
                .queues
                .iter()
                .map(|queue| queue.stats(self.signals.kicks(queue.index)))
                .collect(),
            features: self.session.as_ref().map_or(0, |s| s.features),
            dma_ranges: 0,
            dma_bytes: 0,
        }
    }
}

/// Queues of a function: pairs and the control queue.
pub fn queue_count(spec: &VirtioNetSpec) -> u16 {
    2 * spec.queue_pairs + 1
}

fn note_of(state: Option<&Arc<State>>, queue: u16) -> Option<QueueNote> {
    state.map(|state| QueueNote::new(state.clone(), queue))
}

/// Forgets what the driver found out by itself or does not want to know.
fn settle(queue: &mut NetQueue, view: &DotView<'_>) {
    if queue.moderation.waits() {
        let wanted = queue
            .attach(view)
            .and_then(|mut ring| ring.still_wants_interrupt());
        if wanted == Some(false) {
            queue.moderation.settle();
        }
    }
}

fn interrupt(queue: &mut NetQueue, view: &DotView<'_>, signals: &Signals) {
    let wanted = queue
        .attach(view)
        .is_some_and(|mut ring| ring.wants_interrupt());
    if wanted {
        queue.count_interrupt();
        signals.interrupt_queue(queue.index);
    }
}

/// Interrupts for what was moved now or before, if it is time.
fn tell(
    queue: &mut NetQueue,
    view: &DotView<'_>,
    signals: &Signals,
    (frames, bytes): (u64, u64),
    now: Instant,
) {
    let any = queue.is_untold();
    queue.moderation.untold(any, frames, bytes, now);
    if queue.moderation.is_due(now) {
        interrupt(queue, view, signals);
        let any = queue.is_untold();
        queue.moderation.untold(any, 0, 0, now);
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
