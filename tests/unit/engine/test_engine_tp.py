"""Tensor parallelism: shards over threads, over Gloo and in shared memory equal the whole model on one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import make_checkpoint
from engine_steps import generate, make_runner, on_each_rank, on_joined_ranks, run_in_chunks, scattered_table
from thread_group import ThreadGroup
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils._pytree import tree_leaves

from engine.step_input import SequenceSlice, build_step
from engine.tp import ProcessGroupTP, SingleGroup, TPGroup, make_process_group

IDS = list(range(3, 43))
CHUNKS = [25, 7, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 317}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True, "vocab_size": 313}),
        ("mixtral", {}),
        ("qwen2-moe", {}),
        ("qwen3-moe", {}),
    ],
)
def test_any_number_of_ranks_computes_what_one_does(
    tmp_path: Path, kind: str, overrides: dict[str, Any], size: int
) -> None:
    """At 8 ranks the 4 KV heads are replicated; at most sizes the odd vocabulary needs padding."""
    folder = make_checkpoint(kind, tmp_path, **overrides)
    expected = run_in_chunks(make_runner(folder), IDS, CHUNKS)

    ranks = on_each_rank(size, lambda tp: run_in_chunks(make_runner(folder, tp=tp), IDS, CHUNKS))

    for logits in ranks:
        assert logits.shape == expected.shape
        assert torch.equal(logits, ranks[0]), "ranks disagree"
        assert (logits - expected).abs().max() < 1e-4


def test_each_rank_holds_the_kv_of_its_own_heads(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)

    def keys_and_values(tp: TPGroup) -> torch.Tensor:
        runner = make_runner(folder, tp=tp)
        run_in_chunks(runner, IDS, CHUNKS)
        return runner.kv

    whole = keys_and_values(SingleGroup())
    halves, eighths = on_each_rank(2, keys_and_values), on_each_rank(8, keys_and_values)

    assert whole.shape == (4, 2, 32, 16, 4, 16)
    assert torch.allclose(torch.cat(halves, dim=4), whole, atol=1e-5)
    assert torch.allclose(torch.cat(eighths[::2], dim=4), whole, atol=1e-5)
    assert torch.allclose(torch.cat(eighths[1::2], dim=4), whole, atol=1e-5)


def _over_gloo(size: int, work: Callable[[TPGroup], Any]) -> list[Any]:
    return on_joined_ranks("gloo", size, work)


def _in_memory(size: int, work: Callable[[TPGroup], Any]) -> list[Any]:
    return on_joined_ranks("memory", size, work)


@pytest.mark.parametrize("run", [_over_gloo, _in_memory], ids=["gloo", "memory"])
def test_a_group_computes_what_one_rank_does(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    expected = run_in_chunks(make_runner(folder), IDS, CHUNKS)

    ranks = run(2, lambda tp: run_in_chunks(make_runner(folder, tp=tp), IDS, CHUNKS))

    assert torch.equal(ranks[0], ranks[1])
    assert (ranks[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("run", [on_each_rank, _over_gloo, _in_memory], ids=["threads", "gloo", "memory"])
def test_a_step_takes_unread_tokens_of_rank_0_on_every_rank(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Rank 0 alone knows them when the step is launched; the KV of what follows shows that all had the same."""
    folder = make_checkpoint("llama", tmp_path)
    prompts = [IDS[: 30 - i] for i in range(4)]

    def work(tp: TPGroup, overlaps: bool) -> tuple[list[list[int]], torch.Tensor]:
        runner = make_runner(folder, tp=tp)
        return generate(runner, prompts, 12, overlaps, tp.rank), runner.kv

    one_by_one, overlapping = (run(2, lambda tp, overlaps=overlaps: work(tp, overlaps)) for overlaps in (False, True))

    assert overlapping[0][0] == overlapping[1][0] == one_by_one[0][0]
    for rank in range(2):
        assert torch.equal(overlapping[rank][1], one_by_one[rank][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("run", [on_each_rank, _over_gloo, _in_memory], ids=["threads", "gloo", "memory"])
def test_collectives_sum_and_join_in_rank_order(run: Callable[..., list[Any]], dtype: torch.dtype) -> None:
    def work(tp: TPGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = torch.full((2, 3), float(tp.rank + 1), dtype=dtype)
        joined, stacked = tp.all_gather(mine), tp.all_gather(mine, dim=0)
        of_rank_0 = mine.clone()
        tp.broadcast(of_rank_0)
        tp.all_reduce(mine)
        return mine, joined, stacked, of_rank_0

    for summed, joined, stacked, of_rank_0 in run(3, work):
        assert torch.equal(of_rank_0, torch.ones((2, 3), dtype=dtype))
        assert torch.equal(summed, torch.full((2, 3), 6.0, dtype=dtype))
        assert joined.shape == (2, 9) and joined[0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert stacked.shape == (6, 3) and stacked[:, 0].tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("run", [on_each_rank, _over_gloo, _in_memory], ids=["threads", "gloo", "memory"])
def test_ranks_exchange_bytes_in_a_cycle_and_a_rank_without_a_partner_looks_on(run: Callable[..., list[Any]]) -> None:
    """0 to 2, 2 to 1 and 1 to 0; 3 stays by itself."""
    to, source = [2, 0, 1, 3], [1, 2, 0, 3]

    def work(tp: TPGroup) -> list[int]:
        sent = torch.full((0 if tp.rank == 3 else 5,), tp.rank, dtype=torch.uint8)
        return tp.exchange(sent, to[tp.rank], source[tp.rank]).tolist()

    assert run(4, work) == [[1] * 5, [2] * 5, [0] * 5, []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [on_each_rank, _over_gloo, _in_memory], ids=["threads", "gloo", "memory"])
def test_each_rank_gets_its_part_of_what_every_rank_has(run: Callable[..., list[Any]], dtype: torch.dtype) -> None:
    def work(tp: TPGroup) -> torch.Tensor:
        return tp.all_to_all((10 * tp.rank + torch.arange(3)).to(dtype).repeat_interleave(4).view(3, 2, 2))

    for rank, found in enumerate(run(3, work)):
        assert found.shape == (3, 2, 2) and found.dtype == dtype
        assert [part.unique().tolist() for part in found] == [[rank], [10 + rank], [20 + rank]]


def test_a_group_of_one_needs_no_partner() -> None:
    group = make_process_group(dist.HashStore(), 0, 1, "cpu")
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    group.broadcast(tensor)

    assert (group.rank, group.size) == (0, 1)
    assert torch.equal(tensor, torch.ones(3)) and torch.equal(group.all_gather(tensor), tensor)


def test_a_rank_that_fails_frees_those_that_wait_for_it() -> None:
    def work(tp: TPGroup) -> None:
        if tp.rank == 1:
            raise RuntimeError("rank 1 fails")
        tp.all_reduce(torch.ones(1))

    with pytest.raises((RuntimeError, threading.BrokenBarrierError)):
        on_each_rank(2, work)


def test_thread_ranks_know_their_place() -> None:
    assert [(group.rank, group.size) for group in ThreadGroup.create(3)] == [(0, 3), (1, 3), (2, 3)]


def test_a_rank_of_the_wrong_block_table_would_be_noticed(tmp_path: Path) -> None:
    """Guards the tests above: logits do depend on which blocks hold the context."""
    runner = make_runner(make_checkpoint("llama", tmp_path))
    table = scattered_table(runner, 32)
    right = run_in_chunks(runner, IDS[:20], [16, 4], table)
    runner.kv.zero_()

    wrong = torch.cat(
        [run_in_chunks(runner, IDS[:16], [16], table[:1]), run_in_chunks(runner, IDS[:4], [4], table[1:])]
    )

    assert (right - wrong).abs().max() > 0.1


class _Noted:
    """A process group that notes each collective, and gives it to torch's fake group, which moves nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self._fake = FakeProcessGroup._create_internal(rank, size)
        self.calls: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._fake, name)

        def call(*arguments: Any) -> Any:
            tensors = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
            if tensors:
                self.calls.append((name, tuple(tensors[0].shape), tensors[0].dtype))
            return method(*arguments)

        return call


def test_every_rank_calls_the_same_collectives_two_for_each_layer_and_one_for_the_logits(tmp_path: Path) -> None:
    """They were gathered as a list of tensors, that each rank joined by itself."""
    folder = make_checkpoint("qwen3", tmp_path, vocab_size=317)
    groups = [_Noted(rank, 2) for rank in range(2)]
    runners = [make_runner(folder, tp=ProcessGroupTP(group)) for group in groups]
    prompt = SequenceSlice((1, 2, 3, 4, 5), 0, (0,), wants_logits=True)
    decoding = [SequenceSlice((9,), 5, (block,), wants_logits=True) for block in range(3)]

    for slices, num_tokens in (([prompt], 5), (decoding, 3), ([*decoding, prompt], 8)):
        step, config = build_step(slices, 16), runners[0].config
        for group, runner in zip(groups, runners, strict=True):
            group.calls.clear()
            assert runner.forward(step).shape == (len(slices), 317)
        hidden, rows = (num_tokens, config.hidden_size), len(slices)
        assert groups[0].calls == groups[1].calls
        assert groups[0].calls == [
            *[("allreduce", hidden, torch.float32)] * (1 + 2 * config.num_hidden_layers),
            ("_allgather_base", (2 * rows, 159), torch.float32),
        ]


def test_tokens_that_are_not_read_go_to_the_other_ranks_before_any_other_collective(tmp_path: Path) -> None:
    """As many as the step before had rows, int32, whatever type they were sampled as; a step of known ones has none."""
    folder = make_checkpoint("llama", tmp_path)
    groups = [_Noted(rank, 2) for rank in range(2)]
    runners = [make_runner(folder, tp=ProcessGroupTP(group)) for group in groups]
    decoding = build_step([SequenceSlice((9,), 5, (block,), wants_logits=True) for block in range(3)], 16)
    ahead = build_step([SequenceSlice((-1 - row,), 6, (row,), wants_logits=True) for row in (2, 0)], 16)

    for step, num_sampled in ((decoding, 0), (ahead, 3), (decoding, 0)):
        for rank, (group, runner) in enumerate(zip(groups, runners, strict=True)):
            group.calls.clear()
            sampled = torch.tensor([5] * num_sampled) if num_sampled and rank == 0 else None
            runner.run(step, sampled=sampled)
        assert groups[0].calls == groups[1].calls
        names = [name for name, _, _ in groups[0].calls]
        assert names.count("broadcast") == bool(num_sampled)
        if num_sampled:
            assert groups[0].calls[0] == ("broadcast", (num_sampled,), torch.int32)
    with pytest.raises(AssertionError, match="a row of the step before has no token"):
        runners[0].run(ahead, sampled=torch.tensor([5, 5]))
