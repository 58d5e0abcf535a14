//! The header fields that tell a client where it stands.

use std::time::Duration;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Extensions, Response};

use crate::clock::{Timestamp, seconds_rounded_up};
use crate::error::{Error, Result};
use crate::limiter::{Decision, Quota};

const X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The largest integer of a structured field (RFC 9651, 3.3.1): 15 digits.
const LARGEST_INTEGER: u64 = 999_999_999_999_999;

/// Which fields a response carries.
#[derive(Clone, Debug, Default)]
pub(super) enum HeaderSet {
    /// `x-ratelimit-limit`, `x-ratelimit-remaining`, `x-ratelimit-reset`.
    #[default]
    XRateLimit,
    /// `RateLimit-Policy` and `RateLimit`, of draft-ietf-httpapi-ratelimit-headers-10.
    Ietf(Policies),
    None,
}

impl HeaderSet {
    /// The fields for a decision whose next place comes free at `reset_at` by the wall clock.
    pub(super) fn fields(&self, decision: &Decision, reset_at: Timestamp) -> Fields {
        match self {
            Self::XRateLimit => {
                let reset_at = Duration::from_millis(reset_at.as_millis());
                Fields([
                    Some((X_LIMIT, decision.limit().into())),
                    Some((X_REMAINING, decision.remaining().into())),
                    Some((X_RESET, whole_seconds(reset_at).into())),
                ])
            }
            Self::Ietf(policies) => policies.fields(decision),
            Self::None => Fields::default(),
        }
    }
}

/// Header fields on their way to a response.
#[derive(Clone, Debug, Default)]
pub(super) struct Fields([Option<(HeaderName, HeaderValue)>; 3]);

impl Fields {
    fn iter(&self) -> impl Iterator<Item = &(HeaderName, HeaderValue)> {
        self.0.iter().flatten()
    }

    fn insert_into(self, headers: &mut HeaderMap) {
        for (name, value) in self.0.into_iter().flatten() {
            headers.insert(name, value);
        }
    }
}

/// The policies of one limit, as structured fields.
#[derive(Clone, Debug)]
pub(super) struct Policies {
    /// Each quota with its name, quoted.
    named: Vec<(Quota, String)>,
    /// The name to use for a limit that does not say its quotas, quoted.
    name: String,
    announced: Option<HeaderValue>,
}

impl Policies {
    /// One policy is called `name`, of several each also by its quota.
    pub(super) fn new(name: &str, quotas: &[Quota]) -> Result<Self> {
        let invalid = |reason| Error::InvalidSetting {
            setting: "the name of a rate limit policy",
            value: format!("{name:?}"),
            reason,
        };
        if name.is_empty() {
            return Err(invalid("it must not be empty"));
        }
        if !name.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            return Err(invalid("it has to be printable ASCII (RFC 9651, 3.3.3)"));
        }
        let called = |quota: &Quota| match quotas {
            [_] => quoted(name),
            _ => quoted(&format!("{name} {quota}")),
        };
        let named: Vec<_> = quotas.iter().map(|quota| (*quota, called(quota))).collect();
        let policies = named.iter().map(|(quota, name)| {
            let window = whole_seconds(quota.window()).max(1);
            format!("{name};q={};w={window}", quota.limit())
        });
        let policies = policies.collect::<Vec<_>>().join(", ");
        let announced = HeaderValue::try_from(policies);
        Ok(Self {
            named,
            name: quoted(name),
            announced: announced.ok().filter(|announced| !announced.is_empty()),
        })
    }

    fn fields(&self, decision: &Decision) -> Fields {
        // Of quotas with one limit only that with the longest window is ever reported.
        let decided = self.named.iter();
        let decided = decided.filter(|(quota, _)| quota.limit() == decision.limit());
        let decided = decided.max_by_key(|(quota, _)| quota.window());
        let name = decided.map_or(&self.name, |(_, name)| name);
        let reset = whole_seconds(decision.reset_after());
        let text = format!("{name};r={};t={reset}", decision.remaining());
        let announced = self.announced.clone();
        Fields([
            announced.map(|policies| (RATELIMIT_POLICY, policies)),
            HeaderValue::try_from(text)
                .ok()
                .map(|text| (RATELIMIT, text)),
            None,
        ])
    }
}

/// A structured field's string (RFC 9651, 4.1.6).
fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{escaped}\"")
}

/// Rounded up, and no longer than a structured field holds.
fn whole_seconds(span: Duration) -> u64 {
    seconds_rounded_up(span).min(LARGEST_INTEGER)
}

/// An admitted request: what its response should show.
#[derive(Clone, Debug, Default)]
#[must_use = "its fields are seen only if they are added to the response"]
pub struct Admitted {
    decision: Option<Decision>,
    fields: Fields,
}

/// What the fields of a response say already.
#[derive(Clone, Copy, Debug)]
enum Shown {
    Remaining(u32),
    Refused,
}

impl Admitted {
    pub(super) const fn new(decision: Decision, fields: Fields) -> Self {
        Self {
            decision: Some(decision),
            fields,
        }
    }

    /// What the limiter decided; `None` if there are no numbers, because the limit was skipped, it
    /// failed and is open then, or its gate has none.
    #[must_use]
    pub const fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    /// The header fields, such as `x-ratelimit-remaining`.
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        self.fields.iter().cloned().collect()
    }

    /// Adds the fields to a response, unless it shows a limit with fewer places left, or has fields
    /// of the same names that no limit of this crate has added.
    pub fn add_to<B>(self, response: &mut Response<B>) {
        if let Some(remaining) = self.to_show(response.extensions(), response.headers()) {
            let replaces = response
                .extensions_mut()
                .insert(Shown::Remaining(remaining));
            self.replace(replaces.is_some(), response.headers_mut());
        }
    }

    /// How many places are left, if that is to be shown beside what the response shows already.
    fn to_show(&self, shown: &Extensions, headers: &HeaderMap) -> Option<u32> {
        let mut names = self.fields.iter().map(|(name, _)| name).peekable();
        names.peek()?;
        let remaining = self.decision.as_ref()?.remaining();
        let is_news = match shown.get() {
            Some(Shown::Refused) => false,
            Some(Shown::Remaining(shown)) => remaining < *shown,
            None => !names.any(|name| headers.contains_key(name)),
        };
        is_news.then_some(remaining)
    }

    /// Of two limits only one is shown, also if their fields have other names.
    fn replace(self, replaces: bool, headers: &mut HeaderMap) {
        if replaces {
            for name in [X_LIMIT, X_REMAINING, X_RESET, RATELIMIT, RATELIMIT_POLICY] {
                headers.remove(name);
            }
        }
        self.fields.insert_into(headers);
    }
}

/// Adds the fields of a decision to the response that refuses the request.
pub(super) fn show_refusal<B>(fields: Fields, response: &mut Response<B>) {
    response.extensions_mut().insert(Shown::Refused);
    fields.insert_into(response.headers_mut());
}

/// As [`add_to`](Admitted::add_to): `(admitted, "welcome")` is a response with the fields.
#[cfg(feature = "axum")]
impl axum::response::IntoResponseParts for Admitted {
    type Error = std::convert::Infallible;

    fn into_response_parts(
        self,
        mut response: axum::response::ResponseParts,
    ) -> std::result::Result<axum::response::ResponseParts, Self::Error> {
        if let Some(remaining) = self.to_show(response.extensions(), response.headers()) {
            let replaces = response
                .extensions_mut()
                .insert(Shown::Remaining(remaining));
            self.replace(replaces.is_some(), response.headers_mut());
        }
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_800_000_000_000);

    fn decision(limit: u32, remaining: u32, reset_ms: u64) -> Decision {
        let reset_at = NOW.saturating_add(Duration::from_millis(reset_ms));
        Decision::allowed(limit, remaining, NOW, reset_at)
    }

    fn value_of<'f>(fields: &'f Fields, name: &HeaderName) -> Option<&'f HeaderValue> {
        let mut found = fields.iter().filter(|(found, _)| found == name);
        found.next().map(|(_, value)| value)
    }

    fn ietf(name: &str, quotas: &[&str], decision: &Decision) -> [String; 2] {
        let quotas: Vec<Quota> = quotas.iter().map(|q| q.parse().expect("quota")).collect();
        let set = HeaderSet::Ietf(Policies::new(name, &quotas).expect("a name"));
        let fields = set.fields(decision, NOW);
        [RATELIMIT_POLICY, RATELIMIT].map(|name| {
            let value = value_of(&fields, &name);
            value.map_or("", |v| v.to_str().expect("text")).to_owned()
        })
    }

    #[test]
    fn the_reset_is_in_unix_seconds_rounded_up() {
        let reset_at = |ms| {
            let fields =
                HeaderSet::XRateLimit.fields(&decision(5, 4, 0), Timestamp::from_millis(ms));
            value_of(&fields, &X_RESET).cloned()
        };
        assert_eq!(reset_at(59_000), Some(HeaderValue::from(59)));
        assert_eq!(reset_at(59_001), Some(HeaderValue::from(60)));
    }

    #[test]
    fn one_quota_is_announced_by_the_policys_name() {
        let [policy, limit] = ietf("login", &["5/minute"], &decision(5, 3, 16_001));
        assert_eq!(policy, r#""login";q=5;w=60"#);
        assert_eq!(limit, r#""login";r=3;t=17"#);
    }

    #[test]
    fn of_several_quotas_the_one_that_decided_is_named() {
        let quotas = ["5/minute", "100/day", "5/hour"];
        let [policy, limit] = ietf("login", &quotas, &decision(100, 3, 0));
        assert_eq!(
            policy,
            r#""login 5/minute";q=5;w=60, "login 100/day";q=100;w=86400, "login 5/hour";q=5;w=3600"#
        );
        assert_eq!(limit, r#""login 100/day";r=3;t=0"#);
        let [_, limit] = ietf("login", &quotas, &decision(5, 0, 1));
        assert_eq!(limit, r#""login 5/hour";r=0;t=1"#);
    }

    #[test]
    fn windows_are_at_least_a_second_and_numbers_at_most_15_digits() {
        let [policy, limit] = ietf(
            "a",
            &["5/100 ms"],
            &decision(5, 3, u64::MAX - 2_000_000_000_000),
        );
        assert_eq!(policy, r#""a";q=5;w=1"#);
        let digits = limit
            .rsplit_once("t=")
            .map_or(0, |(_, number)| number.len());
        assert!((1..=15).contains(&digits), "{limit}");
        assert_eq!(whole_seconds(Duration::MAX), LARGEST_INTEGER);
    }

    #[test]
    fn a_policys_name_is_printable_ascii_and_is_quoted() {
        for name in ["", "caf\u{e9}", "a\nb", "\u{7f}"] {
            assert!(Policies::new(name, &[]).is_err(), "{name:?}");
        }
        let [policy, limit] = ietf(r#"a"b\c"#, &[], &decision(5, 3, 0));
        assert_eq!(policy, "");
        assert_eq!(limit, r#""a\"b\\c";r=3;t=0"#);
    }
}
