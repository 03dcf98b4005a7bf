"""Compiles every kernel variant for given GPUs without having one, and prints what each needs.

`python -m engine.triton.compile_report [--arch 80] [--arch 90] [--only TEXT] [--first] [--json]`. Triton's own
launching code runs as it would on a GPU, with a driver that compiles, reads registers and spills out of the machine
code, and launches nothing. The exit status is 1 when a variant spills more than its case allows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

import engine.triton
from engine.triton.target import Case, compiling_for, is_interpreted

ARCHS = (80, 90)
_SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Shared memory that one thread block can have, by compute capability."""
_USAGE = re.compile(r"Function (\S+):\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class KernelUsage:
    """Holds what one compiled kernel takes on one GPU."""

    case: str
    kernel: str
    arch: int
    max_spilled: int
    """The case's limit."""
    registers: int
    """Of a thread, of 255."""
    spilled: int
    """Bytes of a thread's registers in memory."""
    shared_bytes: int
    num_warps: int


class _CompilingDriver(DriverBase):  # type: ignore[misc]  # triton has no type information
    """Stands where a GPU's driver would: compiles for `arch`, notes what is loaded, launches nothing."""

    def __init__(self, arch: int) -> None:
        super().__init__()
        self._arch = arch
        self._shared_bytes = _SHARED_BYTES.get(arch, _SHARED_BYTES[80])
        self.loaded: list[tuple[str, int, int, int, int]] = []
        """Of each kernel that has been loaded: name, registers, spilled bytes, shared bytes, warps."""
        self.utils = self
        self._metadata: Any = None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # so that a kernel's cache of compiled variants has one for each

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError("nothing runs here")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs here")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched")

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        self._metadata = metadata
        return lambda *_: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared_bytes}

    def load_binary(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[Any, Any, int, int, int]:
        registers, spilled = _read_usage(binary, name)
        self.loaded.append((name, registers, spilled, shared_bytes, self._metadata.num_warps))
        return None, None, registers, spilled // 4, 1024


def usages(archs: Iterable[int], cases: Sequence[Case]) -> Iterator[KernelUsage]:
    """Compiles the cases, and yields what each of their kernels takes. A kernel that an earlier case had too is left
    out."""
    for arch in archs:
        compiling = _CompilingDriver(arch)
        driver.set_active(compiling)
        with compiling_for(arch):
            for case in cases:
                compiling.loaded.clear()
                case.launch()
                for name, *numbers in compiling.loaded:
                    yield KernelUsage(case.name, name, arch, case.max_spilled, *numbers)


def all_cases() -> list[list[Case]]:
    """The cases of each module with kernels."""
    names = [module.name for module in pkgutil.iter_modules(engine.triton.__path__, "engine.triton.")]
    modules = [importlib.import_module(name) for name in names]
    return [list(module.cases()) for module in modules if hasattr(module, "cases")]


def _read_usage(binary: bytes, name: str) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, out of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for found, registers, stack, local in _USAGE.findall(text):
        if found == name:
            return int(registers), int(stack) + int(local)
    raise RuntimeError(f"cuobjdump says nothing of {name}: {text!r}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.triton.compile_report", description=__doc__)
    parser.add_argument("--arch", type=int, action="append", help="compute capability, ten times; 80 and 90 if none")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--first", action="store_true", help="only the first case of each module")
    parser.add_argument("--json", action="store_true", help="one document a line")
    options = parser.parse_args()
    if is_interpreted():
        parser.error("TRITON_INTERPRET=1 is set: interpreted kernels are not compiled; unset it")
    has_failed = False
    cases = [case for each in all_cases() for case in each[: 1 if options.first else None] if options.only in case.name]
    for usage in usages(options.arch or ARCHS, cases):
        has_failed |= usage.spilled > usage.max_spilled
        if options.json:
            print(json.dumps(asdict(usage)), flush=True)
        else:
            print(
                f"sm_{usage.arch} {usage.case:45s} {usage.kernel:24s} {usage.registers:3d} registers, "
                f"{usage.spilled} bytes spilled, {usage.shared_bytes / 1024:.1f} KiB shared, {usage.num_warps} warps",
                flush=True,
            )
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
