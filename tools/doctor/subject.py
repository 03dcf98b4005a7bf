"""What the checks look at: the configuration, if there is a valid one, what programs say, and a cluster.

    opened (programs start, the router is called) -> checks run -> closed (what was opened is closed)

Whatever is missing is missing with a reason, which a skipped check repeats.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from cluster.config import ServingConfig, load_config
from cluster.errors import ConfigError
from controller.plan import ROLES, plan_worker
from tools.doctor.bounded import on_thread
from tools.doctor.contact import Asked, Contact
from tools.doctor.programs import Part, Question

_SHARE = 0.8
"""Of a check's time, for the answer of a program."""


class Subject:
    """Use it as a context manager."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.config: ServingConfig | None = None
        self.mistake = ""
        """Why there is no configuration."""
        try:
            self.config = on_thread(lambda: load_config(asked.path), "configuration").result(asked.call_s)
        except ConfigError as error:
            self.mistake = error.message
        except TimeoutError:
            self.mistake = f"{asked.path}, or the model folder that it names, cannot be read within {asked.call_s:g} s"
        self._worker, self._router = self._questions()
        try:
            self.contact = Contact.of(asked, self.config)
        except BaseException:
            self._close_questions()
            raise

    @property
    def serving(self) -> ServingConfig:
        """Of a check that needs one."""
        assert self.config is not None
        return self.config

    def machine(self, name: str) -> Part:
        """A part of what `worker.examine` says. Raises NoAnswer."""
        part: Part = self._worker.answer()[name]
        return part

    def workers(self, name: str) -> list[tuple[str, Part]]:
        """That part of each role that has workers. Raises NoAnswer."""
        return [(worker["role"], worker[name]) for worker in self._worker.answer()["workers"]]

    def tokenizer(self) -> Part:
        """What `router.examine` says; empty without a configuration. Raises NoAnswer."""
        part: Part = {} if self._router is None else self._router.answer()
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.contact.close()
        self._close_questions()

    def _close_questions(self) -> None:
        for question in (self._worker, self._router):
            if question is not None:
                question.close()

    def _questions(self) -> tuple[Question, Question | None]:
        """Whose time is up before that of a check that waits for them."""
        config, limit_s = self.config, _SHARE * self.asked.limit_s
        if config is None:
            return Question("worker.examine", asked={"workers": []}, limit_s=limit_s), None
        present = [role for role in ROLES if config.role(role).num_workers]
        workers = [plan_worker(config, role).ranks[0].as_dict() for role in present]
        return (
            Question("worker.examine", asked={"workers": workers}, limit_s=limit_s),
            Question("router.examine", [config.model.path], limit_s=limit_s),
        )
