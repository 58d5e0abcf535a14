//! The tower layer and `http::check`: who is served, what everybody else is told, what is logged.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Debug;
use std::future::{Future, Ready, pending, ready};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse;
use axum::routing::{any, get as on_get, post};
use bytes::Bytes;
use http::header::HeaderName;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use ratevault::http::{
    Admitted, ClientKey, RateLimitLayer, Refusal, RefusalBody, TrustedProxies, check, ip_key,
    ip_key_forwarded, plain_text, problem_json,
};
use ratevault::{
    Algorithm, Clock, Decision, Error, FixedWindow, Limiter, ManualClock, Quota, Refusals,
    SlidingWindow, Timestamp, Vault, async_gate_fn, gate_fn,
};
use tokio::net::TcpStream;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_http::cors::{Any, CorsLayer};

use crate::support::faulty::Faulty;
use crate::support::file::{Contents, damage_row};
use crate::support::http::{
    Answer, App, PEER, answer, ask, counted, field, get, get_from, get_with, limiter,
    limiter_and_clock, limiter_on, logged, numbers, remaining, retry_after, serve, window,
};
use crate::support::{DAY, MINUTE, SECOND, START, eventually, manual_clock, single_threaded};

const MS: Duration = Duration::from_millis(1);
const STRANGER: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 9));

type Login<A = SlidingWindow> = RateLimitLayer<Limiter<A>>;

/// A layer that waits longer than by default: a machine with much to do is no disk that hangs.
fn login<A: Algorithm>(limiter: &Limiter<A>) -> Login<A> {
    RateLimitLayer::new(limiter.clone(), "login").answer_timeout(MINUTE)
}

/// The places that are left to `PEER`.
fn left(limiter: &Limiter<SlidingWindow>) -> u32 {
    limiter.vault().flush().unwrap();
    limiter.peek("login", PEER).unwrap().remaining()
}

// The numbers.

#[test]
fn five_answers_count_down_and_the_sixth_is_a_429_that_says_when_to_come_back() {
    let (limiter, clock) = limiter_and_clock(window("5/minute"));
    let app = App::new(login(&limiter));
    // Not a whole second, so that it shows whether the reset is rounded up.
    clock.advance(MS);
    for left in (0..5).rev() {
        let answer = app.get();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.body(), "welcome");
        assert_eq!(numbers(&answer), Some([5, left, START / 1_000 + 61]));
        assert_eq!(retry_after(&answer), None);
        assert_eq!(field(&answer, "cache-control"), None);
        clock.advance(10 * SECOND);
    }
    // At 50.001 s. The refused request counts, so the second, of 10.001 s, is the oldest of five.
    let answer = app.get();
    assert_eq!(answer.status(), 429);
    assert_eq!(numbers(&answer), Some([5, 0, START / 1_000 + 71]));
    assert_eq!(retry_after(&answer), Some(20));
    assert_eq!(field(&answer, "cache-control"), Some("no-store"));
    assert_eq!(app.served(), 5);
}

#[test]
fn a_reset_at_a_whole_second_is_that_second() {
    let (limiter, _clock) = limiter_and_clock(window("5/minute"));
    let answer = App::new(login(&limiter)).get();
    assert_eq!(numbers(&answer), Some([5, 4, START / 1_000 + 60]));
}

/// A clock behind which the system's time was set an hour ahead.
#[derive(Debug)]
struct SetAhead(Arc<ManualClock>);

impl Clock for SetAhead {
    fn now(&self) -> Timestamp {
        self.0.now()
    }

    fn wall(&self) -> Timestamp {
        self.0.now().saturating_add(60 * MINUTE)
    }
}

#[test]
fn the_reset_is_told_by_the_wall_clock_and_the_wait_is_not() {
    let vault = Vault::builder("rate_limits").in_memory();
    let vault = vault.clock(Arc::new(SetAhead(manual_clock())));
    let limiter = Limiter::new(vault.open().unwrap(), window("1/minute"));
    let app = App::new(login(&limiter));
    for wait in [None, Some(60)] {
        let answer = app.get();
        assert_eq!(numbers(&answer), Some([1, 0, START / 1_000 + 3_660]));
        assert_eq!(retry_after(&answer), wait);
    }
}

// The law of retry-after.

const WINDOWS: [&str; 8] = [
    "1/1 ms",
    "3/500 ms",
    "2/1500 ms",
    "5/minute",
    "3/7 seconds",
    "3/2 seconds; 4/1 minute",
    "5/minute; 8/500 ms; 9/1 hour",
    "2/500 ms; 3/10 seconds",
];

/// How long a client pauses between its requests, in ms.
const PAUSES: [&[u64]; 5] = [
    &[],
    &[1, 1, 1],
    &[999, 1, 1_000, 1_001],
    &[0, 400, 13, 700, 0, 2_501],
    &[59_000, 999, 1, 59_999, 60_001],
];

/// A client that was refused, its clock, and how many seconds it should wait.
fn refused<A: Algorithm + Clone>(
    algorithm: &A,
    cost: u32,
    pauses: &[u64],
) -> (App, Arc<ManualClock>, u64) {
    let (limiter, clock) = limiter_and_clock(algorithm.clone());
    let app = App::new(login(&limiter).cost(move |_| cost));
    clock.advance(337 * MS);
    for pause in pauses {
        app.get();
        clock.advance(Duration::from_millis(*pause));
    }
    loop {
        let answer = app.get();
        match retry_after(&answer) {
            Some(wait) => return (app, clock, wait),
            None => assert_eq!(answer.status(), 200),
        }
    }
}

/// Returns the wait.
fn the_law_holds<A: Algorithm + Clone + Debug>(algorithm: &A, cost: u32, pauses: &[u64]) -> u64 {
    let (app, clock, wait) = refused(algorithm, cost, pauses);
    clock.advance(Duration::from_secs(wait));
    assert_eq!(app.status(), 200, "{algorithm:?} {cost} {pauses:?} {wait}");
    // In a run of its own: a refused attempt may count.
    let (app, clock, same) = refused(algorithm, cost, pauses);
    assert_eq!(same, wait);
    if wait > 1 {
        clock.advance(Duration::from_secs(wait - 1));
        assert_eq!(app.status(), 429, "{algorithm:?} {cost} {pauses:?} {wait}");
    }
    wait
}

fn the_law_holds_everywhere<A: Algorithm + Clone + Debug>(algorithms: &[A]) {
    let runs = algorithms.iter().flat_map(|algorithm| {
        let smallest = algorithm.quotas().iter().map(Quota::limit).min();
        let costs = 1..=smallest.unwrap().min(2);
        costs.flat_map(move |cost| PAUSES.map(|pauses| the_law_holds(algorithm, cost, pauses)))
    });
    let waits: Vec<_> = runs.collect();
    assert!(waits.contains(&1));
    assert!(waits.iter().any(|wait| *wait > 1));
}

#[test]
fn whoever_waits_for_retry_after_is_served_and_a_second_earlier_is_not() {
    let windows = WINDOWS.map(|text| window(text).refusals(Refusals::Ignore));
    the_law_holds_everywhere(&windows);
}

#[test]
fn the_law_of_retry_after_holds_too_if_refused_requests_count() {
    let windows = WINDOWS.map(|text| window(text).refusals(Refusals::Count));
    the_law_holds_everywhere(&windows);
}

#[test]
fn the_law_of_retry_after_holds_for_fixed_windows() {
    let quotas = ["1/1 ms", "3/500 ms", "2/1500 ms", "5/minute", "3/7 seconds"];
    the_law_holds_everywhere(&quotas.map(|quota| FixedWindow::new(quota.parse().unwrap())));
}

// Real sockets.

const CLIENTS: usize = 100;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Sends a request over a connection of its own, when everybody has one.
async fn over_http1(address: SocketAddr, all: Arc<Barrier>) -> u16 {
    let stream = TcpStream::connect(address).await.unwrap();
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.unwrap();
    tokio::spawn(connection);
    let request = Request::get("/login").header("host", "test");
    all.wait().await;
    let answer = sender.send_request(request.body(Body::empty()).unwrap());
    let answer = answer.await.unwrap();
    assert_eq!(answer.version(), Version::HTTP_11);
    answer.status().as_u16()
}

async fn over_http2(
    mut sender: http2::SendRequest<Body>,
    address: SocketAddr,
    all: Arc<Barrier>,
) -> u16 {
    let request = Request::get(format!("http://{address}/login"));
    all.wait().await;
    let answer = sender.send_request(request.body(Body::empty()).unwrap());
    let answer = answer.await.unwrap();
    assert_eq!(answer.version(), Version::HTTP_2);
    answer.status().as_u16()
}

#[track_caller]
fn five_were_served(statuses: &[u16], app: &App) {
    let count = |status| statuses.iter().filter(|found| **found == status).count();
    assert_eq!((count(200), count(429)), (5, CLIENTS - 5));
    assert_eq!(app.served(), 5);
}

#[test]
fn of_100_connections_with_http_1_exactly_five_reach_the_handler() {
    let limiter = limiter("5/hour");
    let app = App::new(login(&limiter));
    let statuses = runtime().block_on(async {
        let address = serve(app.router.clone()).await;
        let all = Arc::new(Barrier::new(CLIENTS));
        let clients = (0..CLIENTS).map(|_| over_http1(address, Arc::clone(&all)));
        clients.collect::<JoinSet<_>>().join_all().await
    });
    five_were_served(&statuses, &app);
    // They were counted by the address that axum knows.
    assert_eq!(counted(&limiter), ["login/127.0.0.1"]);
}

#[test]
fn of_100_requests_on_one_http_2_connection_exactly_five_reach_the_handler() {
    let limiter = limiter("5/hour");
    let app = App::new(login(&limiter));
    let statuses = runtime().block_on(async {
        let address = serve(app.router.clone()).await;
        let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
        let handshake = http2::handshake(TokioExecutor::new(), stream).await;
        let (sender, connection) = handshake.unwrap();
        tokio::spawn(connection);
        let all = Arc::new(Barrier::new(CLIENTS));
        let clients = (0..CLIENTS).map(|_| over_http2(sender.clone(), address, Arc::clone(&all)));
        clients.collect::<JoinSet<_>>().join_all().await
    });
    five_were_served(&statuses, &app);
}

// Dropped requests.

/// A service that counts its calls.
#[derive(Clone, Default)]
struct Counting(Arc<AtomicUsize>);

impl Service<Request<Body>> for Counting {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _request: Request<Body>) -> Self::Future {
        self.0.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new(Body::empty())))
    }
}

#[test]
fn a_request_that_is_dropped_unpolled_counts() {
    let (limiter, inner) = (limiter("5/hour"), Counting::default());
    let mut service = login(&limiter).layer(inner.clone());
    drop(service.call(get("/login")));
    assert_eq!(left(&limiter), 4);
    assert_eq!(inner.0.load(Ordering::SeqCst), 0);
}

#[test]
fn a_request_that_is_dropped_while_it_waits_counts() {
    let storage = Arc::new(Faulty::default());
    let (limiter, inner) = (limiter_on(&storage), Counting::default());
    let mut service = login(&limiter).layer(inner.clone());
    storage.hold(true);
    {
        let mut future = pin!(service.call(get("/login")));
        let polled = future
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
    }
    storage.until_a_sync_waits();
    storage.hold(false);
    assert_eq!(left(&limiter), 4);
    assert_eq!(inner.0.load(Ordering::SeqCst), 0);
}

// The contract of tower.

#[test]
fn asking_whether_the_service_is_ready_takes_no_place() {
    let (limiter, inner) = (limiter("5/hour"), Counting::default());
    let mut service = login(&limiter).layer(inner.clone());
    for _ in 0..100 {
        let ready = service.poll_ready(&mut Context::from_waker(Waker::noop()));
        assert!(ready.is_ready());
    }
    assert_eq!(left(&limiter), 5);
}

/// A service that may only be called when it, and not one it was cloned from, said it is ready.
#[derive(Debug, Default)]
struct Choosy {
    is_ready: bool,
    is_broken: bool,
}

#[derive(Debug, PartialEq)]
enum Own {
    NotReady,
    Failed(String),
}

impl Clone for Choosy {
    fn clone(&self) -> Self {
        Self {
            is_ready: false,
            is_broken: self.is_broken,
        }
    }
}

impl Service<Request<Body>> for Choosy {
    type Response = Response<Body>;
    type Error = Own;
    type Future = Ready<Result<Response<Body>, Own>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Own>> {
        self.is_ready = !self.is_broken;
        Poll::Ready(self.is_ready.then_some(()).ok_or(Own::NotReady))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        assert!(
            std::mem::take(&mut self.is_ready),
            "it was called without being ready"
        );
        ready(match request.uri().path() {
            "/login" => Ok(Response::new(Body::empty())),
            path => Err(Own::Failed(path.to_owned())),
        })
    }
}

#[test]
fn the_service_that_is_called_is_the_one_that_was_ready() {
    let layer = login(&limiter("2/hour")).cost(|request| request.headers.len() as u32);
    let mut service = layer.layer(Choosy::default());
    single_threaded().block_on(async {
        // Uncounted, counted twice, refused, and uncounted again.
        let (free, paid) = (|| get("/login"), || get_with("x-cost", "1"));
        for (request, status) in [
            (free(), 200),
            (paid(), 200),
            (paid(), 200),
            (paid(), 429),
            (free(), 200),
        ] {
            let answer = service.ready().await.unwrap().call(request);
            assert_eq!(answer.await.unwrap().status(), status);
        }
    });
}

#[test]
fn the_services_errors_are_passed_on_untouched() {
    let limiter = limiter("5/hour");
    let service = login(&limiter).layer(Choosy::default());
    let failed = single_threaded().block_on(service.oneshot(get("/fail")));
    assert_eq!(failed.unwrap_err(), Own::Failed("/fail".into()));
    assert_eq!(left(&limiter), 4, "it was counted all the same");

    let broken = Choosy {
        is_broken: true,
        ..Choosy::default()
    };
    let mut service = login(&limiter).layer(broken);
    let polled = service.poll_ready(&mut Context::from_waker(Waker::noop()));
    assert_eq!(polled, Poll::Ready(Err(Own::NotReady)));
}

#[test]
fn clones_of_a_layer_and_of_a_service_share_one_count() {
    let layer = login(&limiter("5/hour"));
    let first = App::new(layer.clone());
    let (second, third) = (first.clone(), App::new(layer));
    let left = [&first, &second, &third, &first].map(|app| remaining(&app.get()));
    assert_eq!(left, [4, 3, 2, 1]);
}

#[test]
fn layers_of_two_endpoints_count_apart() {
    let limiter = limiter("5/hour");
    let apps = ["login", "register"].map(|endpoint| {
        let layer = RateLimitLayer::new(limiter.clone(), endpoint);
        App::new(layer)
    });
    let left = [&apps[0], &apps[1], &apps[0]].map(|app| remaining(&app.get()));
    assert_eq!(left, [4, 4, 3]);
}

#[test]
fn clients_are_counted_apart() {
    let app = App::new(login(&limiter("1/hour")));
    assert_eq!(app.statuses(), [200, 429]);
    assert_eq!(app.ask(get_from(STRANGER, "/login")).status(), 200);
}

// The limiter fails.

#[test]
fn a_vault_that_fails_is_a_503_until_it_is_well_again() {
    let storage = Arc::new(Faulty::default());
    let app = App::new(login(&limiter_on(&storage)));
    storage.fail(true);
    assert_eq!(app.statuses(), [503; 10]);
    let answer = app.get();
    assert_eq!(field(&answer, "cache-control"), Some("no-store"));
    assert_eq!((numbers(&answer), retry_after(&answer)), (None, None));
    assert_eq!(app.served(), 0);
    storage.fail(false);
    eventually("service resumes", || app.status() == 200);
    assert_eq!(app.served(), 1);
}

#[test]
fn a_vault_that_fails_open_serves_without_numbers_until_it_is_well_again() {
    let storage = Arc::new(Faulty::default());
    let app = App::new(login(&limiter_on(&storage)).fail_open());
    storage.fail(true);
    for served in 1..=10 {
        let answer = app.get();
        assert_eq!(answer.status(), 200);
        assert_eq!(numbers(&answer), None);
        assert_eq!(app.served(), served);
    }
    storage.fail(false);
    eventually("it counts again", || numbers(&app.get()).is_some());
    // Whoever was served meanwhile was not counted, and now the limit holds.
    assert_eq!(app.statuses(), [200, 200, 200, 200, 429]);
}

#[test]
fn a_vault_that_is_closed_is_one_that_fails() {
    let limiter = limiter("5/hour");
    limiter.vault().close().unwrap();
    assert_eq!(App::new(login(&limiter)).status(), 503);
    assert_eq!(App::new(login(&limiter).fail_open()).status(), 200);
}

/// What is logged while ten requests meet a vault that fails.
fn logged_of_ten_failures(change: impl FnOnce(Login) -> Login) -> Vec<String> {
    let storage = Arc::new(Faulty::default());
    let app = App::new(change(login(&limiter_on(&storage))));
    storage.fail(true);
    let (_, lines) = logged(|| app.statuses::<10>());
    lines
}

#[test]
fn that_the_limiter_fails_is_logged_once_per_interval() {
    let lines = logged_of_ten_failures(|layer| layer.log_interval(DAY));
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(
        lines[0].starts_with("ERROR the rate limit fails"),
        "{lines:?}"
    );
    assert!(lines[0].contains(r#"endpoint="login""#), "{lines:?}");
    assert!(lines[0].contains("injected"), "{lines:?}");
    assert!(lines[0].contains("fail_open=false"), "{lines:?}");

    let lines = logged_of_ten_failures(|layer| layer.fail_open().log_interval(DAY));
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains("fail_open=true"), "{lines:?}");
}

#[test]
fn an_interval_of_zero_logs_every_failure() {
    let lines = logged_of_ten_failures(|layer| layer.log_interval(Duration::ZERO));
    assert_eq!(lines.len(), 10, "{lines:#?}");
}

#[test]
fn a_slow_disk_holds_up_nobody_who_is_not_limited() {
    let storage = Arc::new(Faulty::slow(Duration::from_millis(200)));
    let limited = App::new(login(&limiter_on(&storage))).router;
    let free = Router::new().route("/free", on_get(async || "welcome"));
    let served = single_threaded().block_on(async {
        let waiting = tokio::spawn(answer(limited, get("/login")));
        let mut served = 0_u64;
        while !waiting.is_finished() {
            let answer = answer(free.clone(), get("/free")).await;
            served += u64::from(answer.status() == 200);
            tokio::task::yield_now().await;
        }
        assert_eq!(waiting.await.unwrap().status(), 200);
        served
    });
    // A commit takes two syncs of 200 ms: a blocked runtime would have served one or two.
    assert!(served > 100, "{served}");
}

#[test]
fn the_defaults_are_those_that_are_documented() {
    let layer = RateLimitLayer::new(limiter("5/hour"), "login");
    let layer = format!("{layer:?}");
    let defaults = [
        "answer_timeout: 2s",
        "log_interval: 10s",
        "skip_unkeyed: false",
        "dry_run: false",
        "fail_open: false",
    ];
    for default in defaults {
        assert!(layer.contains(default), "{layer}");
    }
}

const SHORT: Duration = Duration::from_millis(50);

#[test]
fn a_disk_that_hangs_is_a_503_after_the_answer_timeout() {
    let storage = Arc::new(Faulty::default());
    let limiter = limiter_on(&storage);
    let app = App::new(login(&limiter).answer_timeout(SHORT));
    storage.hold(true);
    let (status, lines) = logged(|| app.status());
    assert_eq!((status, app.served()), (503, 0));
    assert!(lines[0].contains("no answer within 50ms"), "{lines:?}");
    storage.hold(false);
    // It was given up, not taken back.
    assert_eq!(left(&limiter), 4);
    assert_eq!(App::new(login(&limiter)).status(), 200);
    assert_eq!(left(&limiter), 3);
}

#[test]
fn a_disk_that_hangs_holds_up_a_layer_that_fails_open_for_the_answer_timeout() {
    let storage = Arc::new(Faulty::default());
    let limiter = limiter_on(&storage);
    let app = App::new(login(&limiter).answer_timeout(SHORT).fail_open());
    storage.hold(true);
    let answer = app.get();
    assert_eq!((answer.status().as_u16(), numbers(&answer)), (200, None));
    storage.hold(false);
    assert_eq!(left(&limiter), 4);
    let layer = login(&limiter).fail_open();
    assert_eq!(remaining(&App::new(layer).get()), 3);
}

#[test]
fn a_gate_that_never_answers_is_one_that_fails() {
    let gate = || async_gate_fn(|_, _| pending::<bool>());
    let layer = RateLimitLayer::new(gate(), "login").answer_timeout(SHORT);
    let app = App::new(layer);
    assert_eq!((app.status(), app.served()), (503, 0));
    let layer = RateLimitLayer::new(gate(), "login").answer_timeout(SHORT);
    let app = App::new(layer.fail_open());
    assert_eq!((app.status(), app.served()), (200, 1));
}

#[test]
fn an_answer_timeout_of_zero_still_hears_an_answer_that_is_there() {
    let layer = RateLimitLayer::new(gate_fn(|_, _| true), "login").answer_timeout(Duration::ZERO);
    assert_eq!(App::new(layer).status(), 200);
    // Nor does one that is too long for the system's clock do harm.
    let layer = login(&limiter("5/hour")).answer_timeout(Duration::MAX);
    assert_eq!(App::new(layer).status(), 200);
}

// Damaged rows.

/// A limiter in which `PEER` has a row that is damaged.
fn damaged(path: &Path) -> Limiter<SlidingWindow> {
    let open = || {
        let vault = Vault::builder("rate_limits").path(path);
        let vault = vault.clock(manual_clock()).open().unwrap();
        Limiter::new(vault, window("5/hour"))
    };
    let limiter = open();
    assert_eq!(App::new(login(&limiter)).status(), 200);
    limiter.vault().close().unwrap();
    let rows = Contents::read(path, "rate_limits").rows;
    assert_eq!(rows.len(), 1);
    damage_row(path, "rate_limits", rows.keys().next().unwrap());
    open()
}

#[test]
fn a_damaged_row_is_a_503_for_its_client_alone_until_it_is_reset() {
    let directory = tempfile::tempdir().unwrap();
    let limiter = damaged(&directory.path().join("vault.redb"));
    for app in [
        App::new(login(&limiter)),
        App::new(login(&limiter).fail_open()),
    ] {
        assert_eq!((app.statuses(), app.served()), ([503, 503], 0));
        assert_eq!(app.ask(get_from(STRANGER, "/login")).status(), 200);
    }
    limiter.reset("login", PEER).unwrap();
    assert_eq!(remaining(&App::new(login(&limiter)).get()), 4);
}

#[test]
fn a_dry_run_serves_whoever_has_a_damaged_row() {
    let directory = tempfile::tempdir().unwrap();
    let limiter = damaged(&directory.path().join("vault.redb"));
    let app = App::new(login(&limiter).dry_run());
    let (answer, lines) = logged(|| app.get());
    assert_eq!((answer.status().as_u16(), numbers(&answer)), (200, None));
    assert!(
        lines[0].starts_with("ERROR the rate limit fails"),
        "{lines:?}"
    );
}

// Paths.

/// Spellings of one page that a client might try.
const SPELLINGS: [&str; 7] = [
    "/login",
    "//login",
    "/login/",
    "/LOGIN",
    "/%6cogin",
    "/login?x=1",
    "/login;a",
];

fn pages() -> Router {
    Router::new()
        .route("/login", any(async || "welcome"))
        .route("/users/{id}", any(async || "a user"))
}

#[test]
fn every_spelling_of_a_path_is_counted_at_the_layers_endpoint() {
    let limiter = limiter("10/hour");
    let app = pages().layer(login(&limiter));
    let left = SPELLINGS.map(|path| remaining(&ask(&app, get(path))));
    assert_eq!(left, [9, 8, 7, 6, 5, 4, 3]);
    assert_eq!(counted(&limiter), ["login/203.0.113.7"]);
}

#[test]
fn per_route_counts_at_the_route_and_never_at_the_path() {
    let limiter = limiter("10/hour");
    let layer = RateLimitLayer::per_route(limiter.clone());
    let app = pages().layer(layer);
    // Two of the spellings are the route, and the other five no route.
    let left = SPELLINGS.map(|path| remaining(&ask(&app, get(path))));
    assert_eq!(left, [9, 9, 8, 7, 6, 8, 5]);
    for (id, left) in [("1", 9), ("2", 8), ("%31", 7), ("1?x", 6)] {
        let answer = ask(&app, get(&format!("/users/{id}")));
        assert_eq!((answer.status().as_u16(), remaining(&answer)), (200, left));
    }
    let mut endpoints = counted(&limiter);
    endpoints.sort();
    let expected = ["/login", "/users/{id}", "unmatched"];
    assert_eq!(endpoints, expected.map(|route| format!("{route}/{PEER}")));
}

#[test]
fn per_route_of_a_nested_router_counts_at_the_whole_route() {
    let limiter = limiter("10/hour");
    let layer = RateLimitLayer::per_route(limiter.clone());
    let app = Router::new().nest("/api", pages().layer(layer));
    for (path, left) in [("1", 9), ("2", 8)] {
        let answer = ask(&app, get(&format!("/api/users/{path}")));
        assert_eq!(remaining(&answer), left);
    }
    assert_eq!(counted(&limiter), [format!("/api/users/{{id}}/{PEER}")]);
}

#[test]
fn what_matches_no_route_of_a_nested_router_is_counted_as_unmatched() {
    let limiter = limiter("10/hour");
    let layer = RateLimitLayer::per_route(limiter.clone());
    let nested = pages().fallback(async || "nothing").layer(layer);
    let app = Router::new().nest("/shops/{shop}", nested);
    let paths = ["/shops/1/x", "/shops/2/x", "/shops/2/y"];
    let left = paths.map(|path| remaining(&ask(&app, get(path))));
    assert_eq!(left, [9, 8, 7]);
    assert_eq!(counted(&limiter), ["unmatched/203.0.113.7"]);
}

#[test]
fn per_route_without_axum_counts_everything_as_unmatched() {
    let limiter = limiter("10/hour");
    let service =
        service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
    let service = RateLimitLayer::per_route(limiter.clone()).layer(service);
    let left = SPELLINGS.map(|path| remaining(&ask(&service, get(path))));
    assert_eq!(left, [9, 8, 7, 6, 5, 4, 3]);
    assert_eq!(counted(&limiter), ["unmatched/203.0.113.7"]);
}

// Options.

/// The cost that a request states.
fn stated_cost(request: &Parts) -> u32 {
    let stated = request.headers.get("x-cost");
    stated.map_or(1, |cost| cost.to_str().unwrap().parse().unwrap())
}

#[test]
fn a_request_takes_as_many_places_as_it_costs() {
    let limiter = limiter("5/hour");
    let app = App::new(login(&limiter).cost(stated_cost));
    let cost = |cost| app.ask(get_with("x-cost", cost));
    assert_eq!(remaining(&cost("3")), 2);
    let free = cost("0");
    assert_eq!((free.status().as_u16(), numbers(&free)), (200, None));
    assert_eq!(remaining(&app.get()), 1);
    assert_eq!(cost("2").status(), 429);
    assert_eq!(cost("0").status(), 200, "also when nothing is left");
}

/// What is answered, and logged, to a request that costs more than the limit.
fn too_costly(layer: Login) -> (Answer, String) {
    let app = App::new(layer.cost(stated_cost));
    let (answer, lines) = logged(|| app.ask(get_with("x-cost", "6")));
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert_eq!(app.served() == 1, answer.status() == 200);
    (answer, lines[0].clone())
}

#[test]
fn a_cost_that_can_never_fit_is_a_500_that_is_logged() {
    let limiter = limiter("5/hour");
    for layer in [login(&limiter), login(&limiter).fail_open()] {
        let (answer, line) = too_costly(layer);
        assert_eq!(answer.status(), 500);
        assert_eq!(field(&answer, "cache-control"), Some("no-store"));
        assert_eq!((numbers(&answer), retry_after(&answer)), (None, None));
        assert!(
            line.starts_with("WARN the rate limit cannot judge a request"),
            "{line}"
        );
    }
    assert_eq!(left(&limiter), 5);
}

#[test]
fn mistakes_too_are_logged_once_per_interval() {
    for (interval, events) in [(DAY, 1), (Duration::ZERO, 10)] {
        let layer = login(&limiter("5/hour")).cost(|_| 6).log_interval(interval);
        let app = App::new(layer);
        let (statuses, lines) = logged(|| app.statuses());
        assert_eq!((statuses, lines.len()), ([500; 10], events));
    }
}

#[test]
fn requests_that_are_skipped_are_served_uncounted() {
    let limiter = limiter("1/hour");
    let layer = login(&limiter).skip(|request| request.uri.path() == "/health");
    let app = App::new(layer);
    assert_eq!(app.statuses(), [200, 429]);
    let answer = app.ask(get("/health"));
    assert_eq!((answer.status().as_u16(), numbers(&answer)), (200, None));
}

fn nobody(_request: &Parts) -> Option<ClientKey> {
    None
}

#[test]
fn a_request_of_nobody_is_a_500_unless_such_are_skipped() {
    let limiter = limiter("5/hour");
    let app = App::new(login(&limiter).key(nobody));
    let (status, lines) = logged(|| app.status());
    assert_eq!((status, app.served()), (500, 0));
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains("skip_unkeyed"), "{lines:?}");

    // That is no failure of the limiter.
    let app = App::new(login(&limiter).key(nobody).fail_open());
    assert_eq!(app.status(), 500);

    let app = App::new(login(&limiter).key(nobody).skip_unkeyed());
    let (answer, lines) = logged(|| app.get());
    assert_eq!((answer.status().as_u16(), numbers(&answer)), (200, None));
    assert_eq!(lines, [""; 0]);
    assert_eq!(counted(&limiter), [""; 0]);
}

#[test]
fn a_request_is_counted_for_whom_the_key_function_finds() {
    let limiter = limiter("5/hour");
    let app = App::new(login(&limiter).key(|request: &Parts| {
        let key = request.headers.get("x-api-key");
        key.map(ClientKey::from)
    }));
    let left = ["a", "b", "a"].map(|key| remaining(&app.ask(get_with("x-api-key", key))));
    assert_eq!(left, [4, 4, 3]);
    assert_eq!(counted(&limiter), ["login/a", "login/b"]);
}

#[test]
fn a_dry_run_decides_and_counts_but_serves() {
    let limiter = limiter("2/hour");
    let app = App::new(login(&limiter).dry_run());
    let (answers, lines) = logged(|| [(); 4].map(|()| app.get()));
    let left = answers.map(|answer| {
        assert_eq!(
            (answer.status().as_u16(), retry_after(&answer)),
            (200, None)
        );
        assert_eq!(field(&answer, "cache-control"), None);
        remaining(&answer)
    });
    assert_eq!(left, [1, 0, 0, 0]);
    assert_eq!(lines.len(), 2, "{lines:#?}");
    assert!(
        lines[1].starts_with("DEBUG dry run: would be refused"),
        "{lines:?}"
    );
    assert!(lines[1].contains(r#"endpoint="login""#), "{lines:?}");
    assert_eq!(App::new(login(&limiter)).status(), 429, "it was counted");
}

#[test]
fn a_dry_run_serves_what_it_cannot_judge() {
    let limiter = limiter("5/hour");
    let app = App::new(login(&limiter).key(nobody).dry_run());
    assert_eq!(logged(|| app.status()).0, 200);
    assert_eq!(too_costly(login(&limiter).dry_run()).0.status(), 200);
    let layer = RateLimitLayer::new(limiter, "e".repeat(257)).dry_run();
    assert_eq!(App::new(layer).status(), 200);
}

#[test]
fn a_dry_run_serves_while_the_limiter_fails_or_hangs_or_refuses_without_numbers() {
    let storage = Arc::new(Faulty::default());
    let app = App::new(login(&limiter_on(&storage)).dry_run());
    storage.fail(true);
    assert_eq!((app.statuses(), app.served()), ([200; 3], 3));

    let gate = async_gate_fn(|_, _| pending::<bool>());
    let layer = RateLimitLayer::new(gate, "login").answer_timeout(SHORT);
    assert_eq!(App::new(layer.dry_run()).status(), 200);

    let layer = RateLimitLayer::new(gate_fn(|_, _| false), "login").dry_run();
    let (status, lines) = logged(|| App::new(layer).status());
    assert_eq!((status, lines.len()), (200, 1));
}

#[test]
fn an_endpoint_that_is_too_long_is_a_500_that_is_logged() {
    let limiter = limiter("5/hour");
    let longest = RateLimitLayer::new(limiter.clone(), "e".repeat(256));
    assert_eq!(App::new(longest).status(), 200);
    for layer in [
        RateLimitLayer::new(limiter.clone(), "e".repeat(257)),
        RateLimitLayer::new(limiter, "e".repeat(257)).fail_open(),
    ] {
        let app = App::new(layer);
        let (status, lines) = logged(|| app.status());
        assert_eq!((status, app.served()), (500, 0));
        assert_eq!(lines.len(), 1, "{lines:#?}");
        assert!(lines[0].starts_with("WARN"), "{lines:?}");
    }
}

// Nested layers.

/// A service behind the first limit, which is behind the second; their windows do not move.
fn nested(inner: &str, outer: &str) -> App {
    let inner = RateLimitLayer::new(limiter(inner), "inner");
    let mut app = App::new(inner);
    app.router = app
        .router
        .layer(RateLimitLayer::new(limiter(outer), "outer"));
    app
}

#[test]
fn of_nested_limits_the_one_with_the_fewest_places_left_is_shown() {
    for app in [nested("5/hour", "3/minute"), nested("3/minute", "5/hour")] {
        let answer = app.get();
        assert_eq!(numbers(&answer), Some([3, 2, START / 1_000 + 60]));
    }
    // Of equals the inner one, whole.
    let answer = nested("3/hour", "3/minute").get();
    assert_eq!(numbers(&answer), Some([3, 2, START / 1_000 + 3_600]));
}

#[test]
fn a_limit_without_headers_hides_no_other() {
    let inner = RateLimitLayer::new(limiter("3/hour"), "inner").no_headers();
    let mut app = App::new(inner);
    let outer = RateLimitLayer::new(limiter("5/minute"), "outer");
    app.router = app.router.layer(outer);
    let answer = app.get();
    assert_eq!(numbers(&answer), Some([5, 4, START / 1_000 + 60]));
}

#[test]
fn of_nested_limits_with_other_headers_one_is_shown() {
    let inner = RateLimitLayer::new(limiter("5/hour"), "inner");
    let mut app = App::new(inner.ietf_headers("inner").unwrap());
    let outer = RateLimitLayer::new(limiter("3/minute"), "outer");
    app.router = app.router.layer(outer);
    let answer = app.get();
    assert_eq!(numbers(&answer), Some([3, 2, START / 1_000 + 60]));
    assert!(!answer.headers().contains_key("ratelimit"));
    assert!(!answer.headers().contains_key("ratelimit-policy"));
}

#[test]
fn of_three_limits_the_tightest_is_shown_wherever_it_stands() {
    for limits in [[2, 7, 9], [9, 2, 7], [7, 9, 2], [9, 7, 2]] {
        let [inner, middle, outer] = limits.map(|limit| format!("{limit}/hour"));
        let mut app = nested(&inner, &middle);
        let layer = RateLimitLayer::new(limiter(&outer), "outermost");
        app.router = app.router.layer(layer);
        assert_eq!(numbers(&app.get()).unwrap()[..2], [2, 1], "{limits:?}");
    }
}

#[test]
fn a_refusal_is_shown_as_that_of_the_limit_that_refused() {
    // The outer has no place left either when the inner refuses.
    let app = nested("1/minute", "2/hour");
    assert_eq!(app.status(), 200);
    let answer = app.get();
    assert_eq!(answer.status(), 429);
    assert_eq!(numbers(&answer), Some([1, 0, START / 1_000 + 60]));
    assert_eq!(retry_after(&answer), Some(60));

    let app = nested("2/hour", "1/minute");
    assert_eq!(app.status(), 200);
    let answer = app.get();
    assert_eq!(answer.status(), 429);
    assert_eq!(numbers(&answer), Some([1, 0, START / 1_000 + 60]));
    assert_eq!(retry_after(&answer), Some(60));
}

#[test]
fn a_refusal_without_numbers_is_given_none_by_the_limit_around_it() {
    let mut app = App::new(RateLimitLayer::new(gate_fn(|_, _| false), "inner"));
    app.router = app.router.layer(login(&limiter("5/hour")));
    let answer = app.get();
    assert_eq!((answer.status().as_u16(), numbers(&answer)), (429, None));
}

#[test]
fn a_limit_without_numbers_hides_none_of_another() {
    let mut app = App::new(RateLimitLayer::new(gate_fn(|_, _| true), "inner"));
    app.router = app.router.layer(login(&limiter("5/hour")));
    assert_eq!(remaining(&app.get()), 4);
}

// Header fields.

#[test]
fn the_fields_of_the_ietf_draft_take_the_place_of_the_others() {
    let (limiter, clock) = limiter_and_clock(window("2/minute"));
    let app = App::new(login(&limiter).ietf_headers("login").unwrap());
    let check = |answer: &Answer, limit| {
        assert_eq!(numbers(answer), None);
        let policy = field(answer, "ratelimit-policy");
        assert_eq!(policy, Some(r#""login";q=2;w=60"#));
        assert_eq!(field(answer, "ratelimit"), Some(limit));
    };
    check(&app.get(), r#""login";r=1;t=60"#);
    clock.advance(16_001 * MS);
    check(&app.get(), r#""login";r=0;t=44"#);
    let answer = app.get();
    assert_eq!(answer.status(), 429);
    // The refused one counts, so the second of the three is the oldest of two.
    check(&answer, r#""login";r=0;t=60"#);
    assert_eq!(retry_after(&answer), Some(60));
}

#[test]
fn each_of_several_quotas_is_a_policy_of_its_own() {
    let (limiter, _clock) = limiter_and_clock(window("5/minute; 2/500 ms; 100/day"));
    let app = App::new(login(&limiter).ietf_headers("log in").unwrap());
    let answer = app.get();
    assert_eq!(
        field(&answer, "ratelimit-policy"),
        Some(
            r#""log in 5/minute";q=5;w=60, "log in 2/500 ms";q=2;w=1, "log in 100/day";q=100;w=86400"#
        )
    );
    let limit = field(&answer, "ratelimit");
    assert_eq!(limit, Some(r#""log in 2/500 ms";r=1;t=1"#));
}

#[test]
fn a_policys_name_is_printable_ascii() {
    for name in ["", "caf\u{e9}", "a\tb", "a\r\nb", "\u{7f}", "\0"] {
        let error = login(&limiter("5/hour")).ietf_headers(name).unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { .. }), "{error:?}");
    }
    let layer = login(&limiter("5/hour")).ietf_headers(r#"a "b" \c"#);
    let answer = App::new(layer.unwrap()).get();
    let policy = field(&answer, "ratelimit-policy");
    assert_eq!(policy, Some(r#""a \"b\" \\c";q=5;w=3600"#));
}

#[test]
fn a_gate_that_does_not_say_its_quotas_announces_no_policy() {
    let gate = gate_fn(|_, _| decision(5, 3));
    let layer = RateLimitLayer::new(gate, "login").ietf_headers("login");
    let answer = App::new(layer.unwrap()).get();
    assert_eq!(field(&answer, "ratelimit-policy"), None);
    assert_eq!(field(&answer, "ratelimit"), Some(r#""login";r=3;t=2"#));
}

#[test]
fn without_number_fields_a_refusal_still_says_how_long_to_wait() {
    let app = App::new(login(&limiter("1/minute")).no_headers());
    let (served, refused) = (app.get(), app.get());
    for (answer, status, wait) in [(served, 200, None), (refused, 429, Some(60))] {
        assert_eq!(answer.status(), status);
        assert_eq!((numbers(&answer), retry_after(&answer)), (None, wait));
        assert_eq!(field(&answer, "ratelimit"), None);
        assert_eq!(field(&answer, "ratelimit-policy"), None);
    }
}

// What a client that is not served is told.

/// An app whose client is refused.
fn refusing(change: impl FnOnce(Login) -> Login) -> App {
    let app = App::new(change(login(&limiter("1/minute"))));
    assert_eq!(app.status(), 200);
    app
}

#[test]
fn by_default_a_refusal_is_a_sentence() {
    for app in [refusing(|layer| layer), refusing(|l| l.refusal(plain_text))] {
        let answer = app.get();
        let content_type = field(&answer, "content-type");
        assert_eq!(content_type, Some("text/plain; charset=utf-8"));
        assert_eq!(
            answer.body(),
            "Too many requests: try again in 60 seconds.\n"
        );
    }
    let layer = RateLimitLayer::new(gate_fn(|_, _| false), "login");
    let answer = App::new(layer.clone()).get();
    assert_eq!(answer.body(), "Too many requests: try again later.\n");
    let answer = App::new(layer.key(nobody)).get();
    assert_eq!(answer.body(), "The service made a mistake.\n");
}

/// The document of an answer that is a problem.
#[track_caller]
fn problem(answer: &Answer) -> serde_json::Value {
    let content_type = field(answer, "content-type");
    assert_eq!(content_type, Some("application/problem+json"));
    assert_eq!(field(answer, "cache-control"), Some("no-store"));
    serde_json::from_slice(answer.body()).unwrap()
}

#[test]
fn a_refusal_may_be_a_problem_document() {
    let answer = refusing(|layer| layer.refusal(problem_json)).get();
    assert_eq!(answer.status(), 429);
    assert_eq!(retry_after(&answer), Some(60));
    let expected = serde_json::json!({
        "type": "about:blank",
        "title": "Too Many Requests",
        "status": 429,
        "detail": "Too many requests: try again in 60 seconds.",
        "retry_after": 60,
    });
    assert_eq!(problem(&answer), expected);

    let failing = gate_fn(|_, _| Err::<bool, _>("no \"quotes\" get out"));
    let layer = RateLimitLayer::new(failing, "login").refusal(problem_json);
    let answer = App::new(layer).get();
    assert_eq!(answer.status(), 503);
    let expected = serde_json::json!({
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "detail": "The service is unavailable: try again later.",
    });
    assert_eq!(problem(&answer), expected);
}

#[test]
fn a_refusal_may_be_written_by_a_function() {
    let app = refusing(|layer| {
        layer.refusal(|refusal: &Refusal<'_>| {
            assert_eq!(refusal.status(), 429);
            assert_eq!(refusal.endpoint(), "login");
            let limit = refusal.decision().map(Decision::limit);
            let text = format!(
                "{} {limit:?} {:?} {}",
                refusal.request().uri,
                refusal.retry_after(),
                refusal.sentence(),
            );
            let response = Response::builder().status(403).header("x-own", "1");
            // What is due is due, whatever the function says.
            let response = response.header("cache-control", "public");
            let response = response.header("retry-after", "1");
            response.body(text).unwrap()
        })
    });
    let answer = app.get();
    assert_eq!(answer.status(), 403);
    assert_eq!(field(&answer, "x-own"), Some("1"));
    assert_eq!(field(&answer, "cache-control"), Some("no-store"));
    assert_eq!(retry_after(&answer), Some(60));
    assert_eq!(numbers(&answer), Some([1, 0, START / 1_000 + 60]));
    let text = "/login Some(1) Some(60) Too many requests: try again in 60 seconds.";
    assert_eq!(answer.body(), text);
}

const GRPC_TYPES: [&str; 4] = [
    "application/grpc",
    "application/grpc+proto",
    "APPLICATION/GRPC",
    "application/grpc-web",
];

#[track_caller]
fn refused_as_grpc(answer: &Answer, content_type: &str, status: &str) {
    assert_eq!(answer.status(), 200);
    assert_eq!(field(answer, "content-type"), Some(content_type));
    assert_eq!(field(answer, "grpc-status"), Some(status));
    assert_eq!(field(answer, "cache-control"), Some("no-store"));
    assert!(answer.body().is_empty());
}

/// A call, as gRPC makes it.
fn grpc(content_type: &str) -> Request<Body> {
    let mut request = get_with("content-type", content_type);
    *request.method_mut() = Method::POST;
    *request.version_mut() = Version::HTTP_2;
    request
}

#[test]
fn grpc_is_refused_as_grpc_refuses() {
    for content_type in GRPC_TYPES {
        // Whatever others are told.
        let app = refusing(|layer| layer.refusal(problem_json));
        let answer = app.ask(grpc(content_type));
        refused_as_grpc(&answer, content_type, "8");
        let message = field(&answer, "grpc-message");
        assert_eq!(message, Some("Too many requests: try again in 60 seconds."));
        assert_eq!(retry_after(&answer), Some(60));
        assert_eq!(remaining(&answer), 0);
        assert_eq!(app.served(), 1);
    }
}

#[test]
fn a_grpc_refusal_ends_with_its_header_fields() {
    let service = RateLimitLayer::new(gate_fn(|_, _| false), "login").layer(Counting::default());
    let request = grpc("application/grpc");
    let response = single_threaded().block_on(service.oneshot(request));
    // Clients take a status among the fields for one only if the stream ends there.
    assert!(response.unwrap().body().is_end_stream());
}

#[test]
fn grpc_hears_that_the_limiter_fails_or_is_misused() {
    let storage = Arc::new(Faulty::default());
    let app = App::new(login(&limiter_on(&storage)));
    storage.fail(true);
    for content_type in GRPC_TYPES {
        let answer = app.ask(grpc(content_type));
        refused_as_grpc(&answer, content_type, "14");
    }
    let app = App::new(login(&limiter("5/hour")).key(nobody));
    let answer = app.ask(grpc("application/grpc"));
    refused_as_grpc(&answer, "application/grpc", "13");
}

#[test]
fn what_is_not_grpc_is_not_refused_like_it() {
    for content_type in [
        "application/grp",
        "application/json",
        "text/application/grpc",
    ] {
        let answer = refusing(|layer| layer).ask(grpc(content_type));
        assert_eq!(answer.status(), 429);
        assert_eq!(field(&answer, "grpc-status"), None);
    }
}

#[test]
fn a_client_cannot_have_its_refusal_look_like_success_where_there_is_no_grpc() {
    let mut over_http_1 = grpc("application/grpc");
    *over_http_1.version_mut() = Version::HTTP_11;
    let mut with_get = grpc("application/grpc");
    *with_get.method_mut() = Method::GET;
    for request in [over_http_1, with_get] {
        assert_eq!(refusing(|layer| layer).ask(request).status(), 429);
    }
}

#[test]
fn a_refused_head_request_has_the_length_of_the_text_and_no_text() {
    let service = RateLimitLayer::new(gate_fn(|_, _| false), "login").layer(Counting::default());
    let mut request = get("/login");
    *request.method_mut() = Method::HEAD;
    let response = single_threaded()
        .block_on(service.oneshot(request))
        .unwrap();
    let length = "Too many requests: try again later.\n".len().to_string();
    assert_eq!(field(&response, "content-length"), Some(&*length));
    assert!(response.body().is_end_stream());
}

#[test]
fn a_full_queue_is_no_way_in_where_the_limit_fails_open() {
    let full = |_: &ratevault::Key, _| -> Result<bool, Error> {
        let (path, limit) = ("limits.redb".into(), 16_384);
        Err(Error::Overloaded { path, limit })
    };
    let layer = RateLimitLayer::new(gate_fn(full), "login").fail_open();
    let (answer, lines) = logged(|| App::new(layer).get());
    assert_eq!(answer.status(), 503);
    assert_eq!(field(&answer, "retry-after"), Some("1"));
    assert_eq!(lines.len(), 1, "{lines:#?}");
}

#[test]
fn a_response_with_such_fields_of_its_own_is_left_as_it_is() {
    let layer = RateLimitLayer::new(limiter("5/hour"), "outer");
    let upstream = async || {
        (
            [("x-ratelimit-remaining", "0"), ("x-ratelimit-limit", "7")],
            "",
        )
    };
    let router = Router::new().route("/login", any(upstream)).layer(layer);
    let answer = single_threaded()
        .block_on(router.oneshot(get("/login")))
        .unwrap();
    assert_eq!(field(&answer, "x-ratelimit-remaining"), Some("0"));
    assert_eq!(field(&answer, "x-ratelimit-limit"), Some("7"));
    assert_eq!(field(&answer, "x-ratelimit-reset"), None);
}

#[test]
fn the_failure_of_one_endpoint_does_not_hush_that_of_another() {
    let failing = gate_fn(|_, _| -> Result<bool, std::io::Error> { Err(io::Error::other("full")) });
    let request = get("/login").into_parts().0;
    let (_, lines) = logged(|| {
        single_threaded().block_on(async {
            for endpoint in ["hushed-1", "hushed-2", "hushed-1"] {
                let checked = check(&request, &failing, endpoint, account("ada")).await;
                assert_eq!(checked.unwrap_err().status(), 503);
            }
        });
    });
    assert_eq!(lines.len(), 2, "{lines:#?}");
}

// What is said once.

/// The one line that is logged when several requests are asked, in a loop.
fn logged_once(app: &App, request: impl Fn() -> Request<Body>) -> String {
    let (_, mut lines) = logged(|| [(); 5].map(|()| app.ask(request())));
    assert_eq!(lines.len(), 1, "{lines:#?}");
    let line = lines.remove(0);
    assert!(line.starts_with("WARN"), "{line}");
    line
}

/// Runs one of the ignored tests below in a process of its own: what is said once per process may
/// have been said in this one.
fn alone(test: &str) {
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored"])
        .arg(format!("http_layer::{test}"))
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&run.stdout);
    assert!(output.contains("1 passed"), "{output}");
}

#[test]
fn an_ignored_x_forwarded_for_is_warned_of_once() {
    alone("an_ignored_x_forwarded_for");
}

#[test]
fn requests_without_a_peer_are_warned_of_once() {
    alone("requests_without_a_peer");
}

#[test]
fn key_functions_made_for_each_request_warn_once() {
    alone("key_functions_made_for_each_request");
}

#[test]
#[ignore = "a process of other tests"]
fn key_functions_made_for_each_request() {
    let limiter = limiter("100/hour");
    let spoofed = get_with("x-forwarded-for", "198.51.100.1").into_parts().0;
    let (_, lines) = logged(|| {
        single_threaded().block_on(async {
            for _ in 0..5 {
                let checked = check(&spoofed, &limiter, "login", ip_key()).await;
                assert!(checked.is_ok());
            }
        });
    });
    assert_eq!(lines.len(), 1, "{lines:#?}");
}

#[test]
#[ignore = "a process of other tests"]
fn an_ignored_x_forwarded_for() {
    let limiter = limiter("100/hour");
    let app = App::new(login(&limiter));
    let line = logged_once(&app, || get_with("x-forwarded-for", "198.51.100.1"));
    assert!(line.contains("X-Forwarded-For"), "{line}");
    // Who it names is not who is counted.
    assert_eq!(counted(&limiter), ["login/203.0.113.7"]);
}

#[test]
fn an_x_forwarded_for_is_not_warned_of_where_a_proxy_is_trusted() {
    let limiter = limiter("100/hour");
    let trusted = TrustedProxies::new(["203.0.113.7"]).unwrap();
    let app = App::new(login(&limiter).key(ip_key_forwarded(trusted)));
    let (_, lines) = logged(|| app.ask(get_with("x-forwarded-for", "198.51.100.1")));
    assert_eq!(lines, [""; 0]);
    assert_eq!(counted(&limiter), ["login/198.51.100.1"]);
}

#[test]
#[ignore = "a process of other tests"]
fn requests_without_a_peer() {
    let limiter = limiter("100/hour");
    let app = App::new(login(&limiter));
    let line = logged_once(&app, || Request::new(Body::empty()));
    assert!(line.contains("no peer address"), "{line}");
    assert_eq!(counted(&limiter), ["login/unknown"]);
}

#[test]
fn a_request_that_passes_a_layer_twice_is_counted_twice_and_warned_of_once() {
    let limiter = limiter("100/hour");
    let layer = login(&limiter);
    let mut app = App::new(layer.clone());
    app.router = app.router.layer(layer);
    let line = logged_once(&app, || get("/login"));
    assert!(line.contains("twice"), "{line}");
    assert_eq!(left(&limiter), 90);
}

#[test]
fn two_layers_made_from_one_are_two_limits() {
    let limiter = limiter("100/hour");
    let layer = login(&limiter);
    let mut app = App::new(layer.clone().cost(|_| 2));
    app.router = app.router.layer(layer);
    let (_, lines) = logged(|| app.statuses::<5>());
    assert_eq!(lines, [""; 0]);
}

#[test]
fn a_request_that_is_skipped_is_not_warned_of_as_counted_twice() {
    let layer = login(&limiter("100/hour")).skip(|_| true);
    let mut app = App::new(layer.clone());
    app.router = app.router.layer(layer);
    let (_, lines) = logged(|| app.statuses::<5>());
    assert_eq!(lines, [""; 0]);
}

#[test]
fn different_layers_on_one_request_are_not_warned_of() {
    let app = nested("100/hour", "100/hour");
    let (_, lines) = logged(|| app.statuses::<5>());
    assert_eq!(lines, [""; 0]);
}

// Inside a handler.

/// An account, as the handler knows it.
fn account(name: &'static str) -> impl Fn(&Parts) -> Option<ClientKey> + Send + Sync {
    move |_| Some(ClientKey::from(name))
}

#[test]
fn a_handler_can_check_an_account_and_answer_with_the_finished_refusal() {
    let limiter = limiter("2/minute");
    let ours = limiter.clone();
    let handler = async move |request: Parts| -> Result<_, Response<RefusalBody>> {
        let admitted = check(&request, &ours, "login", account("ada")).await?;
        Ok((admitted, "welcome").into_response())
    };
    let app = Router::new().route("/login", on_get(handler));
    for left in [1, 0] {
        let answer = ask(&app, get("/login"));
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.body(), "welcome");
        assert_eq!(numbers(&answer), Some([2, left, START / 1_000 + 60]));
    }
    let answer = ask(&app, get_from(STRANGER, "/login"));
    assert_eq!(answer.status(), 429);
    assert_eq!(numbers(&answer), Some([2, 0, START / 1_000 + 60]));
    assert_eq!(retry_after(&answer), Some(60));
    assert_eq!(field(&answer, "cache-control"), Some("no-store"));
    assert_eq!(
        answer.body(),
        "Too many requests: try again in 60 seconds.\n"
    );
    assert_eq!(counted(&limiter), ["login/ada"]);
}

#[test]
fn a_check_says_what_was_decided() {
    let limiter = limiter("2/minute");
    let (request, _) = get("/login").into_parts();
    let admitted = check(&request, &limiter, "login", account("ada"));
    let admitted = single_threaded().block_on(admitted).unwrap();
    assert_eq!(admitted.decision().unwrap().remaining(), 1);
    assert_eq!(admitted.headers()["x-ratelimit-remaining"], "1");

    let mut response = Response::new("welcome");
    admitted.add_to(&mut response);
    assert_eq!(numbers(&response), Some([2, 1, START / 1_000 + 60]));
}

#[test]
fn a_check_of_nobody_is_a_500_and_of_a_gate_that_fails_a_503() {
    let (request, _) = get("/login").into_parts();
    let gate = gate_fn(|_, _| true);
    let answer = single_threaded().block_on(check(&request, &gate, "login", nobody));
    assert_eq!(answer.unwrap_err().status(), 500);
    let gate = gate_fn(|_, _| Err::<bool, _>("broken"));
    let answer = single_threaded().block_on(check(&request, &gate, "login", ip_key()));
    assert_eq!(answer.unwrap_err().status(), 503);
}

#[test]
fn a_check_that_is_dropped_unpolled_is_not_begun() {
    let limiter = limiter("5/hour");
    let (request, _) = get("/login").into_parts();
    drop(check(&request, &limiter, "login", ip_key()));
    assert_eq!(left(&limiter), 5);
}

/// What a layer says of a request in a handler, for an account.
fn checked<G: ratevault::Gate>(
    layer: &RateLimitLayer<G>,
    request: Request<Body>,
) -> Result<Admitted, Box<Response<RefusalBody>>> {
    let (request, _) = request.into_parts();
    let checked = layer.check(&request, account("ada"));
    single_threaded().block_on(checked).map_err(Box::new)
}

#[test]
fn a_layer_checks_in_a_handler_by_its_own_rules() {
    let limiter = limiter("5/minute");
    let layer = login(&limiter).key(nobody).cost(stated_cost);
    let layer = layer.skip(|request| request.uri.path() == "/health");
    let layer = layer.ietf_headers("login").unwrap().refusal(problem_json);

    let admitted = checked(&layer, get_with("x-cost", "3")).unwrap();
    assert_eq!(admitted.headers()["ratelimit"], r#""login";r=2;t=60"#);
    for free in [get("/health"), get_with("x-cost", "0")] {
        let admitted = checked(&layer, free).unwrap();
        assert_eq!((admitted.decision(), admitted.headers().len()), (None, 0));
    }
    let refusal = checked(&layer, get_with("x-cost", "3")).unwrap_err();
    assert_eq!(refusal.status(), 429);
    let content_type = field(&refusal, "content-type");
    assert_eq!(content_type, Some("application/problem+json"));
    assert_eq!(field(&refusal, "ratelimit"), Some(r#""login";r=0;t=60"#));
    assert_eq!(retry_after(&refusal), Some(60));
    assert_eq!(counted(&limiter), ["login/ada"]);
}

#[test]
fn a_layers_check_may_fail_open_and_waits_no_longer_than_its_timeout() {
    let gate = async_gate_fn(|_, _| pending::<bool>());
    let layer = RateLimitLayer::new(gate, "login").answer_timeout(SHORT);
    assert_eq!(checked(&layer, get("/")).unwrap_err().status(), 503);
    let admitted = checked(&layer.fail_open(), get("/")).unwrap();
    assert_eq!(admitted.decision(), None);
}

#[test]
fn a_refusal_in_a_handler_is_shown_as_such_through_a_layer_around_it() {
    let (by_account, by_address) = (limiter("1/minute"), limiter("2/hour"));
    let handler = async move |request: Parts| -> Result<_, Response<RefusalBody>> {
        let admitted = check(&request, &by_account, "login", account("ada")).await?;
        Ok((admitted, "welcome"))
    };
    let app = Router::new()
        .route("/login", on_get(handler))
        .layer(login(&by_address));
    assert_eq!(numbers(&ask(&app, get("/login"))).unwrap()[..2], [1, 0]);
    let answer = ask(&app, get("/login"));
    assert_eq!(answer.status(), 429);
    assert_eq!(numbers(&answer), Some([1, 0, START / 1_000 + 60]));
}

#[test]
fn of_two_checks_in_one_response_the_tighter_is_shown() {
    let (wide, tight) = (limiter("5/hour"), limiter("2/minute"));
    let (request, _) = get("/login").into_parts();
    let admitted = |limiter| {
        let checked = check(&request, limiter, "login", ip_key());
        single_threaded().block_on(checked).unwrap()
    };
    let responses = [
        (admitted(&wide), (admitted(&tight), "x")).into_response(),
        (admitted(&tight), (admitted(&wide), "x")).into_response(),
        (admitted(&wide), "x").into_response(),
    ];
    let limits = responses.map(|response| numbers(&response).unwrap()[0]);
    assert_eq!(limits, [2, 2, 5]);
}

// Gates from closures.

/// Decided by a closure at `START`; the next place comes free 1.5 s later.
fn decision(limit: u32, remaining: u32) -> Decision {
    let now = Timestamp::from_millis(START);
    Decision::allowed(limit, remaining, now, now.saturating_add(1_500 * MS))
}

#[test]
fn a_closure_that_says_yes_or_no_has_no_numbers() {
    let app = App::new(RateLimitLayer::new(gate_fn(|_, _| true), "login"));
    let answer = app.get();
    assert_eq!((answer.status().as_u16(), numbers(&answer)), (200, None));

    let app = App::new(RateLimitLayer::new(gate_fn(|_, _| false), "login"));
    let answer = app.get();
    assert_eq!((answer.status().as_u16(), numbers(&answer)), (429, None));
    assert_eq!(retry_after(&answer), None);
    assert_eq!(field(&answer, "cache-control"), Some("no-store"));
    assert_eq!(app.served(), 0);
}

#[test]
fn a_closures_wait_is_whole_seconds_rounded_up() {
    for (wait, seconds) in [(Duration::ZERO, 1), (MS, 1), (1_001 * MS, 2), (MINUTE, 60)] {
        let gate = gate_fn(|_, _| false).retry_after(wait);
        let answer = App::new(RateLimitLayer::new(gate, "login")).get();
        assert_eq!(retry_after(&answer), Some(seconds));
        let gate = async_gate_fn(|_, _| ready(false)).retry_after(wait);
        let answer = App::new(RateLimitLayer::new(gate, "login")).get();
        assert_eq!(retry_after(&answer), Some(seconds));
    }
}

#[test]
fn a_closure_that_decides_has_numbers() {
    let app = App::new(RateLimitLayer::new(gate_fn(|_, _| decision(5, 3)), "login"));
    let answer = app.get();
    assert_eq!(answer.status(), 200);
    assert_eq!(numbers(&answer), Some([5, 3, START / 1_000 + 2]));

    let gate = gate_fn(|_, _| {
        let decision = decision(5, 0);
        decision.refused_until(Timestamp::from_millis(START + 8_001))
    });
    // The decision says how long, and so the gate's own wait does not count.
    let gate = gate.retry_after(MINUTE);
    let answer = App::new(RateLimitLayer::new(gate, "login")).get();
    assert_eq!(answer.status(), 429);
    assert_eq!(numbers(&answer), Some([5, 0, START / 1_000 + 2]));
    assert_eq!(retry_after(&answer), Some(9));
}

#[test]
fn a_closure_that_fails_is_a_503_or_is_open() {
    let gate = gate_fn(|_, _| Err::<bool, _>(io::Error::other("broken")));
    let layer = RateLimitLayer::new(gate, "login");
    let app = App::new(layer.clone());
    let (status, lines) = logged(|| app.status());
    assert_eq!((status, app.served()), (503, 0));
    assert!(lines[0].contains("broken"), "{lines:?}");
    assert_eq!(App::new(layer.fail_open()).status(), 200);
}

#[test]
fn a_closure_is_asked_once_about_whom_and_for_how_much() {
    let (asked, question) = std::sync::mpsc::channel();
    let gate = gate_fn(move |key, cost| asked.send((key.to_string(), cost)).is_ok());
    let layer = RateLimitLayer::new(gate, "login").cost(|_| 7);
    assert_eq!(App::new(layer).status(), 200);
    let asked: Vec<_> = question.iter().collect();
    assert_eq!(asked, [("login/203.0.113.7".to_owned(), 7)]);
}

// CORS.

fn behind_cors(limiter: &Limiter<SlidingWindow>) -> Router {
    let exposed = ["retry-after", "x-ratelimit-remaining"].map(HeaderName::from_static);
    let cors = CorsLayer::new().allow_origin(Any).expose_headers(exposed);
    Router::new()
        .route("/login", post(async || "welcome"))
        .layer(login(limiter))
        .layer(cors)
}

fn from_another_origin(method: Method) -> Request<Body> {
    let mut request = get_with("origin", "https://page.example");
    *request.method_mut() = method;
    let wanted = HeaderValue::from_static("POST");
    let headers = request.headers_mut();
    headers.insert("access-control-request-method", wanted);
    request
}

#[test]
fn inside_of_cors_a_refusal_can_be_read_by_a_page_of_another_origin() {
    let app = behind_cors(&limiter("1/minute"));
    for (status, left) in [(200, 0), (429, 0)] {
        let answer = ask(&app, from_another_origin(Method::POST));
        assert_eq!(
            (answer.status().as_u16(), remaining(&answer)),
            (status, left)
        );
        assert_eq!(field(&answer, "access-control-allow-origin"), Some("*"));
        let exposed = field(&answer, "access-control-expose-headers");
        assert_eq!(exposed, Some("retry-after,x-ratelimit-remaining"));
    }
}

#[test]
fn inside_of_cors_preflights_are_not_counted() {
    let limiter = limiter("1/minute");
    let app = behind_cors(&limiter);
    for _ in 0..3 {
        let answer = ask(&app, from_another_origin(Method::OPTIONS));
        assert_eq!((answer.status().as_u16(), numbers(&answer)), (200, None));
    }
    assert_eq!(left(&limiter), 1);
}

// Bodies.

/// A body of frames, which knows what it said of its size.
#[derive(Debug, Default)]
struct Frames {
    frames: VecDeque<Frame<Bytes>>,
    hint: SizeHint,
}

impl Frames {
    fn new() -> Self {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-checksum", HeaderValue::from_static("7"));
        let mut hint = SizeHint::new();
        hint.set_lower(3);
        hint.set_upper(11);
        let data = ["one", "", "two"].map(|data| Frame::data(Bytes::from(data)));
        let mut frames = VecDeque::from(data);
        frames.push_back(Frame::trailers(trailers));
        Self { frames, hint }
    }
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Own;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Own>>> {
        Poll::Ready(self.frames.pop_front().map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.hint
    }
}

/// Hands a request's body back as the response's.
fn echo()
-> impl Service<Request<Frames>, Response = Response<Frames>, Error = Infallible, Future: Unpin> + Clone
{
    service_fn(|request: Request<Frames>| ready(Ok(Response::new(request.into_body()))))
}

/// What a body's frame is: data, or a trailer.
fn shown(frame: Frame<Bytes>) -> String {
    match frame.into_data() {
        Ok(data) => format!("{data:?}"),
        Err(frame) => format!("{:?}", frame.into_trailers().unwrap()["x-checksum"]),
    }
}

#[test]
fn the_bodies_of_an_admitted_request_and_its_response_pass_through_unchanged() {
    let service = login(&limiter("5/hour")).layer(echo());
    let (parts, _) = get("/login").into_parts();
    let request = Request::from_parts(parts, Frames::new());
    single_threaded().block_on(async {
        let response = service.oneshot(request).await.unwrap();
        let mut body = response.into_body();
        let hint = body.size_hint();
        assert_eq!((hint.lower(), hint.upper()), (3, Some(11)));
        assert!(!body.is_end_stream());
        let mut frames = Vec::new();
        while let Some(frame) = body.frame().await {
            frames.push(shown(frame.unwrap()));
        }
        assert_eq!(frames, [r#"b"one""#, r#"b"""#, r#"b"two""#, r#""7""#]);
        assert!(body.is_end_stream());
    });
}

#[test]
fn a_body_that_is_at_its_end_says_so_through_the_layer() {
    let service = login(&limiter("5/hour")).layer(echo());
    let (parts, _) = get("/login").into_parts();
    let request = Request::from_parts(parts, Frames::default());
    let response = single_threaded().block_on(service.oneshot(request));
    assert!(response.unwrap().into_body().is_end_stream());
}

#[test]
fn a_refusals_body_is_one_frame_of_known_size() {
    let service = RateLimitLayer::new(gate_fn(|_, _| false), "login").layer(echo());
    let (parts, _) = get("/login").into_parts();
    let request = Request::from_parts(parts, Frames::new());
    let runtime = single_threaded();
    let response = runtime.block_on(service.oneshot(request)).unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let mut body = response.into_body();
    let text = "Too many requests: try again later.\n";
    assert_eq!(body.size_hint().exact(), Some(text.len() as u64));
    let frame = runtime.block_on(body.frame()).unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), text);
    assert!(body.is_end_stream());
    assert!(runtime.block_on(body.frame()).is_none());
}

#[test]
fn the_service_sees_the_request_as_it_came() {
    let seen = service_fn(async |request: Request<Body>| {
        let extension = request.extensions().get::<&str>().copied();
        assert_eq!(extension, Some("mine"));
        let (parts, _) = request.into_parts();
        let text = format!("{} {} {:?}", parts.method, parts.uri, parts.version);
        let mut response = Response::new(Body::from(text));
        response.extensions_mut().insert(parts.headers.clone());
        Ok::<_, Infallible>(response)
    });
    let mut request = get_with("x-own", "1");
    *request.method_mut() = Method::PUT;
    *request.version_mut() = Version::HTTP_2;
    request.extensions_mut().insert("mine");
    let response = ask(&login(&limiter("5/hour")).layer(seen), request);
    assert_eq!(response.body(), "PUT /login HTTP/2.0");
    let headers = response.extensions().get::<HeaderMap>().unwrap();
    assert_eq!(
        (headers.len(), &headers["x-own"]),
        (1, &HeaderValue::from_static("1"))
    );
    // The response's own parts are there beside the fields.
    assert_eq!(remaining(&response), 4);
}
