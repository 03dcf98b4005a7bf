"""Which architectures transformers' own code can compute for Baton, as far as its text and a config.json say it.

Importing transformers takes a second, and its modelling code torch: what is refused here is refused before anything
starts. `engine.models.transformers_trial` finds the rest. Loads neither.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from engine.models.registry import refuse_foreign

NO_INTERFACE = "it does not take attention from outside (_supports_attention_backend)"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_STATES = ("layer_types", "layers_block_type", "hybrid_layer_pattern")
_FLAG = re.compile(r"^    _supports_attention_backend(?:: bool)? = (True|False)$", re.MULTILINE)
_NAMES = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_BASE = "PreTrainedModel"


def check_source(architecture: str) -> None:
    """Raises CheckpointError for an architecture that transformers does not have, or that calls for no attention from
    outside. Says nothing where the text is laid out in another way."""
    models = _root() / "models"
    types = _model_types(models)
    if types is None:
        return
    if architecture not in types:
        version = importlib.metadata.version("transformers")
        raise refuse_foreign(architecture, f"transformers {version} has no such language model")
    likely = models / types[architecture].replace("-", "_")
    for folder in (likely, models):
        for file in sorted(folder.glob("modeling_*.py" if folder is likely else "*/modeling_*.py")):
            text = file.read_text(encoding="utf-8")
            if f"\nclass {architecture}(" in text:
                if _takes_attention(text, architecture) is False:
                    raise refuse_foreign(architecture, NO_INTERFACE)
                return


def check_options(architecture: str, get: Callable[[str], Any]) -> None:
    """Raises CheckpointError for what a trial would not show. `get` returns a value of config.json, or None."""
    if get("vision_config") is not None or get("audio_config") is not None:
        raise refuse_foreign(architecture, "it takes more than text")
    if get("is_encoder_decoder"):
        raise refuse_foreign(architecture, "it has an encoder")
    for name in _STATES:
        kinds = get(name)
        unknown = set(map(str, kinds)) - _LAYER_TYPES if isinstance(kinds, list) else set()
        if unknown:
            raise refuse_foreign(architecture, f"its {name} has {', '.join(sorted(unknown))}")
    if get("num_kv_shared_layers"):
        raise refuse_foreign(
            architecture, "some of its layers use other layers' keys and values (num_kv_shared_layers)"
        )
    rope = get("rope_parameters") or get("rope_scaling")
    ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
    if any(isinstance(one, dict) and one.get("rope_type") == "longrope" for one in ropes):
        raise refuse_foreign(architecture, "the turns of its rope_type 'longrope' depend on the length of the prompt")


def _root() -> Path:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations is not None, "transformers is installed"
    return Path(spec.submodule_search_locations[0])


@cache
def _model_types(models: Path) -> dict[str, str] | None:
    """Returns the `model_type` of each architecture that transformers makes a language model of; None if unknown."""
    try:
        text = (models / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    except OSError:
        return None
    _, found, rest = text.partition(f"\n{_NAMES} = OrderedDict(")
    pairs = re.findall(r'\("([^"]+)", "([^"]+)"\)', rest.partition("\n)\n")[0])
    return {name: model_type for model_type, name in reversed(pairs)} if found and pairs else None


def _takes_attention(text: str, name: str) -> bool | None:
    """Returns whether a class of a file takes attention from outside: itself or the first of its bases that says so;
    None where that is not in the file."""
    if name == _BASE:
        return False
    found = re.search(rf"^class {name}\(([^)]*)\):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        return None
    flag = _FLAG.search(found[2])
    if flag is not None:
        return flag[1] == "True"
    bases = [base.strip() for base in found[1].split(",")]
    answers = [_takes_attention(text, base) for base in bases if not base.endswith("Mixin")]
    return answers[0] if answers else None
