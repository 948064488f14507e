"""Files of a configuration: formats, and reports of unreadable ones."""

from __future__ import annotations

import codecs
import traceback
from pathlib import Path

import pytest

from offload_core.api.errors import ConfigError
from offload_core.config.file import read_keys

CANARY = "hunter2-canary"


def problems(config_file: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_keys(config_file)
    return list(caught.value.problems)


def written(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


UNREADABLE = [
    ("c.ini", "", "must end in .yaml, .yml, .json, .toml"),
    ("c", "", "must end in .yaml, .yml, .json, .toml"),
    ("c.yaml", "a: [1", "cannot be read as yaml: line 1, column 6: while parsing a flow sequence, expected ',' or ']'"),
    ("c.yaml", "{[a]: 1}", "cannot be read as yaml: line 1: a key is a sequence; keys are words"),
    ("c.yaml", "a: 1\n\tb: 2", "cannot be read as yaml: line 2, column 1: while scanning for the next token, found "),
    ("c.yaml", "a: 1\n---\nb: 2", "cannot be read as yaml: line 2, column 1: expected a single document"),
    ("c.yaml", "on: 1", "cannot be read as yaml: line 1: the key 'on' is read as bool; put it in quotes"),
    ("c.yaml", "a: {x: 1, 7: 2}", "cannot be read as yaml: line 1: the key '7' is read as int; put it in quotes"),
    ("c.yaml", "a: \x00", "cannot be read as yaml: unacceptable character #x0000"),
    ("c.yaml", "a: 2024-13-45", "cannot be read as yaml: month must be in 1..12"),
    ("c.yaml", "a: &a [*a]", "cannot be read as yaml: line 1: an alias contains itself"),
    ("c.yaml", "", "is empty; it must hold keys and values"),
    ("c.yaml", "# nothing\n", "is empty; it must hold keys and values"),
    ("c.json", " \n", "is empty; it must hold keys and values"),
    ("c.yaml", "- a\n- b", "holds a list; it must hold keys and values"),
    ("c.toml", "a = = 1", "cannot be read as toml: Invalid value (at line 1, column 5)"),
    ("c.toml", "a = 1\na = 2\n", "cannot be read as toml: Cannot overwrite a value (at line 2, column 6)"),
    ("c.json", "{", "cannot be read as json: Expecting property name enclosed in double quotes: line 1 column 2"),
    ("c.json", "17", "holds a number; it must hold keys and values"),
    ("c.json", '{"a": 1, "a": 2}', "cannot be read as json: the key 'a' is written twice; remove one"),
]


@pytest.mark.parametrize(("name", "text", "expected"), UNREADABLE, ids=[f"{n} {t!r}" for n, t, _ in UNREADABLE])
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    path = written(tmp_path, name, text)
    (problem,) = problems(path)
    assert problem.startswith(f"config_file: {path!r} {expected}")


def test_a_tab_is_named_with_the_cure(tmp_path: Path) -> None:
    (problem,) = problems(written(tmp_path, "c.yaml", "backends:\n\t- name: a"))
    assert problem.endswith("found character '\\t' that cannot start any token; indent with spaces")


def test_keys_written_twice_are_refused_with_their_lines(tmp_path: Path) -> None:
    text = "backends:\n  - {name: a, name: b}\nstaging_bytes: 1GiB\nbackends:\n  - {name: c}\nbackends: []\n"
    path = written(tmp_path, "c.yaml", text)
    start = f"config_file: {path!r} cannot be read as yaml: "
    assert problems(path) == [
        f"{start}the key 'backends' is written 3 times, in lines 1, 4 and 6; keep one",
        f"{start}the key 'name' is written 2 times, in lines 2 and 2; keep one",
    ]


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    text = "backends:\n  - &first {name: a, io_threads: 2}\n  - {<<: *first, name: b}\n"
    assert read_keys(written(tmp_path, "c.yaml", text)) == {
        "backends": [{"name": "a", "io_threads": 2}, {"name": "b", "io_threads": 2}]
    }


@pytest.mark.parametrize("name", ["c.yaml", "c.json", "c.toml"])
def test_deep_nesting_is_refused(tmp_path: Path, name: str) -> None:
    nested = "[" * 50_000 + "]" * 50_000
    text = {"c.yaml": f"a: {nested}", "c.json": f'{{"a": {nested}}}', "c.toml": f"a = {nested}"}[name]
    (problem,) = problems(written(tmp_path, name, text))
    assert problem.endswith(f"cannot be read as {name[2:]}: it is nested too deeply")


@pytest.mark.parametrize("link", ["[{a}, {a}]", "{{<<: [{a}, {a}], x: 1}}"], ids=["lists", "merged mappings"])
@pytest.mark.timeout(20)
def test_aliases_that_stand_for_too_much_are_refused_at_once(tmp_path: Path, link: str) -> None:
    lines = ["k0: &a0 {x: 1}"] + [f"k{n}: &a{n} {link.format(a=f'*a{n - 1}')}" for n in range(1, 40)]
    (problem,) = problems(written(tmp_path, "c.yaml", "\n".join(lines)))
    assert problem.endswith("its aliases expand to more than 100000 values; use fewer aliases")


@pytest.mark.parametrize(("name", "text"), [("c.yaml", "a: 1"), ("c.json", '{"a": 1}'), ("c.toml", "a = 1")])
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert read_keys(str(path)) == {"a": 1}


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    (problem,) = problems(path)
    assert problem.startswith(f"config_file: {str(path)!r} cannot be read as yaml: 'utf-8' codec")


def test_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").mkdir()
    (problem,) = problems(tmp_path / "c.yaml")
    assert "cannot be read as yaml: [Errno 21] Is a directory" in problem


def test_a_missing_file_is_named_with_the_folder_it_was_looked_for_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert problems("offload.yaml") == [
        f"config_file: 'offload.yaml' does not exist (looked in {tmp_path}); write its absolute path"
    ]
    assert problems("/nowhere/c.yaml") == ["config_file: '/nowhere/c.yaml' does not exist; write its absolute path"]


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, "c.yaml", "a: 1")
    assert read_keys("~/c.yaml") == {"a": 1}
    (problem,) = problems("~nobody-of-that-name/c.yaml")
    assert "'~nobody-of-that-name/c.yaml' cannot be read as yaml: Could not determine home directory" in problem


def test_a_file_name_of_another_type_is_refused() -> None:
    assert problems(5) == ["config_file: 5 is not a path; write the file's name as a string"]
    assert problems({"token": CANARY}) == ["config_file: a mapping is not a path; write the file's name as a string"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "token: {c}: x"),
        ("c.yaml", "{{token: {c}, x: ["),
        ("c.yaml", "token: *{c}"),
        ("c.yaml", "token: !{c} x"),
        ("c.yaml", "token: !!int {c}"),
        ("c.yaml", "token: !!float {c}"),
        ("c.yaml", "token: !!timestamp {c}"),
        ("c.yaml", "token: !!bool {c}"),
        ("c.yaml", "token: !!omap {c}"),
        ("c.yaml", "token: !!set {c}"),
        ("c.yaml", "token: !!binary é{c}"),
        ("c.yaml", 'token: "{c}\\q"'),
        ("c.yaml", "token: %{c}"),
        ("c.yaml", "token: @{c}"),
        ("c.yaml", "a: &{c} 1\nb: &{c} 2\nc: &c [*c]"),
        ("c.yaml", "token: {c}\n\tx: 1"),
        ("c.yaml", "token: {c}\x00"),
        ("c.yaml", "%TAG ! {c}\n---\na: !x!{c} 1"),
        ("c.json", '{{"token": "{c}",}}'),
        ("c.json", '{{"token": {c}}}'),
        ("c.json", '{{"token": "{c}\\q"}}'),
        ("c.json", '{{"token": "{c}", "token": "{c}"}}'),
        ("c.toml", "token = {c}"),
        ("c.toml", 'token = "{c}'),
        ("c.toml", 'token = "{c}\\q"'),
        ("c.toml", 'token = "{c}"\ntoken = "{c}"'),
        ("c.yaml", "- token: {c}"),
        ("c.yaml", "{c}"),
        ("c.json", '"{c}"'),
    ],
)
def test_no_message_quotes_the_text_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(written(tmp_path, name, text.format(c=CANARY)))
    assert CANARY not in "".join(traceback.format_exception(caught.value))
