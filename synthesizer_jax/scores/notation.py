"""The paper's letters as a notation: synthesizer("R+V"), synthesizer("FR[rank=16]+V")."""

import ast
import re
from typing import get_args

from synthesizer_jax.scores.base import Spec, check_positive
from synthesizer_jax.scores.dense import Dense, FactorizedDense
from synthesizer_jax.scores.dot_product import DotProduct
from synthesizer_jax.scores.mixture import Mixture, Weights
from synthesizer_jax.scores.random import FactorizedRandom, Random

_LETTERS = {
    "V": (DotProduct, {}),
    "R": (Random, {}),
    "fixedR": (Random, {"trained": False}),
    "FR": (FactorizedRandom, {}),
    "D": (Dense, {}),
    "FD": (FactorizedDense, {}),
}
_PART = re.compile(r"\s*(?P<letter>\w+)\s*(\[(?P<options>[^\[\]]*)\])?\s*")


def synthesizer(
    notation: str | Spec,
    max_length: int,
    weights: Weights = "softmax",
    per_head: bool = True,
    share_query: bool = False,
) -> Spec:
    """Attention scores from the paper's letters.

    notation: V, R, fixedR, FR, D, FD or a sum of them such as "R+V"; options of a part stand in brackets,
    "FR[rank=16]+V". Scores that are already built are returned as they are. max_length: n of the synthetic parts.
    weights, per_head, share_query: of the mixture, see `Mixture`.

    Raises ValueError that names the part which is not understood.
    """
    if isinstance(notation, Spec):
        return notation
    check_positive("max_length", max_length)
    if not isinstance(notation, str):
        raise ValueError(f'notation: expected text such as "R+V" or scores such as Random(512), got {notation!r}')
    parts = tuple(_part(text, notation, max_length) for text in _split_sum(notation))
    if len(parts) > 1:
        return Mixture(parts, weights=weights, per_head=per_head, share_query=share_query)
    if (weights, per_head, share_query) != (get_args(Weights)[0], True, False):
        raise ValueError(f"weights, per_head, share_query: {notation!r} is no mixture and has none of these options")
    return parts[0]


def _split_sum(notation):
    """Parts of a sum; a plus inside brackets separates nothing."""
    return re.split(r"\+(?![^\[]*\])", notation)


def _part(text, notation, max_length):
    match = _PART.fullmatch(text)
    if not match or match["letter"] not in _LETTERS:
        raise ValueError(
            f"notation: {text.strip()!r} in {notation!r} is not understood; expected a sum of {', '.join(_LETTERS)}, "
            'with options in brackets, such as "R+V" or "FR[rank=16]+V"'
        )
    kind, fixed = _LETTERS[match["letter"]]
    options = _options(match["options"], text, notation)
    if kind is not DotProduct:
        options = {"max_length": max_length} | options
    try:
        return kind(**fixed, **options)
    except TypeError as error:
        allowed = [name for name in kind.__dataclass_fields__ if name not in fixed]
        raise ValueError(
            f"notation: {text.strip()!r} in {notation!r} has an option that {kind.__name__} does not know; "
            f"expected some of {', '.join(allowed)}"
        ) from error


def _options(text, part, notation):
    options = {}
    for option in filter(None, (piece.strip() for piece in (text or "").split(","))):
        name, _, value = option.partition("=")
        try:
            options[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError) as error:
            raise ValueError(
                f"notation: option {option!r} of {part.strip()!r} in {notation!r} is not understood; "
                "expected name=number, such as rank=16 or bias=False"
            ) from error
    return options
