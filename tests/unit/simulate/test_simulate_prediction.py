"""A measured curve and a load predict an engine's latencies: against vLLM's rules, and against splitwise-sim."""

from __future__ import annotations

import json
import statistics
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from scripted_router import baton

from cluster.config.schema import TransferSection
from cluster.errors import ConfigError
from cluster.step_cost import StepCost, StepSize
from simulate.curves import LinearCurve, StepCurve
from simulate.prediction import BARE_ROUTER, PredictionQuestion, predicted_report
from simulate.published import PiecewiseLine, SplitwiseCurve
from simulate.wire import WireSpec
from simulate.worker import WorkerSpec
from simulate.workload import RequestShape, at_rate, lognormal, random_shapes
from simulate.world import Cluster

CURVE = LinearCurve(StepCost(8e-3, 6e-5, 2e-9, 4e-5, 3e-8))
BLOCK = 16


@dataclass
class Sequence:
    shape: RequestShape
    num_output: int = 0
    num_computed: int = 0
    num_blocks: int = 0
    first_at: float = 0.0

    @property
    def num_left(self) -> int:
        return self.shape.num_prompt_tokens + self.num_output - self.num_computed


def vllm(shapes: list[RequestShape], curve: StepCurve, kv_tokens: int, max_seqs: int, max_tokens: int) -> list[float]:
    """The time that each request takes by the rules of vLLM's V1 scheduler: those that run get their tokens first, in
    their order; then those that wait, chunk by chunk; where no block is free, the last one that runs is preempted."""
    coming, waiting, running = deque(shapes), deque[Sequence](), list[Sequence]()
    now, free, ends = 0.0, kv_tokens // BLOCK, dict[int, float]()
    while coming or waiting or running:
        now = now if waiting or running else max(now, coming[0].at)
        while coming and coming[0].at <= now:
            waiting.append(Sequence(coming.popleft()))
        left, step, shares, was_preempted = max_tokens, StepSize(), list[tuple[Sequence, int]](), False
        for sequence in list(running):
            num = min(sequence.num_left, left)
            while (
                sequence in running
                and (more := -(-(sequence.num_computed + num) // BLOCK) - sequence.num_blocks) > free
            ):
                victim, was_preempted = running.pop(), True
                free += victim.num_blocks
                victim.num_blocks = victim.num_computed = 0
                waiting.appendleft(victim)
            if sequence in running and num:
                free, sequence.num_blocks, left = free - more, sequence.num_blocks + more, left - num
                shares.append((sequence, num))
        while waiting and left and len(running) < max_seqs and not was_preempted:
            num = min(waiting[0].num_left, left)
            if -(-num // BLOCK) > free:
                break
            running.append(waiting.popleft())
            running[-1].num_blocks = -(-num // BLOCK)
            free, left = free - running[-1].num_blocks, left - num
            shares.append((running[-1], num))
        for sequence, num in shares:
            is_next = num == 1 and sequence.num_computed
            kv = sequence.num_computed
            step += StepSize(0, 0, 1, kv + 1) if is_next else StepSize.of_prompt(num, kv)
        now += curve.seconds(step)
        for sequence, num in shares:
            sequence.num_computed += num
            if not sequence.num_left:
                sequence.num_output += 1
                sequence.first_at = sequence.first_at or now
                if sequence.num_output == sequence.shape.num_output_tokens:
                    ends[id(sequence.shape)] = now
                    free += sequence.num_blocks
                    running.remove(sequence)
    return [ends[id(shape)] - shape.at for shape in shapes]


@pytest.mark.parametrize(("rate", "kv_tokens"), [(8.0, 400_000), (30.0, 400_000), (20.0, 16_000)])
def test_a_bare_worker_ends_requests_when_vllms_rules_end_them(rate: float, kv_tokens: int) -> None:
    shapes = at_rate(random_shapes(80, lognormal((400, 800), (60, 130), 2048), 0), rate, 1.0, 0)
    worker = WorkerSpec("", "decode", curve=CURVE, kv_tokens=kv_tokens, block_size=BLOCK, overlaps=False, command_s=0.0)
    outcomes = Cluster(PredictionQuestion(worker, is_bare=True).cluster).run(shapes).outcomes
    wanted = vllm(shapes, CURVE, kv_tokens, worker.max_num_seqs, worker.max_num_batched_tokens)
    off = [abs(outcome.e2e_s / end - 1) for outcome, end in zip(outcomes, wanted, strict=True)]
    assert statistics.fmean(outcome.e2e_s for outcome in outcomes) == pytest.approx(statistics.fmean(wanted), rel=0.02)
    if kv_tokens > 100_000:
        assert max(off) < 1e-9, "where KV lasts, every step is the same"


def test_real_workers_run_the_example_of_splitwise_sim_to_six_digits() -> None:
    """As in `test_simulate_pools`, by the real router, cores and hand-off."""
    prompt = PiecewiseLine((2048, 4096), (0.25196400948334485, 0.6495982770284172))
    h100 = SplitwiseCurve(prompt, PiecewiseLine((128, 256), (0.035739242111142055, 0.03615448040398219)))
    a100 = SplitwiseCurve(prompt, PiecewiseLine((128, 256), (0.04761210048761894, 0.04770669789515495)))
    shapes = [RequestShape(0, 4096, 32), RequestShape(2, 2048, 8), RequestShape(3, 2048, 16)]
    worker = WorkerSpec(
        *("", "decode", h100),
        max_num_batched_tokens=8192,
        num_layers=1,
        kv_bytes_per_token=70 * 14336 * 2 * 2,
        wire=WireSpec(200 * 2**30, 0.0),
        command_s=0.0,
        overlaps=False,
    )
    spec = PredictionQuestion(worker, is_bare=True).cluster
    one = Cluster(spec).run(shapes).outcomes
    assert [outcome.ttft_s for outcome in one] == pytest.approx([0.649598, 0.251964, 0.251964], abs=6e-7)
    assert [outcome.e2e_s for outcome in one] == pytest.approx([1.744743, 0.499255, 0.781873], abs=6e-7)
    workers = replace(worker, worker_id="p", role="prefill"), replace(worker, worker_id="d", curve=a100)
    spec = replace(spec, workers=workers, router=BARE_ROUTER, transfer=TransferSection(chunk_tokens=8192))
    two = Cluster(spec).run(shapes).outcomes
    assert [outcome.ttft_s for outcome in two] == pytest.approx([0.649598, 0.251964, 0.251964], abs=6e-7)
    assert [outcome.e2e_s for outcome in two] == pytest.approx([2.199226, 0.622873, 1.003019], abs=6e-7)


def test_a_request_that_no_worker_has_room_for_is_named() -> None:
    with pytest.raises(ConfigError, match="request 2 has 200 tokens, and a worker holds 160"):
        predicted_report(
            PredictionQuestion(WorkerSpec("", "decode", kv_tokens=160)),
            [RequestShape(0, 9, 1), RequestShape(0, 100, 100)],
        )


def test_one_command_takes_requests_and_a_curve_and_prints_percentiles(tmp_path: Path) -> None:
    requests, curve = tmp_path / "requests.csv", tmp_path / "curve.csv"
    requests.write_text("at_s,prompt_tokens,output_tokens\n0,100,3\n10,200,1\n")
    steps = "100,0,0,0,0.010\n200,0,0,0,0.030\n0,0,1,50,0.004\n0,0,1,250,0.004\n"
    curve.write_text("prompt_tokens,tokens_before,sequences,kv_tokens,seconds\n" + steps)
    options = ["--trace", str(requests), "--steps", str(curve), "--kv-tokens", "4096", "--bare"]
    done = baton("simulate", *options, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["curve"] == {"kind": "interpolated", "error_median": 0.0, "error_p90": 0.0}
    assert found["ttft_s"]["mean"] == pytest.approx(0.020) and found["tpot_s"]["mean"] == pytest.approx(0.004)
    assert found["e2e_s"]["by_percentile"]["50"] == pytest.approx(0.024)
    assert "TPOT" in baton("simulate", *options, "--ratio", "1:1").stdout
    both = baton("simulate", *options, "--model", "llama-3.1-8b")
    assert both.exit_code == 3 and "name a model to compute the steps of, or a file" in both.stderr
    alone = baton("simulate", *options[:2], "--profile", str(curve))
    assert alone.exit_code == 3 and "--profile: name its model, too, with --model" in alone.stderr
    unsized = baton("simulate", *options[:4])
    assert unsized.exit_code == 3 and "with --kv-tokens" in unsized.stderr
