//! What the function has: device, regions, interrupts.

use std::os::fd::AsFd;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::{ServeError, Session, read};
use crate::function::{FunctionInfo, NUM_REGIONS};
use crate::proto::{
    DeviceInfo, Header, IRQ_EVENTFD, IrqInfo, RegionInfoBody, SparseArea, SparseMmapCap, irq_index,
    region_flags,
};

const RESETTABLE_PCI: u32 = 3;

pub(super) fn device(session: &Session, header: &Header, body: &[u8]) -> Result<(), ServeError> {
    if let Err(e) =
        read::<DeviceInfo>(body).and_then(|i| at_least(i.argsz, size_of::<DeviceInfo>()))
    {
        return session.fail(header, e, &[]);
    }
    let info = DeviceInfo {
        argsz: size_of::<DeviceInfo>() as u32,
        flags: RESETTABLE_PCI,
        num_regions: NUM_REGIONS,
        num_irqs: irq_index::COUNT,
    };
    session.send(header, 0, &[info.as_bytes()], &[])
}

/// A region, with its mappable areas when the client has room for them and in any case with their descriptor: one
/// client keeps that of the first reply, another that of the second.
pub(super) fn region(
    function: &FunctionInfo,
    session: &Session,
    header: &Header,
    body: &[u8],
) -> Result<(), ServeError> {
    let asked = match read::<RegionInfoBody>(body) {
        Ok(asked)
            if asked.index < NUM_REGIONS && asked.argsz as usize >= size_of::<RegionInfoBody>() =>
        {
            asked
        }
        _ => return session.fail(header, Errno::INVAL, &[]),
    };
    let mut reply = RegionInfoBody {
        argsz: size_of::<RegionInfoBody>() as u32,
        index: asked.index,
        ..Default::default()
    };
    let Some(region) = function.region(asked.index) else {
        return session.send(header, 0, &[reply.as_bytes()], &[]);
    };
    reply.size = region.size;
    reply.flags = if region.readable {
        region_flags::READ
    } else {
        0
    } | if region.writable {
        region_flags::WRITE
    } else {
        0
    };
    let Some(mmap) = &region.mmap else {
        return session.send(header, 0, &[reply.as_bytes()], &[]);
    };
    reply.flags |= region_flags::MMAP;
    reply.offset = mmap.offset;
    let mut capability = Vec::new();
    if !mmap.areas.is_empty() {
        let fixed = SparseMmapCap {
            id: 1,
            version: 1,
            next: 0,
            nr_areas: mmap.areas.len() as u32,
            reserved: 0,
        };
        capability.extend_from_slice(fixed.as_bytes());
        for &(offset, size) in &mmap.areas {
            capability.extend_from_slice(SparseArea { offset, size }.as_bytes());
        }
        reply.flags |= region_flags::CAPS;
        reply.argsz += capability.len() as u32;
        // Also without room for them: QEMU refuses a region with capabilities at 0, and asks again after it.
        reply.cap_offset = size_of::<RegionInfoBody>() as u32;
        if asked.argsz < reply.argsz {
            capability.clear();
        }
    }
    session.send(
        header,
        0,
        &[reply.as_bytes(), &capability],
        &[mmap.fd.as_fd()],
    )
}

pub(super) fn irq(
    function: &FunctionInfo,
    session: &Session,
    header: &Header,
    body: &[u8],
) -> Result<(), ServeError> {
    let asked = read::<IrqInfo>(body).unwrap_or_default();
    let mut reply = IrqInfo {
        argsz: size_of::<IrqInfo>() as u32,
        index: asked.index,
        ..Default::default()
    };
    if body.len() < size_of::<IrqInfo>()
        || (asked.argsz as usize) < size_of::<IrqInfo>()
        || asked.index >= irq_index::COUNT
    {
        return session.fail(header, Errno::INVAL, reply.as_bytes());
    }
    reply.count = super::interrupts::count(function.msix_vectors(), asked.index);
    if reply.count > 0 {
        reply.flags = IRQ_EVENTFD;
    }
    session.send(header, 0, &[reply.as_bytes()], &[])
}

fn at_least(argsz: u32, size: usize) -> Result<(), Errno> {
    if (argsz as usize) < size {
        Err(Errno::INVAL)
    } else {
        Ok(())
    }
}
