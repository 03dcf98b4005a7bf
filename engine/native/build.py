"""Compiles the C++ files beside it for the processor that it runs on, once, and keeps the library in the user's cache.

The library is named by everything that it depends on: source, flags, compiler and processor. Several processes may
build it at once; each ends with a whole file of the same content.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
TIMEOUT_S = 600.0
# Sums may be reordered. The flags are not for the linker: it would make the whole process treat denormals as zeros.
COMPILE_FLAGS = ("-std=c++17", "-O3", "-ffast-math", "-fopenmp", "-fPIC", "-march=native")
WIDE_FLAGS = ("-mprefer-vector-width=512",)


class BuildFailed(Exception):
    """There is no library; its text says why, in one line."""


def build() -> Path:
    """The library's path, compiled if need be. Raises BuildFailed."""
    compiler = _compiler()
    flags = (*COMPILE_FLAGS, *(WIDE_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()))
    sources = [path.read_text(encoding="utf-8") for path in (*_files("*.h"), *_files("*.cpp"))]
    key = "\0".join([*sources, *flags, _version(compiler), _processor()])
    library = _cache_folder() / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        _compile(compiler, flags, library)
    return library


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if found := shutil.which(name):
            return found
    raise BuildFailed(f"no C++ compiler was found ({wanted or ', '.join(COMPILERS)}); install g++")


def _version(compiler: str) -> str:
    return compiler + _run([compiler, "--version"])


def _processor() -> str:
    """The description of the processor on which `-march=native` depends."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cache_folder() -> Path:
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise BuildFailed("this user has no home folder to keep the library in; set XDG_CACHE_HOME") from None
    folder = root / "baton"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BuildFailed(f"{folder} cannot be made: {error.strerror}; set XDG_CACHE_HOME") from None
    return folder


def _files(pattern: str) -> list[Path]:
    return sorted(FOLDER.glob(pattern))


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    """All files at once, as many at a time as there are cores."""
    try:
        with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder, ThreadPoolExecutor() as pool:
            compiled = {path: str(Path(folder) / f"{path.stem}.o") for path in _files("*.cpp")}
            for future in [
                pool.submit(_run, [compiler, *flags, "-c", str(source), "-o", target])
                for source, target in compiled.items()
            ]:
                future.result()
            linked = Path(folder) / "kernels.so"
            _run([compiler, "-shared", "-fopenmp", *compiled.values(), "-o", str(linked)])
            os.replace(linked, library)
    except OSError as error:
        raise BuildFailed(f"{library.parent} cannot be written: {error.strerror}; set XDG_CACHE_HOME") from None


def _run(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} failed: {error}") from None
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if "error" in line] or ["it says nothing"]
        raise BuildFailed(f"{command[0]} failed with {ended.returncode}: {said[0]}")
    return ended.stdout
