//! The published `vfio_user` client is Cloud Hypervisor's: what works with it works there.

use std::os::fd::AsRawFd;

use super::harness::*;

#[test]
fn cloud_hypervisors_client_gets_through_its_set_up() {
    let served = serve();
    let mut client = vfio_user::Client::new(&served.path).unwrap();
    assert_eq!(client.region(0).unwrap().size, BAR0 as u64);
    assert_eq!(client.region(6).unwrap().size, 0, "no ROM");
    let bar2 = client.region(2).unwrap();
    let areas: Vec<_> = bar2
        .sparse_areas
        .iter()
        .map(|a| (a.offset, a.size))
        .collect();
    assert_eq!(areas, [(0, 0x1000), (0x2000, 0x6000)]);
    assert!(bar2.file_offset.is_some());
    client.reset().unwrap();

    let file = HostFile::new(0x20_0000);
    client.dma_map(0, 0, 0x10_0000, file.0.as_raw_fd()).unwrap();
    client
        .dma_map(0x10_0000, 0x1_0000_0000, 0x10_0000, file.0.as_raw_fd())
        .unwrap();
    assert_eq!(served.table.ranges().len(), 2);

    // BAR sizing by all-ones and read-back, ROM register too.
    for (register, want) in [(0x10, 0xffff_c004u32), (0x18, 0xffff_8004), (0x30, 0)] {
        client.region_write(7, register, &[0xff; 4]).unwrap();
        let mut size = [0; 4];
        client.region_read(7, register, &mut size).unwrap();
        assert_eq!(u32::from_le_bytes(size), want);
    }

    let info = client.get_irq_info(2).unwrap();
    assert_eq!(info.count, u32::from(VECTORS));
    let events: Vec<_> = (0..VECTORS)
        .map(|_| rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap())
        .collect();
    for (i, chunk) in events.chunks(16).enumerate() {
        let raw: Vec<_> = chunk.iter().map(AsRawFd::as_raw_fd).collect();
        client
            .set_irqs(2, 0x24, i as u32 * 16, chunk.len() as u32, &raw)
            .unwrap();
    }
    assert!((0..VECTORS).all(|v| served.irqs.trigger(v)));
    client.set_irqs(2, 0x21, 0, 0, &[]).unwrap();
    assert!(!served.irqs.trigger(0));

    client.region_write(0, 0x10, &[1, 2, 3, 4]).unwrap();
    let mut data = [0; 4];
    client.region_read(0, 0x10, &mut data).unwrap();
    assert_eq!(data, [1, 2, 3, 4]);
    client.dma_unmap(0, 0x10_0000).unwrap();
    assert_eq!(served.table.ranges().len(), 1);
    client.shutdown().unwrap();
}

#[test]
fn its_reads_never_hang_on_an_error() {
    let served = serve();
    let mut client = vfio_user::Client::new(&served.path).unwrap();
    let mut data = [0; 4];
    client.region_read(5, 0, &mut data).unwrap();
    assert_eq!(data, [0xff; 4]);
    client.region_write(5, 0, &data).unwrap();
    client.dma_unmap(0x1234, 1).unwrap();
    client.get_irq_info(77).unwrap();
    client.region_read(7, 0, &mut data).unwrap();
    assert_eq!(data, [0xf4, 0x1a, 0x41, 0x10]);
}
