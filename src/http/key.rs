//! Whom a request is counted for: addresses as the transport or trusted proxies know them, or
//! whatever a function finds.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header::HeaderName;
use http::request::Parts;
use http::{Extensions, HeaderValue};

use super::forwarded::{TrustedProxies, masked};
use super::warning::Once;
use crate::error::{Error, Result};
use crate::vault::Client;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// What requests without a peer address share.
const UNKNOWN: &str = "unknown";

/// Who is counted: text, bytes or an address, owned.
///
/// It is compared byte by byte: an account's name has to be brought to one form first (trimmed,
/// lower case, NFC), or each spelling is a client of its own.
///
/// ```
/// use ratevault::http::ClientKey;
///
/// let account = ClientKey::from(" Ada ".trim().to_lowercase());
/// assert_eq!(account, ClientKey::from("ada"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClientKey(Owned);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Owned {
    Text(Vec<u8>),
    Address(IpAddr),
}

impl From<String> for ClientKey {
    fn from(text: String) -> Self {
        Self(Owned::Text(text.into_bytes()))
    }
}

impl From<&str> for ClientKey {
    fn from(text: &str) -> Self {
        Self(Owned::Text(text.into()))
    }
}

impl From<Vec<u8>> for ClientKey {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Owned::Text(bytes))
    }
}

impl From<&HeaderValue> for ClientKey {
    fn from(value: &HeaderValue) -> Self {
        Self(Owned::Text(value.as_bytes().into()))
    }
}

impl From<IpAddr> for ClientKey {
    fn from(address: IpAddr) -> Self {
        Self(Owned::Address(address.to_canonical()))
    }
}

impl<'a> From<&'a ClientKey> for Client<'a> {
    fn from(key: &'a ClientKey) -> Self {
        match &key.0 {
            Owned::Text(text) => text.into(),
            Owned::Address(address) => address.into(),
        }
    }
}

/// Finds whom a request is counted for. Closures are one.
pub trait KeyFunction: Send + Sync {
    /// The client, or `None` if there is nobody to count.
    fn client(&self, request: &Parts) -> Option<ClientKey>;
}

impl<F> KeyFunction for F
where
    F: Fn(&Parts) -> Option<ClientKey> + Send + Sync,
{
    fn client(&self, request: &Parts) -> Option<ClientKey> {
        self(request)
    }
}

/// The address a request came from, as a request extension.
///
/// For servers that leave no address of their own there, such as hyper's: whoever accepts a
/// connection knows it.
///
/// ```
/// use http_body_util::Full;
/// use hyper::body::{Bytes, Incoming};
/// use hyper_util::rt::TokioIo;
/// use hyper_util::service::TowerToHyperService;
/// use ratevault::http::{Peer, RateLimitLayer};
/// use ratevault::{Limiter, SlidingWindow};
/// use std::convert::Infallible;
/// use tower::{Layer, ServiceExt, service_fn};
///
/// /// Serves the next connection.
/// async fn serve(
///     listener: &tokio::net::TcpListener,
///     limit: &RateLimitLayer<Limiter<SlidingWindow>>,
/// ) -> Result<(), Box<dyn std::error::Error>> {
///     let (connection, address) = listener.accept().await?;
///     let service = service_fn(async |_request: http::Request<Incoming>| {
///         Ok::<_, Infallible>(http::Response::new(Full::new(Bytes::from("welcome"))))
///     });
///     let service = limit.layer(service).map_request(move |mut request: http::Request<Incoming>| {
///         request.extensions_mut().insert(Peer::from(address));
///         request
///     });
///     hyper::server::conn::http1::Builder::new()
///         .serve_connection(TokioIo::new(connection), TowerToHyperService::new(service))
///         .await?;
///     Ok(())
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer(pub IpAddr);

impl From<SocketAddr> for Peer {
    fn from(socket: SocketAddr) -> Self {
        Self(socket.ip())
    }
}

impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Self {
        Self(address)
    }
}

/// The address that the connection came from. No header is believed.
///
/// It is found in the request's extensions: [`Peer`], or axum's `ConnectInfo<SocketAddr>`. Behind a
/// proxy that is the proxy, so that all its users are one client: use [`ip_key_forwarded`] there.
#[must_use]
pub fn ip_key() -> IpKey {
    IpKey::new(TrustedProxies::default())
}

/// The address of the client behind these proxies, by the `X-Forwarded-For` they append to.
///
/// If the connection came from a trusted address, all lines of the header are walked from the right
/// over trusted ones: the first other one is the client. If it came from anybody else the header is
/// text that the client wrote, and the client is the peer.
#[must_use]
pub fn ip_key_forwarded(trusted: TrustedProxies) -> IpKey {
    IpKey::new(trusted)
}

type FindPeer = dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync;

/// A [`KeyFunction`] that counts addresses: made by [`ip_key`] and [`ip_key_forwarded`].
///
/// IPv6 clients are counted by their /64, as whoever has one address of it has all. Requests
/// without a peer address, such as those of a unix socket, share one client, "unknown".
#[derive(Clone)]
pub struct IpKey {
    trusted: TrustedProxies,
    ipv6_prefix: u8,
    find_peer: Option<Arc<FindPeer>>,
}

/// Once per process: a handler may make a key function for each request, and clients choose what
/// they send.
static WARNED_OF_NO_PEER: Once = Once::new();
static WARNED_OF_A_PROXY: Once = Once::new();

impl IpKey {
    fn new(trusted: TrustedProxies) -> Self {
        Self {
            trusted,
            ipv6_prefix: 64,
            find_peer: None,
        }
    }

    /// How many leading bits of an IPv6 address are one client. Default: 64, because that is the
    /// smallest network a provider hands out.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if it is not between 1 and 128.
    pub fn ipv6_prefix(mut self, bits: u8) -> Result<Self> {
        if !(1..=128).contains(&bits) {
            return Err(Error::InvalidSetting {
                setting: "the IPv6 prefix",
                value: bits.to_string(),
                reason: "it has to be between 1 and 128 bits",
            });
        }
        self.ipv6_prefix = bits;
        Ok(self)
    }

    /// Where the peer's address is. Default: in [`Peer`], else in axum's `ConnectInfo<SocketAddr>`.
    ///
    /// ```
    /// use ratevault::http::ip_key;
    /// use tonic::transport::server::TcpConnectInfo;
    ///
    /// // Where tonic's server leaves it.
    /// let key = ip_key().peer(|extensions| {
    ///     let connection = extensions.get::<TcpConnectInfo>()?;
    ///     Some(connection.remote_addr()?.ip())
    /// });
    /// # let _ = key;
    /// ```
    #[must_use]
    pub fn peer<F>(mut self, find: F) -> Self
    where
        F: Fn(&Extensions) -> Option<IpAddr> + Send + Sync + 'static,
    {
        self.find_peer = Some(Arc::new(find));
        self
    }

    /// The client's address, `None` without a peer address.
    #[must_use]
    pub fn address(&self, request: &Parts) -> Option<IpAddr> {
        let peer = match &self.find_peer {
            Some(find) => find(&request.extensions),
            None => peer(&request.extensions),
        };
        let lines = request.headers.get_all(X_FORWARDED_FOR);
        if self.trusted.is_empty() && lines.iter().next().is_some() && WARNED_OF_A_PROXY.first() {
            tracing::warn!(
                "a request has X-Forwarded-For, which is ignored as no proxy is trusted: behind a proxy use ip_key_forwarded(..), or all its users are one client"
            );
        }
        peer.map(|peer| {
            let lines = lines.iter().map(HeaderValue::as_bytes);
            self.trusted.client(peer, lines)
        })
    }
}

impl KeyFunction for IpKey {
    fn client(&self, request: &Parts) -> Option<ClientKey> {
        let address = self.address(request);
        if address.is_none() && WARNED_OF_NO_PEER.first() {
            tracing::warn!(
                "a request has no peer address, so it is counted as \"unknown\" together with all others like it: put ratevault::http::Peer into its extensions, or serve with axum's into_make_service_with_connect_info::<SocketAddr>()"
            );
        }
        Some(match address {
            Some(address) => masked(address, self.ipv6_prefix).into(),
            None => UNKNOWN.into(),
        })
    }
}

/// The address that whoever accepted the connection left with the request.
fn peer(extensions: &Extensions) -> Option<IpAddr> {
    let peer = extensions.get::<Peer>().map(|peer| peer.0);
    #[cfg(feature = "axum")]
    let peer = peer.or_else(|| {
        let info = extensions.get::<axum::extract::ConnectInfo<SocketAddr>>();
        info.map(|info| info.0.ip())
    });
    peer
}

impl fmt::Debug for IpKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IpKey")
            .field("trusted", &self.trusted)
            .field("ipv6_prefix", &self.ipv6_prefix)
            .finish_non_exhaustive()
    }
}
