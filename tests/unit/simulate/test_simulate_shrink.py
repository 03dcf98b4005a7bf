"""A scenario that fails is made smaller while it fails in the same way, and written down as an argument."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted_bugs import BUGS, planted

from cluster.errors import ConfigError
from simulate.__main__ import main
from simulate.scenario import Scenario
from simulate.shrink import Kept, Shrinker, how_it_fails

SLEEP = next(bug for bug in BUGS if bug.name.startswith("a missed wake-up"))


def test_a_scenario_that_fails_is_left_with_what_it_fails_by() -> None:
    scenario = Scenario.of(2)
    with planted(SLEEP):
        how = how_it_fails(scenario)
        kept = Shrinker(scenario, how).shrink()
        assert "slept, and had work to do" in how and how_it_fails(kept.of(scenario)) == how
    assert (len(kept.requests), kept.events, kept.rates) == (1, (), ())
    assert len(kept.workers) < len(scenario.spec.workers)
    assert how_it_fails(kept.of(scenario)) == ""


def test_no_more_runs_are_made_than_are_allowed() -> None:
    shrinker = Shrinker(Scenario.of(1), "anything", most_runs=0)
    assert shrinker.shrink() == Kept.all_of(Scenario.of(1)) and shrinker.num_runs == 0


def test_what_is_kept_is_read_as_it_is_written() -> None:
    kept = Kept(("0", "7"), (), ("gather-failed",), ("decode-0",), 2)
    assert str(kept) == "requests=0,7/events=/rates=gather-failed/workers=decode-0/halved=2"
    assert Kept.parse(str(kept)) == kept


def test_prompts_and_outputs_are_halved() -> None:
    scenario = Scenario.of(1)
    halved = replace(Kept.all_of(scenario), num_halvings=1).of(scenario)
    for less, request in zip(halved.requests, scenario.requests, strict=True):
        assert less.shape.num_prompt_tokens == max(1, request.shape.num_prompt_tokens // 2)
        assert less.shape.num_output_tokens == max(1, request.shape.num_output_tokens // 2)


@pytest.mark.parametrize("text", ["requests=1", "", "requests=/events=/rates=/workers=/halved=x"])
def test_what_is_no_list_of_parts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="looks like requests="):
        Kept.parse(text)


def test_the_command_that_is_printed_fails_in_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    with planted(SLEEP):
        assert main(["--first", "1"]) == 1
        printed = capsys.readouterr().err
        command = next(line for line in printed.splitlines() if line.startswith("seed 1 failed; again: "))
        arguments = command.partition("-m simulate ")[2].split()
        assert "--keep" in arguments and main(arguments) == 1
        assert "slept, and had work to do" in capsys.readouterr().err
    assert main(arguments) == 0
