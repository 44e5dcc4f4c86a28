//! Objects by number, as many as a limit allows.

use super::command::Status;
use std::collections::{HashMap, VecDeque};

/// Objects of one kind. Numbers go up from the first and are given out again in the order in which
/// they came free.
#[derive(Debug)]
pub(crate) struct Table<T> {
    items: HashMap<u32, T>,
    freed: VecDeque<u32>,
    first: u32,
    next: u32,
    end: u32,
    /// The number that the next object gets, whichever is next: what it had in a former process.
    forced: Option<u32>,
}

impl<T> Table<T> {
    /// For numbers from `first` to before `end`.
    pub(crate) fn new(first: u32, end: u32) -> Self {
        Self {
            items: HashMap::new(),
            freed: VecDeque::new(),
            first,
            next: first,
            end,
            forced: None,
        }
    }

    /// The next object gets this number. [`Self::settle`] follows when all have theirs.
    pub(crate) fn force(&mut self, number: u32) {
        self.forced = Some(number);
    }

    /// Numbers between those in use are free.
    pub(crate) fn settle(&mut self) {
        self.forced = None;
        let own = self.items.keys().filter(|number| **number >= self.first);
        self.next = own.max().map_or(self.first, |last| last + 1);
        let free = self.first..self.next;
        self.freed = free
            .filter(|number| !self.items.contains_key(number))
            .collect();
    }

    /// The number that the next object gets.
    pub(crate) fn next_number(&self) -> Result<u32, Status> {
        if let Some(number) = self.forced {
            let usable = (self.first..self.end).contains(&number);
            let free = usable && !self.items.contains_key(&number);
            return free.then_some(number).ok_or(Status::BadIndex);
        }
        match self.freed.front() {
            Some(number) => Ok(*number),
            None if self.next < self.end => Ok(self.next),
            None => Err(Status::NoResources),
        }
    }

    /// Adds an object under [`Self::next_number`].
    pub(crate) fn add(&mut self, item: T) -> Result<u32, Status> {
        let number = self.next_number()?;
        if self.forced.take().is_none() && self.freed.pop_front().is_none() {
            self.next += 1;
        }
        self.items.insert(number, item);
        Ok(number)
    }

    /// Adds an object under a number outside of the table's own, if that is free.
    pub(crate) fn add_special(&mut self, number: u32, item: T) -> Result<u32, Status> {
        if self.items.contains_key(&number) {
            return Err(Status::NoResources);
        }
        self.items.insert(number, item);
        Ok(number)
    }

    /// Removes an object; `special` says that its number is not one of the table's own.
    pub(crate) fn remove(&mut self, number: u32, special: bool) -> Result<T, Status> {
        let item = self.items.remove(&number).ok_or(Status::BadResource)?;
        if !special {
            self.freed.push_back(number);
        }
        Ok(item)
    }

    /// An object.
    pub(crate) fn get(&self, number: u32) -> Result<&T, Status> {
        self.items.get(&number).ok_or(Status::BadResource)
    }

    /// An object.
    pub(crate) fn get_mut(&mut self, number: u32) -> Result<&mut T, Status> {
        self.items.get_mut(&number).ok_or(Status::BadResource)
    }

    /// Number of objects.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// All objects by number, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.items.iter().map(|(number, item)| (*number, item))
    }

    /// All objects, in no order.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.items.values_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_end_at_the_limit_and_come_back_when_free() {
        let mut table = Table::new(2, 4);
        assert_eq!((table.add('a'), table.add('b')), (Ok(2), Ok(3)));
        assert_eq!(table.add('c'), Err(Status::NoResources));
        assert_eq!(table.remove(2, false), Ok('a'));
        assert_eq!(table.remove(2, false), Err(Status::BadResource));
        assert_eq!((table.next_number(), table.add('c')), (Ok(2), Ok(2)));
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn forced_numbers_leave_those_between_free() {
        let mut table = Table::new(2, 8);
        for number in [5, 3] {
            table.force(number);
            assert_eq!(table.add('x'), Ok(number));
        }
        table.force(5);
        assert_eq!(table.add('y'), Err(Status::BadIndex));
        table.force(8);
        assert!(table.next_number().is_err());
        table.settle();
        let next: Vec<_> = (0..4).map(|_| table.add('z').unwrap()).collect();
        assert_eq!(next, [2, 4, 6, 7]);
    }

    #[test]
    fn a_special_number_is_given_once_and_does_not_join_the_others() {
        let mut table = Table::new(2, 3);
        assert_eq!(table.add_special(1, 'g'), Ok(1));
        assert_eq!(table.add_special(1, 'h'), Err(Status::NoResources));
        table.remove(1, true).unwrap();
        assert_eq!((table.add('a'), table.add('b').is_err()), (Ok(2), true));
    }
}
