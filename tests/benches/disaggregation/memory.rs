//! Memory by the number of EMs, each with a virtio-net function whose guest runs: that of OMs is the control plane's.

use crate::figures::{Metric, Outcome};
use crate::processes::{pss, rss, written};
use crate::{COUNTS, single};
use distdpu_tests::dpu::{Dpu, Net};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};

/// How often each system is started.
const STARTS: usize = 3;
const KIB: f64 = 1024.0;

/// KiB of some processes.
type Measure = fn(&[u32]) -> Outcome<u64>;

const MEASURES: [(&str, &str, Measure); 3] = [
    ("pss", "PSS", pss),
    ("rss", "RSS", rss),
    ("written", "pages written", written),
];

/// What was measured of systems of one kind and size, start by start.
#[derive(Default)]
struct Seen {
    /// MiB of all OMs, by measure.
    oms: [Vec<f64>; MEASURES.len()],
    /// PSS of an EM before it has a guest, MiB.
    em: Vec<f64>,
}

impl Seen {
    /// Starts `dpus` DPUs with `ems` EMs each.
    fn add(&mut self, dpus: usize, ems: usize) -> Outcome<()> {
        let dpus = (0..dpus).map(|_| Dpu::start(&vec![Net::default(); ems]));
        let dpus = dpus.collect::<Result<Vec<_>, _>>()?;
        let all = || {
            dpus.iter()
                .flat_map(|dpu| (0..ems).map(move |em| (dpu, em)))
        };
        // Before there are guests, whose memory an EM maps.
        let pids = all().map(|(dpu, em)| dpu.em_pid(em));
        let pids = pids.collect::<Result<Vec<_>, _>>()?;
        self.em.push(pss(&pids)? as f64 / KIB / pids.len() as f64);
        let mut guests = Vec::new();
        for (dpu, em) in all() {
            let mut guest = VirtioNet::open(&dpu.socket(em), Guest::default())?;
            guest.start(Setup::default())?;
            guests.push(guest);
        }
        let oms: Vec<u32> = dpus.iter().map(Dpu::om_pid).collect();
        for (values, (_, _, measure)) in self.oms.iter_mut().zip(MEASURES) {
            values.push(measure(&oms)? as f64 / KIB);
        }
        Ok(())
    }
}

/// One OM with N EMs against N pairs.
pub(crate) fn measure(metrics: &mut Vec<Metric>) -> Outcome<()> {
    let mut alone: Vec<f64> = Vec::new();
    for count in COUNTS {
        let [mut one, mut pairs] = [Seen::default(), Seen::default()];
        for _ in 0..STARTS {
            one.add(1, count)?;
            pairs.add(count, 1)?;
        }
        let [pss_of_one, ..] = &one.oms;
        if count == 1 {
            alone.clone_from(pss_of_one);
        } else {
            let more = pss_of_one.iter().zip(&alone);
            let more = more.map(|(now, alone)| (now - alone) * KIB / (count - 1) as f64);
            let what = format!("PSS of the OM by EM added, of {count}");
            metrics.push(single(
                format!("om_per_em_{count}"),
                what,
                "KiB",
                more.collect(),
            ));
        }
        let all = one.oms.into_iter().zip(pairs.oms).zip(MEASURES);
        for ((one, pairs), (short, what, _)) in all {
            let ratios = pairs.iter().zip(&one).map(|(a, b)| a / b).collect();
            let name = format!("control_{short}_one_om_{count}");
            let control = format!("control plane of {count} functions, {what}");
            metrics.push(single(
                name.clone(),
                format!("{control}, one OM"),
                "MiB",
                one,
            ));
            metrics.push(Metric {
                name: format!("control_{short}_pairs_{count}"),
                what: format!("{control}, a pair each"),
                unit: "MiB",
                values: pairs,
                against: Some((name, ratios)),
            });
        }
        let what = format!("PSS of an EM of {count} before it has a guest");
        metrics.push(single(format!("em_pss_{count}"), what, "MiB", one.em));
    }
    Ok(())
}
