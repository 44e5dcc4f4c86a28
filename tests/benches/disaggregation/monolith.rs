//! OM and EMs as threads of one process: what a DPU would be that is not disaggregated. They speak to each other as
//! ever, so that nothing but the process differs.

use crate::figures::Outcome;
use em_device::em::{Em, OmAddress, Settings};
use em_device::slices_sys::{SHORT, ask_for_slices};
use om_backend::Om;
use om_backend::config::Config;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

/// First word of the command line of such a process; the configuration file is the second.
pub(crate) const WORD: &str = "--monolith";

/// Serves until its standard input ends. The EMs of the configuration have `managed = false`.
pub(crate) fn run(config: &str) -> Outcome<()> {
    // As the program `em` does.
    ask_for_slices(SHORT)?;
    let om = Om::start(Config::load(Path::new(config))?)?;
    let mut ems = Vec::new();
    for em in &om.config().ems {
        let settings = Settings {
            name: em.name.clone(),
            om: OmAddress::Local(om.config().m2m_socket()),
            // As the program `em` has it.
            poll: Duration::from_micros(50),
        };
        let em = Em::start(&settings)?;
        em.introduce()?;
        ems.push(em);
    }
    std::io::stdin().read_to_end(&mut Vec::new())?;
    om.stop();
    ems.into_iter().for_each(Em::stop);
    Ok(())
}
