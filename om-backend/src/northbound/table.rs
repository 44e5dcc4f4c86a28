//! Answers as tables for people.

use super::view::{EmView, FunctionView, Functions, Inspect, RdmaView, Stats, Status};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Columns as wide as their content, numbers to the right.
fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |i: usize| {
        rows.iter()
            .filter_map(|row| row.get(i))
            .map(|cell| cell.chars().count())
            .chain([header.get(i).map_or(0, |h| h.chars().count())])
            .max()
            .unwrap_or(0)
    };
    let numeric = |i: usize| {
        rows.iter()
            .filter_map(|row| row.get(i))
            .all(|cell| cell.chars().all(|c| c.is_ascii_digit()) && !cell.is_empty())
            && !rows.is_empty()
    };
    let columns: Vec<(usize, bool)> = (0..header.len()).map(|i| (width(i), numeric(i))).collect();
    let mut text = String::new();
    let head: Vec<String> = header.iter().map(|h| (*h).to_owned()).collect();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for (cell, (width, numeric)) in row.iter().zip(&columns) {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            match numeric {
                true => line += &format!("{pad}{cell}  "),
                false => line += &format!("{cell}{pad}  "),
            }
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| v.to_string())
}

/// `93 s`, `4 min`, `7 h`, `3 d`.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} h", s / 3600.0),
        s => format!("{:.0} d", s / 86400.0),
    }
}

fn reasons(drops: &BTreeMap<String, u64>) -> String {
    let some: Vec<String> = drops
        .iter()
        .filter(|(_, n)| **n > 0)
        .map(|(why, n)| format!("{why} {n}"))
        .collect();
    match some.is_empty() {
        true => "-".to_owned(),
        false => some.join(", "),
    }
}

/// The OM and its EMs.
pub fn status(status: &Status) -> String {
    let row = |em: &EmView| {
        vec![
            em.name.clone(),
            em.state.clone(),
            match &em.address {
                Some(address) => format!("remote {address}"),
                None if em.remote => "remote".to_owned(),
                None => or_dash(em.pid),
            },
            duration(em.since_s),
            em.restarts.to_string(),
            em.functions.join(" "),
            or_dash(em.reason.as_ref()),
        ]
    };
    let rows: Vec<_> = status.ems.iter().map(row).collect();
    let header = [
        "EM",
        "STATE",
        "PID",
        "FOR",
        "RESTARTS",
        "FUNCTIONS",
        "LAST FAILURE",
    ];
    format!(
        "om {}, process {}, up {}, in {}\n\n{}",
        status.version,
        status.pid,
        duration(status.uptime_s),
        status.run_dir,
        table(&header, &rows)
    )
}

/// The functions.
pub fn functions(functions: &Functions) -> String {
    let row = |f: &FunctionView| {
        let link = match (f.link.as_str(), f.admin.as_str()) {
            ("down", "down") => "down (admin)".to_owned(),
            (link, _) => link.to_owned(),
        };
        vec![
            f.name.clone(),
            f.kind.clone(),
            f.em.clone(),
            match &f.fault {
                Some(fault) => format!("{} ({fault})", f.state),
                None => f.state.clone(),
            },
            link,
            or_dash(Some(&f.mac).filter(|mac| !mac.is_empty())),
            or_dash(f.ip.as_ref()),
            or_dash(Some(f.mtu).filter(|mtu| *mtu != 0)),
            or_dash(
                f.queue_pairs
                    .zip(f.queue_size)
                    .map(|(pairs, size)| format!("{pairs}x{size}")),
            ),
            or_dash(f.rdma.as_ref().map(rdma_address)),
            or_dash(f.network.as_ref().or(f.port.as_ref())),
            f.face.clone(),
            f.socket.clone(),
        ]
    };
    let rows: Vec<_> = functions.functions.iter().map(row).collect();
    let header = [
        "FUNCTION", "KIND", "EM", "STATE", "LINK", "MAC", "IP", "MTU", "QUEUES", "RDMA", "NETWORK",
        "FACE", "SOCKET",
    ];
    table(&header, &rows)
}

/// `lid 3`, or the GIDs in use.
fn rdma_address(rdma: &RdmaView) -> String {
    match rdma.lid {
        Some(lid) => format!("lid {lid}"),
        None if rdma.gids.is_empty() => "no gid".to_owned(),
        None => rdma.gids.join(" "),
    }
}

/// The counters.
pub fn stats(stats: &Stats) -> String {
    let mut queues = Vec::new();
    for f in &stats.functions {
        for q in f.queues.iter().filter(|q| q.enabled || q.packets > 0) {
            queues.push(vec![
                f.name.clone(),
                q.name.clone(),
                q.packets.to_string(),
                q.bytes.to_string(),
                q.kicks.to_string(),
                q.interrupts.to_string(),
                reasons(&q.drops),
            ]);
        }
    }
    let header = [
        "FUNCTION",
        "QUEUE",
        "PACKETS",
        "BYTES",
        "KICKS",
        "INTERRUPTS",
        "DROPS",
    ];
    let mut text = table(&header, &queues);
    let links: Vec<Vec<String>> = stats
        .links
        .iter()
        .map(|l| {
            vec![
                l.em.clone(),
                l.counters.name.clone(),
                l.counters.tx_packets.to_string(),
                l.counters.tx_bytes.to_string(),
                l.counters.rx_packets.to_string(),
                l.counters.rx_bytes.to_string(),
                reasons(&l.counters.drops),
            ]
        })
        .collect();
    let header = ["EM", "WIRE", "SENT", "BYTES", "RECEIVED", "BYTES", "DROPS"];
    let _ = write!(text, "\n{}", table(&header, &links));
    for em in &stats.ems {
        if let Some(error) = &em.error {
            let _ = write!(text, "\nno counters of EM {}: {error}\n", em.name);
        }
    }
    text
}

/// Everything the OM knows, as a tree.
pub fn inspect(all: &Inspect) -> String {
    let mut text = format!("om {} (process {})\n", all.status.version, all.status.pid);
    for em in &all.status.ems {
        let _ = writeln!(
            text,
            "└ em {}: {}, process {}, {} restarts",
            em.name,
            em.state,
            or_dash(em.pid),
            em.restarts
        );
        for f in all.functions.iter().filter(|f| f.em == em.name) {
            let _ = writeln!(
                text,
                "  └ function {}: {} {}, link {}, admin {}, carrier {}",
                f.name, f.kind, f.state, f.link, f.admin, f.carrier
            );
            if let Some(p) = all.presentation.get(&f.name) {
                let flag = |set| if set { '+' } else { '-' };
                let _ = writeln!(
                    text,
                    "    ├ config: mem{} busmaster{} msix{} ({} vectors)",
                    flag(p.memory),
                    flag(p.bus_master),
                    flag(p.msix_enabled),
                    p.msix_vectors
                );
                let _ = writeln!(text, "    ├ header: {}", p.config_header);
                for (index, size) in &p.regions {
                    let _ = writeln!(text, "    ├ region {index}: {size} bytes");
                }
            }
            if let Some(rdma) = &f.rdma {
                let _ = writeln!(
                    text,
                    "    ├ rdma: {}, {}, guid {}, {} files shared",
                    rdma.link_type,
                    rdma_address(rdma),
                    rdma.guid,
                    rdma.shared_files
                );
            }
            for wire in all.wires.iter().filter(|w| w.function == f.name) {
                let _ = writeln!(
                    text,
                    "    └ wire {} to {}: {}",
                    wire.id, wire.to, wire.state
                );
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::northbound::view::FunctionCounters;
    use m2m_fabric::proto::QueueStats;

    #[test]
    fn counters_stand_in_columns_with_the_reasons_of_drops() {
        let queue = |name: &str, packets, drops: &[(&str, u64)]| QueueStats {
            name: name.into(),
            enabled: true,
            packets,
            drops: drops.iter().map(|(w, n)| ((*w).into(), *n)).collect(),
            ..QueueStats::default()
        };
        let all = Stats {
            functions: vec![FunctionCounters {
                name: "net0".into(),
                em: "em0".into(),
                features: "0x0".into(),
                dma_ranges: 0,
                dma_bytes: 0,
                queues: vec![
                    queue("rx0", 12345, &[("no buffer", 7), ("vlan", 0)]),
                    queue("tx0", 9, &[]),
                ],
            }],
            ..Stats::default()
        };
        assert_eq!(
            stats(&all).lines().take(3).collect::<Vec<_>>(),
            [
                "FUNCTION  QUEUE  PACKETS  BYTES  KICKS  INTERRUPTS  DROPS",
                "net0      rx0      12345      0      0           0  no buffer 7",
                "net0      tx0          9      0      0           0  -",
            ]
        );
    }

    #[test]
    fn times_are_short() {
        assert_eq!(duration(93.2), "93 s");
        assert_eq!(duration(240.0), "4 min");
        assert_eq!(duration(36_000.0), "10 h");
        assert_eq!(duration(864_000.0), "10 d");
    }
}
