"""Model folders and GGUF files with random damage are served or refused by Baton's own errors, and at once."""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from gguf_files import write_gguf

from cluster.errors import BatonError
from cluster.gguf.header import read_header
from engine.models.tensors import check_folder
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer

CASES = 300
LIMIT_S = 2.0
"""Seconds of processor time; a refusal takes milliseconds."""
PIECES = [b"null", b"NaN", b"-1", b"1e999", b"9" * 50, b"[[[[", b'"\\ud800"', b"\xff", b"\0", b"2147483648", b'{"a":1}']
VALUES = [None, float("nan"), -1, 0, 10**30, 2**31, "x", "", [], {}, [1], {"a": 1}, True, 1.5, "\ud800", [None], 1e-320]


def _damaged(content: bytes, end: int, rng: random.Random) -> bytes:
    """`content` with a few bits, bytes or pieces changed before `end`, or cut off there."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(max(1, min(end, len(damaged))))
        match rng.randrange(5):
            case 0 if damaged:
                damaged[at] ^= 1 << rng.randrange(8)
            case 1:
                del damaged[at : at + rng.randrange(1, 20)]
            case 2:
                damaged[at:at] = rng.choice(PIECES)
            case 3:
                del damaged[at:]
            case _:
                damaged[at : at + 8] = rng.randbytes(8)
    return bytes(damaged)


def _with_another_value(content: bytes, rng: random.Random) -> bytes:
    """JSON in which one value is another, at any depth."""
    document = json.loads(content)
    places: list[tuple[Any, Any]] = []
    left = [document]
    while left:
        value = left.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        places += [(value, key) for key in keys]
        left += [value[key] for key in keys]
    holder, key = rng.choice(places)
    holder[key] = rng.choice(VALUES)
    return json.dumps(document).encode()


def _look_at(model: Path) -> int:
    """Reads a model as workers and routers do before they start; returns how many of them refused it."""
    refused = 0
    for read in (
        lambda: check_folder(model, "native"),
        lambda: Tokenizer.from_folder(model),
        lambda: ServedModel.from_folder(model, name="", max_model_len=None, max_num_seqs=1),
    ):
        begin = time.process_time()
        try:
            read()
        except BatonError:
            refused += 1
        assert time.process_time() - begin < LIMIT_S
    return refused


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_a_folder_with_random_damage_is_served_or_refused(shard_size: str, tmp_path: Path) -> None:
    whole = make_checkpoint("llama", tmp_path / "whole", shard_size=shard_size)
    names = sorted(path.name for path in whole.iterdir() if path.suffix in (".json", ".safetensors"))
    model, rng, refused = shutil.copytree(whole, tmp_path / "model"), random.Random(0), 0
    for _ in range(CASES):
        name = rng.choice(names)
        content = (whole / name).read_bytes()
        if name.endswith(".json") and rng.random() < 0.6:
            changed = _with_another_value(content, rng)
        else:
            end = len(content) if name.endswith(".json") else 8 + struct.unpack("<Q", content[:8])[0]
            changed = _damaged(content, end, rng)
        (model / name).write_bytes(changed)
        refused += _look_at(model) > 0
        (model / name).write_bytes(content)
    assert refused > CASES // 3
    assert _look_at(model) == 0


def test_a_gguf_file_with_random_damage_is_served_or_refused(tmp_path: Path) -> None:
    whole = write_gguf(make_checkpoint("llama", tmp_path / "model"), tmp_path / "whole.gguf")
    content, end, rng, refused = whole.read_bytes(), read_header(whole).size_bytes, random.Random(0), 0
    for number in range(CASES):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(_damaged(content, end, rng))
        refused += _look_at(file) > 0
        file.unlink()
    assert refused > CASES // 3
    assert _look_at(whole) == 0
