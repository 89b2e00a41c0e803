//! States of a request and the moves between them.

/// Where a request is in its life (`serving.md` a.1, the part without grammar, tiers and hand-over).
///
/// ```text
/// Waiting -> Prefilling -> Running -> Done
///    ^                        |
///    +------ Retracted <------+        any -> Done
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// In the queue, owns nothing.
    Waiting,
    /// Has a slot and pages; part of its prompt is not planned yet.
    Prefilling,
    /// Its whole prompt is planned: one row per step.
    Running,
    /// Gave its slot and pages back; results of steps in flight are still due.
    Retracted,
    /// Ended; its terminal output is out.
    Done,
}

impl State {
    /// Whether a request may go from `self` to `to`.
    #[must_use]
    pub fn can_become(self, to: Self) -> bool {
        use State::{Done, Prefilling, Retracted, Running, Waiting};
        matches!(
            (self, to),
            (Waiting, Prefilling)
                | (Prefilling, Running)
                | (Running, Retracted)
                | (Retracted, Waiting)
                | (Waiting | Prefilling | Running | Retracted, Done)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::State::{self, Done, Prefilling, Retracted, Running, Waiting};

    const ALL: [State; 5] = [Waiting, Prefilling, Running, Retracted, Done];

    #[test]
    fn every_state_but_done_can_end_and_done_is_final() {
        for state in ALL {
            assert_eq!(state.can_become(Done), state != Done);
            assert!(!Done.can_become(state));
        }
    }

    #[test]
    fn a_retracted_request_waits_before_it_prefills_again() {
        assert!(Running.can_become(Retracted));
        assert!(!Retracted.can_become(Prefilling));
        assert!(Retracted.can_become(Waiting));
        assert!(!Waiting.can_become(Running));
    }
}
