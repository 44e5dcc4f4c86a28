//! Ports: where frames leave an EM and come in.
//!
//! A [`Port`] belongs to one thread of the data path. Sending is in batches: [`Port::transmit`] for
//! each frame, then one [`Port::flush`]. Receiving is in batches too: the port shows its frames to
//! an [`RxSink`] in place, and the sink copies what it takes.
//!
//! Sleeping: when a round of work found nothing, call [`Port::arm`]. If it says that work is waiting,
//! go on. Otherwise sleep until [`Port::wake_fd`] is readable, and call [`Port::disarm`] after waking
//! for whatever reason.

mod counters;
pub mod fault;
pub mod finish;
pub mod loopback;
pub mod null;
pub mod open;
pub mod pcap;
pub mod shm;
pub mod tap;

use crate::frame::Frame;
use m2m_fabric::proto::LinkStats;
use std::os::fd::BorrowedFd;
use thiserror::Error;

/// Why a port did not take a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TxError {
    /// No room now. Not counted as a drop: keep the frame and try again after the port woke the
    /// sleeper (a full port arms that by itself), or drop and count it.
    #[error("the port is full")]
    Full,
    /// Longer than the port carries, or shorter than an Ethernet header. Counted as a drop.
    #[error("the frame is too long or too short for the port")]
    TooLong,
    /// The port has no carrier. Counted as a drop.
    #[error("the port is down")]
    Down,
    /// The frame has to be finished and is not what its offload facts say.
    #[error("the frame is not what its offload facts say")]
    Malformed,
}

/// What a sink did with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rx {
    /// It has the frame, or dropped it: the port forgets it.
    Taken,
    /// It has no room: the port keeps the frame, shows it again next time, and ends this batch.
    Later,
}

/// Who gets the frames that a port receives.
pub trait RxSink {
    /// A frame came in. Its offload facts passed [`crate::frame::FrameMeta::check`]; its bytes may
    /// change while the sink looks at them, and are gone afterwards.
    fn frame(&mut self, frame: &Frame<'_>) -> Rx;

    /// The port is about to forget the frames that were taken, also for the process that comes after this one: what is to
    /// outlive this one has to be in its place when this returns.
    fn done(&mut self) {}
}

impl<F: FnMut(&Frame<'_>) -> Rx> RxSink for F {
    fn frame(&mut self, frame: &Frame<'_>) -> Rx {
        self(frame)
    }
}

/// One way out of an EM and into it. The defaults are those of a port that has nothing to wait for; one that stands before
/// another passes everything on.
pub trait Port: Send {
    /// Kind and peer, for people.
    fn name(&self) -> &str;

    /// Queues a frame. It may stay unseen by the peer until [`Port::flush`].
    ///
    /// # Errors
    /// See [`TxError`]; the frame was not queued.
    fn transmit(&mut self, frame: &Frame<'_>) -> Result<(), TxError>;

    /// Makes everything that was queued visible to the peer and wakes it if it sleeps. Cheap when
    /// nothing was queued.
    fn flush(&mut self);

    /// Shows at most `budget` frames to `sink`. Returns how many were taken or dropped; 0 means
    /// that nothing was waiting or that the sink wants nothing now.
    fn receive(&mut self, budget: usize, sink: &mut dyn RxSink) -> usize;

    /// Becomes readable when there is work again after [`Port::arm`]: a frame came, room came back
    /// after [`TxError::Full`], or the carrier changed. Some ports have none.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Asks for a wake-up. Returns true, and asks for nothing, when work is waiting already. Frames
    /// that the sink left with [`Rx::Later`] are no such work: the sink's owner knows when it has
    /// room again, and calls [`Port::receive`] then.
    fn arm(&mut self) -> bool {
        false
    }

    /// Ends the wish for wake-ups and swallows those that came.
    fn disarm(&mut self) {}

    /// Whether the other end is there.
    fn carrier(&self) -> bool {
        true
    }

    /// Why a port went down for good, if it did.
    fn down_reason(&self) -> Option<String> {
        None
    }

    /// Counters. `link` is left 0 for the owner to fill in.
    fn stats(&self) -> LinkStats;

    /// Whether the port takes frames with unfinished checksums and frames to be segmented. For one
    /// that does not, [`finish::FinishPort`] finishes frames first.
    fn accepts_offloads(&self) -> bool;

    /// The same for UDP frames to be segmented.
    fn accepts_udp_segments(&self) -> bool {
        self.accepts_offloads()
    }
}
