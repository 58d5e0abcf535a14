//! `RateLimitLayer`: a limit as a tower layer, and its options.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use tower_layer::Layer;

use super::body::RefusalBody;
use super::headers::{Admitted, HeaderSet, Policies};
use super::key::{KeyFunction, ip_key};
use super::limit::Limit;
use super::refusal::Refusal;
use super::rules::{Asked, Case, Rules};
use super::service::RateLimit;
use crate::error::Result;
use crate::limiter::Gate;

/// Guards a service with a limit: a tower [`Layer`], for axum, hyper and tonic.
///
/// Clones share one count. A request is counted when the service is called: dropping it later takes
/// nothing back. Layers may be nested; a response shows the limit with the fewest places left.
///
/// ```
/// use axum::{Router, routing::post};
/// use ratevault::http::RateLimitLayer;
/// use ratevault::{Limiter, Quota, SlidingWindow, Vault};
///
/// let vault = Vault::builder("rate_limits").in_memory().open()?;
/// let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(5)?)?);
/// let login = post(async || "welcome").route_layer(RateLimitLayer::new(limiter, "login"));
/// let app: Router = Router::new().route("/login", login);
/// # let _ = app;
/// # Ok::<(), ratevault::Error>(())
/// ```
///
/// Serve it with `into_make_service_with_connect_info::<SocketAddr>()`, so that the client's address
/// is known.
pub struct RateLimitLayer<G> {
    limit: Arc<Limit<G>>,
}

impl<G: Gate> RateLimitLayer<G> {
    /// Counts requests at `endpoint` by their [`ip_key`], each as one place.
    ///
    /// The endpoint is a name, such as "login": never the request's path, of which clients can write
    /// many for one page. It may have up to 256 bytes; requests to a longer one are answered 500.
    pub fn new(gate: G, endpoint: impl Into<String>) -> Self {
        Self {
            limit: Arc::new(Limit {
                gate: Arc::new(gate),
                rules: Rules::default(),
                endpoint: endpoint.into().into(),
                #[cfg(feature = "axum")]
                per_route: false,
                key: Arc::new(ip_key()),
                cost: None,
                skip: None,
            }),
        }
    }

    /// Counts requests at the route that axum matched, such as `/users/{id}`: each a limit of its own.
    /// Apply it with `Router::layer` or `route_layer`: around a finished router no route is known yet.
    ///
    ///
    /// Requests that match no route share one, "unmatched". axum matches no route for the root of a
    /// `nest_service`, and sends what a nested router does not know to the outer one's fallback.
    #[cfg(feature = "axum")]
    pub fn per_route(gate: G) -> Self {
        Self::new(gate, "unmatched").changed(|limit| limit.per_route = true)
    }

    fn changed(mut self, change: impl FnOnce(&mut Limit<G>)) -> Self {
        change(Arc::make_mut(&mut self.limit));
        self
    }

    fn ruled(self, change: impl FnOnce(&mut Rules)) -> Self {
        self.changed(|limit| change(&mut limit.rules))
    }

    /// Whom a request is counted for. Default: [`ip_key`], because no header can be believed unless
    /// the proxies are known.
    ///
    /// A key has to be something that the client cannot choose, such as an account that was
    /// authenticated further out: each value of a header that nobody checked would be a new client.
    ///
    /// ```
    /// # use ratevault::{Limiter, Quota, SlidingWindow, Vault};
    /// use http::request::Parts;
    /// use ratevault::http::{ClientKey, RateLimitLayer};
    /// # let vault = Vault::builder("rate_limits").in_memory().open()?;
    /// # let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(5)?)?);
    ///
    /// /// What authentication leaves in the request's extensions.
    /// #[derive(Clone)]
    /// struct Account(String);
    ///
    /// let layer = RateLimitLayer::new(limiter, "api").key(|request: &Parts| {
    ///     let account = request.extensions.get::<Account>()?;
    ///     Some(ClientKey::from(&*account.0))
    /// });
    /// # let _ = layer;
    /// # Ok::<(), ratevault::Error>(())
    /// ```
    #[must_use]
    pub fn key(self, key: impl KeyFunction + 'static) -> Self {
        self.changed(|limit| limit.key = Arc::new(key))
    }

    /// How many places a request takes. Default: 1. A request of cost 0 is served uncounted; one
    /// above the limit could never be served, and is answered 500.
    #[must_use]
    pub fn cost(self, cost: impl Fn(&Parts) -> u32 + Send + Sync + 'static) -> Self {
        self.changed(|limit| limit.cost = Some(Arc::new(cost)))
    }

    /// Which requests are served uncounted. Default: none.
    #[must_use]
    pub fn skip(self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.changed(|limit| limit.skip = Some(Arc::new(skip)))
    }

    /// Serves requests for which the key function finds nobody, uncounted. Default: they are
    /// answered 500, because a limit that does not apply should be seen.
    #[must_use]
    pub fn skip_unkeyed(self) -> Self {
        self.ruled(|rules| rules.skip_unkeyed = true)
    }

    /// Decides and records, but never refuses; refusals are logged at debug level. Default: off.
    ///
    /// To try a limit on real traffic. Responses show its numbers.
    #[must_use]
    pub fn dry_run(self) -> Self {
        self.ruled(|rules| rules.dry_run = true)
    }

    /// Serves requests, uncounted, while the limiter fails. Default: they are answered 503, because
    /// whoever can make a disk fail should not get unlimited attempts at a password.
    ///
    /// A request whose own row is damaged is answered 503 all the same, until it is reset; so is one
    /// that finds the limiter's queue full, as clients can fill that. Whoever can make the disk slow
    /// enough for [`answer_timeout`](Self::answer_timeout) is served.
    #[must_use]
    pub fn fail_open(self) -> Self {
        self.ruled(|rules| rules.fail_open = true)
    }

    /// How long a request waits for the limiter's answer. Default: 2 s, because a disk that hangs
    /// should not hang the service.
    ///
    /// A request that waited in vain may be counted all the same.
    #[must_use]
    pub fn answer_timeout(self, timeout: Duration) -> Self {
        self.ruled(|rules| rules.answer_timeout = timeout)
    }

    /// How often it is logged, at most, that the limiter fails or that requests cannot be judged.
    /// Default: every 10 s, by the system's monotonic time.
    #[must_use]
    pub fn log_interval(self, interval: Duration) -> Self {
        self.ruled(|rules| rules.log_interval = interval)
    }

    /// Shows `RateLimit-Policy` and `RateLimit` in place of `x-ratelimit-*`, with this policy name.
    ///
    /// They are those of
    /// [draft-ietf-httpapi-ratelimit-headers-10](https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-ratelimit-headers-10):
    /// `"login";q=5;w=60` and `"login";r=3;t=17`. Of several quotas each is named `login 5/minute`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) if the name is empty or not printable
    /// ASCII.
    pub fn ietf_headers(self, name: &str) -> Result<Self> {
        let policies = Policies::new(name, self.limit.gate.quotas())?;
        Ok(self.ruled(|rules| rules.headers = HeaderSet::Ietf(policies)))
    }

    /// Shows no numbers. A refusal still has `retry-after`. Default: `x-ratelimit-limit`,
    /// `x-ratelimit-remaining`, and `x-ratelimit-reset` in Unix seconds, rounded up.
    #[must_use]
    pub fn no_headers(self) -> Self {
        self.ruled(|rules| rules.headers = HeaderSet::None)
    }

    /// What a client that is not served is told. Default: [`plain_text`](super::plain_text);
    /// [`problem_json`](super::problem_json) is another one.
    ///
    /// It writes status, headers and body; `retry-after`, `cache-control: no-store` and the numbers
    /// are added. gRPC requests are refused as gRPC refuses, without it.
    ///
    /// ```
    /// # use ratevault::{Limiter, Quota, SlidingWindow, Vault};
    /// use ratevault::http::{RateLimitLayer, Refusal};
    /// # let vault = Vault::builder("rate_limits").in_memory().open()?;
    /// # let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(5)?)?);
    ///
    /// let layer = RateLimitLayer::new(limiter, "login").refusal(|refusal: &Refusal| {
    ///     let mut response = http::Response::new(format!("<p>{}</p>", refusal.sentence()));
    ///     *response.status_mut() = refusal.status();
    ///     response
    /// });
    /// # let _ = layer;
    /// # Ok::<(), ratevault::Error>(())
    /// ```
    #[must_use]
    pub fn refusal<F, B>(self, render: F) -> Self
    where
        F: Fn(&Refusal<'_>) -> Response<B> + Send + Sync + 'static,
        B: Into<Bytes>,
    {
        let render = move |refusal: &Refusal<'_>| render(refusal).map(RefusalBody::from);
        self.ruled(|rules| rules.render = Arc::new(render))
    }

    /// Checks one request inside a handler, by this layer's rules but for the client that `key`
    /// finds.
    ///
    /// `skip` and `cost` apply; the layer's own key function does not.
    ///
    /// # Errors
    ///
    /// The finished refusal.
    pub async fn check(
        &self,
        request: &Parts,
        key: impl KeyFunction,
    ) -> Result<Admitted, Response<RefusalBody>> {
        let limit = &*self.limit;
        let case = limit.case(request);
        let (client, cost) = (key.client(request), limit.cost_of(request));
        let asked = limit.rules.ask(&*limit.gate, case.endpoint, client, cost);
        finish(&limit.rules, &*limit.gate, case, asked).await
    }
}

/// What became of a request that the gate was asked about.
pub(super) async fn finish<G: Gate>(
    rules: &Rules,
    gate: &G,
    case: Case<'_>,
    asked: Asked<G::Future>,
) -> Result<Admitted, Response<RefusalBody>> {
    match asked {
        Asked::Skipped => Ok(Admitted::default()),
        Asked::Refused(reason) => Err(rules.refuse(case, reason, None, None)),
        Asked::Waiting(waiting) => {
            let answer = waiting.await;
            rules.judge(gate, case, answer)
        }
    }
}

impl<S, G> Layer<S> for RateLimitLayer<G> {
    type Service = RateLimit<S, G>;

    fn layer(&self, service: S) -> Self::Service {
        RateLimit::new(service, Arc::clone(&self.limit))
    }
}

impl<G> Clone for RateLimitLayer<G> {
    fn clone(&self) -> Self {
        Self {
            limit: Arc::clone(&self.limit),
        }
    }
}

impl<G> fmt::Debug for RateLimitLayer<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RateLimitLayer").field(&self.limit).finish()
    }
}
