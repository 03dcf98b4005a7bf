"""From a file of YAML to its nodes: `yaml.compose` with the safe loader, so that nothing from the file is constructed.

Knows no key; whoever reads the nodes says what may stand where.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from cluster.config.read import place_of
from cluster.config.source import ConfigSource, SourcePosition
from cluster.errors import ConfigError


def read_text(path: str | Path) -> str:
    """Raises ConfigError for a file that cannot be read as text."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def compose(source: ConfigSource, text: str, remedy: str) -> yaml.MappingNode:
    """The node graph of a single document with a mapping at its top; `remedy` says what to write where there is none.

    Bad YAML is raised at once as ConfigError, since nothing after it can be trusted.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = "; indent with spaces" if "\\t" in str(error.problem) else ""
        context = f" {error.context}" if error.context else ""
        place = SourcePosition(mark.line + 1, mark.column + 1) if mark else None
        source.report(place, "", f"is not valid YAML: {error.problem}{context}{hint}")
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = SourcePosition(before.count("\n") + 1, error.position - before.rfind("\n"))
        source.report(place, "", f"is not valid YAML: the character U+{error.character:04X} may not stand in a file")
    except RecursionError:
        source.report(None, "", "is not valid YAML: nested too deeply")
    else:
        if isinstance(root, yaml.MappingNode):
            return root
        what = "is empty" if root is None else "must be a mapping of keys to values at its top"
        source.report(place_of(root) if root else None, "", f"{what}; {remedy}")
    raise ConfigError(source.render())
