"""`baton cache`: what it shows, what it sends to warm caches, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from scripted_router import Event, ScriptedRouter, baton, hello

from cluster.errors import Overloaded
from cluster.pb import admin_pb2, worker_pb2
from cluster.pb import generation_pb2 as pb


def seen() -> tuple[admin_pb2.GetStatusResponse, admin_pb2.GetCacheResponse]:
    tiers = [worker_pb2.KvTierStats(tier="host", blocks_kept=30, blocks_total=40, num_hit_tokens=320)]
    stats = worker_pb2.WorkerStats(blocks_cached=5, blocks_total=8, num_hit_tokens=96, tiers=tiers)
    workers = [admin_pb2.WorkerStatus(worker_id=name, stats=stats) for name in ("p0", "d0")]
    cache = admin_pb2.GetCacheResponse()
    cache.tenants.add(tenant="acme", num_requests=4, num_prompt_tokens=1000, num_cached_tokens=250)
    cache.prefixes.add(hash=bytes(range(16)), tenant="acme", num_tokens=256, num_requests=3, worker_ids=["d0", "p0"])
    cache.prefixes.add(hash=bytes(16), tenant="", num_tokens=512, num_requests=2)
    return admin_pb2.GetStatusResponse(workers=workers), cache


def test_it_shows_workers_tenants_and_prefixes(router: ScriptedRouter) -> None:
    router.status, router.cache = seen()
    done = baton("cache", "show", "--address", router.address)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.exit_code == 0, done.stderr
    assert ["p0", "device", "-", "5", "8", "96"] in lines and ["d0", "host", "-", "30", "40", "320"] in lines
    assert ["acme", "4", "1000", "250", "25%"] in lines
    assert ["0001020304050607", "acme", "256", "3", "d0,", "p0"] in lines
    assert ["0000000000000000", "-", "512", "2", "nobody", "now"] in lines


def test_as_json_and_of_one_worker(router: ScriptedRouter) -> None:
    router.status, router.cache = seen()
    told = json.loads(baton("cache", "show", "--worker", "d0", "--json", "--address", router.address).stdout)
    assert [worker["worker_id"] for worker in told["workers"]] == ["d0"]
    assert told["tenants"] == [{"tenant": "acme", "requests": 4, "prompt_tokens": 1000, "cached_tokens": 250}]
    assert told["prefixes"] == [
        {"hash": bytes(range(16)).hex(), "tenant": "acme", "tokens": 256, "requests": 3, "workers": ["d0", "p0"]}
    ]
    nobody = baton("cache", "show", "--worker", "d7", "--address", router.address)
    assert nobody.exit_code == 1 and nobody.stderr == "error: there is no worker 'd7'; there are d0, p0\n"


def test_a_router_that_has_served_nothing_says_so(router: ScriptedRouter) -> None:
    done = baton("cache", "show", "--address", router.address)
    assert done.exit_code == 0 and "this router has served no prompt yet" in done.stdout


def test_the_prompts_of_a_file_are_sent_for_one_token_each(router: ScriptedRouter, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        "once upon a time",
        '"a \\"quoted\\" text"',
        "",
        '{"prompt": [1, 2, 3], "cache_salt": "s"}',
        json.dumps({"messages": messages}),
        "[sic] a text",
    ]
    file.write_text("\n".join(lines))
    done = baton("cache", "warm", str(file), "--concurrency", "1", "--json", "--address", router.address)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["prompts"], told["failed"], told["prompt_tokens"], told["cached_tokens"]) == (5, 0, 15, 5)
    assert done.stderr.splitlines()[-1] == "5 of 5 prompts"
    texts = [spec.text for spec in router.specs if spec.WhichOneof("prompt") == "text"]
    assert texts == ["once upon a time", 'a "quoted" text', "[sic] a text"]
    assert (list(router.specs[2].token_ids.ids), router.specs[2].cache.cache_salt) == ([1, 2, 3], "s")
    assert dict(router.specs[3].chat.messages[0]) == messages[0]
    assert {spec.stopping.max_output_tokens for spec in router.specs} == {1}
    assert not any(spec.cache.bypass_prefix_cache for spec in router.specs)


def test_a_prompt_that_fails_is_named_and_the_others_are_computed(router: ScriptedRouter) -> None:
    async def second_fails(spec: pb.GenerationSpec) -> AsyncIterator[Event]:
        if spec.text == "two":
            raise Overloaded("the queue is full")
        async for event in hello(spec):
            yield event

    router.script = second_fails
    done = baton("cache", "warm", "-", "--concurrency", "1", "--address", router.address, stdin="one\ntwo\nthree\n")
    assert done.exit_code == 1 and "line 2: the queue is full" in done.stderr
    assert done.stdout.startswith("2 of 3 prompts: 6 tokens, 2 of them were cached, in ")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "a"', "Expecting ',' delimiter"),
        ('{"text": "a"}', "'text' is not among prompt, messages, tools, cache_salt"),
        ('{"cache_salt": "a"}', "an object needs either `prompt`"),
        ('{"prompt": "a", "messages": []}', "an object needs either `prompt`"),
        ('{"prompt": 3}', "an object needs either `prompt`"),
        ('{"prompt": [1, "a"]}', "an object needs either `prompt`"),
        ('{"messages": ["a"]}', "an object needs either `prompt`"),
        ('{"messages": "hello"}', "an object needs either `prompt`"),
        ('{"prompt": "a", "tools": [{}]}', "`tools`, beside `messages`, is a list of objects"),
        ('{"messages": [{"role": "user"}], "tools": 5}', "`tools`, beside `messages`, is a list of objects"),
        (
            '{"prompt": "a", "cache_salt": 5}',
            "`tools`, beside `messages`, is a list of objects, and `cache_salt` a text",
        ),
        ('{"prompt": [-1]}', "a number does not fit its field"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_before_anything_is_sent(
    router: ScriptedRouter, line: str, why: str
) -> None:
    done = baton("cache", "warm", "-", "--address", router.address, stdin=f"fine\n{line}\n")
    assert done.exit_code == 2 and f"-, line 2: {why}" in done.stderr, done.stderr
    assert not router.specs


def test_a_line_ends_at_a_newline_and_nowhere_else(router: ScriptedRouter) -> None:
    lines = "\ufeff" + json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\r\n\none\x0cpage\n"
    done = baton("cache", "warm", "-", "--concurrency", "1", "--address", router.address, stdin=lines)
    assert done.exit_code == 0, done.stderr
    assert [spec.text for spec in router.specs] == ["a\u2028b", "one\x0cpage"]


def test_files_that_hold_no_prompts_are_refused(router: ScriptedRouter, tmp_path: Path) -> None:
    gone = baton("cache", "warm", str(tmp_path / "gone"), "--address", router.address)
    assert gone.exit_code == 2 and "cannot be read (No such file or directory)" in gone.stderr
    empty = baton("cache", "warm", "-", "--address", router.address, stdin=" \n\n")
    assert empty.exit_code == 2 and "holds no prompt; write one a line" in empty.stderr
    binary = baton("cache", "warm", "-", "--address", router.address, stdin=b"\xff\xfe")
    assert binary.exit_code == 2 and "is not UTF-8 text (byte 0)" in binary.stderr
