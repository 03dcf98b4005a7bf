"""Runs scenarios from seeds with faults: `python -m simulate --seeds 1000`, or one of them with its trace.

Prints each seed that fails, with the command that runs it again; exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from simulate.scenario import Scenario


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    flags = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if flags.trace else logging.ERROR,
        handlers=[logging.StreamHandler() if flags.trace else logging.NullHandler()],
    )
    begun, virtual_s, failed = time.perf_counter(), 0.0, []
    ends: Counter[str] = Counter()
    for seed in range(flags.first, flags.first + flags.seeds):
        try:
            result = Scenario.of(seed).run(keeps_trace=flags.trace)
        except Exception:
            traceback.print_exc()
            print(f"seed {seed} failed; again: python -m simulate --first {seed} --trace", file=sys.stderr)
            failed.append(seed)
            continue
        print(*result.trace, sep="\n", end="\n" if result.trace else "")
        virtual_s += result.duration_s
        ends.update(outcome.state.value for outcome in result.outcomes)
        ends.update(result.num_faults)
    wall_s = time.perf_counter() - begun
    print(f"{flags.seeds} seeds, {len(failed)} failed; {virtual_s:.0f} s in {wall_s:.1f} s, {virtual_s / wall_s:.0f}x")
    print(", ".join(f"{count} {name}" for name, count in sorted(ends.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
