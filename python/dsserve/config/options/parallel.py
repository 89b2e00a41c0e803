"""Launch flags of the groups "Parallelism" and "EPLB" (none works yet)."""

from __future__ import annotations

from dataclasses import dataclass

from dsserve.config.flag import LATER, Kind, option, switch


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How the model is spread over GPUs and nodes."""

    tp_size: int = option(
        1, "Tensor-parallel ranks.", since=LATER, kind=Kind.INT, minimum=1, aliases=("--tp",)
    )
    dp_size: int = option(
        1, "Data-parallel ranks.", since=LATER, kind=Kind.INT, minimum=1, aliases=("--dp",)
    )
    attn_dp_size: int = option(
        1, "Attention data-parallel groups.", since=LATER, kind=Kind.INT, minimum=1
    )
    enable_dp_attention: bool = switch("Attention data parallelism over all DP ranks.", since=LATER)
    ep_size: int = option(1, "Expert-parallel ranks.", since=LATER, kind=Kind.INT, minimum=1)
    moe_a2a_backend: str = option(
        "none",
        "All-to-all of the experts.",
        since=LATER,
        choices={"none": LATER, "deepep": LATER, "megamoe": LATER},
    )
    moe_dense_tp_size: int | None = option(
        None,
        "Tensor-parallel ranks of the dense parts.",
        since=LATER,
        kind=Kind.INT,
        minimum=1,
        default_text="auto",
    )
    enable_dp_lm_head: bool = switch("Split the output head over DP ranks.", since=LATER)
    nnodes: int = option(1, "Number of nodes.", since=LATER, kind=Kind.INT, minimum=1)
    node_rank: int = option(0, "Index of this node.", since=LATER, kind=Kind.INT, minimum=0)
    dist_init_addr: str | None = option(None, "host:port where the nodes meet.", since=LATER)
    load_balance_method: str = option(
        "auto",
        "How requests are spread over DP ranks.",
        since=LATER,
        choices={
            "auto": LATER,
            "prefix_then_tokens": LATER,
            "round_robin": LATER,
            "total_requests": LATER,
            "total_tokens": LATER,
            "follow_bootstrap_room": LATER,
        },
    )
    base_gpu_id: int = option(0, "Index of the first GPU.", since=LATER, kind=Kind.INT, minimum=0)


@dataclass(frozen=True, kw_only=True)
class EplbOptions:
    """Balancing of experts over GPUs."""

    enable_eplb: bool = switch("Move experts while serving.", since=LATER)
    ep_num_redundant_experts: int = option(
        0, "Expert copies in all.", since=LATER, kind=Kind.INT, minimum=0
    )
    eplb_algorithm: str = option("auto", "Placement algorithm.", since=LATER)
    eplb_rebalance_num_iterations: int = option(
        1000, "Steps between two rebalances.", since=LATER, kind=Kind.INT, minimum=1
    )
    eplb_rebalance_layers_per_chunk: int | None = option(
        None, "Layers moved at a time.", since=LATER, kind=Kind.INT, minimum=1, default_text="all"
    )
    eplb_min_rebalancing_utilization_threshold: float = option(
        1.0, "Balance below which experts move.", since=LATER, kind=Kind.FLOAT, minimum=0
    )
    ep_dispatch_algorithm: str = option(
        "static",
        "Which copy of an expert gets a token.",
        since=LATER,
        choices={"static": LATER, "dynamic": LATER, "fake": LATER},
    )
    init_expert_location: str = option("trivial", "First placement of the experts.", since=LATER)
    eplb_host_weights: bool = switch("Keep all expert weights in host memory.", since=LATER)
    eplb_include_draft: bool = switch("Balance the experts of the draft model too.", since=LATER)
    expert_distribution_recorder_buffer_size: int | None = option(
        None, "Steps that the recorder keeps.", since=LATER, kind=Kind.INT, minimum=1
    )
