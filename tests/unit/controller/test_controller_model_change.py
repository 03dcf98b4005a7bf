"""Which folders workers may change to while the cluster runs: only weights may differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from admin_world import ReconfigurerStage
from workers import ROOT

from cluster.config.schema import ModelSection
from cluster.errors import FailedPrecondition
from controller.events import EventKind
from controller.model_change import refuse_other_model

BUNDLED = ROOT / "models" / "tiny-shakespeare"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def revisions(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of one model, whose weights are another file each."""
    folders = tmp_path / "old" / "model", tmp_path / "new" / "model"
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        for name in FILES:
            shutil.copy(BUNDLED / name, folder)
        (folder / "model.safetensors").write_bytes(bytes([number]))
    return folders


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def model_of(folder: Path, name: str | None = None) -> ModelSection:
    return ModelSection(str(folder), name)


def test_another_revision_of_the_same_model_is_not_refused(revisions: tuple[Path, Path]) -> None:
    old, new = revisions
    edit(new / "config.json", torch_dtype="float32", transformers_version="9", quantization_config={"bits": 4})
    (new / "tokenizer.json").write_text(json.dumps(json.loads((new / "tokenizer.json").read_text()), indent=7))
    refuse_other_model(model_of(old), model_of(new))
    refuse_other_model(model_of(old), replace(model_of(old), dtype="float32", quantization="int8"))


def add_named_template(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: edit(f / "config.json", vocab_size=7), "vocab_size is 7 in its config.json, and 1024 in that of"),
        (lambda f: edit(f / "config.json", eos_token_id=3), "eos_token_id is 3 in its config.json"),
        (lambda f: edit(f / "generation_config.json", temperature=0.1), "another generation_config.json than"),
        (lambda f: edit(f / "tokenizer.json", model={}), "has another tokenizer.json than .*, which routers have read"),
        (lambda f: (f / "tokenizer_config.json").unlink(), "another tokenizer_config.json than"),
        (lambda f: (f / "chat_template.jinja").write_text("x"), "another chat_template.jinja than"),
        (add_named_template, "another additional_chat_templates/tool_use.jinja than"),
        (drop_weights, "has no \\*.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be compared"),
    ],
)
def test_what_routers_have_read_must_stay(
    revisions: tuple[Path, Path], change: Callable[[Path], None], told: str
) -> None:
    old, new = revisions
    change(new)
    with pytest.raises(FailedPrecondition, match=told):
        refuse_other_model(model_of(old), model_of(new))


def test_clients_go_on_using_the_same_name(revisions: tuple[Path, Path]) -> None:
    old, new = revisions
    other = new.rename(new.parent / "model-2")
    with pytest.raises(FailedPrecondition, match=r"clients know the model as 'model', .* set model\.name: model"):
        refuse_other_model(model_of(old), model_of(other))
    refuse_other_model(model_of(old), model_of(other, "model"))


async def test_a_change_of_weights_is_planned_and_says_what_becomes_of_outputs(revisions: tuple[Path, Path]) -> None:
    old, new = revisions
    stage = ReconfigurerStage()
    reconfigurer = stage.reconfigurer
    reconfigurer.config = replace(reconfigurer.config, model=model_of(old))
    wanted = replace(reconfigurer.config, model=model_of(new))
    answer = reconfigurer.propose(wanted, "a test", dry_run=True)
    assert answer.plan.changes == (
        f"model.path: {new}",
        "outputs end with the weights that they began with; those that take longer (rebalance.drain_timeout_s, 60 s) "
        "fail",
    )
    edit(new / "config.json", hidden_size=8)
    with pytest.raises(FailedPrecondition, match="hidden_size"):
        reconfigurer.propose(wanted, "a test")
    longer = replace(wanted, model=replace(model_of(old), max_model_len=512))
    with pytest.raises(FailedPrecondition, match=r"model\.max_model_len cannot change while the cluster runs"):
        reconfigurer.propose(longer, "a test")
    assert stage.kinds() == [EventKind.REFUSED] * 2
