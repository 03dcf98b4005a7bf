"""Reads the configuration of a model from a checkpoint folder: config.json and generation_config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cluster.model_folder import has_model_file
from engine.json_fields import Fields, read_json
from engine.models.config import ModelConfig
from engine.models.family import token_ids
from engine.models.registry import read_config
from engine.quantization.stored import read_stored


def read_model(path: str | Path) -> ModelConfig:
    """Raises CheckpointError naming the file, the field and the remedy."""
    folder = Path(path)
    fields = Fields(read_json(folder / "config.json"), "config.json")
    config = replace(read_config(fields), packing=read_stored(fields))
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if has_model_file(generation) else None
    return config if eos is None else replace(config, eos_token_ids=token_ids(eos))
