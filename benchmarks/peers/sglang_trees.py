"""SGLang's prefix caches: the Rust core of its unified cache (with a window too) and `RadixCache`.

Only the tree is wanted, so modules of SGLang that it names but does not use (layers, models, configurations) are
replaced by empty ones, and the allocator does nothing: freed slots are forgotten, slots to insert are
numbers made beforehand. Both make the peer faster than it is when it serves.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers.sizes import PAGE_SIZE, WINDOW
from benchmarks.peers.trees import CacheKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

UNUSED = (
    "sglang.srt.configs",
    "sglang.srt.layers",
    "sglang.srt.model_executor",
    "sglang.srt.models",
    "sglang.srt.multimodal",
    "dill",
    "partial_json_parser",
)
CACHES = "sglang.srt.mem_cache"
RUST, WITH_WINDOW, PYTHON = "SGLang Rust", "SGLang Rust", "SGLang RadixCache"


def sglang_kinds() -> list[CacheKind]:
    """Return the caches.

    Raises:
        ImportError: SGLang, or what its tree needs, is not installed.
        RuntimeError: Its Rust core does not accept the torch that is installed.
    """
    modules = _load()
    return [
        CacheKind(RUST, lambda tokens: SglangCache(modules, tokens, "rust")),
        CacheKind(
            WITH_WINDOW,
            lambda tokens: SglangCache(modules, tokens, "rust", has_window=True),
            has_window=True,
        ),
        CacheKind(PYTHON, lambda tokens: SglangCache(modules, tokens, None)),
    ]


class SglangCache:
    """One of SGLang's caches without memory behind it."""

    def __init__(
        self, modules: Any, num_tokens: int, core: str | None, *, has_window: bool = False
    ) -> None:
        self._base = modules.base
        self._key = modules.radix.RadixKey
        self._slots = modules.torch.arange(num_tokens)
        component = modules.component.ComponentType
        self._window = component.SWA if has_window else None
        self._evict_swa = 0
        params = modules.init.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=modules.window_allocator() if has_window else _Allocator(),
            page_size=PAGE_SIZE,
            sliding_window_size=WINDOW if has_window else None,
            tree_components=(component.FULL, component.SWA) if has_window else (component.FULL,),
            tree_core_backend=core,
        )
        if core is None:
            self.cache = modules.radix.RadixCache(params)
            return
        self.cache = modules.unified.UnifiedRadixCache(params)
        if type(self.cache.tree_core).__name__ != "RustUnifiedTreeCore":
            raise RuntimeError("SGLang fell back to its Python tree core")

    def key(self, tokens: NDArray[np.uint32]) -> Any:
        """Key and slots of a prompt; ids are 8 bytes each, as its requests hold them."""
        ids = array("q")
        ids.frombytes(tokens.astype(np.int64).tobytes())
        return self._key(ids), self._slots[: tokens.size]

    def match(self, key: Any) -> Any:
        """Match; slots of the prefix are not gathered."""
        return self.cache.match_prefix(self._base.MatchPrefixParams(key=key[0]))

    def cached_len(self, found: Any) -> int:
        """Tokens on the device."""
        return int(found.device_prefix_len)

    def insert(self, key: Any, found: Any) -> None:
        """Insert the whole key, as it must be."""
        params = self._base.InsertParams(
            key=key[0], value=key[1], prev_prefix_len=found.device_prefix_len
        )
        if self._window is not None:
            params.component_evicted_seqlens = {self._window: len(key[1]) - WINDOW}
        self.cache.insert(params)

    def evict(self, num_tokens: int) -> None:
        """Evict tokens of the full component; windows of evicted leaves go with them."""
        self.cache.evict(self._base.EvictParams(num_tokens=num_tokens))


class _Allocator:
    """Forgets what is freed."""

    device = "cpu"

    def free_segment(self, _indices: Any, *, start_pos: int) -> None:
        del start_pos

    free_full_segment = free_segment

    def free(self, _indices: Any) -> None:
        pass


def _window_allocator(base: Any) -> Any:
    """Return a class that SGLang takes for its allocator of two pools; both number slots alike."""

    def build(self: Any) -> None:
        self.device, self.page_size = "cpu", PAGE_SIZE
        self.full_attn_allocator, self.swa_attn_allocator = _Allocator(), _Allocator()

    def nothing(*_arguments: Any, **_named: Any) -> None:
        pass

    forgotten = dict.fromkeys(
        (
            "free",
            "free_segment",
            "free_full_segment",
            "free_swa_segment",
            "set_full_to_swa_mapping",
            "clear_full_to_swa_mapping",
        ),
        nothing,
    )
    translate = {"translate_swa_indices_for_transfer": lambda _self, indices: indices}
    return type("WindowAllocator", (base,), {"__init__": build, **forgotten, **translate})


def _load() -> Any:
    found = importlib.util.find_spec("sglang")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("not installed")
    importlib.import_module("torch")  # before anything is replaced
    package = types.ModuleType("sglang")  # its own __init__ loads the whole engine
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["sglang"] = package
    sys.meta_path.insert(0, _EmptyModules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _modules()


def _modules() -> Any:
    return types.SimpleNamespace(
        torch=importlib.import_module("torch"),
        unified=importlib.import_module(f"{CACHES}.unified_radix_cache"),
        radix=importlib.import_module(f"{CACHES}.radix_cache"),
        base=importlib.import_module(f"{CACHES}.base_prefix_cache"),
        init=importlib.import_module(f"{CACHES}.cache_init_params"),
        component=importlib.import_module(f"{CACHES}.unified_cache.component_type"),
        window_allocator=_window_allocator(
            importlib.import_module(f"{CACHES}.allocator.swa").SWATokenToKVPoolAllocator
        ),
    )


class _EmptyType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)


def _empty(name: str) -> Any:
    """Return a class that can be called, subscripted, inherited from and used as a decorator."""
    members: dict[str, Any] = {
        "__init__": lambda _self, *_arguments, **_named: None,
        "__call__": lambda _self, *arguments, **_named: arguments[0] if arguments else None,
        "__class_getitem__": classmethod(lambda cls, _item: cls),
        "__bool__": lambda _self: False,
    }
    return _EmptyType(name, (), members)


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _empty(name))
        return getattr(self, name)


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == unused or name.startswith(f"{unused}.") for unused in UNUSED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
