//! Protection domains.

use super::super::Device;
use super::{Command, Output, Status};

/// A protection domain.
#[derive(Debug, Default)]
pub(crate) struct PdObject {
    /// Queue pairs and shared receive queues in it.
    pub(crate) users: u32,
}

impl Device {
    pub(in super::super) fn alloc_pd(&mut self, out: &mut Output) -> Result<(), Status> {
        let number = self.objects.pds.add(PdObject::default())?;
        out.set_index(number);
        Ok(())
    }

    pub(in super::super) fn dealloc_pd(&mut self, command: &Command) -> Result<(), Status> {
        let number = command.index();
        if self.objects.pds.get(number)?.users != 0 {
            return Err(Status::Busy);
        }
        self.objects.pds.remove(number, false)?;
        Ok(())
    }

    /// An object left the domain.
    pub(super) fn release_pd(&mut self, number: u32) {
        if let Ok(pd) = self.objects.pds.get_mut(number) {
            pd.users = pd.users.saturating_sub(1);
        }
    }
}
