//! What a table may hold: every state it went through, and from which of them on it counts.

use std::collections::BTreeMap;
use std::time::Duration;

use ratevault::{Algorithm, Decision, HitLog, SlidingWindow, Timestamp};

use super::script::Client;

/// The rows that have not expired.
pub type Rows = BTreeMap<Client, HitLog>;

/// A row, and when it ends.
type State = BTreeMap<Client, (HitLog, Timestamp)>;

#[derive(Debug)]
pub struct Model {
    window: SlidingWindow,
    /// How many rows the table may hold.
    max_keys: usize,
    is_buffered: bool,
    /// After each operation, oldest first.
    states: Vec<State>,
    /// The oldest state that a power cut may bring back.
    durable: usize,
    /// The oldest state that may hold in the process: later ones are of operations of which nobody
    /// knows whether they were applied.
    known: usize,
}

impl Model {
    pub fn new(window: SlidingWindow, max_keys: u64, is_buffered: bool) -> Self {
        Self {
            window,
            max_keys: max_keys as usize,
            is_buffered,
            states: vec![State::default()],
            durable: 0,
            known: 0,
        }
    }

    fn latest(&self) -> &State {
        self.states.last().unwrap()
    }

    /// A check is applied, if it is.
    pub fn check(&mut self, client: Client, cost: u32, now: Timestamp) -> Decision {
        let mut state = self.latest().clone();
        state.retain(|_, (_, ends)| *ends > now);
        if !state.contains_key(&client) && state.len() == self.max_keys && !self.is_buffered {
            let oldest = state
                .iter()
                .min_by_key(|(client, (_, ends))| (*ends, **client));
            let victim = *oldest.unwrap().0;
            state.remove(&victim);
        }
        let ends = Timestamp::from_millis(0);
        let (log, ends) = state.entry(client).or_insert((HitLog::default(), ends));
        let verdict = self.window.decide(log, now, cost);
        assert!(verdict.write, "a refusal counts");
        *ends = now.saturating_add(self.window.ttl());
        self.states.push(state);
        verdict.decision
    }

    /// What a look at `client` finds.
    pub fn peek(&self, client: Client, now: Timestamp) -> Decision {
        let log = live(self.latest(), client, now).cloned();
        self.window.peek(&log.unwrap_or_default(), now)
    }

    /// The rows that `is_gone` says are removed, if they are.
    pub fn remove(&mut self, is_gone: impl Fn(Client) -> bool) {
        let mut state = self.latest().clone();
        state.retain(|client, _| !is_gone(*client));
        self.states.push(state);
    }

    /// How many states there are: what [`not_applied`](Self::not_applied) goes back to.
    pub fn mark(&self) -> usize {
        self.states.len()
    }

    pub fn not_applied(&mut self, mark: usize) {
        self.states.truncate(mark);
    }

    /// What was done last was answered.
    pub fn answered(&mut self) {
        self.known = self.states.len() - 1;
        if !self.is_buffered {
            self.durable = self.known;
        }
    }

    /// All that was answered is on disk.
    pub fn flushed(&mut self) {
        self.durable = self.known;
    }

    pub const fn durable(&self) -> usize {
        self.durable
    }

    pub const fn known(&self) -> usize {
        self.known
    }

    /// Whether the table may hold `rows`, if no state before `from` is possible.
    ///
    /// A buffered table is carried to the disk row by row, so each may be of another state; and what
    /// its bound forgets depends on when that is, so a client that comes once may be missing.
    fn allows(&self, rows: &Rows, from: usize, now: Timestamp) -> bool {
        let states = &self.states[from..];
        if self.is_buffered {
            let mut clients: Vec<_> = states.iter().flat_map(State::keys).collect();
            clients.extend(rows.keys());
            let is_allowed = |client: &&Client| {
                let found = rows.get(*client);
                let mut before = states.iter().map(|state| live(state, **client, now));
                before.any(|log| log == found) || found.is_none() && client.comes_once()
            };
            return clients.iter().all(is_allowed);
        }
        let are_found = |state: &State| {
            let live = state.iter().filter(|(_, (_, ends))| *ends > now);
            live.map(|(client, (log, _))| (client, log)).eq(rows)
        };
        states.iter().any(are_found)
    }

    pub fn assert_allows(&self, rows: &Rows, from: usize, now: Timestamp, what: &str) {
        let states = self.states[from..].iter();
        let states = states.map(|state| text(state.iter().map(|(client, (log, _))| (client, log))));
        assert!(
            self.allows(rows, from, now),
            "{what}: found {}, of these: {:#?}",
            text(rows),
            states.collect::<Vec<_>>()
        );
    }

    /// From here on the table is known to hold `rows`. `from`: as above.
    pub fn adopt(&mut self, rows: &Rows, from: usize) {
        let ends = |client: &Client, log: &HitLog| {
            let mut newest = self.states[from..].iter().rev();
            newest.find_map(|state| state.get(client).filter(|(found, _)| found == log))
        };
        let found =
            |(client, log): (&Client, &HitLog)| (*client, ends(client, log).unwrap().clone());
        let state: State = rows.iter().map(found).collect();
        self.states.truncate(self.known + 1);
        self.states.push(state);
        self.answered();
    }

    /// Forgets the states that no power cut brings back.
    pub fn trim(&mut self) {
        self.states.drain(..self.durable);
        self.known -= self.durable;
        self.durable = 0;
    }
}

fn live(state: &State, client: Client, now: Timestamp) -> Option<&HitLog> {
    let row = state.get(&client).filter(|(_, ends)| *ends > now);
    row.map(|(log, _)| log)
}

/// Longer than any row lives.
pub const FOR_EVER: Duration = Duration::from_secs(86_400);

fn text<'r>(rows: impl IntoIterator<Item = (&'r Client, &'r HitLog)>) -> String {
    let row = |(Client(endpoint, name), log): (&Client, &HitLog)| {
        format!("{endpoint}/{name} {}", serde_json::to_string(log).unwrap())
    };
    let rows: Vec<_> = rows.into_iter().map(row).collect();
    rows.join(", ")
}
