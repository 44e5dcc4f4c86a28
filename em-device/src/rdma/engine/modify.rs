//! States and what may be set on the way between them (IBTA 1.5 §10.3.1, §11.2.5.2).

use super::qp::{Attributes, Qp};
use super::{Context, Engine, Refused};
use crate::rdma::verbs::{Front, QpChange, QpNum, QpState, SendQueue, Service};

/// An attribute of [`QpChange`], as a bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Set(u16);

const REMOTE_RIGHTS: u16 = 1;
const QKEY: u16 = 1 << 1;
const DEST_QP: u16 = 1 << 2;
const PATH: u16 = 1 << 3;
const MTU: u16 = 1 << 4;
const RECEIVE_PSN: u16 = 1 << 5;
const SEND_PSN: u16 = 1 << 6;
const MIN_RNR_TIMER: u16 = 1 << 7;
const TIMEOUT: u16 = 1 << 8;
const RETRY_COUNT: u16 = 1 << 9;
const RNR_RETRY: u16 = 1 << 10;
const MAX_READS: u16 = 1 << 11;
const MAX_DEST_READS: u16 = 1 << 12;

/// Names in the order of the bits.
const NAMES: [&str; 13] = [
    "remote_rights",
    "qkey",
    "dest_qp",
    "path",
    "mtu",
    "receive_psn",
    "send_psn",
    "min_rnr_timer",
    "timeout",
    "retry_count",
    "rnr_retry",
    "max_reads",
    "max_dest_reads",
];

impl Set {
    fn of(change: &QpChange) -> Self {
        let present = [
            change.remote_rights.is_some(),
            change.qkey.is_some(),
            change.dest_qp.is_some(),
            change.path.is_some(),
            change.mtu.is_some(),
            change.receive_psn.is_some(),
            change.send_psn.is_some(),
            change.min_rnr_timer.is_some(),
            change.timeout.is_some(),
            change.retry_count.is_some(),
            change.rnr_retry.is_some(),
            change.max_reads.is_some(),
            change.max_dest_reads.is_some(),
        ];
        let bits = present.iter().enumerate();
        Self(bits.fold(0, |set, (bit, there)| set | u16::from(*there) << bit))
    }

    fn first_name(self) -> Option<&'static str> {
        NAMES.get(self.0.trailing_zeros() as usize).copied()
    }

    fn has(self, bit: u16) -> bool {
        self.0 & bit != 0
    }
}

/// Attributes that a transition needs, and others that it may set; `None` when there is no such
/// transition (IBTA 1.5 table 91 and following).
pub(super) fn rules(from: QpState, to: QpState, service: Service) -> Option<(Set, Set)> {
    use QpState::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let (rc, uc, ud) = (
        service == Service::Rc,
        service == Service::Uc,
        service == Service::Ud,
    );
    let identity = if ud { QKEY } else { REMOTE_RIGHTS };
    let connection = DEST_QP | PATH | MTU | RECEIVE_PSN;
    // What a queue pair at work may change.
    let working = match service {
        Service::Rc => REMOTE_RIGHTS | MIN_RNR_TIMER,
        Service::Uc => REMOTE_RIGHTS,
        Service::Ud => QKEY,
    };
    let (needed, optional) = match (from, to) {
        (_, Reset | Error) => (0, 0),
        (Reset, Init) => (identity, 0),
        (Init, Init) => (0, identity),
        (Init, Rtr) if rc => (connection | MIN_RNR_TIMER | MAX_DEST_READS, REMOTE_RIGHTS),
        (Init, Rtr) if uc => (connection, REMOTE_RIGHTS),
        (Init, Rtr) => (0, QKEY | MTU),
        (Rtr, Rts) if rc => (
            SEND_PSN | TIMEOUT | RETRY_COUNT | RNR_RETRY | MAX_READS,
            working,
        ),
        (Rtr, Rts) => (SEND_PSN, working),
        (Rts, Rts) | (Sqd, Rts) => (0, working),
        (Sqe, Rts) if !rc => (0, working),
        (Rts, Sqd) => (0, 0),
        (Sqd, Sqd) if rc => (
            0,
            working | PATH | TIMEOUT | RETRY_COUNT | RNR_RETRY | MAX_READS | MAX_DEST_READS,
        ),
        (Sqd, Sqd) if uc => (0, working | PATH),
        (Sqd, Sqd) => (0, working),
        _ => return None,
    };
    Some((Set(needed), Set(needed | optional)))
}

/// Sets what `allowed` names.
fn apply(
    attributes: &mut Attributes,
    change: &QpChange,
    allowed: Set,
) -> Result<(Option<u32>, Option<u32>), Refused> {
    const PSN_END: u32 = 1 << super::psn::BITS;
    fn pick<T>(value: Option<T>, allowed: bool) -> Option<T> {
        value.filter(|_| allowed)
    }
    fn below<T: Copy + Into<u32>>(
        value: Option<T>,
        end: u32,
        name: &'static str,
    ) -> Result<Option<T>, Refused> {
        match value {
            Some(value) if value.into() >= end => Err(Refused::Attribute(name)),
            value => Ok(value),
        }
    }
    if let Some(rights) = pick(change.remote_rights, allowed.has(REMOTE_RIGHTS)) {
        attributes.remote_rights = rights;
    }
    if let Some(qkey) = pick(change.qkey, allowed.has(QKEY)) {
        attributes.qkey = qkey;
    }
    if let Some(dest) = pick(change.dest_qp, allowed.has(DEST_QP)) {
        below(Some(dest.0), PSN_END, "dest_qp")?;
        attributes.dest_qp = dest;
    }
    if let Some(path) = pick(change.path, allowed.has(PATH)) {
        attributes.path = Some(path);
    }
    if let Some(mtu) = pick(change.mtu, allowed.has(MTU)) {
        if !mtu.is_power_of_two() || !(256..=4096).contains(&mtu) {
            return Err(Refused::Attribute("mtu"));
        }
        attributes.mtu_shift = mtu.trailing_zeros();
    }
    let code = |value, bit, end, name| below(pick(value, allowed.has(bit)), end, name);
    if let Some(timer) = code(change.min_rnr_timer, MIN_RNR_TIMER, 32, "min_rnr_timer")? {
        attributes.min_rnr_timer = timer;
    }
    if let Some(timeout) = code(change.timeout, TIMEOUT, 32, "timeout")? {
        attributes.timeout = timeout;
    }
    if let Some(count) = pick(change.retry_count, allowed.has(RETRY_COUNT)) {
        if count != QpChange::PATIENT {
            below(Some(count), 8, "retry_count")?;
        }
        attributes.retry_count = count;
    }
    if let Some(count) = code(change.rnr_retry, RNR_RETRY, 8, "rnr_retry")? {
        attributes.rnr_retry = count;
    }
    if let Some(reads) = code(change.max_reads, MAX_READS, 129, "max_reads")? {
        attributes.max_reads = reads.into();
    }
    if let Some(reads) = code(change.max_dest_reads, MAX_DEST_READS, 129, "max_dest_reads")? {
        attributes.max_dest_reads = reads.into();
    }
    let psn = |value, bit, name| below(pick(value, allowed.has(bit)), PSN_END, name);
    Ok((
        psn(change.receive_psn, RECEIVE_PSN, "receive_psn")?,
        psn(change.send_psn, SEND_PSN, "send_psn")?,
    ))
}

impl<F: Front> Engine<F> {
    /// Changes state and attributes (IBTA 1.5 §11.2.5.2); `to` may be the present state. Attributes
    /// that the transition may not set are left as they are.
    ///
    /// Errors: [`Refused::Unknown`]; [`Refused::Transition`]; [`Refused::Attribute`], and nothing is
    /// changed then.
    pub fn modify_qp(
        &mut self,
        num: QpNum,
        to: QpState,
        change: &QpChange,
        cx: &mut Context<'_>,
    ) -> Result<(), Refused> {
        let qp = self.qps.get_mut(num.0).ok_or(Refused::Unknown)?;
        let from = qp.state;
        let refused = Refused::Transition(from, to);
        let (needed, allowed) = rules(from, to, qp.service).ok_or(refused)?;
        if (from, to) == (QpState::Sqd, QpState::Sqd) && qp.draining {
            return Err(refused);
        }
        let missing = Set(needed.0 & !Set::of(change).0);
        if let Some(name) = missing.first_name() {
            return Err(Refused::Attribute(name));
        }
        let mut attributes = qp.attributes.clone();
        let (receive_psn, send_psn) = apply(&mut attributes, change, allowed)?;
        qp.attributes = attributes;
        if let Some(psn) = receive_psn {
            qp.responder.start(psn);
        }
        if let Some(psn) = send_psn {
            qp.requester.start(psn);
        }
        match to {
            QpState::Reset => qp.reset(),
            QpState::Error => qp.enter_error(&mut self.shared, cx),
            QpState::Sqd if from == QpState::Rts => drain(qp, &mut self.shared),
            _ => qp.state = to,
        }
        if qp.requester.flight.is_empty() {
            qp.sends_done = crate::rdma::kept::Finished {
                position: qp.send.as_ref().map_or(0, SendQueue::position),
                psn: qp.requester.next_psn,
            };
        }
        if matches!(qp.state, QpState::Rts | QpState::Error) {
            // What was posted before has not been looked at.
            qp.rung |= qp.state == QpState::Rts;
            self.mark(num);
        }
        Ok(())
    }
}

fn drain<F: Front>(qp: &mut Qp<F>, shared: &mut super::tables::Shared<F>) {
    qp.state = QpState::Sqd;
    qp.draining = !qp.requester.flight.is_empty();
    if !qp.draining {
        shared.notices.push(super::Notice::SendQueueDrained(qp.num));
    }
}
