//! Shape of a cache: its pages, its components and what goes first when pages are short.

use crate::error::CacheError;

/// A kind of cached data with its own page numbering.
///
/// FULL decides how far a key is cached; the others may shorten a hit (see [`Retention`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Component {
    /// What every token of a prefix needs; it is always there.
    Full,
    /// Sliding-window data of the model.
    Window,
    /// Sliding-window data of a draft model.
    Draft,
    /// Running state, such as partial groups of a compressor.
    State,
}

impl Component {
    /// Those that a [`CacheConfig`] may add, in the order in which they are kept.
    pub const OPTIONAL: [Self; 3] = [Self::Window, Self::Draft, Self::State];

    /// The name in messages and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window => "window",
            Self::Draft => "draft",
            Self::State => "state",
        }
    }
}

/// Which part of a prefix must hold a component's data for a hit to end there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retention {
    /// All of it.
    Path,
    /// Its last tokens, as many as given (all of a shorter prefix).
    Trailing(u32),
    /// Nothing: the data belongs to requests and is not in the tree. After a hit the last
    /// `replay_len` tokens are computed again, so a hit must be longer than that.
    None {
        /// Cached tokens computed again after a hit; 0 for data that is derived otherwise.
        replay_len: u32,
    },
}

/// What goes first when pages of a component are needed. Among equals the least recently used goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EvictionPolicy {
    /// Least recently used. Constant time; all others take logarithmic time.
    #[default]
    Lru,
    /// Fewest hits.
    Lfu,
    /// What was hit less than twice before what was hit twice or more.
    Slru,
    /// Oldest insert.
    Fifo,
    /// Lowest request priority (see [`InsertOptions`](crate::InsertOptions)).
    Priority,
    /// Lowest (cost to compute again, which grows with the depth) x (recent hit rate).
    Cost,
}

/// A component besides FULL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ComponentConfig {
    /// Which part of a prefix keeps data.
    pub retention: Retention,
    /// Tokens that one page of the component covers: a power of two, at most the FULL page size.
    pub page_tokens: u32,
    /// Usable pages, numbered from 1; page 0 is the dummy page. Not used by [`Retention::None`].
    pub num_pages: u32,
    /// What goes first when its pages are short.
    pub policy: EvictionPolicy,
}

impl ComponentConfig {
    /// A component that drops its least recently used data first.
    #[must_use]
    pub fn new(retention: Retention, page_tokens: u32, num_pages: u32) -> Self {
        Self {
            retention,
            page_tokens,
            num_pages,
            policy: EvictionPolicy::Lru,
        }
    }

    /// The same with another eviction policy.
    #[must_use]
    pub fn with_policy(mut self, policy: EvictionPolicy) -> Self {
        self.policy = policy;
        self
    }

    fn check(&self, page_size: u32) -> Result<(), CacheError> {
        if matches!(self.retention, Retention::None { .. }) {
            return Ok(());
        }
        if !self.page_tokens.is_power_of_two() || self.page_tokens > page_size {
            return invalid(
                "page_tokens",
                self.page_tokens,
                "a power of two, at most page_size",
            );
        }
        if self.num_pages == 0 || self.num_pages == u32::MAX {
            return invalid(
                "num_pages of a component",
                self.num_pages,
                "between 1 and 2^32 - 2",
            );
        }
        if self.retention == Retention::Trailing(0) {
            return invalid("trailing", 0, "at least 1 token");
        }
        Ok(())
    }
}

/// Shape of a cache.
///
/// ```
/// use dsserve_radix_cache::{CacheConfig, Component, ComponentConfig, EvictionPolicy, Retention};
///
/// let window = ComponentConfig::new(Retention::Trailing(128), 64, 4096);
/// let config = CacheConfig::new(64, 100_000)
///     .with_policy(EvictionPolicy::Slru)
///     .with_component(Component::Window, window);
/// assert_eq!(config.component(Component::Window), Some(window));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Tokens a FULL page holds; a power of two.
    pub page_size: u32,
    /// Usable FULL pages, numbered from 1; page 0 comes on top.
    pub num_pages: u32,
    /// With false nothing is ever cached: a match gives 0 and an insert frees the pages it gets.
    pub enabled: bool,
    /// What goes first when FULL pages are short.
    pub policy: EvictionPolicy,
    /// KV events are recorded, and this many batches kept for replay; `None` records nothing.
    pub event_batches: Option<u32>,
    components: [Option<ComponentConfig>; 3],
}

impl CacheConfig {
    /// FULL pages only, least recently used first, no events.
    #[must_use]
    pub fn new(page_size: u32, num_pages: u32) -> Self {
        Self {
            page_size,
            num_pages,
            enabled: true,
            policy: EvictionPolicy::Lru,
            event_batches: None,
            components: [None; 3],
        }
    }

    /// The same, caching or not.
    #[must_use]
    pub fn with_enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// The same with another eviction policy for FULL pages.
    #[must_use]
    pub fn with_policy(mut self, policy: EvictionPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// The same with KV events, of which `num_batches` are kept for replay.
    #[must_use]
    pub fn with_events(mut self, num_batches: u32) -> Self {
        self.event_batches = Some(num_batches);
        self
    }

    /// The same with a component besides FULL ([`Component::Full`] changes nothing).
    #[must_use]
    pub fn with_component(mut self, component: Component, config: ComponentConfig) -> Self {
        for (slot, kind) in self.components.iter_mut().zip(Component::OPTIONAL) {
            if kind == component {
                *slot = Some(config);
            }
        }
        self
    }

    /// How a component besides FULL is set up.
    #[must_use]
    pub fn component(&self, component: Component) -> Option<ComponentConfig> {
        let mut all = self.components();
        all.find(|(kind, _)| *kind == component)
            .map(|(_, config)| config)
    }

    pub(crate) fn components(&self) -> impl Iterator<Item = (Component, ComponentConfig)> {
        let kinds = Component::OPTIONAL.into_iter();
        kinds
            .zip(self.components)
            .filter_map(|(kind, config)| Some((kind, config?)))
    }

    /// Hits of at most this many tokens are of no use.
    pub(crate) fn replay_len(&self) -> u32 {
        let lens = self.components().map(|(_, config)| match config.retention {
            Retention::None { replay_len } => replay_len,
            _ => 0,
        });
        lens.max().unwrap_or(0)
    }

    pub(crate) fn check(&self) -> Result<(), CacheError> {
        if !self.page_size.is_power_of_two() {
            return invalid("page_size", self.page_size, "a power of two");
        }
        let num_tokens = (u64::from(self.num_pages) + 1) * u64::from(self.page_size);
        if self.num_pages == 0 || num_tokens > u64::from(u32::MAX) {
            let requirement = "at least 1, with less than 2^32 tokens in all pages";
            return invalid("num_pages", self.num_pages, requirement);
        }
        self.components()
            .try_for_each(|(_, config)| config.check(self.page_size))
    }
}

fn invalid(field: &'static str, value: u32, requirement: &'static str) -> Result<(), CacheError> {
    Err(CacheError::InvalidConfig {
        field,
        value: value.into(),
        requirement,
    })
}
