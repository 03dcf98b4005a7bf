"""Plans: queues against known results, the fewest devices, refusals that name the objective, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_router import ROOT, baton

from benchmarks.plan_table import COMMANDS, PAGE, ROW, row_of
from cluster.config.load import parse_config
from cluster.config.schema import SloSection
from cluster.step_cost import RoleCosts, StepCost
from controller.goodput_model import WorkerModel, service_of, usual_request
from simulate.curves import LinearCurve
from simulate.devices import find_device
from simulate.estimates import (
    DecodeLoad,
    DecodeWorkers,
    OfferedLoad,
    PromptQueues,
    WaitingTimes,
    erlang_c,
    latency_estimate,
    prompt_seconds,
)
from simulate.memory_plan import MemoryQuestion
from simulate.model_files import find_shape
from simulate.placement import LatencyGoal
from simulate.plan_choice import choose
from simulate.plan_config import config_text
from simulate.plan_series import LoadWindow, divided, divisions, over_time, windows_of_day, windows_of_trace
from simulate.planner import Planner, PlanQuestion, RolePlan, WorkerOption
from simulate.shapes import DeviceLayout
from simulate.workload import DayShape, RequestShape

COST = LinearCurve(StepCost(0.01, 1e-4, 0.0, 1e-4, 1e-7))
GOAL = LatencyGoal(0.5, 0.05)
LOAD = OfferedLoad(10.0, ((1000, 200),))


def test_who_finds_all_servers_busy_is_as_erlang_says() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.409, rel=0.01)  # tables of Erlang C


def test_the_mean_wait_before_one_server_is_pollaczek_and_khinchines() -> None:
    services = (0.1, 0.1, 0.4)
    waiting = WaitingTimes(services, rate=2.5, num_servers=1)
    mean_s = 2.5 * (0.01 + 0.01 + 0.16) / 3 / (2 * (1 - 0.5))
    waits, mean_of_those_s = waiting._waiting
    assert waiting.busy == pytest.approx(0.5)
    assert waits * mean_of_those_s == pytest.approx(mean_s)
    assert waiting.share_within(0.05) == 0.0
    queues = PromptQueues(((0.3, waiting), (0.7, waiting)))
    assert waiting.share_within(queues.quantile_s(0.9)) == pytest.approx(0.9)


def test_an_overloaded_server_is_never_in_time() -> None:
    waiting = WaitingTimes((0.5,), rate=3.0, num_servers=1)
    assert waiting.share_within(100.0) == 0.0
    assert math.isinf(PromptQueues(((1.0, waiting),)).quantile_s(0.5))


def test_as_many_sequences_run_as_littles_law_says() -> None:
    decode = DecodeLoad(COST, 1000, 256)
    num = decode.running(1000.0)
    assert num == pytest.approx(1000 * decode.step_s(num), rel=0.05)
    assert math.isinf(decode.running(1e6))
    assert decode.share_within(num, 1.0) > 0.999
    assert decode.share_within(num, decode.step_s(1) / 2) == 0.0


def test_a_chunk_beside_sequences_is_as_large_as_the_pace_allows() -> None:
    decode = DecodeLoad(COST, 1000, 256)
    mixed = decode.with_prompt(10, pace_s=0.04, most_tokens=2048)
    left = 0.04 - decode.step_s(10)
    assert mixed.step.num_prompt_tokens == int(left / 1e-4)
    assert mixed.seconds <= 0.04
    assert decode.with_prompt(10, 0.001, 2048).step.num_prompt_tokens == 0


def test_a_long_prompt_is_computed_in_chunks() -> None:
    alone = prompt_seconds(COST, 5000, 2048)
    assert alone == pytest.approx(3 * 0.01 + 0.5)


def workers(num: int) -> DecodeWorkers:
    services = (prompt_seconds(COST, 1000, 2048),)
    return DecodeWorkers(num, DecodeLoad(COST, LOAD.mean_kv, 256), services, 2048)


def test_workers_apart_and_together_serve_the_same_load_in_different_ways() -> None:
    waiting = WaitingTimes(workers(1).services_s, 10.0, 2)
    apart = latency_estimate(LOAD, waiting, workers(1), GOAL, handoff_s=0.02)
    both = latency_estimate(LOAD, None, workers(3), GOAL)
    assert apart.tpot_p50_s < both.tpot_p50_s <= 0.75 * 0.05 * 1.01
    assert apart.kept_share > 0.9
    assert both.kept_share > 0.9
    none = latency_estimate(LOAD, None, workers(1), GOAL)
    assert none.kept_share == 0.0


def test_decode_workers_take_prompts_that_are_too_many_for_one_prefill_worker() -> None:
    (service_s,) = workers(1).services_s
    assert 10.0 * service_s > 1.0
    alone = latency_estimate(LOAD, WaitingTimes((service_s,), 10.0, 1), workers(2), GOAL)
    shared = latency_estimate(LOAD, WaitingTimes((service_s,), 5.0, 1), workers(2), GOAL)
    assert alone.kept_share == 0.0 and shared.kept_share > 0.9
    assert shared.ttft_p50_s < shared.ttft_p90_s < GOAL.ttft_s


def question(model: str, device: str = "h100", load: OfferedLoad = LOAD, goal: LatencyGoal = GOAL) -> PlanQuestion:
    shape = find_shape(model)
    memory = MemoryQuestion(shape, find_device(device), shape.quantization, shape.dtype, load.longest(0.999))
    return PlanQuestion(memory, load, goal, price_per_hour=3.0)


def test_a_plan_is_the_fewest_devices_that_are_enough() -> None:
    planner = Planner(question("llama-3.1-8b", load=OfferedLoad(60.0, ((2000, 200),))))
    plan = planner.split()
    assert plan is not None and plan.prefill is not None
    assert plan.estimate.kept_share >= 0.8
    assert planner.most_rate(plan) == pytest.approx(60.0, rel=0.5)
    for role in (plan.prefill, plan.decode):
        assert role.num_workers > 1
    more = planner.at_rate(120.0).split()
    assert more is not None
    assert 1.5 * plan.num_devices < more.num_devices < 2.5 * plan.num_devices


def test_the_verdict_follows_the_devices() -> None:
    small = choose(Planner(question("llama-3.1-8b", load=OfferedLoad(1.0, ((500, 100),)))))
    assert small.best is small.colocated
    assert small.verdict.startswith("Do not disaggregate: where each computes both, it takes 1 device; apart 2")
    strict = LatencyGoal(0.4, 0.0095)
    tight = choose(Planner(question("llama-3.1-8b", "h200", OfferedLoad(40.0, ((2000, 200),)), strict)))
    assert tight.best is tight.split
    assert tight.verdict.startswith("Disaggregate: ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            "--ttft-ms 5",
            "--ttft-ms: 5 ms in 90% of the requests cannot be met with any number of h100: llama-3.1-8b takes",
        ),
        ("--tpot-ms 2", "--tpot-ms: 2 ms in 90% of the requests cannot be met with any number of h100"),
        ("--rate 500 --devices 4", "--devices: 4 h100 do not serve 500 requests a second within the objectives"),
        (
            "--device l40s --tp 1 --memory-utilization 0.4",
            "memory: one request of 1,280 tokens fits beside llama-3.1-8b",
        ),
        ("--prompt 131072 --output 8", "--prompt, --output: 131,072 and 8 tokens are more together than the model's"),
        ("--rate 1e6", "--rate: 1e+06 requests a second take more than 1,024 workers of llama-3.1-8b on h100"),
        ("--what-if 3/1", "'3/1' is no ratio of workers; write P:D"),
        ("--what-if 3:0", "'3:0' is no ratio of workers"),
        ("--prompt 100 --prompt-p90 90000", "no lognormal has the mean 100 and the 90th percentile 90000"),
        ("--trace nowhere.csv", "nowhere.csv: cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_option(options: str, says: str) -> None:
    done = baton("plan", "--model", "llama-3.1-8b", *options.split())
    assert done.exit_code == 3
    assert says in done.stderr


def test_a_limit_that_cannot_be_met_is_refused_with_one_that_can() -> None:
    done = baton("plan", "--model", "llama-3.1-8b", "--ttft-ms", "5")
    nearest = done.stderr.rpartition("; ")[2].partition(" would take")[0]
    assert baton("plan", "--model", "llama-3.1-8b", *nearest.split()).exit_code == 0


def test_both_limits_that_cannot_be_met_are_named_with_a_plan_for_both() -> None:
    done = baton("plan", "--model", "llama-3.1-8b", "--ttft-ms", "5", "--tpot-ms", "2")
    assert "--ttft-ms: 5 ms" in done.stderr and "--tpot-ms: 2 ms" in done.stderr
    nearest = done.stderr.rpartition("; ")[2].partition(" would take")[0]
    assert baton("plan", "--model", "llama-3.1-8b", *nearest.split()).exit_code == 0


@pytest.mark.parametrize("options", ["--rate 1e6", pytest.param("--rate 500 --devices 4", marks=pytest.mark.battery)])
def test_a_rate_that_is_too_high_is_refused_with_one_that_is_not(options: str) -> None:
    done = baton("plan", "--model", "llama-3.1-8b", *options.split())
    rate = done.stderr.rpartition("--rate ")[2] if "--devices" not in options else done.stderr.split("; --rate ")[1]
    assert baton("plan", "--model", "llama-3.1-8b", *options.split()[2:], "--rate", rate.split()[0]).exit_code == 0


def test_a_hand_off_that_outlasts_its_output_is_no_reason_to_refuse_a_plan_without_one() -> None:
    load = OfferedLoad(0.1, ((100_000, 2),))
    choice = choose(Planner(question("llama-3.1-8b", load=load, goal=LatencyGoal(30.0, 0.05))))
    assert choice.split is None and choice.best is choice.colocated
    assert choice.verdict.startswith("Do not disaggregate: no number of devices keeps these objectives apart; ")


def test_a_bad_row_of_a_trace_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,prompt_tokens,output_tokens\n0,100,10\n1,many,10\n")
    done = baton("plan", "--model", "llama-3.1-8b", "--trace", str(trace))
    assert f"{trace}:3: prompt_tokens must be a whole number" in done.stderr


def test_a_trace_without_a_rate_is_refused_until_one_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,prompt_tokens,output_tokens\n3,100,10\n3,100,10\n")
    options = "plan", "--model", "llama-3.1-8b", "--trace", str(trace)
    assert f"{trace}: all of its requests come at once; say how many a second with --rate" in baton(*options).stderr
    assert baton(*options, "--rate", "2").exit_code == 0


def test_a_batch_that_could_be_larger_is_said_until_it_is() -> None:
    load = "--device h200 --rate 20 --prompt 300 --output 1000"
    options = "plan", "--model", "llama-3.1-8b", *load.split()
    assert "--max-num-seqs 512 plans for them" in baton(*options).stdout
    larger = baton(*options, "--max-num-seqs", "512").stdout
    assert "plans for them" not in larger and "26.72 requests/s" in larger


def test_a_trace_gives_rate_and_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{n / 4},{100 + n},{10}" for n in range(41)]
    trace.write_text("at_s,prompt_tokens,output_tokens\n" + "\n".join(rows))
    told = json.loads(baton("plan", "--json", "--model", "llama-3.1-8b", "--trace", str(trace)).stdout)
    assert (told["rate"], told["mean_prompt_tokens"], told["mean_output_tokens"]) == (4.0, 120.0, 10.0)


def test_a_what_if_that_the_load_is_too_much_for_says_so() -> None:
    load = "--rate 40 --prompt 4000 --output 100 --what-if 2:1"
    done = baton("plan", "--model", "llama-3.1-8b", *load.split())
    assert done.exit_code == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("TTFT")]
    assert row.endswith("overloaded") and row.count("overloaded") == 1


def test_text_names_both_plans_the_verdict_and_other_rates(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    done = baton("plan", "--model", "llama-3.1-70b", "--what-if", "3:1", "--write", str(file))
    for text in ("disaggregated", "colocated", "what if", "3 workers of TP 4", "isaggregate:", "colocated under"):
        assert text in done.stdout
    assert "roles:" in file.read_text()


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3"])
def test_the_file_that_is_meant_can_be_served(model: str) -> None:
    asked = question(model, "h200")
    choice = choose(Planner(asked))
    for plan in (choice.split, choice.colocated):
        assert plan is not None
        text = config_text(asked, plan, str(ROOT / "models" / "tiny-shakespeare"))
        text = text.replace(f"max_model_len: {asked.memory.context}", "max_model_len: 256")
        config = parse_config(text, "cluster.yaml")
        assert config.roles.decode.devices == plan.decode.num_devices
        assert config.roles.prefill.devices == (plan.prefill.num_devices if plan.prefill else 0)
        assert config.engine.max_num_seqs == plan.max_num_seqs
        layout = plan.decode.option.layout
        assert config.roles.decode.expert_parallel == layout.ep_size
        assert config.roles.decode.tensor_parallel == layout.num_devices
        assert config.roles.decode.split_latents == (model == "deepseek-v3" and layout.tp_size < layout.num_devices)
        layouts = [layout] if plan.prefill is None else [layout, plan.prefill.option.layout]
        assert ("not served yet" in text) == any(each.tp_size < each.num_devices for each in layouts)


def test_each_group_of_a_worker_computes_a_prompt_of_its_own() -> None:
    alone, beside_three = (prompt_seconds(COST, 1000, 2048, groups) for groups in (1, 4))
    assert beside_three == pytest.approx(alone + 0.3)
    assert DecodeLoad(COST, 1000, 256, 4).with_prompt(4, 0.1, 2048).step.num_prompt_tokens % 4 == 0


def test_the_page_has_four_models_on_two_devices_under_three_loads() -> None:
    assert [found[1] for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))] == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS[::7])
def test_a_row_of_the_page_is_what_its_command_says(command: str) -> None:
    assert row_of(command) in PAGE.read_text(encoding="utf-8").splitlines()


def test_a_plan_that_is_simulated_keeps_what_was_estimated() -> None:
    options = ("--model", "llama-3.1-8b", "--rate", "10", "--prompt", "1000", "--output", "20", "--simulate", "20")
    told = json.loads(baton("plan", *options, "--json").stdout)
    assert set(told["simulated"]) == {"disaggregated", "colocated"}
    assert told["simulated"]["disaggregated"]["kept_share"] == 1.0
    assert told["simulated"]["disaggregated"]["tpot_p90_ms"] == pytest.approx(
        told["disaggregated"]["tpot_p90_ms"], rel=0.3
    )
    assert "20 requests" in baton("plan", *options).stdout


def test_the_best_ratio_of_a_part_of_the_day_is_the_one_that_serves_most() -> None:
    planner = Planner(question("llama-3.1-8b", load=OfferedLoad(60.0, ((2000, 200),))))
    split = planner.split()
    assert split is not None
    load = OfferedLoad(50.0, ((500, 400),))
    (found,) = over_time(planner, split, 8, [LoadWindow(0.0, 1.0, load)])
    moved, plan = planner.under(load, split)
    rates = {n: moved.most_rate(divided(moved, plan, 8, n)) for n in divisions(plan, 8)}
    assert rates[found.best] == pytest.approx(max(rates.values()), rel=0.02)
    assert found.most_rate == pytest.approx(rates[found.best], rel=0.02)
    assert found.enough == [n for n, rate in rates.items() if rate >= 50.0]


def test_parts_of_a_trace_have_the_requests_that_came_in_them() -> None:
    shapes = [RequestShape(n / 10, 100 if n < 100 else 900, 10) for n in range(200)]
    windows = windows_of_trace(shapes)
    assert [len(one.load.lengths) for one in windows] == [50, 50, 50, 50]
    assert [one.load.mean_prompt for one in windows] == [100, 100, 900, 900]
    assert sum(one.load.rate for one in windows_of_trace(shapes, rate=3.0)) / 4 == pytest.approx(3.0)
    assert windows_of_trace(shapes[:60]) == []


def test_a_day_is_drawn_up_to_the_rate_that_is_asked_for() -> None:
    windows = windows_of_day(OfferedLoad(9.0, ((1000, 100),)), DayShape.with_peak(9.0))
    rates = [one.load.rate for one in windows]
    assert max(rates) == pytest.approx(9.0, rel=0.01) and min(rates) == pytest.approx(3.0, rel=0.01)
    assert {round(one.load.mean_prompt / one.load.mean_output, 1) for one in windows} >= {5.8, 17.3}


@pytest.mark.parametrize("lengths", [(1024, 256), (4000, 100)])
@pytest.mark.parametrize("ratio", [(3, 1), (2, 2), (1, 3), (0, 4)])
def test_a_plan_and_the_controller_say_about_the_same_of_a_ratio(
    ratio: tuple[int, int], lengths: tuple[int, int]
) -> None:
    """With one linear cost for both. The controller asks for 0.85 of the requests in both objectives: 0.92 of each."""
    goal = LatencyGoal(2.0, 0.05, 0.92)
    load = OfferedLoad(5.0, (lengths,))
    asked = replace(question("llama-3.1-70b", load=load, goal=goal), layouts=(DeviceLayout(4),))
    cost = StepCost(0.0205, 7.5e-5, 8e-10, 3e-5, 4e-8)
    planner = Planner(asked)
    option = with_curve(planner.options[0], LinearCurve(cost), load)
    num_prefill, num_decode = ratio
    prefill = RolePlan(option, num_prefill) if num_prefill else None
    planned = planner.most_rate(planner.of_workers(prefill, RolePlan(option, num_decode)))
    worker = WorkerModel(RoleCosts(cost, cost), 256, option.memory.num_tokens)
    usual = usual_request(load.demand().scaled(100), worker.costs)
    assert usual is not None
    moved = service_of(usual, worker, SloSection(2000.0, 50.0)).of(num_prefill, num_prefill + num_decode)
    assert moved == pytest.approx(planned, rel=0.15)


def with_curve(option: WorkerOption, curve: LinearCurve, load: OfferedLoad) -> WorkerOption:
    services = tuple(prompt_seconds(curve, num, 2048) for num in load.prompts)
    return replace(option, curve=curve, services_s=services, decode=replace(option.decode, curve=curve))
