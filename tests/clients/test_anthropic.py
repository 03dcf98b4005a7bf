"""Anthropic's own client with tools and thinking, and Claude Code: at a router whose workers write what a script says,
since the bundled model calls nothing by itself. `test_clients` has the client beside others at a cluster.

Claude Code is tried where `claude` is on the path (`npm install -g @anthropic-ai/claude-code`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import router_harness
from fake_worker import STOP, pair
from http_door import serving
from router_harness import TOKENIZER, ids
from test_clients import NEEDS_OTHERS, OTHERS, Client

from cluster.pb import worker_pb2

pytestmark = pytest.mark.asyncio
CLAUDE = shutil.which("claude")

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{# <tool_call> #}{% endfor %}<assistant><think>"""
ASKED = 'hm, {0}</think>Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "{0}"}}}}\n</tool_call>'
ANSWER = "well</think>Rome is warm, and Oslo is cold."


def scripted(admit: worker_pb2.Admit) -> list[list[int]]:
    """Asks for one city after the other, and answers."""
    prompt = TOKENIZER.decode(list(admit.prompt_token_ids), skip_special_tokens=False)
    num_results = prompt.count("<tool>")
    return [ids(ANSWER if num_results == 2 else ASKED.format(("Rome", "Oslo")[num_results]))]


@pytest_asyncio.fixture
async def ask(tmp_path: Path) -> AsyncIterator[Any]:
    client = Client("anthropic", str(OTHERS), model="model")
    async with serving(tmp_path, pair(scripted, STOP), chat_template=TEMPLATE) as (router, _):
        yield lambda step: asyncio.to_thread(client.ask, step, router.server.http_address)
    client.close()


@NEEDS_OTHERS
@pytest.mark.parametrize("step", ["loop", "runner"])
async def test_a_loop_of_two_calls_ends_with_an_answer(ask: Any, step: str) -> None:
    told = await ask(step)
    assert told == {"asked": ["Rome", "Oslo"], "text": "Rome is warm, and Oslo is cold.", "reason": "end_turn"}


@NEEDS_OTHERS
async def test_the_served_model_is_listed(ask: Any) -> None:
    assert await ask("models") == {"id": "model", "most": router_harness.MAX_MODEL_LEN - 1}


@NEEDS_OTHERS
async def test_a_stream_has_thinking_text_and_a_call(ask: Any) -> None:
    told = await ask("thinking")
    thought, said, called = told["content"]
    assert (thought["thinking"], said["text"], called["input"]) == ("hm, Rome", "Let me see.", {"city": "Rome"})
    assert thought["signature"] and told["reason"] == "tool_use"
    begun = [kind for kind in told["kinds"] if kind in ("message_start", "content_block_start", "message_stop")]
    assert begun == ["message_start", *["content_block_start"] * 3, "message_stop"]
    assert {"thinking", "text", "input_json", "signature"} <= set(told["kinds"])


@pytest.mark.skipif(CLAUDE is None, reason="claude is not on the path; npm installs @anthropic-ai/claude-code")
async def test_claude_code_reads_a_file_runs_a_command_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt, of which the tools are most, is some 80,000 characters long."""
    monkeypatch.setattr(router_harness, "MAX_MODEL_LEN", 400_000)
    notes = tmp_path / "notes.txt"
    notes.write_text("The code word is HARE.")
    calls = (
        {"name": "Read", "arguments": {"file_path": str(notes)}},
        {"name": "Bash", "arguments": {"command": "echo forty-two", "description": "Say a number"}},
    )

    def written(admit: worker_pb2.Admit) -> list[list[int]]:
        prompt = TOKENIZER.decode(list(admit.prompt_token_ids), skip_special_tokens=False)
        results = prompt.split("<tool>")[1:]
        if len(results) < 2:
            return [ids(f"well</think>So:\n<tool_call>\n{json.dumps(calls[len(results)])}\n</tool_call>")]
        return [ids(f"</think>{'HARE' in results[0]} {'forty-two' in results[1]}")]

    async with serving(tmp_path, pair(written, STOP), chat_template=TEMPLATE) as (router, _):
        own = {"HOME": str(tmp_path), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_API_KEY": "none"}
        models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), "model")
        where = {"ANTHROPIC_BASE_URL": f"http://{router.server.http_address}"}
        command = ("-p", "What is the code word?", "--allowedTools", "Read,Bash(echo:*)", "--output-format", "json")
        claude = await asyncio.create_subprocess_exec(
            str(CLAUDE),
            *command,
            cwd=tmp_path,
            env=os.environ | own | models | where,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        told, _ = await claude.communicate()
    answer = json.loads(told)
    assert (answer["result"], answer["num_turns"], answer["stop_reason"]) == ("True True", 3, "end_turn"), told
