"""PersonaChat: ParlAI's files to examples, and both tasks on the file that there is."""

import pytest
import seqio

from synthesizer_jax import tasks
from synthesizer_jax.tasks import personachat, sources, text_metrics, vocabulary

VALID = "personachat/valid_self_original_no_cands.txt"
DIALOGUES = """\
1 your persona: i have two dogs.
2 your persona: i like: tea.
3 hi ! how are you ?\tgreat , and you ?
4 fine . any pets ?\tyes , i've two dogs .
1 your persona: i am a baker.
2 partner's persona: i fly planes.
3 hello\thello there\t\tbread|hello there|no
4 what do you do ?\ti bake .\t1.0\tbread|i bake .

1 no personas here\tnone at all
"""


@pytest.fixture
def turns(tmp_path):
    def read(text):
        path = tmp_path / "dialogues.txt"
        path.write_bytes(text.encode())
        return list(personachat.read_turns(path))

    return read


def test_each_line_of_a_dialogue_is_a_turn(turns):
    dogs = ("persona: i have two dogs.", "persona: i like: tea.")
    planes = ("persona: i am a baker.", "partner's persona: i fly planes.")
    assert turns(DIALOGUES) == [
        (dogs, (), "hi ! how are you ?", "great , and you ?"),
        (dogs, ("hi ! how are you ?", "great , and you ?"), "fine . any pets ?", "yes , i've two dogs ."),
        (planes, (), "hello", "hello there"),
        (planes, ("hello", "hello there"), "what do you do ?", "i bake ."),
        ((), (), "no personas here", "none at all"),
    ]


def test_examples_of_the_two_tasks(turns):
    _, second, _, last, alone = turns(DIALOGUES)
    assert personachat.from_utterance(second) == {
        "inputs": "dialogue: fine . any pets ?",
        "targets": "yes , i've two dogs .",
    }
    assert personachat.from_personas(second) == {
        "inputs": "dialogue partner: fine . any pets ? persona: i have two dogs. persona: i like: tea. "
        "you: great , and you ? partner: hi ! how are you ?",
        "targets": "yes , i've two dogs .",
    }
    assert personachat.from_personas(last)["inputs"] == (
        "dialogue partner: what do you do ? persona: i am a baker. partner's persona: i fly planes. "
        "you: hello there partner: hello"
    )
    assert personachat.from_personas(alone)["inputs"] == "dialogue partner: no personas here"


def test_what_was_said_comes_latest_first(turns):
    """So that an input that is too long loses its oldest utterances."""
    third = turns("1 a\tb\n2 c\td\n3 e\tf\n")[2]
    assert personachat.from_personas(third)["inputs"] == "dialogue partner: e you: d partner: c you: b partner: a"


def test_ends_of_lines_and_characters(turns):
    assert turns("1 caf\u00e9 \u2028 x\ty\u0085z \r\n2 a\tb") == [
        ((), (), "caf\u00e9 \u2028 x", "y\u0085z"),
        ((), ("caf\u00e9 \u2028 x", "y\u0085z"), "a", "b"),
    ]


@pytest.mark.parametrize(
    "line, expected",
    [
        ("4 an utterance alone", "an utterance, a tab and an answer, or a persona; got '4 an utterance alone'"),
        ("4 an utterance\t", "an utterance, a tab and an answer"),
        ("4 \tan answer", "an utterance, a tab and an answer"),
        ("4 your persona:", "an utterance, a tab and an answer, or a persona"),
        ("4", "an utterance, a tab and an answer"),
        ("5 a\tb", "the number 4, or 1 where a dialogue begins; got '5 a"),
        ("3 a\tb", "the number 4, or 1 where a dialogue begins"),
        ("a\tb", "the number 4, or 1 where a dialogue begins"),
    ],
)
def test_a_malformed_line_is_named(turns, line, expected):
    with pytest.raises(ValueError) as error:
        turns(f"1 your persona: x.\n2 a\tb\n\n3 c\td\n{line}\n4 e\tf\n")
    assert f"dialogues.txt, line 5: expected {expected}" in str(error.value)


def test_a_file_begins_with_1(turns):
    with pytest.raises(ValueError, match="line 1: expected the number 1, or 1 where"):
        turns("2 a\tb\n")


def test_an_utterance_may_speak_of_personas(turns):
    assert turns("1 your persona: what is it ?\tmine\n")[0].utterance == "your persona: what is it ?"


def test_the_contents_page_lists_the_tasks():
    assert tasks.CONTENTS["synthesizer_jax.tasks.personachat"] == ("personachat", "personachat_personas")
    for name in tasks.CONTENTS["synthesizer_jax.tasks.personachat"]:
        assert seqio.TaskRegistry.get(name).splits == ("train", "validation", "test")
        assert tuple(seqio.TaskRegistry.get(name).metric_fns) == text_metrics.DIALOGUE


def test_a_split_without_its_file_is_missing_and_the_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv(sources.ENVIRONMENT, str(tmp_path))
    source = sources.Files(personachat.FILES, lambda path: personachat.read(path, personachat.from_utterance), "there")
    (tmp_path / VALID).parent.mkdir()
    (tmp_path / VALID).write_text(DIALOGUES)
    assert source.missing("validation") is None and source.num_input_examples("validation") == 5
    for split in ("train", "test"):
        assert f"no personachat/{split}_self_original_no_cands.txt in {tmp_path}" in source.missing(split)
        with pytest.raises(FileNotFoundError, match="there"):
            source.get_dataset(split)


@pytest.fixture
def real(shared, monkeypatch):
    if not (shared / "data" / VALID).is_file():
        pytest.skip(f"no {VALID} in {shared / 'data'}")
    monkeypatch.setenv(sources.ENVIRONMENT, str(shared / "data"))
    monkeypatch.setenv(vocabulary.ENVIRONMENT, str(shared / "data/vocab/t5/spiece.model"))
    return shared / "data" / VALID


def test_every_pair_of_the_validation_file_is_an_example(real):
    lines = real.read_text().splitlines()
    pairs = [line.partition(" ")[2].split("\t") for line in lines if "\t" in line]
    assert len(pairs) == 7801 and sum(line.startswith("1 ") for line in lines) == 1000
    for name in tasks.CONTENTS["synthesizer_jax.tasks.personachat"]:
        task = seqio.TaskRegistry.get(name)
        assert task.num_input_examples("validation") == 7801
        examples = list(task.source.get_dataset("validation", shuffle=False).as_numpy_iterator())
        assert [example["targets"].decode() for example in examples] == [answer for _, answer in pairs]
        for example, (utterance, _) in zip(examples, pairs, strict=True):
            inputs = example["inputs"].decode()
            if name == "personachat":
                assert inputs == f"dialogue: {utterance}"
            else:
                assert inputs.startswith(f"dialogue partner: {utterance} persona: ")
                assert 4 <= inputs.count(" persona: ") <= 5


def test_tokenized_examples_say_the_text_and_nothing_is_cut_at_512(real):
    task = seqio.TaskRegistry.get("personachat_personas")
    dataset = task.get_dataset({"inputs": 512, "targets": 64}, "validation", shuffle=False)
    longest = 0
    for example in dataset.as_numpy_iterator():
        for feature in ("inputs", "targets"):
            *ids, end = example[feature].tolist()
            assert end == 1
            assert task.output_features[feature].vocabulary.decode(ids) == example[f"{feature}_pretokenized"].decode()
        longest = max(longest, len(example["inputs"]))
    assert 256 < longest <= 512


def test_metrics_of_the_task_through_seqio(real, monkeypatch):
    """Every metric is there without word vectors, and those of the right answers are higher than of repeating."""
    monkeypatch.setattr(text_metrics, "VECTORS", "none here")
    lengths = {"inputs": 64, "targets": 64}
    converter = seqio.EncDecFeatureConverter(pack=False)
    evaluator = seqio.Evaluator(
        "personachat", converter, eval_split="validation", sequence_length=lengths, num_examples=300, logger_cls=()
    )

    def results(feature):
        def predict(dataset):
            return [(int(number), example[feature]) for number, example in dataset.as_numpy_iterator()]

        functions = {seqio.metrics.ModelOutputType.PREDICTION: predict}
        computed, _ = evaluator.evaluate(compute_metrics=True, step=0, model_fns=functions)
        return computed.result()["personachat"]

    right, copied = results("decoder_target_tokens"), results("encoder_input_tokens")
    assert set(right) - {"meteor", "meteor_exact_stem"} == {"bleu_1", "rouge_l", "cider"} and len(right) == 4
    assert [right["bleu_1"], right["rouge_l"]] == pytest.approx([100, 100])
    assert all(0 < copied[name] < right[name] / 2 for name in right)
