//! What is wrong with a configuration file, and where.

use std::path::PathBuf;

/// Why a configuration file was refused. Displays as one sentence that starts with file and line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML, or says something that cannot be.
    #[error("{file}{}: {message}", line.map(|l| format!(":{l}")).unwrap_or_default())]
    At {
        /// The file as it was named.
        file: String,
        /// Line from 1; none when the trouble is what the file does not have.
        line: Option<usize>,
        /// What is wrong and what would be right.
        message: String,
    },
}
