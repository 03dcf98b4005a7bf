"""The page of a plan: it stands alone, and its pictures show what the planner says."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted_router import ROOT, baton

from cli.plan import PlannedLoad
from cli.plan_page import page_of
from cli.plan_view import PlanFindings, as_ms
from cli.svg import Axis, BarPart, Chart, Tick, round_step, stacked_bars
from cluster.config.load import parse_config
from simulate.devices import find_device
from simulate.estimates import OfferedLoad
from simulate.memory_plan import MemoryQuestion
from simulate.model_files import find_shape
from simulate.placement import LatencyGoal
from simulate.plan_choice import choose
from simulate.plan_config import config_text
from simulate.planner import Planner, PlanQuestion

SVG = "{http://www.w3.org/2000/svg}"
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}


@dataclass(frozen=True)
class Drawn:
    """A page and what it is of."""

    findings: PlanFindings
    text: str

    @property
    def charts(self) -> list[ElementTree.Element]:
        return list(parsed(self.text).iter(f"{SVG}svg"))


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.removeprefix("<!doctype html>"))


def titles(chart: ElementTree.Element, style: str) -> Iterator[tuple[ElementTree.Element, str]]:
    """Marks of a style, each with its title."""
    for mark in chart.iter():
        title = mark.find(f"{SVG}title")
        if style in mark.get("class", "").split() and title is not None:
            yield mark, title.text or ""


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    shape, load = find_shape("llama-3.1-8b"), OfferedLoad(60.0, ((2000, 200),))
    memory = MemoryQuestion(shape, find_device("h100"), shape.quantization, shape.dtype, load.longest(0.999))
    question = PlanQuestion(memory, load, LatencyGoal(0.5, 0.05), price_per_hour=3.0)
    planner = Planner(question)
    findings = PlanFindings(planner, choose(planner, (3, 3)), {})
    options = PlannedLoad(rate=60.0, prompt=2000, output=200)
    config = config_text(question, findings.choice.best, str(ROOT / "models" / "tiny-shakespeare"))
    return Drawn(findings, page_of(findings, *options.windows(options.shapes(10_000)), config))


def test_the_page_asks_nobody_for_anything(drawn: Drawn) -> None:
    assert set(re.findall(r"https?://[^\s\"'<]+", drawn.text)) == NAMESPACES
    for word in ("<script", "<link", "<img", "src=", "href", "@import", "url("):
        assert word not in drawn.text.lower()
    assert all(chart.get("aria-label") for chart in drawn.charts)


def test_it_says_what_to_serve_on_and_whether_to_disaggregate(drawn: Drawn) -> None:
    words = "".join(parsed(drawn.text).itertext())
    best = drawn.findings.choice.best
    assert f"Serve it on {best.num_devices} h100: " in words
    assert drawn.findings.choice.verdict in words
    for name, found in drawn.findings.sensitivity:
        assert name in words and as_ms(found.ttft_p90_s) in words
    for plan in ("disaggregated", "colocated", "what if"):
        assert plan in words


def test_the_ratios_serve_what_the_planner_says(drawn: Drawn) -> None:
    split = drawn.findings.choice.split
    assert split is not None and split.prefill is not None
    name = f"{split.prefill.num_workers}:{split.decode.num_workers}: "
    (said,) = [title for _, title in titles(drawn.charts[0], "dot") if title.startswith(name)]
    most = drawn.findings.planner.most_rate(split)
    assert float(said.removeprefix(name).split()[0]) == pytest.approx(most, rel=1e-3)
    heights = [(float(dot.get("cy", "")), title) for dot, title in titles(drawn.charts[0], "dot")]
    (zero,) = [float(t.get("y", "")) - 4 for t in drawn.charts[0].iter(f"{SVG}text") if t.text == "0"]
    rates = [(zero - y, float(title.split(": ")[1].split()[0])) for y, title in heights]
    scale = rates[0][0] / rates[0][1]
    assert all(height == pytest.approx(scale * rate, abs=0.1) for height, rate in rates)


def test_attainment_is_the_planners_at_each_rate(drawn: Drawn) -> None:
    best, planner = drawn.findings.choice.best, drawn.findings.planner
    both = [title for _, title in titles(drawn.charts[1], "c-text")]
    assert len(both) == 40
    for title in both[::9]:
        found = re.fullmatch(r"both in (.*)% at (.*) requests/s", title)
        assert found is not None
        estimate = planner.at_rate(float(found[2])).of_workers(best.prefill, best.decode).estimate
        assert float(found[1]) == pytest.approx(100 * estimate.kept_share, abs=0.5)


def test_memory_is_drawn_to_scale(drawn: Drawn) -> None:
    memory = drawn.findings.choice.best.decode.option.memory
    parts = {title.split(": ")[1].split()[0]: bar for bar, title in titles(drawn.charts[-1], "part")}
    widths = {name: float(bar.get("width", "")) for name, bar in parts.items()}
    wanted = memory.weight_bytes / memory.left_bytes
    assert widths["weights"] / widths["KV"] == pytest.approx(wanted, rel=0.01)


def test_every_part_of_a_bar_is_named_however_narrow_it_is() -> None:
    parts = [BarPart("weights", 99.0, "a"), BarPart("reserve", 0.5, "b"), BarPart("KV", 1.0, "c")]
    texts = [
        (text.text, float(text.get("x", "")))
        for text in parsed(stacked_bars("t", "a", [("w", parts)], "GB")).iter(SVG + "text")
    ]
    named = [(text, x) for text, x in texts if text and text.endswith("GB")]
    assert [text for text, _ in named] == ["weights 99 GB", "reserve 0.5 GB", "KV 1 GB"]
    for (text, x), (_, following) in itertools.pairwise([*named, ("", 640.0)]):
        assert x + 6.4 * len(text or "") < following


def test_the_configuration_on_it_can_be_read(drawn: Drawn) -> None:
    (text,) = ["".join(pre.itertext()) for pre in parsed(drawn.text).iter("{http://www.w3.org/1999/xhtml}pre")]
    config = parse_config(text.replace("max_model_len: 2200", "max_model_len: 256"), "cluster.yaml")
    assert config.roles.decode.devices == drawn.findings.choice.best.decode.num_devices


def test_a_trace_gives_the_day(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.csv", tmp_path / "page.html"
    rows = [f"{n / 20},{4000 if n > 200 else 200},{10 if n > 200 else 200}" for n in range(400)]
    trace.write_text("at_s,prompt_tokens,output_tokens\n" + "\n".join(rows))
    options = ("--model", "llama-3.1-8b", "--rate", "60", "--trace", str(trace), "--html", str(page))
    done = baton("plan", *options)
    assert done.exit_code == 0, done.stderr
    assert f"written: {page}" in done.stdout
    text = page.read_text(encoding="utf-8")
    assert "Parts of trace.csv, each with the requests that came in it." in text
    assert re.search(r"The best number of prefill workers goes from \d+ to \d+\.", text)


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    done = baton("plan", "--model", "llama-3.1-8b", "--html", str(tmp_path / "no" / "page.html"))
    assert done.exit_code == 3 and "--html: " in done.stderr and "cannot be written" in done.stderr


@pytest.mark.parametrize(("high", "last"), [(0.0, 1.0), (7.0, 8.0), (100.0, 100.0), (0.013, 0.014)])
def test_an_axis_ends_at_a_round_number(high: float, last: float) -> None:
    axis = Axis.up_to("x", high)
    assert axis.high == pytest.approx(last, rel=0.11) and axis.high >= high
    assert [tick.value for tick in axis.ticks] == sorted({tick.value for tick in axis.ticks})
    assert round_step(0.3) == pytest.approx(0.5)


@pytest.mark.parametrize(("high", "last"), [(1, 1), (7, 8), (13, 15), (140, 150)])
def test_an_axis_of_workers_has_whole_numbers(high: int, last: int) -> None:
    axis = Axis.up_to("workers", high, min(6, high), is_whole=True)
    assert axis.high == last and all(tick.value % 1 == 0 for tick in axis.ticks)


def test_text_from_outside_is_no_markup() -> None:
    axis = Axis("<b>", 0.0, 1.0, (Tick(0.5, "a & b"),))
    assert "&lt;b&gt;" in Chart("t", "<script>", axis, axis).svg and "<script>" not in Chart("t", "<x>", axis, axis).svg
