//! What an EM's program can take over from another one, as `em --formats` prints it.

use std::fmt::{self, Display};
use std::str::FromStr;

/// Versions that a program knows. As text two lines, `m2m 3` and `state 1 2`; lines that begin otherwise are for
/// later versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Formats {
    /// [`super::VERSION`] of the program.
    pub m2m: u16,
    /// Layouts of functions' state that it goes on with.
    pub state: Vec<u32>,
}

/// It is not what `em --formats` prints.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it does not say `m2m VERSION` and `state VERSION…`")]
pub struct NotFormats;

impl Display for Formats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "m2m {}\nstate", self.m2m)?;
        self.state
            .iter()
            .try_for_each(|version| write!(f, " {version}"))
    }
}

impl FromStr for Formats {
    type Err = NotFormats;

    fn from_str(text: &str) -> Result<Self, NotFormats> {
        let values = |key: &str| {
            let mut lines = text.lines().map(str::split_ascii_whitespace);
            lines.find_map(|mut words| (words.next() == Some(key)).then_some(words))
        };
        let mut m2m = values("m2m").ok_or(NotFormats)?;
        let state: Result<_, _> = values("state").ok_or(NotFormats)?.map(str::parse).collect();
        match (m2m.next().map(str::parse), m2m.next(), state) {
            (Some(Ok(m2m)), None, Ok(state)) => Ok(Self { m2m, state }),
            _ => Err(NotFormats),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_understood() {
        let formats = Formats {
            m2m: 3,
            state: vec![1, 2],
        };
        assert_eq!(formats.to_string(), "m2m 3\nstate 1 2");
        assert_eq!(formats.to_string().parse(), Ok(formats.clone()));
        assert_eq!(format!("new x\n{formats}\nmore\n").parse(), Ok(formats));
    }

    #[test]
    fn anything_else_is_not() {
        for text in [
            "",
            "m2m 3",
            "state 1",
            "m2m\nstate 1",
            "m2m 3 4\nstate 1",
            "m2m 3\nstate x",
        ] {
            assert_eq!(text.parse::<Formats>(), Err(NotFormats), "{text}");
        }
    }
}
