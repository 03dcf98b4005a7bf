"""The model families that are served, each declared in a file beside this one. Loads no torch."""

from __future__ import annotations

from cluster.errors import CheckpointError
from engine.json_fields import Fields, architecture_of
from engine.models import (
    deepseek,
    gemma,
    glm,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    mixtral,
    olmo,
    phi,
    qwen,
    qwen_next,
    smollm,
)
from engine.models.config import ModelConfig
from engine.models.family import ModelFamily

FILES = (llama, mixtral, qwen, qwen_next, gemma, phi, granite, olmo, glm, smollm, gpt_oss, deepseek, glm4_moe)
FAMILIES: dict[str, ModelFamily] = {family.architecture: family for file in FILES for family in file.FAMILIES}
"""The families by the first of config.json's `architectures`."""


def refuse_foreign(architecture: str, why: str) -> CheckpointError:
    """Returns the error for a model that only transformers' code could compute, and that Baton does not serve so."""
    return CheckpointError(
        f"config.json: architecture {architecture!r} is not served by transformers' code: {why}; "
        f"by its own Baton serves {', '.join(FAMILIES)}"
    )


def read_config(fields: Fields) -> ModelConfig:
    """Reads config.json's fields by the family that they name, but for `quantization_config`. Raises CheckpointError
    naming the field and what is supported."""
    name = architecture_of(fields) or None
    if name not in FAMILIES and fields.get("auto_map"):
        raise CheckpointError(
            f"config.json: architecture {name!r} is computed by code that the checkpoint brings along (auto_map), "
            f"which Baton never runs; it serves {', '.join(FAMILIES)} by its own"
        )
    if name not in FAMILIES:
        raise CheckpointError(
            f"config.json: architecture {name!r} is not supported; Baton serves {', '.join(FAMILIES)}, and what "
            "engine.model_impl: transformers can with the extra baton[transformers]"
        )
    config = FAMILIES[name].read(fields)
    config.check_heads()
    return config
