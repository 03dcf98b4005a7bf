"""Whether calls of tools are valid by construction: random tools, at a temperature at which models write nonsense.

    python -m benchmarks.tool_calls --requests 10000 --seed 1
    python -m benchmarks.tool_calls --requests 200 --format hermes --format glm --anew

A cluster of the bundled model serves each format in its turn, with a chat template that has its marks. Every request
names up to four tools with random schemas and must call them, or one of them, at temperature 1.5. It is streamed, and
then read again as a whole, as a stream that broke would be; one in eight, and with `--anew` each, is generated twice
with one seed, streamed and whole. Each call that ends must name a tool that is there, and its arguments must fit its
schema (jsonschema); what the length limit cuts off must be no call of a whole answer, and no whole one of a stream;
what was streamed must be the whole answer. How far it is goes to stderr. Exits 1 where something was not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import jsonschema  # type: ignore[import-untyped]
import yaml

from benchmarks.plain_cluster import ROOT, running_cluster
from cluster import rpc
from cluster.pb import generation_pb2 as pb
from cluster.pb import generation_pb2_grpc
from router.tool_calls.registry import TOOL_FORMATS

MODEL = ROOT / "models" / "tiny-shakespeare"
TEMPERATURE, MAX_TOKENS, AT_ONCE, TIMEOUT_S = 1.5, 256, 24, 600.0
_SHOWN, _ONE_ANEW, _TOLD_EVERY = 5, 8, 100
_TEMPLATE = """{{# {marks} #}}{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}
{{% endfor %}}{{% if tools %}}{{{{ tools | length }}}} tools{{% endif %}}
JULIET:
"""
_WORDS = ("city", "date", "unit", "text", "is_new", "max-size", "tags", "from", "where", "id", "kind", "größe")


def random_schema(random: Random, depth: int = 0) -> dict[str, Any]:
    """The schema of one value."""
    kinds = ["string", "string", "enum", "integer", "number", "boolean", "nullable", "pattern", "const", "ref"]
    match random.choice(kinds + ["array", "object", "any"] * (depth < 2)):
        case "string":
            return {"type": "string"} | ({"maxLength": random.randint(0, 20)} if random.random() < 0.7 else {})
        case "enum":
            return {"enum": random.sample(["a", 'b "c"', "d\\e", "f\ng", "<h>", "", "ü"], random.randint(1, 4))}
        case "integer":
            low = random.randint(-100, 100)
            return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 1000)}
        case "number":
            return {"type": "number", "minimum": -1.5, "maximum": random.randint(0, 100)}
        case "boolean":
            return {"type": "boolean"}
        case "nullable":
            return {"type": [random.choice(["integer", "string", "boolean"]), "null"]}
        case "pattern":
            return {"type": "string", "pattern": random.choice(["^[a-z]{1,5}$", "^\\d{4}-\\d{2}$", "^(x|y z)+$"])}
        case "const":
            return {"const": random.choice([1, "one", None, True, [1, {"a": 2}]])}
        case "ref":
            return {"$ref": "#/$defs/point"}
        case "array":
            return {"type": "array", "items": random_schema(random, depth + 1), "maxItems": random.randint(0, 3)}
        case "object":
            return random_object(random, depth + 1)
        case _:
            return {"anyOf": [random_schema(random, depth + 1) for _ in range(random.randint(1, 3))]}


def random_object(random: Random, depth: int = 0) -> dict[str, Any]:
    names = random.sample(_WORDS, random.randint(0, 5 - depth))
    properties = {name: random_schema(random, depth) for name in names}
    required = [name for name in names if random.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_tools(random: Random) -> list[dict[str, Any]]:
    """Tools as a chat has them."""
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools = []
    for number in range(random.randint(1, 4)):
        parameters = {**random_object(random), "$defs": {"point": point}}
        function = {"name": f"f{number}", "parameters": parameters, "strict": random.random() < 0.5}
        tools.append({"type": "function", "function": function})
    return tools


def random_spec(random: Random, words: Sequence[str]) -> tuple[pb.GenerationSpec, dict[str, Any]]:
    """A request, and the schemas that its calls must fit, by name."""
    tools = random_tools(random)
    content = " ".join(random.choices(words, k=random.randint(1, 20)))
    chat = {"messages": [{"role": "user", "content": content}], "tools": tools}
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    choice = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED, single=random.random() < 0.6)
    if random.random() < 0.3:
        choice.names.append(random.choice(sorted(schemas)))
        schemas = {name: schemas[name] for name in choice.names}
    return pb.GenerationSpec(
        chat=pb.ChatInput(json=json.dumps(chat), tool_choice=choice),
        sampling=pb.SamplingParams(temperature=TEMPERATURE, top_p=1.0, seed=random.getrandbits(32)),
        stopping=pb.StoppingCriteria(max_output_tokens=MAX_TOKENS),
        output=pb.OutputOptions(text=True),
    ), schemas


@dataclass
class Output:
    """What came of one request: its parts joined."""

    calls: list[list[Any]] = field(default_factory=list)
    """Name, arguments, and whether it is whole."""
    text: str = ""
    finish: int = 0

    def add(self, parts: Sequence[pb.OutputPart], text: str) -> None:
        self.text += text
        for part in parts:
            if part.WhichOneof("part") == "tool_call":
                call = part.tool_call
                if call.index == len(self.calls):
                    self.calls.append([call.name, "", False])
                self.calls[call.index][1] += call.arguments
                self.calls[call.index][2] |= call.is_whole

    @property
    def whole(self) -> list[list[Any]]:
        return [call for call in self.calls if call[2]]


def problems_of(
    streamed: Output, whole: Output, schemas: Mapping[str, Any], *, is_single: bool, is_anew: bool
) -> list[str]:
    """What is wrong with an answer. One that is read again has pieces of a call that was cut off, as its stream had."""
    found = []
    for name, arguments, _ in streamed.whole:
        try:
            jsonschema.validate(json.loads(arguments), schemas[name])
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            found.append(f"{name}: {arguments}: {error!r:.300}")
    has_pieces = is_anew and whole.calls != whole.whole
    if (
        streamed.whole != whole.whole
        or has_pieces
        or streamed.finish != whole.finish
        or (not is_anew and streamed != whole)
    ):
        found.append(f"streamed {streamed} is not {whole}")
    if streamed.finish != pb.FINISH_REASON_LENGTH:
        if streamed.finish != pb.FINISH_REASON_TOOL_CALLS or not streamed.calls or streamed.text or whole.text:
            found.append(f"ended without a call, or with text: {streamed}")
        if streamed.calls != streamed.whole or (is_single and len(streamed.calls) > 1):
            found.append(f"calls that are not whole, or too many: {streamed}")
    return found


class Trial:
    """Requests to one cluster."""

    def __init__(self, address: str, random: Random, words: Sequence[str], *, is_anew: bool) -> None:
        self._address, self._random, self._words = address, random, words
        self._one_anew = 1 if is_anew else _ONE_ANEW
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    async def run(self, requests: int) -> None:
        async with rpc.create_channel(self._address) as channel:
            stub, may_run = generation_pb2_grpc.GenerationServiceStub(channel), asyncio.Semaphore(AT_ONCE)
            async with asyncio.TaskGroup() as group:
                for begun in range(requests):
                    await may_run.acquire()
                    if begun % _TOLD_EVERY == 0:
                        print(f"{begun} of {requests} begun: {_told(self.counts)}", file=sys.stderr, flush=True)
                    task = group.create_task(self._one(stub))
                    task.add_done_callback(lambda _: may_run.release())

    async def _one(self, stub: Any) -> None:
        spec, schemas = random_spec(self._random, self._words)
        streamed, whole, generation_id = Output(), Output(), ""
        is_anew = self._random.randrange(self._one_anew) == 0
        if not is_anew:
            spec.resume.SetInParent()
        try:
            async for event in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=TIMEOUT_S):
                generation_id = event.started.generation_id or generation_id
                streamed.add(event.delta.parts, event.delta.text)
                streamed.finish = streamed.finish or event.sequence_end.finish_reason
            again = spec if is_anew else pb.GenerationSpec(resume=pb.ResumeFrom(generation_id=generation_id))
            answer = await stub.Generate(pb.GenerateRequest(spec=again), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self.counts["refused"] += 1
            self.problems.append(f"{error.code().name}: {error.details()}: {spec.chat.json:.500}")
            return
        whole.add(answer.outputs[0].parts, answer.outputs[0].text)
        whole.finish = answer.ends[0].finish_reason
        self.counts["ended" if whole.finish != pb.FINISH_REASON_LENGTH else "cut off"] += 1
        self.counts["calls"] += len(whole.whole)
        self.counts["anew"] += is_anew
        problems = problems_of(streamed, whole, schemas, is_single=spec.chat.tool_choice.single, is_anew=is_anew)
        self.counts["wrong"] += bool(problems)
        self.problems += problems


def run(name: str, requests: int, seed: int, *, is_anew: bool) -> Trial:
    """Serves one format, and tries it."""
    random = Random(f"{seed} {name}")
    marks = " ".join(next(each for each in TOOL_FORMATS if each.name == name).marks)
    with tempfile.TemporaryDirectory(prefix="baton-tool-calls-") as folder:
        model = Path(folder) / MODEL.name
        shutil.copytree(MODEL, model)
        settings = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
        settings["chat_template"] = _TEMPLATE.format(marks=marks)
        (model / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
        cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text("utf-8"))
        serving = cluster["metadata"]["serving"]
        serving["model"] |= {"path": str(model), "tool_format": name}
        serving["router"]["grammar_s_per_min"] = None
        config = Path(folder) / "cluster.yaml"
        config.write_text(yaml.safe_dump(cluster), "utf-8")
        with running_cluster(config) as address:
            trial = Trial(address, random, (MODEL / "held_out.txt").read_text("utf-8").split()[:2000], is_anew=is_anew)
            asyncio.run(trial.run(requests))
    return trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="of all formats together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", action="append", choices=[each.name for each in TOOL_FORMATS])
    parser.add_argument("--anew", action="store_true", help="whole answers are computed, not read again")
    given = parser.parse_args()
    formats = given.format or [each.name for each in TOOL_FORMATS]
    total: Counter[str] = Counter()
    for number, name in enumerate(formats):
        begun = time.perf_counter()
        trial = run(
            name,
            given.requests // len(formats) + (number < given.requests % len(formats)),
            given.seed,
            is_anew=given.anew,
        )
        total += trial.counts
        print(f"{name}: {_told(trial.counts)} in {time.perf_counter() - begun:.0f} s", flush=True)
        for problem in trial.problems[:_SHOWN]:
            print(f"  {problem}", flush=True)
    print(f"all: {_told(total)}")
    sys.exit(1 if total["wrong"] or total["refused"] else 0)


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("ended", "cut off", "calls", "anew", "wrong", "refused"))


if __name__ == "__main__":
    main()
