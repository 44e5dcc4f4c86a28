//! Rights of a range and the access that is asked for.

/// Rights that a range grants to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Perm {
    /// The device may read guest memory.
    pub read: bool,
    /// The device may write guest memory.
    pub write: bool,
}

impl Perm {
    /// Read only.
    pub const R: Perm = Perm {
        read: true,
        write: false,
    };
    /// Write only.
    pub const W: Perm = Perm {
        read: false,
        write: true,
    };
    /// Read and write.
    pub const RW: Perm = Perm {
        read: true,
        write: true,
    };

    /// True when these rights allow `access`.
    pub const fn allows(self, access: Access) -> bool {
        self.bits() & access.bits() == access.bits()
    }

    /// True when every right in `self` is also in `other`.
    pub const fn within(self, other: Perm) -> bool {
        self.bits() & other.bits() == self.bits()
    }

    pub(crate) const fn bits(self) -> u8 {
        self.read as u8 | (self.write as u8) << 1
    }
}

/// What a translation is wanted for. Directions are seen from the device: `Read` reads guest
/// memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// The device reads guest memory.
    Read,
    /// The device writes guest memory.
    Write,
    /// Both, for instance an atomic operation.
    ReadWrite,
}

impl Access {
    pub(crate) const fn bits(self) -> u8 {
        match self {
            Access::Read => 1,
            Access::Write => 2,
            Access::ReadWrite => 3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_allow_exactly_what_they_name() {
        assert!(Perm::R.allows(Access::Read));
        assert!(!Perm::R.allows(Access::Write));
        assert!(!Perm::R.allows(Access::ReadWrite));
        assert!(Perm::W.allows(Access::Write));
        assert!(!Perm::W.allows(Access::Read));
        assert!(Perm::RW.allows(Access::ReadWrite));
    }

    #[test]
    fn rights_are_within_a_superset_only() {
        assert!(Perm::R.within(Perm::RW));
        assert!(!Perm::RW.within(Perm::R));
        assert!(!Perm::W.within(Perm::R));
    }
}
