//! Fields of the structures that commands carry, as far as they are used: byte, bit, width. Modules
//! and constants have the names of `mlx5_ifc.h`'s structures and fields.

use super::bits::Field;

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident: $byte:literal, $bit:literal, $width:literal;)*) => {
        $($(#[$doc])* pub(crate) const $name: Field = Field::new($byte, $bit, $width);)*
    };
}

/// Header of all commands: `*_in` and `*_out`.
pub(crate) mod header {
    use super::Field;
    fields! {
        OPCODE: 0x0, 0, 16;
        UID: 0x2, 0, 16;
        OP_MOD: 0x6, 0, 16;
        /// Number of an object, in both directions; `eq_number` is its low byte.
        INDEX: 0x9, 0, 24;
        /// Commands about ports: another function's, which this one may not ask for.
        OTHER_VPORT: 0x8, 0, 1;
        STATUS: 0x0, 0, 8;
        SYNDROME: 0x4, 0, 32;
    }
    /// Page list of most objects.
    pub(crate) const PAS: usize = 0x110;
}

/// `qpc`: queue pair context, 0x18 in commands.
pub(crate) mod qpc {
    use super::Field;
    pub(crate) const AT: usize = 0x18;
    pub(crate) const LEN: usize = 0xe8;
    fields! {
        STATE: 0x0, 0, 4;
        ST: 0x1, 0, 8;
        WQ_SIGNATURE: 0x4, 0, 1;
        PD: 0x5, 0, 24;
        MTU: 0x8, 0, 3;
        LOG_MSG_MAX: 0x8, 3, 5;
        LOG_RQ_SIZE: 0x9, 1, 4;
        LOG_RQ_STRIDE: 0x9, 5, 3;
        NO_SQ: 0xa, 0, 1;
        LOG_SQ_SIZE: 0xa, 1, 4;
        USER_INDEX: 0x11, 0, 24;
        LOG_PAGE_SIZE: 0x14, 3, 5;
        REMOTE_QPN: 0x15, 0, 24;
        PKEY_INDEX: 0x1a, 0, 16;
        GRH: 0x1d, 0, 1;
        RLID: 0x1e, 0, 16;
        ACK_TIMEOUT: 0x20, 0, 5;
        VHCA_PORT_NUM: 0x3d, 0, 8;
        LOG_SRA_MAX: 0x71, 0, 3;
        RETRY_COUNT: 0x71, 5, 3;
        RNR_RETRY: 0x72, 0, 3;
        NEXT_SEND_PSN: 0x79, 0, 24;
        CQN_SND: 0x7d, 0, 24;
        LOG_RRA_MAX: 0x91, 0, 3;
        ATOMIC_MODE: 0x91, 4, 4;
        RRE: 0x92, 0, 1;
        RWE: 0x92, 1, 1;
        RAE: 0x92, 2, 1;
        /// In units of 1/64 of a page.
        PAGE_OFFSET: 0x92, 4, 6;
        MIN_RNR_NAK: 0x94, 3, 5;
        NEXT_RCV_PSN: 0x95, 0, 24;
        CQN_RCV: 0x9d, 0, 24;
        Q_KEY: 0xa8, 0, 32;
        RQ_TYPE: 0xac, 5, 3;
        SRQN_RMPN_XRQN: 0xad, 0, 24;
    }
    /// `primary_address_path`.
    pub(crate) const PATH: std::ops::Range<usize> = 0x18..0x44;
    /// Its `rgid_rip`.
    pub(crate) const RGID: usize = 0x28;
    /// Its `rmac`.
    pub(crate) const RMAC: usize = 0x3e;
    /// Bus address of the doorbell record.
    pub(crate) const DBR_ADDR: usize = 0xa0;
    /// `opt_param_mask` of the commands that change state (0x10 in the command).
    pub(crate) const OPT_PARAM_MASK: Field = Field::new(0x10, 0, 32);
}

/// `cqc`: completion queue context, 0x10 in commands.
pub(crate) mod cqc {
    use super::Field;
    pub(crate) const AT: usize = 0x10;
    pub(crate) const LEN: usize = 0x40;
    fields! {
        CQE_SZ: 0x1, 0, 3;
        OI: 0x1, 6, 1;
        PAGE_OFFSET: 0xa, 4, 6;
        LOG_CQ_SIZE: 0xc, 3, 5;
        CQ_PERIOD: 0x10, 4, 12;
        CQ_MAX_COUNT: 0x12, 0, 16;
        C_EQN: 0x14, 0, 32;
        LOG_PAGE_SIZE: 0x18, 3, 5;
    }
    /// Bus address of the doorbell record.
    pub(crate) const DBR_ADDR: usize = 0x38;
    /// `modify_field_select` or `resize_field_select` of MODIFY_CQ.
    pub(crate) const FIELD_SELECT: Field = Field::new(0xc, 0, 32);
}

/// `mkc`: memory key context, 0x10 in commands.
pub(crate) mod mkc {
    use super::Field;
    pub(crate) const AT: usize = 0x10;
    pub(crate) const LEN: usize = 0x40;
    fields! {
        FREE: 0x0, 1, 1;
        ACCESS_MODE_4_2: 0x0, 3, 3;
        A: 0x2, 1, 1;
        RW: 0x2, 2, 1;
        RR: 0x2, 3, 1;
        LW: 0x2, 4, 1;
        ACCESS_MODE_1_0: 0x2, 6, 2;
        MKEY_7_0: 0x7, 0, 8;
        LENGTH64: 0xc, 0, 1;
        BSF_EN: 0xc, 1, 1;
        EN_RINVAL: 0xc, 7, 1;
        PD: 0xd, 0, 24;
        TRANSLATIONS_OCTWORD_SIZE: 0x34, 0, 32;
        /// log₂ of the page size itself.
        LOG_PAGE_SIZE: 0x3b, 2, 6;
    }
    pub(crate) const START_ADDR: usize = 0x10;
    pub(crate) const LEN_FIELD: usize = 0x18;
    /// Of CREATE_MKEY: registration with page faults.
    pub(crate) const PG_ACCESS: Field = Field::new(0xc, 0, 1);
    /// Of CREATE_MKEY: the list is in a registered user memory.
    pub(crate) const MKEY_UMEM_VALID: Field = Field::new(0xc, 1, 1);
    /// Of CREATE_MKEY: 16-byte units of the list.
    pub(crate) const TRANSLATIONS_OCTWORD_ACTUAL_SIZE: Field = Field::new(0x60, 0, 32);
}

/// `eqc`: event queue context, 0x10 in commands.
pub(crate) mod eqc {
    use super::Field;
    pub(crate) const AT: usize = 0x10;
    pub(crate) const LEN: usize = 0x40;
    fields! {
        PAGE_OFFSET: 0xa, 4, 6;
        LOG_EQ_SIZE: 0xc, 3, 5;
        INTR: 0x16, 4, 12;
        LOG_PAGE_SIZE: 0x18, 3, 5;
        CONSUMER_COUNTER: 0x29, 0, 24;
        PRODUCER_COUNTER: 0x2d, 0, 24;
    }
    /// Of CREATE_EQ: a bit for each event type, in 64-bit words.
    pub(crate) const EVENT_BITMASK: usize = 0x58;
}

/// `srqc` and `xrc_srqc`, alike as far as they are used: 0x10 in commands.
pub(crate) mod srqc {
    use super::Field;
    pub(crate) const AT: usize = 0x10;
    pub(crate) const LEN: usize = 0x40;
    fields! {
        LOG_SRQ_SIZE: 0x0, 4, 4;
        WQ_SIGNATURE: 0x4, 0, 1;
        BASIC_CYCLIC_RCV_WQE: 0x4, 4, 1;
        LOG_RQ_STRIDE: 0x4, 5, 3;
        PAGE_OFFSET: 0x8, 0, 6;
        LOG_PAGE_SIZE: 0x10, 2, 6;
        PD: 0x19, 0, 24;
        LWM: 0x1c, 0, 16;
    }
    pub(crate) const DBR_ADDR: usize = 0x28;
    /// Of ARM_RQ and ARM_XRC_SRQ.
    pub(crate) const ARM_LWM: Field = Field::new(0xe, 0, 16);
}

/// `rmpc`: receive memory pool context, 0x20 in commands; its work queue at 0x30.
pub(crate) mod rmpc {
    use super::Field;
    pub(crate) const AT: usize = 0x20;
    pub(crate) const LEN: usize = 0xf0;
    /// `wq`.
    pub(crate) const WQ: usize = 0x30;
    fields! {
        BASIC_CYCLIC_RCV_WQE: 0x4, 0, 1;
    }
    /// Of MODIFY_RMP: `bitmask.lwm`.
    pub(crate) const BITMASK_LWM: Field = Field::new(0x17, 7, 1);
}

/// `wq`: work queue.
pub(crate) mod wq {
    use super::Field;
    pub(crate) const LEN: usize = 0xc0;
    fields! {
        WQ_TYPE: 0x0, 0, 4;
        WQ_SIGNATURE: 0x0, 4, 1;
        PAGE_OFFSET: 0x5, 3, 5;
        LWM: 0x6, 0, 16;
        PD: 0x9, 0, 24;
        LOG_WQ_STRIDE: 0x21, 4, 4;
        LOG_WQ_PG_SZ: 0x22, 3, 5;
        LOG_WQ_SZ: 0x23, 3, 5;
    }
    pub(crate) const DBR_ADDR: usize = 0x10;
}

/// `hca_vport_context`, 0x10 in the reply.
pub(crate) mod hca_vport {
    use super::Field;
    pub(crate) const LEN: usize = 0x200;
    fields! {
        PORT_PHYSICAL_STATE: 0x22, 0, 4;
        PORT_STATE: 0x23, 0, 4;
        VPORT_STATE: 0x23, 4, 4;
        LID: 0x60, 0, 16;
        SUBNET_TIMEOUT: 0x63, 3, 5;
        SM_LID: 0x64, 0, 16;
    }
    pub(crate) const SYSTEM_IMAGE_GUID: usize = 0x28;
    pub(crate) const PORT_GUID: usize = 0x30;
    pub(crate) const NODE_GUID: usize = 0x38;
}

/// `rqc`: receive queue context, 0x20 in commands.
pub(crate) mod rqc {
    use super::Field;
    fields! {
        /// VLAN stripping disabled.
        VSD: 0x0, 3, 1;
        MEM_RQ_TYPE: 0x0, 4, 4;
        STATE: 0x1, 0, 4;
        HAIRPIN: 0x1, 6, 1;
        USER_INDEX: 0x5, 0, 24;
        CQN: 0x9, 0, 24;
        COUNTER_SET_ID: 0xc, 0, 8;
    }
}

/// `sqc`: send queue context, 0x20 in commands.
pub(crate) mod sqc {
    use super::Field;
    fields! {
        STATE: 0x1, 0, 4;
        HAIRPIN: 0x1, 6, 1;
        USER_INDEX: 0x5, 0, 24;
        CQN: 0x9, 0, 24;
        TIS_LST_SZ: 0x20, 0, 16;
        TIS_NUM_0: 0x2d, 0, 24;
    }
}

/// `tirc`: context of a transport interface for receives, 0x20 in commands.
pub(crate) mod tirc {
    use super::Field;
    fields! {
        DISP_TYPE: 0x4, 0, 4;
        INLINE_RQN: 0x1d, 0, 24;
        RX_HASH_SYMMETRIC: 0x20, 0, 1;
        INDIRECT_TABLE: 0x21, 0, 24;
        RX_HASH_FN: 0x24, 0, 4;
        FIELD_SELECTOR_OUTER: 0x50, 0, 32;
    }
    /// `rx_hash_toeplitz_key`, 40 bytes.
    pub(crate) const TOEPLITZ_KEY: usize = 0x28;
}
