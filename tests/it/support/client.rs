//! A client that speaks HTTP/1 over loopback, with a connection for each request.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use http::{HeaderMap, Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpSocket;

const PATIENCE: Duration = Duration::from_secs(60);

/// What a server answered.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub fields: HeaderMap,
    pub body: String,
}

impl Answer {
    async fn read(response: http::Response<Incoming>) -> Self {
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Self {
            status: head.status.as_u16(),
            fields: head.headers,
            body: String::from_utf8(body.into()).unwrap(),
        }
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(|value| value.to_str().unwrap())
    }

    /// The number in a header that has to be there.
    #[track_caller]
    pub fn number(&self, name: &str) -> u64 {
        let number = self.field(name).and_then(|text| text.parse().ok());
        number.unwrap_or_else(|| panic!("no number in {name}: {self:?}"))
    }
}

/// Somebody with an address, and perhaps with addresses that they claim.
#[derive(Clone, Debug)]
pub struct Client {
    to: SocketAddr,
    from: Ipv4Addr,
    forwarded: Vec<String>,
}

impl Client {
    pub fn new(to: SocketAddr) -> Self {
        Self {
            to,
            from: Ipv4Addr::LOCALHOST,
            forwarded: Vec::new(),
        }
    }

    /// Connects from 127.0.0.`last`. Linux takes all of 127.0.0.0/8 for its own.
    pub fn at(mut self, last: u8) -> Self {
        self.from = Ipv4Addr::new(127, 0, 0, last);
        self
    }

    /// The X-Forwarded-For lines that it sends.
    pub fn forwarded(mut self, lines: &[&str]) -> Self {
        self.forwarded = lines.iter().map(ToString::to_string).collect();
        self
    }

    pub fn get(&self, path: &str) -> Answer {
        self.wait(Method::GET, path, "")
    }

    pub fn post(&self, path: &str, form: impl Into<Bytes>) -> Answer {
        self.wait(Method::POST, path, form)
    }

    /// Asks, and blocks until the answer is there.
    pub fn wait(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Answer {
        runtime().block_on(self.ask(method, path, body))
    }

    pub async fn ask(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Answer {
        let request = self.request(method, path, body.into());
        let answer = tokio::time::timeout(PATIENCE, self.send(request)).await;
        answer.unwrap_or_else(|_| panic!("no answer from {}", self.to))
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.to.to_string())
            .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        for line in &self.forwarded {
            request = request.header("x-forwarded-for", line);
        }
        request.body(Full::new(body)).unwrap()
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((self.from, 0).into()).unwrap();
        let stream = socket.connect(self.to).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let response = sender.send_request(request).await.unwrap();
        let answer = Answer::read(response).await;
        connection.abort();
        answer
    }
}

/// A runtime for clients.
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}
