"""What the controller tells: to several, to whoever comes late, and to nobody."""

from __future__ import annotations

import asyncio

import pytest

from controller.progress_events import News, Notice, NoticeBoard


def progress(number: int) -> Notice:
    return Notice("progress", "router", str(number))


async def test_each_listener_goes_on_from_where_it_was() -> None:
    board = NoticeBoard()
    board.put(progress(1))
    assert await board.after(0) == News((progress(1),), 1)
    board.put(progress(2))
    assert await board.after(1) == News((progress(2),), 2)
    assert await board.after(0) == News((progress(1), progress(2)), 2)


async def test_two_that_wait_are_both_told() -> None:
    board = NoticeBoard()
    waiting = [asyncio.create_task(board.after(0)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    board.put(progress(1))
    assert await asyncio.gather(*waiting) == [News((progress(1),), 1)] * 2


async def test_nobody_listens_and_what_comes_once_is_kept_beside_the_newest() -> None:
    board = NoticeBoard()
    serving = Notice("serving", "router", "127.0.0.1:50051")
    board.put(serving)
    for number in range(5000):
        board.put(progress(number))
    news = await board.after(0)
    assert news.notices[0] == serving and news.notices[-1] == progress(4999)
    assert (len(news.notices), news.last) == (1001, 5001)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(board.after(news.last), 0.01)
