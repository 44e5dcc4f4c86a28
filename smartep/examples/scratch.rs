//! A function with nothing behind it but memory, to try a client against:
//!
//! ```text
//! cargo run -p smartep --example scratch -- /tmp/scratch.sock
//! qemu-system-x86_64 -M q35,memory-backend=m -m 256M -object memory-backend-memfd,id=m,size=256M,share=on \
//!   -device '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"/tmp/scratch.sock"}}' -monitor stdio
//! ```
//!
//! BAR0 is 16 KiB of trapped memory. A 32-bit write to its offset 0x3000 raises the MSI-X vector of that number; one
//! to 0x3008 reads 16 bytes of the 32-bit guest address written, by a DMA message, and prints them. BAR2 is a memfd
//! that the client maps, but for the page of the MSI-X table.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, PoisonError};

use dot_iommu::{DotTable, HostMapping};
use smartep::config::{BarKind, BarSpec, Capability, ConfigBuilder, ConfigState};
use smartep::dma::MessageDma;
use smartep::function::{FunctionInfo, RegionInfo, RegionMmap};
use smartep::irq::Irqs;
use smartep::model::LocalControl;
use smartep::route::RouteTable;
use smartep::server::{Server, StopFd};
use smartep::{CONFIG_REGION, DataSide};

const BAR0: u64 = 0x4000;
const BAR2: u64 = 0x8000;
const VECTORS: u16 = 8;
const RAISE: u64 = 0x3000;
const DMA: u64 = 0x3008;

struct Scratch {
    memory: Mutex<Vec<u8>>,
    irqs: Arc<Irqs>,
    table: Arc<DotTable>,
    dma: Mutex<Option<Arc<MessageDma>>>,
}

impl Scratch {
    fn command(&self, offset: u64, value: u32) {
        match offset {
            RAISE => println!("vector {value}: {}", self.irqs.trigger(value as u16)),
            DMA => {
                let dma = self.dma.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(dma) = &*dma {
                    let done = Box::new(move |read| println!("{value:#x}: {read:02x?}"));
                    dma.submit_read(value.into(), 16, done);
                }
            }
            _ => {}
        }
    }
}

impl DataSide for Scratch {
    fn read(&self, _region: u32, offset: u64, data: &mut [u8]) {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        for (byte, value) in data.iter_mut().zip(memory.iter().skip(offset as usize)) {
            *byte = *value;
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        println!("write region {region} at {offset:#x}: {data:02x?}");
        {
            let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
            let place = memory.iter_mut().skip(offset as usize);
            place.zip(data).for_each(|(place, byte)| *place = *byte);
        }
        if let (0, Ok(value)) = (region, <[u8; 4]>::try_from(data)) {
            self.command(offset, u32::from_le_bytes(value));
        }
    }

    fn config_changed(&self, _old: ConfigState, new: ConfigState) {
        println!("{new:?}");
    }

    fn reset(&self) {
        println!("reset");
    }

    fn connected(&self, dma: Arc<MessageDma>) {
        println!("connected, DMA messages: {}", dma.is_usable());
        *self.dma.lock().unwrap_or_else(PoisonError::into_inner) = Some(dma);
    }

    fn disconnected(&self) {
        let ranges = self.table.ranges();
        let mapped = ranges.iter().filter(|r| r.mapped).count();
        println!(
            "disconnected with {mapped} of {} ranges mapped",
            ranges.len()
        );
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: scratch SOCKET")?;
    let listener = UnixListener::bind(path)?;
    let bar2 = HostMapping::memfd(BAR2)?;
    rustix::io::pwrite(bar2.as_fd(), b"mapped memory", 0)?;
    let mapped = RegionInfo {
        mmap: Some(RegionMmap {
            fd: bar2,
            offset: 0,
            areas: vec![(0, 0x4000), (0x5000, 0x3000)],
        }),
        ..RegionInfo::trapped(2, BAR2)
    };
    let regions = vec![
        RegionInfo::trapped(0, BAR0),
        mapped,
        RegionInfo::trapped(CONFIG_REGION, 4096),
    ];
    let info = FunctionInfo::new(regions, RouteTable::default(), VECTORS)?;

    let bar = |size| {
        Some(BarSpec {
            size,
            kind: BarKind::Mem64,
            prefetchable: false,
        })
    };
    let config = ConfigBuilder {
        vendor: 0x1b36,
        device: 0x0099,
        class: 0xff_0000,
        bars: [bar(BAR0), None, bar(BAR2), None, None, None],
        capabilities: vec![
            Capability::PciExpress,
            Capability::PowerManagement,
            Capability::MsiX {
                vectors: VECTORS,
                table_bar: 2,
                table_offset: 0x4000,
                pba_bar: 2,
                pba_offset: 0x4800,
            },
        ],
        ..Default::default()
    };
    let control = LocalControl::new(config.build()?, Vec::new(), None);
    let (table, irqs) = (Arc::new(DotTable::new()), Irqs::new(VECTORS));
    let data = Arc::new(Scratch {
        memory: Mutex::new(vec![0; BAR2 as usize]),
        irqs: irqs.clone(),
        table: table.clone(),
        dma: Mutex::new(None),
    });
    Server::new(info, table, irqs, Box::new(control), data).run(&listener, &StopFd::new()?)?;
    Ok(())
}
