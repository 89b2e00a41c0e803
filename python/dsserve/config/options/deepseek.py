"""Launch flags of the group "DeepSeek features"."""

from __future__ import annotations

from dataclasses import dataclass

from dsserve.config.flag import LATER, Kind, option, switch


@dataclass(frozen=True, kw_only=True)
class DeepseekOptions:
    """Bounded replay, Engram, speculation and numerics."""

    enable_encoder_swa_bounded_replay: bool | None = switch(
        "Rebuild the window after a prefix hit by computing its last tokens again.",
        since=1,
        default=None,
        on=("--enable-encoder-swa-bounded-replay",),
        off=("--disable-encoder-swa-bounded-replay",),
        default_text="on for V4.1",
    )
    enable_decoder_swa_bounded_replay: bool | None = switch(
        "Run the late layers on the last window of a prompt only.",
        since=1,
        default=None,
        on=("--enable-decoder-swa-bounded-replay",),
        off=("--disable-decoder-swa-bounded-replay",),
        default_text="auto: on",
    )
    engram_placement: str = option(
        "auto",
        "Where the Engram tables live: device (with the weights of each process), host (one copy a node, in "
        "shared memory) or sharded (row ranges over the processes of a node, read directly).",
        since=3,
        choices={"auto": 3, "host": 3, "sharded": 3, "device": 3},
        default_text="auto: device",
    )
    engram_cache_size: int = option(
        0,
        "Engram rows cached on the device, with the placements host and sharded.",
        since=3,
        kind=Kind.INT,
        minimum=0,
        default_text="0 = off",
    )
    engram_memory_limit: int | None = option(
        None,
        "Bytes that the Engram tables may take on this node, e.g. 200GiB.",
        since=3,
        kind=Kind.SIZE,
        minimum=1,
        default_text="auto: what is free",
    )
    speculative_algorithm: str = option(
        "auto",
        "Speculative decoding; auto is DSPARK where the checkpoint has its head, else none.",
        since=1,
        choices={"auto": 1, "none": 1, "NONE": 1, "DSPARK": 3, "EAGLE": LATER},
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        "Draft tokens of one step, the anchor included: 4 means three drafts.",
        since=3,
        kind=Kind.INT,
        minimum=2,
        default_text="block size of the checkpoint + 1",
    )
    speculative_dspark_verify: str = option(
        "static",
        "How many drafts are verified: all; all, of which a schedule by confidence counts; or only those.",
        since=3,
        choices={"static": 3, "cap": 3, "compact": 3},
    )
    speculative_dspark_sampling: str = option(
        "shared-noise",
        "How drafts of sampled requests are accepted: if the target draws them with the same noise (a seed then "
        "gives what it gives without drafts); by rejection sampling; or that with arg-max drafts.",
        since=3,
        choices={"shared-noise": 3, "rejection": 3, "greedy-draft": 3},
    )
    speculative_dspark_cost_table: str | None = option(
        None,
        "File of what steps cost, for cap and compact (JSON); without one it is learnt from the steps.",
        since=3,
        default_text="none: learnt",
    )
    speculative_dspark_temperatures: str | None = option(
        None,
        "File of temperatures that calibrate the confidences, written by dsserve calibrate dspark.",
        since=3,
        default_text="none: all 1",
    )
    speculative_use_block_verification: bool = switch(
        "Accept runs of drafts jointly; with the samplings rejection and greedy-draft.", since=3
    )
    dsv4_attn_backend: str = option("auto", "Attention kernels.", since=6)
    enable_deterministic_inference: bool = switch(
        "The same output for a request whatever else runs or ran: no bounded replay, no prefix hits.",
        since=3,
    )
    random_seed: int | None = option(
        None,
        "Seed of requests that bring none.",
        since=1,
        kind=Kind.INT,
        minimum=0,
        maximum=2**63 - 1,
    )
    numerics: str = option(
        "released",
        "released: the roundings of the reference; fp32: no rounding of activations.",
        since=1,
        choices={"released": 1, "fp32": 1, "fast": 6},
    )


@dataclass(frozen=True, kw_only=True)
class DisaggregationOptions:
    """Prefill and decode on separate servers (does not work yet)."""

    disaggregation_mode: str = option(
        "null",
        "Role of this server.",
        since=LATER,
        choices={"null": LATER, "prefill": LATER, "decode": LATER},
    )
    disaggregation_transfer_backend: str = option(
        "auto",
        "How KV travels.",
        since=LATER,
        choices={
            "auto": LATER,
            "shm": LATER,
            "tcp": LATER,
            "mooncake": LATER,
            "nixl": LATER,
            "mori": LATER,
        },
    )
    disaggregation_bootstrap_port: int = option(
        8998, "Port of the handshake.", since=LATER, kind=Kind.INT, minimum=1, maximum=65535
    )
    disaggregation_ib_device: str | None = option(None, "RDMA device.", since=LATER)
    disaggregation_decode_allocation_policy: str = option(
        "early", "When the decoding side takes pages.", since=LATER
    )
    disaggregation_layerwise_interval: int | None = option(
        None,
        "Layers of one transfer.",
        since=LATER,
        kind=Kind.INT,
        minimum=1,
        default_text="auto",
    )
    disaggregation_kv_checksum: str = option(
        "sample",
        "Which transfers are checked.",
        since=LATER,
        choices={"off": LATER, "sample": LATER, "all": LATER},
    )
    disaggregation_decode_fallback: str | None = option(
        None,
        "What the decoding side does when a transfer fails.",
        since=LATER,
        choices={"recompute": LATER},
    )
    pd_allowed_peers: str | None = option(None, "Peers that may connect.", since=LATER)
    pd_trust_clients: bool = switch("Believe the peer that a client names.", since=LATER)
