"""The committed stubs are what proto/ gives, and the public contract is the one that was agreed."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.pb import generation_pb2

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "cluster" / "pb"


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    protos = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "proto").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Icluster/pb=proto", f"--python_out={out}"]
    command += [f"--pyi_out={out}", f"--grpc_python_out={out}", *protos]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    return out / "cluster" / "pb"


def test_the_committed_stubs_equal_freshly_generated_ones(regenerated: Path) -> None:
    fresh = {p.name: p.read_text("utf-8") for p in regenerated.iterdir()}
    committed = {p.name: p.read_text("utf-8") for p in STUBS.glob("*_pb2*")}
    assert sorted(committed) == sorted(fresh), "cluster/pb and proto/ name different files; run `make proto`"
    stale = [name for name, text in fresh.items() if committed[name] != text]
    assert not stale, f"{stale} differ from proto/; run `make proto` and commit the result"


def contract_lines() -> list[str]:
    """The .proto without comments and blank lines: what the contract fixes, not how it is explained."""
    text = (ROOT / "proto" / "generation.proto").read_text("utf-8")
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return [" ".join(line.split()) for line in bare.splitlines() if line.strip()]


def test_the_public_contract_is_unchanged() -> None:
    digest = hashlib.sha256("\n".join(contract_lines()).encode()).hexdigest()
    assert digest == "ffcd928da6ba36b82f81d306b61562f3c4bf9cce220ae88d10c536d0fec1447c", (
        "proto/generation.proto no longer says what clients were promised; a change of the contract needs a new package"
    )


def test_the_public_package_and_its_methods_are_those_of_the_contract() -> None:
    file = generation_pb2.DESCRIPTOR
    assert file.package == "baton.v1"
    assert sorted(file.services_by_name["GenerationService"].methods_by_name) == [
        "CancelGeneration",
        "Detokenize",
        "Generate",
        "GenerateStream",
        "GetModel",
        "ListModels",
        "Tokenize",
    ]


def test_every_scalar_of_sampling_tells_unset_from_zero() -> None:
    without = [f.name for f in generation_pb2.SamplingParams.DESCRIPTOR.fields if not f.has_presence]
    assert without == ["logit_bias", "allowed_token_ids", "bad_words"]
