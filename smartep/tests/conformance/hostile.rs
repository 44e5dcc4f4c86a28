//! Nothing that arrives on the socket ends the server or stays behind in it.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};

use super::harness::*;

/// xorshift64*: the same messages in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

fn rss_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A message that is half right: a command that exists, a body that may be anything.
fn message(random: &mut Random) -> Vec<u8> {
    let command = random.below(20) as u16;
    let len = match random.below(8) {
        0 => random.below(4096),
        1 => 0,
        _ => 8 * random.below(9),
    } as usize;
    let mut body: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
    if random.below(2) == 0 {
        // Plausible small numbers get further into the code than noise.
        for chunk in body.chunks_mut(4) {
            let value = (random.below(64) as u32).to_le_bytes();
            chunk.copy_from_slice(&value[..chunk.len()]);
        }
    }
    let size = match random.below(200) {
        0 => random.next() as usize,
        1 => 16 + len + random.below(32) as usize,
        _ => 16 + len,
    };
    let flags = if random.below(300) == 0 {
        random.next() as u32
    } else {
        (random.below(2) << 4) as u32
    };
    [header(random.next() as u16, command, size, flags), body].concat()
}

fn burst(served: &Served, random: &mut Random, messages: usize, file: &OwnedFd) -> usize {
    let mut raw = served.client();
    raw.stream.set_nonblocking(true).unwrap();
    for sent in 0..messages {
        let bytes = message(random);
        let many = [file.as_fd(); 40];
        let fds = match random.below(20) {
            0 => random.below(17) as usize,
            1 if random.below(20) == 0 => 17 + random.below(20) as usize,
            _ => 0,
        };
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        if fds > 0 {
            ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&many[..fds]));
        }
        let flags = rustix::net::SendFlags::NOSIGNAL;
        let iov = [std::io::IoSlice::new(&bytes)];
        loop {
            let mut replies = [0; 65536];
            while matches!(std::io::Read::read(&mut raw.stream, &mut replies), Ok(n) if n > 0) {}
            match rustix::net::sendmsg(&raw.stream, &iov, &mut ancillary, flags) {
                Err(rustix::io::Errno::AGAIN) => std::thread::yield_now(),
                Err(_) => return sent, // cut off, as it should be
                Ok(_) => break,
            }
        }
    }
    messages
}

#[test]
fn a_hundred_thousand_random_messages_leave_nothing_behind() {
    let served = serve_alone();
    let file = HostFile::new(0x10000).0;
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut sent, mut before) = (0, None);
    while sent < 100_000 {
        sent += burst(&served, &mut random, 500, &file).max(1);
        if before.is_none() && sent > 20_000 {
            served.until("the end", || served.table.ranges().is_empty());
            before = Some((open_fds(), rss_kib()));
        }
    }
    let (fds, rss) = before.unwrap();
    served.until("the descriptors' end", || open_fds() <= fds);
    let now = rss_kib();
    assert!(now < rss + 16 * 1024, "{rss} KiB were resident, now {now}");
    assert_eq!(served.client().read(7, 0, 4), [0xf4, 0x1a, 0x41, 0x10]);
}

#[test]
fn too_many_descriptors_lose_the_connection_and_are_closed() {
    let served = serve_alone();
    let file = HostFile::new(0x1000).0;
    let before = open_fds();
    for n in [17, 30] {
        let mut raw = served.client();
        raw.send(9, 0, &access(7, 0, 4), &vec![file.as_fd(); n]);
        assert!(raw.closed(), "{n} descriptors");
    }
    let mut raw = served.client();
    raw.send(9, 0, &access(7, 0, 4), &[file.as_fd(); 16]);
    assert_eq!(
        raw.receive().unwrap().error,
        None,
        "16 that nobody wants are closed"
    );
    drop(raw);
    served.until("the descriptors' end", || open_fds() == before);
}

#[test]
fn descriptors_on_every_piece_of_a_message_are_counted_together() {
    let served = serve();
    let file = HostFile::new(0x1000).0;
    let mut raw = served.client();
    let message = [header(1, 9, 32, 0), access(7, 0, 4)].concat();
    for piece in message.chunks(4) {
        let fds = [file.as_fd(); 6];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(6))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
        let iov = [std::io::IoSlice::new(piece)];
        if rustix::net::sendmsg(
            &raw.stream,
            &iov,
            &mut ancillary,
            rustix::net::SendFlags::NOSIGNAL,
        )
        .is_err()
        {
            break;
        }
    }
    let _ = raw.stream.flush();
    assert!(raw.closed());
    served.client();
}

#[test]
fn a_client_that_never_reads_is_cut_off_and_the_next_is_served() {
    let served = serve();
    let mut stuck = served.client();
    // Replies of 1 MiB fill the socket; requests go on fitting.
    for _ in 0..4 {
        stuck.send(9, 0, &access(0, 0, 1 << 20), &[]);
    }
    served.until("the cut", || {
        served
            .data
            .calls
            .lock()
            .unwrap()
            .contains(&"disconnected".into())
    });
    assert_eq!(served.client().read(7, 0, 2), [0xf4, 0x1a]);
    drop(stuck);
}

#[test]
fn a_client_that_never_pauses_does_not_keep_the_server_from_stopping() {
    let served = serve();
    let mut raw = served.client();
    let one = [header(0, 10, 36, 16), access(0, 0, 4), vec![1; 4]].concat();
    let flood = one.repeat(1000);
    served.stop.stop();
    // Ends only when the server closes its end.
    while raw.stream.write_all(&flood).is_ok() {}
}
