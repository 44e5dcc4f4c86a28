//! Changes of a queue pair's state and attributes.
//!
//! The saved context is what a queue pair is: a command's required and optional fields are copied
//! into it, and what the engine gets comes from there.

use super::super::super::Device;
use super::super::super::bits::{Field, array, put};
use super::super::super::fields::qpc;
use super::super::{Command, Status, opcode as op};
use super::{Kind, QpObject};
use crate::rdma::engine::Context;
use crate::rdma::verbs::{Destination, Path, Peer, QpChange, QpNum, QpState, Rights};
use m2m_fabric::proto::RdmaLinkLayer;

/// Optional parameters (`MLX5_QP_OPTPAR_*`): a bit of `opt_param_mask` and the field.
const OPTIONAL: [(u32, Field); 10] = [
    (1 << 1, qpc::RRE),
    (1 << 2, qpc::RAE),
    (1 << 3, qpc::RWE),
    (1 << 4, qpc::PKEY_INDEX),
    (1 << 5, qpc::Q_KEY),
    (1 << 6, qpc::MIN_RNR_NAK),
    (1 << 8, qpc::LOG_SRA_MAX),
    (1 << 9, qpc::LOG_RRA_MAX),
    (1 << 12, qpc::RETRY_COUNT),
    (1 << 13, qpc::RNR_RETRY),
];
/// ACK_TIMEOUT, which lies in the path.
const OPTIONAL_TIMEOUT: u32 = 1 << 14;
const RIGHTS: u32 = 1 << 1 | 1 << 2 | 1 << 3;

/// Fields that RST2INIT takes.
const TO_INIT: [Field; 7] = [
    qpc::RRE,
    qpc::RWE,
    qpc::RAE,
    qpc::ATOMIC_MODE,
    qpc::PKEY_INDEX,
    qpc::VHCA_PORT_NUM,
    qpc::Q_KEY,
];
/// Fields that INIT2RTR takes beside the path.
const TO_RTR: [Field; 6] = [
    qpc::MTU,
    qpc::LOG_MSG_MAX,
    qpc::REMOTE_QPN,
    qpc::NEXT_RCV_PSN,
    qpc::LOG_RRA_MAX,
    qpc::MIN_RNR_NAK,
];
/// Fields that RTR2RTS takes.
const TO_RTS: [Field; 5] = [
    qpc::NEXT_SEND_PSN,
    qpc::RETRY_COUNT,
    qpc::RNR_RETRY,
    qpc::ACK_TIMEOUT,
    qpc::LOG_SRA_MAX,
];

/// The answer for a queue pair that registers memory: itself, which nobody revokes.
fn own_path(own: Peer) -> Path {
    Path {
        peer: own,
        generation: u64::MAX,
    }
}

/// The context after a command, which has the new values in `new`.
fn merge(object: &QpObject, opcode: u16, new: &[u8], mask: u32) -> [u8; qpc::LEN] {
    let mut context = object.context;
    let required: &[Field] = match opcode {
        op::RST2INIT_QP => &TO_INIT,
        op::INIT2RTR_QP => {
            let timeout = qpc::ACK_TIMEOUT.get(&context);
            let pkey = qpc::PKEY_INDEX.get(&context);
            let path = new.get(qpc::PATH).unwrap_or_default();
            put(&mut context, qpc::PATH.start, path);
            qpc::ACK_TIMEOUT.set(&mut context, timeout);
            qpc::PKEY_INDEX.set(&mut context, pkey);
            &TO_RTR
        }
        op::RTR2RTS_QP => &TO_RTS,
        _ => &[],
    };
    for field in required {
        field.copy(new, &mut context);
    }
    for (bit, field) in OPTIONAL {
        if mask & bit != 0 {
            field.copy(new, &mut context);
        }
    }
    if mask & RIGHTS != 0 {
        qpc::ATOMIC_MODE.copy(new, &mut context);
    }
    if mask & OPTIONAL_TIMEOUT != 0 {
        qpc::ACK_TIMEOUT.copy(new, &mut context);
    }
    context
}

/// Path MTU in bytes (IBTA 1.5 §9.4.3's codes).
fn mtu(context: &[u8]) -> Result<u16, Status> {
    match qpc::MTU.get(context) {
        code @ 1..=5 => Ok(128 << code),
        _ => Err(Status::BadParameter),
    }
}

/// What a command changes, from the context as it will be.
fn change(
    kind: Kind,
    (opcode, mask): (u16, u32),
    num: u32,
    context: &[u8],
    path: Option<Path>,
) -> Result<QpChange, Status> {
    let mut change = QpChange::default();
    let small = |field: Field| Some(field.get(context) as u8);
    if opcode == op::RST2INIT_QP || mask & RIGHTS != 0 {
        change.remote_rights = Some(
            Rights::REMOTE_READ.when(qpc::RRE.is_set(context))
                | Rights::REMOTE_WRITE.when(qpc::RWE.is_set(context))
                | Rights::REMOTE_ATOMIC.when(qpc::RAE.is_set(context)),
        );
    }
    if opcode == op::RST2INIT_QP || mask & 1 << 5 != 0 {
        change.qkey = Some(qpc::Q_KEY.get(context));
    }
    if opcode == op::INIT2RTR_QP && kind == Kind::Umr {
        change.dest_qp = Some(QpNum(num));
        change.path = path;
        change.mtu = Some(4096);
        change.receive_psn = Some(0);
    } else if opcode == op::INIT2RTR_QP && kind.connects() {
        change.dest_qp = Some(QpNum(qpc::REMOTE_QPN.get(context)));
        change.path = path;
        change.mtu = Some(mtu(context)?);
        change.receive_psn = Some(qpc::NEXT_RCV_PSN.get(context));
    } else if opcode == op::INIT2RTR_QP {
        change.mtu = mtu(context).ok();
    }
    if opcode == op::INIT2RTR_QP || mask & 1 << 6 != 0 {
        change.min_rnr_timer = small(qpc::MIN_RNR_NAK);
    }
    if opcode == op::INIT2RTR_QP || mask & 1 << 9 != 0 {
        change.max_dest_reads = Some(1 << qpc::LOG_RRA_MAX.get(context));
    }
    let to_rts = opcode == op::RTR2RTS_QP;
    if to_rts {
        change.send_psn = Some(qpc::NEXT_SEND_PSN.get(context));
    }
    if to_rts || mask & 1 << 8 != 0 {
        change.max_reads = Some(1 << qpc::LOG_SRA_MAX.get(context));
    }
    if to_rts || mask & 1 << 12 != 0 {
        change.retry_count = small(qpc::RETRY_COUNT);
    }
    if to_rts || mask & 1 << 13 != 0 {
        change.rnr_retry = small(qpc::RNR_RETRY);
    }
    if to_rts || mask & OPTIONAL_TIMEOUT != 0 {
        change.timeout = small(qpc::ACK_TIMEOUT);
    }
    Ok(change)
}

impl Device {
    /// Where INIT2RTR is to connect a queue pair to.
    pub(in super::super::super) fn qp_destination(&self, command: &Command) -> Option<Destination> {
        let object = self.objects.qps.get(command.index()).ok()?;
        if !object.kind.connects() {
            return None;
        }
        let context = command.context::<{ qpc::LEN }>(qpc::AT);
        let ethernet = self.spec.link == RdmaLinkLayer::Ethernet;
        // On Ethernet there is always a GID, and the flag is not used.
        let grh = ethernet || qpc::GRH.is_set(&context);
        Some(Destination {
            lid: match ethernet {
                true => 0,
                false => qpc::RLID.get(&context) as u16,
            },
            gid: grh.then(|| array(&context, qpc::RGID)),
            mac: match ethernet {
                true => array(&context, qpc::RMAC),
                false => [0; 6],
            },
        })
    }

    pub(in super::super::super) fn modify_qp(
        &mut self,
        command: &Command,
        path: Option<Path>,
        cx: &mut Context<'_>,
    ) -> Result<(), Status> {
        let num = command.index();
        let object = self.objects.qps.get(num)?;
        let kind = object.kind;
        let current = self.engine.qp(QpNum(num)).ok_or(Status::BadResource)?;
        let (from, to) = match command.opcode {
            op::RST2INIT_QP => (Some(QpState::Reset), QpState::Init),
            op::INIT2INIT_QP => (Some(QpState::Init), QpState::Init),
            op::INIT2RTR_QP => (Some(QpState::Init), QpState::Rtr),
            op::RTR2RTS_QP => (Some(QpState::Rtr), QpState::Rts),
            op::RTS2RTS_QP => (Some(QpState::Rts), QpState::Rts),
            op::SQERR2RTS_QP => (Some(QpState::Sqe), QpState::Rts),
            op::SQD_RTS_QP => (Some(QpState::Sqd), QpState::Rts),
            op::QP_2ERR => (None, QpState::Error),
            op::QP_2RST => (None, QpState::Reset),
            _ => return Err(Status::BadOperation),
        };
        if from.is_some_and(|from| from != current.state) {
            return Err(Status::BadQpState);
        }
        // Commands without a context have nothing where the mask is.
        let mask = match from {
            Some(_) => command.get(qpc::OPT_PARAM_MASK),
            None => 0,
        };
        let path = match kind {
            Kind::Umr => Some(own_path(self.own)),
            _ => path,
        };
        if command.opcode == op::INIT2RTR_QP && kind.connects() && path.is_none() {
            return Err(Status::BadParameter);
        }
        let new = command.context::<{ qpc::LEN }>(qpc::AT);
        let context = merge(object, command.opcode, &new, mask);
        let change = change(kind, (command.opcode, mask), num, &context, path)?;
        self.engine.modify_qp(QpNum(num), to, &change, cx)?;
        self.objects.qps.get_mut(num)?.context = context;
        Ok(())
    }
}
