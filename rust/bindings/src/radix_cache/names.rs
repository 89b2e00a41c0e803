//! What Python calls things: handles, namespaces, components, policies, counts.
use dsserve_radix_cache as core;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A cached prefix; stale once it was evicted.
#[pyclass(frozen, module = "dsserve._native")]
pub struct CacheNode(pub(super) core::NodeHandle);

/// What must agree besides the tokens; the empty string differs from `None`.
#[pyclass(frozen, module = "dsserve._native")]
pub struct CacheNamespace(pub(super) core::Namespace);

#[pymethods]
impl CacheNamespace {
    #[new]
    #[pyo3(signature = (*, model_generation = 0, extra_key = None, cache_salt = None, adapter = None))]
    fn new(
        model_generation: u64,
        extra_key: Option<String>,
        cache_salt: Option<String>,
        adapter: Option<String>,
    ) -> Self {
        Self(core::Namespace {
            model_generation,
            extra_key,
            cache_salt,
            adapter,
        })
    }
}

pub fn policy(name: &str) -> PyResult<core::EvictionPolicy> {
    Ok(match name {
        "lru" => core::EvictionPolicy::Lru,
        "lfu" => core::EvictionPolicy::Lfu,
        "slru" => core::EvictionPolicy::Slru,
        "fifo" => core::EvictionPolicy::Fifo,
        "priority" => core::EvictionPolicy::Priority,
        "cost" => core::EvictionPolicy::Cost,
        _ => {
            let known = "lru, lfu, slru, fifo, priority or cost";
            let message = format!("policy = {name:?} is not valid: it must be {known}");
            return Err(PyValueError::new_err(message));
        }
    })
}

pub fn component(name: &str) -> PyResult<core::Component> {
    let mut all = core::Component::OPTIONAL.into_iter();
    all.find(|component| component.name() == name)
        .ok_or_else(|| {
            let message = format!("component = {name:?} is not one of window, draft, state");
            PyValueError::new_err(message)
        })
}

/// `{name: (window, page_tokens, num_pages)}`; a window of 0 asks for data on the whole path.
pub fn with_components(
    config: core::CacheConfig,
    components: Option<&Bound<'_, PyDict>>,
) -> PyResult<core::CacheConfig> {
    let mut config = config;
    for (name, shape) in components.into_iter().flatten() {
        let (window, page_tokens, num_pages) = shape.extract()?;
        let retention = if window == 0 {
            core::Retention::Path
        } else {
            core::Retention::Trailing(window)
        };
        let shape = core::ComponentConfig::new(retention, page_tokens, num_pages);
        config = config.with_component(component(name.extract()?)?, shape);
    }
    Ok(config)
}

/// Counts by component and owner, receipts, and the number of the next event batch.
pub fn stats<'py>(py: Python<'py>, cache: &core::RadixCache) -> PyResult<Bound<'py, PyDict>> {
    let stats = PyDict::new(py);
    for component in [core::Component::Full]
        .into_iter()
        .chain(core::Component::OPTIONAL)
    {
        // Components that the tree does not hold are left out.
        if let Ok(counts) = cache.pool_counts(component) {
            let pool = PyDict::new(py);
            pool.set_item("num_pages", counts.num_pages)?;
            pool.set_item("num_free", counts.num_free)?;
            pool.set_item("num_held", counts.num_held)?;
            pool.set_item("num_evictable", counts.num_evictable)?;
            pool.set_item("num_locked", counts.num_locked)?;
            stats.set_item(component.name(), pool)?;
        }
    }
    stats.set_item("num_receipts", cache.num_receipts())?;
    stats.set_item("next_event_sequence", cache.next_event_sequence())?;
    Ok(stats)
}
