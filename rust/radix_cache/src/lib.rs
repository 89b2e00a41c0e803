//! Paged radix prefix cache of the dsserve engine.
