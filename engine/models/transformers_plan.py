"""transformers' tensor-parallel plans: which slice of each weight a rank holds, and where ranks meet.

A plan gives styles to modules and to bare parameters, by names in which `*` stands for a layer's number. A style that
is not in `STYLES` is refused by name. Knows no checkpoint and no products.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

Split = Literal["outputs", "inputs", ""]


@dataclass(frozen=True)
class Style:
    """The part of a weight that a rank holds, and what it does before and after a module's own computation."""

    split: Split = ""
    """The dimension of [.., O, I] that is divided; empty: none."""
    is_packed: bool = False
    """The dimension consists of two halves, each of which is divided."""
    takes_whole: bool = False
    """The input is whole, and the rank takes its part of it."""
    gathers: bool = False
    """The outputs of the ranks are put side by side."""
    sums: bool = False
    """The outputs of the ranks are added up."""


STYLES: dict[str, Style] = {
    "colwise": Style("outputs"),
    "colwise_gather_output": Style("outputs", gathers=True),
    "colwise_rep": Style("outputs", gathers=True),
    "rowwise": Style("inputs", sums=True),
    "rowwise_split_input": Style("inputs", takes_whole=True, sums=True),
    "rowwise_rep": Style("inputs", takes_whole=True, sums=True),
    "packed_colwise": Style("outputs", is_packed=True),
    "packed_rowwise": Style("inputs", is_packed=True),
    "moe_tp_experts": Style(sums=True),
    "embedding_rowwise": Style(),
    "embedding_colwise": Style(),
    "replicated_with_grad_allreduce": Style(),
    "replicate": Style(),
    "local_params": Style(),
}
"""The styles by transformers' names. Embeddings are whole on each rank."""
WHOLE = Style()


class ShardingPlan:
    """The styles of one model's layers. Embedding and head are divided without it."""

    def __init__(self, styles: Mapping[str, str], outside: Sequence[str] = ()) -> None:
        """`outside`: modules that do not follow it."""
        self._styles = {name: style for name, style in styles.items() if name not in outside}

    @classmethod
    def of(cls, model: PreTrainedModel) -> ShardingPlan:
        """The plan that transformers has for a model."""
        outside = (model.get_input_embeddings(), model.get_output_embeddings())
        return cls(model.tp_plan or {}, [name for name, module in model.named_modules() if module in outside])

    @property
    def obstacle(self) -> str:
        """The reason why ranks cannot follow it, or nothing."""
        if not self._styles:
            return "transformers has no tensor-parallel plan for it (base_model_tp_plan)"
        unknown = sorted(set(self._styles.values()) - set(STYLES))
        return f"its tensor-parallel plan has {', '.join(unknown)}, which Baton does not follow" if unknown else ""

    def style(self, name: str) -> Style:
        """Returns the style of a module, or of a parameter that the plan names; an unknown one counts as none."""
        found = self._styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        return WHOLE if found is None else STYLES.get(found, WHOLE)

    def style_of(self, module: str, parameter: str) -> Style:
        """Returns the style of a module's parameter: its own, or its module's."""
        own = self.style(f"{module}.{parameter}")
        return own if own.split else self.style(module)
