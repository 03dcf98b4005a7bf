"""Runs scenarios from seeds with faults: `python -m simulate --seeds 1000`, or one of them with its trace.

Prints each seed that fails, with a command that runs the least of it which fails in the same way; exits with 1 if there
was one.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from simulate.scenario import Scenario
from simulate.shrink import Kept, Shrinker, how_it_fails

TELL_EVERY_S = 30.0
"""How often a long run says how far it is."""
MOST_SHRUNK = 3
"""Seeds that are shrunk: those after them mostly fail for the same reasons."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    flags = _flags(arguments)
    logging.basicConfig(
        level=logging.INFO if flags.trace else logging.ERROR,
        handlers=[logging.StreamHandler() if flags.trace else logging.NullHandler()],
    )
    begun, virtual_s, num_failed = time.perf_counter(), 0.0, 0
    told = begun
    ends: Counter[str] = Counter()
    for num_run, seed in enumerate(range(flags.first, flags.first + flags.seeds)):
        if (now := time.perf_counter()) - told >= TELL_EVERY_S:
            print(f"{num_run} of {flags.seeds} seeds, {num_failed} failed, {now - begun:.0f} s", file=sys.stderr)
            told = now
        scenario = Scenario.of(seed)
        if flags.keep:
            scenario = Kept.parse(flags.keep).of(scenario)
        try:
            result = scenario.run(keeps_trace=flags.trace)
        except Exception:
            traceback.print_exc()
            num_failed += 1
            kept = flags.keep
            if not kept and not flags.trace and num_failed <= MOST_SHRUNK:
                kept = _shrunk(scenario)
            again = f"python -m simulate --first {seed} {f'--keep {kept} ' if kept else ''}--trace"
            print(f"seed {seed} failed; again: {again}", file=sys.stderr)
            continue
        print(*result.trace, sep="\n", end="\n" if result.trace else "")
        virtual_s += result.duration_s
        ends.update(outcome.state.value for outcome in result.outcomes)
        ends.update(result.num_faults)
    wall_s = time.perf_counter() - begun
    print(f"{flags.seeds} seeds, {num_failed} failed; {virtual_s:.0f} s in {wall_s:.1f} s, {virtual_s / wall_s:.0f}x")
    print(", ".join(f"{count} {name}" for name, count in sorted(ends.items())))
    return 1 if num_failed else 0


def _flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them")
    parser.add_argument(
        "--keep", default="", metavar="PARTS", help="run these parts of a seed only, as one that fails prints them"
    )
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    return parser.parse_args(arguments)


def _shrunk(scenario: Scenario) -> str:
    """The least of a scenario that fails in the same way; empty where it does not fail again."""
    how = how_it_fails(scenario)
    if not how:
        return ""
    shrinker = Shrinker(scenario, how)
    kept = shrinker.shrink()
    num_left, num_all = len(kept.requests), len(scenario.requests)
    print(f"{num_left} of its {num_all} requests fail in this way ({shrinker.num_runs} runs)", file=sys.stderr)
    return str(kept)


if __name__ == "__main__":
    sys.exit(main())
