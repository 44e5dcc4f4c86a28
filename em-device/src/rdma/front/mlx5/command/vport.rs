//! The Ethernet port: NIC vport context, GIDs, state, counters.

use super::super::Device;
use super::super::bits::{Field, array, put};
use super::super::device::MAX_GIDS;
use super::super::ether::{EtherCounters, Traffic};
use super::super::fields::header;
use super::{Command, Output, Status, opcode as op};

/// `nic_vport_context`: in the reply and, behind a longer header, in MODIFY_NIC_VPORT_CONTEXT.
mod context {
    use super::Field;
    pub(super) const REPLY: usize = 0x10;
    pub(super) const MODIFY: usize = 0x100;
    pub(super) const LEN: usize = 0x100;
    pub(super) const ROCE_EN: Field = Field::new(0x3, 7, 1);
    pub(super) const MTU: Field = Field::new(0x26, 0, 16);
    pub(super) const GUIDS: [usize; 3] = [0x28, 0x30, 0x38];
    pub(super) const PROMISC_UC: Field = Field::new(0xf0, 0, 1);
    pub(super) const PROMISC_MC: Field = Field::new(0xf0, 1, 1);
    pub(super) const PROMISC_ALL: Field = Field::new(0xf0, 2, 1);
    pub(super) const LIST_TYPE: Field = Field::new(0xf0, 5, 3);
    pub(super) const LIST_SIZE: Field = Field::new(0xf2, 4, 12);
    pub(super) const PERMANENT_ADDRESS: usize = 0xf6;
    /// Entries of 8 bytes with an address at 2, or of 4 with a VLAN in the low 12 bits.
    pub(super) const LIST: usize = 0x100;
}

/// `field_select` of MODIFY_NIC_VPORT_CONTEXT.
mod select {
    use super::Field;
    pub(super) const MTU: Field = Field::new(0xf, 1, 1);
    pub(super) const PROMISC: Field = Field::new(0xf, 3, 1);
    pub(super) const PERMANENT_ADDRESS: Field = Field::new(0xf, 4, 1);
    pub(super) const ADDRESSES_LIST: Field = Field::new(0xf, 5, 1);
    pub(super) const ROCE_EN: Field = Field::new(0xf, 6, 1);
}

/// `allowed_list_type` of QUERY_NIC_VPORT_CONTEXT, and its values.
const QUERY_LIST_TYPE: Field = Field::new(0xc, 5, 3);
const UNICAST: u32 = 0;
const MULTICAST: u32 = 1;
const VLAN: u32 = 2;

/// SET_ROCE_ADDRESS: index and GID; the MAC address and version are those of the function.
const GID_INDEX: Field = Field::new(0x8, 0, 16);
const GID: usize = 0x10;

/// QUERY_VPORT_STATE: administrator's and present state; 1 is up.
const ADMIN_STATE: Field = Field::new(0xf, 0, 4);
const STATE: Field = Field::new(0xf, 4, 4);

/// QUERY_Q_COUNTER: which set.
const COUNTER_SET: Field = Field::new(0x1f, 0, 8);
/// Number of a set in ALLOC_Q_COUNTER's reply and in DEALLOC_Q_COUNTER.
const COUNTER_SET_ID: Field = Field::new(0xb, 0, 8);
const Q_COUNTER_LEN: usize = 0x100;
const OUT_OF_BUFFER: Field = Field::new(0x30, 0, 32);

/// QUERY_VPORT_COUNTER's reply: packets and octets, by direction and kind.
const VPORT_COUNTER_LEN: usize = 0x210;
const RECEIVED: [usize; 3] = [0x90, 0xb0, 0x70];
const TRANSMITTED: [usize; 3] = [0xa0, 0xc0, 0x80];

/// `ppcnt_reg`: group, and group 0's counters (IEEE 802.3).
const PPCNT_GROUP: Field = Field::new(0x3, 2, 6);
const PPCNT_LEN: usize = 0x100;

fn put_kinds(out: &mut Output, at: [usize; 3], frames: &Traffic) {
    let kinds = [frames.unicast, frames.multicast, frames.broadcast];
    for (at, frames) in at.into_iter().zip(kinds) {
        out.put(at, &frames.packets.to_be_bytes());
        out.put(at + 8, &frames.octets.to_be_bytes());
    }
}

/// `ppcnt_reg` with the counters of the group that it asks for; other groups are zero.
pub(super) fn port_counters(register: &mut [u8; PPCNT_LEN], counters: &EtherCounters) -> usize {
    let ieee = PPCNT_GROUP.get(register) == 0;
    register.iter_mut().skip(8).for_each(|byte| *byte = 0);
    if ieee {
        let (tx, rx) = (&counters.transmitted, &counters.received);
        let values = [
            (0x08, tx.total().packets),
            (0x10, rx.total().packets),
            (0x28, tx.total().octets),
            (0x30, rx.total().octets),
            (0x38, tx.multicast.packets),
            (0x40, tx.broadcast.packets),
            (0x48, rx.multicast.packets),
            (0x50, rx.broadcast.packets),
        ];
        for (at, value) in values {
            put(register, at, &value.to_be_bytes());
        }
    }
    PPCNT_LEN
}

impl Device {
    /// `None` when the command is of another group.
    pub(in super::super) fn execute_vport(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Option<Result<(), Status>> {
        let ours = matches!(
            command.opcode,
            op::QUERY_NIC_VPORT_CONTEXT
                | op::MODIFY_NIC_VPORT_CONTEXT
                | op::SET_ROCE_ADDRESS
                | op::QUERY_VPORT_STATE
                | op::MODIFY_VPORT_STATE
                | op::QUERY_VPORT_COUNTER
                | op::ALLOC_Q_COUNTER
                | op::DEALLOC_Q_COUNTER
                | op::QUERY_Q_COUNTER
        );
        ours.then(|| self.vport_command(command, out))
    }

    fn vport_command(&mut self, command: &Command, out: &mut Output) -> Result<(), Status> {
        let of_vport = !matches!(
            command.opcode,
            op::SET_ROCE_ADDRESS | op::ALLOC_Q_COUNTER | op::DEALLOC_Q_COUNTER
        );
        if of_vport && command.get(header::OTHER_VPORT) != 0 {
            return Err(Status::BadParameter);
        }
        match command.opcode {
            op::QUERY_NIC_VPORT_CONTEXT => self.query_nic_vport(command, out),
            op::MODIFY_NIC_VPORT_CONTEXT => self.modify_nic_vport(command),
            op::SET_ROCE_ADDRESS => self.set_roce_address(command),
            op::QUERY_VPORT_STATE => {
                out.set(ADMIN_STATE, 1);
                out.set(STATE, self.link_up.into());
                Ok(())
            }
            op::QUERY_VPORT_COUNTER => {
                out.bytes(VPORT_COUNTER_LEN);
                put_kinds(out, RECEIVED, &self.ether.counters.received);
                put_kinds(out, TRANSMITTED, &self.ether.counters.transmitted);
                Ok(())
            }
            op::ALLOC_Q_COUNTER => {
                let number = self.ether.q_counters.add(())?;
                out.set(COUNTER_SET_ID, number);
                Ok(())
            }
            op::DEALLOC_Q_COUNTER => {
                let number = command.get(COUNTER_SET_ID);
                self.ether.q_counters.remove(number, false)
            }
            op::QUERY_Q_COUNTER => {
                self.ether.q_counters.get(command.get(COUNTER_SET))?;
                out.bytes(Q_COUNTER_LEN);
                out.set(OUT_OF_BUFFER, self.ether.counters.out_of_buffer as u32);
                Ok(())
            }
            // The state is the administrator's.
            _ => Ok(()),
        }
    }

    fn query_nic_vport(&mut self, command: &Command, out: &mut Output) -> Result<(), Status> {
        let vport = &self.ether.vport;
        let mut reply = [0; context::LEN];
        context::ROCE_EN.set(&mut reply, vport.roce_en.into());
        context::MTU.set(&mut reply, vport.mtu.into());
        for at in context::GUIDS {
            put(&mut reply, at, &self.spec.guid.to_be_bytes());
        }
        context::PROMISC_UC.set(&mut reply, vport.promisc_uc.into());
        context::PROMISC_MC.set(&mut reply, vport.promisc_mc.into());
        context::PROMISC_ALL.set(&mut reply, vport.promisc_all.into());
        put(&mut reply, context::PERMANENT_ADDRESS, &vport.mac);
        let kind = command.get(QUERY_LIST_TYPE);
        let list: Vec<u8> = match kind {
            UNICAST | MULTICAST => {
                let addresses = match kind {
                    UNICAST => &vport.unicast,
                    _ => &vport.multicast,
                };
                let entry = |mac: &[u8; 6]| [&[0, 0], &mac[..]].concat();
                addresses.iter().flat_map(entry).collect()
            }
            VLAN => {
                let entry = |vlan: &u16| u32::from(*vlan).to_be_bytes();
                vport.vlans.iter().flat_map(entry).collect()
            }
            _ => return Err(Status::BadParameter),
        };
        context::LIST_TYPE.set(&mut reply, kind);
        let entry = if kind == VLAN { 4 } else { 8 };
        context::LIST_SIZE.set(&mut reply, (list.len() / entry) as u32);
        out.put(context::REPLY, &reply);
        out.put(context::REPLY + context::LIST, &list);
        Ok(())
    }

    /// Fields that are not among those of [`select`] are accepted and mean nothing.
    fn modify_nic_vport(&mut self, command: &Command) -> Result<(), Status> {
        let new = command.context::<{ context::LEN }>(context::MODIFY);
        let selected = |field| command.get(field) != 0;
        if selected(select::ADDRESSES_LIST) {
            self.set_list(command, &new)?;
        }
        let vport = &mut self.ether.vport;
        if selected(select::MTU) {
            vport.mtu = context::MTU.get(&new) as u16;
        }
        if selected(select::PROMISC) {
            vport.promisc_uc = context::PROMISC_UC.is_set(&new);
            vport.promisc_mc = context::PROMISC_MC.is_set(&new);
            vport.promisc_all = context::PROMISC_ALL.is_set(&new);
        }
        if selected(select::PERMANENT_ADDRESS) {
            vport.mac = array(&new, context::PERMANENT_ADDRESS);
        }
        if selected(select::ROCE_EN) {
            vport.roce_en = context::ROCE_EN.is_set(&new);
        }
        self.ether.changed();
        Ok(())
    }

    fn set_list(&mut self, command: &Command, new: &[u8]) -> Result<(), Status> {
        let kind = context::LIST_TYPE.get(new);
        let size = context::LIST_SIZE.get(new) as usize;
        let entry = if kind == VLAN { 4 } else { 8 };
        let at = context::MODIFY + context::LIST;
        let end = at + size * entry;
        let list = command.input.get(at..end).ok_or(Status::BadInputLength)?;
        let addresses = || list.chunks(entry).map(|entry| array(entry, 2)).collect();
        let vport = &mut self.ether.vport;
        match kind {
            UNICAST => vport.unicast = addresses(),
            MULTICAST => vport.multicast = addresses(),
            VLAN => {
                let vlan = |entry: &[u8]| u16::from_be_bytes(array(entry, 2)) & 0xfff;
                vport.vlans = list.chunks(entry).map(vlan).collect();
            }
            _ => return Err(Status::BadParameter),
        }
        Ok(())
    }

    fn set_roce_address(&mut self, command: &Command) -> Result<(), Status> {
        let index = command.get(GID_INDEX) as usize;
        if index >= MAX_GIDS {
            return Err(Status::BadIndex);
        }
        let gid = self.addresses.gids.get_mut(index).ok_or(Status::BadIndex)?;
        let new = array(&command.input, GID);
        if std::mem::replace(gid, new) != new {
            self.gid_news |= 1 << index;
        }
        Ok(())
    }
}
