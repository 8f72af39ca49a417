//! Which host names this server answers to. Another site can point its own name at a loopback address (*DNS rebinding*). The browser then takes this
//! server for a part of that site, and only the host name in the request reveals it.

use crate::error::ApiError;
use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri};
use std::net::IpAddr;

/// The names that requests may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostCheck {
    /// Any.
    Any,
    /// The names of the loopback interface, and the names in `also`.
    Loopback {
        /// Further names, in lower case.
        also: Vec<String>,
    },
}

impl HostCheck {
    /// The check for a server that listens on `address`. A server with keys accepts any name, because no web page knows a key. A server on another
    /// address does too, because it does not know all of its own names.
    pub fn new(address: IpAddr, has_keys: bool, allowed: &[String]) -> Self {
        if has_keys || !address.is_loopback() {
            return HostCheck::Any;
        }
        HostCheck::Loopback { also: allowed.iter().map(|name| plain(name)).collect() }
    }

    /// Refuses a request that names another host.
    ///
    /// # Errors
    /// [`ApiError::ForeignHost`].
    pub fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        let HostCheck::Loopback { also } = self else { return Ok(()) };
        let allowed = |host: &str| is_loopback(host) || also.contains(&plain(host));
        let in_headers = headers.get_all(HOST).iter().map(|host| host.to_str().ok()?.parse::<Authority>().ok());
        let mut named: Vec<Option<Authority>> = in_headers.collect();
        named.extend(uri.authority().map(|authority| Some(authority.clone())));
        let foreign = named.iter().find(|host| !host.as_ref().is_some_and(|host| allowed(host.host())));
        match foreign {
            None if !named.is_empty() => Ok(()),
            found => {
                let host = found.and_then(Option::as_ref).map_or("", Authority::host);
                Err(ApiError::ForeignHost(host.to_owned()))
            }
        }
    }
}

/// A name in lower case, without the dot of the DNS root at its end.
fn plain(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

/// Whether a host is this machine's loopback interface. IPv6 addresses are in brackets.
fn is_loopback(host: &str) -> bool {
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    match address.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => plain(host) == "localhost",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn check(hosts: &[&str], uri: &str) -> bool {
        let check = HostCheck::new([127, 0, 0, 1].into(), false, &["Model.Example".to_owned()]);
        let headers = hosts.iter().map(|host| (HOST, HeaderValue::from_str(host).unwrap()));
        check.check(&uri.parse().unwrap(), &headers.collect()).is_ok()
    }

    #[test]
    fn names_of_the_loopback_interface_and_allowed_ones_pass() {
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "localhost.",
            "127.0.0.1:80",
            "127.9.9.9",
            "[::1]:8080",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "model.example",
            "MODEL.example.:9",
        ] {
            assert!(check(&[host], "/v1/models"), "{host}");
        }
        for host in [
            "attacker.example",
            "localhost.attacker.example",
            "localhost@attacker.example",
            "127.0.0.1.attacker.example",
            "128.0.0.1",
            "[::2]",
            "[fe80::1]:8080",
            "0.0.0.0",
            "2130706433",
            "not a host",
            "",
        ] {
            assert!(!check(&[host], "/v1/models"), "{host}");
        }
        assert!(!check(&[], "/"), "a request that names none");
        assert!(!check(&["localhost", "attacker.example"], "/"));
        assert!(!check(&["localhost"], "http://attacker.example/"));
        assert!(check(&["localhost"], "http://localhost:8080/"));
    }

    #[test]
    fn with_a_key_or_for_other_machines_names_are_not_checked() {
        let check = |address: [u8; 4], has_keys| HostCheck::new(address.into(), has_keys, &[]);
        assert_eq!(check([127, 0, 0, 1], true), HostCheck::Any);
        assert_eq!(check([0, 0, 0, 0], false), HostCheck::Any);
        assert_ne!(check([127, 0, 0, 2], false), HostCheck::Any);
    }
}
