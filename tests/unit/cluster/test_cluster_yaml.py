"""The shipped cluster.yaml: valid for Baton, valid for Ray, and complete."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.config.load import load_config
from cluster.config.reference import reference

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "cluster.yaml"
SHIPPED = {
    "model.path": "models/tiny-shakespeare",
    "model.dtype": "float32",
    "engine.device": "cpu",
    "engine.kv_cache_tokens": 16384,
}
"""Where the shipped file says something else than the schema's defaults."""


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def serving() -> dict[str, Any]:
    return flat(yaml.safe_load(FILE.read_text())["metadata"]["serving"])


def test_the_shipped_file_loads_and_serves_the_bundled_model_on_the_cpu() -> None:
    config = load_config(FILE)
    assert config.model.path == str(ROOT / "models" / "tiny-shakespeare")
    assert (config.model.dtype, config.engine.device) == ("float32", "cpu")
    assert (config.roles.prefill.num_workers, config.roles.decode.num_workers) == (1, 1)
    assert config.engine.kv_cache_tokens == 16384


def test_the_shipped_file_spells_out_exactly_the_keys_of_the_schema() -> None:
    assert list(serving()) == [key.path for key in reference()]


def test_the_shipped_file_differs_from_the_defaults_only_where_it_means_to() -> None:
    defaults = {key.path: yaml.safe_load(key.default.strip("`")) for key in reference()}
    values = serving()
    assert {key: values[key] for key in values if values[key] != defaults[key]} == SHIPPED


def ray_folder() -> Path:
    """Where Ray is installed, without importing it."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        pytest.skip("Ray is not installed here")
    return Path(spec.origin).parent


def test_the_shipped_file_fits_rays_own_schema() -> None:
    schema = json.loads((ray_folder() / "autoscaler" / "ray-schema.json").read_text())
    document = yaml.safe_load(FILE.read_text())
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"serving": {}}, schema)


def test_the_shipped_file_passes_what_ray_up_checks_before_it_starts() -> None:
    ray_folder()
    program = (
        "import sys, yaml\n"
        "from ray.autoscaler._private.util import prepare_config, validate_config\n"
        "config = prepare_config(yaml.safe_load(open(sys.argv[1])))\n"
        "validate_config(config)\n"
        "print(config['head_node_type'], 'serving' in config['metadata'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(FILE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["local.cluster.node", "True"]
