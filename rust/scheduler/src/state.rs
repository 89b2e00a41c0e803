//! States of a request and the moves between them: every move is a method of [`Lifecycle`].

use thiserror::Error;

/// Where a request is in its life (`serving.md` a.1).
///
/// ```text
/// Received -> Tokenized -> [GrammarWait] -> [StoragePrefetch] -> Waiting
/// Waiting -> [LoadBack] -> Prefilling -> Running -> Finishing -> Done
/// Running -> Retracted -> Waiting
/// any -> Aborting -> Done
/// prefill role: Tokenized -> Bootstrapping -> Waiting -> Prefilling -> Sending -> Done
/// decode role:  Tokenized -> Handshaking -> Preallocated -> Receiving -> Ready -> Running
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Known, its prompt is text.
    Received,
    /// Its prompt is token ids.
    Tokenized,
    /// Its grammar is being compiled.
    GrammarWait,
    /// Pages of it are on their way from the store.
    StoragePrefetch,
    /// In the queue, owns nothing.
    Waiting,
    /// Has a slot; pages come back from the host tier.
    LoadBack,
    /// Has a slot and pages; part of its prompt is not planned yet.
    Prefilling,
    /// Its whole prompt is planned: it has rows in every step.
    Running,
    /// Its last token is out; it gives back what it owns.
    Finishing,
    /// Gave its slot and pages back; results of steps in flight are still due.
    Retracted,
    /// Ends early; it gives back what it owns.
    Aborting,
    /// Ended; its terminal output is out and it owns nothing.
    Done,
    /// Prefill role: the decoding side is being looked up.
    Bootstrapping,
    /// Prefill role: its KV is on its way to the decoding side.
    Sending,
    /// Decode role: the prefilling side is being looked up.
    Handshaking,
    /// Decode role: slot and pages for the prompt are taken.
    Preallocated,
    /// Decode role: its KV is arriving.
    Receiving,
    /// Decode role: its KV is there.
    Ready,
}

/// Every state, in the order of their declaration.
pub const STATES: [State; 18] = [
    State::Received,
    State::Tokenized,
    State::GrammarWait,
    State::StoragePrefetch,
    State::Waiting,
    State::LoadBack,
    State::Prefilling,
    State::Running,
    State::Finishing,
    State::Retracted,
    State::Aborting,
    State::Done,
    State::Bootstrapping,
    State::Sending,
    State::Handshaking,
    State::Preallocated,
    State::Receiving,
    State::Ready,
];

/// Which part of a request's work this server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Role {
    /// All of it.
    #[default]
    Unified,
    /// The prompt; another server decodes.
    Prefill,
    /// The output; another server computed the prompt.
    Decode,
}

/// A move that no request may make: a bug of whoever asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a request of role {role:?} cannot go from {from:?} to {to:?}")]
pub struct IllegalMove {
    /// The request's role.
    pub role: Role,
    /// Where it is; it stays there.
    pub from: State,
    /// Where it should have gone.
    pub to: State,
}

impl State {
    /// Whether a request of `role` may go from `self` to `to`.
    #[must_use]
    #[expect(
        clippy::match_same_arms,
        reason = "the table is read in the order of a request's life"
    )]
    pub fn can_become(self, to: Self, role: Role) -> bool {
        use State::{
            Aborting, Bootstrapping, Done, Finishing, GrammarWait, Handshaking, LoadBack,
            Preallocated, Prefilling, Ready, Received, Receiving, Retracted, Running, Sending,
            StoragePrefetch, Tokenized, Waiting,
        };
        match (self, to) {
            (Done, _) => false,
            (_, Aborting) => self != Aborting,
            (Aborting, _) => to == Done,
            // The way into the queue is the same for the roles that prefill.
            (Received, Tokenized) => true,
            (Tokenized, GrammarWait) | (GrammarWait, StoragePrefetch) => true,
            (Tokenized, StoragePrefetch) => role != Role::Decode,
            (Tokenized | GrammarWait | StoragePrefetch, Waiting) => role == Role::Unified,
            (Tokenized | GrammarWait | StoragePrefetch, Bootstrapping)
            | (Bootstrapping, Waiting) => role == Role::Prefill,
            (Waiting, LoadBack | Prefilling) | (LoadBack, Waiting | Prefilling) => true,
            // A prompt's end, an output's end. A request that waits or prefills again after a
            // retraction may end too: a stop string is found late.
            (Prefilling, Running) => role != Role::Prefill,
            (Running, Retracted) | (Retracted, Waiting) => role != Role::Prefill,
            (Waiting | Prefilling | Running | Retracted, Finishing) => role != Role::Prefill,
            (Finishing, Done) => true,
            (Prefilling, Sending) | (Sending, Done) => role == Role::Prefill,
            (Tokenized | GrammarWait, Handshaking)
            | (Handshaking, Preallocated)
            | (Preallocated, Receiving)
            | (Receiving, Ready)
            | (Ready, Running) => role == Role::Decode,
            _ => false,
        }
    }

    /// Whether a request in this state may own a slot and pages.
    #[must_use]
    pub fn may_own(self) -> bool {
        matches!(
            self,
            Self::LoadBack
                | Self::Prefilling
                | Self::Running
                | Self::Finishing
                | Self::Aborting
                | Self::Sending
                | Self::Preallocated
                | Self::Receiving
                | Self::Ready
        )
    }
}

/// The state of one request; its methods are the only moves there are.
///
/// ```
/// use dsserve_scheduler::{Lifecycle, Role, State};
///
/// let mut life = Lifecycle::received(Role::Unified);
/// life.tokenize()?;
/// life.queue()?;
/// assert!(life.retract().is_err(), "only what runs can be retracted");
/// life.abort()?;
/// life.complete()?;
/// assert_eq!(life.state(), State::Done);
/// # Ok::<(), dsserve_scheduler::IllegalMove>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifecycle {
    role: Role,
    state: State,
}

/// One method for each state that a request can be moved into.
macro_rules! moves {
    ($($(#[$text:meta])* $name:ident => $to:ident;)*) => {
        impl Lifecycle {
            $(
                $(#[$text])*
                ///
                /// # Errors
                /// [`IllegalMove`]; the state is as before.
                pub fn $name(&mut self) -> Result<(), IllegalMove> {
                    self.enter(State::$to)
                }
            )*
        }
    };
}

moves! {
    /// The prompt is token ids now.
    tokenize => Tokenized;
    /// Its grammar must be compiled first.
    wait_for_grammar => GrammarWait;
    /// Pages were asked for from the store.
    start_prefetch => StoragePrefetch;
    /// It joins the queue, for the first time or after a retraction.
    queue => Waiting;
    /// Pages come back from the host tier.
    load_back => LoadBack;
    /// It has a slot and pages; its first chunk is planned.
    start_prefill => Prefilling;
    /// Its last chunk is planned, or its received state is published.
    start_running => Running;
    /// Its last token is known.
    finish => Finishing;
    /// It gave slot and pages back.
    retract => Retracted;
    /// It ends early.
    abort => Aborting;
    /// All it owned is given back.
    complete => Done;
    /// The decoding side is looked up.
    bootstrap => Bootstrapping;
    /// Its KV is on its way.
    start_sending => Sending;
    /// The prefilling side is looked up.
    start_handshake => Handshaking;
    /// Slot and pages are taken for what will arrive.
    preallocate => Preallocated;
    /// The first pages arrive.
    start_receiving => Receiving;
    /// Everything arrived.
    become_ready => Ready;
}

impl Lifecycle {
    /// The life of a request that was just received.
    #[must_use]
    pub fn received(role: Role) -> Self {
        Self {
            role,
            state: State::Received,
        }
    }

    /// Where it is.
    #[must_use]
    pub fn state(self) -> State {
        self.state
    }

    /// Which part of its work this server does.
    #[must_use]
    pub fn role(self) -> Role {
        self.role
    }

    fn enter(&mut self, to: State) -> Result<(), IllegalMove> {
        if !self.state.can_become(to, self.role) {
            return Err(IllegalMove {
                role: self.role,
                from: self.state,
                to,
            });
        }
        self.state = to;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLES: [Role; 3] = [Role::Unified, Role::Prefill, Role::Decode];

    #[test]
    fn every_state_but_done_can_be_aborted_and_then_only_ends() {
        for role in ROLES {
            for state in STATES {
                let may_abort = !matches!(state, State::Done | State::Aborting);
                assert_eq!(state.can_become(State::Aborting, role), may_abort);
                assert!(!State::Done.can_become(state, role));
                let is_end = state == State::Done;
                assert_eq!(State::Aborting.can_become(state, role), is_end);
            }
        }
    }

    #[test]
    fn every_role_has_its_way_from_received_to_done() {
        for role in ROLES {
            let mut reached = vec![State::Received];
            let mut next = 0;
            while next < reached.len() {
                let from = reached[next];
                let steps = STATES
                    .into_iter()
                    .filter(|to| from.can_become(*to, role) && *to != State::Aborting);
                for to in steps {
                    if !reached.contains(&to) {
                        reached.push(to);
                    }
                }
                next += 1;
            }
            assert!(reached.contains(&State::Done), "{role:?} ends");
            let sends = reached.contains(&State::Sending);
            let receives = reached.contains(&State::Receiving);
            assert_eq!(
                (sends, receives),
                (role == Role::Prefill, role == Role::Decode)
            );
            assert_eq!(reached.contains(&State::Running), role != Role::Prefill);
        }
    }

    #[test]
    fn no_state_is_a_dead_end() {
        for role in ROLES {
            for state in STATES.into_iter().filter(|state| *state != State::Done) {
                assert!(STATES.into_iter().any(|to| state.can_become(to, role)));
                assert!(
                    !state.can_become(state, role),
                    "{state:?} is a move to itself"
                );
            }
        }
    }

    #[test]
    fn a_retracted_request_waits_before_it_prefills_again() {
        for role in [Role::Unified, Role::Decode] {
            assert!(State::Running.can_become(State::Retracted, role));
            assert!(!State::Retracted.can_become(State::Prefilling, role));
            assert!(State::Retracted.can_become(State::Waiting, role));
            assert!(!State::Waiting.can_become(State::Running, role));
        }
    }

    #[test]
    fn an_illegal_move_changes_nothing_and_says_what_was_tried() {
        let mut life = Lifecycle::received(Role::Decode);
        life.tokenize().unwrap();
        let error = life.queue().unwrap_err();
        assert_eq!((error.from, error.to), (State::Tokenized, State::Waiting));
        assert_eq!(life.state(), State::Tokenized);
        life.start_handshake().unwrap();
        life.preallocate().unwrap();
        life.start_receiving().unwrap();
        life.become_ready().unwrap();
        life.start_running().unwrap();
        life.retract().unwrap();
        life.queue().unwrap();
        life.start_prefill().unwrap();
    }
}
