"""Steps that are launched before the one before them is read: when that is, what is in them, and the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_kernels
import pytest
from checkpoints import make_checkpoint
from engine_steps import make_runner
from pipeline_bench import BLOCK_SIZE, FEW_BLOCKS, Bench, assert_equal, joined_ranks, told_by

from cluster.crash_record import CrashReader, CrashRecord
from engine.attention.flash import FlashAttention
from worker.steps import StepLog


def test_the_next_step_is_launched_when_the_choice_of_tokens_is_set_off_and_before_they_are_read() -> None:
    bench = Bench()
    bench.admit("a", most=4)
    bench.run()
    assert bench.noted.calls == [
        *("launch 1", "sample 1", "launch 2", "read 1"),
        *("sample 2", "launch 3", "read 2"),
        *("sample 3", "launch 4", "read 3"),
        *("sample 4", "read 4"),  # its length is known: nothing is thrown away
    ]
    assert bench.noted.given[1:] == [[-1]] * 3 and bench.router.tokens("a") == [0, 1, 2, 3]


def test_steps_one_by_one_are_read_before_the_next_is_launched() -> None:
    bench = Bench(overlaps=False)
    bench.admit("a", most=2)
    bench.run()
    assert bench.noted.calls == ["launch 1", "sample 1", "read 1", "launch 2", "sample 2", "read 2"]
    assert bench.noted.given[1:] == [[0]] and bench.router.tokens("a") == [0, 1]


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_worker_that_ends_between_steps_blames_no_request(overlaps: bool) -> None:
    record = CrashRecord("i")
    reader = CrashReader.open(record.path, "i")
    assert reader is not None
    bench = Bench(crash_record=record, overlaps=overlaps)
    bench.admit("a", most=9)
    bench.core.turn(wait=False)
    record.failed("a step failed")
    found = reader.read()
    assert found is not None and found.request_ids == {"a"}
    bench.run()
    found = reader.read()
    assert found is not None and found.request_ids == set()
    reader.close()


def test_each_step_is_a_line_of_the_step_log(tmp_path: Path) -> None:
    log = StepLog(str(tmp_path / "steps.jsonl"))
    bench = Bench(step_log=log)
    bench.admit("a", most=3)
    bench.run()
    log.close()
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_stop_token_is_noticed_one_step_late_and_what_came_of_that_is_thrown_away() -> None:
    bench = Bench()
    bench.admit("stops", most=9, stopping={"stop_token_ids": [2]})
    bench.admit("goes on", most=6)
    for _ in range(3):
        bench.core.turn(wait=False)
    assert bench.router.tokens("stops") == [0, 1, 2] and len(bench.noted.given[3]) == 2, "it is in the step under way"
    held = bench.core.blocks.num_held
    bench.core.turn(wait=False)
    assert bench.core.blocks.num_held < held, "blocks come back when that step has ended"
    bench.run()
    assert bench.router.tokens("stops") == [0, 1, 2] and bench.router.tokens("goes on") == [0, 1, 2, 3, 4, 5]
    assert [len(tokens) for tokens in bench.noted.given[1:]] == [2, 2, 2, 1, 1]


def test_who_joins_brings_tokens_that_are_known_and_who_leaves_is_passed_over() -> None:
    bench = Bench()
    gone = bench.admit("gone", most=9)
    bench.admit("stays", most=9)
    bench.core.turn(wait=False)
    bench.admit("new one", num_prompt_tokens=1, most=5)
    bench.cancel(gone)
    bench.core.turn(wait=False)
    assert bench.noted.given[1:3] == [[-1, -2], [-2, 49]], "rows are those of the step before"
    bench.run()
    assert bench.router.tokens("stays") == list(range(9)) and bench.router.tokens("new one") == list(range(5))
    assert len(bench.router.tokens("gone")) == 1


@pytest.mark.parametrize(
    ("options", "num_first"),
    [
        ({"grammar": "any"}, None),
        ({"params": {"n": 2}}, 1),
        ({"prompt_logprobs": 0}, 1),
        ({"num_prompt_tokens": 3}, 0),
    ],
    ids=["a constraint", "several sequences", "a scored prompt", "nothing"],
)
def test_a_step_waits_where_the_host_has_a_say(options: dict[str, Any], num_first: int | None) -> None:
    """Each one, or the first ones."""
    bench = Bench()
    bench.admit("a", most=4, **options)
    bench.run()
    num_waited = 4 if num_first is None else num_first
    calls = bench.noted.calls
    for number in range(1, 4):
        is_ahead = calls.index(f"launch {number + 1}") < calls.index(f"read {number}")
        assert is_ahead == (number > num_waited), number
    assert bench.router.tokens("a") == [0, 1, 2, 3]


@pytest.mark.parametrize("overlaps", [True, False])
def test_masks_are_asked_for_beside_the_step(overlaps: bool) -> None:
    """Behind its launch where a device is at it, before it where this thread would be."""
    bench = Bench(overlaps=overlaps)
    bench.admit("a", most=2, grammar="any")
    bench.run()
    begun = [["launch 1", "ask"], ["launch 2", "ask"]]
    begun = begun if overlaps else [each[::-1] for each in begun]
    assert bench.noted.calls == [*begun[0], "sample 1", "read 1", *begun[1], "sample 2", "read 2"]


def test_a_step_waits_for_blocks_that_only_a_preemption_gives() -> None:
    """Nobody is preempted for what the step under way gives back."""
    bench = Bench(num_blocks=5)
    bench.admit("first", num_prompt_tokens=4, most=12, stopping={"stop_token_ids": [4]})
    bench.admit("other", num_prompt_tokens=4, most=12)
    bench.run()
    assert bench.router.tokens("first") == list(range(5)) and bench.router.tokens("other") == list(range(12))
    assert bench.core.decode.num_preemptions == 0
    crowded = Bench(num_blocks=5)
    for name in ("first", "other"):
        crowded.admit(name, num_prompt_tokens=4, most=12)
    crowded.run()
    assert crowded.core.decode.num_preemptions > 0
    assert crowded.router.tokens("first") == crowded.router.tokens("other") == list(range(12))


@pytest.mark.parametrize("num_blocks", [200, FEW_BLOCKS])
def test_a_model_gives_the_same_tokens_and_logprobs_with_steps_that_overlap(tmp_path: Path, num_blocks: int) -> None:
    folder = make_checkpoint("llama", tmp_path)
    runners = [make_runner(folder, num_blocks=num_blocks, block_size=BLOCK_SIZE) for _ in range(2)]
    assert_equal([told_by([runners[overlaps]], overlaps, num_blocks) for overlaps in (False, True)])


@pytest.mark.parametrize("num_blocks", [200, FEW_BLOCKS])
def test_joined_ranks_give_the_tokens_of_steps_one_by_one(tmp_path: Path, num_blocks: int) -> None:
    """Whatever ends a sequence: its length, a stop token, its router, or a preemption."""
    folder, sizes = make_checkpoint("llama", tmp_path), {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    assert_equal(
        [
            told_by(joined_ranks(lambda tp: make_runner(folder, tp=tp, **sizes)), overlaps, num_blocks)  # type: ignore[arg-type]
            for overlaps in (False, True)
        ]
    )


def test_replayed_steps_take_tokens_of_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the memory that graphs read; steps of prompts among them are computed as ever."""
    replayed: list[int] = []

    def counted(work: Callable[[], None]) -> Callable[[], None]:
        return lambda: (work(), replayed.append(1))[0]

    backend = FlashAttention(plain_kernels.flash_attn_varlen_func)
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (backend, "for this test"))
    folder = make_checkpoint("llama", tmp_path)
    one, other = (
        make_runner(folder, num_blocks=16, block_size=256, kernels="torch", graphs_up_to=12, capture=capture)
        for capture in (None, counted)
    )
    assert_equal([told_by([one], False, 16), told_by([other], True, 16)])
    assert len(replayed) > 10
    replayed.clear()
    ranks = joined_ranks(
        lambda tp: make_runner(
            folder, tp=tp, num_blocks=16, block_size=256, kernels="torch", graphs_up_to=12, capture=counted
        )
    )
    assert_equal([told_by([one], False, 16), told_by(ranks, True, 16)])
    assert len(replayed) > 20
