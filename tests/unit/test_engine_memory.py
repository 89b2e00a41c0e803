import json

import pytest

from dsserve import _native
from dsserve.config.model import load_model_config
from dsserve.config.resolve import resolve
from dsserve.engine.memory import plan_memory
from dsserve.engine.settings import most_request_tokens, scheduler_config
from dsserve.errors import ConfigError
from engine_process import MODEL_PATH, server_config


def resolved(**flags):
    model = load_model_config(MODEL_PATH)
    return resolve(server_config(**flags), model), model


def test_max_total_tokens_is_rounded_down_to_pages():
    plan = plan_memory(*resolved(max_total_tokens=16 * 10 + 15))
    assert (plan.num_pages, plan.num_tokens) == (10, 160)
    assert plan.num_slots == 33


def test_default_pool_of_the_cpu_is_a_gibibyte_with_the_dummy_page():
    plan = plan_memory(*resolved(max_total_tokens=None))
    assert (plan.num_pages + 1) * plan.bytes_per_page <= 2**30
    assert (plan.num_pages + 2) * plan.bytes_per_page > 2**30


def test_memory_fraction_is_of_the_host():
    half = plan_memory(*resolved(max_total_tokens=None, mem_fraction_static=0.5))
    quarter = plan_memory(*resolved(max_total_tokens=None, mem_fraction_static=0.25))
    assert abs(half.num_pages - 2 * quarter.num_pages) <= 2


def test_pool_without_a_page_is_refused():
    server, model = resolved()
    with pytest.raises(ConfigError, match="max-total-tokens 8"):
        plan_memory(server.replace(max_total_tokens=8), model)


@pytest.mark.parametrize("drafts", [None, 3])
def test_the_scheduler_takes_what_a_request_may_have_and_no_token_more(drafts):
    flags = {"speculative_algorithm": "none"}
    if drafts is not None:
        flags = {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": drafts + 1}
    server, model = resolved(load_format="auto", json_model_override_args={}, **flags)
    config = scheduler_config(server, model, num_pages=6)
    scheduler = _native.Scheduler(json.dumps(config))
    most = most_request_tokens(server, 6 * server.page_size)
    for request_id, num_tokens in ((1, most), (2, most + 1)):
        spec = {"request_id": request_id, "token_ids": bytes(4 * (num_tokens - 9))}
        rejected = scheduler.submit([spec | {"max_new_tokens": 9}])
        assert [code for _, code, _ in rejected] == ["pool_capacity_exceeded"] * (request_id - 1)


def test_scheduler_takes_every_option_that_concerns_it():
    server, model = resolved(
        enable_mixed_chunk=True,
        schedule_policy="dfs-weight",
        retraction_policy="priority",
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=True,
        disable_priority_preemption=True,
        priority_scheduling_preemption_threshold=3,
        abort_on_priority_when_disabled=True,
        fair_by="user",
        request_waiting_timeout=1.5,
        prefill_max_requests=5,
        prefill_max_defer=6,
        inbatch_prefix_hold=1,
        max_overtake=9,
        disable_consecutive_prefill_overlap=True,
        random_seed=11,
        radix_eviction_policy="slru",
        prefill_decode_interval=3,
        disable_radix_cache=True,
        enable_decoder_swa_bounded_replay=False,
    )
    config = scheduler_config(server, model, num_pages=7)
    assert config == {
        "page_size": 16,
        "num_pages": 7,
        "max_running_requests": 32,
        "max_queued_requests": None,
        "chunked_prefill_size": 1024,
        "max_prefill_tokens": 16384,
        "prefill_max_requests": 5,
        "prefill_max_defer": 6,
        "policy_seed": 11,
        "max_overtake": 9,
        "inbatch_prefix_hold": 1,
        "priority": {
            "enabled": True,
            "low_values_first": True,
            "preemption": False,
            "preemption_threshold": 3,
            "refuse_when_disabled": True,
        },
        "fair": True,
        "waiting_timeout_us": 1_500_000,
        "running_timeout_us": None,
        "overlap_prefills": False,
        "context_length": 512,
        "window": 16,
        "vocab_size": 512,
        "encoder_replay": True,
        "decoder_replay": False,
        "radix_cache": False,
        "eviction_policy": "slru",
        "policy": "dfs-weight",
        "retraction_policy": "priority",
        "mixed_chunk": True,
        "prefill_decode_interval": 3,
        "conservativeness": 1.0,
        "max_steps_in_flight": 2,
        "draft_len": 0,
        "stateful_ratio": 2,
        "eos_token_ids": [1],
    }
