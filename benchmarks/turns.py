"""How much of a turn's tokens the next turn's prompt begins with, and how many of them prefix caches held.

    python -m benchmarks.turns --conversations 4 --turns 8 --output 48 --json

Conversations with the bundled model, one turn after the other: chats over gRPC, whose client sends the whole of it each
time, and responses over HTTP, of which each names the one before. Three clusters: one worker for all, a prefill and a
decode worker by their predicted ends, and with each prompt handed over. For each:

    begins     tokens of a turn, prompt and answer, with which the next prompt begins; that is read from its logprobs
    cached     tokens of a turn that were cached where the next prompt was computed
    responses  the same of responses
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    "handed over": {"router.policy": "least_loaded"},
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


def chat(stub: Any, args: argparse.Namespace, draw: random.Random) -> list[tuple[int, int, int]]:
    """For each turn but the first: tokens of the turn before, those that its prompt begins with, those cached."""
    messages: list[dict[str, str]] = []
    asked, answers = [], []
    for _ in range(args.turns):
        messages.append({"role": "user", "content": said(draw)})
        asked.append(list(messages))
        spec = make_spec(messages, max_output_tokens=args.output, seed=draw.getrandbits(32), token_ids=True)
        spec.sampling.temperature, spec.sampling.top_p = args.temperature, 1.0
        answers.append(stub.Generate(pb.GenerateRequest(spec=spec)))
        messages.append({"role": "assistant", "content": "".join(delta.text for delta in answers[-1].outputs)})
    found, known = [], list[int]()
    for turn, answer in zip(asked, answers, strict=True):  # afterwards, as this leaves prompts in caches
        probe = make_spec(turn, max_output_tokens=1, prompt_logprobs=0)
        events = stub.GenerateStream(pb.GenerateStreamRequest(spec=probe))
        prompt = [each.token_id for event in events for each in event.started.prompt_logprobs]
        if known:
            pairs = enumerate(zip(known, prompt, strict=False))
            num_same = next((n for n, (was, now) in pairs if was != now), min(len(known), len(prompt)))
            found.append((len(known), num_same, answer.usage.cached_tokens))
        known = [*prompt, *(token for delta in answer.outputs for token in delta.token_ids)]
    return found


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


def measure(values: Mapping[str, Any], args: argparse.Namespace) -> dict[str, float]:
    draw = random.Random(args.seed)
    with serving(values) as (address, http_address), rpc.create_blocking_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        chats = [t for _ in range(args.conversations) for t in chat(stub, args, draw)]
        kept = [t for _ in range(args.conversations) for t in responses(http_address, args, draw)]
    num_tokens = sum(turn[0] for turn in chats)
    return {
        "turns": len(chats),
        "tokens": num_tokens,
        "begins": round(sum(turn[1] for turn in chats) / num_tokens, 4),
        "cached": round(sum(turn[2] for turn in chats) / num_tokens, 4),
        "responses": round(sum(turn[1] for turn in kept) / sum(turn[0] for turn in kept), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--output", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=1.5, help="a high one spells words in unusual tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=CLUSTERS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {name: measure(values, args) for name, values in CLUSTERS.items() if args.only in (None, name)}
    if args.json:
        print(json.dumps(found))
    else:
        for name, numbers in found.items():
            print(f"{name:12}", "  ".join(f"{key} {value}" for key, value in numbers.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
