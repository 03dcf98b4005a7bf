"""The operator's cluster.yaml while a cluster runs: read with the flags of `baton serve` on top, watched by its
content, and edited in place when a change comes from elsewhere, so that file and cluster agree.

`ConfigWatch` decides what a look at the file means; who looks, and how often, is the controller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.config.diff import SPLIT_KEYS, differences, set_values
from cluster.config.load import parse_config
from cluster.config.schema import ServingConfig
from cluster.config.source import read_text
from cluster.errors import BatonError, ConfigError, FailedPrecondition
from cluster.program import replace_text

_STEADY_LOOKS = 2
_MISTAKE_LOOKS = 10


@dataclass(frozen=True)
class ConfigFile:
    """`model_path`, the ports and `chat_template` replace what the file says, as `baton serve --model --port` and
    `--chat-template` have it."""

    path: Path
    model_path: str | None = None
    router_port: int | None = None
    admin_port: int | None = None
    http_port: int | None = None
    is_own: bool = True
    """The operator's; False: the one that comes with Baton, which is neither watched nor written."""
    chat_template: str | None = None

    def read(self) -> str:
        """Raises ConfigError."""
        return read_text(self.path)

    def parse(self, text: str, filename: str = "") -> ServingConfig:
        """Raises ConfigError; `filename`: where the text comes from, if not from this file."""
        name, template = filename or str(self.path), self.chat_template
        config = parse_config(text, name, model_path=self.model_path, chat_template=template)
        if self.router_port is not None:
            config = replace(config, router=replace(config.router, port=self.router_port))
        if self.http_port is not None and config.router.http_port is not None:
            config = replace(config, router=replace(config.router, http_port=self.http_port))
        if self.admin_port is not None:
            config = replace(config, admin=replace(config.admin, port=self.admin_port))
        return config

    def load(self) -> ServingConfig:
        """Raises ConfigError."""
        return self.parse(self.read())

    def save(self, wanted: ServingConfig, changed: dict[str, Any]) -> str:
        """Sets the values of these keys and of the split in the file, where it says something else; comments and all
        else stay as they were. Returns the text that the file then has.

        Raises FailedPrecondition unless the file says exactly what is wanted afterwards.
        """
        try:
            text = self.read()
            stale = differences(self.parse(text), wanted)
            if not stale:
                return text
            # The split also changes without the file: by `mode: auto`, and by a plan of which some steps failed.
            set_here = {key: value for key, value in stale.items() if key in changed or key in SPLIT_KEYS}
            edited = set_values(text, set_here)
            left = differences(self.parse(edited), wanted)
            if left:
                raise FailedPrecondition(f"it also says something else than what runs about {', '.join(left)}")
            self._write(edited)
            return edited
        except OSError as error:
            raise FailedPrecondition(f"{self.path} cannot be written: {error.strerror}; edit it instead") from error
        except BatonError as error:
            raise FailedPrecondition(
                f"{self.path} would not agree with the cluster: {error.message}; edit it, it is watched"
            ) from error

    def _write(self, text: str) -> None:
        """Whole or not at all."""
        target = self.path.resolve()
        replace_text(target, text, target.stat().st_mode & 0o7777)


class ConfigWatch:
    """Call `look` every so often, when no change is being carried out.

    `apply` is given a valid configuration that the file has come to say; `refuse` a text that says what is wrong with
    it. Either is called once, and only for a content that stays the same for some looks: a file that is half written
    may well be valid, and one whose writer got no processor time may be empty for long.
    """

    def __init__(self, file: ConfigFile, apply: Callable[[ServingConfig], None], refuse: Callable[[str], None]) -> None:
        self._file = file
        self._apply = apply
        self._refuse = refuse
        self._done: tuple[str, str] | None = None
        """The content dealt with last: a text, or why there is none. None at first: an edit during the start counts."""
        self._last: tuple[str, str] | None = None
        self._num_same = 0

    def look(self) -> None:
        content = self._read()
        self._num_same = self._num_same + 1 if content == self._last else 1
        self._last = content
        if content == self._done or self._num_same < _STEADY_LOOKS:
            return
        text, problem = content
        try:
            wanted = None if problem else self._file.parse(text)
        except ConfigError as error:
            wanted, problem = None, error.message
        if wanted is not None:
            self._done = content
            self._apply(wanted)
        elif self._num_same >= _MISTAKE_LOOKS:
            self._done = content
            self._refuse(problem)

    def save(self, wanted: ServingConfig, changed: dict[str, Any]) -> None:
        """Writes as `ConfigFile.save` does, and takes the result for known: an accepted change that then fails is not
        begun again because the file says so. Raises FailedPrecondition."""
        self._done = self._file.save(wanted, changed), ""

    def _read(self) -> tuple[str, str]:
        try:
            return self._file.read(), ""
        except ConfigError as error:
            return "", error.message
