"""The rules of plain English that a program can check, for documents, docstrings and messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_WORDS = 25

_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HTML_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_MARKDOWN_LINE = re.compile(r"^(\||#|<|!\[).*$", re.MULTILINE)
_LITERAL_BLOCK = re.compile(r"::\n(?:\s*\n)*((?:[ \t]+\S.*\n?|\s*\n)+)")
_TABLE = re.compile(
    r"^[ \t]*=+( +=+)+[ \t]*\n(?:.*\n)*?[ \t]*=+( +=+)+[ \t]*\n(?:.*\n)*?[ \t]*=+( +=+)+[ \t]*$", re.MULTILINE
)
_DOCTEST = re.compile(r"^\s*(>>>|\.\.\.).*(\n(?!\s*$).*)*", re.MULTILINE)
_ENDS = re.compile(r"(?<=[.!?:;])[\"')`*_]*\s+(?=[A-Z`\"'(*:\[~])|\n\s*\n|\n\s*(?=[-*] |\d+\. |\w[\w ,]*: )")

# A noun clause instead of a noun: "what is stored", "who reads it", "which of them". Questions may ask so.
_CLAUSE = re.compile(r"\b(what|whatever|whoever|which of)\b|(?:^|[;,(] )who\b", re.IGNORECASE)
_FIRST_WORD = re.compile(r"(What|Which|How|Who|Whether|Where|When|Why)\b")


@dataclass(frozen=True)
class Problem:
    """A breach of one rule.

    Args:
        place: the file and the line, for an editor to jump to.
        rule: the rule that is broken.
        text: the sentence that breaks it.
    """

    place: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.text}"


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose, each on one line."""
    for part in _ENDS.split(text):
        if part and (sentence := " ".join(part.split()).strip("-* ")):
            yield sentence


def words(sentence: str) -> int:
    """Count the words; code in backticks, a link and a number with its unit count as one word each."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
    plain = re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`", "code", plain)
    return len(re.findall(r"[\w'/.+%-]*\w[\w'/.+%-]*", plain))


def sentence_problems(sentence: str) -> Iterator[str]:
    """Yield the rules that one sentence breaks."""
    without_code = re.sub(r"``[^`]*``|`[^`]*`|\"[^\"]*\"", "code", sentence)
    if words(sentence) > MAX_WORDS:
        yield f"{words(sentence)} words, at most {MAX_WORDS}"
    if not without_code.endswith("?") and (found := _CLAUSE.search(without_code)):
        yield f"name the noun in place of {found.group().strip(' ,;(')!r}"


def document_problems(path: Path, root: Path) -> list[Problem]:
    """Return the problems of a Markdown document; code blocks, tables and headings are left out."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match.group().count("\n")

    text = path.read_text()
    for pattern in (_HTML_COMMENT, _CODE_BLOCK, _MARKDOWN_LINE):
        text = pattern.sub(blank, text)
    return [
        Problem(str(path.relative_to(root)), rule, sentence)
        for sentence in sentences(text)
        for rule in sentence_problems(sentence)
    ]


def docstring_problems(path: Path, root: Path) -> list[Problem]:
    """Return the problems of a module's docstrings, those of attributes included."""
    problems: list[Problem] = []
    for node in _docstrings(ast.parse(path.read_text())):
        place = f"{path.relative_to(root)}:{node.lineno}"
        text = ast.literal_eval(node)
        assert isinstance(text, str)
        if match := _FIRST_WORD.match(text):
            problems.append(Problem(place, f"begin with a verb or a noun, not {match.group()!r}", text.split("\n")[0]))
        prose = _dedent(text)
        for pattern in (_TABLE, _LITERAL_BLOCK, _DOCTEST):
            prose = pattern.sub(".\n\n", prose)
        problems += [Problem(place, rule, one) for one in sentences(prose) for rule in sentence_problems(one)]
    return problems


def message_problems(path: Path, root: Path) -> list[Problem]:
    """Return the problems of messages: texts that are raised, logged or printed; only the noun clauses are checked."""
    problems: list[Problem] = []
    for node in ast.walk(ast.parse(path.read_text())):
        for line, text in _messages(node):
            clauses = [rule for rule in sentence_problems(text) if rule.startswith("name the noun")]
            problems += [Problem(f"{path.relative_to(root)}:{line}", rule, text) for rule in clauses]
    return problems


def _messages(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        call: ast.expr = node.exc
    elif isinstance(node, ast.Call) and re.search(r"\b(logger\.\w+|note|Field|help)$", ast.unparse(node.func)):
        call = node
    else:
        return
    for part in ast.walk(call):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.count(" ") > 2:
            yield part.lineno, " ".join(part.value.split())


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield every docstring: of the module, its classes and functions, and the string below an assignment."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            is_first = before is None and isinstance(node, owners)
            if isinstance(statement.value.value, str) and (is_first or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield statement.value


def _dedent(text: str) -> str:
    first, _, rest = text.partition("\n")
    lines = rest.splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join([first, *(line[indent:] for line in lines)]) + "\n"
