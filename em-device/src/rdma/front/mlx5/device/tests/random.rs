//! Commands of random bytes: nothing panics, and what they make stays within limits.

use super::super::super::command::{mailbox, opcode};
use super::super::super::nic::FIRST_SQ;
use super::driver::*;
use crate::rdma::front::allowance::MAX_LIST_BYTES;
use crate::testing::BASE;
use m2m_fabric::proto::RdmaLinkLayer;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    /// Mostly zeroes: small numbers get further than others.
    fn bytes(&mut self, len: usize, one_in: u64) -> Vec<u8> {
        let mut byte = || match self.below(one_in) {
            0 if self.below(2) == 0 => self.next() as u8,
            0 => self.below(4) as u8,
            _ => 0,
        };
        (0..len).map(|_| byte()).collect()
    }
}

fn storm(link: RdmaLinkLayer, rounds: u32, seed: u64) {
    let mut driver = Driver::started(link);
    let (pd, cq) = driver.basics();
    let valid = [
        driver.qp_input(0, pd, cq),
        driver.cq_input(1, 4),
        physical_key(pd),
    ];
    let mut random = Random(seed);
    let mut succeeded = 0;
    let mut command = {
        driver.post(0, opcode::NOP, &[], 16);
        let queue = driver.registers.command_queue().unwrap();
        driver.with(|_, cx| mailbox::read_command(queue, 0, cx.memory).unwrap())
    };
    for _ in 0..rounds {
        let which = random.below(opcode::ALL.len() as u64) as usize;
        command.opcode = opcode::ALL[which];
        command.op_mod = random.below(16) as u16;
        command.input = match random.below(3) {
            0 => valid[random.below(3) as usize].clone(),
            _ => {
                let len = 16 + random.below(0x300) as usize;
                let one_in = 1 << random.below(8);
                random.bytes(len, one_in)
            }
        };
        for _ in 0..random.below(4) {
            let at = random.below(command.input.len() as u64) as usize;
            command.input[at] = random.below(256) as u8;
        }
        if random.below(2) == 0 {
            command.input[8..12].copy_from_slice(&[0, 0, 0, random.below(8) as u8]);
        }
        let number = random.below(70) as u32;
        let mut links = std::mem::take(&mut driver.links);
        succeeded += driver.with(|device, cx| {
            device.doorbells.ring_send(number);
            device.doorbells.ring_send(FIRST_SQ + number);
            device.doorbells.ring_cq(number);
            device.doorbells.update_eq(number, number * 77, true);
            let path = device.destination(&command).map(|_| PATH);
            let output = device.execute(&command, path, cx);
            if number == 0 {
                device.turn(cx, &mut links);
            }
            // Unless something is in use most of the time, little is tried.
            let running = device.running();
            if !running {
                command.opcode = opcode::INIT_HCA;
                device.execute(&command, None, cx);
            }
            u32::from(running && output.first() == Some(&0))
        });
        driver.links = links;
        let objects = &driver.device.objects;
        assert!(objects.allowance.used() <= MAX_LIST_BYTES);
        assert!(objects.eqs.len() < 64 && objects.uars.len() < 4096);
    }
    assert!(succeeded > rounds / 20, "{succeeded} of {rounds} succeeded");
}

#[test]
fn random_commands_do_no_harm_on_infiniband() {
    storm(RdmaLinkLayer::Infiniband, 50_000, 0x9e37_79b9);
}

#[test]
fn random_commands_do_no_harm_on_ethernet() {
    storm(RdmaLinkLayer::Ethernet, 50_000, 0x7f4a_7c15);
}

#[test]
fn random_entries_do_no_harm() {
    let mut driver = Driver::started(RdmaLinkLayer::Infiniband);
    let mut random = Random(0x1234_5678);
    let queue = driver.registers.command_queue().unwrap();
    let (mut read, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut entry = random.bytes(64, 4);
        if random.below(4) != 0 {
            entry[0] = 7;
            entry[4..8].copy_from_slice(&[0, 0, random.below(8) as u8, 16]);
            entry[56..60].copy_from_slice(&[0, 0, random.below(8) as u8, 16]);
            let mailbox = BASE + 512 * random.below(9000);
            entry[8..16].copy_from_slice(&mailbox.to_be_bytes());
            entry[48..56].copy_from_slice(&mailbox.to_be_bytes());
        }
        entry[63] |= 1;
        driver.memory.write(queue, &entry);
        driver.with(
            |device, cx| match mailbox::read_command(queue, 0, cx.memory) {
                Ok(command) => {
                    let output = device.execute(&command, None, cx);
                    mailbox::finish_command(&command, &output, cx.memory);
                    read += 1;
                }
                Err(why) => {
                    mailbox::refuse(why, cx.memory);
                    refused += 1;
                }
            },
        );
        assert_eq!(driver.memory.read(queue + 63, 1)[0] & 1, 0, "given back");
    }
    assert!(
        read > 1000 && refused > 1000,
        "{read} read, {refused} refused"
    );
}
