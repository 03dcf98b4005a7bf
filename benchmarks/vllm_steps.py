"""A real run of vLLM, with what `baton simulate --bare` needs to predict it: the requests and the times of its steps.

    VENV/bin/python benchmarks/vllm_steps.py MODEL OUT --rate 3 --num 200 --seed 1
    baton simulate --bare --steps OUT/steps.csv --trace OUT/trace.csv --kv-tokens N

Runs in vLLM's own environment, without Baton's packages, and prints the second line with its N, and the percentiles
that its clients saw. The engine is in this process: requests are added as they are due, steps follow one another, and a
step lasts from its begin to the next one's. A row of steps.csv is what vLLM's scheduler put into one of them.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt


class Clock:
    """Seconds since the begin of the run. By processor time, other programs of the machine do not count; waits are
    skipped then."""

    def __init__(self, *, by_processor: bool) -> None:
        self._by_processor = by_processor
        self._read = time.process_time if by_processor else time.perf_counter
        self._began = self._read()

    def now(self) -> float:
        return self._read() - self._began

    def wait_until(self, at: float) -> None:
        if self._by_processor:
            self._began -= max(0.0, at - self.now())
        else:
            time.sleep(max(0.0, at - self.now()))


class StepLog:
    """What each step computed, noted as vLLM's scheduler decides it."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        self.clock = clock
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._noted
        self.rows: list[list[float]] = []
        """Prompt tokens, tokens before them, sequences, KV tokens of each, seconds."""
        self._size: tuple[int, int, int, int] | None = None
        self._began = 0.0

    def _noted(self, *args: Any, **keywords: Any) -> Any:
        self.end()
        self._began = self.clock.now()
        output = self._schedule(*args, **keywords)
        chunks, lengths = [], []
        for name, num in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            before = request.num_computed_tokens - num  # the scheduler has counted this step's already
            if num == 1 and before >= request.num_prompt_tokens:
                lengths.append(before)
            else:
                chunks.append((num, before))
        tokens = sum(num for num, _ in chunks)
        attended = sum(num * before + num * (num + 1) // 2 for num, before in chunks)
        # One chunk that attends to as many keys as all of them.
        before = max(0, round((attended - tokens * (tokens + 1) / 2) / tokens)) if tokens else 0
        each = round(sum(lengths) / len(lengths)) if lengths else 0
        self._size = (tokens, before, len(lengths), each) if chunks or lengths else None
        return output

    def end(self) -> None:
        """The last step is over."""
        if self._size is not None:
            self.rows.append([*self._size, self.clock.now() - self._began])
        self._size = None


def drawn(num: int, rate: float, mean: tuple[int, int], seed: int) -> list[tuple[float, int, int]]:
    """When each comes, and its tokens of prompt and output: Poisson, lengths between a half and three halves of the
    means."""
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(num):
        found.append((at, *(draw.randint(n // 2, n * 3 // 2) for n in mean)))
        at += draw.expovariate(rate)
    return found


def run(
    engine: Any, requests: list[tuple[float, int, int]], vocab: int, clock: Clock, log: StepLog
) -> list[list[float]]:
    """Of each request, when it came, and its first and its last token."""
    draw, number = random.Random(0), 0
    times: dict[str, list[float]] = {}
    while number < len(requests) or engine.has_unfinished_requests():
        while number < len(requests) and requests[number][0] <= clock.now():
            at, prompt, output = requests[number]
            exactly = SamplingParams(
                temperature=0, ignore_eos=True, min_tokens=output, max_tokens=output, detokenize=False
            )
            tokens = TokensPrompt(prompt_token_ids=[draw.randrange(3, vocab) for _ in range(prompt)])
            engine.add_request(str(number), tokens, exactly)
            times[str(number)] = [at]
            number += 1
        if not engine.has_unfinished_requests():
            log.end()
            clock.wait_until(requests[number][0])
            continue
        for one in engine.step():
            seen = times[one.request_id]
            seen[1 + (len(seen) > 1) :] = [clock.now()]
    log.end()
    return list(times.values())


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    p50, p90, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000 for share in (0.5, 0.9, 0.99))
    mean = 1000 * sum(ordered) / len(ordered)
    return f"p50 {p50:.2f} ms, p90 {p90:.2f} ms, p99 {p99:.2f} ms, mean {mean:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=256, help="tokens on the mean")
    parser.add_argument("--output", type=int, default=64, help="tokens on the mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--processor-time", action="store_true", help="the clock: processor time of this process")
    parser.add_argument("--enforce-eager", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            arguments.model,
            dtype=arguments.dtype,
            max_model_len=4096,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            async_scheduling=False,
            enforce_eager=arguments.enforce_eager,
        )
    )
    cache = engine.vllm_config.cache_config
    vocab = engine.model_config.get_vocab_size()
    clock = Clock(by_processor=True)
    log = StepLog(engine, clock)
    run(engine, drawn(20, 20.0, (arguments.prompt, 16), 99), vocab, clock, log)  # what is compiled or allocated once
    log.clock = clock = Clock(by_processor=arguments.processor_time)
    log.rows.clear()
    requests = drawn(arguments.num, arguments.rate, (arguments.prompt, arguments.output), arguments.seed)
    times = run(engine, requests, vocab, clock, log)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, header, rows in (
        ("trace.csv", "at_s,prompt_tokens,output_tokens", requests),
        ("steps.csv", "prompt_tokens,tokens_before,sequences,kv_tokens,seconds", log.rows),
    ):
        with (arguments.out / name).open("w", newline="") as file:
            csv.writer(file).writerows([header.split(","), *rows])
    outputs = [output for _, _, output in requests]
    spans = [(last - first) / (num - 1) for (_, first, last), num in zip(times, outputs, strict=True)]
    print("TTFT       ", percentiles([first - at for at, first, _ in times]))
    print("TPOT       ", percentiles(spans))
    print("end to end ", percentiles([last - at for at, _, last in times]))
    print(
        f"baton simulate --bare --steps {arguments.out}/steps.csv --trace {arguments.out}/trace.csv --kv-tokens "
        f"{cache.num_gpu_blocks * cache.block_size} --block-size {cache.block_size} "
        f"--max-num-seqs {arguments.max_num_seqs}"
    )


if __name__ == "__main__":
    main()
