"""GGUF files: what a header says, what a damaged one is refused with, and a model's files as routers read them."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cluster.config.load import parse_config
from cluster.errors import CheckpointError, ConfigError
from cluster.gguf.header import TENSOR_TYPES, GgufHeader, read_header
from cluster.gguf.tokenizer import tokenizer_config, tokenizer_definition
from cluster.model_folder import has_model_file, model_name, read_model_file, weight_files

TEXTS = ("", "to be, or not to be", "  two  spaces\n\nlines\tand 12345 tabs", "naïve Ω 日本 🙂", "it's I'LL don't")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("gguf") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return write_gguf(folder, folder.parent / "tiny.gguf", "Q8_0")


def test_the_types_of_tensors_are_those_of_ggml() -> None:
    for number, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.num_elements, kind.size_bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])


def test_a_header_says_what_the_package_reads(file: Path) -> None:
    header, theirs = read_header(file), gguf.GGUFReader(file)
    assert {name: (t.start, t.size_bytes) for name, t in header.tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes) for t in theirs.tensors
    }
    assert header.metadata["llama.embedding_length"] == 64
    assert header.metadata["tokenizer.ggml.tokens"] == tuple(theirs.fields["tokenizer.ggml.tokens"].contents())


def test_a_file_is_read_again_only_when_it_has_changed(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "m.gguf")
    first = read_header(file)
    assert read_header(file) is first
    write_gguf(folder, file, "F16")
    assert read_header(file).tensors["blk.0.attn_q.weight"].kind.name == "F16"


def test_a_model_has_the_files_of_a_folder(folder: Path, file: Path, tmp_path: Path) -> None:
    config = json.loads(read_model_file(file / "config.json"))
    theirs = json.loads((folder / "config.json").read_text())
    same = ("architectures", "hidden_size", "head_dim", "vocab_size", "num_key_value_heads", "rms_norm_eps")
    assert {key: config[key] for key in same} == {key: theirs[key] for key in same}
    assert read_model_file(file / "tokenizer.json") == (folder / "tokenizer.json").read_bytes()
    assert not has_model_file(file / "generation_config.json") and has_model_file(file / "tokenizer_config.json")
    assert (model_name(file), weight_files(file)) == ("tiny", [file])
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "tiny.gguf").symlink_to(file)
    assert json.loads(read_model_file(alone / "config.json")) == config
    (alone / "other.gguf").symlink_to(file)
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files \(other.gguf and others\); name one of them"):
        read_model_file(alone / "config.json")


def _header(tensors: int = 0, pairs: int = 0, rest: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs) + rest


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _tensor(name: str = "a", dims: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 1 << 60
DAMAGED = {
    "empty": (b"", "0 bytes are no GGUF file"),
    "magic": (_header(magic=b"GGML"), "is no GGUF file"),
    "version": (_header(version=1), "GGUF version 1 is not supported; Baton reads 2 and 3"),
    "byte order": (_header(version=3 << 24), "of the other byte order is not supported"),
    "tensors": (_header(tensors=HUGE), "names 1,152,921,504,606,846,976 tensors at byte 24, and has 24 bytes"),
    "pairs": (_header(pairs=HUGE), "names 1,152,921,504,606,846,976 pairs of metadata"),
    "key": (_header(pairs=1, rest=struct.pack("<Q", HUGE) + bytes(16)), "bytes of a string"),
    "array": (_header(pairs=1, rest=_string("k") + struct.pack("<IIQ", 9, 4, HUGE)), "numbers of k at byte"),
    "strings": (_header(pairs=1, rest=_string("k") + struct.pack("<IIQ", 9, 8, HUGE)), "strings of k at byte"),
    "nested": (_header(pairs=1, rest=_string("k") + struct.pack("<IIQ", 9, 9, 1)), "k is an array of type 9"),
    "value": (_header(pairs=1, rest=_string("k") + struct.pack("<I", 77)), "k has type 77 of metadata"),
    "twice": (_header(pairs=2, rest=2 * (_string("key") + struct.pack("<IB", 7, 1))), "names key twice"),
    "alignment": (_header(pairs=1, rest=_string("general.alignment") + struct.pack("<II", 4, 3)), "a power of two"),
    "type": (_header(tensors=1, rest=_tensor(kind=99)), "tensor a has ggml's type 99, which is not supported"),
    "block": (_header(tensors=1, rest=_tensor(dims=(33, 2), kind=8)), "Q8_0 has blocks of 32"),
    "no dimensions": (_header(tensors=1, rest=_tensor(dims=())), "tensor a has 0 dimensions"),
    "dimensions": (_header(tensors=1, rest=_tensor(dims=(1,) * 5)), "tensor a has 5 dimensions"),
    "zero": (_header(tensors=1, rest=_tensor(dims=(32, 0))), "tensor a has shape [0, 32]"),
    "behind the end": (_header(tensors=1, rest=_tensor(dims=(32, HUGE))), "behind the file's"),
    "overlap": (
        _header(tensors=2, rest=_tensor() + _tensor("b", offset=128) + bytes(512)),
        "tensor b begins at byte 256, within tensor a",
    ),
    "doubled": (_header(tensors=2, rest=2 * _tensor() + bytes(512)), "has two tensors a"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused_by_name_and_at_once(case: str, tmp_path: Path) -> None:
    content, message = DAMAGED[case]
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    begin = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert message in str(caught.value) and str(file) in str(caught.value)
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (_header(pairs=1, rest=_string("k") + struct.pack("<IIQ", 9, 8, 30 << 20)), "k brings arrays to 31,457,280"),
        (_header(pairs=1, rest=_string("k") + struct.pack("<IIQ", 9, 0, 250 << 20)), "k brings arrays to 262,144,000"),
        (_header(pairs=1, rest=struct.pack("<Q", 1 << 29)), "536,870,912 bytes of a string"),
        (_header(tensors=10_000_000), "names 10,000,000 tensors and 0 pairs of metadata; at most 100,000 are read"),
    ],
    ids=["strings", "bytes", "key", "tensors"],
)
def test_counts_that_fit_in_a_sparse_file_are_refused_at_once(start: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(start)
    with file.open("r+b") as opened:
        opened.truncate(100 << 30)
    begin = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert message in str(caught.value)
    assert time.process_time() - begin < 1


def test_a_file_that_ends_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    header_bytes = read_header(file).size_bytes
    cut = tmp_path / "cut.gguf"
    for size in (*range(0, header_bytes, 97), header_bytes, len(whole) - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_header(cut)


def test_random_bytes_in_a_header_raise_nothing_but_refusals(file: Path, tmp_path: Path) -> None:
    whole, rng = bytearray(file.read_bytes()), np.random.default_rng(0)
    changed = tmp_path / "changed.gguf"
    header_bytes = read_header(file).size_bytes
    for _ in range(200):
        damaged = whole.copy()
        for place in rng.integers(0, header_bytes, 3):
            damaged[place] = rng.integers(256)
        changed.write_bytes(damaged)
        for name in ("config.json", "tokenizer.json"):
            try:
                read_model_file(changed / name)
            except CheckpointError as error:
                assert str(changed) in str(error)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture 'mamba' is not supported in GGUF; Baton reads llama, ",
        ),
        ({"split.count": 3}, "is one of 3 parts; join them with `llama-gguf-split --merge` first"),
        ({"llama.expert_count": 8}, "llama.expert_used_count must be a positive integer"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8 is not the heads' size 16"),
        ({"llama.block_count": 0}, "llama.block_count must be a positive integer"),
        (
            {"llama.attention.head_count_kv": [4, 2]},
            "llama.attention.head_count_kv must be a positive integer, the same",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_metadata_that_cannot_be_served_are_refused_with_file_and_key(
    values: dict[str, Any], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(folder, tmp_path / "m.gguf", replaced=values)
    with pytest.raises(CheckpointError) as caught:
        read_model_file(file / "config.json")
    assert f"{file}: " in str(caught.value) and message in str(caught.value)
    with pytest.raises(ConfigError) as refused:  # before anything starts
        parse_config(f"metadata:\n  serving:\n    model:\n      path: {file}\n", "cluster.yaml")
    assert message in str(refused.value)


def test_a_configuration_may_name_a_gguf_file(file: Path) -> None:
    config = parse_config(f"metadata:\n  serving:\n    model:\n      path: {file}\n", "cluster.yaml")
    assert config.model.path == str(file)


def _trained(tokenizer: Tokenizer, alphabet: list[str], special: list[str]) -> Tokenizer:
    text = (Path(__file__).parents[3] / "models/tiny-shakespeare/held_out.txt").read_text()[:20_000]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)  # type: ignore[attr-defined]
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def _file_with(tokenizer: Tokenizer, file: Path, merges_of: dict[str, Any], **fields: Any) -> Path:
    """A GGUF file that has nothing but a tokenizer."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("tokenizer.ggml.tokens", [token for token, _ in vocabulary])
    for key, value in {**merges_of, **fields}.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_byte_level_tokens_are_those_of_the_tokenizer_they_come_from(tmp_path: Path) -> None:
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    split += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for rule, parts in {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "llama-bpe": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    }.items():
        theirs = Tokenizer(models.BPE())
        theirs.pre_tokenizer, theirs.decoder = parts, decoders.ByteLevel()  # type: ignore[assignment]
        _trained(theirs, pre_tokenizers.ByteLevel.alphabet(), ["<end>"])
        merges = [" ".join(pair) for pair in json.loads(theirs.to_str())["model"]["merges"]]
        types = [3 if token == "<end>" else 1 for token in range(theirs.get_vocab_size())]
        types[theirs.token_to_id("<end>")] = 3
        file = _file_with(
            theirs, tmp_path / f"{rule}.gguf", {"merges": merges, "token_type": types}, model="gpt2", pre=rule
        )
        ours = Tokenizer.from_str(tokenizer_definition(read_header(file)).decode())
        for text in (*TEXTS, "a<end>b"):
            assert ours.encode(text).ids == theirs.encode(text).ids, (rule, text)
            assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def test_pieces_of_sentencepiece_are_merged_in_the_order_of_their_scores(tmp_path: Path) -> None:
    theirs = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    theirs.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE())
    trained.normalizer = theirs.normalizer
    _trained(trained, ["▁"], special)
    content = json.loads(trained.to_str())
    model = {
        **json.loads(theirs.to_str())["model"],
        "vocab": content["model"]["vocab"],
        "merges": content["model"]["merges"],
    }
    added = [each for each in content["added_tokens"] if each["content"] in special[:3]]
    theirs = Tokenizer.from_str(json.dumps({**json.loads(theirs.to_str()), "model": model, "added_tokens": added}))
    vocabulary = [token for token, _ in sorted(model["vocab"].items(), key=lambda entry: entry[1])]
    ranks = {"".join(pair): rank for rank, pair in reversed(list(enumerate(model["merges"])))}
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    types = [kinds.get(token, 6 if token in special else 1) for token in vocabulary]
    scores = [-float(ranks.get(token, 1e6)) for token in vocabulary]
    ends = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    file = _file_with(theirs, tmp_path / "m.gguf", {"scores": scores, "token_type": types}, model="llama", **ends)
    ours = Tokenizer.from_str(tokenizer_definition(read_header(file)).decode())
    for text in (*TEXTS[1:], "<s>to</s> be"):
        assert ours.encode(text).ids == [1, *theirs.encode(text).ids], text
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model": "gpt2", "pre": "starcoder"},
            "tokenizer.ggml.pre 'starcoder' is not supported; Baton splits text as gpt-2",
        ),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; Baton reads gpt2 and llama"),
        ({"model": "llama"}, "has no tokenizer.ggml.scores, which its tokenizer needs"),
        ({"model": "llama", "scores": [0.5]}, "tokens and 1 scores"),
        ({"model": "llama", "token_type": [1]}, "tokens and 1 token_type"),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_be_read_is_refused_by_name(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    theirs = _trained(Tokenizer(models.BPE()), ["a"], ["<end>"])
    file = _file_with(theirs, tmp_path / "m.gguf", {}, **fields)
    with pytest.raises(CheckpointError) as caught:
        tokenizer_definition(read_header(file))
    assert message in str(caught.value)


def test_factors_of_rope_that_are_zero_are_refused(tmp_path: Path) -> None:
    file = write_gguf(make_checkpoint("llama3-rope", tmp_path / "model"), tmp_path / "m.gguf")
    tensor = read_header(file).tensors["rope_freqs.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.start : tensor.start + tensor.size_bytes] = bytes(tensor.size_bytes)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is not Llama 3's scaling of rope"):
        read_model_file(file / "config.json")


def test_scores_that_are_words_are_refused_by_their_key(folder: Path, tmp_path: Path) -> None:
    tokens = ("a", "b")
    replaced = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": ("x", "y")}
    header = read_header(write_gguf(folder, tmp_path / "m.gguf"))
    metadata = {**header.metadata, **replaced}
    metadata.pop("tokenizer.huggingface.json")
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.scores must be numbers \(are 'x' and others\)"):
        tokenizer_definition(replace(header, metadata=metadata))


def test_a_file_may_hold_several_chat_templates() -> None:
    named = {"tokenizer.chat_templates": ("tool_use",), "tokenizer.chat_template.tool_use": "with tools"}
    header = GgufHeader(Path("m.gguf"), {"tokenizer.chat_template": "plain", **named}, {}, 0)
    assert tokenizer_config(header)["chat_template"] == {"default": "plain", "tool_use": "with tools"}
