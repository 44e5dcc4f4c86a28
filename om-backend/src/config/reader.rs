//! Typed access to the tables of a TOML file, where every complaint knows its line.
//!
//! Deriving `Deserialize` would be shorter, but its messages name types ("invalid value: integer
//! `300`, expected u8") where a reader of the message wants to know the key and what it may be.

use super::ConfigError;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A file being read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'a> {
    /// As it was named.
    pub(super) file: &'a str,
    /// All of it.
    pub(super) text: &'a str,
}

impl Source<'_> {
    /// A complaint about the place `offset` bytes into the file.
    pub(super) fn error(&self, offset: usize, message: impl Into<String>) -> ConfigError {
        let before = self.text.as_bytes().get(..offset).unwrap_or_default();
        ConfigError::At {
            file: self.file.to_owned(),
            line: Some(1 + before.iter().filter(|b| **b == b'\n').count()),
            message: message.into(),
        }
    }

    /// A complaint about the file as a whole.
    pub(super) fn error_without_line(&self, message: impl Into<String>) -> ConfigError {
        ConfigError::At {
            file: self.file.to_owned(),
            line: None,
            message: message.into(),
        }
    }
}

/// A value and where it stands.
#[derive(Debug, Clone)]
pub(super) struct At<T> {
    /// The value.
    pub(super) value: T,
    /// Its place in the file, in bytes.
    pub(super) offset: usize,
}

/// One table; remembers which keys were asked for, so that the others can be refused.
pub(super) struct Table<'a> {
    source: Source<'a>,
    /// Its name for people, for example `[[em]]`.
    name: &'a str,
    offset: usize,
    entries: &'a DeTable<'a>,
    asked: BTreeSet<&'static str>,
}

impl<'a> Table<'a> {
    pub(super) fn new(
        source: Source<'a>,
        name: &'a str,
        offset: usize,
        entries: &'a DeTable<'a>,
    ) -> Self {
        Self {
            source,
            name,
            offset,
            entries,
            asked: BTreeSet::new(),
        }
    }

    /// Gives the table a name that says more, for the complaints from now on.
    pub(super) fn rename(&mut self, name: &'a str) {
        self.name = name;
    }

    fn get(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.asked.insert(key);
        self.entries.get(key)
    }

    /// A complaint about the table itself.
    pub(super) fn error(&self, message: impl Into<String>) -> ConfigError {
        self.source.error(self.offset, message)
    }

    /// A complaint about something read from the table.
    pub(super) fn error_at<T>(&self, at: &At<T>, message: impl Into<String>) -> ConfigError {
        self.source.error(at.offset, message)
    }

    fn wrong_type(&self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) -> ConfigError {
        self.source.error(
            value.span().start,
            format!("`{key}` is {}; it must be {wanted}", kind(value.get_ref())),
        )
    }

    /// `value`, or a complaint that `key` is missing and what it is.
    pub(super) fn required<T>(
        &self,
        key: &str,
        value: Option<T>,
        wanted: &str,
    ) -> Result<T, ConfigError> {
        value
            .ok_or_else(|| self.error(format!("{} has no `{key}`; it must be {wanted}", self.name)))
    }

    pub(super) fn string(
        &mut self,
        key: &'static str,
        wanted: &str,
    ) -> Result<Option<At<String>>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.get_ref() {
            DeValue::String(s) => Ok(Some(At {
                value: s.to_string(),
                offset: value.span().start,
            })),
            _ => Err(self.wrong_type(key, value, wanted)),
        }
    }

    pub(super) fn boolean(&mut self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.get_ref() {
            DeValue::Boolean(b) => Ok(Some(*b)),
            _ => Err(self.wrong_type(key, value, "true or false")),
        }
    }

    /// An integer for which `allowed` holds; `wanted` says in words what that is.
    pub(super) fn integer<T: TryFrom<i64>>(
        &mut self,
        key: &'static str,
        range: RangeInclusive<i64>,
        allowed: impl Fn(i64) -> bool,
        wanted: &str,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let DeValue::Integer(digits) = value.get_ref() else {
            return Err(self.wrong_type(key, value, wanted));
        };
        i64::from_str_radix(digits.as_str(), digits.radix())
            .ok()
            .filter(|n| range.contains(n) && allowed(*n))
            .and_then(|n| T::try_from(n).ok())
            .map(Some)
            .ok_or_else(|| {
                self.source.error(
                    value.span().start,
                    format!("`{key}` is {digits}; it must be {wanted}"),
                )
            })
    }

    /// One of the words in `choices`.
    pub(super) fn choice<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let words: Vec<String> = choices.iter().map(|(w, _)| format!("\"{w}\"")).collect();
        let wanted = words.join(" or ");
        let Some(word) = self.string(key, &wanted)? else {
            return Ok(None);
        };
        match choices.iter().find(|(w, _)| *w == word.value) {
            Some((_, value)) => Ok(Some(*value)),
            None => Err(self.error_at(
                &word,
                format!("`{key}` is \"{}\"; it must be {wanted}", word.value),
            )),
        }
    }

    /// A table under `key`.
    pub(super) fn table(
        &mut self,
        key: &'static str,
        name: &'a str,
        wanted: &str,
    ) -> Result<Option<Table<'a>>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.get_ref() {
            DeValue::Table(t) => Ok(Some(Table::new(self.source, name, value.span().start, t))),
            _ => Err(self.wrong_type(key, value, wanted)),
        }
    }

    /// The tables of the array of tables under `key`; none when there is no such key.
    pub(super) fn tables(
        &mut self,
        key: &'static str,
        name: &'a str,
    ) -> Result<Vec<Table<'a>>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let wanted = format!("tables that each start with `{name}`");
        let DeValue::Array(array) = value.get_ref() else {
            return Err(self.wrong_type(key, value, &wanted));
        };
        array
            .iter()
            .map(|item| match item.get_ref() {
                DeValue::Table(t) => Ok(Table::new(self.source, name, item.span().start, t)),
                _ => Err(self.wrong_type(key, item, &wanted)),
            })
            .collect()
    }

    /// Refuses the keys that nobody asked for. Call it last.
    pub(super) fn finish(self) -> Result<(), ConfigError> {
        let unknown = self
            .entries
            .keys()
            .filter(|key| !self.asked.contains(key.get_ref().as_ref()))
            .min_by_key(|key| key.span().start);
        let Some(key) = unknown else {
            return Ok(());
        };
        let allowed: Vec<String> = self.asked.iter().map(|k| format!("`{k}`")).collect();
        Err(self.source.error(
            key.span().start,
            format!(
                "{} has no key `{}`; its keys are {}",
                self.name,
                key.get_ref(),
                allowed.join(", ")
            ),
        ))
    }
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
