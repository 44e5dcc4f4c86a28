//! `om`: runs a DPU as its configuration file says, until it is told to end.

use clap::Parser;
use om_backend::Om;
use om_backend::config::Config;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::PathBuf;
use std::process::ExitCode;

/// Orchestration Module of a software DPU: presents functions to VMs and runs the EMs that serve them.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The configuration file (TOML).
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Only check the file.
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("om: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::load(&arguments.config)?;
    if arguments.check {
        let functions: usize = config.ems.iter().map(|em| em.functions.len()).sum();
        println!(
            "{}: {} EMs, {functions} functions, {} networks",
            arguments.config.display(),
            config.ems.len(),
            config.networks.len()
        );
        return Ok(());
    }
    raise_descriptor_limit();
    // Before the EMs start, so that a signal never finds the OM without its handler.
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let om = Om::start(config)?;
    log::info!(
        "ready; dpuctl's socket is {}",
        om.config().dpuctl_socket().display()
    );
    if let Err(e) = sd_notify::notify(&[NotifyState::Ready]) {
        log::warn!("the service manager does not hear that the OM is ready: {e}");
    }
    if let Some(signal) = signals.forever().next() {
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("signal");
        log::info!("{name}: ending the EMs");
    }
    om.stop();
    Ok(())
}

/// A wire takes three descriptors at each end and a guest's memory and interrupts some more: many
/// functions need more than the usual 1024. The EMs inherit the limit.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(e) = setrlimit(Resource::Nofile, raised) {
        log::warn!(
            "the limit of open descriptors stays {:?}: {e}",
            limit.current
        );
    }
}
