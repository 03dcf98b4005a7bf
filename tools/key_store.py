"""Changes to a keys file on disk: one at a time, whole or not at all, and readable by its owner alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from cluster.api_keys import ApiKey, load_keys, parse_keys, render_keys
from cluster.atomic_write import replace_text
from cluster.errors import ConfigError

OWNER_ONLY = 0o600


@contextlib.contextmanager
def edited_keys(path: Path, *, may_be_new: bool = False) -> Iterator[list[ApiKey]]:
    """The keys of a file, to be changed; they are written when the body ends well.

    Another edit of a file in the same folder waits. Raises ConfigError for a file that is wrong or cannot be written,
    and for keys that would make it wrong.
    """
    path = path.resolve()
    with _locked(path.parent):
        keys = [] if may_be_new and not path.exists() else list(load_keys(path))
        yield keys
        text = render_keys(keys)
        parse_keys(text, str(path))
        _write(path, text)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot keep keys here: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    try:
        replace_text(path, text, OWNER_ONLY)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
