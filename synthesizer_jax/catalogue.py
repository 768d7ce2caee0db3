"""What tasks there are, whether their data is there, and what their examples look like: the `tasks` command.

Importing this module takes seconds (TensorFlow, seqio), listing some more (t5).
"""

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio

from synthesizer_jax import data, tasks
from synthesizer_jax.tasks import sources

KINDS = {  # features -> what reads them
    "text to text": "for encoder-decoders: inputs, targets",
    "text": "for language models: targets",
    "classification": "for classifiers: inputs, a class as target",
    "mixtures": "several tasks, examples drawn at these rates",
}
LENGTHS = {"inputs": 512, "targets": 114}  # where a task has to know how long a row is, as span corruption
CHARACTERS, IDS = 400, 48  # shown of a text and of a row of ids
HINTS = 12  # shown of what is missing


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the catalogue."""

    name: str
    kind: str  # a key of KINDS
    source: str  # of a mixture its tasks and rates
    splits: tuple[str, ...]
    examples: Mapping[str, int | None]  # split -> rows before preprocessing, None where they are not counted
    missing: Mapping[str, str]  # split of a task, or task of a mixture, without data -> how to get it
    cached: bool


def entries(own: Iterable[str] = (), pattern: str = "*") -> Iterator[Entry]:
    """All shipped tasks and mixtures, and those of the names `own`, that match a pattern such as "glue_*"."""
    shipped = [name for names in tasks.CONTENTS.values() for name in names]
    for name in dict.fromkeys([*shipped, *own]):
        if fnmatch.fnmatchcase(name, pattern):
            provider = data.get_mixture_or_task(name)
            yield _mixture(provider) if isinstance(provider, seqio.Mixture) else _task(provider)


def registered() -> list[str]:
    """What seqio knows by now."""
    return sorted([*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()])


def _task(task: seqio.Task) -> Entry:
    cached = {split for split in task.splits if data.is_cached(task, split)}
    missing = {
        split: how for split in task.splits if split not in cached and (how := data.how_to_get(task, split)) is not None
    }
    examples = {split: _count(task, split, split in cached) for split in task.splits if split not in missing}
    source = task.source.description if isinstance(task.source, sources.OURS) else str(task.source)
    return Entry(task.name, _kind(task), source, tuple(task.splits), examples, missing, bool(cached))


def _mixture(mixture: seqio.Mixture) -> Entry:
    parts = ", ".join(f"{task.name} {mixture.get_rate(task):,.10g}" for task in mixture.tasks)
    missing = {
        task.name: how for task in mixture.tasks for split in task.splits[:1] if (how := data.how_to_get(task, split))
    }
    return Entry(
        mixture.name,
        "mixtures",
        parts,
        tuple(mixture.splits),
        {},
        missing,
        all(task.cache_dir for task in mixture.tasks),
    )


def _kind(task: seqio.Task) -> str:
    if "inputs" not in task.output_features:
        return "text"
    return "text to text" if task.output_features[data.TARGETS].add_eos else "classification"


def _count(task, split, cached):
    try:
        return data.number_of_examples(task, split, cached)
    except KeyError:  # seqio's own source of a dataset that TFDS has not prepared
        return None


def table(found: Sequence[Entry]) -> str:
    """The entries as text for a terminal."""
    lines, width = [], max((len(entry.name) for entry in found), default=0)
    for kind, meaning in KINDS.items():
        of_kind = [entry for entry in found if entry.kind == kind]
        lines += [f"{kind} ({meaning})", *(f"  {entry.name:{width}}  {_line(entry)}" for entry in of_kind), ""] * bool(
            of_kind
        )
    hints = list(dict.fromkeys(how for entry in found if entry.kind != "mixtures" for how in entry.missing.values()))
    if hints:
        more = len(hints) - HINTS
        lines += ["-: data that is not here (--tfds_data_dir and --data_dir say where to look)"]
        lines += [f"  {how}" for how in (hints if more <= 1 else hints[:HINTS])]
        lines += [f"  and {more} more: `tasks PATTERN` lists fewer tasks, and all that they lack"] if more > 1 else []
    return "\n".join(lines).rstrip()


def _line(entry):
    if entry.kind == "mixtures":
        lacking = f"  (- {len(entry.missing)} of them without data)" if entry.missing else ""
        return entry.source + lacking
    counts = entry.examples | dict.fromkeys(entry.missing, "-")
    splits = [
        f"{split} {'(not counted)' if counts[split] is None else _number(counts[split])}" for split in entry.splits
    ]
    return "  ".join([*splits, entry.source, *(["cached"] if entry.cached else [])])


def _number(count: int | str) -> str:
    return f"{count:,}" if isinstance(count, int) else count


# Examples


def show(
    name: str,
    split: str | None = None,
    count: int = 3,
    task_feature_lengths: Mapping[str, int] | None = None,
    seed: int = 0,
    full: bool = False,
) -> Iterator[str]:
    """Lines with the first examples of a split: as they are in the source, and what the preprocessors make of them.

    Examples are not cut to the lengths. split: None: "validation", or the first one where there is none of that name.
    full: texts and ids in whole.

    Raises: ValueError where there is no such task or split, FileNotFoundError where its data is missing.
    """
    provider = data.get_mixture_or_task(name)
    if split is None:
        split = "validation" if "validation" in provider.splits else next(iter(provider.splits))
    data.check_split(provider, split)
    if not 1 <= count <= 10**6:
        raise ValueError(f"-n: expected at least 1 and at most 1,000,000, got {count}")
    lengths = LENGTHS if task_feature_lengths is None else dict(task_feature_lengths)
    if not set(provider.output_features) <= set(lengths) or (task_feature_lengths and set(lengths) - set(LENGTHS)):
        wanted = ", ".join(f'"{feature}": N' for feature in provider.output_features)
        raise ValueError(f"task_feature_lengths: expected {{{wanted}}} for {name!r}, got {lengths}")
    if isinstance(provider, seqio.Task):
        yield f"{name}, split {split}: {_task_line(provider, split)}"
        raw = provider.source.get_dataset(split=split, shuffle=False)
        before = list(raw.take(count).as_numpy_iterator())
    else:
        yield f"{name}, split {split}: {_mixture(provider).source}"
        before = []
    options = {"split": split, "shuffle": False, "seed": seed, "num_epochs": 1, "trim_output_features": False}
    dataset = data.task_dataset(provider, lengths, **options)
    after = list(dataset.take(count).as_numpy_iterator())
    for number, pair in enumerate(itertools.zip_longest(before, after), start=1):
        for example, when in zip(pair, ("before", "after"), strict=True):
            if example is not None:
                yield f"\nexample {number}, {when} preprocessing"
                yield from _example(provider, example, full)


def _task_line(task, split):
    count = _count(task, split, cached=False)
    rows = "" if count is None else f", {count:,} examples"
    return f"{_task(task).source}{rows}; targets are {data.output_vocabulary(task).vocab_size:,} ids"


def _example(provider, example: Mapping[str, Any], full: bool) -> Iterator[str]:
    for name, value in example.items():
        if name.endswith("_pretokenized"):
            continue  # the text that the ids give is what a model sees
        ids = np.asarray(value)
        if name not in provider.output_features or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            yield f"  {name}: {_shortened(_as_text(value), CHARACTERS, full)}"
            continue
        text = data.decoded(data.output_vocabulary(provider, name), ids.tolist())
        shown = ids if full else ids[:IDS]
        more = f" and {len(ids) - len(shown)} more" if len(shown) < len(ids) else ""
        yield f"  {name}: {_shortened(text, CHARACTERS, full)}"
        yield f"    {len(ids)} ids: {' '.join(map(str, shown))}{more}"


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_as_text(part)}" for name, part in value.items()) + "}"
    array = np.asarray(value)
    if array.ndim:
        return "[" + ", ".join(map(_as_text, array.tolist())) + "]"
    return str(value)


def _shortened(text: str, limit: int, full: bool) -> str:
    text = text.replace("\n", "\\n")
    return text if full or len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"
