"""What one process alone generates, and whether workers that hand requests over generate the same.

Greedy and in float32, where the outputs of every shape are equal.
"""

from __future__ import annotations

import functools
import time
from itertools import count
from statistics import quantiles

from chaos_fleet import MODEL, ChaosWorker
from cluster_fixture import token_spec
from reference_engine import Engine
from steady_load import SteadyLoad
from workers import hand_off, merged, sampling

from cluster.lifecycle import RequestKey
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.tp import SingleGroup
from tools.client import BatonClient

_NUM_BLOCKS, _BLOCK_SIZE = 512, 16


class Reference:
    """Calling it gives the output tokens of a prompt; each is computed once."""

    def __init__(self) -> None:
        runner = ModelRunner(
            MODEL,
            tp=SingleGroup(),
            device="cpu",
            dtype="float32",
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
        )
        self._engine = Engine(runner, BlockManager(_NUM_BLOCKS, _BLOCK_SIZE), runner.config.vocab_size)
        self._of = functools.cache(self._generate)

    def __call__(self, prompt: list[int], num_tokens: int) -> list[int]:
        return list(self._of(tuple(prompt), num_tokens))

    def _generate(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=0.0, max_output_tokens=num_tokens)
        return self._engine.generate([prompt], [params])[0][0].token_ids


class Direct:
    """One request from a prefill worker to a decode worker, placed by hand and not by a router."""

    def __init__(
        self, name: str, prompt: list[int], num_tokens: int, prefill: ChaosWorker, decode: ChaosWorker
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.prompt, self.num_tokens = prompt, num_tokens
        self.key: RequestKey = hand_off(name, prompt, prefill, decode, sampling(max_output_tokens=num_tokens))

    def wait_for_phase(self, phase: int) -> None:
        """On the decode worker."""
        self.decode.wait_for(lambda: phase in self.decode.outputs[self.key].phases)

    def check(self, reference: Reference) -> None:
        """It ends, and well."""
        output = self.decode.outputs[self.key]
        self.decode.wait_for(lambda: output.finished or output.failed)
        assert output.failed is None, output.failed
        assert merged(self.key, self.prefill, self.decode).sequence() == reference(self.prompt, self.num_tokens)


class ExactLoad(SteadyLoad):
    """Streams at a router, each held against the reference; and how long their tokens took."""

    def __init__(
        self,
        client: BatonClient,
        reference: Reference,
        prompts: list[list[int]],
        *,
        num_tokens: int,
        num_streams: int,
        timeout_s: float,
        bypasses_cache: bool = True,
    ) -> None:
        """`bypasses_cache`: so that there is something to hand over."""
        super().__init__(num_streams)
        self._bypasses_cache = bypasses_cache
        self._client = client
        self._expected = [(prompt, reference(prompt, num_tokens)) for prompt in prompts]
        self._timeout_s = timeout_s
        self._numbers = count()
        self.to_first_s: list[float] = []
        self.between_s: list[float] = []

    def ask(self, number: int) -> str:
        prompt, expected = self._expected[next(self._numbers) % len(self._expected)]
        spec = token_spec(prompt, len(expected))
        spec.cache.bypass_prefix_cache = self._bypasses_cache
        tokens: list[int] = []
        times_s: list[float] = []
        last = time.monotonic()
        with self._client.stream(spec, timeout_s=self._timeout_s) as stream:
            for event in stream:
                if event.HasField("delta"):
                    assert event.delta.first_token_index == len(tokens), "a gap or a repeat"
                    tokens.extend(event.delta.token_ids)
                    times_s.append(time.monotonic() - last)
                    last += times_s[-1]
        self.to_first_s.append(times_s[0])
        self.between_s.extend(times_s[1:])
        return "" if tokens == expected else f"the output of {len(prompt)} tokens changed"

    def story(self) -> str:
        return f"to the first token {_spread(self.to_first_s)}, between two messages {_spread(self.between_s)}"


def _spread(times_s: list[float]) -> str:
    cuts = quantiles(times_s, n=100)
    return f"{1000 * cuts[49]:.0f} ms, p99 {1000 * cuts[98]:.0f} ms"
