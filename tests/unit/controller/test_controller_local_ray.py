"""What `baton serve` does to leave nothing behind, without starting Ray."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from controller import local_ray
from controller.reaper import reaping

PATIENT = "print('up', flush=True); import sys; sys.stdin.read()"


def start_patient() -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", PATIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    return child


def close(child: subprocess.Popen[str]) -> None:
    child.communicate(timeout=10)


def abandoned(base: Path, name: str) -> Path:
    folder = base / f"{local_ray.FOLDER_PREFIX}{name}"
    folder.mkdir()
    (folder / "owner.lock").touch()
    return folder


def test_a_folder_is_removed_once_its_owner_is_gone_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "base_folder", lambda: tmp_path)
    gone, alive = abandoned(tmp_path, "gone"), abandoned(tmp_path, "alive")
    stranger = tmp_path / "something-else"
    stranger.mkdir()
    with (alive / "owner.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        local_ray.remove_abandoned_folders()
        assert (gone.exists(), alive.exists(), stranger.exists()) == (False, True, True)
    local_ray.remove_abandoned_folders()
    assert not alive.exists()


def test_descendants_are_found_at_any_depth() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PATIENT!r}])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    below = {process.pid for process in psutil.Process(child.pid).children(recursive=True)}
    assert below
    assert {child.pid, *below} <= set(local_ray.descendants())
    close(child)


@pytest.mark.skipif(sys.platform != "linux", reason="needs process descriptors, which Linux has")
def test_the_reaper_ends_processes_and_folder_when_its_owner_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    doomed, spared = start_patient(), start_patient()
    with reaping(folder, [doomed.pid, 2**22 + 1]):
        assert doomed.poll() is None
    assert doomed.wait(10) == -signal.SIGKILL
    assert not folder.exists()
    assert spared.poll() is None
    close(doomed)
    close(spared)


@pytest.mark.skipif(sys.platform != "linux", reason="needs process descriptors, which Linux has")
def test_the_reaper_does_the_same_when_its_owner_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    doomed = start_patient()
    code = (
        "import pathlib, sys\nfrom controller.reaper import reaping\n"
        f"with reaping(pathlib.Path({str(folder)!r}), [{doomed.pid}]):\n"
        "    print('up', flush=True)\n    sys.stdin.read()"
    )
    root = Path(__file__).resolve().parents[3]
    owner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    reaper = psutil.Process(owner.pid).children()
    owner.kill()
    assert doomed.wait(10) == -signal.SIGKILL
    assert not psutil.wait_procs(reaper, timeout=10)[1]
    assert not folder.exists()
    close(owner)
    close(doomed)
