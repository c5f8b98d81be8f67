"""Typed arguments: what a task's annotations say of its payload, checked when a job is enqueued and when it runs.

A type that msgspec knows (JSON's own, Struct, dataclass, TypedDict, enum, datetime, UUID, Decimal, …) or, where the
program has pydantic, one with its models. Other annotations say nothing.
"""

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Final

import msgspec

from pgqueue.errors import InvalidPayload
from pgqueue.log import logger

_log: Final = logger("pgqueue.typed")
#: Their values are JSON as they are.
_PLAIN: Final = frozenset({int, float, str, bool, NoneType, dict, list, Any})


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter with a type. `load` makes its value of JSON, `dump` JSON of its value; both raise ValueError."""

    name: str
    load: Callable[[Any], Any]
    dump: Callable[[Any], Any]
    #: Values of this very type are right as they are.
    exact: Any = None

    def loaded(self, task: str, value: Any) -> Any:
        """Return the value that JSON stands for; raises InvalidPayload."""
        try:
            return self.load(value)
        except (ValueError, TypeError) as exc:
            raise InvalidPayload(f"the payload of {task!r}: {self.name}: {exc}", column="payload") from None

    def dumped(self, task: str, value: Any) -> Any:
        """Return a value as JSON, as plain Python; raises InvalidPayload."""
        try:
            return self.dump(value)
        except (ValueError, TypeError) as exc:
            raise InvalidPayload(f"task {task!r}: {self.name}: {exc}", column="payload") from None


def arguments_of(function: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> tuple[Argument, ...]:
    """Return the parameters whose annotation says something."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    found = []
    for parameter in parameters:
        if parameter.annotation is parameter.empty:
            continue
        annotated = SimpleNamespace(__annotations__={"hint": parameter.annotation})
        try:
            hint = typing.get_type_hints(annotated, names, include_extras=True)["hint"]
            argument = _argument(parameter.name, hint | None if parameter.default is None else hint)
        except Exception as exc:
            # Such as a name that only a type checker knows.
            _log.debug("an annotation says nothing", parameter=parameter.name, error=repr(exc))
            continue
        if argument is not None:
            found.append(argument)
    return tuple(found)


def _argument(name: str, hint: Any) -> Argument | None:
    kinds = set(_kinds(hint))
    if Any in kinds and kinds <= {Any, NoneType}:
        return None
    if any(_is_model(kind) for kind in kinds):
        adapter = sys.modules["pydantic"].TypeAdapter(hint)

        def dump_model(value: Any) -> Any:
            return adapter.dump_python(adapter.validate_python(value), mode="json")

        return Argument(name, adapter.validate_python, dump_model)
    if _is_unknown(msgspec.inspect.type_info(hint)):
        return None

    def load(value: Any) -> Any:
        return msgspec.convert(value, hint, str_keys=True)

    if kinds <= _PLAIN:

        def check(value: Any) -> Any:
            load(value)
            return value

        return Argument(name, load, check, hint if hint in (int, float, str, bool) else None)

    def dump(value: Any) -> Any:
        built = msgspec.to_builtins(value, str_keys=True)
        load(built)
        return built

    return Argument(name, load, dump)


def _kinds(hint: Any) -> Iterator[Any]:
    """Give the types that an annotation is made of."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        yield from map(type, arguments)
        return
    if origin is typing.Annotated:
        arguments = arguments[:1]
    elif origin is None:
        yield hint
    elif origin not in (typing.Union, UnionType):
        yield origin
    for argument in arguments:
        if argument is not Ellipsis:
            yield from _kinds(argument)


def _is_model(kind: Any) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def _is_unknown(info: Any, depth: int = 0) -> bool:
    """Say whether a type has a part that msgspec does not know."""
    if isinstance(info, msgspec.inspect.CustomType):
        return True
    if depth > 8 or not isinstance(info, msgspec.inspect.Type):
        return False
    parts: list[Any] = []
    for name in info.__struct_fields__:
        part = getattr(info, name)
        parts += part if isinstance(part, tuple) else (part,)
    return any(_is_unknown(part, depth + 1) for part in parts)
