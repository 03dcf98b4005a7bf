"""What is read from config.json and generation_config.json, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import KINDS, make_checkpoint
from engine_steps import make_runner

from cluster.errors import CheckpointError, ConfigError
from engine.models.config import ModelConfig
from engine.models.folder import read_model
from engine.models.tensors import check_folder
from engine.tensor_files import INDEX_NAME


def _edit(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in drop}))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path)


def test_what_a_model_computes_beyond_all_others_is_a_feature(tmp_path: Path) -> None:
    features = {kind: read_model(make_checkpoint(kind, tmp_path / kind)).features for kind in KINDS}

    assert features["llama"] == features["llama3-rope"] == frozenset()
    assert features["mistral"] == {"layer_windows"}
    assert "attention_bias" in features["qwen2"] and "qk_norm" in features["qwen3"]


def test_a_field_that_a_new_family_brings_is_a_feature_unless_it_says_none_or_false(llama: Path) -> None:
    @dataclass(frozen=True)
    class StrangeConfig(ModelConfig):
        strangeness: float | None = None
        has_extra_norm: bool = False

    plain = StrangeConfig(**vars(read_model(llama)))

    assert plain.features == frozenset()
    assert replace(plain, strangeness=30.0, has_extra_norm=True).features == {"strangeness", "has_extra_norm"}


def test_the_fields_of_a_folder_are_read(tmp_path: Path) -> None:
    config = read_model(make_checkpoint("qwen3", tmp_path, dtype="bfloat16"))

    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (64, 8, 4)
    assert (config.head_dim, config.num_hidden_layers, config.vocab_size) == (16, 4, 320)
    assert config.qk_norm and not config.attention_bias and config.dtype == "bfloat16"
    assert config.eos_token_ids == (0,)


def test_rope_as_transformers_4_wrote_it_equals_rope_as_transformers_5_writes_it(tmp_path: Path) -> None:
    folder = make_checkpoint("llama3-rope", tmp_path)
    new = read_model(folder)
    scaling = dict(json.loads((folder / "config.json").read_text())["rope_parameters"])
    theta = scaling.pop("rope_theta")

    old = read_model(_edit(folder, ("rope_parameters",), rope_theta=theta, rope_scaling=scaling))

    assert old == new
    assert new.rope.rope_type == "llama3" and new.rope.factor == 8.0


def test_the_oldest_spelling_of_a_rope_type_is_read(llama: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}

    config = read_model(_edit(llama, ("rope_parameters",), rope_theta=5e5, rope_scaling=scaling))

    assert (config.rope.rope_type, config.rope.factor, config.rope.rope_theta) == ("linear", 2.0, 5e5)


def test_mistral_slides_on_every_layer_and_llama_on_none(tmp_path: Path) -> None:
    mistral = read_model(make_checkpoint("mistral", tmp_path / "mistral"))
    llama = read_model(_edit(make_checkpoint("llama", tmp_path / "llama"), sliding_window=24))

    assert mistral.layer_windows == (24,) * 4
    assert llama.layer_windows == (None,) * 4


def test_qwen_slides_only_where_its_config_says(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    by_number = {"sliding_window": 20, "max_window_layers": 3}
    types = ["sliding_attention", "full_attention"] * 2

    assert read_model(_edit(folder, **by_number)).layer_windows == (None,) * 4
    named = read_model(_edit(folder, use_sliding_window=True, layer_types=types))
    assert named.layer_windows == (20, None, 20, None)
    numbered = read_model(_edit(folder, drop=("layer_types",)))
    assert numbered.layer_windows == (None, None, None, 20)


def test_end_of_text_ids_come_from_the_generation_config_first(llama: Path) -> None:
    (llama / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_model(llama).eos_token_ids == (7, 9)

    (llama / "generation_config.json").unlink()
    assert read_model(llama).eos_token_ids == (0,)


def test_a_head_dim_that_is_absent_follows_from_the_heads(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, head_dim=8)

    assert read_model(_edit(folder, drop=("head_dim",))).head_dim == 64 // 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM' is not supported; Baton serves LlamaForCausalLM"),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
            "'OwnForCausalLM' is computed by code that the checkpoint brings along (auto_map), which Baton never runs",
        ),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer (got '64')"),
        ({"vocab_size": True}, "vocab_size must be a positive integer (got True)"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number (got -1.0)"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false (got 'no')"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"dtype": None, "torch_dtype": 0}, "torch_dtype '0' is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 8"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor must be a positive number (got None)"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object (got [1])"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10,000 (got 1000000000)"),
        ({"vocab_size": 2**31}, "vocab_size must be at most 2,147,483,647 (got 2147483648)"),
        ({"hidden_size": 10**400}, "hidden_size must be at most 2,147,483,647 (got a number of 401 digits)"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be at most 1e+30 (got a number of 401 digits)"),
        ({"eos_token_id": 10**30}, "eos_token_id must be a token id or a list of them"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}},
            "rope_theta must be more than 1 with yarn (got 1.0)",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor must be more than low_freq_factor 4.0 (got 4.0)",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(llama: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model(_edit(llama, **changes), "native")
    assert message in str(caught.value) and "config.json" in str(caught.value)


def test_unknown_layer_types_and_windows_are_refused(tmp_path: Path) -> None:
    folder = _edit(make_checkpoint("qwen3", tmp_path), use_sliding_window=True, sliding_window=8)
    for types in (["chunked_attention"] * 4, [["full_attention"]] * 4, [None] * 4):
        with pytest.raises(CheckpointError, match="layer_types must name 4 of"):
            read_model(_edit(folder, layer_types=types))
    with pytest.raises(CheckpointError, match="max_window_layers must be an integer from 0 on"):
        read_model(_edit(folder, layer_types=None, max_window_layers="all"))


def test_gemma_as_transformers_4_wrote_it_equals_gemma_as_transformers_5_writes_it(tmp_path: Path) -> None:
    """Defaults are left out, ropes have other names, and layers with a window follow a pattern."""
    new = read_model(make_checkpoint("gemma3", tmp_path / "5"))
    old = _edit(
        make_checkpoint("gemma3", tmp_path / "4"),
        drop=("rope_parameters", "layer_types", "tie_word_embeddings", "final_logit_softcapping"),
        rope_theta=1_000_000.0,
        rope_local_base_freq=10000,
        sliding_window_pattern=3,
    )

    assert read_model(old) == new
    assert new.layer_windows == (24, 24, None, 24, 24, None, 24) and new.tie_word_embeddings
    assert [rope.rope_theta for rope in new.layer_ropes] == [1e4, 1e4, 1e6, 1e4, 1e4, 1e6, 1e4]
    assert new.rope.rope_theta == 1e6 and len(new.ropes) == 2

    gemma2 = read_model(make_checkpoint("gemma2", tmp_path / "2"))
    assert gemma2.layer_windows == (24, None) * 2 and gemma2.layer_ropes == ()
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.attention_scale) == (5.0, 30.0, 24.0**-0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer"),
    ],
)
def test_a_gemma_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model(_edit(make_checkpoint("gemma3", tmp_path), **changes))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, "rope_type 'llama3' is not supported for Phi-3"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "short_factor must be a list of positive numbers"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": []}},
            "short_factor has 0 numbers; there are 4 pairs",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [float("inf")] * 4}},
            "short_factor must be a list of positive numbers",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "su", "short_factor": [1.0]}},
            "short_factor has 1 numbers; there are 4 pairs",
        ),
        ("glm4", {"partial_rotary_factor": 1.5, "rope_parameters": None}, "partial_rotary_factor must be at most 1"),
        ("glm4", {"partial_rotary_factor": 0.2, "rope_parameters": None}, "partial_rotary_factor 0.2 turns 3 of 16"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have a 0 or 1 for 4 layers (got [1, 0])"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types must name 4 of"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a positive number (got 0)"),
    ],
    ids=str,
)
def test_an_option_of_a_family_that_is_not_computed_is_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model(_edit(make_checkpoint(kind, tmp_path), **changes))
    assert message in str(caught.value) and "config.json" in str(caught.value)


def test_longrope_is_served_up_to_the_original_context(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    folder = _edit(make_checkpoint("phi3", tmp_path), original_max_position_embeddings=512, rope_parameters=rope)
    config = read_model(folder)
    assert config.max_position_embeddings == 512
    assert (config.rope.rope_type, config.rope.factor) == ("longrope", 4.0)


def test_soft_caps_are_refused_where_attention_does_not_take_them(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma2", tmp_path)

    with pytest.raises(ConfigError, match="varlen takes no soft caps, which this model has; use auto or cpu"):
        make_runner(folder, attention="varlen")


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        read_model(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX_NAME, "model.safetensors"])
def test_what_is_no_file_or_far_too_large_is_refused_at_once(name: str, llama: Path) -> None:
    (llama / name).unlink(missing_ok=True)
    os.mkfifo(llama / name)
    with pytest.raises(CheckpointError, match=f"{name}: .*no such file|{name}: is a directory, pipe or device"):
        check_folder(llama)
    (llama / name).unlink()
    with (llama / name).open("wb") as file:
        file.truncate(100 << 30)
    with pytest.raises(CheckpointError, match=f"{name}: (has 107,374,182,400 bytes|truncated)"):
        check_folder(llama)


def test_a_config_that_is_nested_deeply_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text('{"hidden_size": ' + "[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        check_folder(llama)


def test_a_tensor_parallel_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(llama: Path) -> None:
    config = read_model(llama)

    with pytest.raises(ConfigError, match=r"tensor_parallel: 3 does not divide 8 .*; use 1, 2, 4 or 8"):
        config.check_tp_size(3)


def test_kv_heads_are_split_over_few_ranks_and_replicated_over_many(llama: Path) -> None:
    config = read_model(llama)

    assert [config.kv_head_range(rank, 2) for rank in range(2)] == [range(2), range(2, 4)]
    assert [config.kv_head_range(rank, 8).start for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
