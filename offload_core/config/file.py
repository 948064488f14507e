"""Reading of operators' files: YAML, TOML or JSON by the file's ending, into a dictionary.

No key is lost silently. Keys written twice are refused, where YAML's and JSON's readers would take the last one. Keys
that YAML does not read as text are refused as well. No message quotes the file's text, which may hold a secret: errors
give line and column instead.

A file may have 256 KiB, so that even one made by an attacker is read or refused within seconds.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from offload_core.api.errors import ConfigError
from offload_core.config.problems import kind_of, shown

MAX_FILE_BYTES = 256 * 1024
"""The largest file that is read. PyYAML takes up to 3 s for it."""
_MAX_YAML_NODES = 100_000
_MAX_REPORTED_KEYS = 20


class _UnreadableError(ValueError):
    """One or more problems of a file."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems


def read_keys(file: object, name: str = "config_file", source: str = "kv_connector_extra_config") -> dict[str, Any]:
    """Return the keys and values of a file; ``~`` is the home folder, a relative path starts at the working folder.

    Args:
        file: path of the file, as the operator wrote it.
        name: name of the file in messages.
        source: place where the operator wrote the path.

    Raises:
        ConfigError: the file does not exist, or cannot be read in the format of its ending.
    """
    try:
        return _read(file)
    except _UnreadableError as error:
        raise ConfigError([f"{name}: {problem}" for problem in error.problems], source) from None


def _read(file: object) -> dict[str, Any]:
    if not isinstance(file, str | Path):
        raise _UnreadableError(f"{shown(file)} is not a path; write the file's name as a string")
    readers: dict[str, Callable[[str], object]] = {
        ".yaml": _read_yaml,
        ".yml": _read_yaml,
        ".json": _read_json,
        ".toml": tomllib.loads,
    }
    prefix = repr(str(file))
    reader = readers.get(Path(file).suffix.lower())
    if reader is None:
        raise _UnreadableError(f"{prefix} must end in {', '.join(readers)}")
    kind = Path(file).suffix[1:]
    try:
        path = Path(file).expanduser()
        content = reader(_text_of(path))
        _check_values(content)
    except FileNotFoundError:
        looked_in = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise _UnreadableError(f"{prefix} does not exist{looked_in}; write its absolute path") from None
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise _UnreadableError(f"{prefix} cannot be read as {kind}: {reason}") from None
    except _UnreadableError as error:
        raise _UnreadableError(
            *(f"{prefix} cannot be read as {kind}: {problem}" for problem in error.problems)
        ) from None
    except ValueError as error:
        raise _UnreadableError(f"{prefix} cannot be read as {kind}: {_without_quotes(str(error))}") from None
    if content is None:
        raise _UnreadableError(f"{prefix} is empty; it must hold keys and values")
    if not isinstance(content, dict):
        raise _UnreadableError(f"{prefix} holds {kind_of(content)}; it must hold keys and values")
    return content


def _text_of(path: Path) -> str:
    with path.open("rb") as file:  # perhaps a device or a pipe without an end
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise _UnreadableError(f"it has more than {MAX_FILE_BYTES // 1024} KiB; a configuration is much shorter")
    return data.decode("utf-8-sig")


def _check_values(content: object) -> None:
    """Refuse values that no message and no system call can hold."""
    try:
        text = json.dumps(content, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError:
        raise _UnreadableError("a text has half of a surrogate pair; write whole characters") from None
    except ValueError:  # from the conversion of a number to text
        raise _UnreadableError("a number has thousands of digits; write a smaller one") from None
    if "\\u0000" in text:
        raise _UnreadableError("a text has a NUL character; remove it")


def _read_json(text: str) -> object:
    if not text.strip():
        return None
    twice: list[str] = []

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            uses = Counter(key for key, _ in pairs)
            twice.extend(f"the key {key!r} is written twice; remove one" for key in content if uses[key] > 1)
        return content

    content = json.loads(text, object_pairs_hook=without_repeats)
    _raise_if_any(twice)
    return content


def _read_yaml(text: str) -> object:
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _check_size(root)
            _raise_if_any(list(_key_problems(root, set())))
            return loader.construct_document(root)
        except (LookupError, AttributeError, TypeError):  # raised by PyYAML for "!!bool maybe" and similar values
            raise _UnreadableError("a value does not match its tag (!!…)") from None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _UnreadableError(_at(error)) from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise _UnreadableError(_without_quotes(str(error))) from None


def _at(error: yaml.MarkedYAMLError) -> str:
    """Describe the error with its place. Its own text would quote the line, which may hold a secret."""
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    cure = "; indent with spaces" if r"'\t'" in reason else ""
    return f"{place}{_without_quotes(reason)}{cure}"


def _without_quotes(reason: str) -> str:
    """Remove quotes of the file from a reader's message; single characters and names of syntax stay."""

    def mask(quoted: re.Match[str]) -> str:
        inner = quoted[0][1:-1]
        return quoted[0] if len(inner) <= 1 or inner[0] in "\\<" else "'…'"

    return re.sub(r"""'[^']*'|"[^"]*\"""", mask, reason)


def _check_size(root: yaml.Node) -> None:
    """Refuse aliases that expand to too many values, or contain themselves."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in open_nodes:
            raise _UnreadableError(f"line {node.start_mark.line + 1}: an alias contains itself")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            sizes[id(node)] = 1 + sum(map(size, _children(node)))
            open_nodes.discard(id(node))
        return sizes[id(node)]

    if size(root) > _MAX_YAML_NODES:
        raise _UnreadableError(f"its aliases expand to more than {_MAX_YAML_NODES} values; use fewer aliases")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _key_problems(node: yaml.Node, seen: set[int]) -> Iterator[str]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, list[int]] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            kind = key.tag.rpartition(":")[2]
            if not isinstance(key, yaml.ScalarNode):
                yield f"line {line}: a key is a {key.id}; keys are words"
            elif kind not in ("str", "merge"):
                yield f"line {line}: the key {key.value!r} is read as {kind}; put it in quotes"
            else:
                lines.setdefault(key.value, []).append(line)
        for name, places in lines.items():
            if len(places) > 1:
                yield f"the key {name!r} is written {len(places)} times, in lines {_listed(places)}; keep one"
    for child in _children(node):
        yield from _key_problems(child, seen)


def _raise_if_any(problems: Sequence[str]) -> None:
    if len(problems) > _MAX_REPORTED_KEYS:
        left = len(problems) - _MAX_REPORTED_KEYS
        raise _UnreadableError(*problems[:_MAX_REPORTED_KEYS], f"{left} more keys have such problems")
    if problems:
        raise _UnreadableError(*problems)


def _listed(lines: list[int]) -> str:
    return f"{', '.join(map(str, lines[:-1]))} and {lines[-1]}"
