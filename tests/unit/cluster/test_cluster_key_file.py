"""A keys file that is followed: what could not be read at one moment is read at the next."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cli import keys
from cli.keys import edited_keys
from cluster import auth
from cluster.api_keys import ApiKey, digest_of, load_keys, render_keys
from cluster.auth import KeyFile
from cluster.errors import ConfigError

STAYS, REVOKED = (ApiKey(name, digest_of(name), "acme", ("generate",)) for name in ("stays", "revoked"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(render_keys([STAYS, REVOKED]))
    return path


async def test_a_file_that_could_not_be_read_once_is_read_again_and_the_problem_is_told_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeyFile(str(file))

    def denied(path: Path) -> Any:
        raise ConfigError(f"{path}: cannot be read: Permission denied")

    with edited_keys(file) as found:
        found.remove(REVOKED)
    monkeypatch.setattr(auth, "load_keys", denied)
    assert not await keys.refresh()
    assert not await keys.refresh()
    assert keys.ring.find("revoked") is not None
    assert len(caplog.records) == 1
    monkeypatch.setattr(auth, "load_keys", load_keys)
    assert await keys.refresh()
    assert keys.ring.find("revoked") is None and keys.ring.find("stays") is not None
    assert not await keys.refresh()


async def test_a_revoked_key_goes_while_other_work_has_every_thread(file: Path) -> None:
    key_file = KeyFile(str(file))
    released = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(released.wait))
    try:
        with edited_keys(file) as found:
            found.remove(REVOKED)
        assert await asyncio.wait_for(key_file.refresh(), 10.0)
        assert key_file.ring.find("revoked") is None and not busy.done()
    finally:
        released.set()
        await busy


async def test_a_change_of_a_files_mode_alone_has_it_read_again(file: Path) -> None:
    keys = KeyFile(str(file))
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # a file system's clock may tick slowly
        file.chmod(0o640)
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert await keys.refresh()


def test_a_file_that_root_changes_stays_its_owners(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(keys.os, "geteuid", lambda: 0)
    monkeypatch.setattr(keys.os, "fchown", lambda _, uid, gid: given.append((uid, gid)))
    owner = os.stat(file)
    with edited_keys(file) as found:
        found.remove(REVOKED)
    assert given == [(owner.st_uid, owner.st_gid)]
