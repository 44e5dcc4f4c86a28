//! CREATE_MKEY, DESTROY_MKEY, QUERY_MKEY, QUERY_SPECIAL_CONTEXTS.

use super::super::Device;
use super::super::bits::get64;
use super::super::fields::mkc;
use super::super::pages::{Charge, list};
use super::{Command, Output, Status};
use crate::rdma::verbs::{Denied, MemKey, Pd, Region, Rights, Translation};

/// Access modes (`MLX5_MKC_ACCESS_MODE_*`).
const PHYSICAL: u32 = 0;
const MTT: u32 = 1;

/// Entries in a 16-byte unit of a translation.
const MTTS_PER_OCTWORD: u64 = 2;
/// log₂ of the page that a free key has until it is registered.
const DEFAULT_SHIFT: u8 = 12;

/// What is known of a memory key beside its region.
#[derive(Debug)]
pub(crate) struct MkeyObject {
    context: [u8; mkc::LEN],
    _charge: Charge,
}

impl From<Denied> for Status {
    fn from(_: Denied) -> Self {
        Self::NoResources
    }
}

/// The rights that a context gives.
fn rights(context: &[u8]) -> Rights {
    Rights::LOCAL_WRITE.when(mkc::LW.is_set(context))
        | Rights::REMOTE_WRITE.when(mkc::RW.is_set(context))
        | Rights::REMOTE_READ.when(mkc::RR.is_set(context))
        | Rights::REMOTE_ATOMIC.when(mkc::A.is_set(context))
        | Rights::REMOTE_INVALIDATE.when(mkc::EN_RINVAL.is_set(context))
}

/// Pages that a free key may get. Lists are registered in units of 64 bytes.
fn free_pages(context: &[u8]) -> u64 {
    let octwords = u64::from(mkc::TRANSLATIONS_OCTWORD_SIZE.get(context));
    (octwords * MTTS_PER_OCTWORD).next_multiple_of(8)
}

impl Device {
    pub(in super::super) fn create_mkey(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let context = command.context::<{ mkc::LEN }>(mkc::AT);
        let beyond = [mkc::PG_ACCESS, mkc::MKEY_UMEM_VALID];
        if beyond.iter().any(|field| command.get(*field) != 0) || mkc::BSF_EN.is_set(&context) {
            return Err(Status::BadParameter);
        }
        let free = mkc::FREE.is_set(&context);
        let pd = mkc::PD.get(&context);
        // A free key gets its domain when it is registered.
        if !free && !self.replaying() {
            self.objects.pds.get(pd)?;
        }
        let start = get64(&context, mkc::START_ADDR);
        let len = match mkc::LENGTH64.is_set(&context) {
            true => u64::MAX,
            false => get64(&context, mkc::LEN_FIELD),
        };
        let (translation, capacity, charge) =
            self.translation(command, &context, free, (start, len))?;
        let index = match self.forced_mkey.take() {
            Some(index) => index,
            None => self.engine.regions_mut().allocate()?,
        };
        let region = Region {
            key: MemKey(index << 8 | mkc::MKEY_7_0.get(&context)),
            pd: Pd(pd),
            rights: rights(&context),
            start,
            len,
            translation,
            capacity,
            valid: !free,
        };
        match self.replaying() {
            true => self.engine.regions_mut().put_back(region)?,
            false => self.engine.regions_mut().insert(region)?,
        }
        let object = MkeyObject {
            context,
            _charge: charge,
        };
        self.objects.mkeys.insert(index, object);
        out.set_index(index);
        Ok(())
    }

    /// Where the bytes of a new key are, and how many pages it may have. A free key is charged for the
    /// list that it may get.
    fn translation(
        &self,
        command: &Command,
        context: &[u8],
        free: bool,
        (start, len): (u64, u64),
    ) -> Result<(Translation, usize, Charge), Status> {
        let allowance = &self.objects.allowance;
        let mode = mkc::ACCESS_MODE_4_2.get(context) << 2 | mkc::ACCESS_MODE_1_0.get(context);
        match (mode, free) {
            (PHYSICAL, _) => Ok((
                Translation::Identity,
                0,
                allowance.take(0).ok_or(Status::LimitExceeded)?,
            )),
            (MTT, true) => {
                let translation = Translation::Pages {
                    shift: DEFAULT_SHIFT,
                    pages: [].into(),
                    offset: 0,
                };
                let capacity = free_pages(context);
                Ok((
                    translation,
                    capacity as usize,
                    allowance.take(capacity * 8).ok_or(Status::LimitExceeded)?,
                ))
            }
            (MTT, false) => {
                let shift = mkc::LOG_PAGE_SIZE.get(context);
                let size = 1u64.checked_shl(shift).ok_or(Status::BadParameter)?;
                let offset = start & (size - 1);
                let entries = MTTS_PER_OCTWORD
                    * u64::from(command.get(mkc::TRANSLATIONS_OCTWORD_ACTUAL_SIZE));
                let end = offset.checked_add(len).ok_or(Status::BadParameter)?;
                if end.div_ceil(size) > entries {
                    return Err(Status::BadParameter);
                }
                let (list, charge) = list(&command.input, shift, offset, len, allowance)?;
                let capacity = list.pages.len();
                let translation = Translation::Pages {
                    shift: list.shift,
                    pages: list.pages,
                    offset,
                };
                Ok((translation, capacity, charge))
            }
            _ => Err(Status::BadParameter),
        }
    }

    pub(in super::super) fn destroy_mkey(&mut self, command: &Command) -> Result<(), Status> {
        let index = command.index();
        self.objects
            .mkeys
            .remove(&index)
            .ok_or(Status::BadResource)?;
        self.engine.regions_mut().remove(index);
        Ok(())
    }

    pub(in super::super) fn query_mkey(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let index = command.index();
        let object = self.objects.mkeys.get(&index).ok_or(Status::BadResource)?;
        out.put(mkc::AT, &object.context);
        Ok(())
    }

    /// There are no keys with a meaning of their own; the capabilities say so too.
    pub(in super::super) fn query_special_contexts(&self, out: &mut Output) -> Result<(), Status> {
        out.bytes(0x20);
        Ok(())
    }
}
