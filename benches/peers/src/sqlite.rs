//! A log of hits in SQLite, as an application would keep it that has no limiter at hand.
//!
//! One table in the order of (key, time), a connection per thread, prepared statements, and one
//! transaction per check that takes the write lock at its beginning: a transaction that reads first
//! and writes then would be refused whenever another one came in between.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, TransactionBehavior, params};

use crate::load::Limit;

/// Longer than any thread has to wait for its turn to write.
const BUSY_TIMEOUT: Duration = Duration::from_secs(60);

/// WITHOUT ROWID: the table is the index on (key, time), and a hit is written once.
const SCHEMA: &str = "CREATE TABLE hits (
    key TEXT NOT NULL,
    time INTEGER NOT NULL,
    PRIMARY KEY (key, time)
) STRICT, WITHOUT ROWID";
const FORGET: &str = "DELETE FROM hits WHERE key = ?1 AND time <= ?2";
const COUNT: &str = "SELECT count(*), max(time) FROM hits WHERE key = ?1";
const RECORD: &str = "INSERT INTO hits (key, time) VALUES (?1, ?2)";

/// When a commit is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Synchronous {
    /// At once: what ratevault promises by default.
    Full,
    /// At the next checkpoint: a loss of power may take the last commits, a kill does not.
    Normal,
}

pub(crate) struct SqliteLog {
    path: PathBuf,
    synchronous: Synchronous,
    limit: i64,
    window_ns: i64,
}

impl SqliteLog {
    pub(crate) fn create(
        path: &Path,
        synchronous: Synchronous,
        limit: u32,
        window: Duration,
    ) -> Self {
        let log = Self {
            path: path.to_owned(),
            synchronous,
            limit: limit.into(),
            window_ns: i64::try_from(window.as_nanos()).expect("less than 292 years"),
        };
        let connection = log.hand();
        connection.execute_batch(SCHEMA).expect("a new table");
        log
    }

    /// Has each client come once, all in one transaction.
    pub(crate) fn check_all(&self, clients: &[String]) {
        let mut connection = self.hand();
        let transaction = connection.transaction().expect("nobody else is there");
        for client in clients {
            let mut record = transaction.prepare_cached(RECORD).expect("a statement");
            record.execute(params![client, now()]).expect("a new row");
        }
        transaction.commit().expect("a disk that works");
    }

    fn check(&self, connection: &mut Connection, client: &str) -> rusqlite::Result<bool> {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // Not before: whoever waits for the lock would have the time of its arrival.
        let now = now();
        transaction
            .prepare_cached(FORGET)?
            .execute(params![client, now - self.window_ns])?;
        let counted = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        let (count, newest): (i64, Option<i64>) = transaction
            .prepare_cached(COUNT)?
            .query_row([client], counted)?;
        let is_allowed = count < self.limit;
        if is_allowed {
            // Two hits of one instant are two hits.
            let time = newest.map_or(now, |newest| now.max(newest + 1));
            transaction
                .prepare_cached(RECORD)?
                .execute(params![client, time])?;
        }
        transaction.commit()?;
        Ok(is_allowed)
    }
}

impl Limit for SqliteLog {
    type Hand = Connection;

    fn hand(&self) -> Connection {
        let connection = Connection::open(&self.path).expect("a file");
        connection.busy_timeout(BUSY_TIMEOUT).expect("a setting");
        let set = |name, value| connection.pragma_update(None, name, value);
        set("journal_mode", "wal").expect("a setting");
        let synchronous = match self.synchronous {
            Synchronous::Full => "full",
            Synchronous::Normal => "normal",
        };
        set("synchronous", synchronous).expect("a setting");
        connection
    }

    fn allows(&self, connection: &mut Connection, client: &String) -> bool {
        self.check(connection, client).expect("a decision")
    }

    fn batch(&self) -> u64 {
        1
    }
}

/// ns since the Unix epoch.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let since = since.expect("a clock that is not far behind");
    i64::try_from(since.as_nanos()).expect("a year before 2262")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder;

    #[test]
    fn so_many_are_let_in_as_the_limit_says_also_by_several_connections() {
        for synchronous in [Synchronous::Full, Synchronous::Normal] {
            let folder = folder();
            let path = folder.path().join("log.sqlite");
            let log = SqliteLog::create(&path, synchronous, 3, Duration::from_secs(60));
            let (mut one, mut other) = (log.hand(), log.hand());
            let (ada, bob) = ("ada".to_owned(), "bob".to_owned());
            log.check_all(std::slice::from_ref(&ada));
            assert!(log.allows(&mut one, &ada));
            assert!(log.allows(&mut other, &ada));
            assert!(!log.allows(&mut one, &ada));
            assert!(!log.allows(&mut other, &ada));
            assert!(log.allows(&mut other, &bob));
        }
    }

    #[test]
    fn a_hit_counts_for_one_window() {
        let folder = folder();
        let path = folder.path().join("log.sqlite");
        let log = SqliteLog::create(&path, Synchronous::Normal, 1, Duration::from_millis(20));
        let (mut hand, ada) = (log.hand(), "ada".to_owned());
        assert!(log.allows(&mut hand, &ada));
        std::thread::sleep(Duration::from_millis(21));
        assert!(log.allows(&mut hand, &ada));
    }
}
