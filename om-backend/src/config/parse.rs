//! From tables to a checked [`Config`].

use super::reader::{At, Source, Table};
use super::values::is_name;
use super::{
    Attachment, Config, ConfigError, EmConfig, FunctionConfig, FunctionKind, IpPrefix,
    MAX_SOCKET_PATH, MacAddress,
};
use m2m_fabric::proto::MAX_FUNCTIONS;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use toml::de::DeTable;

const NAME: &str = "1 to 32 letters, digits, `-`, `_` or `.`, and start with a letter or digit";
const PORT: &str = "{ tap = \"NAME\" }, { loopback = true } or { null = true }";

/// What must be unique in the whole file.
#[derive(Default)]
struct Seen {
    ems: BTreeSet<String>,
    functions: BTreeSet<String>,
    macs: BTreeMap<MacAddress, String>,
    sockets: BTreeMap<PathBuf, String>,
    captures: BTreeMap<PathBuf, String>,
    taps: BTreeMap<String, String>,
}

pub(super) fn parse(source: Source<'_>) -> Result<Config, ConfigError> {
    let root = DeTable::parse(source.text).map_err(|e| {
        let message = format!("this is not TOML: {}", e.message().trim_end_matches('.'));
        match e.span() {
            Some(span) => source.error(span.start, message),
            None => source.error_without_line(message),
        }
    })?;
    let mut root = Table::new(source, "the file", 0, root.get_ref());

    let (run_dir, em_binary) = dpu(root.table("dpu", "[dpu]", "a table `[dpu]`")?)?;
    for socket in ["m2m.sock", "dpuctl.sock"] {
        let path = run_dir.value.join(socket);
        if path.as_os_str().len() > MAX_SOCKET_PATH {
            return Err(source.error(
                run_dir.offset,
                format!(
                    "`run_dir` makes the socket path {} longer than {MAX_SOCKET_PATH} bytes; \
                     choose a shorter folder",
                    path.display()
                ),
            ));
        }
    }

    let mut networks = BTreeSet::new();
    for mut table in root.tables("network", "[[network]]")? {
        let name = name(&mut table)?;
        if !networks.insert(name.value.clone()) {
            return Err(table.error_at(
                &name,
                format!(
                    "there are two networks named \"{}\"; give one another name",
                    name.value
                ),
            ));
        }
        table.finish()?;
    }

    let mut seen = Seen::default();
    let mut ems = Vec::new();
    for table in root.tables("em", "[[em]]")? {
        ems.push(em(table, &run_dir.value, &networks, &mut seen)?);
    }
    if ems.is_empty() {
        return Err(source.error_without_line("there is no `[[em]]`; a DPU has at least one EM"));
    }
    if seen.functions.len() > MAX_FUNCTIONS as usize {
        return Err(source.error_without_line(format!(
            "there are {} functions; a DPU has at most {MAX_FUNCTIONS}",
            seen.functions.len()
        )));
    }
    root.finish()?;
    Ok(Config {
        run_dir: run_dir.value,
        em_binary,
        networks: networks.into_iter().collect(),
        ems,
    })
}

fn dpu(table: Option<Table<'_>>) -> Result<(At<PathBuf>, Option<PathBuf>), ConfigError> {
    let mut run_dir = At {
        value: PathBuf::from("/run/distdpu"),
        offset: 0,
    };
    let mut em_binary = None;
    if let Some(mut table) = table {
        if let Some(path) = path(&mut table, "run_dir", "the absolute path of a folder", true)? {
            run_dir = path;
        }
        em_binary = path(
            &mut table,
            "em_binary",
            "the path of the EM's program",
            false,
        )?
        .map(|at| at.value);
        table.finish()?;
    }
    Ok((run_dir, em_binary))
}

fn em(
    mut table: Table<'_>,
    run_dir: &Path,
    networks: &BTreeSet<String>,
    seen: &mut Seen,
) -> Result<EmConfig, ConfigError> {
    let name = name(&mut table)?;
    if !seen.ems.insert(name.value.clone()) {
        return Err(table.error_at(
            &name,
            format!(
                "there are two EMs named \"{}\"; give one another name",
                name.value
            ),
        ));
    }
    let managed = table.boolean("managed")?.unwrap_or(true);
    let mut functions = Vec::new();
    for function_table in table.tables("function", "[[em.function]]")? {
        functions.push(function(function_table, run_dir, networks, seen)?);
    }
    if functions.is_empty() {
        return Err(table.error(format!(
            "EM \"{}\" has no `[[em.function]]`; it needs at least one",
            name.value
        )));
    }
    table.finish()?;
    Ok(EmConfig {
        name: name.value,
        managed,
        functions,
    })
}

fn function(
    mut table: Table<'_>,
    run_dir: &Path,
    networks: &BTreeSet<String>,
    seen: &mut Seen,
) -> Result<FunctionConfig, ConfigError> {
    let name = name(&mut table)?;
    if !seen.functions.insert(name.value.clone()) {
        return Err(table.error_at(
            &name,
            format!(
                "there are two functions named \"{}\"; give one another name",
                name.value
            ),
        ));
    }
    let kinds = [("virtio-net", FunctionKind::VirtioNet)];
    let kind = table.choice("kind", &kinds)?;
    let kind = table.required("kind", kind, "\"virtio-net\"")?;
    let mac = mac(&mut table, &name.value, seen)?;
    let wanted = "an address with its prefix length, like \"10.0.0.1/24\"";
    let ip = match table.string("ip", wanted)? {
        Some(at) => Some(at.value.parse::<IpPrefix>().map_err(|()| {
            table.error_at(
                &at,
                format!("`ip` is \"{}\"; it must be {wanted}", at.value),
            )
        })?),
        None => None,
    };
    let mtu = table
        .integer("mtu", 68..=9000, |_| true, "an integer from 68 to 9000")?
        .unwrap_or(1500);
    let queue_pairs = table
        .integer("queue_pairs", 1..=32, |_| true, "an integer from 1 to 32")?
        .unwrap_or(1);
    let queue_size = table
        .integer(
            "queue_size",
            16..=32768,
            |n| n.count_ones() == 1,
            "a power of two from 16 to 32768",
        )?
        .unwrap_or(256);
    // virtio 1.3 §5.1.4: 0 to 0x7fffffff, or "unknown", which is said by leaving the key out
    let speed_mbps = table.integer(
        "speed_mbps",
        1..=i64::from(i32::MAX),
        |_| true,
        "an integer from 1 to 2147483647",
    )?;
    let socket = socket(&mut table, run_dir, &name.value, seen)?;
    let attachment = attachment(&mut table, networks, &name.value, seen)?;
    let capture = match path(
        &mut table,
        "capture",
        "the path of a pcap file to write",
        false,
    )? {
        Some(at) => {
            if let Some(other) = seen.captures.insert(at.value.clone(), name.value.clone()) {
                return Err(table.error_at(
                    &at,
                    format!(
                        "`capture` is already that of function \"{other}\"; choose another file"
                    ),
                ));
            }
            Some(at.value)
        }
        None => None,
    };
    let link_up = table
        .choice("link", &[("up", true), ("down", false)])?
        .unwrap_or(true);
    table.finish()?;
    Ok(FunctionConfig {
        name: name.value,
        kind,
        mac,
        ip,
        mtu,
        queue_pairs,
        queue_size,
        speed_mbps,
        socket,
        attachment,
        capture,
        link_up,
    })
}

fn name(table: &mut Table<'_>) -> Result<At<String>, ConfigError> {
    let name = table.string("name", NAME)?;
    let name = table.required("name", name, NAME)?;
    if !is_name(&name.value) {
        return Err(table.error_at(
            &name,
            format!("`name` is \"{}\"; it must be {NAME}", name.value),
        ));
    }
    Ok(name)
}

fn mac(table: &mut Table<'_>, function: &str, seen: &mut Seen) -> Result<MacAddress, ConfigError> {
    let wanted = "a unicast MAC address, like \"02:00:00:00:00:01\"";
    let at = table.string("mac", wanted)?;
    let at = table.required("mac", at, wanted)?;
    let bad = |why: &str| {
        table.error_at(
            &at,
            format!("`mac` is \"{}\"{why}; it must be {wanted}", at.value),
        )
    };
    let mac: MacAddress = at.value.parse().map_err(|()| bad(""))?;
    if mac.is_multicast() {
        return Err(bad(", a multicast address"));
    }
    if mac.is_zero() {
        return Err(bad(""));
    }
    if let Some(other) = seen.macs.insert(mac, function.to_owned()) {
        return Err(table.error_at(
            &at,
            format!(
                "`mac` {mac} is already that of function \"{other}\"; give one another address"
            ),
        ));
    }
    Ok(mac)
}

fn path(
    table: &mut Table<'_>,
    key: &'static str,
    wanted: &str,
    absolute: bool,
) -> Result<Option<At<PathBuf>>, ConfigError> {
    let Some(at) = table.string(key, wanted)? else {
        return Ok(None);
    };
    let path = PathBuf::from(&at.value);
    if at.value.is_empty() || at.value.contains('\0') || (absolute && !path.is_absolute()) {
        return Err(table.error_at(
            &at,
            format!(
                "`{key}` is \"{}\"; it must be {wanted}",
                at.value.escape_debug()
            ),
        ));
    }
    Ok(Some(At {
        value: path,
        offset: at.offset,
    }))
}

fn socket(
    table: &mut Table<'_>,
    run_dir: &Path,
    function: &str,
    seen: &mut Seen,
) -> Result<PathBuf, ConfigError> {
    let wanted = "the absolute path of a socket to make";
    let given = path(table, "socket", wanted, true)?;
    let socket = match &given {
        Some(at) => at.value.clone(),
        None => run_dir.join(format!("{function}.sock")),
    };
    let error = |message: String| match &given {
        Some(at) => table.error_at(at, message),
        None => table.error(message),
    };
    let length = socket.as_os_str().as_bytes().len();
    if length > MAX_SOCKET_PATH {
        return Err(error(format!(
            "the socket path {} has {length} bytes; at most {MAX_SOCKET_PATH} are possible, \
             choose a shorter `{}`",
            socket.display(),
            if given.is_some() { "socket" } else { "run_dir" },
        )));
    }
    if ["m2m.sock", "dpuctl.sock"]
        .iter()
        .any(|own| run_dir.join(own) == socket)
    {
        return Err(error(format!(
            "the socket path {} is one of the OM's own; choose another `{}`",
            socket.display(),
            if given.is_some() { "socket" } else { "name" },
        )));
    }
    if let Some(other) = seen.sockets.insert(socket.clone(), function.to_owned()) {
        return Err(error(format!(
            "the socket path {} is already that of function \"{other}\"; choose another `socket`",
            socket.display()
        )));
    }
    Ok(socket)
}

fn attachment(
    table: &mut Table<'_>,
    networks: &BTreeSet<String>,
    function: &str,
    seen: &mut Seen,
) -> Result<Attachment, ConfigError> {
    let network = table.string("network", "the name of a `[[network]]`")?;
    let port = table.table("port", "`port`", PORT)?;
    match (network, port) {
        (Some(at), None) => {
            if !networks.contains(&at.value) {
                let known: Vec<String> = networks.iter().map(|n| format!("\"{n}\"")).collect();
                let remedy = if known.is_empty() {
                    "there is no `[[network]]` yet, add one".to_owned()
                } else {
                    format!("it must be {}", known.join(" or "))
                };
                return Err(table.error_at(&at, format!("`network` is \"{}\"; {remedy}", at.value)));
            }
            Ok(Attachment::Network(at.value))
        }
        (None, Some(port)) => self::port(port, function, seen),
        (Some(at), Some(_)) => Err(table.error_at(
            &at,
            format!("function \"{function}\" has both `network` and `port`; keep one"),
        )),
        (None, None) => Err(table.error(format!(
            "function \"{function}\" has neither `network` nor `port`; it must have \
             `network = \"NAME\"` or `port =` {PORT}"
        ))),
    }
}

fn port(mut port: Table<'_>, function: &str, seen: &mut Seen) -> Result<Attachment, ConfigError> {
    let wanted = "the name of a TAP interface, 1 to 15 bytes";
    let tap = port.string("tap", wanted)?;
    let loopback = port.boolean("loopback")?.unwrap_or(false);
    let null = port.boolean("null")?.unwrap_or(false);
    let attachment = match (tap, loopback, null) {
        (Some(at), false, false) => {
            let name = at.value.as_bytes();
            let bad = |b: &u8| matches!(b, b'/' | b':') || !b.is_ascii_graphic();
            if name.is_empty() || name.len() > 15 || name.iter().any(bad) {
                return Err(port.error_at(
                    &at,
                    format!(
                        "`tap` is \"{}\"; it must be {wanted}",
                        at.value.escape_debug()
                    ),
                ));
            }
            if let Some(other) = seen.taps.insert(at.value.clone(), function.to_owned()) {
                return Err(port.error_at(
                    &at,
                    format!(
                        "`tap` \"{}\" is already that of function \"{other}\"; choose another",
                        at.value
                    ),
                ));
            }
            Attachment::Tap(at.value)
        }
        (None, true, false) => Attachment::Loopback,
        (None, false, true) => Attachment::Null,
        _ => {
            // an unknown key is the likelier mistake, and the sentence about it says more
            let error = port.error(format!("`port` must be exactly one of {PORT}"));
            port.finish()?;
            return Err(error);
        }
    };
    port.finish()?;
    Ok(attachment)
}
