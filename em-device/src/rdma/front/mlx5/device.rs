//! The function on the data path: its objects, its commands' execution, its events.

use super::command::{Command, Output, Status, failure, opcode as op};
use super::doorbells::{Doorbells, MAX_EQ, MAX_NUMBER};
use super::eq::{Eq, Eqe};
use super::ether::{EtherContext, EtherPath, discard};
use super::kept::KeptDevice;
use super::lookout::Lookout;
use super::mapped::MappedPages;
use super::nic::{EtherState, FIRST_SQ, QueueState};
use super::pages::Allowance;
use super::registers::{BAR_BYTES, FIRST_UAR, UAR_BYTES};
use super::table::Table;
use super::{Mlx5, command};
use crate::net::links::Links;
use crate::rdma::engine::{Context, Engine};
use crate::rdma::packet::Addresses;
use crate::rdma::verbs::{CqNum, Destination, Path, Peer, Pushed, QpNum};
use crate::worker::Watch;
use dot_iommu::DotView;
use m2m_fabric::proto::{RdmaLinkLayer, RdmaSpec};
use smallvec::SmallVec;
use smartep::irq::Irqs;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Protection domains, domains of other kinds, shared receive queues: numbers are below this.
const MAX_SMALL: u32 = 1 << 16;
/// GIDs of a port at most; a bit each in a word.
pub(super) const MAX_GIDS: usize = 16;

/// Objects of the driver.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) eqs: Table<Eq>,
    pub(super) cqs: Table<command::CqObject>,
    pub(super) qps: Table<command::QpObject>,
    pub(super) srqs: Table<command::SrqObject>,
    /// By index.
    pub(super) mkeys: HashMap<u32, command::MkeyObject>,
    pub(super) pds: Table<command::PdObject>,
    pub(super) uars: Table<()>,
    pub(super) xrcds: Table<()>,
    pub(super) allowance: Allowance,
}

impl Objects {
    fn new() -> Self {
        Self {
            eqs: Table::new(1, MAX_EQ),
            cqs: Table::new(1, MAX_NUMBER),
            // 0 and 1 are special.
            qps: Table::new(2, FIRST_SQ),
            srqs: Table::new(1, MAX_SMALL),
            mkeys: HashMap::new(),
            pds: Table::new(1, MAX_SMALL),
            uars: Table::new(FIRST_UAR, (BAR_BYTES / UAR_BYTES) as u32),
            xrcds: Table::new(1, MAX_SMALL),
            allowance: Allowance::default(),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Device {
    pub(super) spec: RdmaSpec,
    pub(super) own: Peer,
    pub(super) irqs: Arc<Irqs>,
    doorbells: Arc<Doorbells>,
    /// For doorbells that the VMM maps.
    lookout: Option<Box<Lookout>>,
    pub(super) engine: Engine<Mlx5>,
    pub(super) objects: Objects,
    pub(super) ether: EtherState,
    pub(super) path: EtherPath,
    pub(super) addresses: Addresses,
    /// A bit for each GID that changed and that nobody took yet.
    pub(super) gid_news: u16,
    /// Interface step sequence id that driver and device agreed on.
    pub(super) issi: u16,
    /// Whether the driver asked for the host's byte order in what atomics return.
    pub(super) host_atomics: bool,
    pub(super) running: bool,
    pub(super) link_up: bool,
    link_news: bool,
    /// Events that found no room in their queue.
    pub(super) lost_events: u64,
    /// The command that made the queue for command events: its driver still polls for it.
    pub(super) polled_slot: Option<u8>,
    /// What outlives the process.
    pub(super) kept: KeptDevice,
    /// The index that the next memory key had in a former process.
    pub(super) forced_mkey: Option<u32>,
}

impl Device {
    /// Function `own` without a driver.
    pub fn new(spec: RdmaSpec, own: Peer, irqs: Arc<Irqs>, doorbells: Arc<Doorbells>) -> Self {
        Self {
            link_up: spec.link_up,
            addresses: addresses(&spec),
            ether: EtherState::new(spec.mac, spec.mtu),
            path: EtherPath::new(spec.mtu),
            spec,
            own,
            irqs,
            doorbells,
            lookout: None,
            engine: Engine::new(own),
            objects: Objects::new(),
            gid_news: 0,
            issi: 0,
            host_atomics: false,
            running: false,
            link_news: false,
            lost_events: 0,
            polled_slot: None,
            kept: KeptDevice::default(),
            forced_mkey: None,
        }
    }

    /// The VMM maps these doorbell pages; the device is new.
    pub fn map_doorbells(&mut self, pages: Arc<MappedPages>) {
        self.lookout = Some(Box::new(Lookout::new(pages)));
    }

    /// The transport engine.
    pub fn engine(&mut self) -> &mut Engine<Mlx5> {
        &mut self.engine
    }

    /// Objects of the network interface of an Ethernet port, for the frame data path.
    pub fn ether(&mut self) -> &mut EtherState {
        &mut self.ether
    }

    /// LID and GIDs at present.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Whether a driver has the function in use: between INIT_HCA and TEARDOWN_HCA.
    pub fn running(&self) -> bool {
        self.running
    }

    /// A GID that the driver changed: index and value, all zeroes when it removed it.
    pub fn take_gid_change(&mut self) -> Option<(u16, [u8; 16])> {
        let index = (self.gid_news != 0).then(|| self.gid_news.trailing_zeros())?;
        self.gid_news &= self.gid_news - 1;
        let gid = self.addresses.gids.get(index as usize).copied();
        Some((index as u16, gid.unwrap_or_default()))
    }

    /// Whether the port is up; the driver gets an event in the next turn.
    pub fn set_link(&mut self, up: bool) {
        self.link_news |= self.link_up != up;
        self.link_up = up;
    }

    /// Forgets all that a driver made; nothing of its memory is touched after this.
    pub fn reset(&mut self) {
        self.forget_objects();
        self.issi = 0;
        self.link_news = false;
        self.doorbells.clear();
        self.kept.clear();
    }

    /// As a teardown leaves it.
    pub(super) fn forget_objects(&mut self) {
        self.running = false;
        self.engine.clear();
        self.objects = Objects::new();
        let counters = std::mem::take(&mut self.ether.counters);
        let revision = self.ether.revision();
        self.ether = EtherState::new(self.spec.mac, self.spec.mtu);
        self.ether.go_on_from(counters, revision);
        self.path = EtherPath::new(self.spec.mtu);
        if let Some(kept) = self.kept.get() {
            self.path.keep_in(kept.clone());
        }
        self.polled_slot = None;
        self.host_atomics = false;
        if let Some(lookout) = &mut self.lookout {
            lookout.clear();
        }
        for (index, gid) in self.addresses.gids.iter().enumerate() {
            if self.spec.link == RdmaLinkLayer::Ethernet && *gid != [0; 16] {
                self.gid_news |= 1 << index;
            }
        }
        self.addresses = addresses(&self.spec);
    }

    /// Where a command's queue pair is to be connected to: what `path` of [`Self::execute`] is about.
    pub fn destination(&self, command: &Command) -> Option<Destination> {
        match command.opcode {
            op::INIT2RTR_QP => self.qp_destination(command),
            _ => None,
        }
    }

    /// Executes a command and answers its output. A command that [`Self::destination`] has an answer
    /// for fails without `path`.
    pub fn execute(
        &mut self,
        command: &Command,
        path: Option<Path>,
        cx: &mut Context<'_>,
    ) -> Vec<u8> {
        if let Some(output) = self.kept.owed(command) {
            return output;
        }
        let mut output = Output::new();
        let result = self.dispatch(command, path, cx, &mut output);
        self.path.follow(&self.ether);
        match result {
            Ok(()) => {
                self.look_out(command, output.index(), false);
                self.keep_command(command, &output);
                output.into_bytes()
            }
            Err(status) => {
                log::debug!("command {:#x} failed: {status}", command.opcode);
                self.kept.begin(command, false);
                failure(command.opcode, status)
            }
        }
    }

    pub(super) fn look_out(&mut self, command: &Command, made: u32, again: bool) {
        if let Some(lookout) = &mut self.lookout {
            lookout.follow(command, made, again);
        }
    }

    pub(super) fn dispatch(
        &mut self,
        command: &Command,
        path: Option<Path>,
        cx: &mut Context<'_>,
        out: &mut Output,
    ) -> Result<(), Status> {
        if let Some(result) = self.execute_hca(command, out) {
            return result;
        }
        if !self.running {
            return Err(Status::BadSystemState);
        }
        if let Some(result) = self.execute_object(command, path, cx, out) {
            return result;
        }
        if self.spec.link == RdmaLinkLayer::Ethernet {
            let result = self
                .execute_vport(command, out)
                .or_else(|| self.execute_flow(command, out))
                .or_else(|| self.execute_ether(command, out));
            if let Some(result) = result {
                return result;
            }
        }
        Err(Status::BadOperation)
    }

    /// Commands for which INIT_HCA must have been.
    fn execute_object(
        &mut self,
        command: &Command,
        path: Option<Path>,
        cx: &mut Context<'_>,
        out: &mut Output,
    ) -> Option<Result<(), Status>> {
        Some(match command.opcode {
            op::CREATE_EQ => self.create_eq(command, out),
            op::DESTROY_EQ => self.destroy_eq(command),
            op::QUERY_EQ => self.query_eq(command, out),
            op::CREATE_CQ => self.create_cq(command, out),
            op::DESTROY_CQ => self.destroy_cq(command),
            op::QUERY_CQ => self.query_cq(command, out),
            op::MODIFY_CQ => self.modify_cq(command, cx),
            op::CREATE_QP => self.create_qp(command, out),
            op::DESTROY_QP => self.destroy_qp(command),
            op::QUERY_QP => self.query_qp(command, out),
            op::RST2INIT_QP
            | op::INIT2INIT_QP
            | op::INIT2RTR_QP
            | op::RTR2RTS_QP
            | op::RTS2RTS_QP
            | op::SQERR2RTS_QP
            | op::SQD_RTS_QP
            | op::QP_2ERR
            | op::QP_2RST => self.modify_qp(command, path, cx),
            op::CREATE_MKEY => self.create_mkey(command, out),
            op::DESTROY_MKEY => self.destroy_mkey(command),
            op::QUERY_MKEY => self.query_mkey(command, out),
            op::QUERY_SPECIAL_CONTEXTS => self.query_special_contexts(out),
            op::CREATE_SRQ | op::CREATE_XRC_SRQ | op::CREATE_RMP => self.create_srq(command, out),
            op::DESTROY_SRQ | op::DESTROY_XRC_SRQ | op::DESTROY_RMP => self.destroy_srq(command),
            op::QUERY_SRQ | op::QUERY_XRC_SRQ | op::QUERY_RMP => self.query_srq(command, out),
            op::ARM_RQ | op::ARM_XRC_SRQ | op::MODIFY_RMP => self.arm_srq(command),
            op::ALLOC_PD => self.alloc_pd(out),
            op::DEALLOC_PD => self.dealloc_pd(command),
            op::ALLOC_UAR => self.objects.uars.add(()).map(|n| out.set_index(n)),
            op::DEALLOC_UAR => self.objects.uars.remove(command.index(), false),
            op::ALLOC_XRCD => self.objects.xrcds.add(()).map(|n| out.set_index(n)),
            op::DEALLOC_XRCD => self.objects.xrcds.remove(command.index(), false),
            op::QUERY_HCA_VPORT_CONTEXT => self.query_hca_vport_context(command, out),
            op::MODIFY_HCA_VPORT_CONTEXT => self.modify_hca_vport_context(command),
            op::QUERY_HCA_VPORT_GID => self.query_hca_vport_gid(command, out),
            op::QUERY_HCA_VPORT_PKEY => self.query_hca_vport_pkey(command, out),
            op::MAD_IFC => self.mad_ifc(command, out),
            op::NOP => Ok(()),
            _ => return None,
        })
    }

    /// One round: doorbells, the engine, frames on `links`, events. Answers whether anything was
    /// done.
    pub fn turn(&mut self, cx: &mut Context<'_>, links: &mut Links) -> bool {
        let mut worked = self.take_doorbells(cx.memory);
        worked |= self.engine.turn(cx);
        worked |= self.move_frames(cx.memory, links);
        while let Some(notice) = self.engine.take_notice() {
            self.report(notice, cx.memory);
            worked = true;
        }
        if std::mem::take(&mut self.link_news) {
            self.post(&Eqe::port(self.link_up), cx.memory);
            worked = true;
        }
        if let Some(lookout) = &mut self.lookout {
            lookout.came_round(worked);
        }
        worked
    }

    /// Frames go nowhere, for the function cannot take them now. Answers whether there were any.
    pub fn discard_frames(&mut self, links: &mut Links) -> bool {
        discard(links, &mut self.ether.counters)
    }

    fn move_frames(&mut self, memory: &DotView<'_>, links: &mut Links) -> bool {
        if !self.running {
            return self.discard_frames(links);
        }
        let mut events = SmallVec::<[(u32, Pushed); 8]>::new();
        let (regions, mut cqs) = self.engine.regions_and_cqs();
        let mut complete = |cqn, cqe| {
            let pushed = cqs
                .get_mut(CqNum(cqn))
                .map_or(Pushed::Overrun, |cq| cq.push_raw(cqe, memory));
            if pushed != Pushed::Stored {
                events.push((cqn, pushed));
            }
            pushed
        };
        let worked = self.path.turn(&mut EtherContext {
            view: memory,
            regions,
            links,
            complete: &mut complete,
            counters: &mut self.ether.counters,
            link_up: self.link_up,
        });
        for sqn in self.path.take_failed() {
            if let Ok(queue) = self.ether.sqs.get_mut(sqn) {
                queue.state = QueueState::Error;
            }
        }
        for (cqn, pushed) in events {
            match pushed {
                Pushed::Overrun => {
                    self.post(&Eqe::cq_error(cqn), memory);
                }
                _ => self.post_completion(cqn, memory),
            }
        }
        worked
    }

    /// Before sleep: whether there are frames to be moved.
    pub fn has_frames(&mut self, links: &Links, memory: &DotView<'_>) -> bool {
        self.path.is_busy(links, memory)
    }

    /// Whether a frame waits for a receive entry; it is looked for at [`Self::patience`].
    pub fn waits_for_receives(&self) -> bool {
        self.path.waits_for_receives()
    }

    /// Before sleep: whether a doorbell waits.
    pub fn is_rung(&self) -> bool {
        self.doorbells.is_rung() || self.lookout.as_ref().is_some_and(|l| l.is_rung())
    }

    /// How long doorbells that nothing tells of may be left alone.
    pub(super) fn look_again(&self) -> Option<Duration> {
        self.lookout.as_ref()?.patience()
    }

    /// Where doorbells turn up without a word, when there is nothing else to wait for.
    pub fn watch(&self) -> Option<Watch> {
        self.lookout.as_ref()?.watch()
    }

    /// The data path slept, or meant to: doorbells that nothing tells of may be there.
    pub fn woke(&mut self) {
        if let Some(lookout) = &mut self.lookout {
            lookout.woke();
        }
    }

    fn take_doorbells(&mut self, memory: &DotView<'_>) -> bool {
        let mut worked = false;
        let doorbells = self.doorbells.clone();
        // Its own place is empty meanwhile.
        let mut lookout = self.lookout.take();
        if let Some(lookout) = &mut lookout {
            lookout.take(&doorbells);
        }
        let (eqs, irqs) = (&mut self.objects.eqs, &self.irqs);
        doorbells.take_eqs(|number, index, arm| {
            worked = true;
            if let Ok(eq) = eqs.get_mut(number) {
                eq.update(index, arm, irqs);
            }
        });
        doorbells.take_cqs(|number| {
            worked = true;
            if let Some(lookout) = &mut lookout {
                lookout.cqs.rang(number);
            }
            let due = self.engine.cq_mut(CqNum(number)).is_some_and(|cq| {
                // What was seen in its record before must not arm it twice.
                match lookout.is_some() {
                    true => cq.poll_arm(memory).1,
                    false => cq.arm(memory),
                }
            });
            if due {
                self.post_completion(number, memory);
            }
        });
        doorbells.take_sends(|number| {
            worked = true;
            if let Some(lookout) = &mut lookout {
                lookout.sends.rang(number);
            }
            match number < FIRST_SQ {
                true => self.engine.ring(QpNum(number)),
                false => self.path.ring(number),
            }
        });
        if let Some(lookout) = &mut lookout {
            worked |= self.look_at_records(lookout, memory);
        }
        self.lookout = lookout;
        worked
    }

    /// Finds what was posted or armed by doorbells that others overwrote.
    fn look_at_records(&mut self, lookout: &mut Lookout, memory: &DotView<'_>) -> bool {
        let mut due = SmallVec::<[u32; 8]>::new();
        let (engine, path) = (&mut self.engine, &mut self.path);
        let sends = lookout.look_at_sends(|number| match number < FIRST_SQ {
            true => engine.look(QpNum(number), |send| send.is_posted(memory)),
            false => path.look(number, memory),
        });
        let cqs = lookout.look_at_cqs(|number| {
            let cq = engine.cq_mut(CqNum(number));
            let (armed, is_due) = cq.map_or((false, false), |cq| cq.poll_arm(memory));
            if is_due {
                due.push(number);
            }
            armed
        });
        for number in due {
            self.post_completion(number, memory);
        }
        sends || cqs
    }
}

/// Addresses without a driver's doing.
fn addresses(spec: &RdmaSpec) -> Addresses {
    match spec.link {
        // The default GID: link-local prefix and port GUID.
        RdmaLinkLayer::Infiniband => {
            let gid = 0xfe80u128 << 112 | u128::from(spec.guid);
            Addresses {
                lid: spec.lid,
                gids: vec![gid.to_be_bytes()],
            }
        }
        RdmaLinkLayer::Ethernet => Addresses {
            lid: 0,
            gids: vec![[0; 16]; MAX_GIDS],
        },
    }
}

#[cfg(test)]
mod tests;
