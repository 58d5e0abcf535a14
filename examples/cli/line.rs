//! A row of a vault, as `dump` prints it.

use std::io::{self, Write};

use ratevault::{Client, Entry, State};
use serde::Serialize;

/// One row, as it is printed.
#[derive(Debug, Default)]
pub(crate) struct Line {
    table: String,
    kind: String,
    pub(crate) endpoint: String,
    pub(crate) client: String,
    pub(crate) hits: Option<u64>,
    pub(crate) first_ms: Option<u64>,
    pub(crate) last_ms: Option<u64>,
    pub(crate) expires_at_ms: u64,
    pub(crate) error: Option<&'static str>,
    /// For people: endpoint and client, escaped.
    pub(crate) readable: (String, String),
}

#[derive(Serialize)]
pub(crate) struct RowJson<'a> {
    table: &'a str,
    kind: &'a str,
    endpoint: &'a str,
    client: &'a str,
    pub(crate) hits: Option<u64>,
    pub(crate) first_ms: Option<u64>,
    pub(crate) last_ms: Option<u64>,
    pub(crate) expires_at_ms: u64,
}

#[derive(Serialize)]
pub(crate) struct DamagedJson<'a> {
    table: &'a str,
    endpoint: &'a str,
    client: &'a str,
    error: &'a str,
}

impl Line {
    pub(crate) fn of(table: &str, kind: &str, entry: &Entry<State>) -> Self {
        let endpoint = entry.key.endpoint();
        let client = entry.key.client();
        let readable = (Client::from(&*endpoint).to_string(), client.to_string());
        let (hits, first_ms, last_ms) = match &entry.value {
            State::SlidingLog(log) => {
                let mut times = log.times();
                let first = times.next().map(|hit| hit.as_millis());
                let last = times.next_back().map(|hit| hit.as_millis());
                (Some(log.times().len() as u64), first, last.or(first))
            }
            State::FixedWindow(count) => {
                let start = count.start().as_millis();
                (Some(count.used().into()), Some(start), None)
            }
            _ => (None, None, None),
        };
        Self {
            table: table.to_owned(),
            kind: kind.to_owned(),
            client: client
                .text()
                .map_or_else(|| readable.1.clone(), str::to_owned),
            endpoint: endpoint.into_owned(),
            hits,
            first_ms,
            last_ms,
            expires_at_ms: entry.expires_at.as_millis(),
            error: None,
            readable,
        }
    }

    pub(crate) fn damaged(table: &str, endpoint: String, client: String) -> Self {
        Self {
            table: table.to_owned(),
            readable: (
                Client::from(&endpoint).to_string(),
                Client::from(&client).to_string(),
            ),
            endpoint,
            client,
            error: Some("corrupt"),
            ..Self::default()
        }
    }

    pub(crate) fn has_expired(&self, now: u64) -> bool {
        self.error.is_none() && self.expires_at_ms <= now
    }

    pub(crate) fn json(&self) -> serde_json::Result<String> {
        let mut bytes = Vec::new();
        let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, Harmless);
        match self.error {
            Some(error) => DamagedJson {
                table: &self.table,
                endpoint: &self.endpoint,
                client: &self.client,
                error,
            }
            .serialize(&mut serializer),
            None => RowJson {
                table: &self.table,
                kind: &self.kind,
                endpoint: &self.endpoint,
                client: &self.client,
                hits: self.hits,
                first_ms: self.first_ms,
                last_ms: self.last_ms,
                expires_at_ms: self.expires_at_ms,
            }
            .serialize(&mut serializer),
        }?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// JSON whose strings hold no control character, also not those that JSON itself lets pass.
pub(crate) struct Harmless;

impl serde_json::ser::Formatter for Harmless {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        for part in fragment.split_inclusive(char::is_control) {
            match part.chars().next_back().filter(|last| last.is_control()) {
                Some(last) => {
                    let harmless = part.trim_end_matches(char::is_control);
                    write!(writer, "{harmless}\\u{:04x}", u32::from(last))?;
                }
                None => writer.write_all(part.as_bytes())?,
            }
        }
        Ok(())
    }
}
