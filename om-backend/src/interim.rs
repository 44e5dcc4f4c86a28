//! Stand-in for `smartep` with the agreed interface, until that crate has it. Keeps bytes, knows no
//! PCI. Delete with the switch to `smartep`.
#![allow(missing_docs)]

pub mod config {
    #[derive(Debug, Clone)]
    pub struct ConfigBuilder {
        pub vendor: u16,
        pub device: u16,
        pub revision: u8,
        pub class: [u8; 3],
        pub subsystem_vendor: u16,
        pub subsystem: u16,
        pub bars: [Option<BarSpec>; 6],
        pub capabilities: Vec<Capability>,
    }
    #[derive(Debug, Clone)]
    pub struct BarSpec {
        pub size: u64,
        pub kind: BarKind,
        pub prefetchable: bool,
    }
    #[derive(Debug, Clone)]
    pub enum BarKind {
        Mem32,
        Mem64,
        Io,
    }
    #[derive(Debug, Clone)]
    pub enum Capability {
        PciExpress,
        PowerManagement,
        MsiX {
            vectors: u16,
            table_bar: u8,
            table_offset: u32,
            pba_bar: u8,
            pba_offset: u32,
        },
        Vendor(Vec<u8>),
    }
}
