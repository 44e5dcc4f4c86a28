//! Windows that come and go while transfers use them: nothing touches the memory after the guest's write is answered.

use super::windows::{BAR, Rig, kill_now, register};
use crate::recovery::{LIVES, kills};
use distdpu_tests::mlx5::Send;

/// How often; `DISTDPU_REVOCATIONS` says otherwise.
fn times() -> usize {
    let wanted = std::env::var("DISTDPU_REVOCATIONS").ok();
    wanted.and_then(|text| text.parse().ok()).unwrap_or(1000)
}

/// Bytes of each request, and how many are posted at once.
const BYTES: u32 = 1 << 20;
const POSTED: usize = 8;

/// What is done to the device's memory function while requests run.
#[derive(Debug, Clone, Copy)]
enum Revocation {
    DecodeOff,
    Move,
    Reset,
}

/// Where a request's own memory is: key and address.
type Local = (u32, u64);

/// Requests of side A that write the first part of the region over and over, or read it over and over.
fn post(rig: &mut Rig, local: Local, round: usize) {
    let key = rig.key[1];
    let side = &mut rig.pair.a;
    for n in 0..POSTED {
        let at = BAR + n as u64 % 4 * u64::from(BYTES);
        let send = match round % 2 {
            0 => Send::Write(at, key, None),
            _ => Send::Read(at, key),
        };
        let segment = [(local.0, local.1, BYTES)];
        side.qp.post_send(send, &segment, true).unwrap();
    }
    side.driver.ring(&mut side.qp).unwrap();
}

#[test]
fn nothing_touches_the_memory_after_a_revocation_is_acknowledged() {
    let mut rig = Rig::new();
    let (mut failed, mut whole) = (0, 0);
    for round in 0..times() {
        let revocation = match round % 3 {
            0 => Revocation::DecodeOff,
            1 => Revocation::Move,
            _ => Revocation::Reset,
        };
        // Contents of this round alone: what is sent, what is there before, what the guest writes once it has the
        // answer.
        let [sent, before, after] = [0, 1, 2].map(|n| (3 * round + n) as u8);
        let local = rig.pair.a.buffer;
        let memory = &rig.pair.a.driver.memory;
        memory
            .write(local.address, &vec![sent; BYTES as usize])
            .unwrap();
        let all = 4 * BYTES as usize;
        rig.gpu[1].write(0, &vec![before; all]).unwrap();
        post(&mut rig, (local.key, local.address), round);
        // At another point of the transfer each time.
        for _ in 0..round % 40 * 50 {
            std::hint::spin_loop();
        }
        let gpu = &mut rig.gpu[1];
        match revocation {
            Revocation::DecodeOff => gpu.set_decode(false).unwrap(),
            Revocation::Move => gpu.place(BAR + (4 << 30)).unwrap(),
            Revocation::Reset => gpu.reset().unwrap(),
        }
        // The answer is here: from now on the memory is the guest's alone.
        let poison = vec![after; all];
        gpu.write(0, &poison).unwrap();
        let mut errors = 0;
        for _ in 0..POSTED {
            let done = rig.pair.a.sends.wait().unwrap();
            match done.opcode {
                0 => whole += 1,
                _ if errors == 0 => {
                    errors += 1;
                    assert_eq!(done.syndrome, 0x13, "{revocation:?} in round {round}");
                }
                _ => assert_eq!(done.syndrome, 5, "those behind it are flushed"),
            }
        }
        failed += errors;
        assert!(
            rig.gpu[1].bytes(0, all).unwrap() == poison,
            "{revocation:?} in round {round}: written to afterwards"
        );
        assert!(
            !rig.pair.a.bytes(0, BYTES as usize).contains(&after),
            "{revocation:?} in round {round}: read from afterwards"
        );
        if errors != 0 {
            rig.reconnect();
        }
        let gpu = &mut rig.gpu[1];
        gpu.place(BAR).unwrap();
        gpu.set_decode(true).unwrap();
        rig.pair.b.driver.destroy_key(rig.key[1]).unwrap();
        rig.key[1] = register(&mut rig.pair.b, BAR);
    }
    println!("{failed} revocations met requests, {whole} requests were done before");
    assert!(
        failed != 0 && whole != 0,
        "{failed} {whole}: it never came in between"
    );
}

#[test]
fn requests_into_windows_are_done_although_the_ems_are_killed() {
    let mut rig = Rig::new();
    for round in 0..3 * kills(20) {
        let em = ["em0", "em1", "gpu1"][round % 3];
        let fill = vec![round as u8; BYTES as usize];
        // From guest RAM, or from the memory of the guest's own device.
        let buffer = rig.pair.a.buffer;
        rig.pair
            .a
            .driver
            .memory
            .write(buffer.address, &fill)
            .unwrap();
        rig.gpu[0].write(0, &fill).unwrap();
        let local = match round / 3 % 2 {
            0 => (buffer.key, buffer.address),
            _ => (rig.key[0], BAR),
        };
        std::thread::sleep(LIVES);
        post(&mut rig, local, 0);
        kill_now(&rig.pair.dpu, em);
        for _ in 0..POSTED {
            let done = rig.pair.a.sends.wait().unwrap();
            assert_eq!(
                (done.opcode, done.syndrome),
                (0, 0),
                "{em} in round {round}"
            );
        }
        let parts =
            [0, 1, 2, 3].map(|n| rig.gpu[1].bytes(n * fill.len() as u64, fill.len()).unwrap());
        assert!(parts.iter().all(|part| *part == fill), "round {round}");
    }
}
