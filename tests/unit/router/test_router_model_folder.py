"""What the router reads from a model folder: tokenizer, defaults, chat template, and what it says of a bad one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from router_harness import EOS, MAX_MODEL_LEN, ids, make_model_folder

from cluster.errors import CheckpointError, ConfigError, FailedPrecondition, InvalidRequest
from router.api.chat import Chat
from router.api.chat_forms import ChatForms
from router.api.chat_template import ChatTemplate
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer
from router.examine import examine

USER = [{"role": "user", "content": "hi"}]


def model_of(folder: Path, max_model_len: int | None = None, max_num_seqs: int = 64) -> ServedModel:
    return ServedModel.from_folder(folder, name="", max_model_len=max_model_len, max_num_seqs=max_num_seqs)


def test_names_and_limits_come_from_the_folder(tmp_path: Path) -> None:
    model = model_of(make_model_folder(tmp_path / "tiny"))
    assert (model.name, model.max_model_len, model.eos_token_ids) == ("tiny", MAX_MODEL_LEN, (EOS,))
    assert model.max_sequences == 16
    assert model_of(tmp_path / "tiny", max_model_len=64, max_num_seqs=4).max_sequences == 4


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    model = model_of(make_model_folder(tmp_path, do_sample=True, temperature=0.5, top_k=9, eos_token_id=[3, 4]))
    assert (model.defaults.temperature, model.defaults.top_k, model.eos_token_ids) == (0.5, 9, (3, 4))
    greedy = model_of(make_model_folder(tmp_path, do_sample=False, temperature=0.5))
    assert greedy.defaults.temperature == 0.0
    assert model_of(make_model_folder(tmp_path)).defaults.temperature == 1.0


def test_a_context_longer_than_the_models_is_a_bad_setting(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    with pytest.raises(ConfigError, match=f"{MAX_MODEL_LEN} \\(got {MAX_MODEL_LEN + 1}\\)"):
        model_of(folder, max_model_len=MAX_MODEL_LEN + 1)


def test_a_context_is_found_by_the_name_that_gpt_2_has_for_it(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["n_positions"] = config.pop("max_position_embeddings")
    (folder / "config.json").write_text(json.dumps(config))
    assert model_of(folder).max_model_len == MAX_MODEL_LEN


@pytest.mark.parametrize("place", ["config", "rope"])
def test_with_longrope_the_context_is_what_workers_serve(place: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    rope: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 131_072}
    (config if place == "config" else rope)["original_max_position_embeddings"] = 64
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    assert model_of(folder).max_model_len == 64
    with pytest.raises(ConfigError, match="64"):
        model_of(folder, max_model_len=65)


def test_end_tokens_that_generation_config_leaves_null_are_those_of_the_config(tmp_path: Path) -> None:
    assert model_of(make_model_folder(tmp_path, eos_token_id=None)).eos_token_ids == (EOS,)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", '{"vocab_size": "many", "max_position_embeddings": 8}', "vocab_size"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template does not compile"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str, says: str) -> None:
    folder = make_model_folder(tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=says):
        model_of(folder)
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"])
@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, True, math.nan, math.inf, 10**400])
def test_a_default_that_is_no_number_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} must be a (positive integer|number)"):
        model_of(make_model_folder(tmp_path, **{name: value}))


@pytest.mark.parametrize("value", ["x", 1.5, True, -1, [1, None], {"a": 1}, 10**400])
def test_end_tokens_that_are_none_are_refused_by_name(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be a token id or a list"):
        model_of(make_model_folder(tmp_path, eos_token_id=value))


def test_a_context_that_no_message_holds_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 10**30}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="max_position_embeddings must be a positive integer"):
        model_of(folder)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    (make_model_folder(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_offsets_are_characters_of_the_text(tmp_path: Path) -> None:
    encoded = Tokenizer.from_folder(make_model_folder(tmp_path)).encode("aé", add_special_tokens=True)
    assert list(encoded.token_ids) == ids("aé") and encoded.offsets == ((0, 1), (1, 2), (1, 2))


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special)


def test_a_template_file_wins_over_the_tokenizers_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    chosen = ChatTemplate.from_folder(tmp_path, {"chat_template": "from the config"})
    assert chosen.render(Chat(USER, [], {})) == "from the file"


TWO = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": json.dumps({"chat_template": TWO})},
        {"chat_template.json": json.dumps({"chat_template": {each["name"]: each["template"] for each in TWO}})},
        {
            "chat_template.jinja": "plain",
            "additional_chat_templates/tool_use.jinja": TWO[1]["template"],
            "additional_chat_templates/rag.jinja": "<tool_call> of nobody",
            "chat_template.json": '{"chat_template": "not read"}',
        },
    ],
)
def test_of_several_templates_tools_choose_their_own(tmp_path: Path, files: dict[str, str]) -> None:
    make_model_folder(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    chosen = Tokenizer.from_folder(tmp_path).chat_template
    assert chosen.render(Chat(USER, [{"name": "f"}], {})) == "1 tools"
    assert chosen.render(Chat(USER, [], {})) == "plain"
    assert "<tool_call>" not in chosen.source


def test_a_chat_may_name_another_template_of_the_model() -> None:
    chosen = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "{{ messages[0].content }} {{ k }}"}, {})
    tools = [{"name": "f"}]
    assert chosen.render(Chat(USER, tools, {"chat_template": "rag", "k": 1})) == f"{USER[0]['content']} 1"
    assert chosen.render(Chat(USER, tools, {"chat_template": "default"})) == "plain"
    for wrong in ("{{ messages }}", "", 1, ["rag"]):
        with pytest.raises(
            InvalidRequest, match=r"template_kwargs.chat_template: must name .*: default, rag, tool_use"
        ):
            chosen.render(Chat(USER, [], {"chat_template": wrong}))


def test_a_template_for_tools_alone_asks_for_them() -> None:
    chosen = ChatTemplate({"tool_use": "{{ tools | length }} tools"}, {})
    assert chosen.render(Chat(USER, [{"name": "f"}], {})) == "1 tools"
    with pytest.raises(InvalidRequest, match="only chat template is tool_use: give tools"):
        chosen.render(Chat(USER, [], {}))


def test_a_file_that_is_named_replaces_all_templates_and_tells_the_format(tmp_path: Path) -> None:
    folder, file = make_model_folder(tmp_path / "tiny"), tmp_path / "own.jinja"
    (folder / "chat_template.jinja").write_text("the model's {{ tools }}<|tool_call_begin|>")
    file.write_text("{{ bos_token }}own <seed:tool_call><function= {{ tools }}<seed:think>")
    forms = ChatForms(Tokenizer.from_folder(folder, str(file)))
    assert forms.tool_format is not None and forms.tool_format.name == "seed_oss"
    assert forms.thinking is not None and forms.thinking.name == "seed"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", ", line 2: unexpected '}': {{ m.content }"),
        ("a\n{{ messages | tojsn }}", ", line 2: No filter named 'tojsn'.: {{ messages | tojsn }}"),
        ("{% if x %}", ", line 1: Unexpected end of template"),
        ("{{" + "(" * 9999, ": it nests too deep"),
    ],
)
def test_a_template_that_does_not_compile_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    folder, file = make_model_folder(tmp_path / "tiny"), tmp_path / "own.jinja"
    file.write_text(text)
    told = examine(folder, str(file))["refused"]
    assert told.startswith(f"{file}: the chat template does not compile{says}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [TWO[0], {**TWO[1], "template": text}]}))
    assert "tokenizer_config.json, template tool_use: the chat template does not compile" in examine(folder)["refused"]


@pytest.mark.parametrize("given", [7, [1], [{"name": "default"}], {"default": None}])
def test_a_template_that_is_no_text_is_refused(tmp_path: Path, given: object) -> None:
    (make_model_folder(tmp_path) / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template must be a text, or a list of"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "own.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"own.jinja: is not UTF-8 text \(byte 0\)"):
        Tokenizer.from_folder(tmp_path, str(tmp_path / "own.jinja"))


def test_a_template_sees_what_hugging_face_gives_it() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ tools }}{% if add_generation_prompt %}>{% endif %}{{ style }}"
    )
    rendered = template(source, bos_token="<s>").render(Chat([*USER, *USER], [], {"style": "é"}))
    assert rendered == '<s>{"role": "user", "content": "hi"}None>é'
    assert template(source).render(Chat(USER, [], {"add_generation_prompt": False})).endswith("None")


def test_a_special_token_may_be_written_as_an_object(tmp_path: Path) -> None:
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "pad_token": None, "chat_template": "{{ bos_token }}"}
    assert ChatTemplate.from_folder(tmp_path, config).render(Chat(USER, [], {})) == "<s>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        template(source).render(Chat(USER, [], {}))
    assert refusal.value.violations[0].field == "spec.chat"


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, chat_template=None)
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"eos_token": "<|end|>"}
    with pytest.raises(FailedPrecondition, match="no chat template"):
        Tokenizer.from_folder(folder).encode_prompt(Chat(USER, [], {}))
