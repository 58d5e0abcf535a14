//! Requests to a limited service, their answers, and what is logged meanwhile.

use std::fmt::{Debug, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use ratevault::http::{Peer, RateLimitLayer};
use ratevault::{Algorithm, Gate, HitLog, Limiter, ManualClock, SlidingWindow, Vault};
use tokio::net::TcpListener;
use tower::{Service, ServiceExt};
use tracing::field::{Field, Visit};
use tracing::{Dispatch, Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use super::faulty::Faulty;
use super::{manual_clock, single_threaded};

/// Whose requests they are, unless a test says otherwise.
pub const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7));

/// The answer to a request, with all of its body.
pub type Answer = Response<Bytes>;

pub fn get(path: &str) -> Request<Body> {
    get_from(PEER, path)
}

pub fn get_from(peer: IpAddr, path: &str) -> Request<Body> {
    let mut request = Request::get(path).body(Body::empty()).unwrap();
    request.extensions_mut().insert(Peer(peer));
    request
}

/// A request with a header field.
pub fn get_with(name: &str, value: &str) -> Request<Body> {
    let mut request = get("/login");
    let name = name.parse::<http::HeaderName>().unwrap();
    request.headers_mut().insert(name, value.parse().unwrap());
    request
}

/// The window that is written like this.
pub fn window(text: &str) -> SlidingWindow {
    text.parse().unwrap()
}

/// A limiter in memory, and the clock it goes by.
pub fn limiter_and_clock<A: Algorithm>(algorithm: A) -> (Limiter<A>, Arc<ManualClock>) {
    let clock = manual_clock();
    let vault = Vault::builder("rate_limits").in_memory();
    let vault = vault.clock(Arc::clone(&clock) as _).open().unwrap();
    (Limiter::new(vault, algorithm), clock)
}

/// A limiter in memory whose time stands still.
pub fn limiter(text: &str) -> Limiter<SlidingWindow> {
    limiter_and_clock(window(text)).0
}

/// Five an hour, on a storage that misbehaves on demand.
pub fn limiter_on(storage: &Arc<Faulty>) -> Limiter<SlidingWindow> {
    let vault = Vault::<HitLog>::builder("rate_limits").clock(manual_clock());
    let vault = vault.storage(Arc::clone(storage)).open().unwrap();
    Limiter::new(vault, window("5/hour"))
}

/// Who has been counted, as `endpoint/client`.
pub fn counted(limiter: &Limiter<SlidingWindow>) -> Vec<String> {
    let entries = limiter.vault().scan();
    entries
        .map(|entry| entry.unwrap().key.to_string())
        .collect()
}

/// The answer of a copy of `service`, on a runtime that a blocking call would stop.
pub fn ask<S, B>(service: &S, request: Request<Body>) -> Answer
where
    S: Service<Request<Body>, Response = Response<B>> + Clone,
    S::Error: Debug,
    B: http_body::Body,
    B::Error: Debug,
{
    single_threaded().block_on(answer(service.clone(), request))
}

pub async fn answer<S, B>(mut service: S, request: Request<Body>) -> Answer
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Error: Debug,
    B: http_body::Body,
    B::Error: Debug,
{
    let service = service.ready().await.unwrap();
    let (parts, body) = service.call(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap();
    Response::from_parts(parts, body.to_bytes())
}

/// A router of which every page is limited, and how many requests have reached one.
#[derive(Clone)]
pub struct App {
    pub router: Router,
    served: Arc<AtomicUsize>,
}

impl App {
    pub fn new<G: Gate>(layer: RateLimitLayer<G>) -> Self {
        let served = Arc::<AtomicUsize>::default();
        let reached = Arc::clone(&served);
        let router = Router::new().fallback(async move || {
            reached.fetch_add(1, Ordering::SeqCst);
            "welcome"
        });
        Self {
            router: router.layer(layer),
            served,
        }
    }

    pub fn served(&self) -> usize {
        self.served.load(Ordering::SeqCst)
    }

    pub fn ask(&self, request: Request<Body>) -> Answer {
        ask(&self.router, request)
    }

    pub fn get(&self) -> Answer {
        self.ask(get("/login"))
    }

    pub fn status(&self) -> u16 {
        self.get().status().as_u16()
    }

    pub fn statuses<const N: usize>(&self) -> [u16; N] {
        std::array::from_fn(|_| self.status())
    }
}

/// Serves on a port of the loopback, for as long as the runtime lives.
pub async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(axum::serve(listener, service).into_future());
    address
}

/// The text of a header field, which must not be there twice.
#[track_caller]
pub fn field<'a, B>(answer: &'a Response<B>, name: &str) -> Option<&'a str> {
    let mut values = answer.headers().get_all(name).iter();
    let value = values.next().map(|value| value.to_str().unwrap());
    assert_eq!(values.next(), None, "{name} is there twice");
    value
}

/// Limit, remaining and reset of a response that has all three; `None` if it has none of them.
#[track_caller]
pub fn numbers<B>(answer: &Response<B>) -> Option<[u64; 3]> {
    let names = ["limit", "remaining", "reset"];
    let found = names.map(|name| field(answer, &format!("x-ratelimit-{name}")));
    match found {
        [None, None, None] => None,
        found => Some(found.map(|value| value.unwrap().parse().unwrap())),
    }
}

/// The places left, of a response that says so.
#[track_caller]
pub fn remaining<B>(answer: &Response<B>) -> u64 {
    numbers(answer).unwrap()[1]
}

#[track_caller]
pub fn retry_after<B>(answer: &Response<B>) -> Option<u64> {
    field(answer, "retry-after").map(|wait| wait.parse().unwrap())
}

/// What `run` has limits log in this thread, a line for each event.
pub fn logged<T>(run: impl FnOnce() -> T) -> (T, Vec<String>) {
    keep_listening();
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    let done = tracing::subscriber::with_default(subscriber, run);
    let lines = std::mem::take(&mut *lines.0.lock().unwrap());
    (done, lines)
}

/// While there is but one subscriber, tracing asks the thread that first comes by an event whether
/// it has one, and remembers the answer for all. Other tests run in other threads.
fn keep_listening() {
    static LISTENERS: OnceLock<[Dispatch; 2]> = OnceLock::new();
    LISTENERS.get_or_init(|| [(); 2].map(|()| Dispatch::new(tracing_subscriber::registry())));
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        if event.metadata().target().starts_with("ratevault::http") {
            let mut line = Line(event.metadata().level().to_string());
            event.record(&mut line);
            self.0.lock().unwrap().push(line.0);
        }
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => write!(self.0, " {value:?}").unwrap(),
            name => write!(self.0, " {name}={value:?}").unwrap(),
        }
    }
}
