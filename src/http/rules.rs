//! `Rules`: what is done with a request and with a gate's answer, whoever asks for it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Response;
use http::request::Parts;

use super::body::RefusalBody;
use super::headers::{Admitted, Fields, HeaderSet, show_refusal};
use super::key::ClientKey;
use super::refusal::{Reason, Refusal, plain_text};
use super::warning::{Once, Throttle};
use crate::clock::seconds_rounded_up;
use crate::error::{Cause, Error, Result};
use crate::limiter::{Admission, Decision, Gate};
use crate::vault::{Alarm, Key};

type Render = dyn Fn(&Refusal<'_>) -> Response<RefusalBody> + Send + Sync;

/// How a limit treats requests.
#[derive(Clone)]
pub(super) struct Rules {
    pub(super) headers: HeaderSet,
    pub(super) render: Arc<Render>,
    pub(super) answer_timeout: Duration,
    pub(super) log_interval: Duration,
    pub(super) skip_unkeyed: bool,
    pub(super) dry_run: bool,
    pub(super) fail_open: bool,
    pub(super) said: Arc<Said>,
}

/// What was logged already.
#[derive(Debug, Default)]
pub(super) struct Said {
    failures: Throttle,
    mistakes: Throttle,
    pub(super) twice: Once,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            headers: HeaderSet::default(),
            render: Arc::new(|refusal| plain_text(refusal).map(RefusalBody::from)),
            answer_timeout: Duration::from_secs(2),
            log_interval: Duration::from_secs(10),
            skip_unkeyed: false,
            dry_run: false,
            fail_open: false,
            said: Arc::default(),
        }
    }
}

/// What becomes of a request at first.
pub(super) enum Asked<F> {
    /// It is served uncounted.
    Skipped,
    /// The gate was asked.
    Waiting(Waiting<F>),
    /// It cannot be judged.
    Refused(Reason),
}

/// A request, as the limit called `endpoint` sees it.
#[derive(Clone, Copy)]
pub(super) struct Case<'a> {
    pub(super) endpoint: &'a str,
    pub(super) request: &'a Parts,
}

impl Rules {
    /// Asks the gate for `cost` places. What it counts, it counts from here on.
    pub(super) fn ask<G: Gate>(
        &self,
        gate: &G,
        endpoint: &str,
        client: Option<ClientKey>,
        cost: u32,
    ) -> Asked<G::Future> {
        if cost == 0 {
            return Asked::Skipped;
        }
        let Some(client) = client else {
            return self.unkeyed(endpoint);
        };
        match Key::new(endpoint, &client) {
            Ok(key) => Asked::Waiting(Waiting {
                answer: gate.admit(key, cost),
                timeout: self.answer_timeout,
                alarm: None,
            }),
            Err(error) => {
                self.log_mistake(endpoint, &error);
                self.unless_dry_run(Reason::Misconfigured)
            }
        }
    }

    fn unkeyed<F>(&self, endpoint: &str) -> Asked<F> {
        if self.skip_unkeyed {
            return Asked::Skipped;
        }
        self.log_mistake(
            endpoint,
            &"the key function found nobody to count; skip_unkeyed() would serve such requests",
        );
        self.unless_dry_run(Reason::Misconfigured)
    }

    const fn unless_dry_run<F>(&self, reason: Reason) -> Asked<F> {
        if self.dry_run {
            Asked::Skipped
        } else {
            Asked::Refused(reason)
        }
    }

    /// What the gate's answer means for the request.
    #[expect(
        clippy::result_large_err,
        reason = "a response is what the caller wants"
    )]
    pub(super) fn judge<G: Gate>(
        &self,
        gate: &G,
        case: Case<'_>,
        answer: Result<Admission>,
    ) -> Result<Admitted, Response<RefusalBody>> {
        match answer {
            Ok(Admission::Decided(decision)) => {
                let reset_at = gate.wall(decision.reset_at());
                let fields = self.headers.fields(&decision, reset_at);
                if decision.is_allowed() || self.is_only_tried(case) {
                    return Ok(Admitted::new(decision, fields));
                }
                let wait = decision.retry_after();
                let mut response = self.refuse(case, Reason::Limited, Some(decision), wait);
                show_refusal(fields, &mut response);
                Err(response)
            }
            Ok(Admission::Admitted) => Ok(Admitted::default()),
            Ok(Admission::Refused { .. }) if self.is_only_tried(case) => Ok(Admitted::default()),
            Ok(Admission::Refused { retry_after }) => {
                let wait = retry_after.map(|wait| seconds_rounded_up(wait).max(1));
                let mut response = self.refuse(case, Reason::Limited, None, wait);
                show_refusal(Fields::default(), &mut response);
                Err(response)
            }
            Err(error) => match self.failed(case.endpoint, &error) {
                Some(reason) => {
                    let overloaded = matches!(error, Error::Overloaded { .. });
                    Err(self.refuse(case, reason, None, overloaded.then_some(1)))
                }
                None => Ok(Admitted::default()),
            },
        }
    }

    /// Whether a refusal is only noted.
    fn is_only_tried(&self, case: Case<'_>) -> bool {
        if self.dry_run {
            tracing::debug!(endpoint = case.endpoint, "dry run: would be refused");
        }
        self.dry_run
    }

    /// Why a request that could not be judged is refused; `None`: it is served.
    fn failed(&self, endpoint: &str, error: &Error) -> Option<Reason> {
        let (reason, is_served) = match error {
            Error::InvalidCost { .. } | Error::EndpointTooLong { .. } => {
                self.log_mistake(endpoint, error);
                (Reason::Misconfigured, self.dry_run)
            }
            _ => {
                self.log_failure(endpoint, error);
                // Whoever can damage a row, or fill the queue, must not be let in by it.
                let is_closed =
                    matches!(error, Error::CorruptRow { .. } | Error::Overloaded { .. });
                let is_open = self.fail_open && !is_closed;
                (Reason::Unavailable, self.dry_run || is_open)
            }
        };
        (!is_served).then_some(reason)
    }

    fn log_failure(&self, endpoint: &str, error: &Error) {
        if let Some(unsaid) = self.said.failures.due(endpoint, self.log_interval) {
            let open = self.fail_open;
            tracing::error!(endpoint, %error, fail_open = open, unsaid, "the rate limit fails");
        }
    }

    fn log_mistake(&self, endpoint: &str, mistake: &dyn fmt::Display) {
        if let Some(unsaid) = self.said.mistakes.due(endpoint, self.log_interval) {
            tracing::warn!(endpoint, %mistake, unsaid, "the rate limit cannot judge a request");
        }
    }

    /// The response to a request that is not served.
    pub(super) fn refuse(
        &self,
        case: Case<'_>,
        reason: Reason,
        decision: Option<Decision>,
        retry_after: Option<u64>,
    ) -> Response<RefusalBody> {
        let refusal = Refusal {
            request: case.request,
            endpoint: case.endpoint,
            reason,
            decision,
            retry_after,
        };
        refusal.response(&*self.render)
    }
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules")
            .field("headers", &self.headers)
            .field("answer_timeout", &self.answer_timeout)
            .field("log_interval", &self.log_interval)
            .field("skip_unkeyed", &self.skip_unkeyed)
            .field("dry_run", &self.dry_run)
            .field("fail_open", &self.fail_open)
            .finish_non_exhaustive()
    }
}

pin_project_lite::pin_project! {
    /// A wait for a gate's answer that ends when the timeout has passed.
    #[derive(Debug)]
    pub(super) struct Waiting<F> {
        #[pin]
        answer: F,
        timeout: Duration,
        // Set when there is something to wait for.
        alarm: Option<Alarm>,
    }
}

impl<F: Future<Output = Result<Admission>>> Future for Waiting<F> {
    type Output = Result<Admission>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<Admission>> {
        let waiting = self.project();
        if let Poll::Ready(answer) = waiting.answer.poll(context) {
            return Poll::Ready(answer);
        }
        let timeout = *waiting.timeout;
        let alarm = waiting.alarm.get_or_insert_with(|| Alarm::new(timeout));
        if alarm.has_rung(context) {
            let source = Cause::new(format!("no answer within {timeout:?}"));
            return Poll::Ready(Err(Error::Limiter { source }));
        }
        Poll::Pending
    }
}
