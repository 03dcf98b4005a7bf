"""How a role sets keys of a section for its own workers: `RoleOverrides`, a dataclass that is made from the section's.

The section stays the one declaration of each key: type, limits and marks are its own, and null stands for its value. A
field marked as `shared` cannot differ between the roles, and says why. Knows no single key.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

S = TypeVar("S")
_SHARED = "shared"


def shared(why: str) -> dict[str, str]:
    """Returns the metadata of a field that no role may set for itself."""
    return {_SHARED: why}


class RoleOverrides:
    """Base of what a role may set of the section `of`, which stands at `at` below metadata.serving."""

    section: ClassVar[type]
    at: ClassVar[str]
    common_only: ClassVar[Mapping[str, str]]
    """The section's keys that no role may set, and why."""

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    def __init_subclass__(cls, of: type, at: str) -> None:
        hints, fields = typing.get_type_hints(of), dataclasses.fields(of)
        cls.section, cls.at = of, at
        cls.common_only = {each.name: each.metadata[_SHARED] for each in fields if _SHARED in each.metadata}
        own = [each for each in fields if each.name not in cls.common_only]
        cls.__annotations__ = {each.name: hints[each.name] | None for each in own}
        for each in own:
            setattr(cls, each.name, dataclasses.field(default=None, metadata=each.metadata))
        dataclasses.dataclass(frozen=True)(cls)

    def over(self, common: S) -> S:
        """Returns the section with what the role sets in place of its own."""
        given: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        replaced: S = dataclasses.replace(common, **given)  # type: ignore[type-var]
        return replaced
