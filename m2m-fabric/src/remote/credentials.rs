//! Certificates and keys, from files.

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the certificates of one side are; all files are PEM. They are read anew for each connection, so that renewed
/// certificates count from the next one on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The certificate of the authority, or several: who may have signed the peer's.
    pub ca: PathBuf,
    /// This side's certificate, and behind it those between it and the authority's.
    pub certificate: PathBuf,
    /// The private key of this side's certificate.
    pub key: PathBuf,
}

/// Why a side cannot prove who it is, or verify who the other is.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error("cannot read {what} {}: {source}", path.display())]
    Read {
        /// What should be there.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{} is no {what} in PEM form: {reason}", path.display())]
    Pem {
        /// What should be there.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The authority's certificate is of no use.
    #[error("no certificate in {} can be that of an authority: {reason}", path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Certificate and key do not fit, or are of a kind that is not supported.
    #[error("{} cannot be used with {}: {reason}", certificate.display(), key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why not.
        reason: String,
    },
}

const AUTHORITY: &str = "certificate of an authority";
const CERTIFICATE: &str = "certificate";
const KEY: &str = "private key";

/// What is in the [`Files`].
struct Credentials {
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

impl Files {
    /// What the connecting side proves and demands.
    pub(super) fn client(&self) -> Result<Arc<ClientConfig>, CredentialsError> {
        let Credentials { roots, chain, key } = self.read()?;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| self.pair(&e))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(|e| self.pair(&e))?;
        // Each connection verifies anew.
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// What the listening side proves and demands.
    pub(super) fn server(&self) -> Result<Arc<ServerConfig>, CredentialsError> {
        let Credentials { roots, chain, key } = self.read()?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
            .build()
            .map_err(|e| CredentialsError::Authority {
                path: self.ca.clone(),
                reason: e.to_string(),
            })?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| self.pair(&e))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(|e| self.pair(&e))?;
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    fn pair(&self, error: &rustls::Error) -> CredentialsError {
        CredentialsError::Pair {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            reason: error.to_string(),
        }
    }

    fn read(&self) -> Result<Credentials, CredentialsError> {
        let mut roots = RootCertStore::empty();
        for root in certificates(AUTHORITY, &self.ca)? {
            roots.add(root).map_err(|e| CredentialsError::Authority {
                path: self.ca.clone(),
                reason: e.to_string(),
            })?;
        }
        Ok(Credentials {
            roots: Arc::new(roots),
            chain: certificates(CERTIFICATE, &self.certificate)?,
            key: PrivateKeyDer::from_pem_file(&self.key).map_err(|e| broken(KEY, &self.key, e))?,
        })
    }
}

/// All certificates of a file; at least one.
fn certificates(
    what: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let broken = |error| broken(what, path, error);
    let all = CertificateDer::pem_file_iter(path).map_err(broken)?;
    let all: Vec<_> = all.collect::<Result<_, _>>().map_err(broken)?;
    match all.is_empty() {
        true => Err(broken(pem::Error::NoItemsFound)),
        false => Ok(all),
    }
}

fn broken(what: &'static str, path: &Path, error: pem::Error) -> CredentialsError {
    let path = path.to_owned();
    match error {
        pem::Error::Io(source) => CredentialsError::Read { what, path, source },
        other => CredentialsError::Pem {
            what,
            path,
            reason: other.to_string(),
        },
    }
}
