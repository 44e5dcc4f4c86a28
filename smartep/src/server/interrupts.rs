//! `DEVICE_SET_IRQS` in every shape that is legal.

use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::read;
use super::resume::Notes;
use crate::irq::Irqs;
use crate::keep::Kept;
use crate::proto::{SetIrqs, irq_index, set_irqs::*};

/// Interrupts of an index. INTx and MSI are not offered; ERR exists because QEMU warns without it, and is never
/// raised.
pub(super) fn count(msix_vectors: u16, index: u32) -> u32 {
    match index {
        irq_index::MSIX => u32::from(msix_vectors),
        irq_index::ERR => 1,
        _ => 0,
    }
}

/// Applies one message. Nothing is changed when it is refused.
pub(super) fn set(
    irqs: &Irqs,
    notes: Option<&Notes>,
    body: &[u8],
    fds: Vec<OwnedFd>,
    max_fds: usize,
) -> Result<(), Errno> {
    let set = read::<SetIrqs>(body)?;
    let data = body.get(size_of::<SetIrqs>()..).unwrap_or_default();
    if (set.argsz as usize) < size_of::<SetIrqs>() || set.argsz as usize > body.len() {
        return Err(Errno::INVAL);
    }
    let (kind, action) = (set.flags & DATA_MASK, set.flags & ACTIONS);
    if set.flags & !(DATA_MASK | ACTIONS) != 0
        || !kind.is_power_of_two()
        || !action.is_power_of_two()
        || set.index >= irq_index::COUNT
        || kind != DATA_EVENTFD && !fds.is_empty()
    {
        return Err(Errno::INVAL);
    }
    if kind == DATA_NONE && action == ACTION_TRIGGER && set.count == 0 {
        // Disables the index, which is legal for one that has no interrupts.
        if set.start != 0 {
            return Err(Errno::INVAL);
        }
        if set.index == irq_index::MSIX {
            irqs.clear();
            if let Some(notes) = notes {
                (0..irqs.count()).for_each(|vector| notes.forget(Kept::Vector(vector)));
            }
        }
        return Ok(());
    }
    let have = count(irqs.count(), set.index);
    let end = set.start.checked_add(set.count).ok_or(Errno::INVAL)?;
    if set.count == 0 || end > have {
        return Err(Errno::INVAL);
    }
    match (kind, action) {
        (DATA_NONE, ACTION_TRIGGER) => trigger(irqs, &set, |_| true),
        (DATA_BOOL, ACTION_TRIGGER) => {
            let chosen = data.get(..set.count as usize).ok_or(Errno::INVAL)?;
            trigger(irqs, &set, |i| chosen.get(i).is_some_and(|b| *b != 0));
        }
        (DATA_EVENTFD, ACTION_TRIGGER) => return install(irqs, notes, &set, fds, max_fds),
        // Masking is the client's for MSI-X: it keeps the pending bits and swaps eventfds.
        (DATA_NONE | DATA_BOOL, _) => {}
        _ => return Err(Errno::NOTSUP),
    }
    Ok(())
}

fn trigger(irqs: &Irqs, set: &SetIrqs, chosen: impl Fn(usize) -> bool) {
    if set.index == irq_index::MSIX {
        for i in (0..set.count).filter(|i| chosen(*i as usize)) {
            irqs.trigger((set.start + i) as u16);
        }
    }
}

/// All descriptors are there, or none: none removes the eventfds, as when a vector is masked.
fn install(
    irqs: &Irqs,
    notes: Option<&Notes>,
    set: &SetIrqs,
    fds: Vec<OwnedFd>,
    max_fds: usize,
) -> Result<(), Errno> {
    // Cloud Hypervisor sends 16 at a time whatever was agreed.
    let most = max_fds.max(crate::proto::MAX_FDS);
    if !fds.is_empty() && (fds.len() != set.count as usize || fds.len() > most) {
        return Err(Errno::INVAL);
    }
    if set.index != irq_index::MSIX {
        return Ok(()); // ERR is never raised; its eventfd is not kept
    }
    let mut fds = fds.into_iter();
    for i in 0..set.count {
        let (vector, fd) = ((set.start + i) as u16, fds.next());
        if let Some(notes) = notes {
            match &fd {
                Some(fd) => notes.keep(Kept::Vector(vector), fd),
                None => notes.forget(Kept::Vector(vector)),
            }
        }
        irqs.set(vector, fd)
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    }
    Ok(())
}
