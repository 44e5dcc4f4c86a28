//! Who a certificate is for.

use crate::error::FabricError;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

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
    // To a certificate these are the same name, to an OM they are not.
    if name.ends_with('.') || name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(not(
            "a name in a certificate has lower case, and no dot at its end".to_owned(),
        ));
    }
    let wanted = match ServerName::try_from(name) {
        Ok(wanted @ ServerName::DnsName(_)) => wanted,
        _ => return Err(not("no certificate can have it".to_owned())),
    };
    let parsed = ParsedCertificate::try_from(certificate).map_err(|e| not(e.to_string()))?;
    verify_server_name(&parsed, &wanted).map_err(|e| not(e.to_string()))
}
