"""The part of the schema that replaces the model's computation by a cost curve, or a script: `engine.timed_steps`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.config.read import bounded
from cluster.step_cost import StepCost


@dataclass(frozen=True)
class TimedStepsSection:
    """Workers that compute nothing: each step takes as long as this formula says, and the next token is a hash of those
    before it, or what a script says. Of the model's folder only config.json and the tokenizer are read. All 0 and no
    script: steps are computed. For demonstrations and tests (docs/timed.md); needs device cpu, one device for each
    worker, and wire_format native."""

    fixed_s: float = bounded(0.0, at_least=0, at_most=60)
    """Seconds of every step."""
    prompt_token_s: float = bounded(0.0, at_least=0, at_most=60)
    """Seconds more for each token of a prompt."""
    attended_s: float = bounded(0.0, at_least=0, at_most=60)
    """Seconds more for each key that each of those attends to, itself included."""
    sequence_s: float = bounded(0.0, at_least=0, at_most=60)
    """Seconds more for each sequence that gets its next token."""
    kv_token_s: float = bounded(0.0, at_least=0, at_most=60)
    """Seconds more for each KV token that those sequences hold."""
    transfer_gb_per_s: float | None = bounded(None, above=0, at_most=1e6)
    """What one worker receives of KV, in GB/s of the model's own KV; null: as fast as it comes."""
    transfer_latency_s: float = bounded(0.0, at_least=0, at_most=60)
    """Seconds that a chunk of KV takes on top of that."""
    script: str | None = None
    """YAML file with the model's answers by what prompts say, in place of hashes (docs/timed.md); a relative path
    starts at the folder of this file. Workers read it when they start, each on its own machine."""

    @property
    def is_on(self) -> bool:
        return self.script is not None or any(vars(self.cost).values())

    @property
    def cost(self) -> StepCost:
        return StepCost(self.fixed_s, self.prompt_token_s, self.attended_s, self.sequence_s, self.kv_token_s)


def timed_obstacles(device: str, wire_format: str, tp_sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields each key that keeps steps from being timed, and why. `tp_sizes`: by the keys that say them."""
    if device != "cpu":
        yield "engine.device", f"{device} would lie idle, since engine.timed_steps computes nothing; use cpu"
    if wire_format != "native":
        yield (
            "transfer.wire_format",
            f"{wire_format} rounds the KV that engine.timed_steps reads as bits; use native",
        )
    for key, size in tp_sizes.items():
        if size != 1:
            yield key, f"with engine.timed_steps each worker is one process, whatever it stands for; use 1 (got {size})"
