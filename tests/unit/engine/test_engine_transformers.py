"""Models that transformers' own code computes, against transformers itself in float32, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner, on_each_rank, run_in_chunks, scattered_table, step_of
from foreign_checkpoints import FOREIGN, REFUSED, VOCAB_SIZE, architecture_of, foreign_config, make_foreign
from safetensors.torch import load_file, save_file

from cluster.errors import CheckpointError, ConfigError
from engine.model_cost import weight_bytes
from engine.model_runner import ModelRunner
from engine.models.folder import read_model
from engine.models.transformers_model import ForeignLinear
from engine.step_input import SequenceSlice
from engine.tp import TPGroup

USUAL = ("cohere2", "gpt_neox", "granitemoe", "opt")
"""Windows and a scaled head; fused projections; experts; learned positions."""
NUM_TOKENS = 60
PROMPT_LENGTHS = (1, 15, 16, 17, 100, 1000)
TOLERANCE = 1e-4

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers' own code


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = make_foreign(model_type, tmp_path_factory.mktemp(model_type))
        return folders[model_type]

    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models are tiny, and threads that wait for each other take longer than one that computes."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def _reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _expected(folder: Path, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = _reference(folder)(torch.tensor([ids])).logits[0]
    return logits.float()


def _ids(count: int = NUM_TOKENS, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, VOCAB_SIZE, (count,), generator=generator)]


@pytest.mark.parametrize("model_type", USUAL)
def test_logits_equal_those_of_transformers_however_a_prompt_is_cut(
    model_type: str, folder_of: Callable[[str], Path]
) -> None:
    folder, ids = folder_of(model_type), _ids()
    expected, runner = _expected(folder, ids), make_runner(folder)
    assert runner.config.foreign is not None
    for chunks in ([NUM_TOKENS], [7] * 5 + [1] * 25):
        assert (run_in_chunks(runner, ids, chunks) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("model_type", ["cohere2", "granitemoe", "gpt_neox", "olmoe", "granite_swa"])
def test_two_ranks_compute_what_one_does(model_type: str, folder_of: Callable[[str], Path]) -> None:
    """olmoe and granitemoe leave attention undivided in their plans: its heads are divided all the same."""
    folder, ids = folder_of(model_type), _ids()
    expected = _expected(folder, ids)
    ranks = on_each_rank(2, lambda tp: run_in_chunks(make_runner(folder, tp=tp), ids, [40] + [1] * 20))
    for logits in ranks:
        assert (logits - expected).abs().max() < TOLERANCE


def test_one_kv_head_is_held_by_both_of_two_ranks(tmp_path: Path) -> None:
    folder, ids = make_foreign("cohere", tmp_path, num_key_value_heads=1), _ids()
    ranks = on_each_rank(2, lambda tp: run_in_chunks(make_runner(folder, tp=tp), ids, [40, 20]))
    assert (ranks[1] - _expected(folder, ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_is_not_served_is_refused_by_name_and_reason(model_type: str, tmp_path: Path) -> None:
    config, reason = foreign_config(model_type), REFUSED[model_type][1]
    architecture = architecture_of(model_type)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_model(tmp_path)
    assert architecture in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"architectures": ["NobodyForCausalLM"], "model_type": "llama"}, "has no such language model"),
        ({"architectures": ["GPT2Config"], "model_type": "gpt2"}, "has no such language model"),
        ({"architectures": ["CohereForCausalLM"], "model_type": "nobody"}, "does not read its config.json"),
        ({"architectures": ["CohereForCausalLM"], "model_type": "gpt2"}, "transformers makes a GPT2LMHeadModel"),
        ({"architectures": ["CohereForCausalLM"], "model_type": "cohere", "hidden_size": -3}, "CohereForCausalLM"),
        ({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}, "has no such language model"),
        (
            {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}},
            "auto_map",
        ),
    ],
)
def test_a_config_that_names_nothing_that_is_served_is_refused(
    content: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "own.py").write_text("raise SystemExit('the code of a folder was run')")
    with pytest.raises(CheckpointError, match=reason):
        read_model(tmp_path)


def test_what_computes_a_model_is_chosen_by_name(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    llama = make_checkpoint("llama", tmp_path)
    assert read_model(llama).foreign is None
    assert read_model(llama, "transformers").foreign is not None
    with pytest.raises(CheckpointError, match="'OPTForCausalLM' is not supported"):
        read_model(folder_of("opt"), "native")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "mixtral"])
def test_the_same_model_has_the_same_logits_by_either_code(kind: str, tmp_path: Path) -> None:
    folder, ids = make_checkpoint(kind, tmp_path), _ids()
    own = run_in_chunks(make_runner(folder), ids, [40, 20])
    foreign = run_in_chunks(make_runner(folder, model_impl="transformers"), ids, [40, 20])
    assert (own - foreign).abs().max() < TOLERANCE


def test_layers_are_told_in_order_as_their_kv_is_written(folder_of: Callable[[str], Path]) -> None:
    runner, told = make_runner(folder_of("opt")), []
    piece = SequenceSlice(tuple(_ids(20)), 0, scattered_table(runner, 20), wants_logits=True)
    runner.forward(step_of(runner, [piece]), on_layer=told.append)
    assert told == [1, 2, 3, 4]


@pytest.mark.parametrize("model_type", USUAL)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_bytes_of_weights_are_those_that_are_planned(
    model_type: str, tp_size: int, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(model_type)
    if tp_size > 1 and model_type == "opt":
        pytest.skip("has no tensor-parallel plan")
    for runner in on_each_rank(tp_size, lambda tp: make_runner(folder, tp=tp, dtype="bfloat16")):
        planned = weight_bytes(runner.config, tp_size, runner.weight_form)
        assert 0.98 * planned <= _held_bytes(runner) <= planned


def _held_bytes(runner: ModelRunner) -> int:
    model: Any = runner._model
    held = {p.data_ptr(): p.nbytes for m in (model._base, model._model) for p in m.parameters() if not p.is_meta}
    linears = [m for m in model._base.modules() if isinstance(m, ForeignLinear)]
    biases = sum(linear._bias.nbytes for linear in linears if linear._bias is not None)
    head = next(m.head.matrix for m in model._model.modules() if hasattr(m, "head"))
    plain = getattr(head, "_plain", None)  # the embedding itself, where a head that is tied to it is multiplied so
    shared = plain.nbytes if plain is not None and plain.data_ptr() in held else 0
    return sum(held.values()) + sum(linear._matrix.nbytes for linear in linears) + biases + head.nbytes - shared


@pytest.mark.parametrize(("wanted", "bound"), [({"quantization": "int8"}, 0.08), ({"kv_cache_dtype": "int8"}, 0.03)])
def test_fewer_bits_stay_near(wanted: dict[str, Any], bound: float, folder_of: Callable[[str], Path]) -> None:
    folder, ids = folder_of("gpt_neox"), _ids(40)
    exact = run_in_chunks(make_runner(folder), ids, [40])
    logits = run_in_chunks(make_runner(folder, **wanted), ids, [30] + [1] * 10)
    assert 0 < (logits - exact).pow(2).mean().sqrt() < bound * exact.pow(2).mean().sqrt()


def test_what_cannot_be_had_is_refused_by_name(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("opt")
    with pytest.raises(ConfigError, match="deterministic: transformers' own code computes OPTForCausalLM"):
        make_runner(folder, deterministic=True)
    with pytest.raises(ConfigError, match="tensor_parallel: OPTForCausalLM: transformers has no tensor-parallel plan"):
        read_model(folder).check_tp_size(2)
    with pytest.raises(ConfigError, match="tensor_parallel: 3 does not divide 8 attention heads"):
        read_model(folder_of("cohere2")).check_tp_size(3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is miss"),
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update({"model.more.weight": torch.ones(3)}), "model.more.weight has no place"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"has shape \[3\], but"),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_tensor(
    change: Callable[[dict[str, torch.Tensor]], Any], reason: str, tmp_path: Path
) -> None:
    folder = make_foreign("cohere", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=reason):
        make_runner(folder)


def test_a_model_that_mixes_tokens_beside_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.cohere import modeling_cohere

    plain = modeling_cohere.CohereMLP.forward
    monkeypatch.setattr(modeling_cohere.CohereMLP, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    with pytest.raises(CheckpointError, match="it computes other numbers for a prompt that comes in parts"):
        make_runner(make_foreign("cohere", tmp_path))


@pytest.mark.battery
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model_type", FOREIGN)
def test_greedy_tokens_equal_those_of_transformers(model_type: str, folder_of: Callable[[str], Path]) -> None:
    """Prompts of all lengths beside each other; by two ranks as well, where there is a plan for them."""
    folder = folder_of(model_type)
    prompts = [_ids(length, seed=length) for length in PROMPT_LENGTHS]
    reference = _reference(folder)
    reference.generation_config.eos_token_id = None
    sizes = [1] if read_model(folder, "transformers").foreign.tp_obstacle else [1, 2]  # type: ignore[union-attr]

    def run(tp: TPGroup) -> list[tuple[list[int], torch.Tensor]]:
        return _greedy(make_runner(folder, tp=tp, num_blocks=128, model_impl="transformers"), prompts, 64)

    for size in sizes:
        for outputs in on_each_rank(size, run):
            for prompt, (tokens, logits) in zip(prompts, outputs, strict=True):
                _check_greedy(reference, prompt, tokens, logits)


def _greedy(runner: ModelRunner, prompts: list[list[int]], count: int) -> list[tuple[list[int], torch.Tensor]]:
    """What follows each prompt, and the logits that led to it; all sequences are generated beside each other."""
    needed = [-(-(len(prompt) + count) // runner.block_size) for prompt in prompts]
    blocks = iter(scattered_table(runner, sum(needed) * runner.block_size))
    tables = [tuple(next(blocks) for _ in range(number)) for number in needed]
    rows = [SequenceSlice(tuple(p), 0, table, True) for p, table in zip(prompts, tables, strict=True)]
    every: list[torch.Tensor] = []
    for _ in range(count):
        every.append(runner.forward(step_of(runner, rows)).clone())
        chosen = every[-1].argmax(dim=-1).tolist()
        rows = [
            replace(row, token_ids=(token,), start=row.start + len(row.token_ids))
            for row, token in zip(rows, chosen, strict=True)
        ]
    logits = torch.stack(every, dim=1)  # [S, count, V]
    return [(one.argmax(dim=-1).tolist(), one) for one in logits]


def _check_greedy(reference: Any, prompt: list[int], tokens: list[int], logits: torch.Tensor) -> None:
    """Where two candidates lie closer than the tolerance, either is right, and what follows differs."""
    with torch.inference_mode():
        wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=len(tokens), do_sample=False)[0].tolist()
        exact = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    assert (logits - exact).abs().max() < TOLERANCE
    own, wanted = tokens, wanted[len(prompt) :]
    differing = next((i for i, pair in enumerate(zip(own, wanted, strict=True)) if pair[0] != pair[1]), None)
    if differing is not None:
        gap = exact[differing, wanted[differing]] - exact[differing, own[differing]]
        assert abs(gap) < TOLERANCE, f"token {differing} is {own[differing]}, not {wanted[differing]}: {gap} apart"


def test_the_documentation_names_what_is_served_and_what_is_refused() -> None:
    text = (Path(__file__).parents[3] / "docs/transformers.md").read_text()
    served, refused = text.split("## What is refused")
    assert {line.split()[1] for line in served.splitlines() if line.startswith("| ")} - {"architecture"} == {
        architecture_of(model_type) for model_type in FOREIGN
    }
    assert all(f"| {architecture_of(model_type)} | " in refused for model_type in REFUSED)
