//! Registers and commands of a device of the `erdma` driver.

use std::sync::{Arc, Mutex};

use m2m_fabric::proto::RdmaSpec;
use smartep::state::Section;

use super::{Memory, RdmaData, lock};
use crate::rdma::front;
use crate::rdma::front::doorbells::Doorbells;
use crate::rdma::front::erdma::{Action, Command, Registers};
use crate::rdma::verbs::Destination;

/// See the module.
#[derive(Debug)]
pub(super) struct Face {
    registers: Mutex<Registers>,
}

impl Face {
    pub(super) fn new(spec: &RdmaSpec, doorbells: Arc<Doorbells>) -> Self {
        let registers = Mutex::new(Registers::new(spec.mac, doorbells));
        Self { registers }
    }

    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        lock(&self.registers).read(offset, data);
    }

    pub(super) fn write(&self, data: &RdmaData, offset: u64, bytes: &[u8]) {
        let action = lock(&self.registers).write(offset, bytes);
        if Registers::is_saved(offset) {
            self.note(&data.kept);
        }
        match action {
            Action::None => {}
            Action::Kick => data.seat.worker.kick(),
            Action::Commands(producer) => execute(data, producer),
            Action::Init(setup) => {
                data.change_device(move |f| {
                    f.with_erdma(|device, _| device.init(&setup));
                });
            }
            Action::Reset => {
                data.stop_device();
                // Its addresses are gone too.
                data.change_device(|_| ());
            }
        }
    }

    pub(super) fn reset(&self) {
        lock(&self.registers).reset();
    }

    /// See [`Memory::note`].
    pub(super) fn note(&self, kept: &Memory) {
        kept.note(&lock(&self.registers).save());
    }

    /// Takes over what a former process left, or else the device is as after a reset; answers which. Its driver then
    /// finds out by a command that is not answered.
    pub(super) fn take_over(&self, data: &RdmaData) -> bool {
        if self.restore(data) {
            return true;
        }
        data.begin_anew();
        self.reset();
        self.note(&data.kept);
        log::warn!(
            "function {}: the device is as after a reset, because its objects are lost",
            data.seat.id
        );
        false
    }

    fn restore(&self, data: &RdmaData) -> bool {
        let Some(objects) = data.kept.found() else {
            return false;
        };
        let setup = match data.kept.state.load(Section::Registers) {
            // The driver has not begun.
            None => None,
            Some(saved) => {
                let mut registers = lock(&self.registers);
                if !registers.restore(&saved) {
                    return false;
                }
                registers.begun()
            }
        };
        data.restore(move |device, cx| match device {
            front::Device::Erdma(device) => device.restore(&objects, setup.as_ref(), cx),
            front::Device::Mlx5(_) => Ok(()),
        })
    }
}

/// The next command, and where its queue pair is to be connected to.
fn next(data: &RdmaData, producer: u16) -> Option<(Command, Option<Destination>)> {
    let next = data.on_function(move |f| {
        f.with_erdma(|device, cx| {
            let command = device.next_command(producer, cx.memory)?;
            let to = device.destination(&command);
            Some((command, to))
        })
    });
    next.flatten().flatten()
}

fn execute(data: &RdmaData, producer: u16) {
    while let Some((command, to)) = next(data, producer) {
        let path = data.resolve(to);
        data.change_device(move |f| {
            f.with_erdma(|device, cx| device.execute(&command, path, cx));
        });
    }
}
