//! The OM's end of the socket.

use super::protocol::{Answer, MAX_REQUEST, Request};
use super::view::{EmCounters, FunctionCounters, FunctionView, Functions, LinkCounters, Stats};
use crate::conductor::{Message, Question};
use crate::supervisor::program::Program;
use m2m_fabric::proto;
use serde::Serialize;
use smartep::listener::{ListenError, PathListener};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Conversations at the same time.
const MAX_CLIENTS: usize = 16;
/// How long a client may say or take nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the OM's thread may take to answer.
const CONDUCTOR: Duration = Duration::from_secs(5);
/// How long an EM may take to go on as another program, or as it was.
const UPGRADE: Duration = Duration::from_secs(8);
/// How long an EM may take for its counters.
const COUNTERS: Duration = Duration::from_secs(1);

/// Answers requests until it is dropped.
#[derive(Debug)]
pub struct Server {
    listener: Arc<PathListener>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at `path`.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn start(path: &Path, conductor: Sender<Message>) -> Result<Self, ListenError> {
        let listener = Arc::new(PathListener::bind(path)?);
        let io = |source| ListenError::Io {
            path: path.to_owned(),
            source,
        };
        let socket = listener.socket().map(|socket| socket.try_clone_to_owned());
        let none = || io(std::io::ErrorKind::NotConnected.into());
        let accepting = UnixListener::from(socket.ok_or_else(none)?.map_err(io)?);
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = stopping.clone();
        let thread = std::thread::Builder::new()
            .name("northbound".to_owned())
            .spawn(move || accept(&accepting, &conductor, &stop))
            .map_err(io)?;
        Ok(Self {
            listener,
            stopping,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes the thread out of `accept`.
        if let Some(socket) = self.listener.socket() {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &UnixListener, conductor: &Sender<Message>, stopping: &AtomicBool) {
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let accepted = listener.accept();
        if stopping.load(Ordering::Acquire) {
            return;
        }
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                // Out of descriptors, most likely; they come back when a client leaves.
                log::warn!("cannot accept on the dpuctl socket: {e}");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if let Err(reason) = permitted(&stream) {
            refuse(stream, reason);
            continue;
        }
        let room = Seat::take(&clients);
        let Some(seat) = room else {
            refuse(
                stream,
                format!("the OM has {MAX_CLIENTS} clients already; try again"),
            );
            continue;
        };
        let conductor = conductor.clone();
        let spawned = std::thread::Builder::new()
            .name("dpuctl-client".to_owned())
            .spawn(move || {
                if let Err(e) = converse(&stream, &conductor) {
                    log::debug!("a dpuctl client is gone: {e}");
                }
                drop(seat);
            });
        if let Err(e) = spawned {
            log::warn!("no thread for a dpuctl client: {e}");
        }
    }
}

/// One of the places for clients.
struct Seat(Arc<AtomicUsize>);

impl Seat {
    fn take(taken: &Arc<AtomicUsize>) -> Option<Self> {
        taken
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
                (n < MAX_CLIENTS).then_some(n + 1)
            })
            .ok()
            .map(|_| Self(taken.clone()))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn permitted(stream: &UnixStream) -> Result<(), String> {
    let peer = rustix::net::sockopt::socket_peercred(stream)
        .map_err(|e| format!("the OM cannot tell who you are: {e}"))?;
    let own = rustix::process::geteuid();
    if peer.uid.is_root() || peer.uid == own {
        Ok(())
    } else {
        Err(format!(
            "user {} may not ask this OM; user {} and root may",
            peer.uid.as_raw(),
            own.as_raw()
        ))
    }
}

fn refuse(mut stream: UnixStream, reason: String) {
    let _ = stream.set_write_timeout(Some(Duration::from_millis(100)));
    let _ = write_line(&mut stream, &Answer::Error(reason));
}

fn write_line(stream: &mut impl Write, answer: &Answer) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn converse(stream: &UnixStream, conductor: &Sender<Message>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut reader = BufReader::new(stream);
    let mut writer = stream;
    let mut line = Vec::new();
    loop {
        line.clear();
        let most = MAX_REQUEST as u64 + 1;
        if reader.by_ref().take(most).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            // Where the next request starts is not known any more.
            let reason = format!("a request is a line of at most {MAX_REQUEST} bytes");
            return write_line(&mut writer, &Answer::Error(reason));
        }
        let answer = match serde_json::from_slice(&line) {
            Ok(request) => respond(request, conductor),
            Err(e) => Err(format!("the request is not understood: {e}")),
        };
        let answer = match answer {
            Ok(value) => Answer::Ok(value),
            Err(reason) => Answer::Error(reason),
        };
        write_line(&mut writer, &answer)?;
    }
}

fn respond(request: Request, conductor: &Sender<Message>) -> Result<serde_json::Value, String> {
    match request {
        Request::Status => json(put(conductor, Question::Status)?),
        Request::Functions => json(Functions {
            functions: put(conductor, Question::Functions)?,
        }),
        Request::Inspect => json(put(conductor, Question::Inspect)?),
        Request::Stats => json(stats(conductor)?),
        Request::Upgrade { em, binary } => {
            let program = Program::examine(binary).map_err(|e| e.to_string())?;
            let question = |answer| Question::Upgrade {
                em,
                program,
                answer,
            };
            put_for(UPGRADE, conductor, question)??;
            json(serde_json::Map::new())
        }
        Request::LinkSet { function, up } => {
            put(conductor, |answer| Question::SetLink {
                function,
                up,
                answer,
            })??;
            json(serde_json::Map::new())
        }
    }
}

fn json(value: impl Serialize) -> Result<serde_json::Value, String> {
    serde_json::to_value(value).map_err(|e| format!("the OM cannot write its answer: {e}"))
}

fn put<T>(
    conductor: &Sender<Message>,
    question: impl FnOnce(SyncSender<T>) -> Question,
) -> Result<T, String> {
    put_for(CONDUCTOR, conductor, question)
}

fn put_for<T>(
    patience: Duration,
    conductor: &Sender<Message>,
    question: impl FnOnce(SyncSender<T>) -> Question,
) -> Result<T, String> {
    let (sender, answer) = sync_channel(1);
    conductor
        .send(Message::Ask(question(sender)))
        .map_err(|_| "the OM is stopping".to_owned())?;
    answer
        .recv_timeout(patience)
        .map_err(|_| "the OM is stopping or busy".to_owned())
}

/// Asks the EMs for their counters, at the same time.
fn stats(conductor: &Sender<Message>) -> Result<Stats, String> {
    let functions = put(conductor, Question::Functions)?;
    let connections = put(conductor, Question::Connections)?;
    let answers: Vec<(String, Result<proto::EmStats, String>)> = std::thread::scope(|scope| {
        let asked: Vec<_> = connections
            .iter()
            .map(|(name, fabric)| {
                let ask = || match fabric.call(proto::Request::Stats, &[], COUNTERS) {
                    Ok(proto::Reply::Stats(stats)) => Ok(*stats),
                    Ok(proto::Reply::Failed(reason)) => Err(reason),
                    Ok(proto::Reply::Ok | proto::Reply::Path(_)) => {
                        Err("it answered without counters".to_owned())
                    }
                    Err(e) => Err(e.to_string()),
                };
                (name, scope.spawn(ask))
            })
            .collect();
        asked
            .into_iter()
            .map(|(name, thread)| {
                let result = thread.join();
                let result = result.unwrap_or_else(|_| Err("asking it failed".to_owned()));
                (name.clone(), result)
            })
            .collect()
    });
    Ok(merge(&functions, answers))
}

fn merge(
    functions: &[FunctionView],
    answers: Vec<(String, Result<proto::EmStats, String>)>,
) -> Stats {
    let mut all = Stats::default();
    for (em, answer) in answers {
        let mut counters = EmCounters {
            name: em.clone(),
            ..EmCounters::default()
        };
        match answer {
            Ok(stats) => {
                counters.wakeups = stats.wakeups;
                counters.bursts = stats.bursts;
                for f in stats.functions {
                    let named = functions.iter().find(|v| v.id == f.function && v.em == em);
                    if let Some(view) = named {
                        let name = view.name.clone();
                        all.functions
                            .push(FunctionCounters::new(name, em.clone(), f));
                    }
                }
                all.links
                    .extend(stats.links.into_iter().map(|counters| LinkCounters {
                        em: em.clone(),
                        counters,
                    }));
            }
            Err(reason) => counters.error = Some(reason),
        }
        all.ems.push(counters);
    }
    let order = |name: &str| functions.iter().position(|f| f.name == name);
    all.functions.sort_by_key(|f| order(&f.name));
    all
}
