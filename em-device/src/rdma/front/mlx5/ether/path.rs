//! The frame data path of a function: queues as the driver's commands made them, and their rounds.

use super::super::nic::{self, Dispatch, EtherState, NicVport, QueueState, Tir};
use super::{
    EtherContext, EtherFilter, EtherReceive, EtherRx, EtherTx, HashFunction, Rss, RxSetup, TxSetup,
};
use crate::frame::Frame;
use crate::net::links::{Links, Split};
use crate::net::queue::drop_reason;
use crate::port::Rx;
use crate::rdma::front::mlx5::cqe::Cqe;
use crate::rdma::kept::Kept;
use dot_iommu::DotView;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Frames of a wire that one turn without receivers drops.
const BUDGET: usize = 64;
/// How often queues are looked at while a frame waits for a receive entry: the driver posts entries
/// without a doorbell.
const LOOK: Duration = Duration::from_millis(1);

/// Queues, and which frames go to which. Follows an [`EtherState`].
#[derive(Debug)]
pub struct EtherPath {
    /// State of what is here; `None` at first.
    revision: Option<u64>,
    sends: BTreeMap<u32, Send>,
    receive: EtherReceive,
    /// Send queues that went to error and that nobody took yet.
    failed: Vec<u32>,
    /// What the hash was made of: making it takes a while.
    hash: Option<HashFunction>,
    /// What outlives the process.
    kept: Option<Arc<Kept>>,
}

/// A send queue.
#[derive(Debug)]
struct Send {
    tx: EtherTx,
    /// Whether entries are taken, and be it to flush them.
    ready: bool,
    /// Whether something may be posted.
    rung: bool,
}

impl EtherPath {
    /// Without queues, for IP packets of up to `mtu` bytes.
    pub fn new(mtu: u16) -> Self {
        Self {
            revision: None,
            sends: BTreeMap::new(),
            receive: EtherReceive::new(EtherFilter::default(), mtu),
            failed: Vec::new(),
            hash: None,
            kept: None,
        }
    }

    /// Queues that are made from here on have places there.
    pub fn keep_in(&mut self, kept: Arc<Kept>) {
        self.kept = Some(kept);
    }

    /// The queues, which were just made, go on where a former process was. `last` answers the newest entry of a
    /// completion queue.
    pub fn restore(
        &mut self,
        state: &EtherState,
        kept: &Kept,
        last: impl Fn(u32) -> Option<Cqe>,
        view: &DotView<'_>,
    ) {
        for (sqn, send) in &mut self.sends {
            let cqn = state.send_queue(*sqn).map(|queue| queue.cqn);
            if let Some(place) = kept.qp(*sqn) {
                if send.tx.restore(place, cqn.and_then(&last), view) {
                    self.failed.push(*sqn);
                }
                send.rung = true;
            }
        }
        for (rqn, rx) in &mut self.receive.rqs {
            if let Some(place) = kept.rq(*rqn) {
                rx.restore(place, last(rx.cqn));
            }
        }
    }

    /// Takes over what commands changed. Queues that stay go on where they are. Call it after each
    /// command: a queue that is gone may have its number taken by the next one.
    pub fn follow(&mut self, state: &EtherState) {
        if self.revision == Some(state.revision()) {
            return;
        }
        self.revision = Some(state.revision());
        self.follow_sends(state);
        self.follow_receives(state);
        self.receive.filter = filter(state.vport());
        self.follow_rss(state);
    }

    fn follow_sends(&mut self, state: &EtherState) {
        self.sends.retain(|sqn, _| state.send_queue(*sqn).is_some());
        for (sqn, queue) in state.send_queues() {
            let ready = queue.state != QueueState::Reset;
            if let Entry::Vacant(vacant) = self.sends.entry(sqn) {
                match EtherTx::new(tx_setup(sqn, queue)) {
                    Ok(mut tx) => {
                        let place = self.kept.as_ref().and_then(|kept| kept.qp(sqn));
                        place.into_iter().for_each(|place| tx.keep_in(place));
                        let (ready, rung) = (false, false);
                        vacant.insert(Send { tx, ready, rung });
                    }
                    Err(error) => log::debug!("send queue {sqn:#x} cannot be used: {error}"),
                }
            }
            let Some(send) = self.sends.get_mut(&sqn) else {
                continue;
            };
            match queue.state {
                QueueState::Reset => send.tx.reset(),
                QueueState::Error if !send.tx.failed() => {
                    send.tx.enter_error();
                    send.rung = true;
                }
                QueueState::Error | QueueState::Ready => {}
            }
            // Its doorbell may have come before.
            send.rung |= ready && !send.ready;
            send.ready = ready;
        }
    }

    fn follow_receives(&mut self, state: &EtherState) {
        let rqs = &mut self.receive.rqs;
        rqs.retain(|rqn, _| state.receive_queue(*rqn).is_some());
        for (rqn, queue) in state.receive_queues() {
            if let Entry::Vacant(vacant) = rqs.entry(rqn) {
                match EtherRx::new(rx_setup(rqn, queue)) {
                    Ok(mut rx) => {
                        let place = self.kept.as_ref().and_then(|kept| kept.rq(rqn));
                        place.into_iter().for_each(|place| rx.keep_in(place));
                        vacant.insert(rx);
                    }
                    Err(error) => log::debug!("receive queue {rqn:#x} cannot be used: {error}"),
                }
            }
            let Some(rx) = rqs.get_mut(&rqn) else {
                continue;
            };
            if queue.state == QueueState::Reset {
                rx.reset();
            }
            rx.ready = queue.state == QueueState::Ready;
            rx.vlan_strip = queue.strip_vlan;
        }
    }

    fn follow_rss(&mut self, state: &EtherState) {
        let Some(tir) = main_tir(state) else {
            self.receive.rss = None;
            self.hash = None;
            return;
        };
        let rqns = match tir.dispatch {
            Dispatch::Direct(rqn) => vec![rqn],
            Dispatch::Indirect(rqt) => state.rqt(rqt).map_or(vec![], |rqt| rqt.rqs.clone()),
        };
        let hash = hash_function(tir);
        match &mut self.receive.rss {
            Some(rss) if self.hash == Some(hash) => rss.set_table(rqns),
            rss => {
                *rss = Some(Rss::new(rqns, hash));
                self.hash = Some(hash);
            }
        }
    }

    /// A send queue was rung.
    pub fn ring(&mut self, sqn: u32) {
        if let Some(send) = self.sends.get_mut(&sqn) {
            send.rung = true;
        }
    }

    /// Looks whether something was posted to a send queue whose doorbell was not seen.
    pub fn look(&mut self, sqn: u32, view: &DotView<'_>) -> bool {
        let send = self.sends.get_mut(&sqn);
        let new = send.filter(|send| !send.rung && send.ready && send.tx.is_posted(view));
        new.map(|send| send.rung = true).is_some()
    }

    /// One round over all queues and wires. Answers whether anything was done; what was sent is
    /// visible.
    pub fn turn(&mut self, cx: &mut EtherContext<'_>) -> bool {
        let mut done = 0;
        for (sqn, send) in &mut self.sends {
            if send.rung && send.ready {
                let before = send.tx.failed();
                let turn = send.tx.turn(cx);
                if !before && send.tx.failed() {
                    self.failed.push(*sqn);
                }
                send.rung = send.tx.goes_on(turn);
                done += turn;
            }
        }
        done += self.receive.turn(cx);
        cx.links.flush();
        done != 0
    }

    /// The send queues that went to error since the last question.
    pub fn take_failed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.failed)
    }

    /// Before sleep: whether there is work already.
    pub fn is_busy(&mut self, links: &Links, view: &DotView<'_>) -> bool {
        let posted = |send: &Send| send.rung && send.ready && !send.tx.is_blocked();
        self.sends.values().any(posted) || self.receive.can_go_on(links, view)
    }

    /// Whether a frame waits for a receive entry.
    pub fn waits_for_receives(&self) -> bool {
        self.receive.waits()
    }

    /// When there must be a turn at the latest.
    pub fn deadline(&self, now: Instant) -> Option<Instant> {
        let sends = self.sends.values();
        let waits = sends.filter_map(|send| send.tx.gives_up_at());
        let waits = waits.map(|at| at.max(now + LOOK));
        let receives = self.receive.waits().then_some(now + LOOK);
        waits.chain(receives).min()
    }
}

/// Without receivers frames go nowhere. Answers whether there were any.
pub fn discard(links: &mut Links, counters: &mut super::EtherCounters) -> bool {
    let mut frames = 0;
    let Split { wires, .. } = links.split();
    for link in wires {
        frames += link.port.receive(BUDGET, &mut |_: &Frame<'_>| Rx::Taken);
    }
    for _ in 0..frames {
        counters.dropped(drop_reason::NOT_RUNNING);
    }
    if frames != 0 {
        links.forget_blocked();
    }
    frames != 0
}

fn tx_setup(sqn: u32, queue: &nic::SendQueue) -> TxSetup {
    TxSetup {
        sqn,
        buffer: queue.queue.buffer.clone(),
        log_size: queue.queue.log_size,
        doorbell: queue.queue.doorbell,
        cqn: queue.cqn,
    }
}

fn rx_setup(rqn: u32, queue: &nic::ReceiveQueue) -> RxSetup {
    RxSetup {
        rqn,
        buffer: queue.queue.buffer.clone(),
        log_size: queue.queue.log_size,
        log_stride: queue.queue.log_stride,
        doorbell: queue.queue.doorbell,
        cqn: queue.cqn,
        vlan_strip: queue.strip_vlan,
    }
}

fn filter(vport: &NicVport) -> EtherFilter {
    let mut filter = EtherFilter::new(vport.mac);
    filter.promisc_all = vport.promisc_all;
    filter.promisc_uc = vport.promisc_uc;
    filter.promisc_mc = vport.promisc_mc;
    filter.set_unicast(vport.unicast.iter().copied());
    filter.set_multicast(vport.multicast.iter().copied());
    filter
}

/// The interface that spreads frames over the queues. The driver makes one for each kind of packet,
/// over the same table, and one for each queue alone: tables are what tells them apart.
fn main_tir(state: &EtherState) -> Option<&Tir> {
    let rank = |(number, tir): &(u32, &Tir)| {
        let most = match tir.dispatch {
            Dispatch::Direct(_) => 0,
            Dispatch::Indirect(rqt) => state.rqt(rqt).map_or(0, |rqt| rqt.max),
        };
        (most, tir.hash_fn, Reverse(*number))
    };
    state.tirs().max_by_key(rank).map(|(_, tir)| tir)
}

fn hash_function(tir: &Tir) -> HashFunction {
    match tir.hash_fn {
        0 => HashFunction::None,
        1 => HashFunction::InvertedXor8,
        _ => HashFunction::Toeplitz {
            key: tir.key,
            symmetric: tir.symmetric,
        },
    }
}
