//! `Limit`: one limit as a layer applies it, without tower.

use std::fmt;
use std::sync::Arc;

use http::request::Parts;

use super::key::KeyFunction;
use super::rules::{Asked, Case, Rules, Said};
use crate::limiter::Gate;

/// One limit: whom it asks, about whom, and by which rules.
pub(super) struct Limit<G> {
    pub(super) gate: Arc<G>,
    pub(super) rules: Rules,
    /// What the limit is called, or with `per_route` where no route matched.
    pub(super) endpoint: Arc<str>,
    #[cfg(feature = "axum")]
    pub(super) per_route: bool,
    pub(super) key: Arc<dyn KeyFunction>,
    pub(super) cost: Option<Arc<OfRequest<u32>>>,
    pub(super) skip: Option<Arc<OfRequest<bool>>>,
}

/// What the user says of each request.
type OfRequest<T> = dyn Fn(&Parts) -> T + Send + Sync;

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
    pub(super) fn cost_of(&self, request: &Parts) -> u32 {
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

impl<G> fmt::Debug for Limit<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limit")
            .field("endpoint", &self.endpoint)
            .field("rules", &self.rules)
            .finish_non_exhaustive()
    }
}
