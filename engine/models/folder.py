"""Reads the configuration of a model from a checkpoint folder: config.json and generation_config.json.

Loads torch only where transformers' own code computes the model.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path

from cluster.errors import CheckpointError, ConfigError
from cluster.model_folder import gguf_file, has_model_file, read_model_json
from engine.json_fields import Fields, architecture_of
from engine.models.config import ModelConfig
from engine.models.family import token_ids
from engine.models.registry import FAMILIES, read_config, refuse_foreign
from engine.models.transformers_source import check_options, check_source
from engine.quantization.stored import read_stored


def read_model(path: str | Path, model_impl: str = "auto") -> ModelConfig:
    """Raises CheckpointError naming the file, the field and the remedy.

    `model_impl`: whose code is to compute the model, as `engine.model_impl` names it. Where that is transformers', this
    loads torch and takes seconds, and raises ConfigError if transformers is not installed.
    """
    folder = Path(path)
    fields = read_fields(folder)
    if is_foreign(fields, model_impl):
        check_foreign(folder, fields)
        trial = importlib.import_module("engine.models.transformers_trial")
        config: ModelConfig = trial.read_foreign(folder, architecture_of(fields))
    else:
        config = read_config(fields)
    return _with_ends(replace(config, packing=read_stored(fields)), folder)


def read_fields(folder: Path) -> Fields:
    """Reads config.json. Raises CheckpointError, also for one that claims the blocks of GGUF and is no GGUF file's."""
    fields = Fields(read_model_json(folder / "config.json"), "config.json")
    if gguf_file(folder) is None and fields.within("quantization_config").get("quant_method") == "gguf":
        raise CheckpointError(
            "config.json: quantization_config: quant_method 'gguf' belongs to .gguf files, which bring their own "
            "configuration; name such a file as model.path"
        )
    return fields


def _with_ends(config: ModelConfig, folder: Path) -> ModelConfig:
    """Returns the model with the end tokens that generation_config.json names, if it does. Raises CheckpointError."""
    generation = folder / "generation_config.json"
    eos = read_model_json(generation).get("eos_token_id") if has_model_file(generation) else None
    return config if eos is None else replace(config, eos_token_ids=token_ids(eos, generation.name))


def is_foreign(fields: Fields, model_impl: str = "auto") -> bool:
    """Returns whether transformers' own modelling code is to compute the model of config.json's fields: it is wanted,
    or no family here is it, the folder brings no code of its own, and transformers is installed."""
    has_transformers = importlib.util.find_spec("transformers") is not None
    if model_impl == "transformers" and not has_transformers:
        raise ConfigError("engine.model_impl: transformers is not installed; pip install 'baton[transformers]'")
    if model_impl != "auto":
        return model_impl == "transformers"
    architecture = architecture_of(fields)
    return has_transformers and architecture not in ("", *FAMILIES) and not fields.get("auto_map")


def check_foreign(folder: Path, fields: Fields) -> None:
    """Raises CheckpointError for what transformers' code cannot be tried with; loads neither that nor torch."""
    architecture = architecture_of(fields)
    if gguf_file(folder) is not None:
        raise refuse_foreign(
            architecture, f"{folder} has no config.json; a GGUF file's models are Baton's own families"
        )
    check_source(architecture)
    check_options(architecture, fields.get)
