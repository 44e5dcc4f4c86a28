//! `dpuctl`: asks a running OM.
//!
//! Exit status: 0 done, 1 the OM refused or did not answer, 2 wrong usage, 3 the OM is not running.

use clap::{Parser, Subcommand, ValueEnum};
use om_backend::northbound::client::{AskError, ask};
use om_backend::northbound::protocol::Request;
use om_backend::northbound::table;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Shows and steers a running DPU.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Socket of the OM.
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/run/distdpu/dpuctl.sock",
        global = true
    )]
    socket: PathBuf,
    /// JSON instead of a table.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The OM and its EMs.
    Status,
    /// The functions and where VMMs connect to them.
    Functions,
    /// Counters by queue and wire.
    Stats,
    /// Everything the OM knows, as a tree.
    Inspect,
    /// Lets a running EM go on as another program. Its guests do not notice.
    Upgrade {
        /// Name of the EM.
        em: String,
        /// The program.
        #[arg(long, value_name = "PATH")]
        binary: PathBuf,
    },
    /// Links of functions.
    Link {
        #[command(subcommand)]
        command: LinkCommand,
    },
}

#[derive(Debug, Subcommand)]
enum LinkCommand {
    /// Lets a function's link be up, or takes it down.
    Set {
        /// Name of the function.
        function: String,
        /// What it is to be.
        state: LinkState,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LinkState {
    Up,
    Down,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(text) => {
            // Whoever reads may have read enough.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("dpuctl: {e}");
            ExitCode::from(match e {
                AskError::NotRunning(_) => 3,
                _ => 1,
            })
        }
    }
}

fn run(arguments: &Arguments) -> Result<String, AskError> {
    match &arguments.command {
        Command::Status => show(arguments, &Request::Status, table::status),
        Command::Functions => show(arguments, &Request::Functions, table::functions),
        Command::Stats => show(arguments, &Request::Stats, table::stats),
        Command::Inspect => show(arguments, &Request::Inspect, table::inspect),
        Command::Upgrade { em, binary } => {
            let request = Request::Upgrade {
                em: em.clone(),
                // The OM has another working directory.
                binary: std::path::absolute(binary).map_err(AskError::Io)?,
            };
            show(arguments, &request, nothing)
        }
        Command::Link {
            command: LinkCommand::Set { function, state },
        } => {
            let request = Request::LinkSet {
                function: function.clone(),
                up: matches!(state, LinkState::Up),
            };
            show(arguments, &request, nothing)
        }
    }
}

fn nothing(_: &serde_json::Value) -> String {
    String::new()
}

fn show<T: DeserializeOwned + Serialize>(
    arguments: &Arguments,
    request: &Request,
    table: impl Fn(&T) -> String,
) -> Result<String, AskError> {
    let socket: &Path = &arguments.socket;
    let answer: T = ask(socket, request)?;
    if arguments.json {
        let mut text = serde_json::to_string_pretty(&answer).map_err(AskError::Format)?;
        text.push('\n');
        Ok(text)
    } else {
        Ok(table(&answer))
    }
}
