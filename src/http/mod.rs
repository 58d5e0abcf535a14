//! Limits for HTTP services: a tower layer, the client's key, the headers, the refusal.
//!
//! [`RateLimitLayer`] guards a service or a route of axum, hyper or tonic; [`check`] does the same
//! inside a handler, where a form field or an account is known. Both ask a [`Gate`]: a
//! [`Limiter`](crate::Limiter), or a closure.
//!
//! ```no_run
//! use axum::{Router, routing::post};
//! use ratevault::http::{RateLimitLayer, TrustedProxies, ip_key_forwarded};
//! use ratevault::{Limiter, Quota, SlidingWindow, Vault};
//! use std::net::SocketAddr;
//!
//! # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
//! let vault = Vault::new("rate_limits")?;
//! let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(5)?)?);
//! // Behind a proxy at 10.0.0.7. Without one leave `key` out.
//! let proxies = TrustedProxies::new(["10.0.0.7"])?;
//! let limit = RateLimitLayer::new(limiter, "login").key(ip_key_forwarded(proxies));
//!
//! let app = Router::new().route("/login", post(async || "welcome").route_layer(limit));
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//! axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What a response shows
//!
//! | field | on | value |
//! |---|---|---|
//! | `x-ratelimit-limit` | every request that was decided | how many requests the quota admits per window |
//! | `x-ratelimit-remaining` | the same | how many places are left after this request |
//! | `x-ratelimit-reset` | the same | when the next place comes free, in Unix seconds, rounded up |
//! | `retry-after` | 429 | how long to wait, in whole seconds, rounded up: whoever waits that long is served |
//! | `cache-control: no-store` | every refusal | |
//!
//! [`RateLimitLayer::ietf_headers`] shows the fields of the IETF draft in their place. A gRPC request
//! (HTTP/2, POST, `application/grpc`) is refused with `RESOURCE_EXHAUSTED`: HTTP 200 and `grpc-status: 8`.
//! A response that has such fields of its own is left as it is. Browsers hide the fields from a page of another origin
//! unless the response lists them in `access-control-expose-headers`; put the layer inside that of
//! CORS, so that refusals have CORS's fields and preflights are not counted.
//!
//! # Who is counted
//!
//! The peer of the connection ([`ip_key`]), or the client that trusted proxies name
//! ([`ip_key_forwarded`]), an IPv6 client by its /64. `X-Forwarded-For` from anybody else is text
//! that the client wrote, and ignored. axum knows the peer if it serves with
//! `into_make_service_with_connect_info::<SocketAddr>()`; with hyper put [`Peer`] into the request's
//! extensions, with tonic use [`IpKey::peer`]: without, all share the key "unknown". A service on a unix socket sees no addresses: its clients
//! share it too, unless [`IpKey::peer`] says who the proxy is.
//!
//! A refusal is sent without reading the request's body. Over HTTP/1 a client that is still sending
//! many megabytes may find its connection closed instead.
//!
//! # When the limiter fails
//!
//! Requests are answered 503, or served with [`RateLimitLayer::fail_open`], until it is well again;
//! that is logged once per interval. A request waits 2 s at most
//! ([`RateLimitLayer::answer_timeout`]).
//!
//! Nothing here blocks the runtime but the end: dropping the last handle of a vault, which a router or
//! a request under way may hold, waits for the disk. Await [`Vault::close_async`](crate::Vault::close_async)
//! before.

mod body;
mod forwarded;
mod headers;
mod key;
mod layer;
mod limit;
mod refusal;
mod rules;
mod service;
mod warning;

use std::sync::LazyLock;

use http::Response;
use http::request::Parts;

pub use body::{RefusalBody, ResponseBody};
pub use forwarded::TrustedProxies;
pub use headers::Admitted;
pub use key::{ClientKey, IpKey, KeyFunction, Peer, ip_key, ip_key_forwarded};
pub use layer::RateLimitLayer;
pub use refusal::{Refusal, plain_text, problem_json};
pub use service::{RateLimit, ResponseFuture};

use crate::limiter::Gate;
use rules::{Case, Rules};

/// Checks one request inside a handler: the fields that its response should show, or the finished
/// refusal.
///
/// For keys that only the handler knows, such as an account in a form. The rules are those of
/// [`RateLimitLayer::new`]; for others use [`RateLimitLayer::check`].
///
/// ```
/// use http::request::Parts;
/// use ratevault::http::{self as limit, ClientKey, RefusalBody};
/// use ratevault::{Limiter, Quota, SlidingWindow, Vault};
///
/// /// A handler: answers with the refusal, or serves and shows what is left.
/// async fn login(
///     limiter: &Limiter<SlidingWindow>,
///     request: &Parts,
///     user: &str,
/// ) -> Result<http::Response<String>, http::Response<RefusalBody>> {
///     // One form for every spelling of a name.
///     let account = |_: &Parts| Some(ClientKey::from(user.trim().to_lowercase()));
///     let admitted = limit::check(request, limiter, "login", account).await?;
///     let mut response = http::Response::new(format!("welcome, {user}"));
///     admitted.add_to(&mut response);
///     Ok(response)
/// }
///
/// # let vault = Vault::builder("rate_limits").in_memory().open()?;
/// # let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(5)?)?);
/// # let (request, ()) = http::Request::new(()).into_parts();
/// # let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
/// # let response = runtime.block_on(login(&limiter, &request, " Ada")).unwrap();
/// # assert_eq!(response.headers()["x-ratelimit-remaining"], "4");
/// # Ok::<(), ratevault::Error>(())
/// ```
///
/// # Errors
///
/// The finished refusal: 429, 503 if the limiter fails, 500 if the key function finds nobody or the
/// endpoint is longer than 256 bytes.
pub async fn check<G: Gate>(
    request: &Parts,
    gate: &G,
    endpoint: &str,
    key: impl KeyFunction,
) -> Result<Admitted, Response<RefusalBody>> {
    static RULES: LazyLock<Rules> = LazyLock::new(Rules::default);
    let case = Case { endpoint, request };
    let asked = RULES.ask(gate, endpoint, key.client(request), 1);
    layer::finish(&RULES, gate, case, asked).await
}
