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
}

impl SharedMemory {
    /// How many files a function shares.
    pub fn count(&self, function: u32) -> usize {
        self.files.get(&function).map_or(0, BTreeMap::len)
    }

    /// A function shares a file.
    ///
    /// # Errors
    /// A sentence when the number is taken or the function shares [`MAX_FILES`] already.
    pub fn share(
        &mut self,
        subnet: &Subnet,
        function: u32,
        number: u64,
        fd: OwnedFd,
    ) -> Result<Vec<Order>, String> {
        let files = self.files.entry(function).or_default();
        if files.contains_key(&number) {
            return Err(format!("file {number} is shared already"));
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
        let mut told = BTreeSet::new();
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

    /// An EM is gone, and the memory of its functions with it.
    pub fn em_down(&mut self, subnet: &Subnet, em: usize) -> Vec<Order> {
        for file in self.files.values_mut().flat_map(BTreeMap::values_mut) {
            file.given.remove(&em);
        }
        let functions = subnet.functions_of(em).into_iter();
        functions.flat_map(|f| self.unshare(f, None)).collect()
    }
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
