"""Every kernel in Triton, compiled for GPUs that are not there: a part of `benchmarks.gpu --check`."""

from __future__ import annotations

import os
from collections import defaultdict

os.environ["TRITON_INTERPRET"] = "0"  # read when triton is imported

from benchmarks.gpu_part import Clock, found, run_named
from engine.triton.compile_report import ARCHS, KernelUsage, all_cases, usages


def compiled(device: str, clock: Clock) -> None:
    """What each case takes, and of all of them the most."""
    by_arch: dict[int, list[KernelUsage]] = defaultdict(list)
    for usage in usages(ARCHS, [case for cases in all_cases() for case in cases]):
        by_arch[usage.arch].append(usage)
        values = {"kernel": usage.kernel, "registers": usage.registers, "spilled": usage.spilled}
        values["shared_kib"] = round(usage.shared_bytes / 1024, 1)
        if usage.spilled > usage.max_spilled:
            values["error"] = (
                f"{usage.spilled} bytes of a thread's registers are spilled, up to {usage.max_spilled} may"
            )
        found(f"sm_{usage.arch} {usage.case}", **values)
    for arch, some in by_arch.items():
        most = {name: max(getattr(usage, name) for usage in some) for name in ("registers", "spilled", "shared_bytes")}
        found(f"sm_{arch}", kernels=len(some), **{f"most_{name}": value for name, value in most.items()})


if __name__ == "__main__":
    run_named({"compiled": compiled})
