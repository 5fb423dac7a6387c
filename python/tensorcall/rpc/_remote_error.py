"""Exceptions that cross from one worker to another.

The callee sends the exception itself, if it pickles, together with a text that names the worker
and holds the traceback. The caller raises the same exception again: class, attributes and notes.
Where the class takes one text, that text becomes its message, as with torch; otherwise the
exception is left as it was and the text is its cause. If the exception cannot be rebuilt, a
stand-in is raised that is an instance of the nearest class the caller knows, and a
``RuntimeError``. Attributes travel a second time, each that can be sent, for classes whose own way
of pickling forgets them and for stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import _tensorcall
from . import internal
from ._worker import WorkerInfo


class RemoteTraceback(Exception):
    """Where an exception was raised on another worker; the cause of the exception here."""


class OperatorError(RuntimeError):
    """An error of a torch operator or script function; travels as its text alone."""


class ErrorCarrier:
    """Turns an exception of this worker into the bytes of a reply."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info

    def dump(self, error: BaseException) -> tuple[bytes, list[torch.Tensor], list[_tensorcall.RRef], str]:
        """Return payload, tensors, references and the text to show on this worker ("" for none)."""
        with internal.collecting_rrefs() as rrefs:
            payload, tensors, text = self._dump(error)
        return payload, tensors, [rref for _, rref in rrefs.values()], text

    def _dump(self, error: BaseException) -> tuple[bytes, list[torch.Tensor], str]:
        if isinstance(error, OperatorError):
            return *_pack(str(error), RuntimeError(str(error)), plain=True), ""
        text = self._text(error, repr(error))
        if not isinstance(error, Exception):
            # SystemExit and its like end a process where they are raised; not the caller's.
            said = f"{type(error).__name__}: {error}\n{text}"
            return *_pack(said, RuntimeError(said), plain=True), text
        return *_pack(self._text(error, _unescaped(error)), error, plain=False), text

    def describe(self, error: BaseException) -> tuple[str, str, str, str]:
        """Return classes, message and origin in plain data, and the text to show on this worker.

        For callers in other languages, which have use for neither the exception itself nor its attributes.
        """
        if isinstance(error, OperatorError):
            return "builtins:RuntimeError", str(error), "", ""
        text = self._text(error, repr(error))
        return _joined(_names(error)), _said(error), self._text(error, _unescaped(error)), text

    def _text(self, error: BaseException, line: str) -> str:
        frames = error.__traceback__
        while frames is not None and _is_ours(frames.tb_frame.f_globals.get("__name__")):
            frames = frames.tb_next
        trace = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
        return f"On {self._info}:\n{line}\n{trace}"


def load(payload: bytes, tensors: Sequence[torch.Tensor]) -> Exception:
    """Rebuild the exception that :meth:`ErrorCarrier.dump` was given, or a stand-in."""
    text, names, plain, pickled, attributes = pickle.loads(payload)
    error, why = _rebuild(pickled, tensors)
    if error is not None and plain:
        return error
    error = _made_of_text(names, text, why) if error is None else _with_text(error, text)
    _restore(error, attributes, tensors)
    return error


def describe_packed(payload: bytes, tensors: Sequence[torch.Tensor]) -> tuple[str, str, str]:
    """What :meth:`ErrorCarrier.dump` was given, as :meth:`ErrorCarrier.describe` would have told it."""
    text, names, plain, pickled, _ = pickle.loads(payload)
    error, _ = _rebuild(pickled, tensors)
    return _joined(names), text if error is None else _said(error), "" if plain else text


def load_plain(classes: str, message: str, origin: str) -> Exception:
    """The exception that :meth:`ErrorCarrier.describe`, or a worker in another language, has told.

    It is of the first of its classes that this worker has loaded, or a stand-in below that; nothing is
    imported because of what others say.
    """
    parts = (cls.partition(":") for cls in classes.split())
    names = [(module, name) for module, _, name in parts] or [("builtins", "RuntimeError")]
    text = origin if message in origin else f"{message} ({origin})" if origin else message
    cls = _loaded(names[0])
    if cls is not None:
        try:
            return _with_text(cls(text), text)
        except Exception:
            # It wants other arguments.
            pass
    return stand_in(names, text, _loaded)


def text_of(payload: bytes) -> str:
    """What :meth:`ErrorCarrier.dump` had to say, for a log."""
    text: str = pickle.loads(payload)[0]
    return text


def stand_in(
    names: Sequence[tuple[str, str]],
    text: str,
    find: Callable[[tuple[str, str]], type[Exception] | None] | None = None,
) -> Exception:
    """An exception with message `text` in the place of one whose classes are called `names`."""
    module, name = names[0]
    known = next((cls for cls in map(find or _find, names) if cls is not None), Exception)
    bases = (known,) if issubclass(known, RuntimeError) else (known, RuntimeError)
    body = {
        "__module__": module,
        "__init__": lambda self, *_: None,
        "__str__": lambda self: text,
        "__reduce__": lambda self: (stand_in, (names, text), vars(self) or None),
    }
    try:
        made: Exception = type(name.rpartition(".")[2], bases, body)(text)
    except TypeError:
        # The class cannot be made from one text even without running its constructor.
        return RuntimeError(text)
    return made


class _Pickled(NamedTuple):
    """An object that was serialized, and which tensors of the reply are its."""

    data: bytes
    first_tensor: int
    tensor_count: int


def _pack(text: str, error: Exception, *, plain: bool) -> tuple[bytes, list[torch.Tensor]]:
    names = _names(error)
    tensors: list[torch.Tensor] = []
    pickled = _pickle(error, tensors)
    attributes = {}
    for name, value in () if plain else vars(error).items():
        attribute = _pickle(value, tensors)
        if attribute is not None:
            attributes[name] = attribute
    return pickle.dumps((text, names, plain, pickled, attributes)), tensors


def _pickle(obj: object, tensors: list[torch.Tensor]) -> _Pickled | None:
    try:
        data, own = internal.serialize(obj)
    except Exception:
        return None
    first = len(tensors)
    tensors += own
    return _Pickled(data, first, len(own))


def _unpickle(pickled: _Pickled, tensors: Sequence[torch.Tensor]) -> Any:
    own = tensors[pickled.first_tensor : pickled.first_tensor + pickled.tensor_count]
    return internal.deserialize(pickled.data, own)


def _rebuild(
    pickled: _Pickled | None, tensors: Sequence[torch.Tensor]
) -> tuple[Exception | None, BaseException | None]:
    """The exception, or why there is none."""
    if pickled is None:
        return None, None
    try:
        error = _unpickle(pickled, tensors)
    except Exception as failure:
        return None, failure
    return (error, None) if isinstance(error, Exception) else (None, None)


def _made_of_text(names: Sequence[tuple[str, str]], text: str, why: BaseException | None) -> Exception:
    cls = _find(names[0])
    if cls is not None:
        try:
            return cls(text)
        except Exception as failure:
            why = failure
    return stand_in(names, _stand_in_text(why, text))


def _restore(error: Exception, attributes: dict[str, _Pickled], tensors: Sequence[torch.Tensor]) -> None:
    """Give back attributes that got lost."""
    for name, pickled in attributes.items():
        if name not in vars(error):
            with contextlib.suppress(Exception):
                setattr(error, name, _unpickle(pickled, tensors))


def _with_text(error: Exception, text: str) -> Exception:
    cls = type(error)
    takes_text = cls.__str__ is BaseException.__str__ or cls.__str__ is KeyError.__str__
    if takes_text and (not error.args or (len(error.args) == 1 and type(error.args[0]) is str)):
        error.args = (text,)
    else:
        error.__cause__ = RemoteTraceback(text)
    return error


def _stand_in_text(why: BaseException | None, text: str) -> str:
    reason = "its class is not known here" if why is None else str(why)
    return (
        f"Failed to create original exception type. Error msg was {reason} "
        f"Original exception on remote side was {text}"
    )


def _names(error: BaseException) -> list[tuple[str, str]]:
    """The class of an exception and those that it derives from, the most special one first."""
    return [(cls.__module__, cls.__qualname__) for cls in type(error).__mro__ if issubclass(cls, Exception)]


def _joined(names: Sequence[tuple[str, str]]) -> str:
    """The names of classes in one text."""
    return " ".join(f"{module}:{name}".replace(" ", "_") for module, name in names) or "builtins:RuntimeError"


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error}"


def _loaded(name: tuple[str, str]) -> type[Exception] | None:
    module, qualname = name
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _find(name: tuple[str, str]) -> type[Exception] | None:
    module, qualname = name
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except Exception:
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _unescaped(error: BaseException) -> str:
    """Like ``repr(error)``, but line breaks stay line breaks."""
    if type(error).__repr__ is not BaseException.__repr__:
        return repr(error)
    return f"{type(error).__name__}({', '.join(map(_quoted, error.args))})"


def _quoted(arg: object) -> str:
    if type(arg) is not str:
        return repr(arg)
    quote = '"' if "'" in arg else "'"
    return f"{quote}{arg}{quote}"


def _is_ours(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == __name__.partition(".")[0]
