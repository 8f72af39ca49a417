//! How many requests a client may send in a minute. A client is an API key, or an address where the server asks for no key.
//!
//! A token bucket for each client: it starts full, holds the requests of one minute, and refills evenly over a minute. A client may send all of them
//! at once, and then as fast as the bucket refills.

use crate::error::ApiError;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of remembered clients from which on clients with a full bucket are forgotten.
const REMEMBERED: usize = 1024;

/// Who sends requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RateClient {
    /// Whoever has this API key.
    Key(String),
    /// Whoever is at this address; `None` if the connection has ended.
    Address(Option<IpAddr>),
}

impl RateClient {
    /// The client at an address. All IPv6 addresses of a /64 network count as one client.
    pub fn at(address: Option<IpAddr>) -> Self {
        let network = |address: IpAddr| match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64))),
            v4 => v4,
        };
        RateClient::Address(address.map(network))
    }
}

/// The requests that a client has left.
struct Left {
    requests: f64,
    /// When the client had this many requests left.
    at: Instant,
}

/// The limit of every client.
pub(crate) struct RateLimit {
    per_minute: u32,
    clients: Mutex<(HashMap<RateClient, Left>, usize)>,
}

impl RateLimit {
    /// A limit of `per_minute` requests for each client.
    pub fn new(per_minute: u32) -> Self {
        RateLimit { per_minute, clients: Mutex::new((HashMap::new(), REMEMBERED)) }
    }

    /// Takes one request from a client's bucket.
    ///
    /// # Errors
    /// The client has none left. The error says when it will have one.
    pub fn take(&self, client: RateClient, now: Instant) -> Result<(), ApiError> {
        let most = f64::from(self.per_minute);
        let left_now = |left: &Left| {
            let back = now.saturating_duration_since(left.at).as_secs_f64() * most / 60.0;
            (left.requests + back).min(most)
        };
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let (clients, evict_at) = &mut *clients;
        if clients.len() >= *evict_at {
            clients.retain(|_, left| left_now(left) < most);
            *evict_at = REMEMBERED.max(2 * clients.len());
        }
        let left = clients.entry(client).or_insert(Left { requests: most, at: now });
        let requests = left_now(left);
        *left = Left { requests: requests - f64::from(u8::from(requests >= 1.0)), at: now };
        if requests >= 1.0 {
            return Ok(());
        }
        let wait = Duration::from_secs_f64((1.0 - requests) * 60.0 / most);
        Err(ApiError::RateLimited { per_minute: self.per_minute, wait })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> RateClient {
        RateClient::at(Some(text.parse().unwrap()))
    }

    #[test]
    fn a_client_has_its_requests_at_once_and_gets_them_back_over_the_minute() {
        let (limit, start) = (RateLimit::new(6), Instant::now());
        let take = |client: &str, seconds: u64| limit.take(address(client), start + Duration::from_secs(seconds));
        assert!((0..6).all(|_| take("1.2.3.4", 0).is_ok()));
        let wait = Duration::from_secs(10);
        assert_eq!(take("1.2.3.4", 0), Err(ApiError::RateLimited { per_minute: 6, wait }));
        assert!(take("1.2.3.5", 0).is_ok(), "another client has its own");
        assert_eq!(take("1.2.3.4", 7), Err(ApiError::RateLimited { per_minute: 6, wait: Duration::from_secs(3) }));
        assert!(take("1.2.3.4", 10).is_ok() && take("1.2.3.4", 10).is_err(), "one is back");
        assert!(
            (0..6).all(|_| take("1.2.3.4", 1000).is_ok()) && take("1.2.3.4", 1000).is_err(),
            "and no more than six"
        );
    }

    #[test]
    fn a_network_is_one_client_and_clients_are_forgotten() {
        assert_eq!(address("2001:db8::1"), address("2001:db8::2:3:4:5"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_eq!(address("::ffff:1.2.3.4"), address("1.2.3.4"));
        let (limit, start) = (RateLimit::new(60), Instant::now());
        for number in 0..10_000u32 {
            let client = RateClient::at(Some(IpAddr::V4(number.into())));
            limit.take(client, start + Duration::from_millis(u64::from(number))).unwrap();
        }
        assert!(limit.clients.lock().unwrap().0.len() <= 2 * REMEMBERED, "each has all requests again a second later");
    }
}
