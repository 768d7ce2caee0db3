"""PersonaChat (Zhang et al. 2018; ConvAI2): an answer to what the other one has said.

personachat            As in the Synthesizer paper: from the utterance before, without personas.
                       inputs  "dialogue: hi ! do you have any pets ?"
personachat_personas   From that, the persona of the one who answers, and the dialogue before, its latest part first: what is
                       too long loses its oldest utterances. With 512 tokens the validation split loses none.
                       inputs  "dialogue partner: hi ! do you have any pets ? persona: i have two dogs. persona: i love
                               country music. you: great , and you ? partner: hello . how are you ?"
Both:                  targets "yes , i've two dogs ."

The text is ParlAI's, lower-cased and with its punctuation set apart. Each line of a dialogue is one example, what the
partner says and what is answered, so each turn of one speaker is a target; the validation file has 7,801. The paper does
not say whether the answers' answers, whose speaker has another persona, are examples too: here they are not.

Files below the folder of SYNTHESIZER_JAX_DATA: personachat/{train,valid,test}_self_original_no_cands.txt, in ParlAI's
text format; candidates and personas of the partner may be in them.
"""

import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import seqio

from synthesizer_jax.tasks import features, sources, text_metrics

ORIGIN = (
    "it is in ParlAI's http://parl.ai/downloads/convai2/convai2_fix_723.tgz (no test split) or, without _no_cands in its "
    "name, in http://parl.ai/downloads/personachat/personachat.tgz"
)
FILES = {
    split: (f"personachat/{name}_self_original_no_cands.txt",)
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test"))
}

Example = dict[str, str]


class Turn(NamedTuple):
    """What is said to someone and what they answer, with what came before."""

    personas: tuple[str, ...]  # "persona: ..." and "partner's persona: ..."
    before: tuple[str, ...]  # utterances, the partner's and the answers in turn, the oldest first
    utterance: str
    answer: str


def read_turns(path: pathlib.Path) -> Iterator[Turn]:
    """The lines "number utterance<tab>answer" of a file in ParlAI's format; a dialogue begins where the number is 1.

    The lines "number your persona: ..." and "number partner's persona: ..." before them are of the same dialogue. What
    follows the answer after another tab, a reward and candidates, is not read.

    Raises: ValueError that names the line which is none of these, or whose number does not follow.
    """
    number, personas, said = 0, (), ()
    with open(path, encoding="utf-8-sig") as lines:
        for place, line in enumerate(lines, start=1):
            line = line.rstrip("\n")
            if not line.strip():
                continue
            given, _, text = line.partition(" ")
            if given == "1":
                personas, said = (), ()
            elif given != str(number + 1):
                raise _malformed(path, place, line, f"the number {number + 1}, or 1 where a dialogue begins")
            number = int(given)
            persona = re.fullmatch(r"(?:your |(partner's ))(persona: [^\t]+)", text)
            if persona:
                personas += ("".join(persona.groups(default="")),)
                continue
            utterance, answer = (part.strip() for part in (*text.split("\t"), "")[:2])
            if not utterance or not answer:
                raise _malformed(path, place, line, "an utterance, a tab and an answer, or a persona")
            yield Turn(personas, said, utterance, answer)
            said += (utterance, answer)


def _malformed(path, place: int, line: str, expected: str) -> ValueError:
    return ValueError(
        f"{path}, line {place}: expected {expected}; got {line[:80]!r}. The file must be in ParlAI's text format"
    )


def from_utterance(turn: Turn) -> Example:
    return {"inputs": f"dialogue: {turn.utterance}", "targets": turn.answer}


def from_personas(turn: Turn) -> Example:
    said = [f"{speaker}: {text}" for speaker, text in zip(itertools.cycle(("you", "partner")), reversed(turn.before))]
    return {"inputs": " ".join((f"dialogue partner: {turn.utterance}", *turn.personas, *said)), "targets": turn.answer}


def read(path: pathlib.Path, make: Callable[[Turn], Example]) -> list[Example]:
    return [make(turn) for turn in read_turns(path)]


for _name, _make in (("personachat", from_utterance), ("personachat_personas", from_personas)):
    seqio.TaskRegistry.add(
        _name,
        source=sources.Files(FILES, functools.partial(read, make=_make), ORIGIN),
        preprocessors=features.TOKENIZED,
        output_features=features.TEXT_TO_TEXT,
        metric_fns=text_metrics.DIALOGUE,
    )
