//! Registers and commands of a device of the ConnectX family.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use m2m_fabric::proto::RdmaSpec;
use smartep::fault;
use smartep::irq::Irqs;
use smartep::state::Section;

use super::{Memory, RdmaData, lock};
use crate::rdma::front;
use crate::rdma::front::doorbells::Doorbells;
use crate::rdma::front::mlx5::{Action, Command, Device, MappedPages, Registers, command};
use crate::rdma::verbs::Peer;

/// `cmdq_addr_l_sz` of the initialization segment, and in it `nic_interface` (`mlx5_ifc`: initial_seg).
const CMDQ_LOW: u64 = 0x14;
const NIC_INTERFACE_SHIFT: u32 = 8;
/// Value of `nic_interface`: disabled.
const NIC_DISABLED: u32 = 1;

/// The device for the data path; `pages`: the doorbells that the VMM maps, if it does.
pub(super) fn device(
    spec: &RdmaSpec,
    own: Peer,
    irqs: Arc<Irqs>,
    doorbells: &Arc<Doorbells>,
    pages: Option<MappedPages>,
) -> Box<Device> {
    let mut device = Box::new(Device::new(spec.clone(), own, irqs, doorbells.clone()));
    if let Some(pages) = pages {
        device.map_doorbells(Arc::new(pages));
    }
    device
}

/// See the module.
#[derive(Debug)]
pub(super) struct Face {
    registers: Mutex<Registers>,
}

impl Face {
    pub(super) fn new(doorbells: Arc<Doorbells>) -> Self {
        let registers = Mutex::new(Registers::new(doorbells, Instant::now()));
        Self { registers }
    }

    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        lock(&self.registers).read(offset, data, Instant::now());
    }

    pub(super) fn write(&self, data: &RdmaData, offset: u64, bytes: &[u8]) {
        let action = lock(&self.registers).write(offset, bytes);
        if Registers::is_saved(offset) {
            self.note(&data.kept);
        }
        match action {
            Action::None => {}
            Action::Kick => data.seat.worker.kick(),
            Action::Command(slots) => self.execute(data, slots),
            Action::Disable | Action::Reset => data.stop_device(),
        }
    }

    pub(super) fn reset(&self) {
        lock(&self.registers).reset();
    }

    /// See [`Memory::note`].
    pub(super) fn note(&self, kept: &Memory) {
        kept.note(&lock(&self.registers).save());
    }

    /// Takes over what a former process left, or else tells the driver that the device is lost; answers which.
    pub(super) fn take_over(&self, data: &RdmaData) -> bool {
        if self.restore(data) {
            return true;
        }
        // The driver finds what it finds when the firmware of a card died: an interface that is disabled though it
        // did not disable it. Its health poll sees that and loads the device anew.
        data.begin_anew();
        let disabled = NIC_DISABLED << NIC_INTERFACE_SHIFT;
        lock(&self.registers).write(CMDQ_LOW, &disabled.to_be_bytes());
        self.note(&data.kept);
        log::warn!(
            "function {}: the device reports itself disabled, because its objects are lost",
            data.seat.id
        );
        false
    }

    /// Takes over what a former process left; answers whether that is all that the driver relies on.
    fn restore(&self, data: &RdmaData) -> bool {
        let Some(objects) = data.kept.found() else {
            return false;
        };
        let queue = match data.kept.state.load(Section::Registers) {
            // The driver has not begun.
            None => None,
            Some(saved) => {
                let mut registers = lock(&self.registers);
                if !registers.restore(&saved) {
                    return false;
                }
                registers.command_queue()
            }
        };
        data.restore(move |device, cx| match device {
            front::Device::Mlx5(device) => device.restore(&objects, queue, cx),
            front::Device::Erdma(_) => Ok(()),
        })
    }

    fn execute(&self, data: &RdmaData, slots: u32) {
        let Some(queue) = lock(&self.registers).command_queue() else {
            return;
        };
        for slot in (0..32u8).filter(|slot| slots & 1 << slot != 0) {
            let read = command::read_command(queue, slot, &data.memory.pin());
            match read {
                Ok(command) => execute_one(data, command),
                Err(why) => {
                    log::debug!("function {}: {why}", data.seat.id);
                    command::mailbox::refuse(why, &data.memory.pin());
                }
            }
        }
    }
}

fn execute_one(data: &RdmaData, command: Command) {
    let command = Arc::new(command);
    let asked = command.clone();
    let to = data.on_function(move |f| f.with_mlx5(|device, _| device.destination(&asked)));
    let path = data.resolve(to.flatten().flatten());
    data.change_device(move |function| {
        function.with_mlx5(|device, cx| {
            let output = device.execute(&command, path, cx);
            fault::point("command");
            command::finish_command(&command, &output, cx.memory);
            fault::point("finished");
            device.command_done(command.slot, cx.memory);
        });
    });
}
