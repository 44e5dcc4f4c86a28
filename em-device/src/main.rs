//! `em`: an Execution Module. The OM starts it; by hand: `em --om /run/distdpu/m2m.sock --name em0`, for an OM on another
//! host `em --om HOST:PORT --name em1 --ca ca.pem --certificate em1.pem --key em1.key`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use em_device::em::{Em, OmAddress, Settings};
use em_device::slices_sys::{SHORT, ask_for_slices};
use m2m_fabric::remote::Files;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Serves the functions that an OM gives it.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The OM's M2M socket, or where it listens for EMs of other hosts.
    #[arg(
        long,
        value_name = "PATH|HOST:PORT",
        required_unless_present = "formats"
    )]
    om: Option<String>,
    /// Certificate of the authority that signed the OM's (PEM), for an OM on another host.
    #[arg(long, value_name = "FILE", requires = "certificate")]
    ca: Option<PathBuf>,
    /// This EM's certificate, which names it (PEM).
    #[arg(long, value_name = "FILE", requires = "key")]
    certificate: Option<PathBuf>,
    /// The private key of the certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "ca")]
    key: Option<PathBuf>,
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
    let files = arguments.ca.zip(arguments.certificate).zip(arguments.key);
    let files = files.map(|((ca, certificate), key)| Files {
        ca,
        certificate,
        key,
    });
    let om = match address(om, files) {
        Ok(om) => om,
        Err(e) => {
            eprintln!("em: {e}");
            return ExitCode::from(2);
        }
    };
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

/// A path has a slash, an address a colon.
fn address(om: String, files: Option<Files>) -> Result<OmAddress, String> {
    let is_address = !om.contains('/') && om.contains(':');
    match (is_address, files) {
        (true, Some(files)) => Ok(OmAddress::Remote { address: om, files }),
        (false, None) => Ok(OmAddress::Local(om.into())),
        (true, None) => Err(format!(
            "an OM on another host ({om}) takes --ca, --certificate and --key: there is no connection without certificates"
        )),
        (false, Some(_)) => Err(format!(
            "--ca, --certificate and --key are for an OM at HOST:PORT; \"{om}\" is a path"
        )),
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
    em.introduce()?;
    em.wait();
    em.stop();
    Ok(())
}
