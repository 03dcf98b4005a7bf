"""Tries a model of transformers' own modelling code without its weights, and describes it as a `ModelConfig`.

Whatever Baton would compute wrongly is refused here by name: the model is built on the meta device and run for a few
tokens, and each layer has to call for attention once, with heads of the sizes and the causal mask or window that Baton
computes. Loads transformers; knows no checkpoint.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cluster.errors import CheckpointError
from engine.models.config import DTYPES, ModelConfig, RopeConfig
from engine.models.experts import ExpertsConfig
from engine.models.family import token_ids
from engine.models.registry import refuse_foreign
from engine.models.transformers_attention import TRIAL_NAME, LayerCall, attending
from engine.models.transformers_plan import ShardingPlan, Split
from engine.models.transformers_sizes import ForeignMatrix, ForeignModel
from engine.models.transformers_source import NO_INTERFACE, check_options

_NUM_TOKENS = 3
_building = threading.RLock()
"""Models are built one at a time: transformers sets torch's default type meanwhile, which all threads share."""


def read_foreign(folder: Path, architecture: str) -> ModelConfig:
    """Tries the model of a folder. Raises CheckpointError, which names the architecture and the reason."""
    with _building:
        return _read(folder, architecture, (folder / "config.json").read_bytes())


@lru_cache(maxsize=8)
def _read(folder: Path, architecture: str, content: bytes) -> ModelConfig:
    """`content`, config.json's, tells one state of a folder from another."""
    _check_class(architecture)
    config = read_config(folder, architecture)
    _check_config(config, architecture)
    try:
        with torch.device("meta"):
            model = build(config, TRIAL_NAME, torch.bfloat16)
    except Exception as error:  # foreign code, which may fail in any way
        raise refuse_foreign(architecture, f"it cannot be built: {_told(error)}") from None
    if type(model).__name__ != architecture:
        raise refuse_foreign(
            architecture, f"of model_type {config.model_type!r} transformers makes a {type(model).__name__}"
        )
    trial = _Trial(architecture)
    try:
        with torch.inference_mode(), attending(trial):
            ids = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta")
            places = torch.arange(_NUM_TOKENS, device="meta").unsqueeze(0)
            model(input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids), use_cache=False)
    except CheckpointError:
        raise
    except Exception as error:  # likewise: it keeps a state, computes with masks, or looks at numbers to decide
        raise refuse_foreign(architecture, f"it cannot be tried without weights: {_told(error)}") from None
    return _describe(config, architecture, model, trial)


def _check_class(architecture: str) -> None:
    """Refuses what the class says of itself."""
    found = getattr(transformers, architecture, None)
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise refuse_foreign(architecture, "transformers has something else of that name")
    if not found._supports_attention_backend:
        raise refuse_foreign(architecture, NO_INTERFACE)


def read_config(folder: Path, architecture: str) -> Any:
    """transformers' config of a folder. Code in the folder is never run."""
    transformers_logging.set_verbosity_error()  # what its configs warn of is not the operator's to change
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # foreign code, which may fail in any way
        version = transformers.__version__
        raise refuse_foreign(
            architecture, f"transformers {version} does not read its config.json: {_told(error)}"
        ) from None


def build(config: Any, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model, with the attention of that name. Its parameters get no memory, whatever their device says."""
    with _building, ExitStack() as stack:
        stack.callback(torch.nn.modules.module.register_module_parameter_registration_hook(_without_memory).remove)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    model.eval()
    return model


def _without_memory(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> Any:
    if parameter is None or parameter.is_meta:
        return None
    return torch.nn.Parameter(parameter.to("meta"), requires_grad=False)


def _check_config(config: Any, architecture: str) -> None:
    """Refuses what a trial would not show."""
    if config.get_text_config() is not config:
        raise refuse_foreign(architecture, "it takes more than text")
    check_options(architecture, lambda name: getattr(config, name, None))


class _Trial:
    """Notes the calls for attention of one forward pass on the meta device."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._masks: dict[int, tuple[torch.Tensor, int | None]] = {}
        self.calls: list[LayerCall] = []
        self.windows: list[int | None] = []

    def make_mask(self, visible: Callable[..., torch.Tensor], window: int | None, device: torch.device) -> torch.Tensor:
        """A tensor without dimensions, with which nothing can be computed unnoticed."""
        if not _shows_only(visible, window):
            raise refuse_foreign(self._architecture, "a mask of it is neither causal nor a window")
        mask = torch.empty((), device=device)
        self._masks[id(mask)] = mask, window
        return mask

    def attend(self, call: LayerCall) -> torch.Tensor:
        if id(call.mask) not in self._masks:
            raise refuse_foreign(self._architecture, "a layer's mask is not one of those that transformers made for it")
        for name, value in call.options.items():
            if name not in ("softcap", "s_aux") and value is not False:
                raise refuse_foreign(self._architecture, f"its attention takes {name}")
        _, num_heads, num_tokens, head_dim = call.query.shape
        if call.key.shape != call.value.shape or call.key.shape[-1] != head_dim:
            sizes = f"{head_dim} of queries, {call.key.shape[-1]} of keys and {call.value.shape[-1]} of values"
            raise refuse_foreign(self._architecture, f"the sizes of its heads differ: {sizes}")
        if num_tokens != _NUM_TOKENS or call.key.shape[2] != _NUM_TOKENS or num_heads % call.key.shape[1]:
            raise refuse_foreign(
                self._architecture, f"a layer attends with {list(call.query.shape)} to {list(call.key.shape)}"
            )
        self.calls.append(call)
        self.windows.append(self._masks[id(call.mask)][1])
        return call.query.new_empty((1, num_tokens, num_heads, head_dim))


def _shows_only(visible: Callable[..., torch.Tensor], window: int | None) -> bool:
    """Whether a mask shows each token the `window` tokens up to its own, tried where another would differ."""
    at = [0, 1, 2, 5] + ([] if window is None else [window - 1, window, window + 1, 2 * window, 3 * window + 1])
    for query in at:
        near = {0, 1, query - 1, query, query + 1, query + 2}
        near |= set() if window is None else {query - window - 1, query - window, query - window + 1}
        for key in sorted(place for place in near if place >= 0):
            places = (torch.tensor(place, device="cpu") for place in (0, 0, query, key))
            if bool(visible(*places)) != (key <= query and (window is None or key > query - window)):
                return False
    return True


def _describe(config: Any, architecture: str, model: PreTrainedModel, trial: _Trial) -> ModelConfig:
    num_layers, first = config.num_hidden_layers, _only_kind(architecture, trial.calls, config.num_hidden_layers)
    _, num_heads, _, head_dim = first.query.shape
    longest, dtype = getattr(config, "max_position_embeddings", None), str(config.dtype or "float32")
    if type(longest) is not int or longest < 1:
        raise refuse_foreign(architecture, "its config.json has no max_position_embeddings")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or not isinstance(head, torch.nn.Linear):
        raise refuse_foreign(architecture, "its embedding or its head is not a table")
    if embedding.weight.shape != head.weight.shape:
        raise refuse_foreign(architecture, "its embedding and its head differ in shape")
    if dtype.removeprefix("torch.") not in DTYPES:
        raise CheckpointError(f"config.json: dtype {dtype!r} is not supported; Baton serves {', '.join(DTYPES)}")
    return ModelConfig(
        architecture=architecture,
        hidden_size=head.in_features,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * head.in_features),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=first.key.shape[1],
        head_dim=head_dim,
        vocab_size=head.out_features,
        max_position_embeddings=longest,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        dtype=dtype.removeprefix("torch."),
        eos_token_ids=token_ids(config.eos_token_id),
        layer_windows=tuple(None if window is None or window >= longest else window for window in trial.windows),
        attention_softcap=first.options.get("softcap"),
        attention_sinks="s_aux" in first.options,
        experts=_experts(config, model, num_layers),
        foreign=_sizes(model, layers_of(model, num_layers, architecture)[1], first.key.shape[1] * head_dim),
    )


def _only_kind(architecture: str, calls: list[LayerCall], num_layers: int) -> LayerCall:
    """The first of the calls, of which all others are like it."""
    if len(calls) != num_layers:
        raise refuse_foreign(architecture, f"{num_layers} layers call for attention {len(calls)} times")
    for call in calls:
        if (call.query.shape, call.key.shape) != (calls[0].query.shape, calls[0].key.shape):
            raise refuse_foreign(architecture, "the heads of its layers differ in number or size")
        if call.options.get("softcap") != calls[0].options.get("softcap"):
            raise refuse_foreign(architecture, "the soft caps of its layers differ")
        if ("s_aux" in call.options) != ("s_aux" in calls[0].options):
            raise refuse_foreign(architecture, "some of its layers have attention sinks, and some have none")
    return calls[0]


def layers_of(model: PreTrainedModel, num_layers: int, architecture: str) -> tuple[str, torch.nn.ModuleList]:
    """The list of a model's layers, and its name within the base model."""
    for name, module in model.base_model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return name, module
    raise refuse_foreign(architecture, f"no list in it has its {num_layers} layers")


def _experts(config: Any, model: PreTrainedModel, num_layers: int) -> ExpertsConfig | None:
    """The experts that transformers holds in one parameter of each layer; how many of them a token takes."""
    names = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k")
    chosen = next((n for n in (getattr(config, name, None) for name in names) if type(n) is int), 1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and name.endswith("down_proj"):
            num_experts, _, inner = parameter.shape
            return ExpertsConfig((True,) * num_layers, num_experts, min(chosen, num_experts), inner, normalizes=False)
    return None


def _sizes(model: PreTrainedModel, layers: torch.nn.ModuleList, kv_width: int) -> ForeignModel:
    plan, obstacle = ShardingPlan.of(model), ""
    matrices: Counter[tuple[int, int, Split, bool, bool]] = Counter()
    num_vector_elements, divided = 0, set()
    outside = (model.get_input_embeddings(), model.get_output_embeddings())
    for module_name, module in model.named_modules():
        is_linear = type(module).forward is torch.nn.Linear.forward
        if plan.style(module_name).split and not is_linear and module not in outside:
            obstacle = f"its tensor-parallel plan divides {module_name}, a {type(module).__name__}"
        for name, parameter in module.named_parameters(recurse=False):
            if module in outside:
                continue
            if parameter.ndim < 2 or (parameter.ndim == 2 and not is_linear):  # a router's matrix, a table of positions
                num_vector_elements += parameter.numel()
                continue
            style = plan.style_of(module_name, name)
            *count, num_outputs, num_inputs = parameter.shape
            matrices[num_outputs, num_inputs, style.split, is_linear, bool(count)] += count[0] if count else 1
            size = {"outputs": num_outputs, "inputs": num_inputs, "": kv_width}[style.split]
            if size != kv_width:
                divided.add(size // 2 if style.is_packed else size)
    kinds: dict[tuple[tuple[str, torch.Size], ...], int] = {}
    of_layers = [tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in layers]
    return ForeignModel(
        matrices=tuple(
            ForeignMatrix(outputs, inputs, count, split, is_linear, is_expert)
            for (outputs, inputs, split, is_linear, is_expert), count in matrices.items()
        ),
        num_vector_elements=num_vector_elements,
        divided_sizes=tuple(sorted(divided)),
        layer_kinds=tuple(kinds.setdefault(kind, len(kinds)) for kind in of_layers),
        tp_obstacle=plan.obstacle or obstacle,
    )


def _told(error: Exception) -> str:
    """The first line of an error of foreign code."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
