"""What the router knows of its workers' prefix caches: as told, nothing after a gap, nothing of a lost worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wired_router import ManualClock, WiredRouter, WiredWorker, run

from cluster.pb import worker_pb2
from cluster.prefix_hash import GROUP, PrefixHashes, prefix_hashes
from router.routing.prefix_index import Depths, Holders, PrefixIndex, PromptHashes

PROMPT = list(range(1, 14))
BLOCK_SIZE = 4
HASHES = list(prefix_hashes(PROMPT, BLOCK_SIZE, b"a"))
LONG_PROMPT = list(range(1, BLOCK_SIZE * (2 * GROUP + 5) + 3))
LONG_HASHES = list(prefix_hashes(LONG_PROMPT, BLOCK_SIZE, b"a"))
ASKED = PromptHashes(PROMPT, b"a")


def events(
    number: int, stored: Sequence[bytes], evicted: Sequence[bytes] = (), *, snapshot: bool = False
) -> worker_pb2.CacheEvents:
    return worker_pb2.CacheEvents(sequence_number=number, stored=stored, evicted=evicted, snapshot=snapshot)


def known(*hashes: bytes, num_blocks: int = 8) -> PrefixIndex:
    """An index that has heard one snapshot."""
    index = PrefixIndex(BLOCK_SIZE, num_blocks)
    assert index.apply(events(1, list(hashes), snapshot=True))
    return index


def test_the_longest_run_from_the_first_block_on_is_what_counts() -> None:
    assert len(HASHES) == 3
    assert known(*HASHES).num_cached_tokens(ASKED) == 12
    assert known(HASHES[0], HASHES[2]).num_cached_tokens(ASKED) == 4
    assert known(*HASHES[1:]).num_cached_tokens(ASKED) == 0
    assert known().num_cached_tokens(ASKED) == 0
    assert known(*HASHES).num_cached_tokens(PromptHashes([], b"a")) == 0


def test_changes_are_applied_in_their_order() -> None:
    index = known(HASHES[0])
    assert index.apply(events(2, HASHES[1:]))
    assert index.num_cached_tokens(ASKED) == 12
    assert index.apply(events(3, [], HASHES[1:2]))
    assert index.num_cached_tokens(ASKED) == 4
    assert index.apply(events(4, HASHES[1:2], HASHES[:1]))
    assert index.num_cached_tokens(ASKED) == 0 and index.hashes == set(HASHES[1:])


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_after_a_number_that_does_not_follow_nothing_is_known_until_a_snapshot(number: int) -> None:
    index = known(*HASHES)
    assert not index.apply(events(number, []))
    assert not index.is_known and index.num_cached_tokens(ASKED) == 0
    assert index.apply(events(number + 1, HASHES)), "it is asked for once"
    assert not index.is_known and index.num_cached_tokens(ASKED) == 0
    assert index.apply(events(9, HASHES[:1], snapshot=True))
    assert index.apply(events(10, HASHES[1:2]))
    assert index.num_cached_tokens(ASKED) == 8


def test_a_snapshot_makes_what_was_known_before_void() -> None:
    index = known(*HASHES)
    assert index.apply(events(2, HASHES[1:], snapshot=True))
    assert index.hashes == set(HASHES[1:])


def test_before_the_first_snapshot_nothing_is_known() -> None:
    index = PrefixIndex(BLOCK_SIZE, 8)
    assert index.apply(events(1, HASHES))
    assert not index.is_known and not index.hashes


def test_no_more_hashes_are_kept_than_the_worker_has_blocks() -> None:
    index = known(*HASHES, num_blocks=2)
    assert index.hashes == set(HASHES[:2])
    assert index.apply(events(2, HASHES[2:], HASHES[:1]))
    assert index.hashes == set(HASHES[1:])


def test_a_prompts_hashes_are_computed_once_for_each_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PromptHashes(PROMPT, b"a")

    def hashes(block_size: int) -> list[bytes]:
        known = prompt.of(block_size)
        return [known.of_first(count + 1) for count in range(known.num_blocks)]

    assert hashes(4) == HASHES and len(hashes(2)) == 6
    monkeypatch.setattr("cluster.prefix_hash._hash", None)
    assert hashes(4) == HASHES and len(hashes(2)) == 6


def test_of_a_prompt_that_nobody_has_only_the_first_block_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PromptHashes(LONG_PROMPT, b"a")
    hashes, looked = prompt.of(BLOCK_SIZE), dict[int | str, None]()
    end_of_group, of_first = hashes.end_of_group, hashes.of_first

    def end(group: int) -> bytes:
        looked[f"end of {group}"] = None
        return end_of_group(group)

    def first(num_blocks: int) -> bytes:
        looked[num_blocks] = None
        return of_first(num_blocks)

    monkeypatch.setattr(hashes, "end_of_group", end)
    monkeypatch.setattr(hashes, "of_first", first)
    assert known().num_cached_tokens(prompt) == 0
    assert list(looked) == ["end of 0", 1]
    looked.clear()
    assert known(*LONG_HASHES[: GROUP + 2], num_blocks=99).num_cached_tokens(prompt) == (GROUP + 2) * BLOCK_SIZE
    assert list(looked) == ["end of 0", "end of 1", GROUP + 8, GROUP + 4, GROUP + 2, GROUP + 3]


@settings(max_examples=300, derandomize=True, database=None)
@given(st.lists(st.integers(0, len(LONG_HASHES)), min_size=1, max_size=80))
def test_of_workers_that_hold_beginnings_of_a_prompt_each_ones_length_is_found(lengths: list[int]) -> None:
    holders = Holders()
    indices = [PrefixIndex(BLOCK_SIZE, len(LONG_HASHES), holders) for _ in lengths]
    for index, length in zip(indices, lengths, strict=True):
        index.apply(events(1, LONG_HASHES[:length], snapshot=True))
    prompt = PromptHashes(LONG_PROMPT, b"a")
    assert [index.num_cached_tokens(prompt) for index in indices] == [BLOCK_SIZE * length for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "depth", "num_holding"),
    [
        ([3, 3, 2], None, 0),
        ([3, 3, 3, GROUP + 1], GROUP + 1, 1),
        ([3, GROUP, GROUP + 2, GROUP + 2, 2 * GROUP + 1, 2 * GROUP + 1], GROUP + 2, 2),
    ],
)
def test_the_widest_step_is_that_of_most_workers_behind_the_first_group(
    lengths: list[int], depth: int | None, num_holding: int
) -> None:
    holders = Holders()
    indices = [PrefixIndex(BLOCK_SIZE, len(LONG_HASHES), holders) for _ in lengths]
    for index, length in zip(indices, lengths, strict=True):
        index.apply(events(1, LONG_HASHES[:length], snapshot=True))
    step = PromptHashes(LONG_PROMPT, b"a").depths(holders, BLOCK_SIZE).widest(sum(index.bit for index in indices))
    holding = sum(index.bit for index, length in zip(indices, lengths, strict=True) if length == depth)
    assert holding.bit_count() == num_holding
    assert step == (None if depth is None else (depth, holding))


def test_who_holds_the_end_of_a_group_is_taken_to_hold_all_of_it() -> None:
    prompt = PromptHashes(LONG_PROMPT, b"a")
    assert known(*LONG_HASHES[1 : GROUP + 3], num_blocks=99).num_cached_tokens(prompt) == (GROUP + 3) * BLOCK_SIZE
    assert known(*LONG_HASHES[: GROUP - 1], *LONG_HASHES[GROUP:], num_blocks=99).num_cached_tokens(prompt) == (
        (GROUP - 1) * BLOCK_SIZE
    ), "the end itself is missing"


@settings(max_examples=100, derandomize=True, database=None)
@given(st.sets(st.integers(0, GROUP - 2)))
def test_where_blocks_are_missing_a_worker_holds_up_to_one_of_the_gaps(numbers: set[int]) -> None:
    held = {LONG_HASHES[number] for number in numbers}
    depth = known(*held, num_blocks=99).num_cached_tokens(PromptHashes(LONG_PROMPT, b"a")) // BLOCK_SIZE
    assert LONG_HASHES[depth] not in held
    assert LONG_HASHES[depth - 1] in held if depth else LONG_HASHES[0] not in held


def test_a_prompt_is_looked_up_once_for_all_workers_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    holders, looked = Holders(), Counter[str]()
    indices = [PrefixIndex(BLOCK_SIZE, 8, holders) for _ in range(3)]
    depths = holders.depths

    def counted(hashes: PrefixHashes) -> Depths:
        looked["up"] += 1
        return depths(hashes)

    monkeypatch.setattr(holders, "depths", counted)
    indices[0].apply(events(1, HASHES, snapshot=True))
    indices[1].apply(events(1, HASHES[:1], snapshot=True))
    prompt = PromptHashes(PROMPT, b"a")
    assert [index.num_cached_tokens(prompt) for index in indices] == [12, 4, 0] and looked["up"] == 1
    indices[2].apply(events(1, HASHES[:2], snapshot=True))
    assert [index.num_cached_tokens(prompt) for index in indices] == [12, 4, 8] and looked["up"] == 2


CHANGES = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["stored", "evicted", "snapshot", "gap", "close"]),
    st.sets(st.sampled_from(HASHES)),
)


@settings(max_examples=300, derandomize=True, database=None)
@given(st.lists(CHANGES, max_size=30))
def test_workers_that_share_a_table_know_what_each_would_know_alone(
    changes: list[tuple[int, str, set[bytes]]],
) -> None:
    holders = Holders()
    shared = [PrefixIndex(BLOCK_SIZE, 2, holders) for _ in range(4)]
    alone = [PrefixIndex(BLOCK_SIZE, 2) for _ in range(4)]
    told = [0] * 4
    for which, what, hashes in changes:
        told[which] += 2 if what == "gap" else 1
        stored, evicted = ([], sorted(hashes)) if what == "evicted" else (sorted(hashes), [])
        event = events(told[which], stored, evicted, snapshot=what == "snapshot")
        if what == "close":
            shared[which].close()
            shared[which], alone[which], told[which] = (
                PrefixIndex(BLOCK_SIZE, 2, holders),
                PrefixIndex(BLOCK_SIZE, 2),
                0,
            )
        else:
            assert shared[which].apply(event) == alone[which].apply(event)
    for one, other in zip(shared, alone, strict=True):
        depth = next((i for i, h in enumerate(HASHES) if h not in one.hashes), len(HASHES))
        assert one.hashes == other.hashes
        found = [index.num_cached_tokens(PromptHashes(PROMPT, b"a")) for index in (one, other)]
        assert found == [depth * BLOCK_SIZE] * 2
    assert len(holders) == len(frozenset().union(*(one.hashes for one in shared)))


def meet(worker: WiredWorker, *told: worker_pb2.CacheEvents) -> None:
    """A session begins, and what the worker tells of its cache."""
    info = worker_pb2.WorkerInfo(worker_id=worker.worker_id, role=worker.role, block_size=BLOCK_SIZE, num_blocks=8)
    tell(worker, worker_pb2.Event(info=info))
    tell(worker, *(worker_pb2.Event(cache=each) for each in told))


def tell(worker: WiredWorker, *told: worker_pb2.Event) -> None:
    worker._read(worker_pb2.EventBatch(events=told))


def cached(router: WiredRouter, worker_id: str, salt: bytes = b"a") -> int:
    return router.workers[worker_id].num_cached_tokens(PromptHashes(PROMPT, salt))


def test_each_worker_is_known_by_itself_and_each_tenant_apart() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "p1", "d0"])
        meet(router.workers["p0"], events(1, HASHES, snapshot=True))
        meet(router.workers["p1"], events(1, HASHES[:1], snapshot=True))
        assert [cached(router, w) for w in ("p0", "p1", "d0")] == [12, 4, 0]
        assert cached(router, "p0", salt=b"b") == 0

    run(scenario)


def test_a_gap_is_answered_by_asking_once_for_everything() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        worker = router.workers["p0"]
        meet(worker, events(1, HASHES, snapshot=True))
        assert not worker.take()
        tell(worker, *(worker_pb2.Event(cache=events(number, [])) for number in (3, 4, 5)))
        assert [command.WhichOneof("command") for command in worker.take()] == ["resync_cache"]
        assert cached(router, "p0") == 0
        tell(worker, worker_pb2.Event(cache=events(6, HASHES, snapshot=True)))
        assert cached(router, "p0") == 12 and not worker.take()

    run(scenario)


def test_a_lost_worker_is_forgotten_and_known_anew_when_it_comes_back() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        worker = router.workers["p0"]
        meet(worker, events(1, HASHES, snapshot=True))
        worker.lose()
        assert cached(router, "p0") == 0 and worker.prefix_index is None
        meet(worker, events(1, HASHES[:1], snapshot=True), events(2, HASHES[1:2]))
        assert cached(router, "p0") == 8

    run(scenario)
