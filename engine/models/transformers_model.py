"""A decoder that transformers' own modelling code computes, with Baton's attention, weights and ranks in it.

Has the interface of `engine.models.decoder.Decoder`. The model is built without memory; linear layers are replaced by
ones that multiply with a `Matrix` and meet the other ranks as transformers' tensor-parallel plan says, and every other
parameter is filled with this rank's slice. The layers' calls for attention (`engine.models.transformers_attention`)
write pages and attend to them. It knows nothing of requests, schedules or serving. Needs transformers.

Legend: T tokens, R rows with logits, E hidden_size, V vocab_size, I/O inputs/outputs, Hq/H query/KV heads, D head_dim.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from engine.checkpoint import TensorSlice
from engine.kv.pool import store
from engine.layers.linear import Loader, VocabParallelHead, VocabShard
from engine.models.config import ModelConfig
from engine.models.decoder import Hidden, StepContext
from engine.models.transformers_attention import NAME, LayerCall, attending
from engine.models.transformers_plan import WHOLE, ShardingPlan, Style
from engine.models.transformers_trial import build, layers_of, read_config
from engine.models.transformers_weights import ForeignWeights
from engine.quantization.interface import Matrix, make_matrix
from engine.tp import TPGroup


class ForeignLinear(torch.nn.Module):
    """A linear layer of one rank: [.., I] to [.., O], split as its style says."""

    def __init__(
        self, matrix: Matrix, bias: torch.Tensor | None, style: Style, tp: TPGroup, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = torch.empty(0, dtype=dtype, device="meta")
        """Says the type to code that asks for it, and cannot be computed with."""
        self._matrix, self._bias, self._tp = matrix, bias, tp
        self._style = style if tp.size > 1 else WHOLE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        style, tp = self._style, self._tp
        if style.takes_whole:
            x = x.chunk(tp.size, dim=-1)[tp.rank]
        bias = None if style.sums and tp.rank else self._bias
        out = self._matrix(x.reshape(-1, x.shape[-1]).contiguous(), bias)
        if style.sums:
            tp.all_reduce(out)
        if style.gathers:
            out = tp.all_gather(out, dim=-1)
        return out.view(*x.shape[:-1], out.shape[-1])


class _Head(torch.nn.Module):
    """[1, R, E] to float32 logits [1, R, V]."""

    def __init__(self, head: VocabParallelHead, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.head = head
        self._bias = None if bias is None else bias.float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden[0])
        return (logits if self._bias is None else logits + self._bias).unsqueeze(0)


class _Output(MoeModelOutputWithPast):
    """An output with every field that some model with a head passes on."""

    cross_attentions = None


class _Rows(torch.nn.Module):
    """Stands in the place of a model's layers, which have run, while its head computes logits."""

    hidden: torch.Tensor

    @property
    def decoder(self) -> _Rows:
        """The part that some models call instead of the whole."""
        return self

    def forward(self, *inputs: Any, **options: Any) -> _Output:
        return _Output(last_hidden_state=self.hidden)


class TransformersModel:
    """Built straight from a checkpoint, sharded as it is read."""

    def __init__(self, config: ModelConfig, folder: Path, loader: Loader, report: Callable[[str], None]) -> None:
        """Raises CheckpointError for tensors that are missing or misshapen."""
        model = build(read_config(folder, config.architecture), NAME, loader.dtype)
        self.tp, self._config = loader.tp, config
        self._layers = tuple(range(config.num_hidden_layers))
        self._groups = tuple(map(config.group_of, self._layers))
        self._layers_name = layers_of(model, config.num_hidden_layers, config.architecture)[0]
        reader = _Reader(model, config, loader)
        reader.fill(report)
        self.unused_tensors = reader.unused_tensors
        self._base = model.base_model
        self._rows = _Rows()
        setattr(model, model.base_model_prefix, self._rows)
        self._model = model
        self._vocab_size = config.vocab_size

    def only(self, layers: Sequence[int]) -> Self:
        """This model without its other layers, sharing the weights. Layers compute there what others of their kind do,
        not exactly what they are for."""
        other = copy.copy(self)
        other._layers = tuple(layers)
        other._base = copy.copy(self._base)
        *path, name = self._layers_name.split(".")
        parent: torch.nn.Module = other._base
        for step in path:
            part = copy.copy(parent.get_submodule(step))
            parent._modules = {**parent._modules, step: part}
            parent = part
        every: Any = parent.get_submodule(name)
        parent._modules = {**parent._modules, name: torch.nn.ModuleList(every[layer] for layer in layers)}
        return other

    def __call__(self, token_ids: torch.Tensor, context: StepContext) -> Hidden:
        """Runs [T] ids through all layers, which write their KV."""
        run = _Step(self, context)
        ids, positions = token_ids.long().unsqueeze(0), context.positions.long().unsqueeze(0)
        with attending(run):
            out = self._base(input_ids=ids, position_ids=positions, use_cache=False)
        assert run.num_layers == len(self._layers), f"{len(self._layers)} layers attended {run.num_layers} times"
        return out.last_hidden_state[0], None

    def logits(self, hidden: Hidden, rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of [R] rows of a step, with what the model does to them after its head."""
        if not len(rows):
            return torch.empty((0, self._vocab_size), device=hidden[0].device)
        self._rows.hidden = hidden[0].index_select(0, rows).unsqueeze(0)
        logits: torch.Tensor = self._model(input_ids=rows.unsqueeze(0), use_cache=False).logits[0]
        return logits


class _Step:
    """A forward pass over pages."""

    def __init__(self, model: TransformersModel, context: StepContext) -> None:
        self._model, self._context = model, context
        self.num_layers = 0

    def make_mask(self, visible: Callable[..., torch.Tensor], window: int | None, device: torch.device) -> torch.Tensor:
        raise AssertionError("a model that runs steps is built with an attention that has no masks")

    def attend(self, call: LayerCall) -> torch.Tensor:
        model, context, config = self._model, self._context, self._model._config
        layer = model._layers[self.num_layers]
        group, window = model._groups[layer], config.layer_windows[layer]
        q, k, v = (heads[0].transpose(0, 1) for heads in (call.query, call.key, call.value))  # [T, H, D]
        sinks = call.options.get("s_aux")
        is_whole = model.tp.size > 1 and q.shape[1] == config.num_attention_heads
        if is_whole:  # the plan leaves attention to each rank, and pages hold the heads of one
            own = config.kv_head_range(model.tp.rank, model.tp.size)
            q = q.chunk(model.tp.size, dim=1)[model.tp.rank]
            k, v = (heads[:, own.start : own.stop] for heads in (k, v))
        if sinks is not None and len(sinks) != q.shape[1]:
            sinks = sinks.chunk(model.tp.size)[model.tp.rank]
        pages = context.kv.pages(layer)
        store(pages, (k, v), context.slots[group])
        self.num_layers += 1
        if context.on_layer is not None:
            context.on_layer(self.num_layers)
        extras: dict[str, Any] = {} if sinks is None else {"sinks": sinks.float()}
        if config.attention_softcap is not None:
            extras["soft_cap"] = config.attention_softcap
        out = context.attention(
            q.contiguous(),
            *pages,
            context.batches[group],
            softmax_scale=call.scale,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            **extras,
        )
        return (model.tp.all_gather(out, dim=1) if is_whole else out).unsqueeze(0)


class _Reader:
    """Fills a model with one rank's weights."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, loader: Loader) -> None:
        self._model, self._config, self._loader = model, config, loader
        self._tp = loader.tp
        self._plan = ShardingPlan.of(model)
        self._weights = ForeignWeights(model, loader.checkpoint)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._head_name = self._names[id(model.get_output_embeddings())]
        precise = set(model._keep_in_fp32_modules_strict or ())
        precise |= set(model._keep_in_fp32_modules or ()) if loader.dtype == torch.float16 else set()
        self._precise = tuple(precise)

    @property
    def unused_tensors(self) -> tuple[re.Pattern[str], ...]:
        """Names of tensors that transformers would leave unread, too."""
        patterns = [*(self._model._keys_to_ignore_on_load_unexpected or ())]
        if self._config.tie_word_embeddings:
            patterns.append(rf"^{re.escape(self._weights.tensor_name(self._head_name + '.weight'))}$")
        return tuple(re.compile(pattern) for pattern in patterns)

    def fill(self, report: Callable[[str], None]) -> None:
        model, device = self._model, self._loader.device
        self._fill_vocabulary()
        done = 0
        for name, module in list(model.named_modules()):
            if isinstance(module, _Head | VocabParallelHead):
                continue
            if type(module).forward is torch.nn.Linear.forward:
                self._replace(name, self._linear(name, module))
            else:
                self._fill(name, module)
            if (layer := re.search(r"\.(\d+)\.", name)) and int(layer[1]) > done:
                done = int(layer[1])
                report(f"loading weights: {done} of {self._config.num_hidden_layers} layers")
        for module in model.modules():
            for buffer, value in module._buffers.items():
                module._buffers[buffer] = None if value is None else value.to(device)

    def _fill_vocabulary(self) -> None:
        """The embedding, whole, and the head, this rank's rows. A head that is tied to it shares its memory where the
        rank has all rows."""
        config, loader = self._config, self._loader
        embedding: Any = self._model.get_input_embeddings()
        head: Any = self._model.get_output_embeddings()
        name = f"{self._names[id(embedding)]}.weight"
        shape = tuple(embedding.weight.shape)
        weight = self._weights.read([TensorSlice(name, shape)], 0, self._dtype(name, embedding.weight), loader.device)
        embedding._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)
        tensor = self._weights.tensor_name(name if config.tie_word_embeddings else f"{self._head_name}.weight")
        if config.tie_word_embeddings and self._tp.size == 1:
            shard = VocabShard.of_whole(weight)
        else:
            shard = VocabShard(loader, tensor.removesuffix(".weight"), config.vocab_size, config.hidden_size)
        bias = None
        if head.bias is not None:
            bias = self._read(f"{self._head_name}.bias", head.bias, WHOLE)
        self._replace(self._head_name, _Head(VocabParallelHead(shard, config.vocab_size, loader), bias))

    def _linear(self, name: str, module: torch.nn.Linear) -> ForeignLinear:
        style, loader = self._plan.style(name), self._loader
        bias_style = Style(style.split if style.split == "outputs" else "", style.is_packed)
        bias = None if module.bias is None else self._read(f"{name}.bias", module.bias, bias_style)
        parts, dim = self._parts(f"{name}.weight", tuple(module.weight.shape), style)
        is_router = self._config.experts is not None and module.out_features == self._config.experts.num_experts
        dtype = self._dtype(f"{name}.weight", module.weight)
        is_readable = self._weights.is_tensor(parts[0].name) and (dim == 0 or len(parts) == 1)
        if is_readable and dtype == loader.dtype and not is_router:
            tensor = self._weights.tensor_name(parts[0].name)
            matrix = loader.linear([replace(part, name=tensor) for part in parts])
        else:
            weight = self._weights.read(parts, dim, dtype, loader.device)
            matrix = make_matrix(weight, loader.kernels, "none" if is_router else loader.quantization)
        return ForeignLinear(matrix, bias, style, self._tp, dtype)

    def _fill(self, name: str, module: torch.nn.Module) -> None:
        prefix = f"{name}." if name else ""
        for parameter, value in module.named_parameters(recurse=False):
            if value.is_meta:
                filled = self._read(prefix + parameter, value, self._plan.style_of(name, parameter))
                module._parameters[parameter] = torch.nn.Parameter(filled, requires_grad=False)
        for buffer, tensor in module.named_buffers(recurse=False):
            if buffer not in module._non_persistent_buffers_set and prefix + buffer in self._weights:
                module._buffers[buffer] = self._read(prefix + buffer, tensor, WHOLE)
        if self._plan.style(name).sums and self._tp.size > 1:
            module.register_forward_hook(self._sum)

    def _sum(self, module: torch.nn.Module, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.contiguous()
        self._tp.all_reduce(out)
        return out

    def _read(self, name: str, like: torch.Tensor, style: Style) -> torch.Tensor:
        parts, dim = self._parts(name, tuple(like.shape), style)
        return self._weights.read(parts, dim, self._dtype(name, like), self._loader.device)

    def _parts(self, name: str, shape: tuple[int, ...], style: Style) -> tuple[list[TensorSlice], int]:
        """This rank's slices of a parameter, and the dimension along which they lie."""
        if self._tp.size == 1 or not style.split or (style.split == "inputs" and len(shape) < 2):
            return [TensorSlice(name, shape)], 0
        dim = len(shape) - 1 if style.split == "inputs" else max(0, len(shape) - 2)
        size = shape[dim]
        if style.is_packed:
            half = size // 2
            own = self._loader.equal_share(half)
            ranges = [own, range(half + own.start, half + own.stop)]
        elif re.search(r"\.[kv]_proj\.", name) and size == self._config.num_key_value_heads * self._config.head_dim:
            heads, width = self._config.kv_head_range(self._tp.rank, self._tp.size), self._config.head_dim
            ranges = [range(heads.start * width, heads.stop * width)]
        else:
            ranges = [self._loader.equal_share(size)]
        return [TensorSlice(name, shape, dim, part.start, part.stop) for part in ranges], dim

    def _dtype(self, name: str, like: torch.Tensor) -> torch.dtype:
        """float32 where transformers keeps it."""
        if any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in self._precise):
            return torch.float32
        return like.dtype

    def _replace(self, name: str, module: torch.nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self._model.get_submodule(parent), child, module)
