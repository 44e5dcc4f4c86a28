//! CREATE_EQ, DESTROY_EQ, QUERY_EQ.

use super::super::Device;
use super::super::eq::{EQE_BYTES, Eq, MAX_LOG_SIZE, event};
use super::super::fields::eqc;
use super::super::pages::queue_pages;
use super::{Command, Output, Status};

/// `eq_number` is 8 bits.
const EQN_MASK: u32 = 0xff;

impl Device {
    pub(in super::super) fn create_eq(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let context = command.context::<{ eqc::LEN }>(eqc::AT);
        let log_size = eqc::LOG_EQ_SIZE.get(&context);
        let vector = eqc::INTR.get(&context);
        if log_size > MAX_LOG_SIZE || vector >= u32::from(self.irqs.count()) {
            return Err(Status::BadParameter);
        }
        let (list, charge) = queue_pages(
            &command.input,
            eqc::LOG_PAGE_SIZE.get(&context),
            eqc::PAGE_OFFSET.get(&context),
            EQE_BYTES << log_size,
            &self.objects.allowance,
        )?;
        let mask = command.context(eqc::EVENT_BITMASK);
        let eq = Eq::new(context, mask, list, charge, self.spec.mapped_doorbells);
        let for_commands = eq.wants(event::CMD);
        let number = self.objects.eqs.add(eq)?;
        if for_commands {
            self.polled_slot = Some(command.slot);
        }
        out.set_index(number);
        Ok(())
    }

    pub(in super::super) fn destroy_eq(&mut self, command: &Command) -> Result<(), Status> {
        let number = command.index() & EQN_MASK;
        self.objects.eqs.remove(number, false).map(|_| ())
    }

    pub(in super::super) fn query_eq(
        &mut self,
        command: &Command,
        out: &mut Output,
    ) -> Result<(), Status> {
        let eq = self.objects.eqs.get(command.index() & EQN_MASK)?;
        out.put(eqc::AT, &eq.query());
        Ok(())
    }
}
