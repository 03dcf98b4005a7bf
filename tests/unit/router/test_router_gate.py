"""API keys at a running router: who gets in, what a tenant sees, and keys that change meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from fake_worker import FakeWorker, pair
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from http_door import serving
from router_harness import Router, ids, refusal, running_router, text_of, text_spec
from scripted_router import baton
from waiting import until_after

from cluster.api_keys import ApiKey, KeyQuota, digest_of, render_keys
from cluster.auth import KeyFile, KeyRing
from cluster.errors import ConfigError, PermissionDenied, QuotaExceeded, Unauthenticated
from cluster.pb import admin_pb2
from cluster.pb import generation_pb2 as pb
from router.api.call import ANYONE, Principal
from router.api.validate import salt_of

pytestmark = pytest.mark.asyncio

ALICE, ALSO_ALICE, BOB, OPERATOR = "baton-alice", "baton-alice-2", "baton-bob", "baton-operator"
KEYS = (
    ApiKey("alice", digest_of(ALICE), "acme", ("generate",), 2.0, KeyQuota(requests_per_min=9, max_concurrent=4)),
    ApiKey("alice-2", digest_of(ALSO_ALICE), "acme", ("generate",)),
    ApiKey("bob", digest_of(BOB), "bricks", ("generate", "admin")),
    ApiKey("operator", digest_of(OPERATOR), "ops", ("admin",)),
)
UNARY = {
    "Generate": pb.GenerateRequest(),
    "Tokenize": pb.TokenizeRequest(text="x"),
    "Detokenize": pb.DetokenizeRequest(),
    "CancelGeneration": pb.CancelGenerationRequest(),
    "GetModel": pb.GetModelRequest(),
    "ListModels": pb.ListModelsRequest(),
}


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(render_keys(KEYS))
    return path


@pytest.fixture
def workers() -> tuple[FakeWorker, FakeWorker]:
    return pair()


@pytest_asyncio.fixture
async def router(tmp_path: Path, file: Path, workers: tuple[FakeWorker, FakeWorker]) -> AsyncIterator[Router]:
    async with running_router(tmp_path / "model", workers, keys_file=str(file)) as running:
        yield running


BAD_METADATA: tuple[tuple[tuple[str, str], ...], ...] = (
    (),
    bearer("baton-nobody"),
    bearer(digest_of(ALICE)),
    bearer(ALICE[:-1]),
    bearer(""),
    (("authorization", ALICE),),
    (("authorization", f"Basic {ALICE}"),),
    (("authorization", ""),),
    (("authorization", f"Bearer {ALICE}é"),),
    (*bearer(ALICE), *bearer(BOB)),
    (("x-api-key", ALICE),),
)


@pytest.mark.parametrize("metadata", BAD_METADATA[:-3] + BAD_METADATA[-2:], ids=str)
async def test_a_call_without_a_known_key_is_unauthenticated(router: Router, metadata: Any) -> None:
    error = await refusal(router.generation.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata))
    assert type(error) is Unauthenticated
    assert ALICE not in error.message and BOB not in error.message


async def test_every_method_but_health_needs_a_key(router: Router) -> None:
    for name, request in UNARY.items():
        assert type(await refusal(getattr(router.generation, name)(request))) is Unauthenticated, name
    assert type(await refusal(router.stream(text_spec()))) is Unauthenticated
    assert type(await refusal(router.admin.GetStatus(admin_pb2.GetStatusRequest()))) is Unauthenticated
    assert type(await refusal(router.channel.unary_unary("/baton.v1.Nothing/AtAll")(b""))) is Unauthenticated
    answer = await router.health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_needs_a_key_of_any_scope(router: Router) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(router.channel)  # type: ignore[no-untyped-call]
    ask = reflection_pb2.ServerReflectionRequest(list_services="")

    async def services(**call: Any) -> list[str]:
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([ask]), **call)]
        return [service.name for service in answers[0].list_services_response.service]

    assert type(await refusal(services())) is Unauthenticated
    for key in (ALICE, OPERATOR):
        assert "baton.v1.GenerationService" in await services(metadata=bearer(key))


async def test_a_refused_stream_ends_although_the_client_sends_nothing(router: Router) -> None:
    call = router.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
    assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_key_opens_only_what_its_scopes_say(router: Router) -> None:
    assert (await router.generation.Tokenize(pb.TokenizeRequest(text="x"), metadata=bearer(ALICE))).token_ids
    assert (await router.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=bearer(OPERATOR))).model
    denied = await refusal(router.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=bearer(ALICE)))
    assert type(denied) is PermissionDenied and "scope admin" in denied.message and "alice" in denied.message
    denied = await refusal(router.stream(text_spec(), metadata=bearer(OPERATOR)))
    assert type(denied) is PermissionDenied and "scope generate" in denied.message
    assert (await router.generation.ListModels(pb.ListModelsRequest(), metadata=bearer(BOB))).models
    assert (await router.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=bearer(BOB))).model


async def test_the_scheme_may_be_written_in_any_case(router: Router) -> None:
    metadata = (("authorization", f"bEaReR  {ALICE}"),)
    assert (await router.generation.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata)).token_ids


async def test_a_request_carries_its_caller(router: Router, workers: tuple[FakeWorker, FakeWorker]) -> None:
    running = asyncio.ensure_future(router.stream(text_spec(), metadata=bearer(ALICE)))
    key = (await workers[0].next_admit()).key
    live = router.server.dispatcher.find(key.request_id)
    assert live is not None
    quota = KeyQuota(requests_per_min=9, max_concurrent=4)
    assert live.principal == Principal("alice", "acme", frozenset({"generate"}), 2.0, quota)
    running.cancel()


async def test_tenants_share_no_prefix_cache_and_keys_of_one_do(
    router: Router, workers: tuple[FakeWorker, FakeWorker]
) -> None:
    salts = []
    for key, client_salt in ((ALICE, ""), (ALSO_ALICE, ""), (BOB, ""), (ALICE, "s"), (BOB, "s")):
        spec = text_spec(cache=pb.CacheOptions(cache_salt=client_salt))
        running = asyncio.ensure_future(router.stream(spec, metadata=bearer(key)))
        salts.append(((await workers[0].next_admit()).cache_salt, (await workers[1].next_admit()).cache_salt))
        running.cancel()
    assert all(prefill == decode for prefill, decode in salts)
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4


async def test_no_client_salt_imitates_that_of_another_tenant() -> None:
    pairs = [(tenant, salt) for tenant in ("a", "ab", "") for salt in ("", "b", "\0b", "\0a\0", "\0ab\0", "a\0")]
    made = {pair: salt_of(*pair) for pair in pairs if pair[0]}
    assert len(set(made.values())) == len(made)
    assert salt_of("", "x") == b"x"


async def test_a_generation_of_another_tenant_is_unknown_to_cancel(
    router: Router, workers: tuple[FakeWorker, FakeWorker]
) -> None:
    running = asyncio.ensure_future(router.stream(text_spec(), metadata=bearer(ALICE)))
    generation_id = (await workers[0].next_admit()).key.request_id
    request = pb.CancelGenerationRequest(generation_ids=[generation_id])
    reply = await router.generation.CancelGeneration(request, metadata=bearer(BOB))
    assert (list(reply.cancelled_ids), list(reply.unknown_ids)) == ([], [generation_id])
    assert router.server.dispatcher.find(generation_id) is not None
    reply = await router.generation.CancelGeneration(request, metadata=bearer(ALSO_ALICE))
    assert list(reply.cancelled_ids) == [generation_id]
    assert (await refusal(running)).grpc_code == "CANCELLED"


async def test_an_edited_file_counts_without_a_restart(router: Router, file: Path) -> None:
    replace(file, render_keys([ApiKey("carol", digest_of("baton-carol"), "acme", ("generate",))]))
    request = pb.TokenizeRequest(text="x")
    async with asyncio.timeout(20):
        while True:
            try:
                await router.generation.Tokenize(request, metadata=bearer("baton-carol"))
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert type(await refusal(router.generation.Tokenize(request, metadata=bearer(ALICE)))) is Unauthenticated


async def test_a_stream_that_runs_outlives_its_key(tmp_path: Path, file: Path) -> None:
    workers = pair(lambda _: [ids("fine")])
    script, workers[1].script = workers[1].script, None
    async with running_router(tmp_path / "model", workers, keys_file=str(file)) as router:
        running = asyncio.ensure_future(router.stream(text_spec(), metadata=bearer(ALICE)))
        admit = await workers[1].next_admit()
        replace(file, render_keys(KEYS[1:]))
        keys = router.server.keys
        assert keys is not None
        await until_after(keys, "replace", lambda: keys.find(ALICE) is None)
        assert script is not None
        script(workers[1], admit)
        assert text_of(await running) == "fine"


def replace(file: Path, text: str) -> None:
    """As an editor does it."""
    other = file.with_suffix(".new")
    other.write_text(text)
    os.replace(other, file)


async def test_a_broken_edit_keeps_the_keys_and_is_told_once_with_its_line(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeyFile(str(file))
    for broken in ("keys:\n- {id: x, sha256: y}\n", "keys: [", "nothing"):
        replace(file, broken)
        assert not await keys.refresh()
        assert not await keys.refresh()
    file.unlink()
    assert not await keys.refresh()
    assert keys.ring.find(ALICE) is not None and len(keys.ring) == len(KEYS)
    reply = [record.getMessage() for record in caplog.records]
    assert len(reply) == 4, reply
    assert f"{file}:2:" in reply[0] and "keys[0].sha256" in reply[0]
    replace(file, render_keys(KEYS[:1]))
    assert await keys.refresh()
    assert len(keys.ring) == 1


async def test_a_router_does_not_start_with_a_broken_keys_file(tmp_path: Path) -> None:
    for text in ("keys: 3\n", None):
        path = tmp_path / "keys.yaml"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=r"keys\.yaml"):
            async with running_router(tmp_path / "model", keys_file=str(path)):
                pass


async def test_without_a_keys_file_everybody_is_anyone(tmp_path: Path, workers: tuple[FakeWorker, FakeWorker]) -> None:
    async with running_router(tmp_path, workers) as router:
        running = asyncio.ensure_future(router.stream(text_spec(), metadata=bearer("baton-whatever")))
        admit = await workers[0].next_admit()
        live = router.server.dispatcher.find(admit.key.request_id)
        assert live is not None and live.principal is ANYONE
        assert admit.cache_salt == b""
        running.cancel()


async def test_a_ring_compares_whole_digests() -> None:
    ring = KeyRing(KEYS)
    assert ring.find(ALICE) is not None
    for wrong in ("", "\0", ALICE + "\0", ALICE.upper(), digest_of(ALICE), "\udcff"):
        assert ring.find(wrong) is None


async def test_the_program_sends_the_key_it_is_given(
    router: Router, workers: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--address", router.address)
    without = await asyncio.to_thread(baton, "status", *at)
    assert without.exit_code == 1 and "BATON_API_KEY" in without.stderr
    shown = await asyncio.to_thread(baton, "status", *at, "--api-key", OPERATOR, "--json")
    assert [worker["state"] for worker in json.loads(shown.stdout)["workers"]] == ["ready", "ready"]
    workers[0].script, workers[1].script = (worker.script for worker in pair(lambda _: [ids("fine")]))
    monkeypatch.setenv("BATON_API_KEY", ALICE)
    reply = await asyncio.to_thread(baton, "generate", "x", *at, "--max-tokens", "9")
    assert reply.stdout == "fine\n", reply.stderr
    denied = await asyncio.to_thread(baton, "status", *at)
    assert denied.exit_code == 1 and "scope admin" in denied.stderr
    odd = await asyncio.to_thread(baton, "status", *at, "--api-key", "baton-\n")
    assert odd.exit_code == 2 and "copied whole" in odd.stderr


async def test_a_revoked_key_is_refused_although_long_texts_hold_the_tokenizers_threads(
    router: Router, file: Path
) -> None:
    over = threading.Event()
    held = [router.server._executor.submit(over.wait, 60) for _ in range(8)]
    try:
        replace(file, render_keys(KEYS[1:]))
        async with asyncio.timeout(20):
            while True:
                try:
                    await router.generation.ListModels(pb.ListModelsRequest(), metadata=bearer(ALICE))
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                    break
        assert not held[0].done()
    finally:
        over.set()


async def test_tokenizing_counts_in_the_quota_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    quota = KeyQuota(requests_per_min=100, prompt_tokens_per_min=10)
    file.write_text(render_keys([ApiKey("alice", digest_of(ALICE), "acme", ("generate",), quota=quota)]))
    async with serving(tmp_path, (), keys_file=str(file)) as (router, http):
        given = {"headers": {"authorization": f"Bearer {ALICE}"}}
        assert (await http.post("/tokenize", json={"prompt": "abcdef"}, **given)).status_code == 200
        assert (await http.post("/detokenize", json={"tokens": [1, 2, 3, 4]}, **given)).status_code == 200
        answer = await http.post("/tokenize", json={"prompt": "a"}, **given)
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "quota_exceeded"
        for call in (
            router.generation.Tokenize(pb.TokenizeRequest(text="a"), metadata=bearer(ALICE)),
            router.generation.Detokenize(pb.DetokenizeRequest(token_ids=[1]), metadata=bearer(ALICE)),
        ):
            assert isinstance(await refusal(call), QuotaExceeded)
        assert router.server.dispatcher.counters.refused["quota_prompt_tokens_per_min"] == 3
