"""The families that are served as a page, read from their files: `python -m engine.models.reference` prints
docs/models.md; a test compares the two."""

from __future__ import annotations

from collections.abc import Iterable

from engine.models.registry import FILES
from engine.native.decode_step import FEATURES
from engine.quantization.interface import weight_formats
from engine.quantization.stored import METHODS

_INTRODUCTION = """\
# Models

Baton serves a Hugging Face folder by the first of `architectures` in its config.json. What would be computed wrongly,
such as an unknown architecture or rope type, is refused by the name of the key, with what is supported. This page is
made from the families' files: `python -m engine.models.reference > docs/models.md`.

| family (architecture) | what it computes | file |
|---|---|---|
"""
_NOTES = """
## Formats

Weights in float32, bfloat16 or float16, kept as they are or in {kept}
(`model.quantization`). Checkpoints are read whose `quantization_config` names one of
{stored}.

## What is native

All families are computed by one decoder, with Baton's kernels for norms, rope, matrix products and attention where the
machine has them. On a CPU a decode step in bfloat16 is one call of those kernels for models that compute nothing beyond
{features};
others go layer by layer. Partial and interleaved rope is an order of the heads' dimensions at loading, so that every
kernel computes it.

Other architectures are computed by transformers' own code ([transformers.md](transformers.md)): a Llama of 160 million
parameters at 0.87 to 0.94 of the speed of Baton's own code, both in float32 on one core
(`python benchmarks/engine.py --either-code`).

Latents (MLA) are kept whole by each tensor-parallel rank, or by `roles.X.split_latents` an equal part of every block by
each; `tests/unit/engine/test_engine_split_latents.py` holds the second against transformers and against the first.

## What was checked how

`tests/unit/engine/test_engine_families.py` holds each family against transformers on small random checkpoints in
float32, on a CPU: 64 greedy tokens behind prompts of 1, 15, 16, 17, 100 and 1,000 tokens, logits within 1e-4; two and
four tensor-parallel ranks against one; int8 and int4 weights near the exact ones, and the bytes that they take.
`make test` runs one configuration of each; `make families` also the odd ones of `FAMILY_CASES` in
`tests/support/checkpoints.py`: one KV head, heads wider than the hidden size allows, tied embeddings, windows shorter
than a block. No published checkpoint was run there, and no GPU.
"""


def render_models() -> str:
    """Returns docs/models.md."""
    rows = []
    for file in FILES:
        names = "<br>".join(f"{family.name} (`{family.architecture}`)" for family in file.FAMILIES)
        told = " ".join((file.__doc__ or "").split())
        rows.append(f"| {names} | {told} | `{file.__name__.replace('.', '/')}.py` |\n")
    notes = _NOTES.format(
        kept=_listed(name for name in weight_formats() if name != "none"),
        stored=_listed(METHODS),
        features=_listed(sorted(FEATURES)),
    )
    return f"{_INTRODUCTION}{''.join(rows)}{notes}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(render_models(), end="")
