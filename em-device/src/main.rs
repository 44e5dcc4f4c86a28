//! `em`: an Execution Module. The OM starts it; by hand: `em --om /run/distdpu/m2m.sock --name em0`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use em_device::em::{Em, Settings};
use em_device::slices_sys::{SHORT, ask_for_slices};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Serves the functions that an OM gives it.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The OM's M2M socket.
    #[arg(long, value_name = "PATH", required_unless_present = "formats")]
    om: Option<PathBuf>,
    /// This EM's name in the OM's configuration.
    #[arg(long, required_unless_present = "formats")]
    name: Option<String>,
    /// Prints the versions of what this program can take over from another EM, and ends.
    #[arg(long, exclusive = true)]
    formats: bool,
    /// Longest time in microseconds that the data path looks for work before it sleeps.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    poll_us: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Both are there unless the formats are asked for, and those exclude both.
    let (Some(om), Some(name)) = (arguments.om, arguments.name) else {
        println!("{}", em_device::em::formats());
        return ExitCode::SUCCESS;
    };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let settings = Settings {
        name,
        om,
        poll: Duration::from_micros(arguments.poll_us),
    };
    match run(&settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("em: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(settings: &Settings) -> Result<(), Box<dyn std::error::Error>> {
    // Before there are threads: they inherit it.
    if let Err(error) = ask_for_slices(SHORT) {
        log::info!("the data path has the scheduler's usual slices: {error}");
    }
    // Before anything is open that a signal must not cut short, as a capture file.
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let em = Em::start(settings)?;
    let stopper = em.stopper();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            if let Some(signal) = signals.forever().next() {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                log::info!("{name}: ending in order");
                stopper();
                // Whoever asks twice does not want to wait for the order.
                if signals.forever().next().is_some() {
                    std::process::exit(1);
                }
            }
        })?;
    em.wait();
    em.stop();
    Ok(())
}
