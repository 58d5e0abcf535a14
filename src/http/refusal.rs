//! What a client that is not served is told.

use bytes::Bytes;
use http::header::{
    CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER,
};
use http::request::Parts;
use http::{Method, Response, StatusCode, Version};

use super::body::RefusalBody;
use crate::limiter::Decision;

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The limit is reached.
    Limited,
    /// The limiter failed.
    Unavailable,
    /// The limit is set up wrongly for this request.
    Misconfigured,
}

impl Reason {
    const fn status(self) -> StatusCode {
        match self {
            Self::Limited => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Misconfigured => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// RESOURCE_EXHAUSTED, UNAVAILABLE, INTERNAL.
    const fn grpc_status(self) -> u16 {
        match self {
            Self::Limited => 8,
            Self::Unavailable => 14,
            Self::Misconfigured => 13,
        }
    }
}

/// A request that is not served, for a function that writes the response.
#[derive(Clone, Copy, Debug)]
pub struct Refusal<'a> {
    pub(super) request: &'a Parts,
    pub(super) endpoint: &'a str,
    pub(super) reason: Reason,
    pub(super) decision: Option<Decision>,
    pub(super) retry_after: Option<u64>,
}

impl Refusal<'_> {
    /// 429 if the limit is reached, 503 if the limiter failed, 500 if it cannot judge this request.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        self.reason.status()
    }

    /// What the request asked for, but for its body.
    #[must_use]
    pub const fn request(&self) -> &Parts {
        self.request
    }

    /// What the limit is called.
    #[must_use]
    pub const fn endpoint(&self) -> &str {
        self.endpoint
    }

    /// What the limiter decided, if it did and has numbers.
    #[must_use]
    pub const fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    /// How many whole seconds the client has to wait, if that is known.
    #[must_use]
    pub const fn retry_after(&self) -> Option<u64> {
        self.retry_after
    }

    /// A sentence for people.
    #[must_use]
    pub fn sentence(&self) -> String {
        match (self.reason, self.retry_after) {
            (Reason::Limited, Some(1)) => "Too many requests: try again in 1 second.".into(),
            (Reason::Limited, Some(wait)) => {
                format!("Too many requests: try again in {wait} seconds.")
            }
            (Reason::Limited, None) => "Too many requests: try again later.".into(),
            (Reason::Unavailable, _) => "The service is unavailable: try again later.".into(),
            (Reason::Misconfigured, _) => "The service made a mistake.".into(),
        }
    }

    fn grpc_type(&self) -> Option<&HeaderValue> {
        // Anybody can write the content type: where it is no gRPC, a 200 would look like success to
        // proxies that ask whether a request may pass.
        if self.request.version != Version::HTTP_2 || self.request.method != Method::POST {
            return None;
        }
        let content_type = self.request.headers.get(CONTENT_TYPE)?;
        let bytes = content_type.as_bytes();
        let (kind, rest) = bytes.split_at_checked("application/grpc".len())?;
        // Such as `+proto`, `-web`, or a parameter.
        let ends = rest.first().is_none_or(|next| b"+-; ".contains(next));
        (ends && kind.eq_ignore_ascii_case(b"application/grpc")).then_some(content_type)
    }

    /// The response as `render` writes it, or as gRPC wants it, with the headers that are due
    /// whatever it says.
    pub(super) fn response(
        &self,
        render: impl FnOnce(&Self) -> Response<RefusalBody>,
    ) -> Response<RefusalBody> {
        let mut response = if self.grpc_type().is_some() {
            self.grpc()
        } else {
            render(self)
        };
        if self.request.method == Method::HEAD {
            let length = std::mem::take(response.body_mut()).len();
            response.headers_mut().insert(CONTENT_LENGTH, length.into());
        }
        self.mark(response.headers_mut());
        response
    }

    fn mark(&self, headers: &mut HeaderMap) {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(wait) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(wait));
        }
    }

    /// As gRPC refuses: HTTP 200 and the status among the headers ("Trailers-Only"). Clients take a
    /// plain 429 for UNAVAILABLE, which they retry at once.
    fn grpc(&self) -> Response<RefusalBody> {
        let mut response = Response::new(RefusalBody::default());
        let headers = response.headers_mut();
        let content_type = self.grpc_type().cloned();
        let content_type = content_type.unwrap_or(HeaderValue::from_static("application/grpc"));
        headers.insert(CONTENT_TYPE, content_type);
        headers.insert(GRPC_STATUS, self.reason.grpc_status().into());
        // The sentence is printable ASCII without a percent sign, as this header wants it.
        if let Ok(message) = HeaderValue::from_str(&self.sentence()) {
            headers.insert(GRPC_MESSAGE, message);
        }
        response
    }
}

/// One sentence of text: the default.
#[must_use]
pub fn plain_text(refusal: &Refusal<'_>) -> Response<Bytes> {
    let mut text = refusal.sentence();
    text.push('\n');
    let content_type = HeaderValue::from_static("text/plain; charset=utf-8");
    response(refusal.status(), content_type, text)
}

/// A problem document ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)), with the wait in seconds
/// as `retry_after`.
#[must_use]
pub fn problem_json(refusal: &Refusal<'_>) -> Response<Bytes> {
    let status = refusal.status();
    let wait = refusal.retry_after();
    let wait = wait.map_or_else(String::new, |wait| format!(r#","retry_after":{wait}"#));
    let document = format!(
        r#"{{"type":"about:blank","title":"{}","status":{},"detail":"{}"{wait}}}"#,
        status.canonical_reason().unwrap_or_default(),
        status.as_u16(),
        refusal.sentence(),
    );
    let content_type = HeaderValue::from_static("application/problem+json");
    response(status, content_type, document)
}

fn response(status: StatusCode, content_type: HeaderValue, body: String) -> Response<Bytes> {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}
