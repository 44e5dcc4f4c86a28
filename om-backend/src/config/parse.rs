//! From tables to a checked [`Config`].

use super::function::function;
use super::reader::{At, Source, Table};
use super::values::is_name;
use super::{Config, ConfigError, EmConfig, MAX_SOCKET_PATH, MacAddress, RemoteConfig, remote};
use m2m_fabric::proto::MAX_FUNCTIONS;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use toml::de::DeTable;

pub(super) const NAME: &str =
    "1 to 32 letters, digits, `-`, `_` or `.`, and start with a letter or digit";

/// What must be unique in the whole file.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) ems: BTreeSet<String>,
    pub(super) functions: BTreeSet<String>,
    pub(super) macs: BTreeMap<MacAddress, String>,
    /// VM and number of the EM of each virtio network function.
    pub(super) interfaces: BTreeMap<MacAddress, (Option<String>, usize)>,
    /// Functions whose address is that of a virtio network function.
    pub(super) borrowers: BTreeMap<MacAddress, Borrower>,
    pub(super) sockets: BTreeMap<PathBuf, String>,
    pub(super) captures: BTreeMap<PathBuf, String>,
    pub(super) taps: BTreeMap<String, String>,
}

/// A function whose address must be that of a virtio network function of its guest.
pub(super) struct Borrower {
    pub(super) function: String,
    pub(super) vm: Option<String>,
    /// Number of its EM.
    pub(super) em: usize,
    /// Where its address stands in the file.
    pub(super) offset: usize,
}

/// The driver of such a function gives up when its guest has no network interface with its address.
fn check_borrowers(seen: &Seen, source: Source<'_>) -> Result<(), ConfigError> {
    for (mac, borrower) in &seen.borrowers {
        let Borrower {
            function,
            vm,
            em,
            offset,
        } = borrower;
        let guest = match vm {
            Some(vm) => format!("VM \"{vm}\""),
            None => "the same EM, without `vm`".to_owned(),
        };
        let same = match seen.interfaces.get(mac) {
            Some((its_vm @ Some(_), _)) => its_vm == vm,
            Some((None, its_em)) => vm.is_none() && its_em == em,
            None => false,
        };
        if !same {
            return Err(source.error(
                *offset,
                format!(
                    "`mac` of function \"{function}\" is {mac}; a function of kind \"erdma\" has the address of a \
                     function of kind \"virtio-net\" of its guest, and {guest} has none with this one"
                ),
            ));
        }
    }
    Ok(())
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

    let (run_dir, em_binary, remote) = dpu(root.table("dpu", "[dpu]", "a table `[dpu]`")?)?;
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
        let em = em(
            table,
            &run_dir.value,
            &networks,
            remote.is_some(),
            &mut seen,
        )?;
        ems.push(em);
    }
    check_borrowers(&seen, source)?;
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
        remote,
        networks: networks.into_iter().collect(),
        ems,
    })
}

type Dpu = (At<PathBuf>, Option<PathBuf>, Option<RemoteConfig>);

fn dpu(table: Option<Table<'_>>) -> Result<Dpu, ConfigError> {
    let mut run_dir = At {
        value: PathBuf::from("/run/distdpu"),
        offset: 0,
    };
    let (mut em_binary, mut elsewhere) = (None, None);
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
        let table_wanted = "a table `[dpu.remote]`";
        if let Some(table) = table.table("remote", "[dpu.remote]", table_wanted)? {
            elsewhere = Some(remote::remote(table)?);
        }
        table.finish()?;
    }
    Ok((run_dir, em_binary, elsewhere))
}

fn em(
    mut table: Table<'_>,
    run_dir: &Path,
    networks: &BTreeSet<String>,
    listens: bool,
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
    let remote = table.boolean("remote")?.unwrap_or(false);
    let managed = table.boolean("managed")?;
    if remote && managed == Some(true) {
        return Err(table.error(format!(
            "EM \"{}\" is both remote and managed; the OM cannot start it on another host",
            name.value
        )));
    }
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
    if remote {
        remote::check(&table, &name, &functions, listens)?;
    }
    table.finish()?;
    Ok(EmConfig {
        name: name.value,
        managed: managed.unwrap_or(!remote),
        remote,
        functions,
    })
}

pub(super) fn name(table: &mut Table<'_>) -> Result<At<String>, ConfigError> {
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

pub(super) fn path(
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
