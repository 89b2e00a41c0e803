//! Continuous-batching scheduler as a pure state machine of the dsserve engine.
