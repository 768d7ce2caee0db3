"""The paper's letters as a notation for the whole zoo: synthesizer("R+V"), synthesizer("FR[rank=16]+V")."""

import ast
import dataclasses
import difflib
import re
from typing import get_args

from synthesizer_jax import scores
from synthesizer_jax.mixers.convolution import DynamicConv, LightweightConv
from synthesizer_jax.mixers.linformer import Linformer
from synthesizer_jax.mixers.mixer import Mixer
from synthesizer_jax.mixers.multi_head import MultiHead
from synthesizer_jax.mixers.token_mixing import TokenMixing
from synthesizer_jax.scores import Dense, DotProduct, FactorizedDense, FactorizedRandom, Mixture, Random, Spec
from synthesizer_jax.scores.base import check_positive, subclasses
from synthesizer_jax.scores.mixture import Weights

# Scores, which can be summed: the paper's letters, and all by the names of their classes. Users' own are found when asked.
_SCORES = {
    "V": (DotProduct, {}),
    "R": (Random, {}),
    "fixedR": (Random, {"trained": False}),
    "FR": (FactorizedRandom, {}),
    "D": (Dense, {}),
    "FD": (FactorizedDense, {}),
} | {
    name: (kind, {})
    for name, kind in vars(scores).items()
    if isinstance(kind, type) and issubclass(kind, Spec) and kind not in (Spec, Mixture)
}
# What takes attention's place as a whole.
_MIXERS: dict[str, tuple[type, dict]] = {
    "LightConv": (LightweightConv, {}),
    "DynConv": (DynamicConv, {}),
    "LightweightConv": (LightweightConv, {}),
    "DynamicConv": (DynamicConv, {}),
    "Linformer": (Linformer, {}),
    "TokenMixing": (TokenMixing, {}),
}


def _kinds() -> dict[str, tuple[type, dict]]:
    users = [kind for kind in subclasses(Spec) + subclasses(Mixer) if dataclasses.is_dataclass(kind)]
    return {kind.__name__: (kind, {}) for kind in users if kind not in (Mixture, MultiHead)} | _SCORES | _MIXERS


_PART = re.compile(r"\s*(?P<letter>\w+)\s*(\[(?P<options>[^\[\]]*)\])?\s*")


def synthesizer(
    notation: str | Spec | Mixer,
    max_length: int,
    weights: Weights = "softmax",
    per_head: bool = True,
    share_query: bool = False,
) -> Spec | Mixer:
    """Attention scores from the paper's letters, or another mixer from its name.

    notation: V, R, fixedR, FR, D, FD or a sum of them such as "R+V"; options of a part stand in brackets,
    "FR[rank=16]+V". Other scores go by the names of their classes, "R+Kernel[kernel='rbf']", and so do mixers, which stand
    alone, "Linformer[rank=64]". What is already built is returned as it is. max_length: n of the parts that have one. weights,
    per_head, share_query: of the mixture, see `Mixture`.

    Raises ValueError that names the part which is not understood.
    """
    if isinstance(notation, Spec | Mixer):
        return notation
    check_positive("max_length", max_length)
    if not isinstance(notation, str):
        raise ValueError(f'notation: expected text such as "R+V" or scores such as Random(512), got {notation!r}')
    texts = _split_sum(notation)
    if len(texts) > 1:
        _check_sum(notation, texts)
    parts = tuple(_part(text, notation, max_length) for text in texts)
    if len(parts) > 1:
        return Mixture(parts, weights=weights, per_head=per_head, share_query=share_query)
    if (weights, per_head, share_query) != (get_args(Weights)[0], True, False):
        raise ValueError(f"weights, per_head, share_query: {notation!r} is no mixture and has none of these options")
    return parts[0]


def _check_sum(notation, texts):
    letters = [match["letter"] for match in map(_PART.fullmatch, texts) if match]
    wrong = [letter for letter in letters if letter in _kinds() and not issubclass(_kinds()[letter][0], Spec)]
    if wrong:
        raise ValueError(
            f"notation: {' and '.join(wrong)} in {notation!r} makes no scores that could be summed; expected a sum of "
            f"{', '.join(_SCORES)}"
        )


def _near(text, kinds):
    folded = {name.lower(): name for name in kinds}
    near = difflib.get_close_matches(re.split(r"[\s\[]", text.strip().lower())[0], folded, n=2)
    hint = f"; did you mean {' or '.join(folded[name] for name in near)}?" if near else ""
    return hint + ("; a bracket is not closed" if text.count("[") > text.count("]") else "")


def _split_sum(notation):
    """Parts of a sum; a plus inside brackets separates nothing."""
    return re.split(r"\+(?![^\[]*\])", notation)


def _part(text, notation, max_length):
    match = _PART.fullmatch(text)
    kinds = _kinds()
    if not match or match["letter"] not in kinds:
        raise ValueError(
            f"notation: {text.strip()!r} in {notation!r} is not understood; expected a sum of {', '.join(_SCORES)}, "
            f'with options in brackets, such as "R+V" or "FR[rank=16]+V"; or one of {", ".join(_MIXERS)}'
            f"{_near(text, kinds)}"
        )
    kind, fixed = kinds[match["letter"]]
    known = [field for field in dataclasses.fields(kind) if field.name not in fixed]
    options = _options(match["options"], text, notation)
    if any(field.name == "max_length" for field in known):
        options = {"max_length": max_length} | options
    unknown = set(options) - {field.name for field in known}
    lacking = [f.name for f in known if f.default is dataclasses.MISSING and f.name not in options]
    if unknown or lacking:
        what = f"has an option that {kind.__name__} does not know" if unknown else f"lacks {' and '.join(lacking)}"
        raise ValueError(
            f"notation: {text.strip()!r} in {notation!r} {what}; expected some of "
            f"{', '.join(field.name for field in known)}"
        )
    return kind(**fixed, **options)


def _options(text, part, notation):
    """ "rank=16, bias=False" as a dict, by Python's own parser."""
    try:
        call = ast.parse(f"options({text or ''})", mode="eval").body
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("not name=value")
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError) as error:
        raise ValueError(
            f"notation: option {text!r} of {part.strip()!r} in {notation!r} is not understood; "
            "expected name=value, such as rank=16, bias=False or kernel='rbf', text in quotes"
        ) from error
