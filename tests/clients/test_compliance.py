"""llm-comply, a public suite that checks servers against the vendors' published schemas, over the three dialects.

It runs in .venv-clients, which `make test-clients` makes, against a model that says what a script tells it, and has a
name of which the suite knows that such models reason.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_model import call, make_model
from cluster_fixture import WAIT_S, PlainCluster
from test_clients import OTHERS

COMPLY = OTHERS.with_name("llm-comply")
MODEL = "o3-claude-4"
THOUGHT = "15 times 37 is 15 times 40 less 45."
SCRIPT = [
    {"say": "Hello there, Alice."},
    {"when": "What is 15 .* 37", "say": f"<think>\n{THOUGHT}\n</think>\n\nIt is 555."},
    {"when": "weather in San Francisco", "say": call("get_weather", location="San Francisco")},
]
NOT_SERVED = {
    "open-responses": {"image-input", "compact-response", "compact-missing-model"},
    "openai-chat": {"chat-image-input", "chat-reasoning-summary"},
    "anthropic": {"anth-image-input"},
}
"""Images, which no model here reads, `/v1/responses/compact`, and a chat's `reasoning`, which OpenAI's have not either:
refused by what they are, 400 and 405."""
NO_CITATIONS = "is not valid under any of the given schemas"
"""Anthropic's schema requires `citations` of a text, and the AI SDK refuses it where it is null: it is left out."""


@pytest.fixture(scope="module")
def http_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "script.yaml").write_text(json.dumps(SCRIPT))
    timed = {"dtype": "auto", "sequence_s": 0.001, "script": str(folder / "script.yaml")}
    with PlainCluster(make_model(folder / MODEL), folder, router={"http_port": 0}, **timed) as cluster:
        yield cluster.http_address


@pytest.mark.skipif(not COMPLY.exists(), reason="llm-comply is not installed; `make test-clients` installs and runs it")
@pytest.mark.parametrize("dialect", NOT_SERVED)
def test_a_public_suite_finds_nothing_but_what_is_not_served(http_address: str, dialect: str, tmp_path: Path) -> None:
    command = [COMPLY, "run", "--base-url", f"http://{http_address}/v1", "--api-key", "none", "--model", MODEL]
    command += ["--format", dialect, "--json", *(("--ignore", NO_CITATIONS) if dialect == "anthropic" else ())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path, check=False)
    found = json.loads(done.stdout)["results"]
    failed = {each["id"]: each["errors"] for each in found if each["status"] == "failed"}
    assert set(failed) == NOT_SERVED[dialect], failed
    assert all(errors[0].startswith(("HTTP 400", "HTTP 405")) for errors in failed.values()), failed
    assert sum(each["status"] == "passed" for each in found) >= 7
    assert not [each for each in found if each["status"] == "skipped"]
    unseen = [
        each for each in found if each["status"] == "passed" and re.search("reason|think", str(each.get("warnings")))
    ]
    assert not unseen, unseen
