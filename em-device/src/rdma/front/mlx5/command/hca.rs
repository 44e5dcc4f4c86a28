//! The function as a whole: ENABLE_HCA to TEARDOWN_HCA, pages, capabilities, adapter.

use super::super::Device;
use super::super::bits::Field;
use super::{Command, Output, Status, caps, opcode as op};

/// `current_issi` of QUERY_ISSI's reply and SET_ISSI.
const CURRENT_ISSI: Field = Field::new(0xa, 0, 16);
/// `supported_issi_dw0` of QUERY_ISSI's reply.
const SUPPORTED_ISSI: Field = Field::new(0x6c, 0, 32);
/// Interface step sequence ids 0 and 1.
const ISSI_MASK: u32 = 0b11;
/// `num_entries` of MANAGE_PAGES.
const NUM_ENTRIES: Field = Field::new(0xc, 0, 32);
/// `query_adapter_struct.ieee_vendor_id` of QUERY_ADAPTER's reply.
const VENDOR_ID: Field = Field::new(0x29, 0, 24);
/// The OUI that drivers of the family expect.
const OUI: u32 = 0x2c9;
/// `vsd_contd_psid` of QUERY_ADAPTER's reply, and the board's name there.
const PSID_AT: usize = 0x100;
const PSID: &[u8; 16] = b"DPU0000000001\0\0\0";

impl Device {
    /// Commands that need no INIT_HCA. `None` when it is another.
    pub(in super::super) fn execute_hca(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Option<Result<(), Status>> {
        Some(match command.opcode {
            op::ENABLE_HCA | op::SET_DRIVER_VERSION => Ok(()),
            op::SET_HCA_CAP => {
                self.host_atomics = caps::host_atomics(command).unwrap_or(self.host_atomics);
                Ok(())
            }
            op::DISABLE_HCA => {
                self.forget_objects();
                Ok(())
            }
            op::INIT_HCA if self.running => Err(Status::BadSystemState),
            op::INIT_HCA => {
                self.running = true;
                Ok(())
            }
            op::TEARDOWN_HCA => {
                self.forget_objects();
                Ok(())
            }
            op::QUERY_ISSI => {
                out.bytes(0x70);
                out.set(CURRENT_ISSI, self.issi.into());
                out.set(SUPPORTED_ISSI, ISSI_MASK);
                Ok(())
            }
            op::SET_ISSI => self.set_issi(command),
            // No page of the guest's memory is wanted.
            op::QUERY_PAGES => Ok(()),
            op::MANAGE_PAGES if command.get(NUM_ENTRIES) == 0 => Ok(()),
            op::MANAGE_PAGES => Err(Status::BadParameter),
            op::QUERY_HCA_CAP => caps::query(&self.spec, self.own, self.host_atomics, command, out),
            op::QUERY_ADAPTER => {
                out.bytes(PSID_AT + PSID.len());
                out.set(VENDOR_ID, OUI);
                out.put(PSID_AT, PSID);
                Ok(())
            }
            op::ACCESS_REG => self.access_register(command, out),
            _ => return None,
        })
    }

    fn set_issi(&mut self, command: &Command) -> Result<(), Status> {
        let issi = command.get(CURRENT_ISSI);
        if issi > 1 {
            return Err(Status::BadParameter);
        }
        self.issi = issi as u16;
        Ok(())
    }
}
