//! A driver that says anything: what is refused, and that the device, its EM and the peer live on.

use super::{Pair, Side, plan};
use distdpu_tests::dpu::{Dpu, RdmaFace};
use distdpu_tests::erdma::{Request, Send, command, regs};
use distdpu_tests::virtio_net::Guest;

const COMMANDS: [(u8, u8); 21] = [
    command::QUERY_DEVICE,
    command::CREATE_QP,
    command::DESTROY_QP,
    command::MODIFY_QP,
    command::CREATE_CQ,
    command::DESTROY_CQ,
    command::REFLUSH,
    command::REG_MR,
    command::DEREG_MR,
    command::SET_GID,
    command::CREATE_AH,
    command::DESTROY_AH,
    command::QUERY_QP,
    command::CREATE_EQ,
    command::DESTROY_EQ,
    command::QUERY_FW_INFO,
    command::CONF_MTU,
    command::GET_STATS,
    command::CONF_DEVICE,
    command::ALLOC_DB,
    command::FREE_DB,
];

/// Pseudo-random numbers (xorshift), the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Words that are often at a limit.
    fn word(&mut self) -> u32 {
        match self.next() % 6 {
            0 => 0,
            1 => u32::MAX,
            2 => 1 << (self.next() % 32),
            3 => (1u32 << (self.next() % 32)).wrapping_sub(1),
            4 => (self.next() % 300) as u32,
            _ => self.next() as u32,
        }
    }
}

/// The device works after a reset, its EM is the same, and the other guest's works.
fn survives(pair: Pair, pids: &[u32]) {
    let Pair { mut a, b, dpu } = pair;
    a.driver.reset().unwrap();
    a.driver.memory.free_all();
    let a = Side::of(a.driver, 0, true);
    let mut pair = Pair { a, b, dpu };
    let b = &mut pair.b;
    b.driver.destroy_qp(&b.qp).unwrap();
    b.qp = b
        .driver
        .create_qp(plan(b.pd, true), &b.sends, &b.receives)
        .unwrap();
    pair.connect();
    pair.works();
    assert_eq!(self::pids(&pair.dpu), pids);
}

fn pids(dpu: &Dpu) -> Vec<u32> {
    [0, 1].map(|em| dpu.em_pid(em).unwrap()).to_vec()
}

#[test]
fn every_command_with_every_bit_set_is_answered() {
    let pair = Pair::new(true);
    let before = pids(&pair.dpu);
    let mut pair = pair;
    for what in COMMANDS {
        for fill in [0xff, 0x55, 0xaa, 0] {
            let request = Request::new(what).bytes(8, &[fill; 120]);
            pair.a.driver.execute(&request).unwrap();
        }
    }
    survives(pair, &before);
}

#[test]
fn commands_with_any_numbers_are_answered() {
    let mut pair = Pair::new(true);
    let before = pids(&pair.dpu);
    let mut numbers = Numbers(0x1234_5678_9abc_def1);
    for round in 0..4000 {
        let what = COMMANDS[(numbers.next() % COMMANDS.len() as u64) as usize];
        // An end of the queue that the commands themselves need is no answer.
        if what == command::DESTROY_EQ || what == command::GET_STATS || what == command::CREATE_EQ {
            continue;
        }
        let mut request = Request::new(what);
        for at in (8..128).step_by(4) {
            request = request.word(at, numbers.word());
        }
        if let Err(e) = pair.a.driver.execute(&request) {
            panic!("round {round}, {request:x?}: {e}");
        }
    }
    survives(pair, &before);
}

#[test]
fn queues_that_are_nowhere_are_refused_or_harm_nobody() {
    let mut pair = Pair::new(true);
    let before = pids(&pair.dpu);
    for address in [0, 1 << 40, u64::MAX - 63, 0xffff_ffff_ffff_f000] {
        let cq = Request::new(command::CREATE_CQ)
            .word(8, 6 << 24 | 100)
            .long(12, address)
            .word(20, 1 << 16 | 1)
            .long(24, address);
        let _ = pair.a.driver.execute(&cq).unwrap();
        let destroy = Request::new(command::DESTROY_CQ).word(8, 100);
        let _ = pair.a.driver.execute(&destroy).unwrap();
        let qp = Request::new(command::CREATE_QP)
            .word(8, 8 << 20 | 100)
            .word(12, 8 << 20 | 1)
            .word(16, 8 << 28 | pair.a.sends.number)
            .word(20, 8 << 28 | pair.a.receives.number)
            .long(24, address)
            .long(32, address)
            .word(40, 2)
            .word(44, 2)
            .long(48, address)
            .long(56, address);
        let made = pair.a.driver.execute(&qp).unwrap().syndrome == 0;
        for state in [1, 2, 3].into_iter().filter(|_| made) {
            let request = Request::new(command::MODIFY_QP)
                .word(8, state << 24 | 100)
                .word(16, 1);
            let _ = pair.a.driver.execute(&request).unwrap();
        }
        for (page, value) in [
            (0x5f000 + 4 * 128, 100u64 << 32 | 7),
            (0x61000 + 100 * 32, 100 << 32 | 7),
        ] {
            pair.a.driver.ring_at(page, value).unwrap();
        }
        pair.a.driver.statistics().unwrap();
        let destroy = Request::new(command::DESTROY_QP).word(8, 100);
        let _ = pair.a.driver.execute(&destroy).unwrap();
    }
    // Its own queue pair never minded.
    pair.works();
    survives(pair, &before);
}

#[test]
fn doorbells_with_any_value_are_survived() {
    let mut pair = Pair::new(true);
    let before = pids(&pair.dpu);
    let mut numbers = Numbers(0xfeed_beef_1234_5677);
    for _ in 0..3000 {
        let at = match numbers.next() % 4 {
            0 => 0x1000 + numbers.next() % 0x7e000,
            1 => 0x100 + numbers.next() % 0x100,
            2 => 0x5f000 + numbers.next() % 0x1000,
            _ => 0x61000 + numbers.next() % 0x1000,
        } & !7;
        let value = u64::from(numbers.word()) | u64::from(numbers.word()) << 32;
        pair.a.driver.ring_at(at, value).unwrap();
    }
    survives(pair, &before);
}

#[test]
fn registers_with_any_value_are_survived() {
    let mut pair = Pair::new(true);
    let before = pids(&pair.dpu);
    let mut numbers = Numbers(0x0bad_cafe_0bad_cafe);
    for _ in 0..500 {
        let at = numbers.next() % 0x100 * 4;
        pair.a.driver.write32(at, numbers.word()).unwrap();
        let at = numbers.next() % 0x80 * 8;
        pair.a.driver.write64(at, numbers.next()).unwrap();
        for len in [1, 2, 4, 8] {
            let mut data = [0; 8];
            let at = numbers.next() % 0x80000;
            let _ = pair.a.driver.vmm.read(0, at, &mut data[..len]);
        }
    }
    // The queue of commands is gone: the registers say so.
    pair.a.driver.reset().unwrap();
    assert_eq!(pair.a.driver.read32(regs::STATUS).unwrap() & 2, 0);
    survives(pair, &before);
}

#[test]
fn entries_of_any_bytes_end_their_queue_pair_at_most() {
    let mut pair = Pair::new(true);
    let before = pids(&pair.dpu);
    let mut numbers = Numbers(0x77_1234_5678_9abc);
    for _ in 0..150 {
        let a = &mut pair.a;
        let mut qp = a
            .driver
            .create_qp(plan(a.pd, true), &a.sends, &a.receives)
            .unwrap();
        a.driver.to_rtr(&qp, super::path(1), 12345).unwrap();
        a.driver.to_rts(&qp).unwrap();
        let mut body = Vec::new();
        for _ in 0..30 {
            body.extend(numbers.word().to_le_bytes());
        }
        // An opcode and counts of any kind; sometimes also blocks and an index that do not fit.
        let flags = numbers.next();
        let header = match numbers.next() % 3 {
            0 => flags,
            1 => flags & !0xffff | 4,
            _ => {
                flags & !(7 << 52) & !0xffff & !(0xf_ffff << 32)
                    | 3 << 52
                    | u64::from(qp.number) << 32
                    | 4
            }
        };
        qp.write_raw(0, header, &body).unwrap();
        a.driver.ring(&qp).unwrap();
        a.driver.statistics().unwrap();
        a.driver.destroy_qp(&qp).unwrap();
        while a.sends.poll().unwrap().is_some() {}
        a.driver.unexpected_async_events().unwrap();
    }
    for opcode in 0..32 {
        let a = &mut pair.a;
        let mut qp = a
            .driver
            .create_qp(plan(a.pd, true), &a.sends, &a.receives)
            .unwrap();
        a.driver.to_rtr(&qp, super::path(1), 12345).unwrap();
        a.driver.to_rts(&qp).unwrap();
        qp.post_send(Send::Raw(opcode, &[0xff; 120]), &[], true)
            .unwrap();
        a.driver.ring(&qp).unwrap();
        let done = a.sends.wait().unwrap();
        assert_ne!(done.syndrome, 0, "opcode {opcode}: {done:?}");
        a.driver.destroy_qp(&qp).unwrap();
        while a.sends.poll().unwrap().is_some() {}
    }
    pair.works();
    survives(pair, &before);
}

#[test]
fn two_guests_of_one_dpu_are_apart() {
    let dpu = Dpu::start_faces(&[RdmaFace::Erdma; 2], false).unwrap();
    let mut a = Side::new(&dpu, 0, true, Guest::default());
    let b = Side::new(&dpu, 1, true, Guest::default());
    // The same numbers on both sides, and no way to the other's memory but by a connection.
    assert_eq!(a.qp.number, b.qp.number);
    assert_eq!(a.buffer.key, b.buffer.key);
    let own = a.qp.number;
    a.connect(0, own);
    let data = a.fill(1);
    let part = a.part(0, 64);
    a.send(
        Send::Write(a.buffer.address + 4096, a.buffer.key, None),
        &[part],
    );
    a.sends.success().unwrap();
    assert!(a.bytes(4096, 64) == data[..64]);
    assert!(b.bytes(4096, 64) == [0; 64]);
}
