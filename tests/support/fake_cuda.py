"""A CUDA device that is not there: its tensors have shapes, types and a place, and nothing in them.

What runs on it runs as on a GPU, up to the kernels: tensors of two devices or of types that do not go together raise,
and so does reading a value back, which would wait for the device. Works with torch's CPU build, too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.checkpoint import Checkpoint, TensorSlice

DEVICE = "cuda:0"
_active: list[Launches] = []
_pinned: list[torch.Tensor] = []
"""Memory that is page-locked."""
_HAVE_KERNELS = ("aten::_fused_rms_norm",)
"""Operations that torch's CUDA build computes in one kernel, and its CPU build takes to pieces."""
_LAUNCH_NOTHING = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::detach")


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Tensors that are made in this context are fake; those from outside may be copied to the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.model_runner.resolve_device", lambda wanted: DEVICE)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setitem(sys.modules, "flash_attn", _flash_attn())
        for kernels in _triton_kernels():
            patch.setattr(kernels, "run", _note_kernel)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), _WithoutGuards():
                yield
        finally:
            _pinned.clear()


class Waited(Exception):
    """The host has waited for the device."""


class _Event:
    def __init__(self) -> None:
        self._is_recorded = False

    def record(self, stream: Any) -> None:
        self._is_recorded = True

    def synchronize(self) -> None:
        if self._is_recorded:
            raise Waited("for an event")


def _flash_attn() -> ModuleType:
    """The package, with its kernel as one operation."""
    module = ModuleType("flash_attn")

    def flash_attn_varlen_func(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *sizes: int, **options: Any) -> Any:
        return _attend(q, k, v, cu_q, cu_k, options.get("block_table"))

    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


@torch.library.custom_op("baton_tests::flash_attn", mutates_args=())
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    block_table: torch.Tensor | None,
) -> torch.Tensor:
    raise NotImplementedError("there is no such device")


@_attend.register_fake
def _(q: Any, *others: Any) -> Any:
    return torch.empty_like(q)


def _triton_kernels() -> list[Any]:
    """The classes whose `run` launches a kernel; none where Triton is not installed."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        return []
    return [JITFunction, InterpretedFunction]


def _note_kernel(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    devices = {value.device for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
    assert devices == {torch.device(DEVICE)}, f"{kernel.__name__} gets tensors of {sorted(map(str, devices))}"
    for launches in _active:
        launches.names[f"triton::{kernel.__name__}"] += 1


class EmptyCheckpoint(Checkpoint):
    """A folder whose tensors are looked up and checked as ever; what is in them goes nowhere."""

    def read(self, part: TensorSlice, out: torch.Tensor) -> None:
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            super().read(part, torch.empty(part.local_shape, dtype=out.dtype))


class Launches(TorchDispatchMode):
    """Counts operations that launch something, all but views and those that only take memory, and kernels in Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.blocking: Counter[str] = Counter()
        """Copies to the device that wait until it has done what was launched before: from memory that is not
        page-locked, or without `non_blocking`."""

    def __enter__(self) -> Launches:
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().split(".")[0]
        if func.namespace == "aten" and name not in _HAVE_KERNELS and func._can_decompose():
            with self:  # such as linear: what it consists of is launched
                return func.decompose(*args, **kwargs)
        if func.namespace != "prim" and not func.is_view and name not in _LAUNCH_NOTHING:
            self.names[name] += 1
        if _is_blocking_copy(name, args, kwargs):
            self.blocking[name] += 1
        return func(*args, **kwargs)

    @property
    def total(self) -> int:
        return self.names.total()


def _is_blocking_copy(name: str, args: Any, kwargs: Any) -> bool:
    is_queued = kwargs.get("non_blocking", False)
    if name == "aten::copy_":
        target, source = args[:2]
        is_queued = is_queued or (len(args) > 2 and args[2])
    elif name == "aten::_to_copy" and kwargs.get("device") is not None:
        target, source = torch.empty(0, device=kwargs["device"]), args[0]
    else:
        return False
    host = source if source.device.type == "cpu" else target
    is_pinned = any(host is each or host._base is each for each in _pinned)
    return source.device != target.device and not (is_queued and is_pinned)


class _WithoutGuards(TorchFunctionMode):
    """Calls operations where torch's CPU build has methods that look for a guard of CUDA devices, and find none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func is torch.Tensor.__getitem__:
            return _at(*args)
        if func is torch.Tensor.__setitem__:
            return aten.copy_(_at(*args[:2]), args[2])
        if func is torch.Tensor.copy_:
            return aten.copy_(*args, **kwargs)
        if func is torch.empty and kwargs.pop("pin_memory", False):
            _pinned.append(torch.empty(*args, **kwargs))
            return _pinned[-1]
        if func is torch.Tensor.pin_memory:
            _pinned.append(args[0].detach())
            return _pinned[-1]
        if func is torch.Tensor.numpy and any(args[0] is each for each in _pinned):
            return np.zeros(args[0].shape, dtype=str(args[0].dtype).removeprefix("torch."))
        if func is torch.Tensor.contiguous:
            return aten.contiguous(*args, **kwargs)
        if func is torch.Tensor.view and isinstance(args[1], torch.dtype):
            return aten.view.dtype(*args)
        return func(*args, **kwargs)


def _at(tensor: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    dim = 0
    for number, part in enumerate(parts):
        if part is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif part is Ellipsis:
            dim = tensor.ndim - sum(other is not None for other in parts[number + 1 :])
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
        elif isinstance(part, slice):
            tensor, dim = torch.ops.aten.slice(tensor, dim, part.start, part.stop, part.step or 1), dim + 1
        else:  # tensors, which stand next to each other and at the end
            return torch.ops.aten.index(tensor, [None] * dim + list(parts[number:]))
    return tensor
