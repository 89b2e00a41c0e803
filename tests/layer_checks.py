"""Judges layers that ran with the reference's inputs (`layer_runs.py`): errors, and the scores behind other choices.

What rounding gives is measured at its side: the reference's own layer on streams that were rounded to BF16 once more
(`rounded_again`), as the steps inside of a layer do several times.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from layer_runs import LayerRun, Output

#: Relative error of a layer's streams (README of the golden data, rule 2).
STREAM = 0.01
#: Swapped scores lie apart by at most so many times what rounding changes a score of the row by.
ROUNDINGS = 4.0
#: Share of a prompt's choices that may fall the other way.
SWAPPED = 0.05


@dataclass(frozen=True)
class Swap:
    """A row that chose otherwise.

    Attributes:
        layer: Where.
        what: `topk`, `blocks` or `experts`.
        gap: How far the reference's scores of what was swapped lie apart, at most.
        rounding: What rounding changes a score of the row by (root of the mean square).
        own: The largest difference of a score of the row.
        deviation: Standard deviation of the row's scores.
    """

    layer: int
    what: str
    gap: float
    rounding: float
    own: float
    deviation: float

    @property
    def num_roundings(self) -> float:
        """The gap in roundings."""
        return self.gap / max(self.rounding, 1e-300)


@dataclass
class Sum:
    """A relative error from sums of squares over all steps."""

    difference: float = 0.0
    values: float = 0.0

    def add(self, ours: Tensor, reference: Tensor) -> None:
        """Tensors of one step."""
        self.difference += float((ours.double() - reference.double()).square().sum())
        self.values += float(reference.double().square().sum())

    @property
    def relative(self) -> float:
        """Norm of the difference over that of the reference."""
        return (self.difference / max(self.values, 1e-300)) ** 0.5


@dataclass
class Errors:
    """One kind of tensor in one layer: the device's error, and what rounding gives."""

    device: Sum = field(default_factory=Sum)
    rounding: Sum = field(default_factory=Sum)

    @property
    def relative(self) -> float:
        """Of the device."""
        return self.device.relative

    @property
    def of_rounding(self) -> float:
        """Of the reference with rounding."""
        return self.rounding.relative


@dataclass
class Judgement:
    """What was found.

    Attributes:
        errors: By layer and kind.
        swaps: Choices that differ.
        num_choices: All of them.
        failures: Sentences; none if all is well.
    """

    errors: dict[tuple[int, str], Errors] = field(default_factory=lambda: defaultdict(Errors))
    swaps: list[Swap] = field(default_factory=list)
    num_choices: int = 0
    failures: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line of what was measured."""
        parts = []
        for kind in sorted({kind for _, kind in self.errors}):
            found = [errors for (_, name), errors in self.errors.items() if name == kind]
            worst = max(found, key=lambda errors: errors.relative)
            parts.append(f"{kind} {worst.relative:.2g} ({worst.of_rounding:.2g})")
        text = f"largest relative errors (of rounding): {', '.join(parts)}; "
        text += f"{len(self.swaps)} of {self.num_choices} choices differ"
        if self.swaps:
            most = max(self.swaps, key=lambda swap: swap.num_roundings)
            text += (
                f", scores at most {most.num_roundings:.2g} roundings apart "
                f"({most.gap / max(most.deviation, 1e-300):.2g} standard deviations)"
            )
        return text


def rounded_again(streams: Tensor) -> Tensor:
    """BF16 streams with one number in twelve moved by an ulp, the mean square of an error of up to half an ulp."""
    generator = torch.Generator().manual_seed(streams.numel())
    moved = torch.rand(streams.shape, generator=generator)
    step = (moved < 1 / 24).to(torch.int16) - (moved > 1 - 1 / 24).to(torch.int16)
    bits = streams.contiguous().view(torch.int16) + step
    return torch.where(streams == 0, streams, bits.view(streams.dtype))


def judge(runs: Sequence[LayerRun], *, block_size: int) -> Judgement:
    """Compare the first of the others, the device, with the reference; the second is the reference with rounding.

    Args:
        runs: All layers of all steps.
        block_size: `candidate_block_size`.
    """
    found = Judgement()
    for run in runs:
        device, rounding = run.others
        if _shapes(device) != _shapes(run.reference):
            found.failures.append(f"layer {run.layer}: other tensors: {_shapes(device)}")
            return found
        for name, output in (("device", device), ("rounding", rounding)):
            for kind, (ours, theirs) in _pairs(run.reference, output).items():
                getattr(found.errors[run.layer, kind], name).add(ours, theirs)
    for run in runs:
        _add_swaps(found, run.layer, run.reference, run.others[0], block_size)
    _decide(found)
    return found


def _shapes(output: Output) -> dict[str, torch.Size | None]:
    candidates = None if output.candidates is None else output.candidates.shape
    return {name: tensor.shape for name, tensor in output.tensors.items()} | {"blocks": candidates}


def _pairs(reference: Output, output: Output) -> dict[str, tuple[Tensor, Tensor]]:
    """What is compared by its error: ours and the reference's, by kind."""
    pairs = {name: (output.stored[name], stored) for name, stored in reference.stored.items()}
    theirs = reference.tensors
    if "index_scores" in theirs:
        scores = theirs["index_scores"]
        hidden = scores == -torch.inf
        ours = output.tensors["index_scores"].masked_fill(hidden, 0)
        pairs["index_scores"] = ours, scores.masked_fill(hidden, 0)
    # Behind a choice that differs the row has other inputs; the choice itself is judged.
    alike = _attended_alike(reference, output)
    pairs["router_scores"] = output.router_scores[alike], reference.router_scores[alike]
    alike &= _same_sets(theirs["route_ids"], output.tensors["route_ids"])
    for kind in ("stream", "next_pre"):
        pairs[kind] = output.tensors[kind][alike], theirs[kind][alike]
    return pairs


def _same_sets(left: Tensor, right: Tensor) -> Tensor:
    """[T] whether rows hold the same numbers."""
    return (left.sort(1).values == right.sort(1).values).all(1)


def _attended_alike(reference: Output, other: Output) -> Tensor:
    """[T] whether attention saw the same compressed rows."""
    if "topk" not in reference.tensors:
        return torch.ones(reference.router_scores.shape[0], dtype=torch.bool)
    return _same_sets(reference.tensors["topk"], other.tensors["topk"])


def _add_swaps(
    found: Judgement, layer: int, reference: Output, device: Output, block_size: int
) -> None:
    alike = _attended_alike(reference, device)
    outputs = (reference, device)
    if "index_scores" in reference.tensors:
        noise = found.errors[layer, "index_scores"].of_rounding
        scores, own = (output.tensors["index_scores"] for output in outputs)
        marks = (_marks(output.tensors["topk"], scores.shape[1]) for output in outputs)
        _compare(found, (layer, "topk"), noise, scores, own, *marks)
        if reference.candidates is not None and device.candidates is not None:
            best, own = (_blocks(each, block_size, -torch.inf) for each in (scores, own))
            masks = [reference.candidates, device.candidates]
            kept = (_blocks(mask.float(), block_size, 0.0) > 0 for mask in masks)
            _compare(found, (layer, "blocks"), noise, best, own, *kept)
    elif not bool(alike.all()):
        found.failures.append(f"layer {layer}: another choice where everything is chosen")
    noise = found.errors[layer, "router_scores"].of_rounding
    scores, own = (output.router_scores[alike] for output in outputs)
    marks = (_marks(o.tensors["route_ids"], scores.shape[1])[alike] for o in outputs)
    _compare(found, (layer, "experts"), noise, scores, own, *marks)


def _marks(chosen: Tensor, width: int) -> Tensor:
    """[T, width] bool of chosen positions [T, k], -1 = none."""
    marks = torch.zeros(chosen.shape[0], width + 1, dtype=torch.bool)
    return marks.scatter_(1, torch.where(chosen < 0, width, chosen), True)[:, :width]


def _blocks(values: Tensor, size: int, outside: float) -> Tensor:
    """[T, N] -> [T, blocks], the largest of each."""
    padded = pad(values, (0, -values.shape[1] % size), value=outside)
    return padded.view(values.shape[0], -1, size).amax(-1)


def _compare(
    found: Judgement,
    where: tuple[int, str],
    noise: float,
    scores: Tensor,
    own: Tensor,
    theirs: Tensor,
    ours: Tensor,
) -> None:
    """Note the rows whose marks differ.

    Args:
        found: Where to.
        where: Layer, and what is chosen.
        noise: Relative error that rounding gives the scores.
        scores: Of the reference.
        own: Of the device.
        theirs: [T, N] what the reference chose.
        ours: What the device chose.
    """
    found.num_choices += scores.shape[0]
    for row in (theirs != ours).any(1).nonzero().flatten().tolist():
        left, taken = (scores[row][m] for m in (theirs[row] & ~ours[row], ours[row] & ~theirs[row]))
        seen = scores[row] > -torch.inf
        values, values_own = scores[row][seen].double(), own[row][seen].double()
        is_swap = left.numel() == taken.numel() > 0
        swap = Swap(
            *where,
            gap=float(left.max() - taken.min()) if is_swap else float("inf"),
            rounding=noise * float(values.square().mean().sqrt()),
            own=float((values_own - values).abs().max()),
            deviation=float(values.std(correction=0)),
        )
        found.swaps.append(swap)


def _decide(found: Judgement) -> None:
    for (layer, kind), errors in found.errors.items():
        limit = min(errors.of_rounding, STREAM) if kind == "stream" else errors.of_rounding
        if not errors.relative <= limit:
            found.failures.append(
                f"layer {layer}: {kind} relative error {errors.relative:.3g} (bound {limit:.3g})"
            )
    for swap in found.swaps:
        # Its own scores explain the device's choice, and rounding explains its scores.
        if not swap.gap <= min(2 * swap.own, ROUNDINGS * swap.rounding):
            found.failures.append(f"not within rounding: {swap}")
    if len(found.swaps) > SWAPPED * found.num_choices:
        found.failures.append(f"{len(found.swaps)} of {found.num_choices} choices differ")
