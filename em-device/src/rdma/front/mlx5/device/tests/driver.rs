//! The driver's side: command entries, mailboxes and doorbells in memory.

use super::super::super::bits::{Field, put};
use super::super::super::command::{self, mailbox, opcode as op};
use super::super::super::fields::{cqc, eqc, mkc, qpc};
use super::super::super::{Action, Doorbells, MappedPages, Registers};
use super::super::Device;
use crate::net::links::Links;
use crate::rdma::engine::Context;
use crate::rdma::kept::{Kept, KeptError};
use crate::rdma::packet::{Addresses, Fabric, NotSent, Packet, Route};
use crate::rdma::verbs::{Destination, Path, Peer};
use crate::testing::{BASE, Memory};
use dot_iommu::HostMapping;
use m2m_fabric::proto::{RdmaFace, RdmaLinkLayer, RdmaSpec};
use smartep::irq::Irqs;
use std::sync::Arc;
use std::time::Instant;

pub(super) const GUID: u64 = 0x0200_5eff_fe00_0001;
pub(super) const LID: u16 = 3;
/// Vectors of the function.
pub(super) const VECTORS: u16 = 4;
/// Where the queues' pages are.
pub(super) const PAGES: u64 = BASE + 0x20_0000;
/// What the OM answers.
pub(super) const PATH: Path = Path {
    peer: Peer(9),
    generation: 1,
};

const QUEUE: u64 = BASE;
const INPUT: u64 = BASE + 0x10_0000;
const OUTPUT: u64 = BASE + 0x18_0000;

/// Nobody is there.
pub(super) struct NoFabric(Addresses);

impl Fabric for NoFabric {
    fn position(&self, _: Peer) -> u64 {
        0
    }
    fn is_taken(&mut self, _: Peer, _: u64) -> bool {
        true
    }
    fn send(&mut self, _: Peer, _: &Packet) -> Result<(), NotSent> {
        Err(NotSent::Gone)
    }
    fn file(&self, _: Peer, _: u64) -> Option<&HostMapping> {
        None
    }
    fn route(&mut self, _: &Destination) -> Route {
        Route::Refused
    }
    fn is_handled(&mut self, _: Peer) -> bool {
        true
    }
    fn addresses(&self) -> &Addresses {
        &self.0
    }
}

pub(super) fn spec(link: RdmaLinkLayer) -> RdmaSpec {
    RdmaSpec {
        face: RdmaFace::Mlx5,
        link,
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        guid: GUID,
        lid: match link {
            RdmaLinkLayer::Infiniband => LID,
            RdmaLinkLayer::Ethernet => 0,
        },
        bar: 0,
        mapped_doorbells: false,
        link_up: true,
        windows: false,
    }
}

pub(super) struct Driver {
    pub(super) memory: Memory,
    pub(super) registers: Registers,
    pub(super) device: Device,
    pub(super) path: Option<Path>,
    pub(super) links: Links,
    fabric: NoFabric,
    pages: u64,
    kept: Arc<Kept>,
    mapped: Option<Arc<MappedPages>>,
}

impl Driver {
    pub(super) fn new(link: RdmaLinkLayer) -> Self {
        Self::of(spec(link))
    }

    fn of(spec: RdmaSpec) -> Self {
        let doorbells = Arc::new(Doorbells::default());
        let irqs = Irqs::new(VECTORS);
        let mut device = Device::new(spec, Peer(7), irqs, doorbells.clone());
        let kept = Kept::create().unwrap();
        device.keep_in(kept.clone());
        let mut registers = Registers::new(doorbells, Instant::now());
        registers.write(0x10, &((QUEUE >> 32) as u32).to_be_bytes());
        registers.write(0x14, &(QUEUE as u32).to_be_bytes());
        Self {
            memory: Memory::new(),
            registers,
            links: Links::default(),
            fabric: NoFabric(device.addresses().clone()),
            device,
            path: Some(PATH),
            pages: 0,
            kept,
            mapped: None,
        }
    }

    /// What outlives the process.
    pub(super) fn kept(&self) -> Arc<Kept> {
        self.kept.clone()
    }

    /// The process dies, and another takes its place.
    pub(super) fn succeed(&mut self) {
        self.try_to_succeed().unwrap();
    }

    /// The same, which may fail.
    pub(super) fn try_to_succeed(&mut self) -> Result<(), KeptError> {
        let spec = self.device.spec.clone();
        let doorbells = Arc::new(Doorbells::default());
        let irqs = Irqs::new(VECTORS);
        let mut device = Device::new(spec, Peer(7), irqs, doorbells.clone());
        if let Some(pages) = &self.mapped {
            device.map_doorbells(pages.clone());
        }
        let mut registers = Registers::new(doorbells, Instant::now());
        assert!(registers.restore(&self.registers.save()));
        let kept = Kept::open(self.kept.fd().try_clone_to_owned().unwrap()).unwrap();
        (self.device, self.registers, self.kept) = (device, registers, kept.clone());
        let queue = self.registers.command_queue();
        self.with(|device, cx| device.restore(&kept, queue, cx))
    }

    /// A function after INIT_HCA.
    pub(super) fn started(link: RdmaLinkLayer) -> Self {
        Self::new(link).start()
    }

    /// The same with doorbell pages that the VMM maps.
    pub(super) fn mapped(link: RdmaLinkLayer) -> (Self, Arc<MappedPages>) {
        let mut driver = Self::of(RdmaSpec {
            mapped_doorbells: true,
            ..spec(link)
        });
        let (pages, _) = MappedPages::of(MappedPages::memory().unwrap()).unwrap();
        let pages = Arc::new(pages);
        driver.device.map_doorbells(pages.clone());
        driver.mapped = Some(pages.clone());
        (driver.start(), pages)
    }

    fn start(mut self) -> Self {
        self.ok(op::ENABLE_HCA, &[], 16);
        self.ok(op::INIT_HCA, &[], 16);
        self
    }

    /// A new page.
    pub(super) fn page(&mut self) -> u64 {
        self.pages += 1;
        PAGES + (self.pages - 1) * 4096
    }

    /// Calls the device as the data path does.
    pub(super) fn with<R>(&mut self, call: impl FnOnce(&mut Device, &mut Context<'_>) -> R) -> R {
        let reader = self.memory.table.reader();
        let view = reader.pin();
        let mut cx = Context {
            memory: &view,
            fabric: &mut self.fabric,
            now: Instant::now(),
        };
        call(&mut self.device, &mut cx)
    }

    pub(super) fn turn(&mut self) -> bool {
        let mut links = std::mem::take(&mut self.links);
        let worked = self.with(|device, cx| device.turn(cx, &mut links));
        self.links = links;
        worked
    }

    /// Puts a command into entry `slot` and rings. `input` begins behind the opcode.
    pub(super) fn post(&mut self, slot: u8, opcode: u16, input: &[u8], out_len: usize) -> Action {
        let mut bytes = input.to_vec();
        bytes.resize(input.len().max(16), 0);
        put(&mut bytes, 0, &opcode.to_be_bytes());
        let mut entry = [0; 64];
        entry[0] = 7;
        put(&mut entry, 4, &(bytes.len() as u32).to_be_bytes());
        put(&mut entry, 16, &bytes[..16]);
        put(&mut entry, 48, &OUTPUT.to_be_bytes());
        put(&mut entry, 8, &INPUT.to_be_bytes());
        put(&mut entry, 56, &(out_len as u32).to_be_bytes());
        entry[63] = 1;
        for (n, block) in (0..).zip(bytes[16..].chunks(512)) {
            let at = INPUT + n * 1024;
            self.memory.write(at, block);
            self.memory.write(at + 560, &(at + 1024).to_be_bytes());
        }
        for n in 0..(out_len as u64 / 512 + 1) {
            let at = OUTPUT + n * 1024;
            self.memory.write(at, &[0xee; 512]);
            self.memory.write(at + 560, &(at + 1024).to_be_bytes());
        }
        self.memory.write(QUEUE + u64::from(slot) * 64, &entry);
        self.registers.write(0x18, &(1u32 << slot).to_be_bytes())
    }

    /// Executes the command in an entry as endpoint and data path do.
    pub(super) fn serve(&mut self, slot: u8) {
        let queue = self.registers.command_queue().unwrap();
        let path = self.path;
        self.with(|device, cx| {
            let command = mailbox::read_command(queue, slot, cx.memory).unwrap();
            let path = device.destination(&command).and(path);
            let output = device.execute(&command, path, cx);
            command::finish_command(&command, &output, cx.memory);
            device.command_done(slot, cx.memory);
        });
    }

    /// What the driver finds in an entry and its mailboxes.
    pub(super) fn output(&self, slot: u8, out_len: usize) -> Vec<u8> {
        let entry = self.memory.read(QUEUE + u64::from(slot) * 64, 64);
        assert_eq!(entry[63], 0, "delivered well");
        let mut output = entry[32..48].to_vec();
        for n in 0.. {
            let left = out_len - output.len();
            if left == 0 {
                break;
            }
            output.extend(self.memory.read(OUTPUT + n * 1024, left.min(512)));
        }
        output
    }

    /// Executes a command and answers its output.
    pub(super) fn run(&mut self, opcode: u16, input: &[u8], out_len: usize) -> Vec<u8> {
        assert_eq!(self.post(0, opcode, input, out_len), Action::Command(1));
        self.serve(0);
        self.output(0, out_len)
    }

    /// As [`Self::run`], for a command that succeeds.
    pub(super) fn ok(&mut self, opcode: u16, input: &[u8], out_len: usize) -> Vec<u8> {
        let output = self.run(opcode, input, out_len);
        assert_eq!(output[0], 0, "status of {opcode:#x}");
        output
    }

    /// Status of a command that fails.
    pub(super) fn status(&mut self, opcode: u16, input: &[u8]) -> u8 {
        self.run(opcode, input, 16)[0]
    }

    /// A command that makes an object: its number.
    pub(super) fn create(&mut self, opcode: u16, input: &[u8]) -> u32 {
        index_of(&self.ok(opcode, input, 16))
    }

    pub(super) fn create_eq(&mut self, log_size: u32, types: u64, vector: u32) -> (u32, u64) {
        let page = self.page();
        self.memory.write(page, &[1; 4096]);
        let mut input = input_with(&[
            (eqc::LOG_EQ_SIZE.at(eqc::AT), log_size),
            (eqc::INTR.at(eqc::AT), vector),
        ]);
        put(&mut input, eqc::EVENT_BITMASK, &types.to_be_bytes());
        input.extend(page.to_be_bytes());
        (self.create(op::CREATE_EQ, &input), page)
    }

    pub(super) fn cq_input(&mut self, eqn: u32, log_size: u32) -> Vec<u8> {
        let (page, record) = (self.page(), self.page());
        // Entries that were never stored.
        self.memory.write(page, &[0xff; 4096]);
        let mut input = input_with(&[
            (cqc::LOG_CQ_SIZE.at(cqc::AT), log_size),
            (cqc::C_EQN.at(cqc::AT), eqn),
        ]);
        put(&mut input, cqc::AT + cqc::DBR_ADDR, &record.to_be_bytes());
        input.extend(page.to_be_bytes());
        input
    }

    /// A queue pair of type `st` with 4 receives and 16 send blocks.
    pub(super) fn qp_input(&mut self, st: u32, pd: u32, cqn: u32) -> Vec<u8> {
        let (page, record) = (self.page(), self.page());
        let mut input = input_with(&[
            (qpc::ST.at(qpc::AT), st),
            (qpc::PD.at(qpc::AT), pd),
            (qpc::LOG_RQ_SIZE.at(qpc::AT), 2),
            (qpc::LOG_SQ_SIZE.at(qpc::AT), 4),
            (qpc::USER_INDEX.at(qpc::AT), 0xff_ffff),
            (qpc::CQN_SND.at(qpc::AT), cqn),
            (qpc::CQN_RCV.at(qpc::AT), cqn),
        ]);
        put(&mut input, qpc::AT + qpc::DBR_ADDR, &record.to_be_bytes());
        input.extend(page.to_be_bytes());
        input
    }

    /// PD, CQ with its EQ.
    pub(super) fn basics(&mut self) -> (u32, u32) {
        let (eqn, _) = self.create_eq(4, 0, 1);
        let pd = self.create(op::ALLOC_PD, &[]);
        let input = self.cq_input(eqn, 4);
        (pd, self.create(op::CREATE_CQ, &input))
    }
}

/// Input up to the page list, with values of fields of the whole command.
pub(super) fn input_with(values: &[(Field, u32)]) -> Vec<u8> {
    let mut input = vec![0; 0x110];
    for (field, value) in values {
        field.set(&mut input, *value);
    }
    input
}

/// Input about an object.
pub(super) fn about(index: u32) -> [u8; 16] {
    let mut input = [0; 16];
    put(&mut input, 8, &index.to_be_bytes());
    input
}

/// Input of a change of state.
pub(super) fn qp_change(qpn: u32, mask: u32, values: &[(Field, u32)]) -> Vec<u8> {
    let mut input = input_with(values);
    put(&mut input, 8, &qpn.to_be_bytes());
    put(&mut input, 0x10, &mask.to_be_bytes());
    input
}

/// A key over all memory, as the kernel's.
pub(super) fn physical_key(pd: u32) -> Vec<u8> {
    input_with(&[
        (mkc::LW.at(mkc::AT), 1),
        (mkc::PD.at(mkc::AT), pd),
        (mkc::LENGTH64.at(mkc::AT), 1),
        (mkc::MKEY_7_0.at(mkc::AT), 0x42),
    ])
}

pub(super) fn index_of(output: &[u8]) -> u32 {
    Field::new(9, 0, 24).get(output)
}
