//! Who a certificate is for.

use crate::error::FabricError;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

/// Whether a certificate can be that of `name`: a DNS name in lower case, without a dot at its end, whose last label is no
/// number.
pub fn is_certifiable(name: &str) -> bool {
    dns_name(name).is_ok()
}

/// The name as it is looked for in a certificate. Why there is none, in a sentence.
fn dns_name(name: &str) -> Result<ServerName<'_>, &'static str> {
    // To a certificate these are the same name, to an OM they are not.
    if name.ends_with('.') || name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err("a name in a certificate has lower case, and no dot at its end");
    }
    match ServerName::try_from(name) {
        Ok(wanted @ ServerName::DnsName(_)) => Ok(wanted),
        _ => Err("no certificate can have it"),
    }
}

/// Whether the certificate of a peer, which was verified before, is that of `name`.
pub(super) fn check(
    certificate: Option<&CertificateDer<'_>>,
    name: &str,
) -> Result<(), FabricError> {
    let not = |why: String| FabricError::NotNamed {
        name: name.to_owned(),
        why,
    };
    let certificate = certificate.ok_or_else(|| not("it showed none".to_owned()))?;
    let wanted = dns_name(name).map_err(|why| not(why.to_owned()))?;
    let parsed = ParsedCertificate::try_from(certificate).map_err(|e| not(e.to_string()))?;
    verify_server_name(&parsed, &wanted).map_err(|e| not(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_certificate_can_have_is_known_without_one() {
        for name in ["em", "em-1", "1em", "em.rack-1", "0xem"] {
            assert!(is_certifiable(name), "{name}");
        }
        let bad = [
            "", "EM", "eM1", "em.", ".em", "em-", "-em", "em..a", "17", "0", "0x1f", "0x", "em.17",
            "10.0.0.1", "::1", "em 1",
        ];
        for name in bad {
            assert!(!is_certifiable(name), "{name}");
        }
    }
}
