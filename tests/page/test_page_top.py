"""`baton top` on a terminal of a cluster that serves; what it drew last becomes a picture beside those of the page."""

from __future__ import annotations

import io
import os
import pty
import signal
import termios
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import BUNDLED_MODEL, PlainCluster, token_spec
from conftest import PICTURES
from rich.console import Console
from rich.text import Text
from scripted_router import read_until, start_baton
from steady_load import SteadyLoad

pytestmark = [pytest.mark.battery, pytest.mark.timeout(200)]
COLUMNS, LINES = 124, 46
HOME = b"\x1b[H"
NUM_FRAMES = 8


class Load(SteadyLoad):
    def __init__(self, cluster: PlainCluster) -> None:
        super().__init__(4)
        self._client = cluster.client

    def ask(self, number: int) -> str:
        prompt = [4 + number, *range(10, 60 + 60 * number)]
        done = self._client.generate(token_spec(prompt, 40 + 30 * number), timeout_s=100)
        return "" if done.usage.completion_tokens == 40 + 30 * number else str(done.usage)


def test_a_terminal_shows_the_load_and_is_left_as_it_was(tmp_path: Path, browser: Any) -> None:
    with PlainCluster(BUNDLED_MODEL, tmp_path) as cluster, Load(cluster) as load:
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (LINES, COLUMNS))
        arguments = ("top", "--address", cluster.address, "--interval", "0.5")
        try:
            with start_baton(*arguments, stdin=slave, stdout=slave, stderr=slave) as process:
                os.close(slave)
                drawn = read_until(master, b"finished ")
                while drawn.count(HOME) < NUM_FRAMES:
                    drawn += read_until(master, HOME)
                # The signal may come in the middle of the next one.
                frame = drawn.split(HOME)[-2].decode().replace("\r", "")
                process.send_signal(signal.SIGINT)
                read_until(master, b"\x1b[?1049l")
                assert process.wait(30) == 0
        finally:
            os.close(master)
    assert load.problems == []
    assert frame.count("\n") < LINES and "prefill-0" in frame and "━" in frame
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(frame))
    PICTURES.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": 1100, "height": 800}, color_scheme="dark")
    page.set_content(console.export_html(inline_styles=True))
    page.screenshot(path=PICTURES / "top.png")
    page.close()
