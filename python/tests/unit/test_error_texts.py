"""docs/errors.md has a row for every text that the code can say, and no row for one that it cannot."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sentences
from sentences import GAP, ROOT, Sentence

PAGE = ROOT / "docs/errors.md"
CRATES = ("tensorcall", "tensorcall-python", "tensorcall-proto")

ELSEWHERE = {
    "python/tensorcall/__main__.py": "the command line explains itself",
    "python/tensorcall/_doctor.py": "so does the report",
    "crates/tensorcall-python/src/testing.rs": "for tests only",
    "crates/tensorcall/src/transport/alarm.rs": "notes in assertions",
    "crates/tensorcall/src/transport/group/memory.rs": "for tests only",
    "crates/tensorcall-proto/src/handshake/envelope.rs": "labels of keys",
}
DETAILS = {
    "crates/tensorcall-proto/src/connection.rs",
    "crates/tensorcall-proto/src/handshake/error.rs",
    "crates/tensorcall-proto/src/ids.rs",
    "crates/tensorcall-proto/src/wire/descriptor.rs",
    "crates/tensorcall-proto/src/wire/dtype.rs",
    "crates/tensorcall-proto/src/store.rs",
    "crates/tensorcall-proto/src/wire/error.rs",
    "crates/tensorcall-proto/src/wire/store/mod.rs",
    "crates/tensorcall-proto/src/wire/tensor.rs",
}
"""What these say follows texts of the page, which has rows of its own for what a user can act on."""

NOT_SAID = {
    **dict.fromkeys(
        [
            "`…` is not the arguments of a call",
            "arguments are a tuple of up to 12 types that implement `IntoValue`: `()`, `(x,)`, `(x, y)`, ...",
            "a builder does nothing before it starts an agent",
            "`…` cannot be sent to another worker",
            "`…` cannot be received from another worker",
            "`…` is not a function that other workers can call",
            "`…` cannot be an argument of a function that other workers call",
            "arguments are owned types that implement `FromValue`, or `State<T>`, `Agent` or `Caller`",
            "`…` cannot be the result of a function that other workers call",
            "results are types that implement `IntoValue`, or `Keep<T>`",
            "dropping the future cancels the call; `detach()` lets it run",
            "wrap types that implement `serde::Serialize` in `tensorcall::Serde`, results that are to stay "
            "on their worker in `tensorcall::Keep`, or implement `IntoValue`",
            "wrap types that implement `serde::de::DeserializeOwned` in `tensorcall::Serde`, or implement "
            "`FromValue`; references are not received, take an owned type",
            "its arguments must be owned types that implement `FromValue`, or `State<T>`, `Agent` or "
            "`Caller`, and it must return `T`, `Keep<T>`, `Result<T, E>` or a future of one, where "
            "`T: IntoValue` and `E: Display`",
            "results are `T` or `Result<T, E>`, where `T` implements `IntoValue` or is "
            "`Keep<T>`, and `E: Display`",
            "as Python's float(int)",
            "numbers travel in double precision",
            "one macro for all numbers of arguments",
        ],
        "the compiler says it",
    ),
    "builtins:RuntimeError builtins:Exception": "names of classes",
    "Bytes(… bytes)": "a repr",
    **dict.fromkeys(
        [
            "the address that was asked for, …",
            "loopback, since the workers meet on no other host",
            "the address of the interface that was asked for, …",
            "the local address that routes to …, where the workers meet",
            "the local address that leads out, since … is this host (…)",
            "loopback, as … is, since this host has no other address",
        ],
        "why a worker listens where it does; the doctor says so",
    ),
    "all serve": "a key of the store",
    "giving the turn back": "for developers",
    "a wrong answer to a ping": "part of another text",
    "a wrong answer to a wait": "part of another text",
    "it answers something else": "part of another text",
    "it did not say what a client says first": "part of a debug log",
    "more is on the way than may be, and most of it here": "part of a debug log",
    "an object": "part of another text",
    "sign of life": "a label",
    "#remote_op: ": "stands in the names of events",
    "tensorcall: marker": "the name of an event that nobody sees",
    "torch's stable C interface": "a name",
    "tensorcall secret of job …": "goes into a fingerprint",
    "tensorcall/join …": "a key of the store",
    "large too": "a key of the store",
    "Timed out": "what gloo says",
    ". This is typically": "what gloo says",
    "WorkerInfo(id=…, name=…)": "a repr",
    "…(on=…, device=…)": "a repr",
    "Refused: parameters and submodules are elsewhere.": "documentation of methods",
    "a backward pass": "a label",
    "device(type='…', index=…)": "a repr",
    "rank … of …": "a repr",
    "groups of Python are for sending and receiving": "they gather by themselves, before there is an agent",
    "tensorcall seed": "a label",
    "there is no such backward pass here": "for the program's error only if the agent itself is wrong",
    "the roots of a backward pass are not candle's": "only those who use the engine's interface can do that",
    "a tensor of candle is not where it says that it is": "candle would have to be wrong",
    **dict.fromkeys(
        [
            "the call counts as unanswered when this is dropped",
            "the context is left when this is dropped",
            "futures do nothing unless they are awaited",
            "whether a pass succeeds is known when it was waited for",
        ],
        "the compiler says so",
    ),
    "Sending {{ message: …, to: …, … tensors }}": "a repr",
    "Receipt {{ message: …, from: …, … tensors }}": "a repr",
    "end of a backward pass": "a label",
    "<torch function …>": "a repr",
    "GloballyUniqueId(created_on=…, local_id=…)": "a repr",
    "UserRRef(RRefId = …, ForkId = …)": "a repr",
    **dict.fromkeys(
        [
            "the address that was asked for, …",
            "the address of the interface that was asked for, …",
            "the local address that routes to …, where the workers meet",
            "the local address that leads out, since … is this host (…)",
            "loopback, since the workers meet on no other host",
            "loopback, as … is, since this host has no other address",
        ],
        "the doctor says so",
    ),
    **dict.fromkeys(
        [
            " and … more",
            "of rank …",
            "to_here of …",
            "a pickled function",
            "another process",
            "an unknown address",
            "an unnamed address",
            "local process …",
            "no secret",
            "rank(s) … have …",
            "the class ….…",
            "in its device map for …\ndevice map = …",
            "the module …",
            "… for a local future",
            "… of … on worker …",
            "… for worker '…'",
        ],
        "part of another text",
    ),
}


def rows() -> list[str]:
    """The texts in the first columns of the page's tables; one without a word would fit everything."""
    found: list[str] = []
    for line in PAGE.read_text().splitlines():
        first = re.match(r"\| (.+?) \| .+ \| .+ \|$", line)
        if first:
            found += [a or b for a, b in re.findall(r"``` (.+?) ```|`([^`]+)`", first[1])]
    assert [row for row in found if not re.search(r"\w", row)] == []
    return found


def said() -> list[Sentence]:
    """What the code can say."""
    found = list(sentences.of_python(ROOT / "python/tensorcall"))
    for crate in CRATES:
        found += sentences.of_rust(ROOT / "crates" / crate / "src")
    return found


def pattern(row: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, row.strip(GAP + " ").split(GAP))), re.DOTALL)


def test_every_text_has_its_row() -> None:
    patterns = [pattern(row) for row in rows()]

    missing = [
        f"{file}:{line}: {text}"
        for text, file, line in said()
        if file not in ELSEWHERE
        and file not in DETAILS
        and text not in NOT_SAID
        and not any(each.search(text) for each in patterns)
    ]

    assert missing == []


def test_every_row_is_about_a_text_that_there_is() -> None:
    everything = "\n".join(text for text, _, _ in said())
    code = "\n".join(
        file.read_text() for folder in ("crates", "python/tensorcall") for file in code_files(ROOT / folder)
    )

    stale = [
        row
        for row in rows()
        # A short text is no sentence: it must at least stand in the code.
        if not re.search(pattern(row).pattern.replace(".*", "[^\n]*"), everything)
        and not all(part in code for part in row.split(GAP))
    ]

    assert stale == []


def code_files(folder: Path) -> list[Path]:
    return [file for ending in ("*.rs", "*.py") for file in sorted(folder.rglob(ending))]


def test_exceptions_to_the_rule_are_needed() -> None:
    found = said()

    assert set(NOT_SAID) <= {sentence.text for sentence in found}
    assert set(ELSEWHERE) | DETAILS <= {sentence.file for sentence in found}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('raise E(f"worker {name!r} is not {what} here")', ["worker … is not … here"]),
        ('"""Some documentation of this."""', []),
        ('log.warning("no route to %s: %s", a, b)', ["no route to …: …"]),
        ('log.debug("no route to %s: %s", a, b)', []),
        ('text = ("a long text " "in two parts")', ["a long text in two parts"]),
    ],
)
def test_sentences_of_python_are_found(code: str, expected: list[str], tmp_path: Path) -> None:
    assert found_in(code, tmp_path / "file.py") == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('Error::usage(format!("worker {name:?} is not {} here", x))', ["worker … is not … here"]),
        ('// a comment with "three words here"', []),
        ('#[error("the peer said {0}")]', ["the peer said …"]),
        ('#[expect(dead_code, reason = "it is so for now")]', []),
        ('x("a long text \\\n        in two parts")', ["a long text in two parts"]),
        ('tracing::debug!(peer = %a, "nobody will see this");', []),
        ('tracing::warn!(peer = %a, "somebody will see this");', ["somebody will see this"]),
        ('#[cfg(test)]\nmod tests { "not of the code" }', []),
    ],
)
def test_sentences_of_rust_are_found(code: str, expected: list[str], tmp_path: Path) -> None:
    assert found_in(code, tmp_path / "file.rs") == expected


def found_in(code: str, file: Path) -> list[str]:
    file.write_text(code)
    read = sentences.of_python if file.suffix == ".py" else sentences.of_rust
    return [sentence.text for sentence in read(file.parent)]
