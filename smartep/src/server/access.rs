//! Region reads and writes, split by the routing table.

use log::debug;
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::{ServeError, Server, Session, read};
use crate::proto::{Header, MultiWrite, RegionAccess};
use crate::route::Side;

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
        let within = self
            .info
            .region(access.region)
            .is_some_and(|r| r.readable && inside(&access, r.size));
        if within {
            self.read_pieces(&access, &mut data);
        } else {
            self.stray("read", &access);
        }
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
        if new.flr {
            debug!("function-level reset");
            self.data.reset();
            new = self.control.reset();
        }
        if new != self.state {
            self.data.config_changed(self.state, new);
            self.state = new;
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

fn inside(access: &RegionAccess, size: u64) -> bool {
    access
        .offset
        .checked_add(u64::from(access.count))
        .is_some_and(|end| end <= size)
}
