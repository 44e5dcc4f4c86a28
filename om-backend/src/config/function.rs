//! From the table of a function to a checked [`FunctionConfig`].

use super::parse::{Borrower, NAME, Seen, name, path};
use super::reader::{At, Table};
use super::values::is_name;
use super::{
    Attachment, ConfigError, Face, FunctionConfig, FunctionKind, IpPrefix, LinkType,
    MAX_SOCKET_PATH, MacAddress, MemoryConfig, NetConfig, RdmaConfig, RdmaFace, VhostMode,
};
use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const PORT: &str = "{ tap = \"NAME\" }, { loopback = true } or { null = true }";

/// The values of `kind`.
#[derive(Clone, Copy)]
enum Kind {
    VirtioNet,
    Rdma(RdmaFace),
    Memory,
}

pub(super) fn function(
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
    let kinds = [
        ("virtio-net", Kind::VirtioNet),
        ("rdma", Kind::Rdma(RdmaFace::Mlx5)),
        ("erdma", Kind::Rdma(RdmaFace::Erdma)),
        ("memory", Kind::Memory),
    ];
    let kind = table.choice("kind", &kinds)?;
    let kind = table.required(
        "kind",
        kind,
        "\"virtio-net\" or \"rdma\" or \"erdma\" or \"memory\"",
    )?;
    // complaints about keys that only other kinds have say so
    let face = match kind {
        Kind::VirtioNet => None,
        Kind::Rdma(face) => {
            table.rename(match face {
                RdmaFace::Mlx5 => "a function of kind \"rdma\"",
                RdmaFace::Erdma => "a function of kind \"erdma\"",
            });
            Some(face)
        }
        Kind::Memory => {
            table.rename("a function of kind \"memory\"");
            return memory(table, run_dir, name.value, seen);
        }
    };
    let vm = vm(&mut table)?;
    let mac = mac(&mut table, &name.value, face, vm.as_deref(), seen)?;
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
    let socket = socket(&mut table, run_dir, &name.value, seen)?;
    let (kind, attachment, capture) = match face {
        None => {
            let kind = FunctionKind::VirtioNet(virtio_net(&mut table)?);
            let attachment = attachment(&mut table, networks, &name.value, seen)?;
            (kind, attachment, capture(&mut table, &name.value, seen)?)
        }
        Some(face) => {
            let kind = FunctionKind::Rdma(rdma(&mut table, face)?);
            let wanted = "the name of a `[[network]]`";
            let at = table.string("network", wanted)?;
            let at = table.required("network", at, wanted)?;
            (kind, network(&table, at, networks)?, None)
        }
    };
    let link_up = table
        .choice("link", &[("up", true), ("down", false)])?
        .unwrap_or(true);
    table.finish()?;
    Ok(FunctionConfig {
        name: name.value,
        kind,
        vm,
        mac,
        ip,
        mtu,
        socket,
        attachment,
        capture,
        link_up,
    })
}

/// A function that has neither addresses nor a network.
fn memory(
    mut table: Table<'_>,
    run_dir: &Path,
    name: String,
    seen: &mut Seen,
) -> Result<FunctionConfig, ConfigError> {
    let vm = vm(&mut table)?;
    let wanted = format!("the name of the VM that has it: {NAME}");
    let vm = table.required("vm", vm, &wanted)?;
    let size_mib: u64 = table
        .integer(
            "size_mib",
            1..=1 << 20,
            |n| n.count_ones() == 1,
            "a power of two from 1 to 1048576",
        )?
        .unwrap_or(256);
    let socket = socket(&mut table, run_dir, &name, seen)?;
    table.finish()?;
    Ok(FunctionConfig {
        name,
        kind: FunctionKind::Memory(MemoryConfig {
            bytes: size_mib << 20,
        }),
        vm: Some(vm),
        mac: MacAddress([0; 6]),
        ip: None,
        mtu: 0,
        socket,
        attachment: Attachment::None,
        capture: None,
        link_up: true,
    })
}

/// The VM that has a function.
fn vm(table: &mut Table<'_>) -> Result<Option<String>, ConfigError> {
    let Some(at) = table.string("vm", NAME)? else {
        return Ok(None);
    };
    if is_name(&at.value) {
        return Ok(Some(at.value));
    }
    let complaint = format!("`vm` is \"{}\"; it must be {NAME}", at.value);
    Err(table.error_at(&at, complaint))
}

fn virtio_net(table: &mut Table<'_>) -> Result<NetConfig, ConfigError> {
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
    Ok(NetConfig {
        queue_pairs,
        queue_size,
        speed_mbps,
        face: face(table)?,
    })
}

fn face(table: &mut Table<'_>) -> Result<Face, ConfigError> {
    let faces = [("vfio-user", false), ("vhost-user", true)];
    let modes = [("server", VhostMode::Server), ("client", VhostMode::Client)];
    let vhost = table.choice("face", &faces)?.unwrap_or(false);
    match (vhost, table.choice("vhost_mode", &modes)?) {
        (true, mode) => Ok(Face::VhostUser(mode.unwrap_or(VhostMode::Server))),
        (false, None) => Ok(Face::VfioUser),
        (false, Some(_)) => {
            Err(table.error("`vhost_mode` is for functions with `face = \"vhost-user\"`"))
        }
    }
}

fn rdma(table: &mut Table<'_>, face: RdmaFace) -> Result<RdmaConfig, ConfigError> {
    if face == RdmaFace::Erdma {
        // Both have one value only, so that lists of functions can be of both kinds.
        table.choice("link_type", &[("ethernet", ())])?;
        if table.boolean("mapped_doorbells")? == Some(true) {
            return Err(table.error(
                "`mapped_doorbells` is true; the doorbells of a function of kind \"erdma\" are not mapped",
            ));
        }
        return Ok(RdmaConfig {
            face,
            link_type: LinkType::Ethernet,
            mapped_doorbells: false,
        });
    }
    let link_types = [
        ("ethernet", LinkType::Ethernet),
        ("infiniband", LinkType::Infiniband),
    ];
    Ok(RdmaConfig {
        face,
        link_type: table
            .choice("link_type", &link_types)?
            .unwrap_or(LinkType::Ethernet),
        mapped_doorbells: table.boolean("mapped_doorbells")?.unwrap_or(true),
    })
}

fn capture(
    table: &mut Table<'_>,
    function: &str,
    seen: &mut Seen,
) -> Result<Option<PathBuf>, ConfigError> {
    let wanted = "the path of a pcap file to write";
    let Some(at) = path(table, "capture", wanted, false)? else {
        return Ok(None);
    };
    match seen.captures.insert(at.value.clone(), function.to_owned()) {
        Some(other) => Err(table.error_at(
            &at,
            format!("`capture` is already that of function \"{other}\"; choose another file"),
        )),
        None => Ok(Some(at.value)),
    }
}

fn mac(
    table: &mut Table<'_>,
    function: &str,
    face: Option<RdmaFace>,
    vm: Option<&str>,
    seen: &mut Seen,
) -> Result<MacAddress, ConfigError> {
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
    let taken = match face {
        Some(RdmaFace::Erdma) => {
            let borrower = Borrower {
                function: function.to_owned(),
                vm: vm.map(str::to_owned),
                em: seen.ems.len(),
                offset: at.offset,
            };
            seen.borrowers.insert(mac, borrower).map(|b| b.function)
        }
        face => {
            if face.is_none() {
                let place = (vm.map(str::to_owned), seen.ems.len());
                seen.interfaces.insert(mac, place);
            }
            seen.macs.insert(mac, function.to_owned())
        }
    };
    if let Some(other) = taken {
        return Err(table.error_at(
            &at,
            format!(
                "`mac` {mac} is already that of function \"{other}\"; give one another address"
            ),
        ));
    }
    Ok(mac)
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
        (Some(at), None) => self::network(table, at, networks),
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

fn network(
    table: &Table<'_>,
    at: At<String>,
    networks: &BTreeSet<String>,
) -> Result<Attachment, ConfigError> {
    if networks.contains(&at.value) {
        return Ok(Attachment::Network(at.value));
    }
    let known: Vec<String> = networks.iter().map(|n| format!("\"{n}\"")).collect();
    let remedy = if known.is_empty() {
        "there is no `[[network]]` yet, add one".to_owned()
    } else {
        format!("it must be {}", known.join(" or "))
    };
    Err(table.error_at(&at, format!("`network` is \"{}\"; {remedy}", at.value)))
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
