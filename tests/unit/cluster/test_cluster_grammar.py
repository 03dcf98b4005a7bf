"""Grammars are compiled and followed in processes of their own: what happens there happens to nobody else."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from threading import Timer

import pytest
from cluster_fixture import BUNDLED_MODEL
from tokenizers import Tokenizer
from waiting import wait_ended

from cluster.grammar import GrammarFailed, GrammarLimits, GrammarLost, GrammarProcess, GrammarProcesses
from cluster.grammar_protocol import MOST_ROWS

VOCAB = 1024
TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
TOKENIZER_JSON = (BUNDLED_MODEL / "tokenizer.json").read_text("utf-8")
CRASH = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(30_000)) + 'r30000: "x"\n'
SLOW = "a?" * 30_000


def new_processes(**limits: float) -> GrammarProcesses:
    return GrammarProcesses(lambda: TOKENIZER_JSON, VOCAB, GrammarLimits(**limits))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def processes() -> Iterator[GrammarProcesses]:
    made = new_processes()
    yield made
    made.close()


def mask(process: GrammarProcess, *tokens: int) -> bytes:
    slot = process.begin()
    assert slot is not None
    process.ask(slot, 0, tokens)
    try:
        assert not process.wait(slot)
        return bytes(process.mask(slot))
    finally:
        process.drop(slot)


def test_a_grammar_that_crashes_the_compiler_fails_alone(processes: GrammarProcesses) -> None:
    good = processes.compile("ab", "regex")
    before = mask(good)
    with pytest.raises(GrammarFailed, match=r"crashed the compiler \(SIGSEGV\)|takes more than"):
        processes.compile(CRASH, "grammar_ebnf")
    assert mask(good) == before
    assert mask(processes.compile("ab", "regex")) == before


def test_a_grammar_that_takes_too_long_is_ended_at_its_budget_and_holds_up_no_other() -> None:
    with contextlib.closing(new_processes(compile_s=0.5)) as processes:
        processes.compile("ab", "regex")
        began = time.monotonic()
        with pytest.raises(GrammarFailed, match=r"takes more than 0\.5 s to compile; simplify it"):
            processes.compile(SLOW, "regex")
        assert time.monotonic() - began < 5
        assert processes.num_live() == 0


def test_a_grammar_may_compile_for_longer_on_a_machine_that_is_busy() -> None:
    """The process stands still for as long as it may compute."""
    with contextlib.closing(new_processes(compile_s=0.5)) as processes:
        first = processes.compile("ab", "regex")
        os.kill(first.forker_pid, signal.SIGSTOP)
        timer = Timer(1.0, os.kill, (first.forker_pid, signal.SIGCONT))
        timer.start()
        began = time.monotonic()
        assert mask(processes.compile("ab", "regex")) == mask(first)
        timer.join()
        assert time.monotonic() - began > 0.5


def test_a_mask_may_take_longer_on_a_machine_that_is_busy() -> None:
    with contextlib.closing(new_processes(follow_s=0.4)) as processes:
        process = processes.compile("ab", "regex")
        before = mask(process)
        os.kill(process.pid, signal.SIGSTOP)
        timer = Timer(0.8, os.kill, (process.pid, signal.SIGCONT))
        timer.start()
        assert mask(process) == before
        timer.join()


def test_a_schema_without_any_value_says_that_nothing_can_follow(processes: GrammarProcesses) -> None:
    properties = {"a": {"$ref": "#/$defs/b"}}
    definitions = {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "$defs": definitions}
    process = processes.compile(json.dumps(schema), "json_schema")
    slot = process.begin()
    assert slot is not None
    process.ask(slot, 0, TOKENIZER.encode('{"a":', add_special_tokens=False).ids)
    assert process.wait(slot) == "no token of this model can follow"


def test_a_grammar_that_takes_too_much_memory_is_named() -> None:
    with contextlib.closing(new_processes(compile_s=60, memory_bytes=4 << 20)) as processes:
        with pytest.raises(GrammarFailed, match="takes more than 4 MiB of memory; simplify it"):
            processes.compile(SLOW, "regex")
        processes.compile("ab", "regex")


def test_a_process_ended_from_outside_is_lost_and_compiling_again_leads_to_the_same_masks(
    processes: GrammarProcesses,
) -> None:
    process = processes.compile("[a-c]{2,4}", "regex")
    before = mask(process)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(GrammarLost):
        mask(process)
    assert mask(processes.compile("[a-c]{2,4}", "regex")) == before


def test_the_process_that_forks_is_started_again() -> None:
    with contextlib.closing(new_processes()) as processes:
        process = processes.compile("ab", "regex")
        before, forker_pid = mask(process), process.forker_pid
        os.kill(forker_pid, signal.SIGKILL)
        wait_ended(process.pid)
        with pytest.raises(GrammarLost):
            mask(process)
        again = processes.compile("ab", "regex")
        assert mask(again) == before and again.forker_pid != forker_pid


def test_more_sequences_than_are_kept_are_refused_until_some_are_dropped(processes: GrammarProcesses) -> None:
    process = processes.compile("ab", "regex")
    slots = [process.begin() for _ in range(MOST_ROWS)]
    assert process.begin() is None
    for slot in slots:
        assert slot is not None
        process.ask(slot, 0, ())
    assert {process.wait(slot) for slot in slots if slot is not None} == {""}
    assert len({bytes(process.mask(slot)) for slot in slots if slot is not None}) == 1
    for slot in slots[:3]:
        assert slot is not None
        process.drop(slot)
    assert mask(process)


def test_a_slot_that_is_taken_again_before_its_answer_came_has_the_answer_to_its_own_question(
    processes: GrammarProcesses,
) -> None:
    process = processes.compile("ab", "regex")
    before = mask(process)
    os.kill(process.pid, signal.SIGSTOP)
    slot = process.begin()
    assert slot is not None
    process.ask(slot, 0, (1,))  # does not fit
    process.flush()
    process.drop(slot)
    assert process.begin() == slot
    process.ask(slot, 0, ())
    process.flush()
    os.kill(process.pid, signal.SIGCONT)
    assert not process.wait(slot) and bytes(process.mask(slot)) == before


def test_questions_longer_than_a_socket_holds_reach_a_child_that_does_not_read_yet_and_hold_up_no_other(
    processes: GrammarProcesses,
) -> None:
    busy, other = processes.compile("[a-c]*", "regex"), processes.compile("ab", "regex")
    letter = TOKENIZER.token_to_id("a")
    os.kill(busy.pid, signal.SIGSTOP)
    slots = [busy.begin() for _ in range(3)]
    for slot in slots:
        assert slot is not None
        busy.ask(slot, 0, [letter] * 150_000)
    assert mask(other)
    os.kill(busy.pid, signal.SIGCONT)
    for slot in slots:
        assert slot is not None and not busy.wait(slot)


CHILD = """
import os, signal, sys
from cluster.grammar import GrammarProcesses
processes = GrammarProcesses(open(sys.argv[1]).read, 1024)
process = processes.compile("ab", "regex")
print(process.pid, process.forker_pid, flush=True)
signal.pause()
"""


def test_processes_end_with_the_one_that_started_them_however_it_ends() -> None:
    arguments = [sys.executable, "-c", CHILD, str(BUNDLED_MODEL / "tokenizer.json")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    wait_ended(*pids)


def test_a_grammar_that_nobody_holds_has_no_process(processes: GrammarProcesses) -> None:
    process = processes.compile("ab", "regex")
    pid = process.pid
    del process
    wait_ended(pid)


@pytest.mark.parametrize("num_left", range(5))
def test_a_grammar_for_which_too_few_files_are_left_is_lost_and_keeps_none(
    processes: GrammarProcesses, num_left: int
) -> None:
    good = processes.compile("ab", "regex")
    gc.collect()  # processes of other tests
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    free = [number for number in range(len(before) + 16) if str(number) not in before]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[num_left], hard))
    try:
        with contextlib.suppress(GrammarLost):
            processes.compile("ab", "regex").close()
            assert num_left >= 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert mask(processes.compile("ab", "regex")) == mask(good)
