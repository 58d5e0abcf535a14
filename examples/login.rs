//! A service whose login, registration and password reset are limited, also across `kill -9`.
//!
//! ```text
//! login --port 3000
//! curl -i -d 'user=ada&password=guess' http://127.0.0.1:3000/login
//! ```

mod cli;

use std::error::Error;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, request::Parts};
use axum::response::Html;
use axum::routing::{get, post};
use axum::{Form, Router};
use clap::{CommandFactory, Parser, error::ErrorKind};
use ratevault::http::{
    ClientKey, IpKey, KeyFunction, RateLimitLayer, TrustedProxies, ip_key, ip_key_forwarded,
};
use ratevault::{Decision, HitLog, Limiter, Quota, SlidingWindow, Vault};
use serde::Deserialize;
use tokio::net::TcpListener;

/// How long a request that is under way at the end may still take.
const GRACE: Duration = Duration::from_secs(5);

/// Serve a demo login whose limits survive restarts and crashes.
///
/// The account is `ada`, its password `correct horse`.
#[derive(Parser, Debug)]
#[command(name = "login")]
struct Login {
    /// The port on 127.0.0.1; 0 takes a free one
    #[arg(long, default_value_t = 3000)]
    port: u16,

    /// The vault's file [default: $RATEVAULT_DB, else ratevault.redb]
    #[arg(long, value_name = "PATH")]
    db: Option<PathBuf>,

    /// A proxy whose X-Forwarded-For is believed, an address or a range; repeat it for several
    #[arg(long = "trusted-proxy", value_name = "CIDR")]
    trusted_proxies: Vec<String>,

    /// How many logins a client may try
    #[arg(long, default_value = "5/minute")]
    quota: Quota,
}

fn main() -> ExitCode {
    cli::quiet_storage();
    tracing_subscriber::fmt().with_writer(io::stderr).init();
    let login = Login::parse();
    match login.serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => cli::failure("login", error),
    }
}

impl Login {
    #[tokio::main]
    async fn serve(&self) -> Result<(), Box<dyn Error>> {
        let (key, logins) = (usable(self.key()), usable(SlidingWindow::new(self.quota)));
        let vault = self.vault()?;
        let app = app(&vault, logins, &key)?;

        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, self.port)).await;
        let listener =
            listener.map_err(|error| format!("cannot listen on port {}: {error}", self.port))?;
        // Before anybody may think that it runs.
        let (asked, asked_for_long) = (asked_to_stop()?, asked_to_stop()?);
        announce(listener.local_addr()?)?;
        let service = app.into_make_service_with_connect_info::<SocketAddr>();
        let served = axum::serve(listener, service).with_graceful_shutdown(asked);
        tokio::select! {
            served = served.into_future() => served?,
            // A request that never ends does not keep the file open for ever.
            () = async { asked_for_long.await; tokio::time::sleep(GRACE).await } => {}
        }
        Ok(vault.close_async().await?)
    }

    fn vault(&self) -> ratevault::Result<Vault<HitLog>> {
        match &self.db {
            Some(path) => Vault::builder("rate_limits").path(path).open(),
            None => Vault::new("rate_limits"),
        }
    }

    /// Who is counted: the client behind the trusted proxies, else the peer.
    fn key(&self) -> ratevault::Result<IpKey> {
        if self.trusted_proxies.is_empty() {
            return Ok(ip_key());
        }
        TrustedProxies::new(&self.trusted_proxies).map(ip_key_forwarded)
    }
}

/// What was asked for, or a usage error.
fn usable<T>(asked: ratevault::Result<T>) -> T {
    asked.unwrap_or_else(|error| {
        let mut command = Login::command();
        command.error(ErrorKind::ValueValidation, error).exit()
    })
}

fn app(vault: &Vault<HitLog>, logins: SlidingWindow, key: &IpKey) -> ratevault::Result<Router> {
    let limited = |endpoint, window| {
        let limiter = Limiter::new(vault.clone(), window);
        RateLimitLayer::new(limiter, endpoint).key(key.clone())
    };
    let page = Page {
        logins: Limiter::new(vault.clone(), logins.clone()),
        key: key.clone(),
    };
    let registrations = SlidingWindow::new(Quota::per_hour(5)?)?;
    let resets = SlidingWindow::new(Quota::per_hour(3)?)?;
    Ok(Router::new()
        .route("/", get(Page::show))
        .route("/login", post(login).route_layer(limited("login", logins)))
        .route(
            "/register",
            post(register).route_layer(limited("register", registrations)),
        )
        .route(
            "/password-reset",
            post(reset_password).route_layer(limited("password-reset", resets)),
        )
        .with_state(page))
}

#[derive(Deserialize)]
struct Credentials {
    user: String,
    password: String,
}

/// A real service would compare with a slow hash of the password.
async fn login(Form(given): Form<Credentials>) -> (StatusCode, String) {
    if (&*given.user, &*given.password) == ("ada", "correct horse") {
        (StatusCode::OK, "Welcome, ada.\n".into())
    } else {
        (StatusCode::UNAUTHORIZED, "Wrong user or password.\n".into())
    }
}

async fn register(Form(given): Form<Credentials>) -> (StatusCode, &'static str) {
    match (&*given.user, &*given.password) {
        ("", _) | (_, "") => (
            StatusCode::UNPROCESSABLE_ENTITY,
            "User and password are needed.\n",
        ),
        ("ada", _) => (StatusCode::CONFLICT, "That name is taken.\n"),
        _ => (
            StatusCode::ACCEPTED,
            "A real service would make the account now.\n",
        ),
    }
}

#[derive(Deserialize)]
struct Account {
    #[serde(rename = "user")]
    _user: String,
}

/// The same answer for every name, so that it does not tell who has an account.
async fn reset_password(Form(_account): Form<Account>) -> (StatusCode, &'static str) {
    (
        StatusCode::ACCEPTED,
        "If there is such an account, a mail is on its way.\n",
    )
}

/// What the page needs to say how many attempts are left.
#[derive(Clone)]
struct Page {
    logins: Limiter<SlidingWindow>,
    key: IpKey,
}

impl Page {
    async fn show(State(page): State<Self>, request: Parts) -> Result<Html<String>, StatusCode> {
        let client = page.key.client(&request);
        let client = client.unwrap_or_else(|| ClientKey::from("unknown"));
        // A peek reads the file.
        let peek = move || page.logins.peek("login", &client);
        match tokio::task::spawn_blocking(peek).await {
            Ok(Ok(decision)) => Ok(Html(rendered(&decision))),
            _ => Err(StatusCode::SERVICE_UNAVAILABLE),
        }
    }
}

fn rendered(decision: &Decision) -> String {
    include_str!("login.html")
        .replace("%limit%", &decision.limit().to_string())
        .replace("%remaining%", &decision.remaining().to_string())
        .replace(
            "%reset_ms%",
            &decision.reset_after().as_millis().to_string(),
        )
}

fn announce(address: SocketAddr) -> io::Result<()> {
    let text = format!(
        "listening on http://{address}\ntry: curl -i -d 'user=ada&password=guess' http://{address}/login\n"
    );
    cli::still_read(io::stdout().lock().write_all(text.as_bytes())).map(drop)
}

/// A future that ends at Ctrl-C or SIGTERM, if they come after this call.
#[cfg(unix)]
fn asked_to_stop() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// A future that ends at Ctrl-C.
#[cfg(not(unix))]
fn asked_to_stop() -> io::Result<impl Future<Output = ()>> {
    Ok(async { drop(tokio::signal::ctrl_c().await) })
}
