"""Checks of what the operator provides: cluster.yaml, packages, the model folder, keys, folders."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from cluster.api_keys import OWNER_ONLY, load_keys
from cluster.config.load import describe_config
from cluster.errors import ConfigError
from cluster.program import ExitCode
from cluster.text import count_of, format_bytes
from controller.local_ray import base_folder
from controller.plan import STATE_FOLDER
from tools.doctor.bounded import NoAnswer, Part
from tools.doctor.check import Finding, check, ok, problem, skipped, warning
from tools.doctor.subject import Subject

_LEAST_FREE_BYTES = 1_000_000_000
_MOST_USED = 0.95
"""Used share of a file system above which Ray writes nothing."""


@check(needs_config=False, exit_code=ExitCode.BAD_CONFIG)
def configuration(subject: Subject) -> Iterator[Finding]:
    """cluster.yaml can be read and is valid; every mistake with line and column."""
    if subject.config is None:
        remedy = "correct the file at the line and column named; docs/configuration.md explains each key"
        yield problem(subject.config_error, remedy)
    else:
        yield ok(f"{subject.options.path}: {describe_config(subject.config)}")
        placement, replicas = subject.serving.placement.routers, subject.serving.router.replicas
        if placement == "spread" and subject.serving.redis is None:
            yield warning(
                f"routers are on several machines ({replicas}) and share no store: a stream ends with its router, and "
                "there are no batches",
                "name a Redis that every machine reaches in `state`",
            )


@check(needs_config=False)
def packages(subject: Subject) -> Iterator[Finding]:
    """Python, Baton and the packages that it needs, in the versions that it needs.

    Reads what is installed; imports nothing.
    """
    python = platform.python_version()
    try:
        wanted = [Requirement(text) for text in requires("baton") or ()]
        own = version("baton")
    except PackageNotFoundError:
        yield skipped(f"Python {python}; Baton is not installed as a package, so nothing says which versions it needs")
        return
    wrong = 0
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = ""
        if not found or not requirement.specifier.contains(found, prereleases=True):
            wrong += 1
            installed = f"{requirement.name} {found}" if found else f"{requirement.name} is not installed"
            yield problem(f"{installed}; Baton needs {requirement}", f"pip install '{requirement}', or `make setup`")
    if not wrong:
        yield ok(f"Python {python}, Baton {own}, and {len(wanted)} packages in the versions that it needs")


@check(needs_config=False)
def programs(subject: Subject) -> Iterator[Finding]:
    """Whether a worker and a router could run here: torch and the other libraries can be loaded.

    Asks the programs that look at this machine for the other checks: where one cannot run, neither can a worker or a
    router.
    """
    asks: tuple[tuple[str, Callable[[], Part]], ...] = (
        ("a worker", lambda: subject.machine("torch")),
        ("a router", subject.tokenizer),
    )
    wrong = 0
    for who, ask in asks:
        try:
            ask()
        except NoAnswer as error:
            wrong += 1
            yield problem(f"{who} could not run here: {error.message}", "install Baton again, `make setup`")
    if not wrong:
        yield ok(f"workers and routers can run here, with torch {subject.machine('torch')['found']['version']}")


@check(exit_code=ExitCode.BAD_CONFIG)
def model(subject: Subject) -> Iterator[Finding]:
    """The model folder as a worker reads it: config.json, sizes for `tensor_parallel`, headers of all weights."""
    remedy = "fetch the file again, or name another Hugging Face folder in model.path"
    wrong = [part["refused"] for _, part in subject.workers("sizes") if "refused" in part]
    checkpoint = subject.machine("checkpoint")
    if "refused" in checkpoint:
        wrong.append(checkpoint["refused"])
    for why in dict.fromkeys(wrong):
        yield problem(why, remedy)
    if not wrong:
        weights = checkpoint["found"]
        size = format_bytes(weights["size_bytes"])
        files = f"{weights['num_tensors']} tensors in {count_of(weights['num_files'], 'file')}, {size}"
        yield ok(f"{subject.serving.model.path}: {files}, revision {weights['revision']}", **weights)


@check(exit_code=ExitCode.BAD_CONFIG)
def tokenizer(subject: Subject) -> Iterator[Finding]:
    """tokenizer.json and the chat template as a router reads them, and whether their ids are the model's."""
    part = subject.tokenizer()
    if "refused" in part:
        yield problem(part["refused"], "put the model's own tokenizer.json into its folder")
        return
    found = part["found"]
    if found["num_tokens"] > found["vocab_size"]:
        yield warning(
            f"tokenizer.json has {found['num_tokens']} tokens, and config.json a vocab_size of {found['vocab_size']}: "
            "some texts become ids that the model does not have, and are refused",
            "take tokenizer.json and config.json from the same checkpoint",
        )
    chats = "with a chat template" if found["has_chat_template"] else "without a chat template: chats are refused"
    yield ok(f"{found['num_tokens']} tokens, {chats}")


@check()
def keys_file(subject: Subject) -> Iterator[Finding]:
    """The API keys: who can read the file, mistakes in it, and whether there are keys of both scopes."""
    path = subject.serving.auth.keys_file
    if path is None:
        yield ok("auth.keys_file is null: nobody needs a key")
        return
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & ~OWNER_ONLY:
        yield problem(f"{path} has mode {mode:04o}: others than its owner may read or change it", f"chmod 600 {path}")
    try:
        keys = load_keys(path)
    except ConfigError as error:
        yield problem(error.message, "correct the file, or make it anew with `baton keys create`")
        return
    missing = [scope for scope in ("generate", "admin") if not any(scope in key.scopes for key in keys)]
    for scope in missing:
        lost = "requests" if scope == "generate" else "`baton status`, `rebalance`, `apply` and metrics over HTTP"
        yield warning(
            f"no key of {path} has the scope {scope}: nobody can use {lost}",
            f"baton keys create --tenant NAME --scope {scope} --file {path}",
        )
    if not missing:
        yield ok(f"{path}: {count_of(len(keys), 'key')}, mode {mode:04o}")


@check()
def disk(subject: Subject) -> Iterator[Finding]:
    """Whether the folders of Ray's files, of logs, of batches and of the journal can be written and have room."""
    config = subject.serving
    folders = {"Ray's files": base_folder()}
    if config.log_dir is not None:
        folders["log_dir"] = Path(config.log_dir)
    if config.router.batch_store is not None:
        folders["router.batch_store"] = Path(config.router.batch_store).parent
    if config.redis is None and (config.state is None or config.router.http_port is not None):
        folders["batches and the journal"] = Path(STATE_FOLDER).expanduser()
    for what, folder in folders.items():
        there = next(parent for parent in (folder, *folder.parents) if _exists(parent))
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            yield problem(f"{folder} ({what}) cannot be written", f"chown or chmod {there}, or name another folder")
            continue
        usage = shutil.disk_usage(there)
        found = f"{folder} ({what}): {format_bytes(usage.free)} free of {format_bytes(usage.total)}"
        if usage.free < _LEAST_FREE_BYTES or usage.used > _MOST_USED * usage.total:
            yield warning(f"{found}; Ray stops writing at {_MOST_USED:.0%}", "free some space, or set TMPDIR elsewhere")
        else:
            yield ok(found, free_bytes=usage.free)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # it lies below a file, or in a folder that may not be read
        return False
