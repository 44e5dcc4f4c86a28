//! EMs that are killed under services that may lose messages: none comes with other bytes, every request completes, and
//! the queue pairs go on.

use super::kept::{kill_in_turn, pattern};
use super::{Pair, Side};
use crate::recovery::kills;
use distdpu_tests::mlx5::{Send, Service};
use distdpu_tests::packet::Random;
use distdpu_tests::recovery::Stop;
use distdpu_tests::time::{SOON, wait_for};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a receive.
const ROOM: u64 = 16 << 10;
/// Receives that are posted.
const RECEIVES: u64 = 32;
/// Messages on the way at the most.
const BATCH: u64 = 8;
/// Global routing header in front of a datagram.
const GRH: usize = 40;
/// What `Mlx5::to_init` sets.
const QKEY: u32 = 0x1111_1111;

/// What one guest sends the other.
struct Messages {
    service: Service,
    random: Random,
    sent: u64,
    received: u64,
    /// Receives in the order in which they were posted, by their counter.
    posted: u64,
}

impl Messages {
    fn post_receive(&mut self, b: &mut Side) {
        let at = b.buffer.address + self.posted % RECEIVES * ROOM;
        b.qp.post_receive(b.buffer.key, at, ROOM as u32).unwrap();
        self.posted += 1;
    }

    /// Sends some; each request completes once.
    fn send(&mut self, a: &mut Side, b: &Side) {
        let count = 1 + self.random.below(BATCH);
        for slot in 0..count {
            self.sent += 1;
            let (len, send) = match self.service {
                // One packet, and parts of several.
                Service::Ud => (2000, Send::Datagram(b.driver.lid, b.qp.number, QKEY)),
                _ => (ROOM, Send::Send(None)),
            };
            let len = 8 + self.random.below(len - 8);
            let mut data = self.sent.to_le_bytes().to_vec();
            data.extend(pattern(self.sent, len as u32 - 8));
            let at = a.buffer.address + slot * ROOM;
            a.driver.memory.write(at, &data).unwrap();
            let segment = [(a.buffer.key, at, len as u32)];
            a.qp.post_send(send, &segment, true).unwrap();
        }
        a.driver.ring(&mut a.qp).unwrap();
        for _ in 0..count {
            assert_eq!(a.sends.wait().unwrap().opcode, 0);
        }
        assert_eq!(a.sends.poll().unwrap(), None, "a completion twice");
    }

    /// Takes what has arrived.
    fn receive(&mut self, b: &mut Side) {
        while let Some(cqe) = b.receives.poll().unwrap() {
            assert_eq!(cqe.opcode, 2, "{cqe:?}");
            let at = u64::from(cqe.counter) % RECEIVES * ROOM;
            let bytes = b.bytes(at, cqe.len as usize);
            let message = match self.service {
                Service::Ud => &bytes[GRH..],
                _ => &bytes[..],
            };
            let (number, rest) = message.split_first_chunk().unwrap();
            let number = u64::from_le_bytes(*number);
            assert!(number <= self.sent, "{number} of {}", self.sent);
            assert!(rest == pattern(number, rest.len() as u32), "{number}");
            self.received += 1;
            self.post_receive(b);
        }
    }
}

fn survives(service: Service) {
    let Pair { mut a, mut b, dpu } = Pair::new(service);
    let mut messages = Messages {
        service,
        random: Random(55),
        sent: 0,
        received: 0,
        posted: 0,
    };
    for _ in 0..RECEIVES {
        messages.post_receive(&mut b);
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (dpu, stop) = (&dpu, &stop);
        scope.spawn(move || {
            let _stop = Stop(stop);
            kill_in_turn(dpu, kills(200) / 8, 56);
        });
        while !stop.load(Ordering::Relaxed) {
            messages.send(&mut a, &b);
            messages.receive(&mut b);
        }
    });
    let before = messages.received;
    println!("{} sent, {before} received", messages.sent);
    wait_for("a message behind the last kill", SOON, || {
        messages.send(&mut a, &b);
        messages.receive(&mut b);
        (messages.received > before + 100).then_some(())
    })
    .unwrap();
    assert!(before > messages.sent / 2, "{before} arrived");
}

#[test]
fn datagrams_go_on_when_their_em_was_killed() {
    survives(Service::Ud);
}

#[test]
fn an_unreliable_connection_goes_on_when_its_em_was_killed() {
    survives(Service::Uc);
}
