//! Windows that come and go while transfers use them: nothing touches the memory after the guest's write is answered.

use super::windows::{BAR, Rig, register};
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

/// Requests of side A that write all of the region over and over, and read it back over and over.
fn post(rig: &mut Rig, round: usize) {
    let (local, key) = (rig.pair.a.buffer, rig.key[1]);
    let side = &mut rig.pair.a;
    for n in 0..POSTED {
        let at = BAR + n as u64 % 4 * u64::from(BYTES);
        let send = match round % 2 {
            0 => Send::Write(at, key, None),
            _ => Send::Read(at, key),
        };
        let segment = [(local.key, local.address, BYTES)];
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
        // What a late write would leave behind is told from what is there.
        let fill = [round as u8 | 1; 4096];
        rig.pair
            .a
            .driver
            .memory
            .write(rig.pair.a.buffer.address, &fill)
            .unwrap();
        post(&mut rig, round);
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
        let poison = vec![0xa5; 4 * BYTES as usize];
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
        let after = rig.gpu[1].bytes(0, poison.len()).unwrap();
        assert!(
            after == poison,
            "{revocation:?} in round {round}: written to afterwards"
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
