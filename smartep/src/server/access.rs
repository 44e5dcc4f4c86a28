//! Region reads and writes, split by the routing table.

use log::debug;
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::{ServeError, Server, Session, read};
use crate::CONFIG_REGION;
use crate::config::ConfigState;
use crate::proto::{Header, MultiWrite, RegionAccess};
use crate::route::Side;
use crate::window::ConfigWindow;

impl Server {
    /// Always answered with data, never with an error: Cloud Hypervisor would wait for the data forever. What
    /// does not exist reads as ones, as on a bus.
    pub(super) fn region_read(
        &mut self,
        session: &Session,
        header: &Header,
        body: &[u8],
        max: usize,
    ) -> Result<(), ServeError> {
        let Ok(access) = read::<RegionAccess>(body) else {
            return Err(ServeError::Protocol(format!(
                "a region read of {} bytes",
                body.len()
            )));
        };
        if access.count as usize > max {
            return Err(ServeError::Protocol(format!(
                "a region read of {} bytes; {max} were agreed on",
                access.count
            )));
        }
        let mut data = vec![0xff; access.count as usize];
        self.read_access(&access, &mut data);
        session.send(header, 0, &[access.as_bytes(), &data], &[])
    }

    pub(super) fn region_write(
        &mut self,
        session: &Session,
        header: &Header,
        body: &[u8],
        max: usize,
    ) -> Result<(), ServeError> {
        let access = read::<RegionAccess>(body).unwrap_or_default();
        let data = body.get(size_of::<RegionAccess>()..).unwrap_or_default();
        if body.len() < size_of::<RegionAccess>()
            || data.len() != access.count as usize
            || data.len() > max
        {
            return session.fail(header, Errno::INVAL, access.as_bytes());
        }
        self.write_access(&access, data);
        session.send(header, 0, &[access.as_bytes()], &[])
    }

    /// Many small writes in one message, applied in order.
    pub(super) fn write_multi(
        &mut self,
        session: &Session,
        header: &Header,
        body: &[u8],
    ) -> Result<(), ServeError> {
        let parsed = u64::read_from_prefix(body)
            .ok()
            .and_then(|(count, records)| {
                let bytes = usize::try_from(count)
                    .ok()?
                    .checked_mul(size_of::<MultiWrite>())?;
                (bytes == records.len()).then_some((count, records))
            });
        let Some((count, records)) = parsed else {
            return session.fail(header, Errno::INVAL, &[]);
        };
        let mut bad = false;
        for record in records.chunks_exact(size_of::<MultiWrite>()) {
            let Ok(write) = MultiWrite::read_from_bytes(record) else {
                continue;
            };
            let access = RegionAccess {
                offset: write.offset,
                region: write.region,
                count: write.count,
            };
            match write.data.get(..write.count as usize) {
                Some(data) => self.write_access(&access, data),
                None => bad = true,
            }
        }
        let result = if bad { Err(Errno::INVAL) } else { Ok(()) };
        session.answer_with(header, result, count.as_bytes())
    }

    fn write_access(&mut self, access: &RegionAccess, data: &[u8]) {
        if !self
            .info
            .region(access.region)
            .is_some_and(|r| r.writable && inside(access, r.size))
        {
            return self.stray("write", access);
        }
        // The control side knows these registers as read-only and need not be asked.
        let window = self.window.as_ref();
        let only_window = access.region == CONFIG_REGION
            && window.is_some_and(|w| w.covers(access.offset, data.len()));
        let mut new = self.state;
        if !only_window {
            new = self.write_pieces(access, data);
        }
        self.control_changed(new);
        if access.region == CONFIG_REGION {
            self.write_window(access.offset, data);
        }
    }

    fn write_pieces(&mut self, access: &RegionAccess, data: &[u8]) -> ConfigState {
        let mut new = self.state;
        for (side, offset, len) in
            self.info
                .routes()
                .pieces(access.region, access.offset, data.len())
        {
            let start = (offset - access.offset) as usize;
            let Some(piece) = data.get(start..start + len) else {
                continue;
            };
            match side {
                Side::Data => self.data.write(access.region, offset, piece),
                Side::Control => new = self.control.write(access.region, offset, piece),
            }
        }
        new
    }

    /// A write of the window's data is a write of what it stands for.
    fn write_window(&mut self, offset: u64, data: &[u8]) {
        let Some(window) = &mut self.window else {
            return;
        };
        window.write(offset, data);
        let (touches_data, value, place) = (
            window.touches_data(offset, data.len()),
            window.data(),
            behind(window),
        );
        self.note_window();
        if !touches_data {
            return;
        }
        if let Some(access) = place {
            if let Some(value) = value.get(..access.count as usize) {
                self.write_access(&access, value);
            }
        }
    }

    /// A read of the window's data is a read of what it stands for.
    fn read_window(&mut self, offset: u64, data: &mut [u8]) {
        let place = self
            .window
            .as_ref()
            .filter(|w| w.touches_data(offset, data.len()))
            .and_then(behind);
        if let Some(access) = place {
            let mut value = vec![0xff; access.count as usize];
            self.read_access(&access, &mut value);
            self.window.iter_mut().for_each(|w| w.set_data(&value));
        }
        if let Some(window) = &self.window {
            window.read(offset, data);
        }
    }

    /// Fills `data` as far as there is something; the rest keeps its value.
    fn read_access(&mut self, access: &RegionAccess, data: &mut [u8]) {
        if !self
            .info
            .region(access.region)
            .is_some_and(|r| r.readable && inside(access, r.size))
        {
            return self.stray("read", access);
        }
        self.read_pieces(access, data);
        if access.region == CONFIG_REGION {
            self.read_window(access.offset, data);
        }
    }

    fn read_pieces(&mut self, access: &RegionAccess, data: &mut [u8]) {
        let len = data.len();
        for (side, offset, len) in self.info.routes().pieces(access.region, access.offset, len) {
            let start = (offset - access.offset) as usize;
            let Some(piece) = data.get_mut(start..start + len) else {
                continue;
            };
            match side {
                Side::Data => self.data.read(access.region, offset, piece),
                Side::Control => self.control.read(access.region, offset, piece),
            }
        }
    }

    fn stray(&mut self, what: &str, access: &RegionAccess) {
        self.strays += 1;
        debug!(
            "stray {what} number {}: region {}, offset {:#x}, {} bytes",
            self.strays, access.region, access.offset, access.count
        );
    }
}

/// The access of a BAR that an access of the window's data stands for.
fn behind(window: &ConfigWindow) -> Option<RegionAccess> {
    window.place().map(|place| RegionAccess {
        offset: place.offset,
        region: place.bar,
        count: place.len as u32,
    })
}

fn inside(access: &RegionAccess, size: u64) -> bool {
    access
        .offset
        .checked_add(u64::from(access.count))
        .is_some_and(|end| end <= size)
}
