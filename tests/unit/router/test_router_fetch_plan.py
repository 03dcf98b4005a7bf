"""When the beginning of a prompt is fetched, and from whom, for workers whose caches and costs are given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.pb import worker_pb2
from cluster.prefix_hash import prefix_hashes
from cluster.step_cost import StepCost
from router.routing.fetch_plan import LATE, LEAST_LIMIT_S, Holding, Work, best_fetch
from router.routing.fetch_times import FIRST_PAUSE_S, FORGET_S, FetchTimes
from router.routing.load_tracker import Fetch
from router.routing.prefix_index import PrefixIndex, PromptHashes

TOKENS = range(1, 1002)
PROMPT = PromptHashes(TOKENS, b"")
COST = StepCost(fixed_s=0.005, prompt_token_s=1e-4, attended_s=0.0, sequence_s=0.0, kv_token_s=0.0)
WORK = Work(len(TOKENS), COST)


@dataclass(frozen=True)
class Worker:
    """`num_cached` tokens of the prompt are in its cache."""

    worker_id: str
    num_cached: int = 0
    block_size: int = 16
    prefix_format: str = "float32"
    weights_revision: str = "w"
    step_cost: StepCost | None = COST
    kv_tokens: int = 10_000
    max_num_seqs: int = 8

    @property
    def prefix_index(self) -> PrefixIndex:
        index = PrefixIndex(self.block_size, 1000)
        hashes = list(prefix_hashes(TOKENS, self.block_size, b""))[: self.num_cached // self.block_size]
        index.apply(worker_pb2.CacheEvents(sequence_number=1, snapshot=True, stored=hashes))
        return index

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        return self.num_cached // self.block_size * self.block_size


HOLDER = Worker("d", 800)


def times_of(*samples: tuple[int, float], pair: tuple[str, str] = ("d", "p")) -> FetchTimes:
    """Fetches that took so many seconds, after one that opened the connection."""
    times = FetchTimes()
    times.took(*pair, 100, 9.0, 0.0)
    for num_tokens, seconds in samples:
        times.took(*pair, num_tokens, seconds, 0.0)
    return times


def plan(target: Worker, *holders: Worker, times: FetchTimes, work: Work = WORK, **how: Any) -> Fetch | None:
    holdings = [Holding(holder, holder.num_cached_tokens(PROMPT)) for holder in holders]
    return best_fetch(PROMPT, work, target, holdings, times, 0.0, **how)


def test_a_prefix_is_fetched_where_that_is_quicker_than_to_compute_it() -> None:
    fetch = plan(Worker("p"), HOLDER, times=times_of((800, 0.02)))
    assert fetch is not None and (fetch.holder_id, fetch.num_tokens, fetch.num_useful) == ("d", 800, 800)
    assert fetch.seconds == pytest.approx(0.02) and fetch.limit_s == pytest.approx(LATE * 0.02)
    assert plan(Worker("p"), HOLDER, times=times_of((800, 0.07))) is None, (
        "0.08 s are spared, less than a fifth of them"
    )


def test_the_wait_for_other_prompts_passes_while_it_is_fetched() -> None:
    times = times_of((800, 0.1))
    assert plan(Worker("p"), HOLDER, times=times) is None
    assert plan(Worker("p"), HOLDER, times=times, work=WORK._replace(wait_s=0.09)) is not None


def test_what_the_target_has_need_not_be_fetched() -> None:
    times = times_of((80, 0.01), (800, 0.02))
    assert plan(Worker("p", 800), HOLDER, times=times) is None
    assert plan(Worker("p", 792), HOLDER, times=times) is None, "not a whole block more"
    assert plan(Worker("p", 160), HOLDER, times=times) is not None
    assert plan(Worker("p", 720), HOLDER, times=times) is None, "8 ms are spared, and messages take 9"


def test_of_blocks_of_another_size_those_count_that_the_target_can_use() -> None:
    fetch = plan(Worker("p", block_size=32), replace(HOLDER, num_cached=816), times=times_of((800, 0.02)))
    assert fetch is not None and (fetch.num_tokens, fetch.num_useful) == (816, 800)


@pytest.mark.parametrize(
    "other", [{"prefix_format": "bfloat16"}, {"prefix_format": ""}, {"weights_revision": "another"}]
)
def test_nothing_is_fetched_between_formats_or_weights(other: dict[str, str]) -> None:
    times = times_of((800, 0.001))
    assert plan(Worker("p"), replace(HOLDER, **other), times=times, always=True) is None
    assert plan(replace(Worker("p"), prefix_format=""), HOLDER, times=times, always=True) is None


def test_the_holder_is_the_one_with_which_the_first_token_comes_soonest() -> None:
    times = times_of((800, 0.07))
    for seconds in (9.0, 0.01):
        times.took("d2", "p", 400, seconds, 0.0)
    fetch = plan(Worker("p"), HOLDER, Worker("d2", 400), times=times)
    assert fetch is not None and fetch.holder_id == "d2"


def test_while_nothing_is_known_one_is_tried_and_given_up_when_computing_would_be_done() -> None:
    fetch = plan(Worker("p"), HOLDER, times=FetchTimes())
    assert fetch is not None and fetch.limit_s == pytest.approx(0.08)
    times = times_of((800, 0.001))
    assert times.predicted("d", "p", 800, FORGET_S + 1) is None, "that was long ago"


def test_the_first_one_of_a_pair_teaches_nothing_and_others_stand_in_for_it() -> None:
    times = times_of((800, 0.02))
    assert times.predicted("d", "p", 800, 0.0) == pytest.approx(0.02)
    times.took("x", "y", 800, 5.0, 0.0)
    assert times.predicted("x", "y", 800, 0.0) == pytest.approx(0.02)


def test_times_follow_sizes_and_those_under_way() -> None:
    times = times_of((100, 0.02), (1000, 0.11), (100, 0.02), (1000, 0.11))
    assert times.predicted("d", "p", 500, 0.0) == pytest.approx(0.06)
    times.begun("d", "other", 500)
    assert times.predicted("d", "p", 500, 0.0) == pytest.approx(0.11)
    times.ended("d", "other", 500)
    assert times.predicted("d", "p", 500, 0.0) == pytest.approx(0.06)


def test_a_pair_that_failed_rests_longer_each_time_until_one_goes_well() -> None:
    times = times_of((800, 0.001))
    times.failed("d", "p", 0.0)
    assert plan(Worker("p"), HOLDER, times=times, always=True) is None
    assert times.may_try("d", "p", FIRST_PAUSE_S) and times.may_try("d", "q", 0.0)
    times.failed("d", "p", 10.0)
    assert not times.may_try("d", "p", 10 + FIRST_PAUSE_S) and times.may_try("d", "p", 10 + 2 * FIRST_PAUSE_S)
    times.took("d", "p", 800, 0.001, 100.0)
    times.failed("d", "p", 100.0)
    assert times.may_try("d", "p", 100 + FIRST_PAUSE_S)
    times.on_worker_lost("d")
    assert times.may_try("d", "p", 100.0)


def test_a_first_one_that_failed_has_opened_the_connection_for_the_next() -> None:
    times = FetchTimes()
    times.failed("d", "p", 0.0)
    times.took("d", "p", 800, 0.02, 10.0)
    assert times.predicted("d", "p", 800, 10.0) == pytest.approx(0.02)


def test_always_needs_no_cost_and_looks_at_no_time() -> None:
    slow = times_of((800, 9.0))
    assert plan(Worker("p"), HOLDER, times=slow) is None
    assert plan(Worker("p"), HOLDER, times=slow, work=WORK._replace(cost=None)) is None
    assert plan(Worker("p"), HOLDER, times=slow, work=WORK._replace(cost=None), always=True) is not None


def test_a_short_prediction_has_a_limit_that_messages_keep() -> None:
    fetch = plan(Worker("p"), HOLDER, times=times_of((800, 0.001)))
    assert fetch is not None and fetch.limit_s == LEAST_LIMIT_S
