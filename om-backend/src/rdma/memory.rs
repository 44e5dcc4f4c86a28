//! Files of guest memory, and which EMs have them.

use super::{Order, Subnet};
use m2m_fabric::proto::RdmaRequest;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

/// Files that one function can share at the same time; a VM's memory is in a few.
const MAX_FILES: usize = 256;

#[derive(Debug)]
struct File {
    fd: OwnedFd,
    /// The EMs that were told of it.
    given: BTreeSet<usize>,
}

/// The files that functions share with those they may reach.
#[derive(Debug, Default)]
pub struct SharedMemory {
    /// By function and number.
    files: BTreeMap<u32, BTreeMap<u64, File>>,
    /// The EMs of a former OM, which may have more than they were told of here.
    returned: BTreeSet<usize>,
    /// Functions of which all files are known.
    complete: BTreeSet<u32>,
}

impl SharedMemory {
    /// How many files a function shares.
    pub fn count(&self, function: u32) -> usize {
        self.files.get(&function).map_or(0, BTreeMap::len)
    }

    /// A function shares a file.
    ///
    /// # Errors
    /// A sentence when the number is another file's or the function shares [`MAX_FILES`] already.
    pub fn share(
        &mut self,
        subnet: &Subnet,
        function: u32,
        number: u64,
        fd: OwnedFd,
    ) -> Result<Vec<Order>, String> {
        let files = self.files.entry(function).or_default();
        match files.get(&number) {
            Some(known) if same(&known.fd, &fd) => return Ok(Vec::new()),
            Some(_) => return Err(format!("file {number} is shared already")),
            None => {}
        }
        if files.len() >= MAX_FILES {
            return Err(format!(
                "function {function} shares {MAX_FILES} files already; no more are possible"
            ));
        }
        let given = BTreeSet::new();
        let file = files.entry(number).or_insert(File { fd, given });
        let to = subnet.neighbours(function).into_iter();
        Ok(to
            .filter_map(|em| file.give(function, number, em))
            .collect())
    }

    /// A function does not share a file any more, or without a number any.
    pub fn unshare(&mut self, function: u32, number: Option<u64>) -> Vec<Order> {
        let mut told = self.returned.clone();
        match (number, self.files.get_mut(&function)) {
            (Some(number), Some(files)) => {
                told.extend(files.remove(&number).into_iter().flat_map(|f| f.given));
            }
            (None, Some(files)) => {
                told.extend(std::mem::take(files).into_values().flat_map(|f| f.given));
            }
            (_, None) => {}
        }
        let gone = |em| Order {
            em,
            request: RdmaRequest::PeerMemoryGone {
                function,
                file: number,
            },
            fds: Vec::new(),
        };
        told.into_iter().map(gone).collect()
    }

    /// An EM came, which `subnet` knows: it gets what the functions share that its own may reach.
    pub fn em_up(&mut self, subnet: &Subnet, em: usize) -> Vec<Order> {
        let mut orders = Vec::new();
        for (function, files) in &mut self.files {
            if subnet.neighbours(*function).contains(&em) {
                let given = files.iter_mut();
                orders.extend(given.filter_map(|(n, file)| file.give(*function, *n, em)));
            }
        }
        orders
    }

    /// An EM of a former OM came: the same, and what is not shared any more is gone.
    pub fn em_returned(&mut self, subnet: &Subnet, em: usize) -> Vec<Order> {
        self.returned.insert(em);
        let mut orders = self.em_up(subnet, em);
        let complete = self.complete.iter();
        let peers = complete.filter(|peer| subnet.neighbours(**peer).contains(&em));
        orders.extend(peers.map(|peer| self.kept(*peer, em)));
        orders
    }

    /// A function shares these files, all of which it said before, and no others.
    pub fn hold(&mut self, subnet: &Subnet, function: u32, numbers: &[u64]) -> Vec<Order> {
        let known = self
            .files
            .get(&function)
            .into_iter()
            .flat_map(BTreeMap::keys);
        let gone = known.copied().filter(|known| !numbers.contains(known));
        let gone: Vec<u64> = gone.collect();
        let gone = gone.into_iter();
        let mut orders: Vec<_> = gone
            .flat_map(|number| self.unshare(function, Some(number)))
            .collect();
        self.complete.insert(function);
        let to = subnet.neighbours(function);
        let to = to.intersection(&self.returned);
        orders.extend(to.map(|em| self.kept(function, *em)));
        orders
    }

    fn kept(&self, function: u32, em: usize) -> Order {
        let files = self.files.get(&function).into_iter();
        Order {
            em,
            request: RdmaRequest::PeerMemoryKept {
                function,
                files: files.flat_map(BTreeMap::keys).copied().collect(),
            },
            fds: Vec::new(),
        }
    }

    /// An EM is gone, and the memory of its functions with it.
    pub fn em_down(&mut self, subnet: &Subnet, em: usize) -> Vec<Order> {
        for file in self.files.values_mut().flat_map(BTreeMap::values_mut) {
            file.given.remove(&em);
        }
        self.returned.remove(&em);
        let functions = subnet.functions_of(em);
        // What comes anew comes to this OM.
        self.complete.extend(&functions);
        let functions = functions.into_iter();
        functions.flat_map(|f| self.unshare(f, None)).collect()
    }
}

/// Whether both are the same file.
fn same(a: &OwnedFd, b: &OwnedFd) -> bool {
    let identity = |fd| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

impl File {
    /// What makes the file known to an EM that does not know it yet.
    fn give(&mut self, function: u32, number: u64, em: usize) -> Option<Order> {
        if self.given.contains(&em) {
            return None;
        }
        let copy = match self.fd.try_clone() {
            Ok(copy) => copy,
            Err(e) => {
                log::error!("no descriptor for file {number} of function {function}: {e}");
                return None;
            }
        };
        self.given.insert(em);
        Some(Order {
            em,
            request: RdmaRequest::PeerMemory {
                function,
                file: number,
            },
            fds: vec![copy],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use rustix::fs::MemfdFlags;

    /// EMs 0, 1 and 2 with one InfiniBand port each in one network, functions 0 to 2; EM 3 in another.
    fn subnet(up: &[usize]) -> Subnet {
        let mut text = String::from("[[network]]\nname = \"blue\"\n[[network]]\nname = \"red\"\n");
        for (n, network) in ["blue", "blue", "blue", "red"].iter().enumerate() {
            text += &format!(
                "[[em]]\nname = \"em{n}\"\n[[em.function]]\nname = \"f{n}\"\nkind = \"rdma\"\n\
                 link_type = \"infiniband\"\nmac = \"02:00:00:00:00:{n:02x}\"\nnetwork = \"{network}\"\n"
            );
        }
        let mut subnet = Subnet::new(&Config::parse("test", &text).unwrap());
        up.iter().for_each(|em| subnet.em_up(*em));
        subnet
    }

    fn file() -> OwnedFd {
        rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap()
    }

    fn inode(fd: &OwnedFd) -> u64 {
        rustix::fs::fstat(fd).unwrap().st_ino
    }

    fn told(orders: &[Order]) -> Vec<(usize, RdmaRequest)> {
        let one = |o: &Order| (o.em, o.request.clone());
        orders.iter().map(one).collect()
    }

    fn known(function: u32, file: u64) -> RdmaRequest {
        RdmaRequest::PeerMemory { function, file }
    }

    fn gone(function: u32, file: Option<u64>) -> RdmaRequest {
        RdmaRequest::PeerMemoryGone { function, file }
    }

    #[test]
    fn memory_goes_to_those_who_may_reach_it_now_and_later() {
        let mut subnet = subnet(&[0, 1, 3]);
        let mut memory = SharedMemory::default();
        let fd = file();
        let same = inode(&fd);
        let orders = memory.share(&subnet, 0, 7, fd).unwrap();
        assert_eq!(told(&orders), [(1, known(0, 7))]);
        assert_eq!(inode(&orders[0].fds[0]), same);
        assert_eq!(memory.share(&subnet, 3, 1, file()).unwrap().len(), 0);
        subnet.em_up(2);
        let orders = memory.em_up(&subnet, 2);
        assert_eq!(told(&orders), [(2, known(0, 7))]);
        assert_eq!(inode(&orders[0].fds[0]), same);
        assert!(memory.em_up(&subnet, 2).is_empty(), "told once");
    }

    #[test]
    fn those_who_know_a_file_hear_that_it_is_gone() {
        let subnet = subnet(&[0, 1, 2]);
        let mut memory = SharedMemory::default();
        for number in [1, 2] {
            memory.share(&subnet, 0, number, file()).unwrap();
        }
        let orders = memory.unshare(0, Some(1));
        assert_eq!(
            told(&orders),
            [(1, gone(0, Some(1))), (2, gone(0, Some(1)))]
        );
        assert!(memory.unshare(0, Some(1)).is_empty());
        let orders = memory.unshare(0, None);
        assert_eq!(told(&orders), [(1, gone(0, None)), (2, gone(0, None))]);
        assert_eq!(memory.count(0), 0);
    }

    #[test]
    fn an_em_that_dies_takes_its_memory_along_and_gets_that_of_the_others_again() {
        let mut subnet = subnet(&[0, 1, 2]);
        let mut memory = SharedMemory::default();
        memory.share(&subnet, 0, 1, file()).unwrap();
        memory.share(&subnet, 1, 5, file()).unwrap();
        subnet.em_down(1);
        let orders = memory.em_down(&subnet, 1);
        assert_eq!(told(&orders), [(0, gone(1, None)), (2, gone(1, None))]);
        subnet.em_up(1);
        assert_eq!(told(&memory.em_up(&subnet, 1)), [(1, known(0, 1))]);
    }

    #[test]
    fn ems_of_a_former_om_lose_what_nobody_shares_any_more() {
        let mut subnet = subnet(&[0, 1]);
        let mut memory = SharedMemory::default();
        let kept = |function, files: &[u64]| RdmaRequest::PeerMemoryKept {
            function,
            files: files.to_vec(),
        };
        assert!(memory.em_returned(&subnet, 0).is_empty());
        assert!(memory.em_returned(&subnet, 1).is_empty());
        memory.share(&subnet, 0, 7, file()).unwrap();
        memory.share(&subnet, 0, 8, file()).unwrap();
        // It said 8 before it knew that it is gone.
        let orders = memory.hold(&subnet, 0, &[7]);
        let of_zero: Vec<_> = told(&orders)
            .into_iter()
            .filter(|(em, _)| *em == 1)
            .collect();
        assert_eq!(of_zero, [(1, gone(0, Some(8))), (1, kept(0, &[7]))]);
        // One that comes later has what function 0 shares, and maybe more; of function 1 nothing is known yet.
        subnet.em_up(2);
        let orders = memory.em_returned(&subnet, 2);
        assert_eq!(told(&orders), [(2, known(0, 7)), (2, kept(0, &[7]))]);
        // Of an EM that died without an OM nothing stays.
        let orders = memory.em_down(&subnet, 1);
        assert!(told(&orders).contains(&(0, gone(1, None))));
        assert!(told(&orders).contains(&(2, gone(1, None))));
    }

    #[test]
    fn a_file_that_is_said_twice_is_shared_once() {
        let subnet = subnet(&[0, 1]);
        let mut memory = SharedMemory::default();
        let fd = file();
        let again = fd.try_clone().unwrap();
        assert_eq!(memory.share(&subnet, 0, 7, fd).unwrap().len(), 1);
        assert!(memory.share(&subnet, 0, 7, again).unwrap().is_empty());
        assert_eq!(memory.count(0), 1);
    }

    #[test]
    fn a_function_shares_a_bounded_number_of_files_under_different_numbers() {
        let subnet = subnet(&[0]);
        let mut memory = SharedMemory::default();
        for number in 0..MAX_FILES as u64 {
            memory.share(&subnet, 0, number, file()).unwrap();
        }
        assert_eq!(
            memory.share(&subnet, 0, 3, file()).unwrap_err(),
            "file 3 is shared already"
        );
        assert_eq!(
            memory.share(&subnet, 0, 256, file()).unwrap_err(),
            "function 0 shares 256 files already; no more are possible"
        );
        memory.unshare(0, Some(3));
        memory.share(&subnet, 0, 256, file()).unwrap();
    }
}
