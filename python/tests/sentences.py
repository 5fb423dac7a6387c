"""The sentences that the code can say: string literals of several words, with `…` for what is filled in.

Texts of errors and warnings are made in many ways, by helpers, constants and macros. Whoever wants all
of them cannot follow each way; but they all are literals somewhere. Documentation, debug logs, tests and
reasons of lints do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GAP = "…"
_WORDS = 2


class Sentence(NamedTuple):
    """One literal and where it stands."""

    text: str
    file: str
    line: int


def of_python(folder: Path) -> Iterator[Sentence]:
    """The sentences in the Python files below a folder."""
    for file in sorted(folder.rglob("*.py")):
        for line, text in _in_python(ast.parse(file.read_text())):
            if _is_sentence(text):
                yield Sentence(text, _name(file), line)


def of_rust(folder: Path) -> Iterator[Sentence]:
    """The sentences in the Rust files below a folder, tests left out."""
    for file in sorted(folder.rglob("*.rs")):
        if file.name == "tests.rs":
            continue
        for line, text in _in_rust(file.read_text()):
            if _is_sentence(text):
                yield Sentence(text, _name(file), line)


def _is_sentence(text: str) -> bool:
    if text.count("\n") > 1:
        return False  # a program
    return " " in text and len(re.findall(r"[A-Za-z']{2,}", text)) >= _WORDS


def _in_python(tree: ast.Module) -> Iterator[tuple[int, str]]:
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            skipped.update(id(child) for child in ast.iter_child_nodes(node))
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))  # documentation
        elif isinstance(node, ast.Call) and _is_unseen(node.func):
            skipped.update(id(argument) for argument in node.args)
        elif isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
            yield node.lineno, "".join(_part(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, re.sub(r"%[-+.0-9]*[dfgisrx]|%\(\w+\)s|\{\w*(:[^}]*)?\}", GAP, node.value)


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return GAP


def _is_unseen(function: ast.expr) -> bool:
    """Whether a call says something to developers only."""
    return isinstance(function, ast.Attribute) and function.attr in ("debug", "add_argument", "add_parser")


_RUST_NOISE = re.compile(
    r"""
    (?P<string>"(?:[^"\\]|\\.)*")       # kept, so that what looks like a comment in it is not one
    | //[^\n]*
    | \#!?\[(?:allow|expect|cfg_attr)\((?:[^"\]]|"(?:[^"\\]|\\.)*")*\]
    | (?:debug_)?assert(?:_eq|_ne)?!\((?:[^"();]|"(?:[^"\\]|\\.)*"|\([^()]*\))*\)
    | (?:trace|debug|info)!\((?:[^"();]|"(?:[^"\\]|\\.)*"|\([^()]*\))*\)
    | \.expect\("(?:[^"\\]|\\.)*"\)
    """,
    re.VERBOSE,
)


def _in_rust(source: str) -> Iterator[tuple[int, str]]:
    code = source.partition("#[cfg(test)]")[0]
    code = _RUST_NOISE.sub(lambda found: found["string"] or "\n" * found[0].count("\n"), code)
    for literal in re.finditer(r'"((?:[^"\\]|\\.)*)"', code, re.DOTALL):
        text = re.sub(r"\\\n\s*", "", literal[1]).replace('\\"', '"').replace("\\n", "\n")
        yield code.count("\n", 0, literal.start()) + 1, re.sub(r"\{[^{}]*\}", GAP, text)


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
