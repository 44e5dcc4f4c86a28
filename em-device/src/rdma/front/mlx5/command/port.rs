//! The port: registers, HCA vport context, GIDs, P_Keys, management datagrams.

use super::super::Device;
use super::super::bits::{Field, array, put};
use super::super::fields::{hca_vport, header};
use super::{Command, Output, Status};
use m2m_fabric::proto::RdmaLinkLayer;

/// `register_id` of ACCESS_REG, and where its data is in both directions.
const REGISTER_ID: Field = Field::new(0xa, 0, 16);
const DATA: usize = 0x10;
/// `op_mod` of ACCESS_REG: 0 is a write.
const WRITE: u16 = 0;

/// Register ids (`MLX5_REG_*`).
mod register {
    pub(super) const PMTU: u32 = 0x5003;
    pub(super) const PTYS: u32 = 0x5004;
    pub(super) const PAOS: u32 = 0x5006;
    pub(super) const PFCC: u32 = 0x5007;
    pub(super) const PPCNT: u32 = 0x5008;
    pub(super) const PVLC: u32 = 0x500f;
    pub(super) const NODE_DESC: u32 = 0x6001;
}

/// Bytes of a node description.
const NODE_DESC_LEN: usize = 64;
const NODE_DESCRIPTION: &[u8] = b"distdpu RDMA function";

/// `ptys_reg`: capability, admin and operational value of each kind of port.
mod ptys {
    use super::Field;
    pub(super) const LEN: usize = 0x40;
    pub(super) const ETHERNET: [usize; 3] = [0xc, 0x18, 0x24];
    pub(super) const IB_WIDTH: [Field; 3] = [
        Field::new(0x10, 0, 16),
        Field::new(0x1c, 0, 16),
        Field::new(0x28, 0, 16),
    ];
    pub(super) const IB_PROTO: [Field; 3] = [
        Field::new(0x12, 0, 16),
        Field::new(0x1e, 0, 16),
        Field::new(0x2a, 0, 16),
    ];
    /// 4 lanes (the codes of IBTA's PortInfo:LinkWidth).
    pub(super) const WIDTH_4X: u32 = 4;
    /// EDR.
    pub(super) const EDR: u32 = 32;
    /// 100GBASE-CR4 (bit 20 of eth_proto).
    pub(super) const CR4_100G: u32 = 1 << 20;
}

/// `pmtu_reg`: max, admin, oper.
const PMTU: [Field; 3] = [
    Field::new(0x4, 0, 16),
    Field::new(0x8, 0, 16),
    Field::new(0xc, 0, 16),
];
/// Bytes of an InfiniBand packet's payload.
const IB_MTU: u32 = 4096;
/// Bytes of frame around an Ethernet payload: header, two VLAN tags, checksum.
const ETHERNET_OVERHEAD: u32 = 14 + 8 + 4;

/// `pvlc_reg`: hardware, admin, operational. One virtual lane.
const PVLC: [Field; 3] = [
    Field::new(0x7, 4, 4),
    Field::new(0xb, 4, 4),
    Field::new(0xf, 4, 4),
];
/// `paos_reg`: admin_status, oper_status: 1 up, 2 down.
const PAOS: [Field; 2] = [Field::new(0x2, 4, 4), Field::new(0x3, 4, 4)];

/// `gid_index` and `pkey_index` of the commands that ask for tables; all ones is the whole table.
const TABLE_INDEX: Field = Field::new(0xe, 0, 16);
const WHOLE_TABLE: u32 = 0xffff;
/// Sizes of the smallest tables (`gid_table_size` 0, `pkey_table_size` 0).
const GIDS: u32 = 8;
const PKEYS: u32 = 128;
/// `gids_num` of QUERY_HCA_VPORT_GID's reply.
const GIDS_NUM: Field = Field::new(0xc, 0, 16);
/// The P_Key of full members of the default partition.
const DEFAULT_PKEY: u16 = 0xffff;

/// Bytes of a management datagram.
const MAD_LEN: usize = 256;
/// Parts of its header (IBTA 1.5 §13.4.3).
mod mad {
    use super::Field;
    pub(super) const CLASS: Field = Field::new(1, 0, 8);
    pub(super) const METHOD: Field = Field::new(3, 0, 8);
    pub(super) const STATUS: Field = Field::new(4, 0, 16);
    pub(super) const ATTRIBUTE: Field = Field::new(16, 0, 16);
    /// Performance management (IBTA 1.5 §16.1): its data.
    pub(super) const PERFORMANCE: u32 = 4;
    pub(super) const PERFORMANCE_DATA: usize = 64;
    pub(super) const CLASS_PORT_INFO: u32 = 1;
    pub(super) const GET: u32 = 1;
    pub(super) const GET_RESPONSE: u32 = 0x81;
    /// The attribute is not supported.
    pub(super) const UNSUPPORTED: u32 = 0xc;
}

/// Only the function's own port is there.
fn check_own(command: &Command) -> Result<(), Status> {
    match command.get(header::OTHER_VPORT) {
        0 => Ok(()),
        _ => Err(Status::BadParameter),
    }
}

impl Device {
    /// ACCESS_REG. What is written is answered and otherwise ignored: the administrator's settings
    /// are the DPU's.
    pub(in super::super) fn access_register(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let ethernet = self.spec.link == RdmaLinkLayer::Ethernet;
        let id = command.get(REGISTER_ID);
        let given = command.input.get(DATA..).unwrap_or_default();
        let mut data = [0; 0x100];
        put(&mut data, 0, given);
        let len = match id {
            register::NODE_DESC if command.op_mod == WRITE => NODE_DESC_LEN,
            register::NODE_DESC => {
                data.fill(0);
                put(&mut data, 0, NODE_DESCRIPTION);
                NODE_DESC_LEN
            }
            register::PTYS => {
                self.port_type_and_speed(&mut data);
                ptys::LEN
            }
            register::PMTU => {
                let mtu = match ethernet {
                    true => u32::from(self.spec.mtu) + ETHERNET_OVERHEAD,
                    false => IB_MTU,
                };
                PMTU.iter().for_each(|field| field.set(&mut data, mtu));
                0x10
            }
            register::PVLC => {
                PVLC.iter().for_each(|field| field.set(&mut data, 1));
                0x10
            }
            register::PAOS => {
                let status = if self.link_up { 1 } else { 2 };
                PAOS.iter().for_each(|field| field.set(&mut data, status));
                0x10
            }
            // There is no flow control, of priorities or as a whole.
            register::PFCC if ethernet => {
                data.fill(0);
                0x20
            }
            register::PPCNT => super::vport::port_counters(&mut data, &self.ether.counters),
            _ => return Err(Status::BadParameter),
        };
        out.put(DATA, data.get(..len).unwrap_or_default());
        Ok(())
    }

    fn port_type_and_speed(&self, data: &mut [u8]) {
        let up = [true, true, self.link_up];
        match self.spec.link {
            RdmaLinkLayer::Infiniband => {
                for ((width, proto), on) in ptys::IB_WIDTH.iter().zip(ptys::IB_PROTO).zip(up) {
                    width.set(data, if on { ptys::WIDTH_4X } else { 0 });
                    proto.set(data, if on { ptys::EDR } else { 0 });
                }
            }
            RdmaLinkLayer::Ethernet => {
                for (at, on) in ptys::ETHERNET.into_iter().zip(up) {
                    let speed = if on { ptys::CR4_100G } else { 0 };
                    put(data, at, &speed.to_be_bytes());
                }
            }
        }
    }

    /// Commands about ports of InfiniBand that ask for this function's own.
    fn check_ib_port(&self, command: &Command) -> Result<(), Status> {
        if self.spec.link != RdmaLinkLayer::Infiniband {
            return Err(Status::BadOperation);
        }
        check_own(command)
    }

    pub(in super::super) fn query_hca_vport_context(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        self.check_ib_port(command)?;
        let mut context = [0; hca_vport::LEN];
        // PortPhysicalState: LinkUp or Polling. PortState: Active or Down (IBTA 1.5 §14.2.5.6).
        let (physical, state) = if self.link_up { (5, 4) } else { (2, 1) };
        hca_vport::PORT_PHYSICAL_STATE.set(&mut context, physical);
        hca_vport::PORT_STATE.set(&mut context, state);
        hca_vport::VPORT_STATE.set(&mut context, state);
        let guid = self.spec.guid.to_be_bytes();
        for at in [
            hca_vport::SYSTEM_IMAGE_GUID,
            hca_vport::PORT_GUID,
            hca_vport::NODE_GUID,
        ] {
            put(&mut context, at, &guid);
        }
        hca_vport::LID.set(&mut context, self.addresses.lid.into());
        // The OM is the subnet manager; it has no port, and managers' LIDs are not 0.
        hca_vport::SM_LID.set(&mut context, 1);
        hca_vport::SUBNET_TIMEOUT.set(&mut context, 18);
        out.put(DATA, &context);
        Ok(())
    }

    /// Accepted and ignored: identity is the administrator's.
    pub(in super::super) fn modify_hca_vport_context(
        &mut self,
        command: &Command,
    ) -> Result<(), Status> {
        self.check_ib_port(command)
    }

    pub(in super::super) fn query_hca_vport_gid(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        self.check_ib_port(command)?;
        let indices = table_range(command.get(TABLE_INDEX), GIDS)?;
        out.set(GIDS_NUM, indices.len() as u32);
        for (n, index) in indices.enumerate() {
            let gid = self.addresses.gids.get(index as usize).copied();
            out.put(DATA + 16 * n, &gid.unwrap_or_default());
        }
        Ok(())
    }

    pub(in super::super) fn query_hca_vport_pkey(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        check_own(command)?;
        for (n, index) in table_range(command.get(TABLE_INDEX), PKEYS)?.enumerate() {
            let pkey = if index == 0 { DEFAULT_PKEY } else { 0 };
            out.put(DATA + 4 * n, &u32::from(pkey).to_be_bytes());
        }
        Ok(())
    }

    /// A management datagram to this port: only the class port info of performance management is
    /// known. It says that there is nothing more.
    pub(in super::super) fn mad_ifc(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let mut datagram = array::<MAD_LEN>(&command.input, DATA);
        let known = mad::CLASS.get(&datagram) == mad::PERFORMANCE
            && mad::METHOD.get(&datagram) == mad::GET
            && mad::ATTRIBUTE.get(&datagram) == mad::CLASS_PORT_INFO;
        mad::METHOD.set(&mut datagram, mad::GET_RESPONSE);
        mad::STATUS.set(&mut datagram, if known { 0 } else { mad::UNSUPPORTED });
        if known {
            let (_, data) = datagram.split_at_mut(mad::PERFORMANCE_DATA);
            data.fill(0);
            // BaseVersion and ClassVersion.
            put(data, 0, &[1, 1]);
        }
        out.put(DATA, &datagram);
        Ok(())
    }
}

/// The entries that an index asks for, in a table of `len`.
fn table_range(index: u32, len: u32) -> Result<std::ops::Range<u32>, Status> {
    match index {
        WHOLE_TABLE => Ok(0..len),
        _ if index < len => Ok(index..index + 1),
        _ => Err(Status::BadIndex),
    }
}
