//! EMs of other hosts: where they connect to, and what they can serve.

use super::parse::path;
use super::reader::{At, Table};
use super::{Attachment, ConfigError, FunctionConfig, FunctionKind, RemoteConfig};
use m2m_fabric::remote::{Files, OM_NAME, is_certifiable};
use std::path::PathBuf;

const LISTEN: &str = "an IP address of this host and a port, like \"10.0.0.1:4791\"";

/// The table `[dpu.remote]`.
pub(super) fn remote(mut table: Table<'_>) -> Result<RemoteConfig, ConfigError> {
    let listen = table.string("listen", LISTEN)?;
    let listen = table.required("listen", listen, LISTEN)?;
    let address = listen.value.parse().map_err(|_| {
        table.error_at(
            &listen,
            format!("`listen` is \"{}\"; it must be {LISTEN}", listen.value),
        )
    })?;
    let mut file = |key, wanted| -> Result<PathBuf, ConfigError> {
        let at = path(&mut table, key, wanted, false)?;
        Ok(table.required(key, at, wanted)?.value)
    };
    let files = Files {
        ca: file(
            "ca",
            "the path of the certificate (PEM) of the authority that signs those of EMs",
        )?,
        certificate: file("certificate", "the path of the OM's certificate (PEM)")?,
        key: file(
            "key",
            "the path of the private key (PEM) of the OM's certificate",
        )?,
    };
    table.finish()?;
    Ok(RemoteConfig {
        listen: address,
        files,
    })
}

/// Whether an EM may be on another host.
pub(super) fn check(
    table: &Table<'_>,
    name: &At<String>,
    functions: &[FunctionConfig],
    listens: bool,
) -> Result<(), ConfigError> {
    let em = &name.value;
    if !listens {
        return Err(table.error(format!(
            "EM \"{em}\" is remote, and there is no `[dpu.remote]` that says where it connects to"
        )));
    }
    // One label: a certificate for all names of a domain is not that of an EM.
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if !em.bytes().all(plain) || !is_certifiable(em) || em == OM_NAME {
        return Err(table.error_at(
            name,
            format!(
                "`name` is \"{em}\"; the name of a remote EM is a DNS name in its certificate: lower-case letters, \
                 digits and `-`, no number, no `-` at the end, and not \"{OM_NAME}\""
            ),
        ));
    }
    for f in functions {
        let (name, kind) = (&f.name, f.kind.as_str());
        if !matches!(f.kind, FunctionKind::VirtioNet(_)) {
            return Err(table.error(format!(
                "EM \"{em}\" is remote and has the function \"{name}\" of kind \"{kind}\", whose guest's memory is \
                 shared with other EMs on one host; a remote EM can have functions of kind \"virtio-net\""
            )));
        }
        if let Attachment::Network(network) = &f.attachment {
            return Err(table.error(format!(
                "EM \"{em}\" is remote and its function \"{name}\" is in network \"{network}\", whose wires are memory \
                 that EMs share on one host; give the function a `port`"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    const LISTEN: &str = "[dpu.remote]\nlisten = \"127.0.0.1:4791\"\nca = \"ca.pem\"\n\
                          certificate = \"om.pem\"\nkey = \"om.key\"\n";
    const FUNCTION: &str = "[[em.function]]\nname = \"net1\"\nkind = \"virtio-net\"\n\
                            mac = \"02:00:00:00:00:01\"\n";
    const PORT: &str = "port = { null = true }\n";

    fn said(parts: &[&str]) -> String {
        match Config::parse("dpu.toml", &parts.concat()) {
            Ok(config) => format!("accepted: {config:?}"),
            Err(e) => e.to_string(),
        }
    }

    fn em(lines: &str) -> String {
        said(&[
            LISTEN,
            "[[em]]\nremote = true\n",
            lines,
            "\n",
            FUNCTION,
            PORT,
        ])
    }

    #[test]
    fn a_remote_em_is_not_managed_and_has_ports() {
        let text = [
            LISTEN,
            "[[em]]\nname = \"em-1\"\nremote = true\n",
            FUNCTION,
            PORT,
        ];
        let config = Config::parse("dpu.toml", &text.concat()).unwrap();
        assert!(config.ems[0].remote && !config.ems[0].managed);
        let remote = config.remote.unwrap();
        assert_eq!(remote.listen.to_string(), "127.0.0.1:4791");
        assert_eq!(remote.files.key.to_str(), Some("om.key"));
    }

    #[test]
    fn without_a_place_to_connect_to_there_is_no_remote_em() {
        let head = "[[em]]\nname = \"em1\"\nremote = true\n";
        assert_eq!(
            said(&[head, FUNCTION, PORT]),
            "dpu.toml:1: EM \"em1\" is remote, and there is no `[dpu.remote]` that says where it connects to"
        );
    }

    #[test]
    fn every_key_of_the_place_is_needed_and_checked() {
        let without = |key: &str| {
            let lines = LISTEN.lines().filter(|line| !line.starts_with(key));
            let rest: Vec<&str> = lines.collect();
            said(&[
                &rest.join("\n"),
                "\n[[em]]\nname = \"em1\"\n",
                FUNCTION,
                PORT,
            ])
        };
        for key in ["listen", "ca", "certificate", "key"] {
            let start = format!("dpu.toml:1: [dpu.remote] has no `{key}`; it must be ");
            assert!(without(key).starts_with(&start), "{}", without(key));
        }
        let bad = LISTEN.replace("127.0.0.1:4791", "localhost");
        assert_eq!(
            said(&[&bad]),
            "dpu.toml:2: `listen` is \"localhost\"; it must be an IP address of this host and a port, like \
             \"10.0.0.1:4791\""
        );
    }

    #[test]
    fn the_name_of_a_remote_em_can_be_in_its_certificate() {
        for name in ["em-1", "1em", "0xem"] {
            assert!(em(&format!("name = \"{name}\"")).starts_with("accepted"));
        }
        let bad = [
            "om", "EM1", "eM1", "em_1", "em.a", "em.1", "em.", "em-", "17", "0", "0x1f",
        ];
        for name in bad {
            let said = em(&format!("name = \"{name}\""));
            let start = format!("dpu.toml:8: `name` is \"{name}\"; the name of a remote EM is");
            assert!(said.starts_with(&start), "{said}");
        }
    }

    #[test]
    fn both_faces_and_both_ends_of_a_socket_are_possible() {
        let face = "face = \"vhost-user\"\n";
        for lines in [face.to_owned(), format!("{face}vhost_mode = \"client\"\n")] {
            let head = "[[em]]\nname = \"em1\"\nremote = true\n";
            let said = said(&[LISTEN, head, FUNCTION, &lines, PORT]);
            assert!(said.starts_with("accepted"), "{said}");
        }
    }

    #[test]
    fn what_needs_shared_memory_is_refused() {
        assert!(em("name = \"em1\"\nmanaged = true").contains("both remote and managed"));
        let head = "[[network]]\nname = \"lab\"\n[[em]]\nname = \"em1\"\nremote = true\n";
        let said = |function: &str| said(&[LISTEN, head, function]);
        let network = said(&format!("{FUNCTION}network = \"lab\"\n"));
        assert!(
            network.contains(
                "its function \"net1\" is in network \"lab\", whose wires are memory that EMs share on one host; \
                 give the function a `port`"
            ),
            "{network}"
        );
        let rdma = FUNCTION.replace("virtio-net", "rdma");
        let rdma = said(&format!("{rdma}network = \"lab\"\n"));
        assert!(
            rdma.contains("has the function \"net1\" of kind \"rdma\", whose guest's memory"),
            "{rdma}"
        );
    }
}
