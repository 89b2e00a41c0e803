//! Rust errors to Python exceptions; panics become exceptions too.
use std::any::Any;
use std::panic::{catch_unwind, AssertUnwindSafe};

use dsserve_scheduler as core;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    dsserve._native,
    SchedulerError,
    PyException,
    "A wrong call of the scheduler (configuration, buffers, order of steps); never a bad request."
);
create_exception!(
    dsserve._native,
    InvariantError,
    SchedulerError,
    "`check_invariants` found the accounting broken: a bug, the engine process must end."
);

/// The exception for an error of the scheduler crate.
pub fn from_scheduler(error: &core::SchedulerError) -> PyErr {
    let message = error.to_string();
    match error {
        core::SchedulerError::Invariant { .. } | core::SchedulerError::Cache(_) => {
            InvariantError::new_err(message)
        }
        _ => SchedulerError::new_err(message),
    }
}

/// Runs `body`; a panic in it is a bug and becomes [`InvariantError`].
///
/// Its state may be half changed then: the caller must not use it again.
pub fn guard<T>(body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = panic_text(payload.as_ref());
        Err(InvariantError::new_err(format!("internal error: {text}")))
    })
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}
