//! The script: what is done to a vault while every call of its storage fails once.

use std::time::Duration;

use crate::support::MINUTE;

/// How many hits a client has per minute.
pub const LIMIT: u32 = 3;

/// How many rows the table may hold.
pub const MAX_KEYS: u64 = 4;

/// An endpoint and a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Client(pub &'static str, pub &'static str);

impl Client {
    /// Whether it is one of the crowd that the bound forgets first.
    pub fn comes_once(self) -> bool {
        self.0 == CROWD
    }
}

const CROWD: &str = "crowd";
pub const ADA: Client = Client("login", "ada");
pub const BOB: Client = Client("login", "bob");

const fn one(name: &'static str) -> Client {
    Client(CROWD, name)
}

pub const CLIENTS: [Client; 7] = [ADA, BOB, one("a"), one("b"), one("c"), one("d"), one("e")];

#[derive(Clone, Copy, Debug)]
pub enum Step {
    Check(Client, u32),
    /// Checks that are all under way before one is answered.
    Burst(&'static [Client]),
    Peek(Client),
    Reset(Client),
    ResetEndpoint(&'static str),
    Pass(Duration),
    Sweep,
    Flush,
    /// Closes and opens it.
    Reopen,
    /// Drops the last handle and opens it.
    Leave,
    /// Opens what a power cut leaves.
    PowerCut,
}

use Step::{Burst, Check, Flush, Leave, Pass, Peek, PowerCut, Reopen, Reset, ResetEndpoint, Sweep};

/// Admitted and refused, evicted, reset, closed, expired and swept, lost power and dropped.
///
/// Before the flush that makes the bound forget some, both who stay are checked twice: should a fault
/// take one of the checks, they are still newer than the crowd.
pub const SCRIPT: [Step; 27] = [
    Check(ADA, 1),
    Check(ADA, 2),
    Check(ADA, 1),
    Burst(&[BOB, one("a"), one("b")]),
    Peek(ADA),
    Flush,
    Check(one("c"), 1),
    Check(ADA, 1),
    Check(BOB, 2),
    Burst(&[ADA, BOB]),
    Flush,
    Reset(BOB),
    Check(BOB, 1),
    Reopen,
    Check(BOB, 1),
    Pass(MINUTE.saturating_mul(2)),
    Sweep,
    Check(ADA, 2),
    Check(one("d"), 3),
    PowerCut,
    Check(BOB, 1),
    ResetEndpoint(CROWD),
    Burst(&[one("e"), BOB]),
    Leave,
    Check(ADA, 1),
    Flush,
    Reopen,
];
