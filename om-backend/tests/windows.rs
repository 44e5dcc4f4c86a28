//! Windows onto the memory of a VM's devices, by an OM whose EMs the test plays.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake_em;

use fake_em::{FakeEm, LONG, Told, query};
use m2m_fabric::keeper::{Keeper, Key};
use m2m_fabric::proto::{
    ControlAddress, FunctionKind, RdmaRequest, Request as EmRequest, WindowSpec,
};
use om_backend::Om;
use om_backend::config::Config;
use om_backend::northbound::protocol::Request;
use om_backend::northbound::view::Functions;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

const MIB: u64 = 1 << 20;
/// Ids of the functions, which count up in the order of the file.
const RDMA: u32 = 0;
const MEMORY: u32 = 2;

/// `em0` with RDMA function 0 of `vm0`, `em1` with RDMA function 1 of no VM, `gpu` with memory function 2 of `vm0`.
fn start(dir: &Path) -> Om {
    let mut text = format!(
        "[dpu]\nrun_dir = \"{}\"\n[[network]]\nname = \"blue\"\n",
        dir.display()
    );
    for (n, vm) in ["vm = \"vm0\"", ""].iter().enumerate() {
        text += &format!(
            "[[em]]\nname = \"em{n}\"\nmanaged = false\n[[em.function]]\nname = \"rdma{n}\"\n\
             kind = \"rdma\"\nmac = \"02:00:00:00:00:{n:02x}\"\nnetwork = \"blue\"\n{vm}\n"
        );
    }
    text += "[[em]]\nname = \"gpu\"\nmanaged = false\n[[em.function]]\nname = \"gpu0\"\n\
             kind = \"memory\"\nvm = \"vm0\"\nsize_mib = 64\n";
    Om::start(Config::parse("test", &text).unwrap()).unwrap()
}

/// What an EM gives the keeper when it gets a memory function.
fn keep_memory(em: &FakeEm) -> Keeper {
    let fds = em.wait(|told| match told {
        Told::Request(EmRequest::AddFunction(_), fds) => Some(fds),
        _ => None,
    });
    let [_, _, socket] = <[OwnedFd; 3]>::try_from(fds).unwrap();
    let (keeper, _) = Keeper::attach(socket).unwrap();
    let file = OwnedFd::from(tempfile::tempfile().unwrap());
    assert!(keeper.keep(Key::BAR, file.as_fd()));
    keeper
}

fn write(em: &FakeEm, offset: u32, value: u32) {
    let address = ControlAddress {
        function: MEMORY,
        region: 7,
        offset,
    };
    let registers = em.fabric.registers();
    let address = address.to_bits().unwrap();
    registers.write(address, 15, value, LONG).unwrap();
}

fn place(em: &FakeEm, address: u64) {
    write(em, 0x1c, (address >> 32) as u32);
    write(em, 0x18, address as u32);
}

/// The next news; that windows of another OM are gone comes some time later.
fn news(em: &FakeEm) -> RdmaRequest {
    em.wait(|told| match told {
        Told::Request(
            EmRequest::Rdma(
                RdmaRequest::WindowGone { device: None, .. } | RdmaRequest::WindowsGiven { .. },
            ),
            _,
        ) => None,
        Told::Request(EmRequest::Rdma(request), fds) => {
            let window = matches!(request, RdmaRequest::Window { .. });
            assert_eq!(fds.len(), usize::from(window));
            Some(request)
        }
        _ => None,
    })
}

fn window(generation: u64, start: u64) -> RdmaRequest {
    let window = WindowSpec {
        device: MEMORY,
        generation,
        start,
        len: 64 * MIB,
        offset: 0,
    };
    RdmaRequest::Window {
        function: RDMA,
        window,
    }
}

fn gone(generation: u64) -> RdmaRequest {
    RdmaRequest::WindowGone {
        function: RDMA,
        device: Some(MEMORY),
        generation,
    }
}

#[test]
fn the_ems_of_a_vm_s_rdma_functions_hear_where_its_device_s_memory_is() {
    let dir = tempfile::tempdir().unwrap();
    let om = start(dir.path());
    let em0 = FakeEm::join(&om, "em0");
    let em1 = FakeEm::join(&om, "em1");
    let gpu = FakeEm::join(&om, "gpu");
    let _keeper = keep_memory(&gpu);
    place(&gpu, 1 << 38);
    write(&gpu, 4, 2);
    assert_eq!(news(&em0), window(1, 1 << 38));
    let functions: Functions = query(&om, &Request::Functions);
    let view = functions.functions[MEMORY as usize].memory.clone().unwrap();
    assert_eq!(view.window.as_deref(), Some("0x4000000000"));
    // Another address: gone there first.
    write(&gpu, 0x1c, 0x41);
    assert_eq!([news(&em0), news(&em0)], [gone(1), window(2, 0x41 << 32)]);
    write(&gpu, 4, 0);
    assert_eq!(news(&em0), gone(2));
    write(&gpu, 4, 2);
    assert_eq!(news(&em0), window(3, 0x41 << 32));
    // A reset.
    let reset = ControlAddress {
        function: MEMORY,
        region: ControlAddress::RESET_REGION,
        offset: 0,
    };
    let registers = gpu.fabric.registers();
    let reset = reset.to_bits().unwrap();
    registers.write(reset, 15, 1, LONG).unwrap();
    assert_eq!(news(&em0), gone(3));
    drop(om);
    // Whoever is not of the VM heard nothing.
    let mut heard = 0;
    em1.wait(|told| {
        heard += usize::from(matches!(
            told,
            Told::Request(
                EmRequest::Rdma(RdmaRequest::Window { .. } | RdmaRequest::WindowGone { .. }),
                _
            )
        ));
        matches!(told, Told::Down).then_some(())
    });
    assert_eq!(heard, 0);
}

#[test]
fn an_rdma_em_that_returns_gets_the_windows_that_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let om = start(dir.path());
    let gpu = FakeEm::join(&om, "gpu");
    let _keeper = keep_memory(&gpu);
    place(&gpu, 1 << 38);
    write(&gpu, 4, 2);
    for _ in 0..2 {
        let em0 = FakeEm::join_again(&om, "em0");
        let windows = em0.wait(|told| match told {
            Told::Request(EmRequest::AddFunction(spec), _) => match spec.kind {
                FunctionKind::Rdma(rdma) => Some(rdma.windows),
                _ => None,
            },
            _ => None,
        });
        assert!(windows, "it waits for them");
        assert_eq!(news(&em0), window(1, 1 << 38));
        em0.wait(|told| match told {
            Told::Request(EmRequest::Rdma(RdmaRequest::WindowsGiven { function }), _) => {
                assert_eq!(function, RDMA);
                Some(())
            }
            _ => None,
        });
    }
}
