"""Operators against float64 formulas, worked out row by row from model.md."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsserve_kernels.reference.quant import round_fp4_main, round_fp8
from dsserve_kernels.select import REGISTRY
from kernel_cases import CASES
from kernel_sources import EXPERTS, Source, pool, shared

seeds = st.integers(0, 2**31)
quick = settings(max_examples=15, deadline=None)


def bodies(operator: str) -> list:
    return [entry.body for entry in REGISTRY.by_operator[operator]]


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm().clamp_min(1e-30))


@quick
@given(seeds)
def test_attention_weighs_window_and_compressed_rows_and_a_sink(seed: int) -> None:
    q, window, main = CASES["sparse_attention"].make(Source(seed), 12, torch.float32)
    pool_rows = round_fp4_main(Source(7).normal(40, 64, dtype=torch.bfloat16)).double()
    keys = shared("windows").double()
    for body in bodies("sparse_attention"):
        ours = body(
            q,
            shared("windows"),
            window,
            pool("main"),
            main,
            shared("sink"),
            scale=0.125,
            round_weights=False,
        )
        for row in range(12):
            seen = [keys[i] for i in window[row].tolist() if i >= 0]
            seen += [pool_rows[i] for i in main[row].tolist() if i >= 0]
            for head in range(4):
                if not seen:
                    assert not ours[row, head].any()
                    continue
                values = torch.stack(seen)
                weights = (values @ q[row, head].double() * 0.125).exp()
                total = weights.sum() + math.exp(float(shared("sink")[head]))
                assert error(ours[row, head], weights @ values / total) < 1e-6


@quick
@given(seeds)
def test_attention_rounds_the_weights_but_not_their_sum(seed: int) -> None:
    source = Source(seed)
    q, rows = source.normal(1, 4, 64), source.normal(20, 64)
    index = torch.arange(20).unsqueeze(0)
    for body in bodies("sparse_attention"):
        ours = body(q, rows, index, None, None, shared("sink"), scale=0.125, round_weights=True)
        for head in range(4):
            scores = rows.double() @ q[0, head].double() * 0.125
            weights = (scores - scores.max()).exp()
            total = weights.sum() + math.exp(float(shared("sink")[head]) - float(scores.max()))
            expected = weights.bfloat16().double() @ rows.double() / total
            assert error(ours[0, head], expected) < 1e-6


@quick
@given(seeds)
def test_attention_never_multiplies_rows_that_are_not_named(seed: int) -> None:
    """What lies at row 0, or anywhere else, may be NaN as long as no index names it."""
    q, window, main = CASES["sparse_attention"].make(Source(seed), 12, torch.bfloat16)
    window, main = (torch.where(index < 5, -1, index) for index in (window, main))
    rows, compressed = shared("windows").clone(), pool("main").clone()
    results = []
    for filling, byte in ((0.0, 0), (torch.nan, 0xFF)):
        rows[:5], compressed[:5] = filling, byte
        results.append(
            [
                body(
                    q,
                    rows,
                    window,
                    compressed,
                    main,
                    shared("sink"),
                    scale=0.125,
                    round_weights=True,
                )
                for body in bodies("sparse_attention")
            ]
        )
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@quick
@given(seeds)
def test_index_scores_of_hidden_rows_may_be_anything(seed: int) -> None:
    q, weights, request, visible = CASES["index_scores"].make(Source(seed), 9, torch.bfloat16)
    hidden = torch.arange(40) >= visible.amax()
    keys = shared("keys").masked_fill(hidden.view(1, -1, 1), torch.nan)
    for body in bodies("index_scores"):
        expected = body(q, weights, shared("keys"), request, visible)
        assert torch.equal(body(q, weights, keys, request, visible), expected)


@pytest.mark.parametrize("size", [1e4, 1e6])
def test_attention_survives_saturated_scores(size: float) -> None:
    q, rows = torch.full((1, 4, 64), size), torch.randn(5, 64, generator=Source(1).generator)
    for body in bodies("sparse_attention"):
        ours = body(
            q,
            rows,
            torch.arange(5).unsqueeze(0),
            None,
            None,
            shared("sink"),
            scale=1.0,
            round_weights=True,
        )
        best = rows[rows.sum(1).argmax()]
        assert torch.allclose(ours[0, 0], best, atol=1e-6)


@quick
@given(seeds)
def test_index_scores_sum_the_positive_parts_of_the_heads(seed: int) -> None:
    q, weights, request, visible = CASES["index_scores"].make(Source(seed), 9, torch.bfloat16)
    for body in bodies("index_scores"):
        ours = body(q, weights, shared("keys"), request, visible)
        for row in range(9):
            dots = shared("keys")[request[row]].double() @ q[row].double().T
            expected = dots.clamp_min(0) @ weights[row].double()
            seen = int(visible[row])
            assert bool((ours[row, seen:] == -torch.inf).all())
            assert torch.allclose(ours[row, :seen].double(), expected[:seen], atol=1e-5)


@quick
@given(seeds, st.integers(1, 50))
def test_topk_takes_the_largest_and_of_equals_the_first(seed: int, k: int) -> None:
    scores = Source(seed).normal(6, 40).round()
    scores[0] = 1.0  # all equal
    scores[1] = -torch.inf  # nothing visible
    scores[2, 5:] = -torch.inf
    for body in bodies("topk_rows"):
        ours = body(scores, k)
        assert ours.shape == (6, min(k, 40))
        for row, values in enumerate(scores.tolist()):
            visible = [i for i in range(40) if values[i] > -math.inf]
            best = sorted(visible, key=lambda i: (-values[i], i))[:k]
            expected = sorted(best) + [-1] * (min(k, 40) - len(best))
            assert ours[row].tolist() == expected


@quick
@given(seeds, st.integers(1, 8), st.integers(1, 6))
def test_candidates_are_the_best_blocks_and_the_newest(
    seed: int, block_size: int, num_blocks: int
) -> None:
    scores, visible = CASES["candidate_mask"].make(Source(seed), 8, torch.float32)
    for body in bodies("candidate_mask"):
        mask = body(scores, visible, block_size=block_size, num_blocks=num_blocks)
        for row, values in enumerate(scores.tolist()):
            seen = int(visible[row])
            blocks = {
                start // block_size: max(values[start : min(start + block_size, seen)])
                for start in range(0, seen, block_size)
            }
            newest = (seen - 1) // block_size
            order = sorted(blocks, key=lambda b: (b != newest, -blocks[b], b))
            kept = set(order[:num_blocks])
            expected = [i // block_size in kept for i in range(seen)]
            assert mask[row, :seen].tolist() == expected


@quick
@given(seeds, st.booleans())
def test_experts_add_up_with_their_weight_before_the_second_product(
    seed: int, quantize: bool
) -> None:
    x, ids, weights = CASES["moe_routed"].make(Source(seed), 7, torch.float32)
    w13, w2 = shared("w13"), shared("w2")
    for body in bodies("moe_routed"):
        ours = body(x, ids, weights, w13, w2, limit=0.5, quantize=quantize)
        inputs = (round_fp8(x) if quantize else x).double()
        for row in range(7):
            total = torch.zeros(64, dtype=torch.float64)
            for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
                hidden = w13[expert] @ inputs[row]
                gate, up = hidden[:32].clamp_max(0.5), hidden[32:].clamp(-0.5, 0.5)
                active = weight * gate * torch.sigmoid(gate) * up
                if quantize:
                    active = round_fp8(active.float()).double()
                total += w2[expert] @ active
            # A value within an ulp of a rounding border may take the other code.
            assert error(ours[row], total) < (6e-3 if quantize else 1e-5)


@quick
@given(seeds)
def test_router_weighs_with_the_unbiased_scores(seed: int) -> None:
    (x,) = CASES["route_experts"].make(Source(seed), 9, torch.bfloat16)
    bias = Source(seed).normal(1, EXPERTS)
    for body in bodies("route_experts"):
        ids, weights = body(x, shared("gate"), bias, top_k=3, scale=1.5, temperature=0.7)
        scores = torch.nn.functional.softplus(x.double() @ shared("gate").T / 0.7).sqrt()
        chosen = (scores + bias).topk(3).indices
        assert torch.equal(ids, chosen)
        picked = scores.gather(1, chosen)
        assert error(weights, picked / picked.sum(1, keepdim=True) * 1.5) < 1e-6


def test_router_gives_ties_to_the_lower_expert() -> None:
    for body in bodies("route_experts"):
        ids, _ = body(
            torch.zeros(2, 64),
            torch.zeros(EXPERTS, 64, dtype=torch.float64),
            torch.zeros(1, EXPERTS),
            top_k=3,
            scale=1.0,
            temperature=1.0,
        )
        assert ids.tolist() == [[0, 1, 2]] * 2


@quick
@given(seeds)
def test_pairs_are_pooled_by_a_softmax_over_their_gates(seed: int) -> None:
    first, second = CASES["pool_pairs"].make(Source(seed), 5, torch.float32)
    for body in bodies("pool_pairs"):
        ours = body(first, second, torch.float32)
        share = torch.sigmoid(first[:, 1].double() - second[:, 1].double())
        assert error(ours, share * first[:, 0] + (1 - share) * second[:, 0]) < 1e-6


@quick
@given(seeds)
def test_streams_are_collapsed_and_expanded(seed: int) -> None:
    y, streams, post, comb = CASES["hc_expand"].make(Source(seed), 5, torch.float32)
    for body in bodies("hc_collapse"):
        expected = torch.einsum("tn,tnd->td", post.double(), streams.double())
        assert error(body(streams, post), expected) < 1e-6
    for body in bodies("hc_expand"):
        mixed = torch.einsum("tij,tid->tjd", comb.double(), streams.double())
        expected = mixed + torch.einsum("tj,td->tjd", post.double(), y.double())
        assert error(body(y, streams, post, comb), expected) < 1e-6


@quick
@given(seeds)
def test_mixing_matrix_has_columns_that_sum_to_one(seed: int) -> None:
    (z,) = CASES["hc_split_sinkhorn"].make(Source(seed), 5, torch.float32)
    for body in bodies("hc_split_sinkhorn"):
        pre, post, comb = body(
            z, shared("base"), shared("scale3"), num_streams=4, rounds=20, eps=1e-6
        )
        assert (comb.sum(1) - 1).abs().max() < 1e-5
        assert pre.shape == post.shape == (5, 4)
        assert bool((pre > 0).all() and (post >= 0).all() and (post <= 2).all())


@quick
@given(seeds)
def test_statistics_and_norm(seed: int) -> None:
    source = Source(seed)
    streams, x = source.normal(5, 4, 64), source.normal(5, 64)
    flat = streams.flatten(1).double()
    for body in bodies("hc_stats"):
        expected = flat @ shared("fn").T / flat.square().mean(1, keepdim=True).sqrt()
        assert error(body(streams, shared("fn"), 1e-20), expected) < 1e-6
    for body in bodies("rms_norm"):
        wide = x.double()
        expected = shared("norm").double() * wide / wide.square().mean(1, keepdim=True).sqrt()
        assert error(body(x, shared("norm"), 1e-20), expected) < 1e-6


@quick
@given(seeds)
def test_engram_gate_adds_the_gated_value_to_every_stream(seed: int) -> None:
    streams, kv = CASES["engram_gate"].make(Source(seed), 5, torch.float32)
    q_weight, k_weight = shared("engram_qk")
    masked = torch.tensor([False, True, False, False, True])
    for body in bodies("engram_gate"):
        ours = body(streams, kv, q_weight, k_weight, masked)
        for row in range(5):
            for stream in range(4):
                r = streams[row, stream].double()
                k = kv[row, stream * 64 : (stream + 1) * 64].double()
                dot = (r * q_weight[stream] * k_weight[stream] * k).sum() / 8
                dot = dot / r.square().mean().sqrt() / k.square().mean().sqrt()
                gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
                added = 0.0 if masked[row] else gate * kv[row, 256:].double()
                assert error(ours[row, stream], r + added) < 1e-6


def test_engram_hash_blocks_everything_behind_a_gap() -> None:
    """An id behind a blocked one counts as blocked too."""
    history = torch.tensor([[5, 6, 7, 8], [5, -1, 7, 8], [5, 2, 2, 2]])
    for body in bodies("engram_hash"):
        rows = body(
            history,
            shared("token_map"),
            shared("multipliers"),
            shared("primes"),
            shared("offsets"),
            2,
        )
        assert torch.equal(rows[1], rows[2])
        assert not torch.equal(rows[0], rows[1])
