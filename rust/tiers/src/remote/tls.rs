//! TLS as every remote uses it: rustls with ring, the system's authorities or those of a file.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::url::TlsFiles;

/// The client's side, or why a file can't be used; names the option and the file.
pub(super) fn client(files: &TlsFiles) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    match &files.authorities {
        Some(path) => {
            for authority in certificates("ca", path)? {
                roots
                    .add(authority)
                    .map_err(|error| format!("option ca: {}: {error}", path.display()))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        return Err(
            "this system has no authorities to trust: name a PEM file with option ca".into(),
        );
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let config = match &files.identity {
        None => config.with_no_client_auth(),
        Some((chain, key)) => {
            let key_of = |error| format!("option key: {}: {error}", key.display());
            let secret =
                PrivateKeyDer::from_pem_file(key).map_err(|error| key_of(error.to_string()))?;
            config
                .with_client_auth_cert(certificates("cert", chain)?, secret)
                .map_err(|error| key_of(error.to_string()))?
        }
    };
    Ok(Arc::new(config))
}

fn certificates(option: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let wrong = |error: String| format!("option {option}: {}: {error}", path.display());
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| wrong(error.to_string()))?;
    if found.is_empty() {
        return Err(wrong("no certificate in it: give a PEM file".into()));
    }
    Ok(found)
}
