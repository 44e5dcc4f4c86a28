//! Registers and commands of a device of the `erdma` driver.
//!
//! Its objects do not outlive the process: the next one's device is as after a reset, and the driver finds out by a
//! command that is not answered.

use std::sync::{Arc, Mutex};

use m2m_fabric::proto::RdmaSpec;
use smartep::irq::Irqs;

use super::{RdmaData, lock};
use crate::rdma::front::doorbells::Doorbells;
use crate::rdma::front::erdma::{Action, Command, Device, Registers};
use crate::rdma::verbs::{Destination, Peer};

/// The device for the data path.
pub(super) fn device(
    spec: &RdmaSpec,
    own: Peer,
    irqs: Arc<Irqs>,
    doorbells: &Arc<Doorbells>,
) -> Box<Device> {
    Box::new(Device::new(spec.clone(), own, irqs, doorbells.clone()))
}

/// No object is left.
pub(super) fn begin_anew(data: &RdmaData) {
    data.on_function(|f| f.reset());
}

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

    /// The driver's objects are lost; answers that.
    pub(super) fn take_over(&self, data: &RdmaData) -> bool {
        begin_anew(data);
        log::warn!(
            "function {}: the device is as after a reset, because its objects are lost",
            data.seat.id
        );
        false
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
