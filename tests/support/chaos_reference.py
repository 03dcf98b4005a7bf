"""What one process alone generates, and whether two workers that hand a request over generate the same.

Greedy and in float32, where the outputs of every shape are equal.
"""

from __future__ import annotations

import functools

from chaos_fleet import MODEL, ChaosWorker
from reference_engine import Engine
from workers import hand_off, merged, sampling

from cluster.lifecycle import RequestKey
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.tp import SingleGroup

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
