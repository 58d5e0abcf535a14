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
use super::refusal::Refusal;
use super::rules::{Asked, Case, Rules, Said};
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
/// let login = post(async || "welcome").layer(RateLimitLayer::new(limiter, "login"));
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

/// One limit: whom it asks, about whom, and by which rules.
pub(super) struct Limit<G> {
    pub(super) gate: Arc<G>,
    pub(super) rules: Rules,
    /// What the limit is called, or with `per_route` where no route matched.
    endpoint: Arc<str>,
    #[cfg(feature = "axum")]
    per_route: bool,
    key: Arc<dyn KeyFunction>,
    cost: Option<Arc<OfRequest<u32>>>,
    skip: Option<Arc<OfRequest<bool>>>,
}

/// What the user says of each request.
type OfRequest<T> = dyn Fn(&Parts) -> T + Send + Sync;

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
    /// ```
    /// # use ratevault::{Limiter, Quota, SlidingWindow, Vault};
    /// use ratevault::http::{ClientKey, RateLimitLayer};
    /// # let vault = Vault::builder("rate_limits").in_memory().open()?;
    /// # let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(5)?)?);
    ///
    /// let layer = RateLimitLayer::new(limiter, "api")
    ///     .key(|request: &http::request::Parts| request.headers.get("x-api-key").map(ClientKey::from));
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
    /// A request whose own row is damaged is answered 503 all the same, until it is reset.
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
        let client = key.client(request);
        let asked = match limit.cost_of(request) {
            0 => Asked::Skipped,
            cost => limit.rules.ask(&*limit.gate, case.endpoint, client, cost),
        };
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

impl<G: Gate> Limit<G> {
    /// Asks the gate about a request that came through the layer.
    pub(super) fn ask(&self, request: &mut Parts) -> Asked<G::Future> {
        let cost = self.cost_of(request);
        if cost == 0 {
            return Asked::Skipped;
        }
        self.warn_of_second_pass(request);
        let (case, client) = (self.case(request), self.key.client(request));
        self.rules.ask(&*self.gate, case.endpoint, client, cost)
    }

    pub(super) fn case<'a>(&'a self, request: &'a Parts) -> Case<'a> {
        let endpoint = &*self.endpoint;
        #[cfg(feature = "axum")]
        let endpoint = self.matched_route(request).unwrap_or(endpoint);
        Case { endpoint, request }
    }

    #[cfg(feature = "axum")]
    fn matched_route<'a>(&self, request: &'a Parts) -> Option<&'a str> {
        let route = request.extensions.get::<axum::extract::MatchedPath>();
        let route = route.filter(|_| self.per_route);
        route.map(axum::extract::MatchedPath::as_str)
    }

    /// 0 for a request that is skipped.
    fn cost_of(&self, request: &Parts) -> u32 {
        if self.skip.as_ref().is_some_and(|skip| skip(request)) {
            return 0;
        }
        self.cost.as_ref().map_or(1, |cost| cost(request))
    }

    fn warn_of_second_pass(&self, request: &mut Parts) {
        let said = &self.rules.said;
        let passed: &mut Passed = request.extensions.get_or_insert_default();
        let seen = passed.0.iter().any(|other| Arc::ptr_eq(other, said));
        if !seen {
            passed.0.push(Arc::clone(said));
        } else if said.twice.first() {
            tracing::warn!(
                endpoint = self.case(request).endpoint,
                "a request passes the same rate limit twice and is counted twice: apply the layer once"
            );
        }
    }
}

/// The limits that a request has passed.
#[derive(Clone, Debug, Default)]
struct Passed(Vec<Arc<Said>>);

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

impl<G> Clone for Limit<G> {
    fn clone(&self) -> Self {
        Self {
            gate: Arc::clone(&self.gate),
            // Another limit, which has logged nothing yet.
            rules: Rules {
                said: Arc::default(),
                ..self.rules.clone()
            },
            endpoint: Arc::clone(&self.endpoint),
            #[cfg(feature = "axum")]
            per_route: self.per_route,
            key: Arc::clone(&self.key),
            cost: self.cost.clone(),
            skip: self.skip.clone(),
        }
    }
}

impl<G> fmt::Debug for RateLimitLayer<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RateLimitLayer").field(&self.limit).finish()
    }
}

impl<G> fmt::Debug for Limit<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limit")
            .field("endpoint", &self.endpoint)
            .field("rules", &self.rules)
            .finish_non_exhaustive()
    }
}
