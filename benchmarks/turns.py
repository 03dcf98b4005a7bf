"""How much of a turn's tokens the next turn's prompt begins with, and how many of them prefix caches held.

    python -m benchmarks.turns --conversations 4 --turns 8 --output 48 --json
    python -m benchmarks.turns --prompt-token-ms 0.2 --output 400 --only "handed over" --only fetched

Conversations with the bundled model, one turn after the other: chats over gRPC, whose client sends the whole of it each
time, and responses over HTTP, of which each names the one before. Clusters: one worker for all; a prefill and a decode
worker by their predicted ends; and with each prompt handed over, where the prefill worker fetches nothing, what it is
quicker to fetch than to compute, or all that the decode worker has. All run at once and have the same conversations,
one after another. For each:

    begins     tokens of a turn, prompt and answer, with which the next prompt begins; that is read from its logprobs
               (which timed steps do not have: 0)
    cached     tokens of a turn that were cached where the next prompt was computed
    fetched    part of those that its worker fetched for it
    first_ms   milliseconds to the first token, median of all turns but the first
    responses  tokens of a turn that were cached, of responses
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.plain_cluster import ROOT, Program, beside_others, running_workers, wait_until_serving
from cluster import rpc
from cluster.config.diff import set_values
from cluster.config.load import load_config
from cluster.pb import generation_pb2 as pb
from cluster.pb import generation_pb2_grpc
from controller.plan import plan_cluster
from tools.client import make_spec

CLUSTERS: Mapping[str, Mapping[str, Any]] = {
    "colocated": {"roles.prefill.devices": 0, "roles.prefill.min_workers": 0},
    "predicted": {},
    "handed over": {"router.policy": "least_loaded", "router.prefix_fetch": "off"},
    "fetched where quicker": {"router.policy": "least_loaded", "router.prefix_fetch": "auto"},
    "fetched": {"router.policy": "least_loaded", "router.prefix_fetch": "always"},
}
_WORDS = (
    "good",
    "morrow",
    "gentle",
    "lady",
    "what",
    "news",
    "of",
    "the",
    "king",
    "tonight",
    "my",
    "lord",
    "speak",
    "truth",
)


@contextlib.contextmanager
def serving(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The addresses of a router over gRPC and HTTP."""
    with tempfile.TemporaryDirectory(prefix="baton-turns-") as folder:
        file = Path(folder) / "cluster.yaml"
        text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
        file.write_text(set_values(text, {"model.path": str(ROOT / "models" / "tiny-shakespeare"), **values}))
        plan = plan_cluster(load_config(file), num_gpus=0, num_cores=len(os.sched_getaffinity(0)))
        with running_workers(plan.workers) as flags:
            settings = beside_others(replace(plan.router, workers=flags)).with_values(http_port=0)
            router = Program("router", settings)
            try:
                card = router.expect("ready")
                wait_until_serving(card["address"])
                yield card["address"], card["http_address"]
            finally:
                router.stop()


def said(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(4, 12))).capitalize() + "."


class Turn(NamedTuple):
    """A turn of a chat but the first."""

    num_before: int
    """Tokens of the turn before it."""
    num_same: int
    num_cached: int
    num_fetched: int
    first_s: float


def chat(stub: Any, args: argparse.Namespace, draw: random.Random) -> list[Turn]:
    messages: list[dict[str, str]] = []
    asked, answers = [], []
    for _ in range(args.turns):
        messages.append({"role": "user", "content": said(draw)})
        asked.append(list(messages))
        spec = make_spec(messages, max_output_tokens=args.output, seed=draw.getrandbits(32), token_ids=True)
        spec.output.include_timing = True
        spec.sampling.temperature, spec.sampling.top_p = args.temperature, 1.0
        answers.append(stub.Generate(pb.GenerateRequest(spec=spec)))
        messages.append({"role": "assistant", "content": "".join(delta.text for delta in answers[-1].outputs)})
    found, known, num_before = [], list[int](), 0
    for turn, answer in zip(asked, answers, strict=True):  # afterwards, as this leaves prompts in caches
        prompt = [] if args.is_timed else tokens_of(stub, turn)
        if num_before:
            pairs = enumerate(zip(known, prompt, strict=False))
            num_same = next((n for n, (was, now) in pairs if was != now), min(len(known), len(prompt)))
            first_s, num_cached = answer.timing.time_to_first_token.ToNanoseconds() / 1e9, answer.usage.cached_tokens
            found.append(Turn(num_before, num_same, num_cached, answer.timing.fetched_tokens, first_s))
        known = [*prompt, *(token for delta in answer.outputs for token in delta.token_ids)]
        num_before = answer.usage.prompt_tokens + answer.usage.completion_tokens
    return found


def tokens_of(stub: Any, turn: list[dict[str, str]]) -> list[int]:
    """The prompt of a turn, read from its logprobs."""
    probe = make_spec(turn, max_output_tokens=1, prompt_logprobs=0)
    events = stub.GenerateStream(pb.GenerateStreamRequest(spec=probe))
    return [each.token_id for event in events for each in event.started.prompt_logprobs]


def responses(address: str, args: argparse.Namespace, draw: random.Random) -> list[tuple[int, int]]:
    """For each turn but the first: tokens of the turn before, those cached."""
    before: dict[str, Any] = {}
    found = []
    for _ in range(args.turns):
        body = {"model": "tiny-shakespeare", "input": said(draw), "max_output_tokens": args.output}
        body |= {"temperature": args.temperature, "top_p": 1.0}
        body |= {"seed": draw.getrandbits(32)} | ({"previous_response_id": before["id"]} if before else {})
        request = urllib.request.Request(
            f"http://{address}/v1/responses", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            now = json.load(answer)
        if before:
            found.append((before["usage"]["total_tokens"], now["usage"]["input_tokens_details"]["cached_tokens"]))
        before = now
    return found


def measure(clusters: Mapping[str, Mapping[str, Any]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    chats: dict[str, list[Turn]] = {name: [] for name in clusters}
    kept: dict[str, list[tuple[int, int]]] = {name: [] for name in clusters}
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="baton-turns-"))
        at, steps = {}, timed(args.prompt_token_ms, folder) if args.is_timed else {}
        for name, values in clusters.items():
            address, http_address = ends.enter_context(serving({**values, **steps}))
            channel = ends.enter_context(rpc.create_blocking_channel(address))
            at[name] = generation_pb2_grpc.GenerationServiceStub(channel), http_address  # type: ignore[no-untyped-call]
        for number in range(args.conversations):
            for name, (stub, http_address) in at.items():
                draw = random.Random(f"{args.seed} {number}")
                chats[name] += chat(stub, args, draw)
                kept[name] += responses(http_address, args, draw)
    return {name: summary(chats[name], kept[name]) for name in clusters}


def summary(chats: list[Turn], kept: list[tuple[int, int]]) -> dict[str, float]:
    num_tokens = sum(turn.num_before for turn in chats)
    return {
        "turns": len(chats),
        "tokens": num_tokens,
        "begins": round(sum(turn.num_same for turn in chats) / num_tokens, 4),
        "cached": round(sum(turn.num_cached for turn in chats) / num_tokens, 4),
        "fetched": round(sum(turn.num_fetched for turn in chats) / num_tokens, 4),
        "first_ms": round(1000 * statistics.median(turn.first_s for turn in chats), 2),
        "responses": round(sum(turn[1] for turn in kept) / sum(turn[0] for turn in kept), 4),
    }


def timed(prompt_token_ms: float, folder: str) -> dict[str, Any]:
    """Steps that compute nothing, and say the same whatever they are asked: text, whose tokens the next turn finds."""
    script = Path(folder) / "script.yaml"
    script.write_text(json.dumps([{"say": 6 * f"{' '.join(_WORDS).capitalize()}, and let the crown be thine. "}]))
    keys = {"fixed_s": 0.01, "prompt_token_s": prompt_token_ms / 1000, "sequence_s": 1e-4, "script": str(script)}
    return {f"engine.timed_steps.{key}": value for key, value in keys.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--output", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=1.5, help="a high one spells words in unusual tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=CLUSTERS, action="append", help="may be given several times")
    parser.add_argument("--prompt-token-ms", type=float, help="steps take that long for each of a prompt")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.is_timed = args.prompt_token_ms is not None
    found = measure({name: values for name, values in CLUSTERS.items() if name in (args.only or CLUSTERS)}, args)
    if args.json:
        print(json.dumps(found))
    else:
        for name, numbers in found.items():
            print(f"{name:21}", "  ".join(f"{key} {value}" for key, value in numbers.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
