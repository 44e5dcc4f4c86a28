//! Opcodes (`MLX5_CMD_OP_*`).

macro_rules! opcodes {
    ($($name:ident = $value:literal;)*) => {
        $(pub(crate) const $name: u16 = $value;)*
        /// All of them, for tests.
        #[cfg(test)]
        pub(crate) const ALL: &[u16] = &[$($value),*];
    };
}

opcodes! {
    QUERY_HCA_CAP = 0x100;
    QUERY_ADAPTER = 0x101;
    INIT_HCA = 0x102;
    TEARDOWN_HCA = 0x103;
    ENABLE_HCA = 0x104;
    DISABLE_HCA = 0x105;
    QUERY_PAGES = 0x107;
    MANAGE_PAGES = 0x108;
    SET_HCA_CAP = 0x109;
    QUERY_ISSI = 0x10a;
    SET_ISSI = 0x10b;
    SET_DRIVER_VERSION = 0x10d;
    CREATE_MKEY = 0x200;
    QUERY_MKEY = 0x201;
    DESTROY_MKEY = 0x202;
    QUERY_SPECIAL_CONTEXTS = 0x203;
    CREATE_EQ = 0x301;
    DESTROY_EQ = 0x302;
    QUERY_EQ = 0x303;
    CREATE_CQ = 0x400;
    DESTROY_CQ = 0x401;
    QUERY_CQ = 0x402;
    MODIFY_CQ = 0x403;
    CREATE_QP = 0x500;
    DESTROY_QP = 0x501;
    RST2INIT_QP = 0x502;
    INIT2RTR_QP = 0x503;
    RTR2RTS_QP = 0x504;
    RTS2RTS_QP = 0x505;
    SQERR2RTS_QP = 0x506;
    QP_2ERR = 0x507;
    QP_2RST = 0x50a;
    QUERY_QP = 0x50b;
    SQD_RTS_QP = 0x50c;
    MAD_IFC = 0x50d;
    INIT2INIT_QP = 0x50e;
    CREATE_SRQ = 0x700;
    DESTROY_SRQ = 0x701;
    QUERY_SRQ = 0x702;
    ARM_RQ = 0x703;
    CREATE_XRC_SRQ = 0x705;
    DESTROY_XRC_SRQ = 0x706;
    QUERY_XRC_SRQ = 0x707;
    ARM_XRC_SRQ = 0x708;
    QUERY_HCA_VPORT_CONTEXT = 0x762;
    MODIFY_HCA_VPORT_CONTEXT = 0x763;
    QUERY_HCA_VPORT_GID = 0x764;
    QUERY_HCA_VPORT_PKEY = 0x765;
    ALLOC_PD = 0x800;
    DEALLOC_PD = 0x801;
    ALLOC_UAR = 0x802;
    DEALLOC_UAR = 0x803;
    ACCESS_REG = 0x805;
    NOP = 0x80d;
    ALLOC_XRCD = 0x80e;
    DEALLOC_XRCD = 0x80f;
    CREATE_RMP = 0x90c;
    MODIFY_RMP = 0x90d;
    DESTROY_RMP = 0x90e;
    QUERY_RMP = 0x90f;
}
