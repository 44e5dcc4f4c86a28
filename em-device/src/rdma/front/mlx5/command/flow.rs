//! Flow tables, groups and entries: numbers only. Where a frame goes is decided by its destination
//! and the address lists, which say the same.

use super::super::Device;
use super::super::bits::Field;
use super::super::nic::{FlowTable, MAX_FLOW_ENTRIES};
use super::{Command, Output, Status, opcode as op};

/// Fields of the commands.
const TABLE_ID: Field = Field::new(0x15, 0, 24);
const LOG_SIZE: Field = Field::new(0x1b, 0, 8);
const FLOW_INDEX: Field = Field::new(0x20, 0, 32);
const DESTROYED_GROUP: Field = Field::new(0x18, 0, 32);
/// `flow_context.group_id` of SET_FLOW_TABLE_ENTRY.
const ENTRY_GROUP: Field = Field::new(0x44, 0, 32);
/// log₂ of a table's entries (`log_max_ft_size`).
const MAX_LOG_SIZE: u32 = 22;

impl Device {
    /// `None` when the command is of another group.
    pub(in super::super) fn execute_flow(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Option<Result<(), Status>> {
        Some(match command.opcode {
            op::CREATE_FLOW_TABLE => self.create_flow_table(command, out),
            op::DESTROY_FLOW_TABLE => self.destroy_flow_table(command.get(TABLE_ID)),
            op::CREATE_FLOW_GROUP => self.create_flow_group(command.get(TABLE_ID), out),
            op::DESTROY_FLOW_GROUP => self.destroy_flow_group(command.get(DESTROYED_GROUP)),
            op::SET_FLOW_TABLE_ENTRY => self.set_flow_entry(command),
            op::DELETE_FLOW_TABLE_ENTRY => {
                let entry = (command.get(TABLE_ID), command.get(FLOW_INDEX));
                match self.ether.flow_entries.remove(&entry) {
                    true => Ok(()),
                    false => Err(Status::BadResource),
                }
            }
            op::SET_FLOW_TABLE_ROOT | op::MODIFY_FLOW_TABLE => self
                .ether
                .flow_tables
                .get(command.get(TABLE_ID))
                .map(|_| ()),
            _ => return None,
        })
    }

    fn create_flow_table(&mut self, command: &Command, out: &mut Output) -> Result<(), Status> {
        let log_size = command.get(LOG_SIZE);
        if log_size > MAX_LOG_SIZE {
            return Err(Status::BadParameter);
        }
        let table = FlowTable {
            log_size,
            groups: 0,
        };
        out.set_index(self.ether.flow_tables.add(table)?);
        Ok(())
    }

    fn destroy_flow_table(&mut self, table: u32) -> Result<(), Status> {
        if self.ether.flow_tables.get(table)?.groups != 0 {
            return Err(Status::Busy);
        }
        self.ether.flow_tables.remove(table, false)?;
        self.ether.flow_entries.retain(|(of, _)| *of != table);
        Ok(())
    }

    fn create_flow_group(&mut self, table: u32, out: &mut Output) -> Result<(), Status> {
        self.ether.flow_tables.get(table)?;
        out.set_index(self.ether.flow_groups.add(table)?);
        self.ether.flow_tables.get_mut(table)?.groups += 1;
        Ok(())
    }

    fn destroy_flow_group(&mut self, group: u32) -> Result<(), Status> {
        let table = self.ether.flow_groups.remove(group, false)?;
        let table = self.ether.flow_tables.get_mut(table)?;
        table.groups = table.groups.saturating_sub(1);
        Ok(())
    }

    fn set_flow_entry(&mut self, command: &Command) -> Result<(), Status> {
        let (table, index) = (command.get(TABLE_ID), command.get(FLOW_INDEX));
        let log_size = self.ether.flow_tables.get(table)?.log_size;
        if u64::from(index) >> log_size != 0 {
            return Err(Status::BadIndex);
        }
        if *self.ether.flow_groups.get(command.get(ENTRY_GROUP))? != table {
            return Err(Status::BadResource);
        }
        let entries = &mut self.ether.flow_entries;
        if entries.len() >= MAX_FLOW_ENTRIES && !entries.contains(&(table, index)) {
            return Err(Status::NoResources);
        }
        entries.insert((table, index));
        Ok(())
    }
}
