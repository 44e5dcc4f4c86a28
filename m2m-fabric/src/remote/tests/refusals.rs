//! Who gets no connection, and what each side says.

use super::*;
use crate::remote::handshake;
use rustls::crypto::ring;
use rustls::version::TLS13;
use rustls::{AlertDescription, CertificateError, ClientConfig, Error, RootCertStore};

/// How both sides fail when one with `om` listens and one with `em` connects.
fn refused(om: Files, em: &Files) -> (FabricError, FabricError) {
    let (listener, address) = listen(om, SILENCE);
    std::thread::scope(|scope| {
        let em = scope.spawn(|| connect(&address, em, Arc::new(Module::default())));
        let om = listener
            .accept()
            .unwrap()
            .start(Arc::new(Module::default()));
        let em = em.join().unwrap();
        (om.err().expect("refused"), em.err().expect("refused"))
    })
}

#[test]
fn files_that_are_missing_or_something_else_are_named() {
    let authority = Authority::new();
    let good = authority.files("em1");
    let complaint = |files: &Files| {
        let em = connect("127.0.0.1:1", files, Arc::new(Module::default()));
        em.err().expect("refused").to_string()
    };
    let gone = authority.file("gone.pem");
    for files in [
        Files {
            ca: gone.clone(),
            ..good.clone()
        },
        Files {
            certificate: gone.clone(),
            ..good.clone()
        },
        Files {
            key: gone.clone(),
            ..good.clone()
        },
    ] {
        let said = complaint(&files);
        assert!(said.starts_with("cannot read "), "{said}");
        assert!(said.contains("gone.pem: No such file"), "{said}");
    }
    let key_as_certificate = Files {
        certificate: good.key.clone(),
        ..good.clone()
    };
    let said = complaint(&key_as_certificate);
    assert!(
        said.contains("em1.key is no certificate in PEM form"),
        "{said}"
    );
    let other_key = Files {
        key: authority.files("em2").key,
        ..good.clone()
    };
    let said = complaint(&other_key);
    assert!(said.contains("em1.pem cannot be used with"), "{said}");
    let listens = RemoteListener::bind(([127, 0, 0, 1], 0).into(), other_key);
    assert!(matches!(listens, Err(FabricError::Credentials(_))));
}

#[test]
fn an_em_of_another_authority_is_refused_and_hears_it() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let em = Files {
        ca: ours.file("ca.pem"),
        ..theirs.files("em1")
    };
    let (om, em) = refused(ours.files("om"), &em);
    let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
    assert!(matches!(om, FabricError::Tls(e) if e == unknown));
    let told = Error::AlertReceived(AlertDescription::UnknownCA);
    assert!(matches!(&em, FabricError::Tls(e) if *e == told), "{em}");
}

#[test]
fn an_om_of_another_authority_is_refused() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let om = Files {
        ca: ours.file("ca.pem"),
        ..theirs.files("om")
    };
    let (om, em) = refused(om, &ours.files("em1"));
    let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
    assert!(matches!(em, FabricError::Tls(e) if e == unknown));
    let told = Error::AlertReceived(AlertDescription::UnknownCA);
    assert!(matches!(&om, FabricError::Tls(e) if *e == told), "{om}");
}

#[test]
fn a_certificate_that_has_expired_is_refused() {
    let authority = Authority::new();
    let (om, em) = refused(authority.files("om"), &authority.expired("em1"));
    assert!(om.to_string().contains("expired"), "{om}");
    let told = Error::AlertReceived(AlertDescription::CertificateExpired);
    assert!(matches!(&em, FabricError::Tls(e) if *e == told), "{em}");
    let (_, em) = refused(authority.expired("om"), &authority.files("em1"));
    assert!(em.to_string().contains("expired"), "{em}");
}

#[test]
fn an_em_is_not_taken_for_the_om() {
    let authority = Authority::new();
    let (_, em) = refused(authority.files("em2"), &authority.files("em1"));
    assert!(em.to_string().contains("not valid for name \"om\""), "{em}");
}

#[test]
fn an_em_may_only_call_itself_what_its_certificate_does() {
    let pair = pair();
    pair.om.check_name("em1").unwrap();
    for (name, why) in [
        ("em2", "not valid for name \"em2\""),
        ("om", "not valid for name"),
        ("a b", "no certificate can have it"),
        ("127.0.0.1", "no certificate can have it"),
        ("", "no certificate can have it"),
    ] {
        let said = pair.om.check_name(name).unwrap_err().to_string();
        let start = format!("the peer calls itself \"{name}\", but its certificate");
        assert!(said.starts_with(&start) && said.contains(why), "{said}");
    }
    pair.em.check_name("om").unwrap();
}

#[test]
fn a_peer_without_a_certificate_is_refused() {
    let authority = Authority::new();
    let (listener, address) = listen(authority.files("om"), SILENCE);
    let roots: RootCertStore = {
        use rustls::pki_types::{CertificateDer, pem::PemObject};
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_file(authority.file("ca.pem")).unwrap();
        roots.add(ca).unwrap();
        roots
    };
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let (om, em) = std::thread::scope(|scope| {
        let em = scope.spawn(|| {
            let (socket, handler) = (reach(&address).unwrap(), Arc::new(Module::default()));
            handshake::greet(socket, Arc::new(config), OM_NAME, handler, SILENCE)
        });
        let om = listener
            .accept()
            .unwrap()
            .start(Arc::new(Module::default()));
        (
            om.err().expect("refused"),
            em.join().unwrap().err().expect("refused"),
        )
    });
    assert!(matches!(
        om,
        FabricError::Tls(Error::NoCertificatesPresented)
    ));
    let told = Error::AlertReceived(AlertDescription::CertificateRequired);
    assert!(matches!(&em, FabricError::Tls(e) if *e == told), "{em}");
}

#[test]
fn where_nobody_listens_is_said() {
    let authority = Authority::new();
    // One that was bound and is not any more.
    let (listener, address) = listen(authority.files("om"), SILENCE);
    drop(listener);
    let em = connect(
        &address,
        &authority.files("em1"),
        Arc::new(Module::default()),
    );
    let said = em.err().expect("refused").to_string();
    assert!(
        said.starts_with(&format!("cannot connect to {address}: ")),
        "{said}"
    );
}

#[test]
fn renewed_certificates_count_from_the_next_connection_on() {
    let authority = Authority::new();
    let files = authority.expired("om");
    let (listener, address) = listen(files, SILENCE);
    let em = authority.files("em1");
    let attempt = || {
        std::thread::scope(|scope| {
            let em = scope.spawn(|| connect(&address, &em, Arc::new(Module::default())));
            let om = listener
                .accept()
                .unwrap()
                .start(Arc::new(Module::default()));
            (om.is_ok(), em.join().unwrap().is_ok())
        })
    };
    assert_eq!(attempt(), (false, false));
    authority.files("om");
    assert_eq!(attempt(), (true, true));
}
