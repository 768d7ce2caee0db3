"""Whether a value fits a type annotation, in the words of an error message. gin checks no types; the launcher does."""

import collections.abc
import dataclasses
import inspect
import types
import typing
from typing import Any


@dataclasses.dataclass(frozen=True)
class Instance:
    """Stands for a value that is made later; `type` is its class, or Any where it is not known."""

    type: Any


def fits(value: Any, annotation: Any) -> bool:
    """True when `value` may be given where `annotation` is written. An int is a float, a bool is no number, a string
    is no sequence; what the annotation leaves open, or this function does not know, is accepted."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (Any, inspect.Parameter.empty) or value == Instance(Any):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is typing.Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if origin is typing.Annotated:
        return fits(value, arguments[0])
    if annotation is None or annotation is types.NoneType:
        return value is None
    if origin is collections.abc.Callable or annotation is collections.abc.Callable:
        return callable(value) or isinstance(value, Instance)
    if isinstance(value, Instance):
        return _instance_fits(value.type, origin or annotation)
    if origin is not None:
        return _container_fits(value, origin, arguments)
    if annotation in (int, float):
        return isinstance(value, (int, annotation)) and not isinstance(value, bool)
    return isinstance(value, annotation) if isinstance(annotation, type) else True


def _instance_fits(made: Any, annotation: Any) -> bool:
    return not (isinstance(annotation, type) and isinstance(made, type)) or issubclass(made, annotation)


def _container_fits(value: Any, origin: type, arguments: tuple) -> bool:
    if not isinstance(value, origin) or isinstance(value, str):
        return False
    if isinstance(value, collections.abc.Mapping):
        keys, values = arguments
        return all(fits(k, keys) and fits(v, values) for k, v in value.items())
    if origin is tuple and arguments[1:] != (...,):
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if isinstance(value, collections.abc.Iterable):
        return all(fits(item, arguments[0]) for item in value)
    return True


def spell(annotation: Any) -> str:
    """The annotation as a user would write it."""
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return "None" if annotation is types.NoneType else annotation.__name__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(spell(option) for option in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(repr(option) for option in typing.get_args(annotation))
    if typing.get_origin(annotation) is collections.abc.Callable:
        return "a function (in gin: @NAME or @NAME())"
    text = str(annotation)
    for module in ("typing.", "collections.abc."):
        text = text.replace(module, "")
    return text
