//! The HTTP layer over a buffered table.

use std::sync::Arc;

use ratevault::http::RateLimitLayer;
use ratevault::{Limiter, Vault};
use tokio::task::JoinSet;

use super::RARELY;
use crate::support::faulty::Faulty;
use crate::support::http::{App, answer, get, window};

const REQUESTS: usize = 100;

#[test]
fn of_100_requests_at_once_exactly_five_reach_the_handler() {
    let storage = Arc::new(Faulty::default());
    let vault = Vault::builder("rate_limits").storage(Arc::clone(&storage));
    let vault = vault.durability(RARELY).open().unwrap();
    let limiter = Limiter::new(vault, window("5/hour"));
    let app = App::new(RateLimitLayer::new(limiter.clone(), "login"));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    let syncs = storage.syncs();
    let statuses = runtime.block_on(async {
        let requests = (0..REQUESTS).map(|_| answer(app.router.clone(), get("/login")));
        let answers = requests.collect::<JoinSet<_>>().join_all().await;
        answers
            .into_iter()
            .map(|answer| answer.status().as_u16())
            .collect::<Vec<_>>()
    });
    let count = |status| statuses.iter().filter(|found| **found == status).count();
    assert_eq!((count(200), count(429)), (5, REQUESTS - 5));
    assert_eq!(app.served(), 5);
    assert_eq!(storage.syncs(), syncs, "none of them waited for the disk");

    // A restart forgives nobody.
    drop((app, limiter));
    let vault = Vault::builder("rate_limits")
        .storage(storage)
        .open()
        .unwrap();
    let app = App::new(RateLimitLayer::new(
        Limiter::new(vault, window("5/hour")),
        "login",
    ));
    assert_eq!(app.status(), 429);
}
