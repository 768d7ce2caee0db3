"""Examples with more tokens than a row has, which are cut: how many, and the lengths that would keep them whole."""

import dataclasses
import functools
import time
from collections.abc import Mapping

import seqio

from synthesizer_jax.data.examples import task_dataset
from synthesizer_jax.data.providers import Provider, get_mixture_or_task, use_cache, with_split
from synthesizer_jax.tasks import sources

EXAMPLES = 1000  # of each task
SECONDS = 10.0  # for all tasks; a slow one is looked at in part
LEAST = 32  # examples of each task, however slow


@dataclasses.dataclass(frozen=True)
class Cut:
    """Examples of one task that are longer in one feature than its length."""

    task: str
    split: str
    feature: str
    length: int  # tokens that are kept, the end of the sequence among them
    seen: int  # the first examples of the split
    longer: int  # how many of them are cut
    longest: int  # tokens

    def __str__(self) -> str:
        return (
            f"warning: task_feature_lengths: {self.longer:,} of the first {self.seen:,} examples of {self.task} "
            f'({self.split}) have more than {self.length} tokens of "{self.feature}" (longest {self.longest}) and are '
            f'cut; {{"{self.feature}": {self.longest}}} keeps all of these'
        )


def cut_examples(
    mixture_or_task: str | Provider,
    task_feature_lengths: Mapping[str, int],
    *,
    split: str = "train",
    use_cached_tasks: bool | None = None,
    seed: int = 0,
) -> list[Cut]:
    """What the lengths cut of the first examples of each task; nothing where a task makes rows of the very lengths.

    Raises: ValueError where the task's preprocessors can't work with the lengths; FileNotFoundError without the data.
    """
    provider = get_mixture_or_task(mixture_or_task)
    cached, lengths = use_cache(provider, use_cached_tasks, split), tuple(sorted(task_feature_lengths.items()))
    tasks = with_split(provider, split)
    seconds = SECONDS / max(len(tasks), 1)
    key = lengths, split, cached, seed, seconds, sources.places()
    return [cut for task in tasks for cut in _cuts(task, *key)]


@functools.lru_cache(maxsize=256)  # asked before a run, and when it begins
def _cuts(
    task: seqio.Task,
    lengths: tuple[tuple[str, int], ...],
    split: str,
    cached: bool,
    seed: int,
    seconds: float,
    places: tuple,  # where the data was looked for when this was computed
) -> tuple[Cut, ...]:
    options = {"split": split, "use_cached": cached, "seed": seed, "shuffle": False, "num_epochs": 1}
    dataset = task_dataset(_untrimmed(task), dict(lengths), trim_output_features=False, **options)
    seen, tokens = 0, {name: [] for name, _ in lengths}
    until = time.monotonic() + seconds
    for seen, example in enumerate(dataset.take(EXAMPLES).as_numpy_iterator(), start=1):
        for name in tokens:
            tokens[name].append(len(example[name]))
        if seen >= LEAST and time.monotonic() > until:
            break
    longer = {name: sum(count > length for count in tokens[name]) for name, length in lengths}
    return tuple(
        Cut(task.name, split, name, length, seen, longer[name], max(tokens[name]))
        for name, length in lengths
        if longer[name]
    )


def _untrimmed(task: seqio.Task) -> seqio.Task:
    """The task without the step that cuts examples to make room for the end of a sequence.

    Steps that make rows of the lengths, such as span corruption and the division of a text, see the lengths as ever.
    """

    def step_of(step):
        trims = getattr(step, "func", step) is seqio.preprocessors.append_eos_after_trim
        return seqio.preprocessors.append_eos if trims else step

    return task.replace(preprocessors=[step_of(step) for step in task.preprocessors])
