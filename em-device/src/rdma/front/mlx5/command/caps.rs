//! QUERY_HCA_CAP: what the function says it can do. What is not set is not there.

use super::super::bits::{Field, put};
use super::super::device::MAX_GIDS;
use super::{Command, Output, Status, cq, qp, srq};
use crate::rdma::verbs::Peer;
use m2m_fabric::proto::{RdmaLinkLayer, RdmaSpec};

/// Where the block is in the reply, and its bytes.
const AT: usize = 0x10;
const LEN: usize = 0x1000;

/// Capability types (`MLX5_CAP_*`): `op_mod` is type · 2 + 1 for the current values, + 0 for the
/// largest. They are the same here.
mod kind {
    pub(super) const GENERAL: u16 = 0;
    pub(super) const ETHERNET_OFFLOADS: u16 = 1;
    pub(super) const ODP: u16 = 2;
    pub(super) const ATOMIC: u16 = 3;
    pub(super) const ROCE: u16 = 4;
    pub(super) const FLOW_TABLE: u16 = 7;
}

/// Rate of the free running clock in the initialization segment, which counts nanoseconds.
const CLOCK_KHZ: u32 = 1_000_000;

type Value = (Field, u32);

const fn value(byte: usize, bit: u8, width: u8, value: u32) -> Value {
    (Field::new(byte, bit, width), value)
}

/// `cmd_hca_cap`, for both kinds of port.
const GENERAL: &[Value] = &[
    value(0x0, 6, 1, 1),                  // page_request_disable
    value(0x10, 0, 8, srq::MAX_LOG_SIZE), // log_max_srq_sz
    value(0x11, 0, 8, qp::MAX_LOG_SIZE),  // log_max_qp_sz
    value(0x13, 3, 5, 16),                // log_max_qp
    value(0x15, 3, 5, 16),                // log_max_srq
    value(0x19, 0, 8, cq::MAX_LOG_SIZE),  // log_max_cq_sz
    value(0x1b, 3, 5, 16),                // log_max_cq
    value(0x1d, 2, 6, 20),                // log_max_mkey
    value(0x1f, 4, 4, 5),                 // log_max_eq
    value(0x21, 1, 7, 40),                // log_max_mrw_sz
    value(0x23, 0, 1, 1),                 // umr_extended_translation_offset
    value(0x29, 2, 6, 4),                 // log_max_ra_req_qp
    value(0x2b, 2, 6, 4),                 // log_max_ra_res_qp
    value(0x35, 3, 5, 16),                // local_ca_ack_delay
    value(0x37, 0, 8, 1),                 // num_ports
    value(0x38, 3, 5, 30),                // log_max_msg
    value(0x3f, 4, 4, 1),                 // cqe_version
    value(0x43, 6, 1, 1),                 // atomic
    value(0x44, 0, 1, 1),                 // cq_oi
    value(0x44, 1, 1, 1),                 // cq_resize
    value(0x44, 2, 1, 1),                 // cq_moderation
    value(0x44, 7, 1, 1),                 // pg
    value(0x47, 4, 1, 1),                 // xrc: drivers insist, queue pairs are refused
    value(0x47, 5, 1, 1),                 // ud
    value(0x47, 6, 1, 1),                 // uc
    value(0x47, 7, 1, 1),                 // rc
    value(0x4d, 3, 5, 9), // log_bf_reg_size: distance of send doorbells; bf itself is off
    value(0x56, 0, 16, 256), // max_wqe_sz_rq
    value(0x65, 3, 5, 16), // log_max_pd
    value(0x67, 3, 5, 16), // log_max_xrcd
    value(0x9c, 0, 32, CLOCK_KHZ), // device_frequency_khz
];

/// `cmd_hca_cap`, InfiniBand ports.
const INFINIBAND: &[Value] = &[
    value(0x34, 2, 1, 1),    // ib_virt
    value(0x52, 0, 16, 512), // max_wqe_sz_sq
];

/// `cmd_hca_cap`, Ethernet ports.
const ETHERNET: &[Value] = &[
    value(0x34, 6, 1, 1),     // nic_flow_table
    value(0x36, 6, 2, 1),     // port_type
    value(0x43, 4, 1, 1),     // eth_net_offloads
    value(0x43, 5, 1, 1),     // roce
    value(0x52, 0, 16, 1024), // max_wqe_sz_sq
    value(0x6c, 3, 5, 10),    // log_max_rq
    value(0x6d, 3, 5, 10),    // log_max_sq
    value(0x6e, 3, 5, 10),    // log_max_tir
    value(0x6f, 3, 5, 10),    // log_max_tis
    value(0x71, 3, 5, 10),    // log_max_rqt
    value(0x72, 3, 5, 8),     // log_max_rqt_size
    value(0x7b, 3, 5, 13),    // log_max_wq_sz
    value(0x7d, 3, 5, 7),     // log_max_vlan_list
    value(0x7e, 3, 5, 7),     // log_max_current_mc_list
    value(0x7f, 3, 5, 7),     // log_max_current_uc_list
];

/// `atomic_caps`.
const ATOMIC: &[Value] = &[
    value(0x8, 6, 1, 1),   // supported_atomic_req_8B_endianness_mode_1
    value(0x12, 0, 16, 3), // atomic_operations: compare and swap, fetch and add
    value(0x16, 0, 16, 8), // atomic_size_qp
];

/// `roce_cap`.
const ROCE: &[Value] = &[
    value(0x11, 4, 4, 6),                // l3_type: IPv4 and IPv6
    value(0x13, 0, 8, 4),                // roce_version: 2
    value(0x16, 0, 16, 4791),            // r_roce_dest_udp_port
    value(0x18, 0, 16, 0xffff),          // r_roce_max_src_udp_port
    value(0x1a, 0, 16, 0xc000),          // r_roce_min_src_udp_port
    value(0x1e, 0, 16, MAX_GIDS as u32), // roce_address_table_size
];

/// `per_protocol_networking_offload_caps`.
const ETHERNET_OFFLOADS: &[Value] = &[
    value(0x0, 0, 1, 1),  // csum_cap
    value(0x0, 1, 1, 1),  // vlan_cap
    value(0x1, 0, 1, 1),  // self_lb_en_modifiable: there never is any loopback
    value(0x1, 3, 5, 16), // max_lso_cap, log2
    value(0x2, 4, 4, 7),  // rss_ind_tbl_cap, log2
];

/// `flow_table_nic_cap`.
const FLOW_TABLE: &[Value] = &[
    value(0x40, 0, 1, 1),  // flow_table_properties_nic_receive.ft_support
    value(0x44, 2, 6, 22), // .log_max_ft_size
    value(0x47, 0, 8, 64), // .max_ft_level
];

/// `atomic_caps.atomic_req_8B_endianness_mode`, which the driver sets. In mode 1 the old values that
/// atomics return have the host's byte order, as here; without it drivers offer no atomics.
const REQUESTER_ENDIANNESS: Field = Field::new(0x8, 0, 2);
const HOST_ENDIANNESS: u32 = 1;

/// `vhca_id`.
const VHCA_ID: usize = 0x6;

/// Answers a block for a function.
pub(super) fn query(
    spec: &RdmaSpec,
    own: Peer,
    host_atomics: bool,
    command: &Command,
    out: &mut Output,
) -> Result<(), Status> {
    let ethernet = spec.link == RdmaLinkLayer::Ethernet;
    let parts: &[&[Value]] = match command.op_mod >> 1 {
        kind::GENERAL if ethernet => &[GENERAL, ETHERNET],
        kind::GENERAL => &[GENERAL, INFINIBAND],
        kind::ODP => &[],
        kind::ATOMIC => &[ATOMIC],
        kind::ETHERNET_OFFLOADS if ethernet => &[ETHERNET_OFFLOADS],
        kind::ROCE if ethernet => &[ROCE],
        kind::FLOW_TABLE if ethernet => &[FLOW_TABLE],
        _ => return Err(Status::BadParameter),
    };
    let block = out.bytes(AT + LEN).get_mut(AT..).unwrap_or_default();
    for (field, value) in parts.iter().copied().flatten() {
        field.set(block, *value);
    }
    match command.op_mod >> 1 {
        kind::GENERAL => put(block, VHCA_ID, &(own.0 as u16).to_be_bytes()),
        kind::ATOMIC if host_atomics => REQUESTER_ENDIANNESS.set(block, HOST_ENDIANNESS),
        _ => {}
    }
    Ok(())
}

/// SET_HCA_CAP: of what drivers set, only the byte order of atomics is a choice here. `None`: the
/// command does not speak of it.
pub(super) fn host_atomics(command: &Command) -> Option<bool> {
    let block = command.input.get(AT..).unwrap_or_default();
    (command.op_mod >> 1 == kind::ATOMIC)
        .then(|| REQUESTER_ENDIANNESS.get(block) == HOST_ENDIANNESS)
}
