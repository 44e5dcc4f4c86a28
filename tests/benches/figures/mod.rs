//! What benchmarks report: a table for people, lines for scripts.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Instant;

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A figure, measured several times.
pub(crate) struct Metric {
    pub(crate) name: String,
    pub(crate) what: String,
    pub(crate) unit: &'static str,
    pub(crate) values: Vec<f64>,
    /// Name of the metric it is compared with, and the ratios round by round.
    pub(crate) against: Option<(String, Vec<f64>)>,
}

pub(crate) fn check(cqe: distdpu_tests::mlx5::Cqe) -> Outcome<()> {
    match cqe.opcode {
        0 => Ok(()),
        _ => Err(format!("a request failed: {cqe:?}").into()),
    }
}

pub(crate) fn gigabytes(bytes: u64, since: Instant) -> f64 {
    bytes as f64 / since.elapsed().as_secs_f64() / 1e9
}

pub(crate) fn report(metrics: &[Metric], bars: &str) -> Outcome<()> {
    println!(
        "{:80} {:>9} {:>9} {:>9} {:5} {:>7}",
        "", "median", "p10", "p90", "", "ratio"
    );
    let mut json = match std::env::var_os("DISTDPU_BENCH_JSON") {
        Some(path) => Some(OpenOptions::new().create(true).append(true).open(path)?),
        None => None,
    };
    for metric in metrics {
        let at = |q| quantile(metric.values.clone(), q);
        let ratio = metric
            .against
            .as_ref()
            .map(|(_, ratios)| quantile(ratios.clone(), 0.5));
        println!(
            "{:80} {:9.2} {:9.2} {:9.2} {:5} {:>7}",
            metric.what,
            at(0.5),
            at(0.1),
            at(0.9),
            metric.unit,
            ratio.map_or(String::new(), |r| format!("{r:.2}x")),
        );
        if let Some(file) = &mut json {
            let line = serde_json::json!({
                "metric": metric.name,
                "value": at(0.5),
                "unit": metric.unit,
                "compared_with": metric.against.as_ref().map(|a| &a.0),
                "ratio": ratio,
                "samples": metric.values.len(),
            });
            writeln!(file, "{line}")?;
        }
    }
    println!("{bars}");
    Ok(())
}

fn quantile(mut values: Vec<f64>, q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len().saturating_sub(1) as f64 * q).round() as usize;
    values.get(at).copied().unwrap_or(f64::NAN)
}
