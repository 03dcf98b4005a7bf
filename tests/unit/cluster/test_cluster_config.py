"""Reading metadata.serving: every mistake is reported at once, at its place, with what to do about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config.load import load_config, parse_config
from cluster.config.overrides import RoleOverrides
from cluster.config.read import kinds_of
from cluster.config.reference import field_docs, reference, render_reference
from cluster.config.schema import ModelSection, RoleSection, ServingConfig
from cluster.errors import ConfigError
from controller.plan import plan_cluster

ROOT = Path(__file__).resolve().parents[3]
TRANSPORTS = "auto, shm, shm_pages, gloo, cuda_pages, cuda_ipc or nccl"
HEAD = "cluster_name: x\nmetadata:\n  serving:\n"


def parse(folder: Path, serving: str, model: str = "    model: {path: m}\n") -> ServingConfig:
    """A file whose metadata.serving is `serving` (indented by four), from line 5 on after the model."""
    return parse_config(HEAD + model + serving, str(folder / "cluster.yaml"))


def problems(folder: Path, serving: str, model: str = "    model: {path: m}\n") -> list[str]:
    """The problems as `line:column: rest`."""
    with pytest.raises(ConfigError) as caught:
        parse(folder, serving, model)
    name = f"{folder / 'cluster.yaml'}:"
    return [line.removeprefix(name) for line in caught.value.message.splitlines() if line.startswith(name)]


def test_a_file_that_names_only_a_model_gets_every_default(folder: Path) -> None:
    config = parse(folder, "")
    assert config == ServingConfig(model=ModelSection(path=str(folder / "m")))


def test_a_problem_is_shown_with_its_line_and_a_caret(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(folder, "    roles:\n      decode:  {devices: 0}\n")
    file = folder / "cluster.yaml"
    assert caught.value.message == (
        f"{file}:6:26: metadata.serving.roles.decode.devices: must be at least 1, since only decode workers generate "
        "tokens (got 0)\n"
        "          decode:  {devices: 0}\n"
        "                             ^"
    )


def test_prefill_may_have_no_workers_at_all(folder: Path) -> None:
    config = parse(folder, "    roles:\n      prefill: {devices: 0, min_workers: 0}\n      decode: {devices: 2}\n")
    plan = plan_cluster(config, num_gpus=0, num_cores=2)
    assert [worker.worker_id for worker in plan.workers] == ["decode-0", "decode-1"]
    assert not plan.router.needs_prefill
    assert problems(folder, "    roles:\n      prefill: {devices: 0}\n") == [
        "6:26: metadata.serving.roles.prefill.min_workers: 1 is more than the 0 that 0 devices make with "
        "tensor_parallel 1; use 0"
    ]


def test_every_problem_is_reported_in_the_order_of_the_file(folder: Path) -> None:
    found = problems(
        folder,
        "    zzz: 1\n    engine: {block_size: 0, device: gpu}\n    router:\n      port: 70000\n      port: 1\n",
        "    model: {dtype: fp32}\n",
    )
    dtypes = "auto, float32, bfloat16 or float16"
    sections = ", ".join(kinds_of(ServingConfig))
    assert [line.replace(" metadata.serving.", " ") for line in found] == [
        "4:12: model.path: is missing",
        f'4:20: model.dtype: must be {dtypes} (got fp32); did you mean "float32"?',
        f"5:5: zzz: unknown key; known here: {sections}",
        "6:26: engine.block_size: must be at least 1 (got 0)",
        '6:37: engine.device: must be auto, cpu or cuda (got gpu); did you mean "cuda"?',
        "9:7: router.port: is there twice; the first is in line 8",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('devices: "1"', 'must be a whole number, without quotes (got "1", a string)'),
        ("devices: yes", "must be a whole number (got yes, a boolean)"),
        ("devices: 1.5", "must be a whole number (got 1.5)"),
        ("devices: 010", "must be a whole number (got 010)"),
        ("devices: 1:30", "must be a whole number (got 1:30)"),
        ("devices: .nan", "must be a whole number (got .nan)"),
        ("devices: [1]", "must be a whole number (got a list)"),
        ("devices: {a: 1}", "must be a whole number (got a mapping)"),
        ("devices:", "must be a whole number; leave the key out for its default (got null)"),
        ("devices: -4", "must be at least 0 (got -4)"),
        ("devices: 99999999999999999999999", "must be at most 65536 (got 99999999999999999999999)"),
        ("devices: 2026-01-01", "must be a whole number (got 2026-01-01, tagged tag:yaml.org,2002:timestamp)"),
        ("devices: !!python/name:os.system 1", "must be a whole number"),
    ],
)
def test_a_whole_number_is_nothing_else(folder: Path, line: str, expected: str) -> None:
    (found,) = problems(folder, f"    roles:\n      prefill:\n        {line}\n")
    assert f"metadata.serving.roles.prefill.devices: {expected}" in found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("timeout_s: .nan", "must be a finite number (got .nan)"),
        ("timeout_s: nan", "must be a finite number (got nan)"),
        ("timeout_s: -.inf", "must be a finite number (got -.inf)"),
        ("timeout_s: 0", "must be above 0 (got 0)"),
        ("timeout_s: soon", "must be a number (got soon)"),
        ("timeout_s: '3'", 'must be a number, without quotes (got "3", a string)'),
        ("timeout_s: true", "must be a number (got true, a boolean)"),
        ("chunk_tokens: 0", "must be at least 1 (got 0)"),
        ("num_slots: 17", "must be at most 16 (got 17)"),
        ("num_slots: 0", "must be at least 1 (got 0)"),
        ("max_pairs: 0", "must be at least 1 (got 0)"),
        ("heartbeat_s: 0", "must be above 0 (got 0)"),
        ("suspect_after_s: -1", "must be above 0 (got -1)"),
        ("dead_after_s: 1e9", "must be at most 86400 (got 1e9)"),
        ("transport: glo", f'must be {TRANSPORTS} (got glo); did you mean "gloo"?'),
        ("transport: cuda-ipc", f'must be {TRANSPORTS} (got cuda-ipc); did you mean "cuda_ipc"?'),
        ("transport: carrier-pigeon", f"must be {TRANSPORTS} (got carrier-pigeon)"),
        ("wire_format: float8", 'must be native, int8 or fp8 (got float8); did you mean "fp8"?'),
        ("digest: true", 'must be auto, on, sampled or off (got true, a boolean); did you mean "on"?'),
    ],
)
def test_limits_of_the_transfer_are_kept(folder: Path, line: str, expected: str) -> None:
    (found,) = problems(folder, f"    transfer:\n      {line}\n")
    assert found.endswith(expected)


@pytest.mark.parametrize("value", ["on", "off", "'on'", "sampled", "auto"])
def test_a_digest_may_be_on_or_off_although_yaml_takes_these_for_booleans(folder: Path, value: str) -> None:
    assert parse(folder, f"    transfer: {{digest: {value}}}\n").transfer.digest == value.strip("'")


def test_one_slot_and_one_pair_are_enough(folder: Path) -> None:
    transfer = parse(folder, "    transfer: {num_slots: 1, max_pairs: 1}\n").transfer
    assert (transfer.num_slots, transfer.max_pairs) == (1, 1)


@pytest.mark.parametrize(("line", "value"), [("30", 30.0), ("1e1", 10.0), ("0.5", 0.5), ("1_000", 1000.0)])
def test_a_number_may_be_written_in_any_plain_way(folder: Path, line: str, value: float) -> None:
    config = parse(folder, f"    transfer: {{timeout_s: {line}}}\n")
    assert config.transfer.timeout_s == value
    assert isinstance(config.transfer.timeout_s, float)


@pytest.mark.parametrize(
    ("serving", "expected"),
    [
        ("    router: {insecure: 1}\n", "router.insecure: must be true or false (got 1)"),
        ('    router: {insecure: "no"}\n', 'must be true or false, without quotes (got "no", a string)'),
        ("    log_dir: 12\n", "log_dir: must be a string, in quotes (got 12)"),
        ("    log_dir: ''\n", 'log_dir: must not be empty (got "", a string)'),
        ("    engine: 5\n", "engine: must be a mapping of keys to values (got 5)"),
        ("    engine: [5]\n", "engine: must be a mapping of keys to values (got a list)"),
        ("    rebalance: {mode: free}\n", "rebalance.mode: must be fixed or auto (got free)"),
        ("    engine: {max_num_seq: 5}\n", 'engine.max_num_seq: unknown key; did you mean "max_num_seqs"?'),
        ("    engine: {max-num-seqs: 5}\n", 'unknown key; did you mean "max_num_seqs"?'),
        ("    engine: {port: 5}\n", 'engine.port: unknown key; did you mean "router.port"?'),
        ("    block_size: 5\n", 'unknown key; did you mean "roles.prefill.block_size"?'),
        ("    engine: {<<: {block_size: 8}}\n", "merge keys are not read here"),
        ("    engine: {? [a, b] : 1}\n", "engine.?: unknown key"),
    ],
)
def test_a_wrong_type_or_key_says_what_was_expected(folder: Path, serving: str, expected: str) -> None:
    (found,) = problems(folder, serving)
    assert expected in found


@pytest.mark.parametrize(
    ("serving", "key", "expected"),
    [
        ("    roles: {decode: {devices: 3, tensor_parallel: 2}}\n", "roles.decode.devices", "use 2 or 4"),
        ("    roles: {decode: {devices: 1, tensor_parallel: 2}}\n", "roles.decode.devices", "use 2"),
        ("    roles: {prefill: {min_workers: 2}}\n", "roles.prefill.min_workers", "2 is more than the 1 that"),
        ("    engine: {block_size: 16, kv_cache_tokens: 15}\n", "engine.kv_cache_tokens", "do not make one block"),
        (
            "    roles: {decode: {block_size: 64, kv_cache_tokens: 32}}\n",
            "roles.decode.kv_cache_tokens",
            "32 tokens do not make one block of the decode workers, which has 64",
        ),
        ("    engine: {max_num_seqs: 4096}\n", "engine.max_num_batched_tokens", "at least max_num_seqs (4096)"),
        ("    engine: {device: cpu}\n    transfer: {transport: nccl}\n", "transfer.transport", "shm_pages or gloo"),
        ("    engine: {device: cpu, kv_cache_dtype: fp8}\n", "engine.kv_cache_dtype", "engine.device is cpu; use int8"),
        (
            "    engine: {kv_cache_dtype: fp8}\n    transfer: {wire_format: int8}\n",
            "transfer.wire_format",
            "KV of engine.kv_cache_dtype fp8 is not rounded to int8 once more; use native",
        ),
        (
            "    engine: {device: cpu}\n    transfer: {transport: cuda_ipc}\n",
            "transfer.transport",
            "cuda_ipc moves GPU memory, and engine.device is cpu",
        ),
        (
            "    engine: {device: cuda}\n    transfer: {transport: shm}\n",
            "transfer.transport",
            "shm moves CPU memory, and engine.device is cuda; use auto, cuda_pages, cuda_ipc, nccl or gloo",
        ),
        (
            "    transfer: {heartbeat_s: 1.5}\n",
            "transfer.suspect_after_s",
            "must be longer than heartbeat_s (1.5), since a healthy peer is silent for that long (got 1.5)",
        ),
        (
            "    transfer: {dead_after_s: 1}\n",
            "transfer.dead_after_s",
            "must be longer than suspect_after_s (1.5), since a peer is suspect before it is given up (got 1)",
        ),
        ("    engine: {device: cpu, attention: varlen}\n", "engine.attention", "runs on a GPU only"),
        (
            "    engine: {deterministic: true, kernels: torch}\n",
            "engine.kernels",
            "torch does not give a token the same bits in any step, and engine.deterministic is true; use auto",
        ),
        ("    engine: {device: cuda, deterministic: true, attention: flash_attn}\n", "engine.attention", "use auto"),
        (
            "    engine: {deterministic: true}\n    transfer: {wire_format: int8}\n",
            "transfer.wire_format",
            "use native",
        ),
        (
            "    engine: {deterministic: true}\n    roles: {prefill: {devices: 2, tensor_parallel: 2}}\n",
            "roles.prefill.tensor_parallel",
            "2 ranks add other sums than decode's 1, and engine.deterministic is true; use 1",
        ),
        ("    router: {host: 0.0.0.0}\n", "router.host", "refusing to listen on 0.0.0.0 without TLS"),
        ("    placement: {labels: [H100]}\n", "placement.labels", "H100 is not KEY=VALUE, such as"),
        ("    placement: {labels: ['zone=in(a b)']}\n", "placement.labels", "zone=in(a b) is not KEY=VALUE"),
        ("    placement: {labels: [zone=a, zone=b]}\n", "placement.labels", "zone is there twice"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(folder: Path, serving: str, key: str, expected: str) -> None:
    found = problems(folder, serving)
    assert found
    assert all(f" metadata.serving.{key}: " in line for line in found)
    assert expected in found[0]


def test_a_contradiction_is_not_reported_where_one_of_its_values_is_wrong_anyway(folder: Path) -> None:
    (found,) = problems(folder, "    roles: {decode: {devices: 3, tensor_parallel: x}}\n")
    assert "tensor_parallel: must be a whole number" in found


def test_a_contradiction_with_a_default_points_at_the_key_that_is_there(folder: Path) -> None:
    (found,) = problems(folder, "    engine:\n      max_num_seqs: 4096\n")
    assert found.startswith("6:21: metadata.serving.engine.max_num_batched_tokens: must be at least")


def test_timers_in_their_order_are_allowed(folder: Path) -> None:
    timers = parse(folder, "    transfer: {heartbeat_s: 1, suspect_after_s: 2, dead_after_s: 2.5}\n").transfer
    assert (timers.heartbeat_s, timers.suspect_after_s, timers.dead_after_s) == (1.0, 2.0, 2.5)


def test_another_address_is_allowed_when_insecure_is_said(folder: Path) -> None:
    assert parse(folder, "    router: {host: 0.0.0.0, insecure: true}\n").router.insecure


def test_empty_sections_mean_their_defaults(folder: Path) -> None:
    config = parse(folder, "    roles:\n      decode:\n    engine:\n")
    assert config.roles.decode == RoleSection()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ": is empty; Baton's part goes under metadata.serving"),
        ("# nothing\n", ": is empty; Baton's part goes under metadata.serving"),
        ("- a\n- b\n", ":1:1: must be a mapping of keys to values at its top"),
        ("just text\n", ":1:1: must be a mapping of keys to values at its top"),
        ("a: 1\n---\nb: 2\n", ":2:1: is not valid YAML: but found another document"),
        ("a:\n\tb: 1\n", ":2:1: is not valid YAML: found character '\\t' that cannot start any token"),
        ("a: [1\nb: 2\n", ":2:2: is not valid YAML: "),
        ("a: {b: 1\n", "is not valid YAML: "),
        ("a: *nowhere\n", ":1:4: is not valid YAML: found undefined alias"),
        ("a: b\nc: \x07\n", ":2:4: is not valid YAML: the character U+0007"),
        ("[" * 5000, ": is not valid YAML: nested too deeply"),
        ("a: 1\n", ":1:1: metadata: is missing; Baton's settings go there"),
        ("metadatas: {}\n", ':1:1: metadata: is missing; did you mean "metadatas" to be it?'),
        ("metadata: 1\n", ":1:11: metadata.serving: is missing"),
        ("metadata:\n", "metadata.serving: is missing"),
        ("metadata: {servng: {}}\n", ':1:11: metadata.serving: is missing; did you mean "servng" to be it?'),
        ("metadata: {serving: }\n", "metadata.serving.model.path: is missing"),
        ("metadata: {serving: {model: 5}}\n", "metadata.serving.model: must be a mapping of keys to values (got 5)"),
        ("metadata: {serving: 5}\n", "metadata.serving: must be a mapping of keys to values (got 5)"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_file_that_is_no_configuration_is_refused(folder: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "cluster.yaml")
    assert expected in caught.value.message
    assert len([line for line in caught.value.message.splitlines() if line.startswith("cluster.yaml")]) == 1


def test_a_tab_is_answered_with_how_to_indent() -> None:
    with pytest.raises(ConfigError, match="indent with spaces"):
        parse_config("a:\n\tb: 1\n", "cluster.yaml")


def test_a_key_doubled_in_rays_part_is_found_too(folder: Path) -> None:
    text = "provider: {type: local, type: aws}\n" + HEAD + "    model: {path: m}\n"
    with pytest.raises(ConfigError, match=r":1:25: provider.type: is there twice; the first is in line 1"):
        parse_config(text, str(folder / "cluster.yaml"))


def test_aliases_that_contain_themselves_end(folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        parse(folder, "    engine: &e {block_size: 8, again: *e}\n")


def test_a_relative_model_path_starts_at_the_files_folder(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(HEAD + "    model: {path: m, name: bard}\n    log_dir: logs\n")
    config = load_config(folder / "cluster.yaml")
    assert config.model.path == str(folder / "m")
    assert config.model.name == "bard"
    assert config.log_dir == str(folder / "logs")


def test_a_model_folder_that_is_not_there_is_refused(folder: Path) -> None:
    (found,) = problems(folder, "", "    model: {path: gone}\n")
    assert found.startswith(f"4:19: metadata.serving.model.path: no such folder: {folder / 'gone'}")
    (found,) = problems(folder, "", "    model: {path: .}\n")
    assert "no config.json in" in found
    (found,) = problems(folder, "", "    model: {path: m/config.json}\n")
    assert "is not a folder" in found


def test_a_model_given_from_outside_replaces_path_and_name(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(HEAD + "    model: {path: gone, name: bard, dtype: float32}\n")
    config = load_config(folder / "cluster.yaml", model_path=str(folder / "m"))
    assert config.model == ModelSection(path=str(folder / "m"), name=None, dtype="float32")
    with pytest.raises(ConfigError, match=r"^--model: no such folder: .*nope"):
        load_config(folder / "cluster.yaml", model_path=str(folder / "nope"))


def test_a_file_that_cannot_be_read_is_a_configuration_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load_config(folder / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(folder)
    (folder / "latin.yaml").write_bytes(b"a: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 6\)"):
        load_config(folder / "latin.yaml")


def test_a_very_long_line_is_shown_around_the_mistake(folder: Path) -> None:
    padding = " " * 3000
    with pytest.raises(ConfigError) as caught:
        parse(folder, f"    engine: {{block_size: 8,{padding} max_num_seqs: 0}}\n")
    _, line, caret = caught.value.message.splitlines()
    assert len(line) < 200
    assert line[caret.index("^")] == "0"


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.text(max_size=40), key=st.sampled_from([key.path for key in reference()]))
def test_whatever_stands_in_a_key_is_read_or_refused_but_never_breaks(folder: Path, value: str, key: str) -> None:
    text = f"metadata: {{serving: {{model: {{path: m}}, {nested(key, value)}}}}}"
    try:
        config = parse_config(text, str(folder / "cluster.yaml"))
    except ConfigError as error:
        assert str(folder / "cluster.yaml") in error.message
    else:
        assert isinstance(config, ServingConfig)


def nested(key: str, value: str) -> str:
    head, _, rest = key.partition(".")
    return f"{head}: {{{nested(rest, value)}}}" if rest else f"{head}: {value}"


def test_every_field_of_every_section_has_a_docstring() -> None:
    def check(section: type) -> None:
        assert set(field_docs(section)) == {f.name for f in dataclasses.fields(section)}, section
        for kind in kinds_of(section).values():
            if kind.section is not None and not issubclass(kind.section, RoleOverrides):
                check(kind.section)

    check(ServingConfig)


def test_the_reference_page_is_what_the_schema_says() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == render_reference()
