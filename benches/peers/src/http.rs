//! Requests to one axum route: bare, behind this crate's layer, and behind tower_governor's.
//!
//! Both layers count by the peer's address, show `x-ratelimit-*`, and have a quota that admits every
//! request. What differs is what they promise: ours answers a committed check when it is on disk.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, Response, StatusCode, header};
use axum::routing::{MethodRouter, post};
use http_body_util::BodyExt;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use ratevault::http::RateLimitLayer;
use ratevault::{HitLog, Limiter, Quota, SlidingWindow, Vault, VaultBuilder};
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Runtime;
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_service::Service;

use crate::folder;
use crate::report::{Load, Report};
use crate::turns::{Effort, Peer, measure};

const FORM: &str = "user=ada&password=correct+horse+battery+staple";
const PATH: &str = "/login";

/// Per second and client. More than any client gets through here, so that nobody is refused; in so
/// short a window few hits are remembered, as of clients that keep to a limit.
const LIMIT: u32 = 10_000;

pub(crate) fn run(effort: Effort, report: &mut Report) -> io::Result<()> {
    for threads in [1, 64] {
        calls(threads, effort, report)?;
    }
    loopback(effort, report)
}

/// Without sockets: the router is called.
fn calls(threads: usize, effort: Effort, report: &mut Report) -> io::Result<()> {
    const KEYS: u32 = 1_000;
    let (folder, runtime) = (folder(), runtime());
    let peer = |(name, router): (_, Router)| {
        let caller = |number: u64| Call {
            router: router.clone(),
            // Far apart: no two callers ask for the same clients in the same order.
            drawn: number << 32,
            keys: KEYS,
        };
        let mut callers: Vec<_> = (0..).map(caller).take(threads).collect();
        let runtime = &runtime;
        Peer::new(name, move |requests| turn(runtime, &mut callers, requests))
    };
    let peers = routers(folder.path()).into_iter().map(peer).collect();
    let load = Load {
        bench: "http call",
        keys: KEYS,
        threads,
    };
    report.add_standings(load, measure(peers, effort))
}

/// Over sockets: keep-alive connections to a server, whose clients run in the same process and on
/// the same threads.
fn loopback(effort: Effort, report: &mut Report) -> io::Result<()> {
    const CONNECTIONS: u8 = 64;
    let (folder, runtime) = (folder(), runtime());
    let peer = |(name, router)| {
        let server = runtime.block_on(serve(router));
        let connect = |last| runtime.block_on(connect(server, Ipv4Addr::new(127, 0, 0, last)));
        let mut callers: Vec<_> = (1..=CONNECTIONS).map(connect).collect();
        let runtime = &runtime;
        Peer::new(name, move |requests| turn(runtime, &mut callers, requests))
    };
    let peers = routers(folder.path()).into_iter().map(peer).collect();
    let load = Load {
        bench: "http loopback",
        keys: CONNECTIONS.into(),
        threads: CONNECTIONS.into(),
    };
    report.add_standings(load, measure(peers, effort))
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_io()
        .build()
        .expect("a runtime")
}

/// The same route for each peer; the bare one first.
fn routers(folder: &Path) -> Vec<(&'static str, Router)> {
    let file = |vault: VaultBuilder<_>| vault.path(folder.join("http.redb"));
    let routes = [
        ("axum alone", login()),
        ("ours committed", login().layer(ours(file))),
        (
            "ours in memory",
            login().layer(ours(VaultBuilder::in_memory)),
        ),
        ("tower_governor", governed(login())),
    ];
    let router = |(name, route)| (name, Router::new().route(PATH, route));
    routes.into_iter().map(router).collect()
}

fn login() -> MethodRouter {
    post(async |form: String| format!("welcome back; {} bytes understood\n", form.len()))
}

/// The layer with default settings, on a vault with default settings.
fn ours(
    place: impl FnOnce(VaultBuilder<HitLog>) -> VaultBuilder<HitLog>,
) -> RateLimitLayer<Limiter<SlidingWindow>> {
    let vault = place(Vault::builder("limits")).open().expect("a vault");
    let window = Quota::new(LIMIT, Duration::from_secs(1)).and_then(SlidingWindow::new);
    RateLimitLayer::new(Limiter::new(vault, window.expect("a limit")), "login")
}

/// By the peer's address, as is its default.
fn governed(route: MethodRouter) -> MethodRouter {
    let config = GovernorConfigBuilder::default()
        .period(Duration::from_secs(1) / LIMIT)
        .burst_size(LIMIT)
        .use_headers()
        .finish();
    route.layer(GovernorLayer::new(config.expect("a limit")))
}

/// Somebody who sends one request after the other.
trait Caller: Send + 'static {
    /// Sends a request, and reads the response to its end.
    fn request(&mut self) -> impl Future<Output = ()> + Send;
}

/// The wall time of so many requests, which the callers share.
fn turn<C: Caller>(runtime: &Runtime, callers: &mut Vec<C>, requests: u64) -> Duration {
    let count = u64::try_from(callers.len()).expect("few callers");
    let share = move |number| requests / count + u64::from(number < requests % count);
    let started = Instant::now();
    let caller = |(number, mut caller): (u64, C)| {
        runtime.spawn(async move {
            for _ in 0..share(number) {
                caller.request().await;
            }
            caller
        })
    };
    let tasks: Vec<_> = (0..).zip(callers.drain(..)).map(caller).collect();
    for task in tasks {
        callers.push(runtime.block_on(task).expect("a caller that is served"));
    }
    started.elapsed()
}

/// Calls the router, for clients at random.
struct Call {
    router: Router,
    drawn: u64,
    keys: u32,
}

impl Caller for Call {
    async fn request(&mut self) {
        self.drawn += 1;
        let client = client(mix(self.drawn), self.keys);
        let mut request = request();
        let peer = SocketAddr::from((client, 50_312));
        request.extensions_mut().insert(ConnectInfo(peer));
        let Ok(response) = self.router.call(request).await;
        check(response).await;
    }
}

/// A connection of one client.
struct Connection(SendRequest<Body>);

impl Caller for Connection {
    async fn request(&mut self) {
        self.0.ready().await.expect("an open connection");
        let response = self.0.send_request(request()).await;
        check(response.expect("a response")).await;
    }
}

/// What a browser sends, but for the length of it.
fn request() -> Request<Body> {
    Request::post(PATH)
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
        .body(FORM.into())
        .expect("a request")
}

/// Reads the response. A refusal would be cheaper than what is to be measured.
async fn check<B: BodyExt<Error: std::fmt::Debug>>(response: Response<B>) {
    assert_eq!(response.status(), StatusCode::OK);
    response.into_body().collect().await.expect("a body");
}

/// Serves the router for as long as the runtime lives.
async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
    let listener = listener.expect("a free port");
    let address = listener.local_addr().expect("an address");
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async { axum::serve(listener, service).await });
    address
}

/// Connects from an address of 127.0.0.0/8, all of which are Linux's own.
async fn connect(server: SocketAddr, client: Ipv4Addr) -> Connection {
    let socket = TcpSocket::new_v4().expect("a socket");
    let bound = socket.bind((client, 0).into());
    bound.expect("an address of this machine");
    let stream = socket.connect(server).await.expect("a connection");
    let (sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .expect("HTTP/1");
    tokio::spawn(connection);
    Connection(sender)
}

/// Clients with successive numbers are far apart in the table, as they are when people come.
fn client(draw: u64, keys: u32) -> IpAddr {
    let number = u32::try_from(draw % u64::from(keys)).expect("below the number of clients");
    // Odd, so that no two share an address.
    Ipv4Addr::from_bits(number.wrapping_mul(0x9e37_79b1)).into()
}

/// The output function of SplitMix64.
fn mix(state: u64) -> u64 {
    let state = state.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_limits_shows_it_by_client_and_the_bare_route_does_not() {
        let folder = folder();
        for (name, mut router) in routers(folder.path()) {
            let mut remaining = |client: [u8; 4]| {
                let mut request = request();
                let peer = SocketAddr::from((client, 1));
                request.extensions_mut().insert(ConnectInfo(peer));
                let Ok(response) = runtime().block_on(router.call(request));
                assert_eq!(response.status(), StatusCode::OK, "{name}");
                let field = response.headers().get("x-ratelimit-remaining")?;
                field.to_str().ok()?.parse::<u32>().ok()
            };
            let is_bare = name == "axum alone";
            let expected = (!is_bare).then_some(LIMIT - 1);
            assert_eq!(remaining([192, 0, 2, 1]), expected, "{name}");
            assert_eq!(remaining([192, 0, 2, 2]), expected, "{name}");
        }
    }
}
