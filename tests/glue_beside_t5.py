"""Every row of our GLUE and SuperGLUE tasks beside the same row of t5's own task, and both tasks' metrics.

    python tests/glue_beside_t5.py path/to/shared

A program, because importing t5.data.tasks registers a hundred tasks, and its vocabulary is given by changing a constant
of its module beforehand. Prints as JSON how many rows of each split were equal, the metrics that were, tasks that no
other stands beside, and what t5's en_mix consists of. Ends with an AssertionError at the first difference.
"""

import itertools
import json
import os
import random
import sys

import numpy as np
import seqio
import tensorflow as tf
import t5.data  # noqa: F401  makes its module of the vocabulary's path

BATCH = 1024
OURS = {
    **{
        f"glue_{name}": f"glue_{name}_v002"
        for name in "cola sst2 mrpc stsb qqp qnli rte wnli mnli mnli_matched mnli_mismatched ax".split()
    },
    **{
        f"super_glue_{name}": f"super_glue_{name}_v102"
        for name in "boolq cb copa multirc record rte wic axb axg".split()
    },
    "glue_wnli_simple_eval": "glue_wnli_v002_simple_eval",
    "super_glue_wsc_simple_train": "super_glue_wsc_v102_simple_train",
    "super_glue_wsc_simple_eval": "super_glue_wsc_v102_simple_eval",
    "dpr_simple": "dpr_v001_simple",
}
ANSWERS = ("", " ", "no such label", "Entailment", "1.0", "-3", "3,8", "The", "it's", "a b c")


def rows(task: seqio.Task, split: str) -> tf.data.Dataset:
    return task.get_dataset(None, split, shuffle=False, try_in_mem_cache=False)


def compare_rows(task: seqio.Task, other: seqio.Task, split: str) -> int:
    """All features, in order; batches only to be fast."""
    count = 0
    pairs = itertools.zip_longest(*(rows(t, split).ragged_batch(BATCH) for t in (task, other)))
    for one, two in pairs:
        assert one is not None and two is not None, f"{task.name} {split}: another number of rows after {count}"
        assert one.keys() == two.keys(), f"{task.name} {split}: {sorted(one)} and {sorted(two)}"
        for name in one:
            for a, b in zip(_arrays(one[name]), _arrays(two[name]), strict=True):
                same = a.dtype == b.dtype and np.array_equal(a, b)
                assert same, f"{task.name} {split}: {name!r} differs in rows {count} to {count + BATCH}"
        count += len(_arrays(one["idx" if "idx" in one else "targets_pretokenized"])[0])
    return count


def _arrays(batch: tf.Tensor | tf.RaggedTensor) -> list[np.ndarray]:
    if isinstance(batch, tf.RaggedTensor):
        return [batch.flat_values.numpy(), *(splits.numpy() for splits in batch.nested_row_splits)]
    return [batch.numpy()]


def compare_metrics(task: seqio.Task, other: seqio.Task, split: str) -> dict[str, float]:
    """The same answers to real rows, a third of them right, a third another row's, a third no answer at all."""
    examples = list(rows(task, split).take(600).as_numpy_iterator())
    draw = random.Random(task.name)
    targets = [example["targets_pretokenized"].decode() for example in examples]
    answers = [draw.choice((target, draw.choice(targets), draw.choice(ANSWERS))) for target in targets]
    results = []
    for t in (task, other):
        said = [t.postprocess_fn(a, example=e, is_target=False) for a, e in zip(answers, examples, strict=True)]
        right = [t.postprocess_fn(a, example=e, is_target=True) for a, e in zip(targets, examples, strict=True)]
        results.append({k: float(v) for metric in t.metric_fns for k, v in metric(right, said).items()})
    ours, theirs = results
    assert ours.keys() == theirs.keys(), f"{task.name}: {ours} and {theirs}"
    for name in ours:
        assert ours[name] == theirs[name], f"{task.name} {name}: {ours[name]} and {theirs[name]}"
    return ours


def main(shared: str) -> None:
    vocabulary = f"{shared}/data/vocab/t5/spiece.model"
    os.environ["SYNTHESIZER_JAX_VOCAB"] = vocabulary
    sys.modules["t5.data.utils"].DEFAULT_SPM_PATH = vocabulary  # the attribute t5.data.utils is seqio's module
    seqio.set_tfds_data_dir_override(f"{shared}/tfds")
    import t5.data.mixtures  # noqa: F401  registers t5's

    from synthesizer_jax.tasks import glue, super_glue  # noqa: F401  registers ours

    equal, metrics = {}, {}
    for name, theirs in OURS.items():
        task, other = seqio.TaskRegistry.get(name), seqio.TaskRegistry.get(theirs)
        assert set(other.splits) <= set(task.splits), f"{name}: {task.splits}, t5's has {list(other.splits)}"
        equal[name] = {split: compare_rows(task, other, split) for split in other.splits}
        if task.metric_fns:
            metrics[name] = compare_metrics(task, other, next(s for s in other.splits if "train" not in s))
        else:
            assert not other.metric_fns, f"{name}: no metrics, t5's has {other.metric_fns}"
    known = {task for task in seqio.TaskRegistry.names() if task.startswith(("glue_", "super_glue_", "dpr_"))}
    rest = {task for task in known - {*OURS, *OURS.values()} if "sentinel" not in task}
    ours = {theirs: name for name, theirs in OURS.items()}
    mixed = [ours.get(task, task) for task in seqio.MixtureRegistry.get("en_mix").rate_per_task_name]
    print(json.dumps({"rows": equal, "metrics": metrics, "rest": sorted(rest), "en_mix": sorted(mixed)}))


if __name__ == "__main__":
    main(sys.argv[1])
