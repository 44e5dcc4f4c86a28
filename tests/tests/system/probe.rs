//! What a guest's PCI core and virtio core see before any frame.

use crate::fixture::{Pair, exchange, flow};
use distdpu_tests::client::{Client, Vmm};
use distdpu_tests::compat::CloudHypervisor;
use distdpu_tests::dpu::{Dpu, Net, mac};
use distdpu_tests::memory::{GuestMemory, Shape};
use distdpu_tests::pci::{self, Function};
use distdpu_tests::virtio_net::features::{self, common, status};
use distdpu_tests::virtio_net::{Guest, Setup, VirtioNet};
use distdpu_tests::wire::{CONFIG_REGION, IRQ_MSIX};
use std::sync::Arc;

fn one() -> (Dpu, Client) {
    let dpu = Dpu::start(&[Net::default(), Net::default()]).unwrap();
    let client = Client::connect(&dpu.socket(0)).unwrap();
    (dpu, client)
}

#[test]
fn config_space_shows_a_modern_virtio_network_function() {
    let (_dpu, mut client) = one();
    let function = Function::probe(&mut client).unwrap();
    assert_eq!((function.vendor, function.device), (0x1af4, 0x1041));
    assert!(function.revision >= 1, "virtio 1.3 §4.1.2.1");
    assert_eq!(function.class >> 8, 0x0200, "Ethernet controller");
    assert_eq!(function.interrupt_pin, 0, "no INTx");
    let ids: Vec<u8> = function.capabilities.iter().map(|c| c.id).collect();
    for wanted in [0x01, 0x09, 0x10, 0x11] {
        assert!(ids.contains(&wanted), "capability {wanted:#x} in {ids:x?}");
    }
    let (flags, regions, irqs) = client.device_info().unwrap();
    assert_eq!(flags & 3, 3, "RESET and PCI");
    assert!(
        regions >= 8 && irqs >= 3,
        "QEMU needs 8 regions and 3 interrupt indices"
    );
    assert_eq!(client.irq_info(0).unwrap().1, 0, "no INTx vector");
    assert_eq!(
        client.irq_info(IRQ_MSIX).unwrap().1,
        u32::from(function.msix.vectors)
    );
    assert!(client.server_capabilities.contains("\"capabilities\""));
}

#[test]
fn bars_have_the_size_that_the_structures_need() {
    let (_dpu, mut client) = one();
    let function = Function::probe(&mut client).unwrap();
    for (index, bar) in function.bars.iter().enumerate() {
        let size = client.region_size(index as u32).unwrap();
        assert_eq!(size, bar.map_or(0, |b| b.size), "region and BAR {index}");
    }
    let v = function.virtio;
    for window in [v.common, v.notify, v.isr, v.device] {
        let bar = function.bars[usize::from(window.bar)].expect("a BAR behind each structure");
        assert!(window.len > 0);
        assert!(
            u64::from(window.offset) + u64::from(window.len) <= bar.size,
            "{window:?}"
        );
    }
    assert!(v.common.len >= 0x38 && v.device.len >= 20 && v.isr.len >= 1);
    assert!(v.notify.offset % 2 == 0 && v.common.offset % 4 == 0 && v.device.offset % 4 == 0);
    let m = function.msix;
    let table = function.bars[usize::from(m.table_bar)].unwrap();
    assert!(u64::from(m.table_offset) + 16 * u64::from(m.vectors) <= table.size);
    assert!(
        m.table_bar != v.common.bar || m.table_offset % 4096 == 0,
        "a page of its own"
    );
    // The address that was written is read back, and only its writable bits stick.
    let bar0 = pci::read32(&mut client, 0x10).unwrap();
    pci::write32(&mut client, 0x10, 0x1234_5678).unwrap();
    let again = pci::read32(&mut client, 0x10).unwrap();
    assert_eq!(again & 0xf, bar0 & 0xf, "type bits are read-only");
    let mask = !(function.bars[0].unwrap().size as u32 - 1);
    assert_eq!(again & !0xf, 0x1234_5678 & mask & !0xf);
}

#[test]
fn read_only_config_registers_stay_as_they_are() {
    let (_dpu, mut client) = one();
    let mut before = [0; 256];
    client.read(CONFIG_REGION, 0, &mut before).unwrap();
    for offset in [0u64, 8, 0x2c, 0x34] {
        pci::write32(&mut client, offset, 0xffff_ffff).unwrap();
    }
    let mut after = [0; 256];
    client.read(CONFIG_REGION, 0, &mut after).unwrap();
    // The byte of the cache line size is writable (PCIe 6.0 §7.5.1.1.7).
    before[0xc] = after[0xc];
    assert_eq!(before[..], after[..]);
    pci::write16(&mut client, 4, 0xffff).unwrap();
    let command = pci::read16(&mut client, 4).unwrap();
    assert_eq!(
        command & 0x0406,
        0x0406,
        "memory, master, INTx disable can be set"
    );
    assert_eq!(command & 0xf800, 0, "reserved bits");
    let mut extended = [0xaa; 4];
    client.read(CONFIG_REGION, 0x100, &mut extended).unwrap();
    assert!(
        extended == [0; 4] || extended[0] != 0xff,
        "no extended capabilities, or real ones"
    );
}

#[test]
fn the_pci_express_capability_offers_function_level_reset() {
    let (_dpu, mut client) = one();
    let function = Function::probe(&mut client).unwrap();
    let pcie = function.capability(0x10).unwrap();
    let device = pci::read32(&mut client, pcie + 4).unwrap();
    assert_ne!(
        device & 1 << 28,
        0,
        "FLR in Device Capabilities {device:#x}"
    );
}

#[test]
fn features_and_device_configuration_are_as_configured() {
    let net = Net {
        mtu: 4000,
        pairs: 3,
        queue_size: 512,
        ..Net::default()
    };
    let mut pair = Pair::with(net, Guest::default());
    let offered = pair.a.offered().unwrap();
    let missing = features::OFFERED & !offered;
    assert_eq!(missing, 0, "bits missing in {offered:#x}");
    assert_eq!(pair.a.mac().unwrap(), mac(0));
    assert_eq!(pair.b.mac().unwrap(), mac(1));
    assert_eq!(pair.a.max_pairs().unwrap(), 3);
    assert!(pair.a.link_up().unwrap());
    let mut tail = [0; 7];
    pair.a.read_device(10, &mut tail).unwrap();
    assert_eq!(u16::from_le_bytes([tail[0], tail[1]]), 4000, "mtu");
    let speed = u32::from_le_bytes([tail[2], tail[3], tail[4], tail[5]]);
    assert!(
        speed == 0xffff_ffff || (1..=0x7fff_ffff).contains(&speed),
        "{speed:#x}"
    );
    assert!([0, 1, 0xff].contains(&tail[6]), "duplex {}", tail[6]);
    assert_eq!(pair.a.read_common16(common::NUM_QUEUES).unwrap(), 7);
    for queue in 0..7u16 {
        pair.a
            .write_common(common::QUEUE_SELECT, &queue.to_le_bytes())
            .unwrap();
        let size = pair.a.read_common16(common::QUEUE_SIZE).unwrap();
        assert!(
            size == 512 || queue == 6 && size.is_power_of_two(),
            "queue {queue}: {size}"
        );
        assert_eq!(pair.a.read_common16(common::QUEUE_ENABLE).unwrap(), 0);
    }
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let mut pair = Pair::new();
    let a = &mut pair.a;
    let begin = |a: &mut VirtioNet, bits| {
        a.reset().unwrap();
        a.set_status(status::ACKNOWLEDGE | status::DRIVER).unwrap();
        a.accept(bits).unwrap();
        a.set_status(status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK)
            .unwrap();
        a.status().unwrap() & status::FEATURES_OK != 0
    };
    let offered = a.offered().unwrap();
    let foreign = 1u64 << (0..64).find(|bit| offered >> bit & 1 == 0).unwrap();
    assert!(
        !begin(a, features::PLAIN | foreign),
        "bit {foreign:#x} was not offered"
    );
    assert!(!begin(a, features::MAC), "a driver without VERSION_1");
    assert!(begin(a, features::PLAIN));
    // After FEATURES_OK the features are settled (virtio 1.3 §2.2.2).
    a.start(Setup::default()).unwrap();
    pair.b.start(Setup::default()).unwrap();
    pair.works();
}

#[test]
fn cloud_hypervisors_client_probes_and_carries_frames() {
    let dpu = Dpu::start(&[Net::default(), Net::default()]).unwrap();
    let mut vmm = CloudHypervisor::connect(&dpu.socket(0)).unwrap();
    assert!(vmm.irq_count(IRQ_MSIX).unwrap() >= 4);
    assert_eq!(vmm.region_size(6).unwrap(), 0, "no ROM");
    let memory = Arc::new(GuestMemory::new(48 << 20, Shape::Split).unwrap());
    let mut a = VirtioNet::attach(Box::new(vmm), memory).unwrap();
    let mut b = VirtioNet::open(&dpu.socket(1), Guest::default()).unwrap();
    a.start(Setup::default()).unwrap();
    b.start(Setup::default()).unwrap();
    exchange(&mut a, &mut b, &flow(0, 1).frame(1514, 1));
    exchange(&mut b, &mut a, &flow(1, 0).frame(9014, 2));
    a.vmm.reset().unwrap();
    a.forget();
    a.switch_on().unwrap();
    a.start(Setup::default()).unwrap();
    exchange(&mut a, &mut b, &flow(0, 1).frame(60, 3));
    for range in a.memory.ranges().copied().collect::<Vec<_>>() {
        a.vmm.unmap(range.address, range.len).unwrap();
    }
}

#[test]
fn reads_of_what_does_not_exist_are_all_ones_or_zero_and_nothing_breaks() {
    let (_dpu, mut client) = one();
    for (region, offset, len) in [(0u32, 0x7ffeu64, 2usize), (2, 0x7000, 8), (7, 0xffc, 4)] {
        let mut data = vec![0x55; len];
        client.read(region, offset, &mut data).unwrap();
        assert!(
            data.iter().all(|b| *b == 0xff || *b == 0),
            "{region} {offset:#x}: {data:x?}"
        );
    }
    client.posted = false;
    for offset in [0x0ffeu64, 0x0e00, 0x7ff0] {
        client.write(0, offset, &[0xff; 2]).unwrap();
    }
    Function::probe(&mut client).unwrap();
}

#[test]
fn a_driver_without_bars_reads_features_and_resets_through_config_space() {
    let mut pair = Pair::started(Setup::default());
    let (pci, vmm) = (pair.a.pci.clone(), pair.a.vmm.as_mut());
    let window = pci.virtio.common;
    let mut offered = 0;
    for half in 0..2u32 {
        let select = common::DEVICE_FEATURE_SELECT as u32;
        pci.write_through_config(vmm, window, select, &half.to_le_bytes())
            .unwrap();
        let mut bits = [0; 4];
        pci.read_through_config(vmm, window, common::DEVICE_FEATURE as u32, &mut bits)
            .unwrap();
        offered |= u64::from(u32::from_le_bytes(bits)) << (32 * half);
    }
    assert_eq!(offered & features::OFFERED, features::OFFERED);
    let mut first = [0; 2];
    pci.read_through_config(vmm, pci.virtio.device, 0, &mut first)
        .unwrap();
    assert_eq!(first, mac(0)[..2], "what the OM answers is behind it too");
    let mut status = [0];
    let at = common::DEVICE_STATUS as u32;
    pci.read_through_config(vmm, window, at, &mut status)
        .unwrap();
    assert_eq!(status[0] & status::DRIVER_OK, status::DRIVER_OK);
    pci.write_through_config(vmm, window, at, &[0]).unwrap();
    pci.read_through_config(vmm, window, at, &mut status)
        .unwrap();
    assert_eq!(status, [0], "the device was reset");
    assert_eq!(pair.a.status().unwrap(), 0, "and the BAR says the same");
    pair.a.forget();
    pair.a.start(Setup::default()).unwrap();
    pair.works();
}

#[test]
fn with_more_queues_than_vectors_the_last_queues_share_one() {
    let net = Net {
        pairs: 32,
        ..Net::default()
    };
    let dpu = Dpu::start(&[net, Net::default()]).unwrap();
    let guest = Guest {
        memory: 256 << 20,
        ..Guest::default()
    };
    let a = VirtioNet::open(&dpu.socket(0), guest).unwrap();
    let b = VirtioNet::open(&dpu.socket(1), Guest::default()).unwrap();
    let mut pair = Pair { a, b, dpu };
    assert_eq!(pair.a.pci.msix.vectors, 64);
    let setup = Setup {
        pairs: 32,
        queue_size: 64,
        receive_buffers: 8,
        ..Setup::default()
    };
    pair.start(setup, Setup::default());
    assert_eq!(pair.a.vector_of(63), pair.a.vector_of(64));
    pair.works();
}
