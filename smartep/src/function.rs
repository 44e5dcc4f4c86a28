//! A function as the vfio-user server describes it to its client.

use std::os::fd::OwnedFd;

use thiserror::Error;

use crate::{CONFIG_REGION, route::RouteTable, window::ConfigWindow};

/// Regions that a client asks about: six BARs, ROM, configuration space, VGA.
pub const NUM_REGIONS: u32 = 9;

/// Memory behind a region that the client may map.
#[derive(Debug)]
pub struct RegionMmap {
    /// The memfd.
    pub fd: OwnedFd,
    /// Offset of the region in the memfd, a multiple of 4096.
    pub offset: u64,
    /// Parts that may be mapped, as (offset in the region, bytes), page-aligned and without overlap. Empty: the
    /// whole region.
    pub areas: Vec<(u64, u64)>,
}

/// One region.
#[derive(Debug)]
pub struct RegionInfo {
    /// vfio region index, below [`NUM_REGIONS`].
    pub index: u32,
    /// Bytes.
    pub size: u64,
    /// May be read.
    pub readable: bool,
    /// May be written.
    pub writable: bool,
    /// Memory that the client may map. One such region makes every trapped write of this function wait for its
    /// reply under QEMU.
    pub mmap: Option<RegionMmap>,
}

impl RegionInfo {
    /// A region whose every access is trapped.
    pub fn trapped(index: u32, size: u64) -> Self {
        Self {
            index,
            size,
            readable: true,
            writable: true,
            mmap: None,
        }
    }
}

/// Why a description cannot be served.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FunctionError {
    /// An index is out of range or given twice.
    #[error("region {0} is given twice or out of range")]
    Index(u32),
    /// No configuration space.
    #[error("the function has no configuration space (region 7)")]
    NoConfig,
    /// BAR sizes must be powers of two: QEMU aborts on others.
    #[error("region {0} has {1:#x} bytes; a BAR is a power of two")]
    Size(u32, u64),
    /// An area is misaligned or out of the region.
    #[error("a mappable area of region {0} is not page-aligned or not inside the region")]
    Area(u32),
    /// MSI-X vectors are out of range.
    #[error("{0} MSI-X vectors are not possible; at most 2048 are")]
    Vectors(u16),
}

/// Everything the server tells a client.
#[derive(Debug)]
pub struct FunctionInfo {
    regions: Vec<RegionInfo>,
    routes: RouteTable,
    msix_vectors: u16,
    window: Option<ConfigWindow>,
}

impl FunctionInfo {
    /// Checks a description.
    pub fn new(
        regions: Vec<RegionInfo>,
        routes: RouteTable,
        msix_vectors: u16,
    ) -> Result<Self, FunctionError> {
        for (i, region) in regions.iter().enumerate() {
            let twice = regions.iter().skip(i + 1).any(|r| r.index == region.index);
            if twice || region.index >= NUM_REGIONS {
                return Err(FunctionError::Index(region.index));
            }
            if region.index < 6 && !region.size.is_power_of_two() {
                return Err(FunctionError::Size(region.index, region.size));
            }
            if let Some(mmap) = &region.mmap {
                let mut end = 0;
                for &(offset, len) in &mmap.areas {
                    let last = offset
                        .checked_add(len)
                        .filter(|&l| len > 0 && l <= region.size);
                    if (offset | len | mmap.offset) % 4096 != 0 || offset < end || last.is_none() {
                        return Err(FunctionError::Area(region.index));
                    }
                    end = offset + len;
                }
            }
        }
        if !regions.iter().any(|r| r.index == CONFIG_REGION) {
            return Err(FunctionError::NoConfig);
        }
        if msix_vectors > 2048 {
            return Err(FunctionError::Vectors(msix_vectors));
        }
        Ok(Self {
            regions,
            routes,
            msix_vectors,
            window: None,
        })
    }

    /// The same with a window onto the BARs, whose first register is at `at` of configuration space.
    pub fn with_window(self, at: u64) -> Self {
        Self {
            window: Some(ConfigWindow::new(at)),
            ..self
        }
    }

    /// The window onto the BARs as after power-on, when there is one.
    pub fn window(&self) -> Option<&ConfigWindow> {
        self.window.as_ref()
    }

    /// A region that exists.
    pub fn region(&self, index: u32) -> Option<&RegionInfo> {
        self.regions.iter().find(|r| r.index == index)
    }

    /// Which side answers which bytes.
    pub fn routes(&self) -> &RouteTable {
        &self.routes
    }

    /// MSI-X vectors offered.
    pub fn msix_vectors(&self) -> u16 {
        self.msix_vectors
    }
}
