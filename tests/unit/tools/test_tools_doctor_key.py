"""`baton doctor` and the file with the key that encrypts KV."""

from __future__ import annotations

from pathlib import Path

from doctored import ask_here as ask
from doctored import the_warning, write_config

from tools.doctor.check import CheckResult, Result


def test_a_key_file_that_workers_would_refuse_and_keys_that_differ_are_named(tmp_path: Path) -> None:
    def look(**engine: object) -> CheckResult:
        below = {"kv_host_bytes": 1_000_000, "kv_store_bytes": 1_000_000, "kv_store_path": str(tmp_path / "kv")}
        roles = {"decode": {"engine": {"kv_key_file": str(tmp_path / "other")}}} if engine.pop("differ", False) else {}
        path = write_config(tmp_path, engine={**below, "kv_key_file": str(tmp_path / "key"), **engine}, roles=roles)
        return ask(path, "kv-key")["kv-key"]

    key, other = tmp_path / "key", tmp_path / "other"
    refused = ((None, 0, "cannot be read"), (b"short", 0o600, "got 5"), (bytes(32), 0o644, "chmod 600"))
    for content, mode, why in refused:
        if content is not None:
            key.write_bytes(content)
            key.chmod(mode)
        problems = [finding for finding in look().findings if finding.result is Result.PROBLEM]
        assert len(problems) == 2 and why in problems[0].found and "umask 077" in str(problems[0].remedy)
    key.chmod(0o600)
    other.write_bytes(b"x" * 33)
    other.chmod(0o600)
    assert look().result is Result.OK
    assert "the roles have different keys" in the_warning(look(differ=True)).found
    unused = look(kv_store_bytes=0)
    assert unused.result is Result.WARNING and "nothing is encrypted with it" in unused.findings[0].found
    assert look(kv_key_file=None).result is Result.SKIPPED
