"""`baton doctor` as a program: its table, its document, its exit codes, and that nothing holds it up."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import psutil
import pytest
from doctored import ask, the_problem, write_config
from scripted_router import ROOT, baton

from tools.doctor.catalogue import CHECKS, render_reference
from tools.doctor.check import Check, CheckResult, Finding, Half, Result, examine, exit_code, ok
from tools.doctor.subject import DoctorOptions, Subject

NAMES = [r.value for r in Result]
FINDING = {
    "result": {"enum": NAMES},
    "found": {"type": "string", "minLength": 1},
    "remedy": {"type": ["string", "null"]},
    "values": {"type": "object"},
}
SCHEMA = {
    "type": "object",
    "required": ["version", "config", "address", "result", "counts", "checks"],
    "additionalProperties": False,
    "properties": {
        "version": {"type": ["string", "null"]},
        "config": {"type": "string"},
        "address": {"type": ["string", "null"]},
        "result": {"enum": NAMES},
        "counts": {
            "type": "object",
            "required": [r.value for r in Result],
            "additionalProperties": {"type": "integer"},
        },
        "checks": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "half", "result", "seconds", "findings"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "half": {"enum": ["here", "cluster"]},
                    "result": {"enum": NAMES},
                    "seconds": {"type": "number", "minimum": 0},
                    "findings": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": list(FINDING),
                            "additionalProperties": False,
                            "properties": FINDING,
                        },
                    },
                },
            },
        },
    },
}


def test_a_machine_that_is_well_has_no_problem_and_its_document_keeps_to_the_schema(tmp_path: Path) -> None:
    done = baton("doctor", str(write_config(tmp_path)), "--json", "--limit", "100")
    document = json.loads(done.stdout)
    jsonschema.validate(document, SCHEMA)
    assert (done.exit_code, document["counts"]["problem"]) == (0, 0), done.stdout
    assert [check["name"] for check in document["checks"]] == [check.name for check in CHECKS]
    by_name = {check["name"]: check for check in document["checks"]}
    told = by_name["model"]["findings"][0]["values"]
    assert (told["num_files"], told["size_bytes"]) == (
        1,
        (ROOT / "models/tiny-shakespeare/model.safetensors").stat().st_size,
    )
    assert by_name["router"]["findings"][0]["found"].startswith("no address of a router is known")
    assert {by_name[name]["result"] for name in ("redis", "nccl", "disaggregation")} == {"skipped"}


def test_the_table_shows_each_check_and_the_remedy_below_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the file that is found where none is named."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.yaml"
    path.write_text("metadata:\n  serving:\n    model: {path: nowhere}\n    routr: {}\n")
    done = baton("doctor", "--limit", "100")
    text = " ".join(done.stdout.split())
    assert done.exit_code == 3
    assert f"{path}:3:19: metadata.serving.model.path: no such folder: {tmp_path / 'nowhere'}" in text
    assert f'{path}:4:5: metadata.serving.routr: unknown key; did you mean "router"?' in text
    assert "→ correct the file at the line and column named" in text
    assert all(check.name in done.stdout for check in CHECKS)
    assert text.endswith("1 problem, 0 warnings, 2 ok, 28 skipped")


# what hangs or fails holds nobody up


def test_a_torch_that_cannot_be_loaded_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setattr("cluster.program.SOURCE_ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outcomes = ask(write_config(tmp_path), "programs", "model", "device", "attention", "tokenizer")
    assert "libcudart.so.13: cannot open shared object file" in the_problem(outcomes["programs"]).found
    assert [outcomes[name].result for name in ("model", "device", "attention")] == [Result.SKIPPED] * 3
    assert outcomes["tokenizer"].result is Result.OK


def test_a_torch_that_hangs_is_killed_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.setattr("cluster.program.SOURCE_ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    began = time.monotonic()
    outcomes = ask(write_config(tmp_path), "programs", "device", limit_s=2.0)
    assert time.monotonic() - began < 20
    assert outcomes["programs"].result is Result.PROBLEM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_file_that_is_never_read_to_its_end_is_named_in_time(tmp_path: Path) -> None:
    """As on a file system whose server is gone: a pipe into which nobody writes."""
    pipe = tmp_path / "cluster.yaml"
    os.mkfifo(pipe)
    outcomes = ask(pipe, "configuration", "ports", limit_s=1.0)
    assert the_problem(outcomes["configuration"]).found.endswith("cannot be read within 0.5 s")
    assert outcomes["ports"].result is Result.SKIPPED
    with pipe.open("w"):  # lets the thread that reads it end
        pass


def test_files_of_tls_that_cannot_be_used_leave_no_process_behind(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    nothing = tmp_path / "none.pem"
    done = baton("doctor", str(write_config(tmp_path)), "--tls-ca", str(nothing), "--address", "127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (3, "")
    assert f"{nothing}: cannot be read" in done.stderr
    assert set(psutil.Process().children()) <= before


def test_a_check_that_hangs_or_breaks_is_a_finding_and_the_others_go_on(tmp_path: Path) -> None:
    released = threading.Event()

    def hang(_: Subject) -> Iterator[Finding]:
        released.wait()
        yield ok("late")

    def break_down(_: Subject) -> Iterator[Finding]:
        yield ok("so far")
        raise ZeroDivisionError("by nothing")

    checks = [
        Check("hangs", "", hang),
        Check("breaks", "", break_down),
        Check("goes-on", "", lambda _: iter([ok("well")])),
    ]
    outcomes = examine(DoctorOptions(write_config(tmp_path), limit_s=0.5), checks)
    released.set()
    assert [o.result for o in outcomes] == [Result.PROBLEM, Result.PROBLEM, Result.OK]
    assert outcomes[0].findings[0].found == "it did not end within 0.5 s"
    assert outcomes[1].findings[1].found == "the check itself failed: ZeroDivisionError: by nothing"
    assert [o.check.name for o in outcomes] == ["hangs", "breaks", "goes-on"]


@pytest.mark.parametrize("kind", ["nobody", "silent"])
def test_an_address_at_which_no_router_answers_is_named_in_time(tmp_path: Path, nobody: str, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        address = nobody
        if kind == "silent":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        outcomes = ask(write_config(tmp_path), "router", "workers", "disaggregation", address=address, limit_s=2.0)
        assert time.monotonic() - began < 15
    found = the_problem(outcomes["router"])
    assert address in found.found and "baton serve" in found.remedy
    assert outcomes["workers"].findings[0].found == "no cluster answers; see `router`"
    assert exit_code(outcomes.values()) == 4


def test_exit_codes_put_the_configuration_first() -> None:
    def outcome(name: str) -> CheckResult:
        check = next(c for c in CHECKS if c.name == name)
        return CheckResult(check, (Finding(Result.PROBLEM, "x", "y"),), 0.0)

    assert exit_code([outcome("ports")]) == 1
    assert exit_code([outcome("ports"), outcome("router")]) == 4
    assert exit_code([outcome("router"), outcome("ports"), outcome("model")]) == 3
    assert exit_code([CheckResult(CHECKS[0], (ok("x"),), 0.0)]) == 0


def test_the_page_of_docs_is_the_one_that_the_code_makes() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert page == render_reference(), "run: python -m tools.doctor.catalogue > docs/doctor.md"
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(f"| {result.value} |" in page for result in Result)
    assert all(check.half is Half.CLUSTER for check in CHECKS if check.is_probe)
