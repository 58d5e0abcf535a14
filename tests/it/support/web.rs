//! Web services and their clients, over real sockets.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use ratevault::{Limiter, ManualClock, Quota, SlidingWindow, Vault};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

pub type Limited = Limiter<SlidingWindow>;

pub const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Another address of this machine, for a second client.
pub const NEIGHBOUR: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// So many places per minute, on a clock that stands.
pub fn limiter(limit: u32, clock: &Arc<ManualClock>) -> Limited {
    let vault = Vault::builder("rate_limits").in_memory();
    let vault = vault.clock(Arc::clone(clock) as _).open().unwrap();
    Limiter::new(vault, per_minute(limit))
}

pub fn per_minute(limit: u32) -> SlidingWindow {
    SlidingWindow::new(Quota::per_minute(limit).unwrap()).unwrap()
}

/// A free port of an address.
pub async fn listener(address: impl Into<IpAddr>) -> TcpListener {
    let address = address.into();
    let listener = TcpListener::bind((address, 0)).await;
    listener.unwrap_or_else(|error| panic!("these tests have to listen on {address}: {error}"))
}

/// Serves until the test's runtime ends, as axum's documentation says it is done.
pub fn serve(app: Router, listener: TcpListener) -> SocketAddr {
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await.unwrap() });
    address
}

/// What came back, read to its end.
pub type Answer = Response<Bytes>;

/// A client's one HTTP/1 connection. It fails if it is closed.
pub struct Connection<B = Full<Bytes>>(SendRequest<B>);

impl<B> Connection<B>
where
    B: Body<Data = Bytes, Error: std::error::Error + Send + Sync> + Send + 'static,
{
    pub async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        // How it ends is told by the requests.
        tokio::spawn(async { drop(connection.await) });
        Self(sender)
    }

    pub async fn to(server: SocketAddr) -> Self {
        Self::over(TcpStream::connect(server).await.unwrap()).await
    }

    /// As [`to`](Self::to), from an address of this machine.
    pub async fn from(client: IpAddr, server: SocketAddr) -> Self {
        Self::over(stream_from(client, server).await).await
    }

    pub async fn send(&mut self, request: Request<B>) -> Answer {
        let answer = async {
            self.0.ready().await.unwrap();
            let (head, body) = self.0.send_request(request).await.unwrap().into_parts();
            Response::from_parts(head, body.collect().await.unwrap().to_bytes())
        };
        in_time(answer).await
    }
}

impl Connection {
    pub async fn get(&mut self) -> Answer {
        self.send(request(Method::GET, &[])).await
    }

    /// Asks as somebody whose proxies, or who himself, wrote this.
    pub async fn get_forwarded(&mut self, value: &str) -> Answer {
        let field = ("x-forwarded-for", value);
        self.send(request(Method::GET, &[field])).await
    }

    /// How many of `count` requests are served; the others have to be refused.
    pub async fn served_of(&mut self, count: u32) -> u32 {
        let mut served = 0;
        for _ in 0..count {
            match self.get().await.status().as_u16() {
                200 => served += 1,
                429 => {}
                other => panic!("{other}"),
            }
        }
        served
    }
}

pub async fn stream_from(client: IpAddr, server: SocketAddr) -> TcpStream {
    let socket = match client {
        IpAddr::V4(_) => TcpSocket::new_v4(),
        IpAddr::V6(_) => TcpSocket::new_v6(),
    };
    let socket = socket.unwrap();
    let bound = socket.bind((client, 0).into());
    bound.unwrap_or_else(|error| panic!("these tests have to call from {client}: {error}"));
    socket.connect(server).await.unwrap()
}

pub fn request(method: Method, fields: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let request = Request::builder()
        .method(method)
        .header("host", "localhost");
    let add = |request: http::request::Builder, (name, value): &(&str, &str)| {
        request.header(*name, *value)
    };
    let request = fields.iter().fold(request, add);
    request.body(Full::default()).unwrap()
}

/// A field's text; empty if there is none.
pub fn field<'h>(headers: &'h HeaderMap, name: &str) -> &'h str {
    headers
        .get(name)
        .map_or("", |value| value.to_str().unwrap())
}

/// Fails when nothing comes, in place of waiting for ever.
pub async fn in_time<F: Future>(answer: F) -> F::Output {
    let answer = tokio::time::timeout(Duration::from_secs(60), answer).await;
    answer.unwrap_or_else(|_| panic!("no answer came"))
}
