//! A function as the OM keeps it: what it presents, and where it is in its life.

use crate::config::FunctionConfig;
use crate::control::FunctionControl;
use crate::vault::Vault;
use crate::windows::{Placement, Range, Windows};
use m2m_fabric::proto::{FunctionKind, FunctionSpec, FunctionState, Image};
use m2m_fabric::{Fabric, FabricError};
use smartep::shadow::ShadowReader;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

/// One function for as long as the OM lives. Shared by the OM's own thread, which decides, and the
/// threads of the fabric, which answer its EM.
#[derive(Debug)]
pub struct Function {
    /// What the file says.
    pub config: FunctionConfig,
    /// Its EM, by its place in the configuration.
    pub em: usize,
    /// What the EM needs to serve it.
    pub spec: FunctionSpec,
    /// Config space and device configuration.
    pub control: FunctionControl,
    /// The memory of the shadow, which the EM gets.
    pub shadow: OwnedFd,
    /// What outlives its EM.
    pub vault: Vault,
    /// What the functions of its VM share, when there is something.
    pub windows: Option<Windows>,
    placement: Option<Placement>,
    /// Whether the administrator lets the link be up.
    pub admin_up: AtomicBool,
    life: AtomicU8,
    fault: Mutex<Option<String>>,
    /// Whether an EM that does not share the shadow's memory has yet to be told what is in it. Locked while it is.
    untold: Mutex<bool>,
}

/// Where a function is in its life, as the OM sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// No EM serves it.
    Absent,
    /// An EM serves it.
    Served(FunctionState),
}

impl Life {
    /// The word for people and scripts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Served(FunctionState::Waiting) => "waiting",
            Self::Served(FunctionState::Connected) => "connected",
            Self::Served(FunctionState::Running) => "running",
            Self::Served(FunctionState::NeedsReset) => "needs-reset",
        }
    }

    fn to_code(self) -> u8 {
        match self {
            Self::Absent => 0,
            Self::Served(FunctionState::Waiting) => 1,
            Self::Served(FunctionState::Connected) => 2,
            Self::Served(FunctionState::Running) => 3,
            Self::Served(FunctionState::NeedsReset) => 4,
        }
    }

    fn from_code(code: u8) -> Self {
        match code {
            1 => Self::Served(FunctionState::Waiting),
            2 => Self::Served(FunctionState::Connected),
            3 => Self::Served(FunctionState::Running),
            4 => Self::Served(FunctionState::NeedsReset),
            _ => Self::Absent,
        }
    }
}

impl Function {
    /// A function that no EM serves yet.
    pub fn new(
        config: FunctionConfig,
        em: usize,
        spec: FunctionSpec,
        control: FunctionControl,
        shadow: OwnedFd,
        vault: Vault,
        windows: Option<Windows>,
    ) -> Self {
        let placement = match (&spec.kind, &windows) {
            (FunctionKind::Memory(memory), Some(windows)) => {
                Some(Placement::new(windows.clone(), memory.bar, memory.bytes))
            }
            _ => None,
        };
        Self {
            admin_up: AtomicBool::new(config.link_up),
            config,
            em,
            spec,
            control,
            shadow,
            vault,
            windows,
            placement,
            life: AtomicU8::new(Life::Absent.to_code()),
            fault: Mutex::new(None),
            untold: Mutex::new(false),
        }
    }

    /// Id, unique in the DPU.
    pub fn id(&self) -> u32 {
        self.spec.id
    }

    /// What the EM needs to serve it, with the link as the administrator wants it now.
    pub fn current_spec(&self) -> FunctionSpec {
        let mut spec = self.spec.clone();
        if let FunctionKind::Rdma(rdma) = &mut spec.kind {
            rdma.link_up = self.admin_up.load(Ordering::Acquire);
            rdma.windows = self.windows.is_some();
        }
        spec
    }

    /// Config space may have changed. Returns when nobody uses memory where the guest does not have it any more.
    pub fn follow(&self) {
        if let Some(placement) = &self.placement {
            placement.follow(self.id(), &self.control, &self.vault);
        }
    }

    /// As [`Self::follow`], without waiting.
    pub fn follow_later(&self) {
        if let Some(placement) = &self.placement {
            placement.tell(self.id(), &self.control, &self.vault);
        }
    }

    /// Tells its EM what it presents, if the EM does not share the shadow's memory. An EM that does not take it now has
    /// to be told again, see [`Self::show_again`].
    pub fn show(&self, fabric: &dyn Fabric) {
        if fabric.carries_fds() {
            return;
        }
        // Locked, so that what is read later is sent later.
        let mut untold = self.untold.lock().unwrap_or_else(PoisonError::into_inner);
        let shadow = ShadowReader::new(&self.shadow).ok();
        let Some(bytes) = shadow.and_then(|shadow| shadow.image()) else {
            log::error!("what {} presents cannot be read", self.config.name);
            return;
        };
        let function = self.id();
        let shown = fabric.show(Image { function, bytes });
        *untold = matches!(shown, Err(FabricError::Full));
    }

    /// As [`Self::show`], if the EM did not take it before.
    pub fn show_again(&self, fabric: &dyn Fabric) {
        let untold = *self.untold.lock().unwrap_or_else(PoisonError::into_inner);
        if untold {
            self.show(fabric);
        }
    }

    /// Where the memory of a memory function is for the RDMA functions of its VM.
    pub fn placed(&self) -> Option<Range> {
        self.placement.as_ref()?.range()
    }

    /// Where it is.
    pub fn life(&self) -> Life {
        Life::from_code(self.life.load(Ordering::Acquire))
    }

    /// Its EM said where it is, or there is no EM any more.
    pub fn set_life(&self, life: Life) {
        self.life.store(life.to_code(), Ordering::Release);
    }

    /// The EM took it: it waits for its VMM, unless the EM said more already.
    pub fn served(&self) {
        let _ = self.life.compare_exchange(
            Life::Absent.to_code(),
            Life::Served(FunctionState::Waiting).to_code(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        self.set_fault(None);
    }

    /// Why its EM does not serve it, if that is known.
    pub fn fault(&self) -> Option<String> {
        self.fault
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Notes why its EM does not serve it.
    pub fn set_fault(&self, fault: Option<String>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }
}
