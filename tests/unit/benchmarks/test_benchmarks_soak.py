"""What a soak makes of its samples: slopes with their errors, the verdict, and the file that it goes on from."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plain_cluster import ProgramFailed
from benchmarks.slopes import HOUR_S, Slope, means, slope_of
from benchmarks.soak_record import Record
from benchmarks.soak_report import Span, document, failures_of, growths_of
from benchmarks.soak_requests import requests_of

MINUTE_S = 60.0
SPAN = Span(60.0)


def line(
    per_hour: float, num: int, level: float = 100.0, noise: float = 0.0, seed: int = 1
) -> list[tuple[float, float]]:
    """A point a minute."""
    draw = random.Random(seed)
    return [(MINUTE_S * i, level + per_hour * i * MINUTE_S / HOUR_S + draw.gauss(0.0, noise)) for i in range(num)]


def test_the_slope_of_a_line_is_its_own_and_has_no_error() -> None:
    slope = slope_of([line(12.0, 30)])
    assert slope is not None
    assert slope.per_hour == pytest.approx(12.0) and slope.error == pytest.approx(0.0, abs=1e-6)
    assert slope.num_points == 30


def test_segments_share_a_slope_and_not_their_levels() -> None:
    apart = [line(6.0, 20, level=100.0), line(6.0, 20, level=900.0)]
    slope = slope_of(apart)
    assert slope is not None and slope.per_hour == pytest.approx(6.0)
    as_one = slope_of([apart[0] + [(at + 1200.0, value) for at, value in apart[1]]])
    assert as_one is not None and as_one.per_hour > 1000


def test_a_longer_segment_weighs_more_than_a_short_one() -> None:
    slope = slope_of([line(0.0, 40), line(60.0, 4)])
    assert slope is not None and 0 < slope.per_hour < 0.1


def test_the_error_is_that_of_slopes_found_again_and_again_in_noise() -> None:
    found = [slope_of([line(3.0, 60, noise=5.0, seed=seed)]) for seed in range(200)]
    slopes = [slope for slope in found if slope is not None]
    spread = statistics.stdev(slope.per_hour for slope in slopes)
    assert statistics.fmean(slope.error for slope in slopes) == pytest.approx(spread, rel=0.3)
    assert statistics.fmean(slope.per_hour for slope in slopes) == pytest.approx(3.0, abs=spread / 5)


def test_an_error_allows_for_neighbours_that_are_alike() -> None:
    """What goes up and down slowly looks as if it grew; twice the plain error would be passed by nearly every other."""
    draw, slopes = random.Random(7), []
    for _ in range(200):
        level, points = 0.0, []
        for i in range(60):
            level = 0.8 * level + draw.gauss(0.0, 1.0)
            points.append((MINUTE_S * i, level))
        slopes.append(slope_of([points]))
    assert sum(slope is not None and abs(slope.per_hour) > 2 * slope.error for slope in slopes) < 50


@pytest.mark.parametrize("segments", [[], [[]], [[(0.0, 1.0)]], [line(1.0, 2)], [[(5.0, 1.0)] * 9]])
def test_too_few_points_have_no_slope(segments: Any) -> None:
    assert slope_of(segments) is None


def test_a_slope_is_flat_when_it_is_within_the_bound_or_cannot_be_told_from_it() -> None:
    assert Slope(3.9, 0.0, 60).is_flat(4.0)
    assert not Slope(4.1, 0.0, 60).is_flat(4.0)
    assert Slope(20.0, 8.1, 60).is_flat(4.0)
    assert not Slope(20.0, 7.9, 60).is_flat(4.0)
    assert Slope(-50.0, 0.0, 60).is_flat(4.0)


def test_means_leave_the_warm_up_out() -> None:
    points = [(0.0, 9.0), (50.0, 9.0), (100.0, 1.0), (105.0, 3.0), (110.0, 5.0)]
    assert means(points, 100.0, 10.0) == [(102.5, 2.0), (110.0, 5.0)]


def fill(record: Record, *, per_hour: float = 0.0, minutes: int = 60, quantity: str = "pss_mib") -> None:
    """One segment of an hour of a process that grows by so much, and what else a good one has."""
    record.append("segment", owner={})
    for minute in range(minutes + 1):
        values = {"pss_mib": 100.0, "descriptors": 20.0, "threads": 5.0}
        values[quantity] += per_hour * minute / 60
        held = {"router": values, "total": dict(values), "files": {"state_mib": 1.0}}
        record.append("sample", t=60.0 * minute, processes=held)
    record.append("counts", ended={"completed": 9}, faults={"worker stopped": 2})
    record.append("quiet", t=1.0, took_s=0.1)


def failures(record: Record) -> list[str]:
    return failures_of(record, growths_of(record, SPAN), SPAN)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "soak" / "stops.jsonl"


@pytest.fixture
def record(file: Path) -> Iterator[Record]:
    record = Record(file, "stops")
    yield record
    record.close()


def test_a_flat_hour_without_a_wrong_output_is_passed(record: Record) -> None:
    fill(record, per_hour=3.0)
    assert failures(record) == []
    found = document(record, SPAN)
    assert found["per_hour"]["router"]["pss_mib"]["per_hour"] == pytest.approx(3.0)
    assert (found["minutes"], found["segments"], found["failures"]) == (60.0, 1, [])


@pytest.mark.parametrize(("quantity", "bound"), [("pss_mib", 8.0), ("descriptors", 4.0), ("threads", 2.0)])
def test_a_process_that_grows_fails_the_hour_by_name(record: Record, quantity: str, bound: float) -> None:
    fill(record, per_hour=1.1 * bound, quantity=quantity)
    assert any(failure.startswith(f"router: {quantity} grows by") for failure in failures(record))


def test_where_processes_are_killed_only_the_total_is_judged(file: Path) -> None:
    record = Record(file, "kills")
    fill(record, per_hour=50.0)
    told = failures(record)
    record.close()
    assert len(told) == 1 and told[0].startswith("total: pss_mib grows by 50.00")


@pytest.mark.parametrize(
    ("ended", "reason"),
    [({"wrong": 1}, "1 × wrong"), ({"lost": 2}, "2 × lost"), ({"refused": 2, "dropped": 1, "cancelled": 3}, "")],
)
def test_wrong_and_lost_outputs_fail_it_and_refused_ones_do_not(
    record: Record, ended: dict[str, int], reason: str
) -> None:
    fill(record)
    record.append("counts", ended=ended, faults={})
    assert failures(record) == ([reason] if reason else [])


def test_a_problem_and_an_hour_that_is_not_over_fail_it(record: Record) -> None:
    fill(record, minutes=30)
    record.append("problem", what="held when nothing ran: decode-0")
    assert failures(record) == ["30.0 of 60 minutes are done", "held when nothing ran: decode-0"]


def test_a_soak_in_which_nothing_was_done_or_looked_at_is_not_passed(record: Record) -> None:
    told = failures(record)
    assert {"there was no request", "there was no fault"} <= set(told) and len(told) == 5


def test_the_next_run_goes_on_from_what_the_file_says(file: Path) -> None:
    record = Record(file, "stops", load=0.6)
    record.append("capacity", per_s=21.5)
    fill(record, minutes=20)
    record.close()
    again = Record(file, "stops", load=0.6)
    assert again.seconds == 1200.0 and again.capacity == 21.5
    assert again.counts == {"completed": 9} and again.faults == {"worker stopped": 2} and again.num_quiet == 1
    fill(again, minutes=40)
    assert again.seconds == 3600.0 and len(again.segments) == 2
    assert failures(again) == []
    again.close()


@pytest.mark.parametrize("torn", [b'{"kind":"samp', b'{"kind":"sample","t":99999.0,"processes":{}}'])
def test_a_last_line_that_was_cut_off_by_a_kill_is_dropped(file: Path, torn: bytes) -> None:
    record = Record(file, "stops")
    fill(record, minutes=10)
    record.close()
    with file.open("ab") as raw:
        raw.write(torn)
    again = Record(file, "stops")
    assert again.seconds == 600.0
    again.append("problem", what="after it")
    again.close()
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert lines[-1] == {"kind": "problem", "what": "after it"}


def test_the_state_of_another_soak_is_refused(file: Path) -> None:
    Record(file, "stops", load=0.6).close()
    with pytest.raises(ProgramFailed, match=r"not of .*0\.7"):
        Record(file, "stops", load=0.7)


def test_two_soaks_do_not_share_a_state(file: Path) -> None:
    first = Record(file, "stops")
    with pytest.raises(ProgramFailed, match="another soak runs"):
        Record(file, "stops")
    first.close()
    Record(file, "stops").close()


def test_requests_are_always_the_same_and_some_begin_alike() -> None:
    requests = requests_of(30, seed=1, num_constrained=2)
    assert requests == requests_of(30, seed=1, num_constrained=2) != requests_of(30, seed=2, num_constrained=2)
    assert [each.is_constrained for each in requests] == [False] * 30 + [True] * 2
    beginnings = [tuple(each.prompt[:32]) for each in requests]
    assert len(set(beginnings)) < len(beginnings)
