"""The `tasks` command: what is listed, what is missing, and what examples look like."""

import functools
import subprocess
import sys
import time

import pytest
import seqio

from synthesizer_jax import catalogue, data, tasks
from synthesizer_jax.__main__ import main
from synthesizer_jax.tasks import features, quickstart, sources

NAMES = [name for names in tasks.CONTENTS.values() for name in names]

ROWS = [{"inputs": "the object\nis long", "targets": "true"}, {"inputs": "a name", "targets": "false"}]
OUTPUT = {name: seqio.Feature(quickstart.VOCABULARY, add_eos=True) for name in ("inputs", "targets")}


def upper(dataset):
    return dataset.map(lambda x: x | {"inputs": "shown " + x["inputs"]})


for name, source in (
    ("catalogue_test", sources.Examples(lambda split: ROWS, ("train", "validation"))),
    ("catalogue_test_train_only", sources.Examples(lambda split: ROWS, ("train",))),
    ("catalogue_test_missing", sources.Tfds("glue/rte:2.0.0", ("train",))),
    (
        "catalogue_test_files",
        sources.Files({"train": ["a/b.txt"], "validation": ["c.txt"]}, read=print, origin="ask me"),
    ),
    ("catalogue_test_seqios_own", seqio.TfdsDataSource("glue/rte:2.0.0", splits=["train"])),
):
    seqio.TaskRegistry.add(name, source=source, preprocessors=[upper, *features.TOKENIZED], output_features=OUTPUT)
seqio.MixtureRegistry.add("catalogue_test_mixture", [("catalogue_test", 2), ("quickstart_negation", 3000)])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Neither data nor caches of the machine, and nothing of a test's is left for others."""
    seqio.set_tfds_data_dir_override(str(tmp_path))
    monkeypatch.delenv("SYNTHESIZER_JAX_DATA", raising=False)
    yield
    seqio.set_tfds_data_dir_override(None)


def entry(name):
    (found,) = catalogue.entries(pattern=name) if name in NAMES else [catalogue._task(data.get_mixture_or_task(name))]
    return found


def test_every_shipped_name_is_registered_by_its_module_and_listed_once():
    found = [entry.name for entry in catalogue.entries()]
    assert found[: len(NAMES)] == NAMES and len(set(NAMES)) == len(NAMES)
    for module, names in tasks.CONTENTS.items():
        code = f"import seqio, {module}; print(*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names())"
        if module.endswith((".quickstart", ".ag_news")):  # one process each would take minutes
            new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert set(names) == set(new.stdout.split())


def test_the_kind_is_that_of_the_model_that_reads_it():
    assert entry("quickstart_lm").kind == "text"
    assert entry("quickstart_negation").kind == "text to text"
    assert entry("quickstart_negation_class").kind == "classification"
    assert next(catalogue.entries(pattern="quickstart_finetune")).kind == "mixtures"


def test_rows_are_counted_and_missing_data_is_told_by_split(tmp_path, monkeypatch):
    assert entry("catalogue_test").examples == {"train": 2, "validation": 2} and not entry("catalogue_test").missing
    assert entry("catalogue_test_seqios_own").examples == {"train": None}  # it may download
    (how,) = entry("catalogue_test_missing").missing.values()
    assert f"no data of glue/rte:2.0.0 in {tmp_path}" in how and f"tfds build glue/rte:2.0.0 --data_dir={tmp_path}" in how
    assert "--data_dir (SYNTHESIZER_JAX_DATA) is not given" in entry("catalogue_test_files").missing["train"]
    (tmp_path / "c.txt").write_text("x")
    monkeypatch.setenv("SYNTHESIZER_JAX_DATA", str(tmp_path))
    seqio.TaskRegistry.get("catalogue_test_files").source._read = lambda path: [
        {"inputs": path.read_text(), "targets": "y"}
    ]
    assert entry("catalogue_test_files").missing == {
        "train": f"no a/b.txt in {tmp_path} (--data_dir, SYNTHESIZER_JAX_DATA); ask me"
    }
    assert entry("catalogue_test_files").examples == {"validation": 1}


def test_another_version_that_is_there_is_named(tmp_path):
    (tmp_path / "glue/rte/1.0.0").mkdir(parents=True)
    assert "(there is version 1.0.0)" in entry("catalogue_test_missing").missing["train"]


def test_the_table_of_all_needs_neither_vocabulary_nor_network(monkeypatch, capsys):
    monkeypatch.setenv("SYNTHESIZER_JAX_VOCAB", "/no/such/file")
    assert main(["tasks"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in NAMES)
    assert "validation 1,024  made here" in shown and "-: data that is not here" in shown


def test_tasks_of_a_module_of_ones_own_are_listed(tmp_path, monkeypatch, capsys):
    (tmp_path / "catalogue_test_module.py").write_text(
        "from synthesizer_jax.tasks import lm_text\n"
        f"lm_text.add('catalogue_test_own', train={str(tmp_path / 'a.txt')!r}, validation={str(tmp_path / 'b.txt')!r})\n"
    )
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["tasks", "catalogue_test_own", "--module=catalogue_test_module"]) == 0
    assert "  catalogue_test_own  train (not counted)  validation -  files " in capsys.readouterr().out


def test_the_first_split_is_shown_where_there_is_no_validation(capsys):
    assert main(["tasks", "show", "catalogue_test_train_only", "-n", "1"]) == 0
    assert capsys.readouterr().out.startswith("catalogue_test_train_only, split train: ")


def test_a_pattern_lists_some(capsys):
    assert main(["tasks", "quickstart_n*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        n for n in NAMES if n.startswith("quickstart_n")
    ]


def test_examples_before_and_after_preprocessing(capsys):
    assert main(["tasks", "show", "catalogue_test", "-n", "5"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "inputs: the object\\nis long",
        "inputs: " + quickstart.VOCABULARY.decode(quickstart.VOCABULARY.encode("shown " + ROWS[0]["inputs"])),
        "targets: true",
        "example 2, after",
    ):
        assert text in shown
    assert "example 3" not in shown
    ids = [*quickstart.VOCABULARY.encode("shown a name"), 1]
    assert f"    {len(ids)} ids: {' '.join(map(str, ids))}\n" in shown
    assert shown.startswith("catalogue_test, split validation: made here, 2 examples; targets are 2,048 ids\n")


def test_long_texts_are_shortened_unless_asked(monkeypatch):
    row = [{"inputs": "name " * 200, "targets": "true"}]
    source = sources.Examples(lambda split: row, ("validation",))
    monkeypatch.setattr(seqio.TaskRegistry.get("catalogue_test"), "_source", source)
    short = "\n".join(catalogue.show("catalogue_test"))
    long = "\n".join(catalogue.show("catalogue_test", full=True))
    assert "... (1,000 characters)" in short and "more" in short and len(short) < 2000
    assert "characters)" not in long and "name " * 199 in long


def test_a_mixture_shows_its_rates_and_examples_as_they_are_drawn(capsys):
    assert main(["tasks", "show", "catalogue_test_mixture", "--split=train", "-n", "4"]) == 0
    shown = capsys.readouterr().out
    assert "catalogue_test 2, quickstart_negation 3,000" in shown
    assert "example 4, after preprocessing\n  inputs: negation " in shown and "before" not in shown


@pytest.mark.parametrize(
    "argv, text",
    [
        (["show", "quickstart_nubmer"], "did you mean quickstart_number"),
        (["show", "quickstart_number", "--split=test"], "no split 'test'; it has train, validation"),
        (["show", "quickstart_number", "-n", "0"], "-n: expected at least 1 and at most 1,000,000, got 0"),
        (["show"], "expected nothing, a pattern such as 'glue_*', or show NAME, got show"),
        (["glue", "super_glue"], "expected nothing, a pattern"),
        (["no_such_*"], "no task's name matches 'no_such_*'"),
        (["show", "catalogue_test_missing", "--split=train"], "no data of glue/rte:2.0.0"),
        (["show", "catalogue_test", "--tfds_data_dir=/no/such"], "--tfds_data_dir: no such directory: /no/such"),
        (["show", "catalogue_test", "--data_dir=/no/such"], "--data_dir: no such directory: /no/such"),
        (["show", "x", "--module=no_such_module"], "there is no module 'no_such_module'"),
        (["--module=no_such_module"], "there is no module 'no_such_module'"),
        (
            ["show", "quickstart_span_corruption", '--task_feature_lengths={"targets": 9}'],
            'expected {"inputs": N, "targets": N}',
        ),
        (["show", "quickstart_lm", '--task_feature_lengths={"input": 9}'], 'expected {"targets": N}'),
        (["show", "quickstart_lm", "-n", "99999999999999999999"], "at most 1,000,000"),
    ],
)
def test_what_a_wrong_argument_says(argv, text, capsys):
    assert main(["tasks", *argv]) == 2
    assert text in capsys.readouterr().err


def test_missing_data_is_said_within_seconds_without_a_network(tmp_path):
    begin = time.monotonic()
    command = [sys.executable, "-m", "synthesizer_jax", "tasks", "show", "glue_rte", f"--tfds_data_dir={tmp_path}"]
    told = subprocess.run([*command, "--vocabulary", quickstart_model()], capture_output=True, text=True)
    assert told.returncode == 2 and "tfds build glue/rte:2.0.0" in told.stderr and "Traceback" not in told.stderr
    assert time.monotonic() - begin < 60  # of which starting takes most; retries of a download would take minutes


def quickstart_model():
    return quickstart.VOCABULARY.sentencepiece_model_file


@functools.cache
def splits(name):
    """The first split of a task that has data, None where none has."""
    provider = data.get_mixture_or_task(name)
    if isinstance(provider, seqio.Mixture):
        there = [all(data.how_to_get(task, "train") is None for task in provider.tasks if "train" in task.splits)]
        return "train" if all(there) else None
    return next((split for split in provider.splits if data.how_to_get(provider, split) is None), None)


@pytest.mark.parametrize("name", NAMES)
def test_examples_of_every_task_that_has_data_are_shown(name, real_data, capsys):
    split = splits(name)
    if split is None:
        pytest.skip(f"no data of {name} in {real_data}")
    assert main(["tasks", "show", name, f"--split={split}", "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "example 2, after preprocessing" in shown and " ids: " in shown
