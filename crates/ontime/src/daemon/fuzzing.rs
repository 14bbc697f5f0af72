//! Private parts of this crate for the fuzz targets of the crate `ontime-fuzz`. Not a public interface.
//!
//! In: `daemon.toml`; the lines of a device process; requests as clients of the daemon's socket make them, each with
//! its user; the files of `ontime plan` and of `ontime verify`. Out: the answers, and the reservations that there are
//! then; what is in the files. The HTTP handlers and the list are the daemon's; the main loop here admits what the list
//! takes.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, header};
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use ontime_plan::Tenant;
use ontime_sched::Lease;
use ontime_tenants::config::{ConfigError, Text};
use rustix::event::EventfdFlags;
use tokio::runtime::Runtime;

pub use super::config::{DaemonConfig, Mode};
pub use super::guests::lines::take as take_lines;
use super::http::{Ask, Asked, Loop, Peer, service};
use super::request_queue::BACKLOG;
use super::requested::{Requested, Step, Unreserved};
use crate::verify::limits;
use crate::{api, plan};

/// The boot to which the list belongs.
const BOOT: &str = "boot";
/// Metrics as `prometheus-client` writes them.
const METRICS: &str = "# HELP a A.\n# TYPE a counter\n# UNIT a seconds\na_seconds_total{b=\"c\"} 1\n# EOF\n";

/// A request.
#[derive(Debug)]
pub struct Asking<'a> {
    /// The client's user, if the kernel knows it.
    pub uid: Option<u32>,
    /// The method, such as PUT.
    pub verb: &'a str,
    /// The path of the URI.
    pub path: &'a str,
    /// The header of this name.
    pub accept: &'a str,
    /// The content.
    pub body: &'a [u8],
}

/// The daemon's API without a host.
pub struct Api {
    runtime: Runtime,
    service: TowerToHyperService<axum::Router>,
    asked: Receiver<Asked>,
    requested: Requested,
    config: DaemonConfig,
    file: PathBuf,
}

impl Api {
    /// No reservations, which are kept in this file. Users beside root may reserve by these settings of `daemon.toml`.
    ///
    /// # Errors
    /// If no descriptor can be had.
    pub fn new(file: PathBuf, users: &[u32], per_user: usize) -> io::Result<Self> {
        let (asks, asked) = sync_channel(BACKLOG);
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
            service: TowerToHyperService::new(service(Loop::new(asks, Arc::new(bell)))),
            asked,
            requested: Requested::open(file.clone(), BOOT, Duration::ZERO),
            config: DaemonConfig {
                reserving_users: users.iter().copied().collect(),
                reservable: vec!["*".to_owned()],
                reservations_per_user: per_user,
                ..DaemonConfig::default()
            },
            file,
        })
    }

    /// The answer's status and body. None: this is no request of HTTP.
    pub fn ask(&mut self, asking: &Asking<'_>) -> Option<(u16, Vec<u8>)> {
        let request = Request::builder()
            .method(asking.verb)
            .uri(asking.path)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, asking.accept)
            .extension(ConnectInfo(Peer { uid: asking.uid }))
            .body(Body::from(asking.body.to_vec()))
            .ok()?;
        let Self { runtime, service, asked, requested, config, .. } = self;
        let mut answer = pin!(service.call(request));
        runtime.block_on(async {
            // The handler waits for the main loop.
            let Ok(answer) = poll_fn(|context| {
                let polled = answer.as_mut().poll(context);
                asked.try_iter().for_each(|asked| main_loop(asked.ask, requested, config));
                polled
            })
            .await;
            let status = answer.status().as_u16();
            Some((status, answer.into_body().collect().await.ok()?.to_bytes().to_vec()))
        })
    }

    /// All reservations, as the API shows them.
    pub fn requested(&self) -> serde_json::Value {
        show(&self.requested)
    }

    /// The same, as the next daemon reads them.
    pub fn reread(&self) -> serde_json::Value {
        show(&Requested::open(self.file.clone(), BOOT, Duration::ZERO))
    }

    /// What the admission gets.
    pub fn leases(&self) -> Vec<Lease> {
        self.requested.leases()
    }
}

/// The file of `ontime plan`: the CPUs of a host, and the tenants with their copies.
///
/// # Errors
/// [`ConfigError`], with file and line.
pub fn plan_toml(text: &Text) -> Result<(u32, Vec<Tenant>), ConfigError> {
    plan::file::parse(text).map(|plan| (plan.cpus, plan.tenants))
}

/// The file of `ontime verify --limits-file`: the limits by set, us.
///
/// # Errors
/// [`ConfigError`], with file and line.
pub fn limits_toml(text: &Text) -> Result<Vec<(String, Vec<f64>)>, ConfigError> {
    let sets = limits::parse(text, "")?;
    Ok(sets.into_iter().map(|set| (set.name, set.limits.into_values().collect())).collect())
}

fn shown(requested: &Requested) -> Vec<api::Requested> {
    requested.show(&BTreeMap::new(), |_| Vec::new(), None, Duration::ZERO)
}

fn show(requested: &Requested) -> serde_json::Value {
    serde_json::to_value(shown(requested)).unwrap_or_default()
}

/// Answers as the engine does, but admits all. A request that needs a host is not answered.
fn main_loop(ask: Ask, requested: &mut Requested, config: &DaemonConfig) {
    match ask {
        Ask::Reserve { name, request, uid, answer } => {
            let done = requested.judge(&name, &request, uid, config).and_then(|(uid, step)| {
                requested.put(&name, request, uid, Duration::ZERO)?;
                let own = shown(requested).into_iter().find(|one| one.name == name);
                let gone = || Unreserved::Refused("it is not in the list".to_owned());
                Ok((step == Step::Create, own.ok_or_else(gone)?))
            });
            drop(answer.send(done));
        }
        Ask::Unreserve { name, uid, answer } => {
            let may = requested.authorise(&name, uid, config);
            let done = may.map(|_| {
                requested.remove(&name);
            });
            drop(answer.send(done));
        }
        Ask::Metrics(answer) => drop(answer.send(METRICS.to_owned())),
        _ => {}
    }
}
