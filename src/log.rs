//! Lines for people about what is created and destroyed, handed to the host program if it asked for them.

use std::fmt;

/// How much a line matters. The numbers are those of the C interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub enum Level {
    /// Right, but slower or larger than it could be.
    Warning = 1,
    /// What was chosen, created or destroyed.
    Info = 2,
}

/// Takes a line. It must not call back into this crate.
pub type Sink = Box<dyn Fn(Level, &str) + Send + Sync>;

/// Where a context's lines go.
#[derive(Default)]
pub struct Log(Option<(Level, Sink)>);

impl Log {
    /// Lines up to a level go to `sink`.
    pub fn new(level: Level, sink: Sink) -> Self {
        Log(Some((level, sink)))
    }

    /// Hands a line on if anybody wants it; only then is it made.
    pub fn line(&self, level: Level, text: impl FnOnce() -> String) {
        if let Some((wanted, sink)) = &self.0
            && level <= *wanted
        {
            sink(level, &text());
        }
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Log({:?})", self.0.as_ref().map(|(level, _)| level))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn lines_above_the_level_are_not_even_made() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let into = seen.clone();
        let log =
            Log::new(Level::Warning, Box::new(move |level, text| into.lock().unwrap().push((level, text.to_owned()))));
        log.line(Level::Info, || panic!("nobody asked"));
        log.line(Level::Warning, || "slow".into());
        Log::default().line(Level::Warning, || panic!("nobody asked"));
        assert_eq!(*seen.lock().unwrap(), [(Level::Warning, "slow".to_owned())]);
    }
}
