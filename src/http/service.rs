//! `RateLimit`: a guarded service, and the future of its response.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use http::{Request, Response};
use tower_service::Service;

use super::body::{RefusalBody, ResponseBody};
use super::headers::Admitted;
use super::limit::Limit;
use super::rules::{Asked, Waiting};
use crate::limiter::Gate;

/// A service behind a limit: made by [`RateLimitLayer`](super::RateLimitLayer).
///
/// Its errors are the service's own: a refusal is a response.
pub struct RateLimit<S, G> {
    service: S,
    limit: Arc<Limit<G>>,
}

impl<S, G> RateLimit<S, G> {
    pub(super) const fn new(service: S, limit: Arc<Limit<G>>) -> Self {
        Self { service, limit }
    }
}

impl<S, G, B, R> Service<Request<B>> for RateLimit<S, G>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    G: Gate,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, G, B>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        // The clone is not ready: the one that is goes along with the request.
        let clone = self.service.clone();
        let mut service = mem::replace(&mut self.service, clone);
        let state = match self.limit.ask(&mut parts) {
            Asked::Skipped => State::Serving {
                response: service.call(Request::from_parts(parts, body)),
                admitted: Admitted::default(),
            },
            Asked::Waiting(waiting) => State::Asking {
                waiting,
                request: Some((service, parts, body)),
            },
            Asked::Refused(reason) => {
                let case = self.limit.case(&parts);
                State::Refused {
                    response: Some(self.limit.rules.refuse(case, reason, None, None)),
                }
            }
        };
        ResponseFuture {
            state,
            limit: Arc::clone(&self.limit),
        }
    }
}

pin_project_lite::pin_project! {
    /// The response of a [`RateLimit`].
    pub struct ResponseFuture<S, G, B>
    where
        S: Service<Request<B>>,
        G: Gate,
    {
        #[pin]
        state: State<S, G, B>,
        limit: Arc<Limit<G>>,
    }
}

pin_project_lite::pin_project! {
    #[project = Projected]
    enum State<S, G, B>
    where
        S: Service<Request<B>>,
        G: Gate,
    {
        Asking {
            #[pin]
            waiting: Waiting<G::Future>,
            // Taken when there is an answer.
            request: Option<(S, Parts, B)>,
        },
        Serving {
            #[pin]
            response: S::Future,
            // Given to the response.
            admitted: Admitted,
        },
        Refused {
            // Taken when it is given.
            response: Option<Response<RefusalBody>>,
        },
    }
}

impl<S, G, B, R> Future for ResponseFuture<S, G, B>
where
    S: Service<Request<B>, Response = Response<R>>,
    G: Gate,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut future = self.project();
        loop {
            let next = match future.state.as_mut().project() {
                Projected::Asking { waiting, request } => {
                    let answer = ready!(waiting.poll(context));
                    let Some((mut service, parts, body)) = request.take() else {
                        return Poll::Pending;
                    };
                    let limit = &**future.limit;
                    match limit.rules.judge(&*limit.gate, limit.case(&parts), answer) {
                        Ok(admitted) => State::Serving {
                            response: service.call(Request::from_parts(parts, body)),
                            admitted,
                        },
                        Err(response) => State::Refused {
                            response: Some(response),
                        },
                    }
                }
                Projected::Serving { response, admitted } => {
                    let mut response = ready!(response.poll(context))?;
                    mem::take(admitted).add_to(&mut response);
                    return Poll::Ready(Ok(response.map(ResponseBody::of_service)));
                }
                Projected::Refused { response } => {
                    let Some(response) = response.take() else {
                        return Poll::Pending;
                    };
                    return Poll::Ready(Ok(response.map(ResponseBody::of_refusal)));
                }
            };
            future.state.set(next);
        }
    }
}

impl<S: Clone, G> Clone for RateLimit<S, G> {
    fn clone(&self) -> Self {
        Self {
            service: self.service.clone(),
            limit: Arc::clone(&self.limit),
        }
    }
}

impl<S: fmt::Debug, G> fmt::Debug for RateLimit<S, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("service", &self.service)
            .field("limit", &self.limit)
            .finish()
    }
}

impl<S, G, B> fmt::Debug for ResponseFuture<S, G, B>
where
    S: Service<Request<B>>,
    G: Gate,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Asking { .. } => "asking the gate",
            State::Serving { .. } => "serving",
            State::Refused { .. } => "refused",
        };
        f.debug_struct("ResponseFuture")
            .field("state", &state)
            .finish_non_exhaustive()
    }
}
