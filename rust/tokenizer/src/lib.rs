//! Text and token bridge of the dsserve engine.
