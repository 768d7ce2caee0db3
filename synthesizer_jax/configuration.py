"""The bindings of a configuration, checked before anything runs: names, types, what is missing, what has no effect.

Knows the syntax tree of gin files but not gin itself, which ignores a macro that nothing refers to, takes a string for
a number and stops at the first missing value. Every fault is collected, with its place and the likely fix.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Protocol

from synthesizer_jax import annotations


@dataclasses.dataclass(frozen=True)
class Macro:
    """%NAME"""

    name: str

    def __repr__(self):
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """@scope/name, or @scope/name() for what it returns."""

    name: str
    evaluate: bool

    def __repr__(self):
        return f"@{self.name}()" if self.evaluate else f"@{self.name}"

    @property
    def scope(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def selector(self) -> str:
        return self.name.rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Binding:
    """scope/selector.argument = value; a macro's binding has no argument."""

    scope: str
    selector: str
    argument: str
    value: Any  # Python literals, with Macro and Reference in them
    place: str  # "runs/pretrain.gin, line 12" or "--gin.NAME"
    given_by: str  # the file or flag on the command line that brought it

    @property
    def key(self) -> str:
        name = f"{self.scope}/{self.selector}" if self.scope else self.selector
        return f"{name}.{self.argument}" if self.argument else name

    @property
    def required(self) -> bool:
        return isinstance(self.value, Macro) and self.value.name in ("gin.REQUIRED", "REQUIRED")


class Configurables(Protocol):
    """What may be configured."""

    def find(self, selector: str) -> Callable | None:
        """The function or class of that name."""

    def names(self) -> Iterable[str]:
        """All names, for near misses."""


class Program:
    """A command's bindings, followed from its function. `faults` lists all that is wrong, a line or more each."""

    def __init__(
        self,
        command: str,
        bindings: Sequence[Binding],
        configurables: Configurables,
        ignored: Set[str],
        examples: dict[str, str],
        tolerated: Set[str] = frozenset(),
    ):
        """ignored: selectors of other commands; tolerated: those of them that may be all that a file or a flag is for;
        examples: known macros, with an example of each."""
        self.command, self.bindings, self.configurables, self.examples = command, bindings, configurables, examples
        self.tolerated = tolerated
        self.faults: list[str] = []
        self.bound: dict[str, Binding] = {}  # the last binding of each key
        self.required: dict[str, Binding] = {}  # NAME = %gin.REQUIRED
        self.functions: dict[str, Callable] = {}  # of each key that is not a macro
        self.used: set[str] = set()  # keys that the command reads
        self.missing: dict[str, str] = {}  # name -> how to give it
        for binding in bindings:
            if binding.selector not in ignored:
                self._add(binding)
        self._follow(configurables.find(command), command, scope="", evaluate=True)
        self._check_effects()
        if self.missing:
            self.faults.append(self._missing_text())

    def open(self, key: str) -> bool:
        """True for a binding to a macro that nobody gives: the parameter keeps its default."""
        value = self.bound[key].value
        return isinstance(value, Macro) and value.name not in self.bound

    def _add(self, binding: Binding):
        if binding.argument:
            function = self.configurables.find(binding.selector)
            if function is None:
                return self._fault(
                    f"{binding.place}: no configurable {binding.selector!r}",
                    binding.selector,
                    self.configurables.names(),
                )
            known = parameters(function)
            if known is not None and binding.argument not in known:
                return self._fault(
                    f"{binding.place}: {binding.selector} has no parameter {binding.argument!r}",
                    binding.argument,
                    known,
                )
            self.functions[binding.key] = function
        (self.required if binding.required else self.bound)[binding.key] = binding

    def _fault(self, text: str, name: str, known: Iterable[str]):
        self.faults.append(text + (did_you_mean(name, known) or f"; known are: {', '.join(sorted(known))}"))

    # Following the command's function

    def _follow(self, function: Callable, label: str, scope: str, evaluate: bool):
        """Marks what a call of `function` in `scope` reads; notes what it lacks and what has a wrong type."""
        inside = {"", *scope.split("/")}
        given = {
            binding.argument: key
            for key, binding in (self.required | self.bound).items()
            if self.functions.get(key) is function and set(binding.scope.split("/")) <= inside
        }
        for name, parameter in (parameters(function) or {}).items():
            needed = evaluate and parameter.default is inspect.Parameter.empty
            self._follow_parameter(f"{label}.{name}", parameter.annotation, needed, given.get(name), scope)

    def _follow_parameter(self, label: str, annotation: Any, needed: bool, key: str | None, scope: str):
        if key is not None:
            self.used.add(key)
        if key not in self.bound:
            if needed or key is not None:
                self._miss(label, label, annotation)
        elif self.open(key):
            macro = self.bound[key].value.name
            self.used.add(macro)
            if needed or macro in self.required:
                self._miss(macro, label, annotation)
        else:
            self._follow_value(self.bound[key].value, label, scope)
            self._check_type(self.bound[key], label, annotation)

    def _follow_value(self, value: Any, label: str, scope: str):
        match value:
            case Macro(name=name):
                self.used.add(name)
                if name in self.bound:
                    self._follow_value(self.bound[name].value, label, scope=name)  # as gin evaluates a macro
                else:
                    self._miss(name, label, Any)
            case Reference():
                function = self.configurables.find(value.selector)
                if function is None:
                    self._fault(
                        f"{label} = {value}: no configurable {value.selector!r}",
                        value.selector,
                        self.configurables.names(),
                    )
                else:
                    self._follow(function, value.name, value.scope or scope, value.evaluate)
            case dict() | list() | tuple():
                for item in _items(value):
                    self._follow_value(item, label, scope)

    def _check_type(self, binding: Binding, label: str, annotation: Any):
        while isinstance(binding.value, Macro):
            if binding.value.name not in self.bound:
                return
            binding = self.bound[binding.value.name]
        try:
            value = self._concrete(binding.value)
        except KeyError:
            return  # a part is missing or unknown, which is said elsewhere
        if not annotations.fits(value, annotation):
            target = "" if binding.key == label else f" ({label})"
            named = "" if binding.place.endswith(f".{binding.key}") else f": {binding.key}"
            self.faults.append(
                f"{binding.place}{named}{target}: expected {annotations.spell(annotation)}, "
                f"got {binding.value!r}{_type_fix(binding, annotation)}"
            )

    def _concrete(self, value: Any) -> Any:
        match value:
            case Macro(name=name):
                return self._concrete(self.bound[name].value)
            case Reference():
                function = self.configurables.find(value.selector)
                if function is None:
                    raise KeyError(value.name)
                return annotations.Instance(_made_by(function)) if value.evaluate else function
            case dict():
                return {self._concrete(k): self._concrete(v) for k, v in value.items()}
            case list() | tuple():
                return type(value)(map(self._concrete, value))
        return value

    # What has no effect, what is missing

    def _check_effects(self):
        referred = {macro.name for binding in self.bindings for macro in _macros(binding.value)}
        for binding in {b.key: b for b in self.bindings if not b.argument}.values():
            from_flag = binding.given_by.startswith("--")
            if binding.key not in referred and (from_flag or binding.key not in self.examples):
                known = binding.key in self.examples
                near = "; leave it out" if known else did_you_mean(binding.key, {*referred, *self.examples})
                self.faults.append(
                    f"{binding.place}: nothing in `{self.command}` refers to the macro {binding.key}{near}"
                )
        if not self.faults:
            used = self.used | self._of_no_interest()
            for given in dict.fromkeys(binding.given_by for binding in self.bindings):
                if not used & {binding.key for binding in self.bindings if binding.given_by == given}:
                    self.faults.append(f"{given} has no effect on `{self.command}`; leave it out")

    def _of_no_interest(self) -> set[str]:
        """Keys of tolerated bindings, and the macros that they refer to."""
        found = [binding for binding in self.bindings if binding.selector in self.tolerated]
        return {binding.key for binding in found} | {macro.name for b in found for macro in _macros(b.value)}

    def _miss(self, name: str, label: str, annotation: Any):
        example = self.examples.get(name, f"<{annotations.spell(annotation)}>")
        self.missing.setdefault(name, f"--gin.{name}='{example}'" + ("" if name == label else f"   ({label})"))

    def _missing_text(self) -> str:
        width = max(map(len, self.missing))
        lines = [f"missing: {name:{width}}   give it as   {how}" for name, how in self.missing.items()]
        if any(name.startswith(f"{self.command}.") for name in self.missing):
            lines.append(
                f"(values named {self.command}.* are set by the gin file of a run, such as runs/pretrain.gin, "
                "and of a model, such as models/t5_small.gin)"
            )
        return "\n".join(lines)


@functools.cache
def parameters(function: Callable) -> dict[str, inspect.Parameter] | None:
    """The parameters of a function or class, with real annotations; None when it takes any name."""
    # gin wraps a class by a metaclass, whose call takes anything.
    target = function.__init__ if isinstance(function, type) else function
    try:
        found = dict(inspect.signature(target, eval_str=True).parameters)
    except NameError:  # an annotation that only a type checker can resolve
        found = dict(inspect.signature(target).parameters)
    if isinstance(function, type):
        del found[next(iter(found))]  # self
    return None if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values()) else found


def _made_by(function: Callable) -> Any:
    if isinstance(function, type):
        return function
    try:
        made = typing.get_type_hints(inspect.unwrap(function)).get("return", Any)
    except NameError:
        made = Any
    return made if isinstance(made, type) else Any


def _items(value: dict | list | tuple) -> Iterable:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else value


def _macros(value: Any) -> Iterator[Macro]:
    if isinstance(value, Macro):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in _items(value):
            yield from _macros(item)


def _type_fix(binding: Binding, annotation: Any) -> str:
    value = binding.value
    if isinstance(value, str):
        spelt = {"true": "True", "false": "False", "none": "None"}.get(value.lower(), value)
        try:
            unquoted = ast.literal_eval(spelt)
        except (ValueError, SyntaxError):
            return ""
        return f"; write it without quotes: {binding.key} = {spelt}" if annotations.fits(unquoted, annotation) else ""
    if not isinstance(value, (Reference, bool)) and annotations.fits(str(value), annotation):
        return f'; write it in quotes: {binding.key} = "{value}"'
    return ""


def near(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that `name` may have been meant for."""
    lower = {k.lower(): k for k in known}
    return [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.6)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message; empty where no known name is near."""
    found = near(name, known)
    return f"; did you mean {' or '.join(found)}?" if found else ""
