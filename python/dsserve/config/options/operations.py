"""Launch flags of the group "CUDA graphs and operations"."""

from __future__ import annotations

from dataclasses import dataclass

from dsserve.config.flag import Kind, option, switch


@dataclass(frozen=True, kw_only=True)
class OperationsOptions:
    """Device, logs, metrics, traces and supervision."""

    cuda_graph_max_bs: int | None = option(
        None,
        "Largest batch of a CUDA graph.",
        since=3,
        kind=Kind.INT,
        minimum=1,
        default_text="auto: 32",
    )
    disable_cuda_graph: bool = switch("Capture no CUDA graphs.", since=3)
    cuda_graph_backend_prefill: str = option(
        "breakable",
        "CUDA graphs of prefill steps.",
        since=6,
        choices={"breakable": 6, "disabled": 6},
    )
    log_level: str = option(
        "info",
        "Least level that is logged.",
        since=1,
        choices={"debug": 1, "info": 1, "warning": 1, "error": 1, "critical": 1},
    )
    log_json: bool = switch("Log JSON lines.", since=1)
    log_requests: bool = switch("Log every request.", since=1)
    log_requests_level: int = option(
        2,
        "0 metadata, 1 and sampling, 2 and truncated texts, 3 full texts.",
        since=1,
        kind=Kind.INT,
        minimum=0,
        maximum=3,
    )
    decode_log_interval: int = option(
        40, "Decode steps per log line.", since=1, kind=Kind.INT, minimum=1
    )
    disable_metrics: bool = switch(
        "Serve no /metrics.", since=1, off=("--enable-metrics",), default_text="off"
    )
    metrics_compat: str | None = option(
        None, "Metric names of another engine, too.", since=5, choices={"sglang": 5}
    )
    enable_trace: bool = switch("Send OpenTelemetry traces.", since=5)
    otlp_traces_endpoint: str = option("localhost:4317", "Where traces go.", since=5)
    enable_request_time_stats_logging: bool = switch("Log the times of every request.", since=5)
    profile_dir: str | None = option(None, "Folder that profiles may be written to.", since=5)
    watchdog_timeout: float = option(
        300.0,
        "Seconds after which a step counts as stuck.",
        since=1,
        kind=Kind.FLOAT,
        minimum=1,
        default_text="300",
    )
    crash_dump_folder: str | None = option(None, "Where crash dumps go.", since=5)
    crash_dump_bodies: bool = switch("Put request bodies into crash dumps.", since=5)
    dry_run: bool = switch("Print the resolved configuration and sizes, then exit.", since=1)
    device: str = option(
        "auto",
        "Where the model runs; auto is the CPU in this version.",
        since=1,
        choices={"auto": 1, "cpu": 1, "cuda": 3},
    )
