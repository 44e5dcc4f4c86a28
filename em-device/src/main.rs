//! `em`: an Execution Module. The OM starts it; by hand: `em --om /run/distdpu/m2m.sock --name em0`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use em_device::em::{Em, Settings};

/// Serves the functions that an OM gives it.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The OM's M2M socket.
    #[arg(long, value_name = "PATH")]
    om: PathBuf,
    /// This EM's name in the OM's configuration.
    #[arg(long)]
    name: String,
    /// Longest time in microseconds that the data path looks for work before it sleeps.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    poll_us: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let settings = Settings {
        name: arguments.name,
        om: arguments.om,
        poll: Duration::from_micros(arguments.poll_us),
    };
    match Em::start(&settings) {
        Ok(em) => {
            em.wait();
            em.stop();
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("em: {e}");
            ExitCode::FAILURE
        }
    }
}
