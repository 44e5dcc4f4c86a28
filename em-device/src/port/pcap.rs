//! Capture: frames that pass are also written to a pcap file, as they are, unfinished checksums and
//! unsegmented frames included.

use super::{Port, Rx, RxSink, TxError};
use crate::frame::{Frame, MAX_FRAME};
use m2m_fabric::proto::LinkStats;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, Endianness, PcapError, TsResolution};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use thiserror::Error;

/// Why a capture file could not be made.
#[derive(Debug, Error)]
#[error("cannot create the capture file {}: {source}", path.display())]
pub struct CaptureError {
    path: PathBuf,
    source: std::io::Error,
}

/// The file behind the pcap writer, which keeps its own to itself: two handles, so that it can be
/// flushed.
#[derive(Debug, Clone)]
struct Out(Arc<Mutex<BufWriter<File>>>);

impl Out {
    fn lock(&self) -> MutexGuard<'_, BufWriter<File>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.lock().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.lock().flush()
    }
}

fn io_error(error: PcapError) -> std::io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => std::io::Error::other(other),
    }
}

struct State {
    path: PathBuf,
    out: Out,
    /// `None` after an error: a full disk stops the capture, not the traffic.
    writer: Option<PcapWriter<Out>>,
    copy: Vec<u8>,
    written: u64,
    missed: u64,
}

impl State {
    fn fail(&mut self, error: &std::io::Error) {
        let path = self.path.display();
        log::error!("the capture to {path} ends: {error}");
        self.writer = None;
        self.missed += 1;
    }
}

/// A capture file, shared by everything that writes to it.
#[derive(Clone)]
pub struct CaptureFile {
    state: Arc<Mutex<State>>,
}

impl CaptureFile {
    /// Creates the file, or empties the one that is there, and writes the header.
    ///
    /// # Errors
    /// The file cannot be created or written.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, CaptureError> {
        let path = path.as_ref().to_owned();
        let make = || {
            let header = PcapHeader {
                snaplen: MAX_FRAME.next_power_of_two() as u32,
                datalink: DataLink::ETHERNET,
                ts_resolution: TsResolution::NanoSecond,
                endianness: Endianness::native(),
                ..PcapHeader::default()
            };
            let file = BufWriter::with_capacity(1 << 18, File::create(&path)?);
            let out = Out(Arc::new(Mutex::new(file)));
            let writer = PcapWriter::with_header(out.clone(), header).map_err(io_error)?;
            Ok((out, writer))
        };
        let (out, writer) = match make() {
            Ok(made) => made,
            Err(source) => return Err(CaptureError { path, source }),
        };
        Ok(Self {
            state: Arc::new(Mutex::new(State {
                path,
                out,
                writer: Some(writer),
                copy: Vec::new(),
                written: 0,
                missed: 0,
            })),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a frame. An error ends the capture and is logged.
    pub fn write(&self, frame: &Frame<'_>) {
        let mut state = self.state();
        let State {
            writer: Some(writer),
            copy,
            ..
        } = &mut *state
        else {
            state.missed += 1;
            return;
        };
        copy.clear();
        frame.append_to(copy);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let packet = PcapPacket::new(now, copy.len() as u32, copy);
        match writer.write_packet(&packet) {
            Ok(_) => state.written += 1,
            Err(error) => state.fail(&io_error(error)),
        }
    }

    /// Hands everything written so far to the kernel.
    pub fn flush(&self) {
        let mut state = self.state();
        if state.writer.is_some() {
            let flushed = state.out.lock().flush();
            if let Err(error) = flushed {
                state.fail(&error);
            }
        }
    }

    /// Frames written, and frames missed after an error.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.state();
        (state.written, state.missed)
    }
}

/// A port around another one: what is sent and received there is captured too.
pub struct CapturePort<P> {
    inner: P,
    file: CaptureFile,
}

impl<P: Port> CapturePort<P> {
    /// Captures the traffic of `inner` to `file`.
    pub fn new(inner: P, file: CaptureFile) -> Self {
        Self { inner, file }
    }
}

impl<P> Drop for CapturePort<P> {
    fn drop(&mut self) {
        self.file.flush();
    }
}

/// Writes down what its sink takes.
struct Recorder<'a> {
    file: &'a CaptureFile,
    sink: &'a mut dyn RxSink,
}

impl RxSink for Recorder<'_> {
    fn frame(&mut self, frame: &Frame<'_>) -> Rx {
        let taken = self.sink.frame(frame);
        if taken == Rx::Taken {
            self.file.write(frame);
        }
        taken
    }

    fn done(&mut self) {
        self.sink.done();
    }
}

impl<P: Port> Port for CapturePort<P> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError> {
        self.inner.transmit(frame)?;
        self.file.write(frame);
        Ok(())
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn receive(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize {
        let file = &self.file;
        self.inner.receive(budget, &mut Recorder { file, sink })
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }

    fn arm(&mut self) -> bool {
        let waiting = self.inner.arm();
        if !waiting {
            // Going to sleep: time to let people see what there is.
            self.file.flush();
        }
        waiting
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn carrier(&self) -> bool {
        self.inner.carrier()
    }

    fn down_reason(&self) -> Option<String> {
        self.inner.down_reason()
    }

    fn stats(&self) -> LinkStats {
        let mut stats = self.inner.stats();
        let (_, missed) = self.file.counts();
        if missed > 0 {
            stats.drops.insert("not_captured".into(), missed);
        }
        stats
    }

    fn accepts_offloads(&self) -> bool {
        self.inner.accepts_offloads()
    }

    fn accepts_udp_segments(&self) -> bool {
        self.inner.accepts_udp_segments()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameMeta;
    use crate::port::loopback::LoopbackPort;
    use crate::port::shm::test_support::{send, take};
    use pcap_file::pcap::PcapReader;

    #[test]
    fn both_directions_are_in_the_file_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.pcap");
        let file = CaptureFile::create(&path).unwrap();
        let mut port = CapturePort::new(LoopbackPort::new(1), file.clone());
        let long: Vec<u8> = (0..MAX_FRAME).map(|i| i as u8).collect();
        send(&mut port, FrameMeta::default(), &long).unwrap();
        let refused = send(&mut port, FrameMeta::default(), &[1; 60]);
        assert_eq!(refused, Err(TxError::Full));
        port.flush();
        assert_eq!(port.receive(9, &mut |_: &Frame<'_>| Rx::Later), 0);
        assert_eq!(take(&mut port, 9).len(), 1);
        assert!(!port.arm());
        let mut reader = PcapReader::new(File::open(&path).unwrap()).unwrap();
        assert_eq!(reader.header().datalink, DataLink::ETHERNET);
        let mut packets = 0;
        while let Some(packet) = reader.next_packet() {
            assert_eq!(packet.unwrap().data, long);
            packets += 1;
        }
        assert_eq!(packets, 2, "sent once, received once");
        assert_eq!(file.counts(), (2, 0));
    }

    #[test]
    fn a_full_disk_ends_the_capture_and_not_the_traffic() {
        let file = CaptureFile::create("/dev/full").unwrap();
        let mut port = CapturePort::new(LoopbackPort::new(99), file);
        for _ in 0..9 {
            send(&mut port, FrameMeta::default(), &[0; MAX_FRAME]).unwrap();
        }
        port.flush();
        assert_eq!(take(&mut port, 99).len(), 9);
        assert!(port.stats().drops["not_captured"] > 0);
    }

    #[test]
    fn a_file_that_cannot_be_made_is_an_error_with_its_name() {
        let error = CaptureFile::create("/nowhere/x.pcap").err().unwrap();
        assert!(error.to_string().contains("/nowhere/x.pcap"));
    }
}
