"""The requests of a soak, always the same, each with the output that it must have."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.greedy_reference import outputs_of
from cluster.pb import generation_pb2 as pb
from tools.client import BatonClient, make_spec
from tools.generation_stream import Transcript

ANSWER_S = 120.0
NUM_STEMS = 8
PATTERN = r"([A-Za-z']{1,12}[ ,;.\n]){200,}"


@dataclass(frozen=True)
class Asked:
    """One of the requests of a soak, always the same. `text`, `tokens`: the reference."""

    prompt: list[int]
    num_tokens: int
    is_constrained: bool = False
    tokens: tuple[int, ...] = ()
    text: str = ""

    def spec(self) -> pb.GenerationSpec:
        spec = make_spec(self.prompt, max_output_tokens=self.num_tokens, temperature=0.0, token_ids=True)
        if self.is_constrained:
            spec.sampling.regex = PATTERN  # longer than any of the outputs
        else:
            spec.stopping.ignore_eos = True
        return spec


def requests_of(count: int, seed: int, num_constrained: int = 8) -> list[Asked]:
    """A third begin like others, a third are short, a third long; the last ones are constrained."""
    draw = random.Random(seed)
    stems = [draw.choices(range(4, 1000), k=draw.randint(64, 256)) for _ in range(NUM_STEMS)]
    asked = []
    for number in range(count + num_constrained):
        stem = draw.choice(stems) if number % 3 == 0 else []
        least, most = ((8, 64), (8, 128), (192, 512))[number % 3]
        prompt = stem + draw.choices(range(4, 1000), k=draw.randint(least, most))
        asked.append(Asked(prompt, draw.randint(16, 96), is_constrained=number >= count))
    return asked


def with_references(asked: Sequence[Asked], model: str, address: str) -> list[Asked]:
    """Each with what one process alone writes. A constrained one with what the cluster writes while nobody disturbs it.
    Raises ProgramFailed and BatonError."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    plain = [(each.prompt, each.num_tokens) for each in asked if not each.is_constrained]
    outputs = iter(outputs_of(model, plain))
    with BatonClient(address) as client:
        tokens = [_constrained(client, each) if each.is_constrained else next(outputs) for each in asked]
    return [
        replace(each, tokens=tuple(ids), text=tokenizer.decode(ids)) for each, ids in zip(asked, tokens, strict=True)
    ]


def _constrained(client: BatonClient, asked: Asked) -> list[int]:
    with client.stream(asked.spec(), timeout_s=ANSWER_S) as stream:
        [sequence] = transcript_of(stream).sequences
    return sequence.token_ids


def transcript_of(events: Iterable[pb.GenerateStreamResponse]) -> Transcript:
    """Of a whole stream. Raises what it raises."""
    transcript = Transcript()
    for event in events:
        transcript.add(event)
    return transcript
