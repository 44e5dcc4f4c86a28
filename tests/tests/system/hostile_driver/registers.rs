//! Registers written out of turn, out of range and in every shape.

use super::{Seen, case, run};
use distdpu_tests::virtio_net::VirtioNet;
use distdpu_tests::virtio_net::features::{LINUX, common, status};
use distdpu_tests::wire;

#[test]
fn registers_written_out_of_turn() {
    use Seen::Nothing;
    fn select(a: &mut VirtioNet, queue: u16) {
        a.write_common(common::QUEUE_SELECT, &queue.to_le_bytes())
            .unwrap();
    }
    let cases = [
        case("every field of queue 65535", Nothing, |a| {
            select(a, 0xffff);
            assert_eq!(
                a.read_common16(common::QUEUE_SIZE).unwrap(),
                0,
                "virtio 1.3 §4.1.4.3.1"
            );
            for offset in (common::QUEUE_SIZE..0x40).step_by(2) {
                a.read_common16(offset).unwrap();
                a.write_common(offset, &[0xff; 2]).unwrap();
            }
        }),
        case("the first queue that does not exist", Nothing, |a| {
            select(a, 3);
            assert_eq!(a.read_common16(common::QUEUE_SIZE).unwrap(), 0);
            a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            a.notify(3).unwrap();
        }),
        case("a vector that does not exist", Nothing, |a| {
            select(a, 0);
            a.write_common(common::QUEUE_VECTOR, &0x7000u16.to_le_bytes())
                .unwrap();
            assert_eq!(
                a.read_common16(common::QUEUE_VECTOR).unwrap(),
                0xffff,
                "virtio 1.3 §4.1.5.1.2.1"
            );
            a.write_common(common::CONFIG_VECTOR, &0x7000u16.to_le_bytes())
                .unwrap();
            assert_eq!(a.read_common16(common::CONFIG_VECTOR).unwrap(), 0xffff);
        }),
        case("queue sizes that are none", Nothing, |a| {
            a.negotiate(LINUX).unwrap();
            for size in [0u16, 3, 257, 0x8000, 0xffff] {
                select(a, 0);
                a.write_common(common::QUEUE_SIZE, &size.to_le_bytes())
                    .unwrap();
                a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            }
            a.set_status(15).unwrap();
            a.notify(0).unwrap();
        }),
        case("queues enabled without addresses", Nothing, |a| {
            a.negotiate(LINUX).unwrap();
            for queue in 0..3 {
                select(a, queue);
                a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            }
            a.set_status(15).unwrap();
            for queue in 0..3 {
                a.notify(queue).unwrap();
            }
        }),
        case("rings at the end of the address space", Nothing, |a| {
            a.negotiate(LINUX).unwrap();
            for queue in 0..3 {
                select(a, queue);
                for offset in [
                    common::QUEUE_DESCRIPTORS,
                    common::QUEUE_AVAILABLE,
                    common::QUEUE_USED,
                ] {
                    a.write_common(offset, &(u64::MAX - 15).to_le_bytes())
                        .unwrap();
                }
                a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            }
            a.set_status(15).unwrap();
            for queue in 0..3 {
                a.notify(queue).unwrap();
            }
        }),
        case("rings at odd addresses", Nothing, |a| {
            a.negotiate(LINUX).unwrap();
            let at = a.memory.first() + 4096 + 1;
            for queue in 0..3 {
                select(a, queue);
                for offset in [
                    common::QUEUE_DESCRIPTORS,
                    common::QUEUE_AVAILABLE,
                    common::QUEUE_USED,
                ] {
                    a.write_common(offset, &at.to_le_bytes()).unwrap();
                }
                a.write_common(common::QUEUE_ENABLE, &[1, 0]).unwrap();
            }
            a.set_status(15).unwrap();
            for queue in 0..3 {
                a.notify(queue).unwrap();
            }
        }),
        case(
            "ring addresses changed while the queue runs",
            Nothing,
            |a| {
                for queue in 0..3 {
                    select(a, queue);
                    a.write_common(common::QUEUE_DESCRIPTORS, &[0xff; 8])
                        .unwrap();
                    a.write_common(common::QUEUE_USED, &[0x10; 8]).unwrap();
                    a.notify(queue).unwrap();
                }
            },
        ),
        case("DRIVER_OK out of nothing", Nothing, |a| {
            a.reset().unwrap();
            a.set_status(status::DRIVER_OK).unwrap();
            a.notify(0).unwrap();
            a.notify(1).unwrap();
        }),
        case("features changed while running", Nothing, |a| {
            a.accept(u64::MAX).unwrap();
            a.accept(0).unwrap();
        }),
        case(
            "accesses of every size and alignment to every register",
            Nothing,
            |a| {
                for offset in 0..0x48 {
                    // Without the status: the case is about the shapes.
                    for len in [1, 2, 4, 8] {
                        let mut data = vec![0; len];
                        a.read_common(offset, &mut data).unwrap();
                        if !(offset..offset + len as u64).contains(&common::DEVICE_STATUS) {
                            a.write_common(offset, &data).unwrap();
                        }
                    }
                }
            },
        ),
        case(
            "writes to the device configuration and the interrupt status",
            Nothing,
            |a| {
                let v = a.pci.virtio;
                for offset in 0..64 {
                    a.vmm
                        .write(
                            v.device.bar.into(),
                            u64::from(v.device.offset) + offset,
                            &[0xff; 4],
                        )
                        .unwrap();
                    a.vmm
                        .write(v.isr.bar.into(), u64::from(v.isr.offset), &[0xff])
                        .unwrap();
                }
                assert!(a.link_up().unwrap(), "link status is read-only");
            },
        ),
        case("kicks of queues that do not exist", Nothing, |a| {
            let notify = a.pci.virtio.notify;
            for offset in (0..u64::from(notify.len) - 8).step_by(26) {
                for len in [1, 2, 4, 8] {
                    let at = u64::from(notify.offset) + offset;
                    a.vmm
                        .write(notify.bar.into(), at, &vec![0xee; len])
                        .unwrap();
                }
            }
        }),
        case(
            "the rings' memory taken away while the queues run",
            Nothing,
            |a| {
                let range = *a.memory.ranges().next().unwrap();
                a.vmm.unmap(range.address, range.len).unwrap();
                for queue in 0..3 {
                    a.notify(queue).unwrap();
                }
                a.status().unwrap();
                a.vmm.map(&a.memory.clone(), &range).unwrap();
            },
        ),
        case(
            "interrupts taken away and given back while frames arrive",
            Nothing,
            |a| {
                for _ in 0..50 {
                    a.vmm
                        .set_irqs(wire::IRQ_MSIX, wire::IRQ_NONE_TRIGGER, 0, 0, &[])
                        .unwrap();
                    a.vmm
                        .set_irqs(wire::IRQ_MSIX, wire::IRQ_EVENTFD_TRIGGER, 0, 1, &[])
                        .unwrap();
                    a.notify(1).unwrap();
                }
                a.vmm
                    .set_irqs(wire::IRQ_MSIX, wire::IRQ_NONE_TRIGGER, 0, 0, &[])
                    .unwrap();
                a.switch_on().unwrap();
            },
        ),
    ];
    run(&cases, |a| {
        a.transmit_rings
            .first()
            .map_or(0, |r| r.used_index().unwrap_or(0))
    });
}
