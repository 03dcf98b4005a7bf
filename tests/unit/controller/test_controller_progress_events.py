"""What the controller tells: to several, to whoever comes late, and to nobody."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from controller.events import ProgressBatch, ProgressEvent, ProgressLog


def progress(number: int) -> ProgressEvent:
    return ProgressEvent("progress", "router", str(number))


async def test_each_listener_goes_on_from_where_it_was() -> None:
    log = ProgressLog()
    log.add(progress(1))
    assert await log.after(0) == ProgressBatch((progress(1),), 1)
    log.add(progress(2))
    assert await log.after(1) == ProgressBatch((progress(2),), 2)
    assert await log.after(0) == ProgressBatch((progress(1), progress(2)), 2)


async def test_two_that_wait_are_both_told() -> None:
    log = ProgressLog()
    waiting = [asyncio.create_task(log.after(0)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    log.add(progress(1))
    assert await asyncio.gather(*waiting) == [ProgressBatch((progress(1),), 1)] * 2


async def test_nobody_listens_and_what_comes_once_is_kept_beside_the_newest() -> None:
    log = ProgressLog()
    serving = ProgressEvent("serving", "router", "127.0.0.1:50051")
    log.add(serving)
    for number in range(5000):
        log.add(progress(number))
    news = await log.after(0)
    assert news.events[0] == serving and news.events[-1] == progress(4999)
    assert (len(news.events), news.last) == (1001, 5001)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(log.after(news.last), 0.01)


def test_a_log_file_that_is_full_takes_the_place_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    from controller import ray_actors  # not before: a private Ray of other tests must come before this import

    monkeypatch.setattr(ray_actors, "MOST_LOG_BYTES", 1000)
    ray_actors.send_logs_to(lambda line: None, "router", str(tmp_path))
    for number in range(200):
        root.info("line %d", number)
    for handler in root.handlers:
        handler.close()
    older, newer = tmp_path / "router.log.1", tmp_path / "router.log"
    assert 0 < older.stat().st_size <= 1000 and 0 < newer.stat().st_size <= 1000
    assert sorted(tmp_path.iterdir()) == [newer, older]
    assert newer.read_text().endswith("line 199\n")
