"""`dsserve debug forward`: runs prompts through the serving runner and writes tensors named as in the golden files."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsserve import _native
from dsserve.config.model import ModelConfig, load_model_config
from dsserve.debug.capture import KINDS, TensorCapture
from dsserve.debug.drafts import DraftRecorder
from dsserve.debug.plans import RequestPlanner
from dsserve.engram.hashing import build_engram_constants, load_token_map
from dsserve.errors import ConfigError, DsserveError
from dsserve.worker.cuda_device import CudaDevice
from dsserve.worker.placed_runner import PlacedRunner
from dsserve.worker.runner import Runner, RunnerSizes, load_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsserve.models.deepseek_v4.model import DeepseekV41Model
    from dsserve.worker.cuda_device import Device

MODES = ("full", "replay", "dense")
#: `index_topk` and `candidate_topk_blocks` of mode `dense`: every position is selected.
DENSE_TOPK = 4096
_PREFIX_SLOT, _SLOT, _NUM_SLOTS = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Case:
    """One entry of the input file; see `docs/parity.md`."""

    name: str
    input_ids: list[int]
    mode: str = "full"
    cached_prefix: int = 0
    chunk: int | None = None
    decode_steps: int = 0
    capture: frozenset[str] = field(default_factory=frozenset)
    draft: bool = False
    forced_ids: tuple[int, ...] = ()

    @property
    def output_prefix(self) -> str:
        """Name in front of every tensor of the case."""
        suffix = "" if self.mode == "full" else f".{self.mode}"
        if self.mode == "replay" and self.cached_prefix:
            suffix += f".prefix{self.cached_prefix}"
        return self.name if self.name.endswith(suffix) else self.name + suffix


def read_cases(path: Path, config: ModelConfig) -> list[Case]:
    """Read and check the input file.

    Raises:
        ConfigError: Naming the case and the field.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--input {path}: {error}") from None
    entries = body.get("cases") if isinstance(body, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f'--input {path}: expected {{"cases": [..]}}')
    return [_case(index, entry, config) for index, entry in enumerate(entries)]


def _case(index: int, entry: Any, config: ModelConfig) -> Case:
    def refuse(message: str) -> ConfigError:
        return ConfigError(f"case {index}: {message}")

    if not isinstance(entry, dict):
        raise refuse("must be an object")
    unknown = sorted(
        set(entry)
        - {
            "name",
            "input_ids",
            "mode",
            "cached_prefix",
            "chunk",
            "decode_steps",
            "draft",
            "capture",
            "forced_ids",
        }
    )
    if unknown:
        raise refuse(f"unknown field {unknown[0]}")
    ids = entry.get("input_ids")
    if (
        not isinstance(ids, list)
        or not ids
        or not all(isinstance(i, int) and 0 <= i < config.vocab_size for i in ids)
    ):
        raise refuse(f"input_ids must be a non-empty list of ids below {config.vocab_size}")
    mode, prefix = entry.get("mode", "full"), entry.get("cached_prefix", 0)
    capture = frozenset(entry.get("capture", ["logits"]))
    known = {*KINDS, "logits", "greedy", "draft"}
    if mode not in MODES:
        raise refuse(f"mode {mode!r} is not one of {', '.join(MODES)}")
    draft = bool(entry.get("draft")) or "draft" in capture
    if (draft or "dspark_main_hidden" in capture) and not config.has_draft:
        raise refuse("draft output needs a checkpoint with a DSpark head")
    if draft and not ("greedy" in capture and entry.get("decode_steps", 0) > 1):
        raise refuse(
            "drafts follow decode steps: capture greedy too, with two decode_steps or more"
        )
    if capture - known:
        raise refuse(
            f"capture {sorted(capture - known)[0]!r} is not one of {', '.join(sorted(known))}"
        )
    if prefix and (mode != "replay" or prefix % 2 or not 0 < prefix < len(ids)):
        raise refuse("cached_prefix needs mode replay and must be even and shorter than input_ids")
    forced = entry.get("forced_ids", [])
    if not isinstance(forced, list) or not all(
        isinstance(i, int) and 0 <= i < config.vocab_size for i in forced
    ):
        raise refuse(f"forced_ids must be a list of ids below {config.vocab_size}")
    if forced and len(forced) < entry.get("decode_steps", 0) - 1:
        raise refuse("forced_ids must have an id for each decode step but the last")
    chunk = entry.get("chunk")
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise refuse(f"chunk must be a positive integer or null, not {chunk!r}")
    total = len(ids) + entry.get("decode_steps", 0)
    if total > config.max_position_embeddings:
        raise refuse(
            f"{total} tokens exceed max_position_embeddings {config.max_position_embeddings}"
        )
    return Case(
        str(entry.get("name", f"case{index}")),
        ids,
        mode,
        prefix,
        chunk,
        entry.get("decode_steps", 0),
        capture,
        draft,
        tuple(forced),
    )


class CaseRunner:
    """Runs cases; one model per selection width."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        numerics: str,
        *,
        draft: bool = False,
        device: torch.device | None = None,
        graph_device: Device | None = None,
    ) -> None:
        """Models are loaded when a case first needs them.

        Args:
            path: Checkpoint.
            config: Its configuration.
            numerics: `released` or `fp32`.
            draft: With the DSpark head.
            device: Where cases run; the CPU if None.
            graph_device: The same, if decode steps are to be replays of a graph.
        """
        self._path, self._config, self._numerics = path, config, numerics
        self._draft = draft
        self._device = device or torch.device("cpu")
        self._graph_device = graph_device
        self._models: dict[bool, DeepseekV41Model] = {}

    def run(self, case: Case) -> dict[str, Tensor]:
        """Tensors of one case by their golden names."""
        page_size = _page_size(case.cached_prefix)
        num_columns = -(-(len(case.input_ids) + case.decode_steps + 1) // page_size)
        sizes = RunnerSizes(
            page_size,
            2 * num_columns + 2,
            _NUM_SLOTS,
            num_columns,
            self._config.max_position_embeddings,
        )
        model = self._model(case.mode == "dense")
        runner = PlacedRunner(model, sizes, self._device, self._graph_device)
        cache = _native.RadixCache(page_size=page_size, num_pages=sizes.num_pages)
        planner = RequestPlanner(cache, slot=_SLOT, page_size=page_size, num_columns=num_columns)
        # With the head loaded its input is written for every case: golden prompts without drafts have it.
        taps = {"dspark_main_hidden"} if self._draft else set()
        capture = TensorCapture(case.capture | taps)
        if case.cached_prefix:
            prefix = RequestPlanner(
                cache, slot=_PREFIX_SLOT, page_size=page_size, num_columns=num_columns
            )
            self._prefill(runner, prefix, case.input_ids[: case.cached_prefix], case, None)
            prefix.insert(case.input_ids[: case.cached_prefix])
            hit = planner.take_hit(case.input_ids[: case.cached_prefix])
            if hit != case.cached_prefix:
                raise ConfigError(
                    f"case {case.name}: the prefix cache holds {hit} of {case.cached_prefix} tokens"
                )
        logits = self._prefill(
            runner, planner, case.input_ids, case, capture, hit=case.cached_prefix
        )
        result = dict(capture.tensors())
        if "logits" in case.capture:
            result["logits"] = logits
        if "greedy" in case.capture and case.decode_steps:
            under = "" if case.mode == "replay" else "greedy."
            for name, tensor in self._decode(runner, planner, case, logits[-1:]).items():
                result[under + name] = tensor
        return {f"{case.output_prefix}.{name}": tensor.cpu() for name, tensor in result.items()}

    def _model(self, is_dense: bool) -> DeepseekV41Model:
        if is_dense not in self._models:
            config = self._config
            if is_dense:
                config = config.replace(index_topk=DENSE_TOPK, candidate_topk_blocks=DENSE_TOPK)
            self._models[is_dense] = load_model(
                self._path,
                config,
                numerics=self._numerics,
                context_length=config.max_position_embeddings,
                device=self._device,
                draft=self._draft,
            )
        return self._models[is_dense]

    def _prefill(
        self,
        runner: Runner,
        planner: RequestPlanner,
        ids: Sequence[int],
        case: Case,
        capture: TensorCapture | None,
        *,
        hit: int = 0,
    ) -> Tensor:
        """Logits of every row that ran the decoder half."""
        window, end = self._config.sliding_window, len(ids)
        start = hit - min(hit, window)
        is_replay = case.mode == "replay"
        planner.floors.window, planner.floors.write = start, hit
        outputs = []
        for first, last in _chunks(start, end, case.chunk, window if is_replay else 1):
            is_open = is_replay and last < end
            tail_len = 0 if is_open else last - first
            if is_replay and not is_open:
                planner.floors.tail = max(start, end - window)
                tail_len = min(window, last - first)
            plan = planner.step(ids[first:last], first, ids[:first], tail_len=tail_len)
            outputs.append(runner.forward(runner.prepare(plan, all_logits=True), capture))
        return torch.cat(outputs)

    @staticmethod
    def _decode(
        runner: PlacedRunner, planner: RequestPlanner, case: Case, logits: Tensor
    ) -> dict[str, Tensor]:
        """Greedy tokens [n], the logits [n, V] they were taken from, and the drafts behind each step if asked for.

        Tokens travel through the token ring; forced ids are given instead.
        """
        recorder = None
        if case.draft and runner.model.draft is not None:
            recorder = DraftRecorder(
                runner, runner.model.draft, slot=_SLOT, floor=planner.floors.tail
            )
        rows = [logits]
        start = len(case.input_ids)
        token = logits.argmax(1)
        tokens = [token]
        runner.seed_token(_SLOT, start, token)
        for step in range(case.decode_steps - 1):
            given = case.forced_ids[step] if case.forced_ids else -1
            logits, store = runner.decode(planner.step([given], start + step, (), tail_len=1))
            token = logits.argmax(1)
            runner.pools.token_ring[store] = token
            if recorder is not None:
                # The token that the next step is given, whoever chose it.
                forced = case.forced_ids[step + 1 : step + 2]
                recorder.propose(token.new_tensor(forced) if forced else token, start + step + 1)
            rows.append(logits)
            tokens.append(token)
        result = {"tokens": torch.cat(tokens).to(torch.int32), "logits": torch.cat(rows)}
        return result if recorder is None else result | recorder.tensors()


def _page_size(cached_prefix: int) -> int:
    """The largest power of two up to 128 that divides the prefix (16 without one)."""
    if not cached_prefix:
        return 16
    return min(cached_prefix & -cached_prefix, 128)


def _chunks(start: int, end: int, chunk: int | None, min_last: int) -> list[tuple[int, int]]:
    """Half-open row ranges; the last one has at least `min_last` rows if there are so many."""
    size = chunk or max(end - start, 1)
    cuts = [*range(start, end, size), end]
    while len(cuts) > 2 and cuts[-1] - cuts[-2] < min_last:
        cuts[-2] = max(cuts[-1] - min_last, cuts[0])
        if cuts[-2] <= cuts[-3]:
            del cuts[-3 if len(cuts) > 3 and cuts[-2] < cuts[-3] else -2]
    return list(itertools.pairwise(cuts))


def engram_tensors(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The `engram.*` constants."""
    constants = build_engram_constants(
        config, load_token_map(path / "tokenizer.json", config.vocab_size)
    )
    return {
        "engram.token_map": torch.as_tensor(constants.token_map, dtype=torch.int32),
        "engram.multipliers": torch.as_tensor(constants.multipliers),
        "engram.primes": torch.as_tensor(constants.primes),
        "engram.offsets": torch.as_tensor(constants.offsets),
    }


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dsserve debug forward", description=__doc__)
    parser.add_argument("--model-path", required=True, type=Path)
    parser.add_argument("--input", required=True, type=Path, help="cases as JSON")
    parser.add_argument("--out", required=True, type=Path, help="safetensors file to write")
    parser.add_argument("--numerics", choices=("released", "fp32"), default="released")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cuda-graph", action="store_true", help="replay decode steps as a graph")
    options = parser.parse_args(list(argv))
    torch.set_num_threads(1)
    try:
        if options.cuda_graph and options.device != "cuda":
            raise ConfigError("--cuda-graph: only with --device cuda")
        cuda = CudaDevice(is_guarded=False) if options.device == "cuda" else None
        config = load_model_config(options.model_path)
        cases = read_cases(options.input, config)
        draft = any(case.draft or "dspark_main_hidden" in case.capture for case in cases)
        runner = CaseRunner(
            options.model_path,
            config,
            options.numerics,
            draft=draft,
            device=None if cuda is None else cuda.torch_device,
            graph_device=cuda if options.cuda_graph else None,
        )
        tensors = engram_tensors(options.model_path, config)
        for case in cases:
            tensors |= runner.run(case)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, options.out)
    except DsserveError as error:
        sys.stderr.write(f"dsserve debug forward: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"dsserve debug forward: --out {options.out}: {error}\n")
        return 2
    return 0
