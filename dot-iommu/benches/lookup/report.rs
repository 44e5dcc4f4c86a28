//! Medians, the table for people, the lines for scripts.

use std::fs::OpenOptions;
use std::io::{self, Write};

use serde_json::json;

/// Nanoseconds a lookup, one per round.
#[derive(Clone)]
pub(crate) struct Samples(pub(crate) Vec<f64>);

impl Samples {
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }

    fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn max(&self) -> f64 {
        self.0.iter().copied().fold(0.0, f64::max)
    }
}

impl std::fmt::Display for Samples {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:6.2} ({:.1}–{:.1})",
            self.median(),
            self.min(),
            self.max()
        )
    }
}

/// Writes one JSON object a line to the file that `DISTDPU_BENCH_JSON` names, if it names one.
pub(crate) struct JsonLines(Option<std::fs::File>);

impl JsonLines {
    pub(crate) fn open() -> io::Result<Self> {
        let Some(path) = std::env::var_os("DISTDPU_BENCH_JSON") else {
            return Ok(JsonLines(None));
        };
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map(|file| JsonLines(Some(file)))
    }

    pub(crate) fn line(
        &mut self,
        metric: &str,
        own: &Samples,
        peer: Option<(&str, &Samples)>,
    ) -> io::Result<()> {
        let Some(file) = &mut self.0 else {
            return Ok(());
        };
        let object = json!({
            "metric": metric,
            "value": own.median(),
            "unit": "ns",
            "compared_with": peer.map(|(name, _)| name),
            "ratio": peer.map(|(_, samples)| samples.median() / own.median()),
            "samples": own.0,
        });
        writeln!(file, "{object}")
    }
}
