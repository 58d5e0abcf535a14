//! The layer in real servers (hyper, tonic, axum on a unix socket), asked by real clients.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use http::{Extensions, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use ratevault::http::{IpKey, Peer, RateLimitLayer, TrustedProxies, ip_key, ip_key_forwarded};
use ratevault::{Limiter, Vault};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tonic::Code;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Channel, Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};
use tower::util::MapRequest;
use tower::{Layer, service_fn};

use crate::support::faulty::Faulty;
use crate::support::web::{
    Answer, Connection, LOCALHOST, Limited, NEIGHBOUR, field, in_time, limiter, listener,
    per_minute, request,
};
use crate::support::{START, eventually, manual_clock};

const MEGABYTE: usize = 1 << 20;

/// Serves HTTP/1 as users of hyper do it, with the peer in each request.
async fn serve_hyper(limiter: &Limited) -> SocketAddr {
    let limit = RateLimitLayer::new(limiter.clone(), "login");
    let listener = listener(LOCALHOST).await;
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, peer) = listener.accept().await.unwrap();
            let service = limit.layer(service_fn(measure));
            let service = MapRequest::new(service, move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(Peer::from(peer));
                request
            });
            let service = TowerToHyperService::new(service);
            let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            // A client may go when it likes.
            tokio::spawn(async { drop(connection.await) });
        }
    });
    address
}

/// Answers with the length of what was sent.
async fn measure(request: Request<Incoming>) -> hyper::Result<Response<Full<Bytes>>> {
    let body = request.into_body().collect().await?.to_bytes();
    Ok(Response::new(body.len().to_string().into()))
}

/// The limit, what is left of it, and when the next place comes free.
fn numbers(answer: &Answer) -> [&str; 3] {
    ["limit", "remaining", "reset"]
        .map(|name| field(answer.headers(), &format!("x-ratelimit-{name}")))
}

#[tokio::test]
async fn hyper_serves_what_the_limit_admits_and_tells_the_sixth_to_wait() {
    let server = serve_hyper(&limiter(5, &manual_clock())).await;
    let mut client: Connection = Connection::to(server).await;
    let reset = (START / 1_000 + 60).to_string();
    for left in ["4", "3", "2", "1", "0"] {
        let served = client.get().await;
        assert_eq!(
            (served.status(), &served.body()[..]),
            (StatusCode::OK, &b"0"[..])
        );
        assert_eq!(numbers(&served), ["5", left, &reset]);
        assert!(!served.headers().contains_key("retry-after"));
    }
    let refused = client.get().await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(numbers(&refused), ["5", "0", &reset]);
    assert_eq!(field(refused.headers(), "retry-after"), "60");
    assert_eq!(field(refused.headers(), "cache-control"), "no-store");
    assert_eq!(
        refused.body(),
        "Too many requests: try again in 60 seconds.\n"
    );

    let mut neighbour: Connection = Connection::from(NEIGHBOUR, server).await;
    assert_eq!(numbers(&neighbour.get().await), ["5", "4", &reset]);
}

#[tokio::test]
async fn a_connection_outlives_a_refusal() {
    let clock = manual_clock();
    let server = serve_hyper(&limiter(1, &clock)).await;
    // A connection of this kind is not opened again.
    let mut client: Connection = Connection::to(server).await;
    for _ in 0..3 {
        assert_eq!(client.get().await.status(), StatusCode::OK);
        let refused = client.get().await;
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        let wait = field(refused.headers(), "retry-after").parse().unwrap();
        clock.advance(Duration::from_secs(wait));
    }
}

#[tokio::test]
async fn a_refused_head_has_the_header_of_a_refused_get_and_no_body() {
    let server = serve_hyper(&limiter(1, &manual_clock())).await;
    let mut client: Connection = Connection::to(server).await;
    client.get().await;
    let get = client.get().await;
    let head = client.send(request(Method::HEAD, &[])).await;
    assert_eq!(head.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(head.body().is_empty() && !get.body().is_empty());
    assert_eq!(
        field(head.headers(), "content-length"),
        get.body().len().to_string()
    );
    for name in [
        "content-type",
        "content-length",
        "retry-after",
        "cache-control",
    ] {
        assert!(get.headers().contains_key(name), "{name}");
        assert_eq!(head.headers().get(name), get.headers().get(name), "{name}");
    }
    assert_eq!(numbers(&head), numbers(&get));
    // The client knows where the answer ended: the next one is read as itself.
    assert_eq!(client.get().await.body(), get.body());
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order_and_the_late_ones_refused() {
    let server = serve_hyper(&limiter(5, &manual_clock())).await;
    let mut stream = TcpStream::connect(server).await.unwrap();
    let asked = "GET / HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(7);
    let last = "GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all((asked + last).as_bytes()).await.unwrap();
    let mut answers = String::new();
    in_time(stream.read_to_string(&mut answers)).await.unwrap();
    let statuses = answers
        .lines()
        .flat_map(|line| line.split("HTTP/1.1 ").nth(1));
    let statuses: Vec<_> = statuses.map(|status| &status[..3]).collect();
    assert_eq!(
        statuses,
        ["200", "200", "200", "200", "200", "429", "429", "429"]
    );
}

/// A body of a megabyte of which nothing is ever sent.
struct Unsent;

impl Body for Unsent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(MEGABYTE as u64)
    }
}

fn post<B>(body: B) -> Request<B> {
    request(Method::POST, &[]).map(|_| body)
}

#[tokio::test]
async fn a_post_is_refused_before_any_of_its_body_is_sent() {
    let server = serve_hyper(&limiter(1, &manual_clock())).await;
    let mut other: Connection = Connection::to(server).await;
    other.get().await;
    let refused = Connection::to(server).await.send(post(Unsent)).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(field(refused.headers(), "retry-after"), "60");
    assert!(!refused.body().is_empty());
}

#[tokio::test]
async fn a_client_that_sends_its_whole_body_hears_that_it_is_refused() {
    let server = serve_hyper(&limiter(1, &manual_clock())).await;
    let body = Full::new(Bytes::from(vec![b'a'; MEGABYTE]));
    let served = Connection::to(server).await.send(post(body.clone())).await;
    assert_eq!(served.body(), &MEGABYTE.to_string());
    // Client and server share a thread, so the client reads before it writes into a connection that
    // is closed. With two threads one of many megabytes may meet a broken pipe: hyper does not read
    // what a service leaves unread.
    let refused = Connection::to(server).await.send(post(body)).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(!refused.body().is_empty());
}

/// Where tonic says who called.
fn tonics_peer(extensions: &Extensions) -> Option<IpAddr> {
    let connection = extensions.get::<TcpConnectInfo>()?;
    connection.remote_addr().map(|socket| socket.ip())
}

/// Serves tonic's own health service, limited.
async fn serve_tonic(limiter: Limited) -> SocketAddr {
    let listener: TcpListener = listener(LOCALHOST).await;
    let address = listener.local_addr().unwrap();
    let limit = RateLimitLayer::new(limiter, "health").key(ip_key().peer(tonics_peer));
    let health = HealthService::from_health_reporter(HealthReporter::new());
    let server = Server::builder().layer(limit);
    let serving =
        server.serve_with_incoming(HealthServer::new(health), TcpIncoming::from(listener));
    tokio::spawn(async { serving.await.unwrap() });
    address
}

async fn tonic_client(client: IpAddr, server: SocketAddr) -> HealthClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{server}")).unwrap();
    let endpoint = endpoint.local_address(Some(client));
    HealthClient::new(in_time(endpoint.connect()).await.unwrap())
}

/// Asks whether the server is well: `Ok` with what is left of the limit.
async fn ask(client: &mut HealthClient<Channel>) -> Result<String, tonic::Status> {
    let answer = in_time(client.check(HealthCheckRequest::default())).await?;
    let left = answer.metadata().get("x-ratelimit-remaining").unwrap();
    Ok(left.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn tonic_serves_what_the_limit_admits_and_exhausts_the_sixth() {
    let clock = manual_clock();
    let server = serve_tonic(limiter(5, &clock)).await;
    let mut client = tonic_client(LOCALHOST, server).await;
    for left in ["4", "3", "2", "1", "0"] {
        assert_eq!(ask(&mut client).await.unwrap(), left);
    }
    let refused = ask(&mut client).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(
        refused.message(),
        "Too many requests: try again in 60 seconds."
    );
    let told = refused.metadata();
    assert_eq!(told.get("retry-after").unwrap(), "60");
    assert_eq!(told.get("x-ratelimit-remaining").unwrap(), "0");

    let mut neighbour = tonic_client(NEIGHBOUR, server).await;
    assert_eq!(ask(&mut neighbour).await.unwrap(), "4");
    // The same connection goes on.
    clock.advance(Duration::from_secs(60));
    assert_eq!(ask(&mut client).await.unwrap(), "4");
}

#[tokio::test]
async fn tonic_is_unavailable_while_the_vault_fails() {
    let storage = Arc::new(Faulty::default());
    let vault = Vault::builder("rate_limits").storage(Arc::clone(&storage));
    let limiter = Limiter::new(vault.open().unwrap(), per_minute(5));
    let server = serve_tonic(limiter.clone()).await;
    let mut client = tonic_client(LOCALHOST, server).await;
    assert_eq!(ask(&mut client).await.unwrap(), "4");
    storage.fail(true);
    for _ in 0..3 {
        let refused = ask(&mut client).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        assert_eq!(
            refused.message(),
            "The service is unavailable: try again later."
        );
        assert!(refused.metadata().get("retry-after").is_none());
    }
    storage.fail(false);
    eventually("the vault is well", || limiter.check("else", "ada").is_ok());
    assert_eq!(ask(&mut client).await.unwrap(), "3");
}

/// The first frames of a client: its greeting, its settings, and a request for gRPC without a body.
fn grpc_request() -> Vec<u8> {
    let settings = frame(4, 0, 0, &[]);
    // POST, http, "/", and a content type that is written out (RFC 7541, 6.1 and 6.2.2).
    let fields = [&[0x83, 0x86, 0x84, 0x0f, 0x10, 16][..], b"application/grpc"].concat();
    let headers = frame(1, END_OF_STREAM | END_OF_HEADERS, 1, &fields);
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings[..], &headers].concat()
}

const END_OF_STREAM: u8 = 1;
const END_OF_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = payload.len() as u32;
    let mut frame = length.to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Kind and flags of the next frame that belongs to a stream.
async fn next_of_a_stream(connection: &mut TcpStream) -> (u8, u8) {
    loop {
        let mut head = [0; 9];
        connection.read_exact(&mut head).await.unwrap();
        let [_, a, b, kind, flags, stream @ ..] = head;
        let mut payload = vec![0; u16::from_be_bytes([a, b]).into()];
        connection.read_exact(&mut payload).await.unwrap();
        if stream != [0; 4] {
            return (kind, flags);
        }
    }
}

#[tokio::test]
async fn a_grpc_refusal_is_one_frame_that_ends_its_stream() {
    let limiter = limiter(1, &manual_clock());
    assert!(limiter.check("health", LOCALHOST).unwrap().is_allowed());
    let server = serve_tonic(limiter).await;
    let mut connection = TcpStream::connect(server).await.unwrap();
    connection.write_all(&grpc_request()).await.unwrap();
    // Not headers first and an empty piece of a body behind them.
    let (kind, flags) = in_time(next_of_a_stream(&mut connection)).await;
    assert_eq!((kind, flags), (1, END_OF_STREAM | END_OF_HEADERS));
}

/// Serves on a unix socket; every page is limited by `key`.
fn serve_unix(path: &Path, limiter: &Limited, key: IpKey) {
    let limit = RateLimitLayer::new(limiter.clone(), "login").key(key);
    let app = Router::new().route("/", get(async || "served").layer(limit));
    let listener = UnixListener::bind(path).unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
}

async fn unix_client(path: &Path) -> Connection {
    Connection::over(UnixStream::connect(path).await.unwrap()).await
}

#[tokio::test]
async fn clients_of_a_unix_socket_share_one_bucket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let limiter = limiter(5, &manual_clock());
    serve_unix(&path, &limiter, ip_key());
    let (mut one, mut other) = (unix_client(&path).await, unix_client(&path).await);
    assert_eq!(one.served_of(3).await, 3);
    assert_eq!(other.served_of(3).await, 2);
    let forged = one.get_forwarded("203.0.113.7").await;
    assert_eq!(forged.status(), StatusCode::TOO_MANY_REQUESTS);
    let shared = limiter.peek("login", "unknown").unwrap();
    assert_eq!(shared.remaining(), 0);
}

#[tokio::test]
async fn a_proxy_that_is_declared_separates_the_clients_of_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let proxy = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 7));
    let trusted = TrustedProxies::new([proxy.to_string()]).unwrap();
    let key = ip_key_forwarded(trusted).peer(move |_| Some(proxy));
    serve_unix(&path, &limiter(5, &manual_clock()), key);

    // The proxy keeps one connection, for whomever it asks.
    let mut proxied = unix_client(&path).await;
    let mut served = BTreeMap::<_, u32>::new();
    for number in 0..7 {
        for client in ["203.0.113.7", "203.0.113.8", "2001:db8::1"] {
            // What the client wrote itself comes first.
            let written = format!("198.51.100.{number}, {client}");
            let answer = proxied.get_forwarded(&written).await;
            *served.entry(client).or_default() += u32::from(answer.status().is_success());
        }
    }
    assert_eq!(served.into_values().collect::<Vec<_>>(), [5, 5, 5]);
}
