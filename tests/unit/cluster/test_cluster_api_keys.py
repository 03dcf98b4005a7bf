"""The keys file: what it says, its mistakes by line, and how it is changed on disk."""

from __future__ import annotations

import hashlib
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_router import baton

from cli.keys import edited_keys
from cluster.api_keys import SCOPES, ApiKey, KeyQuota, digest_of, load_keys, new_key, parse_keys, render_keys
from cluster.errors import ConfigError

DIGEST = digest_of("baton-one")
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,63}", fullmatch=True)
LIMITS = st.none() | st.integers(1, 10**12)


def problems(text: str) -> list[str]:
    """As `line:column: rest`."""
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, "keys.yaml")
    assert all(line.startswith("keys.yaml:") for line in caught.value.message.splitlines()), caught.value.message
    return [line.removeprefix("keys.yaml:") for line in caught.value.message.splitlines()]


def entry(**fields: str) -> str:
    given = {"id": "a", "sha256": DIGEST, "tenant": "acme", "scopes": "[generate]"} | fields
    return "keys:\n- {" + ", ".join(f"{name}: {value}" for name, value in given.items()) + "}\n"


def test_a_key_has_256_random_bits_behind_the_prefix() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("baton-") and len(key) == len("baton-") + 43 for key in keys)


def test_the_digest_is_the_sha256_of_the_whole_key() -> None:
    assert digest_of("baton-x") == hashlib.sha256(b"baton-x").hexdigest()


def test_what_is_left_out_has_its_default() -> None:
    (key,) = parse_keys(entry(), "keys.yaml")
    assert key == ApiKey("a", DIGEST, "acme", ("generate",), 1.0, KeyQuota())


@given(
    st.lists(
        st.builds(
            ApiKey,
            NAMES,
            st.binary(min_size=1, max_size=8).map(lambda data: hashlib.sha256(data).hexdigest()),
            NAMES,
            st.sampled_from([SCOPES, SCOPES[:1], SCOPES[1:]]),
            st.floats(0.001, 1e6),
            st.builds(KeyQuota, LIMITS, LIMITS, LIMITS, LIMITS),
            st.none() | st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1),
        ),
        unique_by=(lambda key: key.id, lambda key: key.sha256),
    )
)
def test_a_written_file_reads_as_the_same_keys(keys: list[ApiKey]) -> None:
    assert list(parse_keys(render_keys(keys), "keys.yaml")) == keys


def test_a_field_that_is_there_twice_is_reported() -> None:
    (problem,) = problems(entry(tenant="acme, tenant: other"))
    assert problem.endswith("keys[0].tenant: is there twice; the first is in line 2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (entry(tenant="a b"), "2:93: keys[0].tenant: must be 1 to 64 letters, digits or ._:@/- and begin with"),
        (entry(scopes="[]"), "2:107: keys[0].scopes: must name at least one of generate, admin"),
        (
            entry(scopes="[generat]"),
            "2:108: keys[0].scopes[0]: must be generate or admin (got generat); did you ",
        ),
        (entry(scopes="generate"), "2:107: keys[0].scopes: must be a list (got generate), such as [generate]"),
        (entry(weight="0"), "2:127: keys[0].weight: must be above 0 (got 0)"),
        (entry(quota="{max_concurrent: 0}"), "2:143: keys[0].quota.max_concurrent: must be at least 1 (got 0)"),
        (entry(wieght="2"), '2:119: keys[0].wieght: unknown key; did you mean "weight"?'),
        ("kees: []\n", '1:1: kees: unknown key; did you mean "keys"?'),
        ("keys: 3\n", "1:7: keys: must be a list of keys; write `keys: []` for none"),
        ("other: []\n", "1:1: other: unknown key; known here: keys"),
        ("", " is empty; write `keys: []` for a file without keys, or add one with `baton keys create`"),
        ("keys:\n\t- x\n", "2:1: is not valid YAML: found character '\\t' that cannot start any token"),
        ("keys: !!python/object/apply:os.system [ls]\n", "1:40: keys[0]: must be a mapping of keys to values"),
    ],
)
def test_a_mistake_is_told_by_line_key_and_remedy(text: str, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in problems(text)), problems(text)


def test_two_entries_share_neither_id_nor_key() -> None:
    found = problems(entry() + entry().partition("\n")[2])
    assert [problem.partition(": ")[2] for problem in found] == [
        "keys[1].id: is that of keys[0], too; ids must differ",
        "keys[1].sha256: is that of keys[0], too; a key belongs to one entry",
    ]


def test_an_error_never_shows_a_key_that_was_pasted_in() -> None:
    secret = new_key()
    for text in (entry(sha256=secret), entry(sha256=f"[{secret}]"), entry(note=f"{secret}: x"), f"keys: {secret}"):
        with pytest.raises(ConfigError) as caught:
            parse_keys(text, "keys.yaml")
        assert secret not in caught.value.message
    assert "revoke it and create another" in problems(entry(sha256=secret))[0]


def test_a_changed_file_is_readable_by_its_owner_alone_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: []\n")
    file.chmod(0o644)
    with edited_keys(file) as keys:
        keys.append(ApiKey("a", DIGEST, "acme", ("admin",)))
    assert [key.id for key in load_keys(file)] == ["a"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_an_edit_that_would_break_the_file_leaves_it_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(entry())
    with pytest.raises(ConfigError, match=r"keys\[1\].id: is that of"), edited_keys(file) as keys:
        keys.append(ApiKey("a", digest_of("other"), "acme", ("admin",)))
    assert file.read_text() == entry()
    assert list(tmp_path.iterdir()) == [file]


def test_edits_at_one_time_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"

    def add(number: int) -> None:
        with edited_keys(file, may_be_new=True) as keys:
            keys.append(ApiKey(f"k{number}", digest_of(str(number)), "acme", ("generate",)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert {key.id for key in load_keys(file)} == {f"k{number}" for number in range(24)}


def test_a_key_is_printed_once_and_its_hash_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    made = baton(
        *("keys", "create", "--tenant", "acme", "--scope", "admin", "--scope", "generate", "--file", str(file)),
        *("--requests-per-min", "60", "--max-concurrent", "4", "--weight", "2", "--note", "the batch job"),
    )
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    (key,) = load_keys(file)
    assert key.sha256 == digest_of(secret)
    assert (key.tenant, key.scopes, key.weight, key.note) == ("acme", ("generate", "admin"), 2.0, "the batch job")
    assert key.quota == KeyQuota(requests_per_min=60, max_concurrent=4)
    assert secret not in file.read_text()
    listed = baton("keys", "list", "--file", str(file), "--json")
    (described,) = json.loads(listed.stdout)["keys"]
    assert (described["id"], described["tenant"], described["quota"]["max_concurrent"]) == (key.id, "acme", 4)
    assert key.sha256 not in listed.stdout + baton("keys", "list", "--file", str(file)).stdout


def test_a_revoked_key_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")
    made = [
        json.loads(baton("keys", "create", "--tenant", t, "--scope", "generate", "--file", file, "--json").stdout)
        for t in ("acme", "other")
    ]
    assert baton("keys", "revoke", made[0]["id"], "--file", file).exit_code == 0
    assert [key.id for key in load_keys(file)] == [made[1]["id"]]
    again = baton("keys", "revoke", made[0]["id"], "--file", file)
    assert again.exit_code == 1
    assert made[0]["id"] in again.stderr and "baton keys list" in again.stderr


def test_a_tenant_that_cannot_be_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    made = baton("keys", "create", "--tenant", "a b", "--scope", "generate", "--file", str(file))
    assert made.exit_code == 3 and "keys[0].tenant" in made.stderr and not made.stdout
    assert not file.exists()
