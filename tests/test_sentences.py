"""sentences.SPLIT.jsonl: counts that add up to sacreBLEU's corpus score, and files that say what is wrong with them."""

import json
import math
import random

import numpy as np
import pytest
from results_folder import result
from sacrebleu.metrics import BLEU, CHRF

from lit_transformer.sentences import bleu_of, extremes, mean_scores, perplexity_of, read_sentences

HYPOTHESES = ["the cat sat on the mat .", "", "a dog", "Ünïcode: „so“, it's 3,000.5%", "x", "the the the the the"]
REFERENCES = ["the cat sat on a mat .", "not empty", "a big dog ran", "Unicode: „so“, it's 3,000.5%", "y", "the end"]


def write(folder, hypotheses=HYPOTHESES, references=REFERENCES, split="valid", **fields):
    """The file, and the result that fits it."""
    n = len(hypotheses)
    given = {"source": ["quelle"] * n, "reference": references, "hypothesis": hypotheses, "finished": [True] * n}
    given |= {"nll": [1.5] * n, "src_tokens": [7] * n, "tgt_tokens": [3] * n, **fields}
    lines = [json.dumps({key: values[i] for key, values in given.items()}) for i in range(n)]
    (folder / f"sentences.{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    score = BLEU().corpus_score(hypotheses, [references]).score if n else 0.0
    return result("base", split=split, **{"bleu.score": score, "bleu.sentences": n})


def test_counts_of_sentences_add_up_to_the_corpus_score(tmp_path):
    found = read_sentences(tmp_path, write(tmp_path))
    assert bleu_of(found.counts.sum(0)) == BLEU().corpus_score(HYPOTHESES, [REFERENCES]).score


@pytest.mark.parametrize("seed", range(20))
def test_counts_of_any_choice_of_sentences_add_up_too(tmp_path, seed):
    found = read_sentences(tmp_path, write(tmp_path))
    chosen = random.Random(seed).choices(range(len(HYPOTHESES)), k=1 + seed % 8)
    expected = BLEU().corpus_score([HYPOTHESES[i] for i in chosen], [[REFERENCES[i] for i in chosen]]).score
    assert bleu_of(found.counts[chosen].sum(0)) == pytest.approx(expected, abs=1e-12)


def test_scores_of_several_seeds_are_the_mean_of_theirs(tmp_path):
    (tmp_path / "b").mkdir()
    a = read_sentences(tmp_path, write(tmp_path))
    nll = [0.5, 1, 2, 4, 8, 16]
    b = read_sentences(tmp_path / "b", write(tmp_path / "b", [*REFERENCES[:3], "a", "b", "c"], nll=nll))
    bleu, perplexity = mean_scores([a, b])
    each = [BLEU().corpus_score(h, [REFERENCES]).score for h in (HYPOTHESES, [*REFERENCES[:3], "a", "b", "c"])]
    assert bleu == pytest.approx(sum(each) / 2)
    tokens = a.tgt_tokens.sum()
    assert perplexity == pytest.approx((math.exp(a.nll.sum() / tokens) + math.exp(31.5 / tokens)) / 2)


def test_chrf_of_each_sentence_is_sacrebleus(tmp_path):
    found = read_sentences(tmp_path, write(tmp_path))
    for score, hypothesis, reference in zip(found.chrf, HYPOTHESES, REFERENCES, strict=True):
        assert score == CHRF().sentence_score(hypothesis, [reference]).score


def test_texts_and_numbers_are_those_of_the_file(tmp_path):
    texts = ["a\u2028b", "tab\tand  two spaces ", "\x85", "<script>", "„“", "e\u0301"]
    found = read_sentences(tmp_path, write(tmp_path, hypotheses=texts, nll=[0, 1.25, None, math.nan, 2, 3]))
    assert found.hypotheses == texts and found.references == REFERENCES
    assert len(found) == 6
    assert np.array_equal(found.nll, [0, 1.25, math.nan, math.nan, 2, 3], equal_nan=True)
    assert found.src_tokens.tolist() == [7] * 6 and found.tgt_tokens.tolist() == [3] * 6


def test_no_file_is_no_error(tmp_path):
    assert read_sentences(tmp_path, result("base")) is None


def test_the_file_is_that_of_the_results_split(tmp_path):
    test = write(tmp_path, split="test")
    assert read_sentences(tmp_path, result("base")) is None
    assert read_sentences(tmp_path, test).hypotheses == HYPOTHESES


def test_no_sentence_at_all(tmp_path):
    assert len(read_sentences(tmp_path, write(tmp_path, [], []))) == 0


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "{}", "3", '{"source": 1, "reference": "", "hypothesis": "", "nll": 1}', '"text"', "\x00"]
)
def test_a_broken_line_is_named_by_its_number(tmp_path, line):
    scored = write(tmp_path)
    file = tmp_path / "sentences.valid.jsonl"
    lines = file.read_text().split("\n")
    file.write_text("\n".join([*lines[:3], line, *lines[4:]]))
    with pytest.raises(ValueError, match=r"sentences\.valid\.jsonl, line 4: is no sentence .*only the scoring"):
        read_sentences(tmp_path, scored)


@pytest.mark.parametrize("key", ["source", "reference", "hypothesis", "nll", "src_tokens", "tgt_tokens"])
def test_a_missing_field_is_named(tmp_path, key):
    scored = write(tmp_path)
    file = tmp_path / "sentences.valid.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    del lines[1][key]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(ValueError, match=rf"line 2: .*{key}"):
        read_sentences(tmp_path, scored)


def test_a_file_of_other_sentences_than_were_scored_is_refused(tmp_path):
    scored = write(tmp_path)
    with pytest.raises(ValueError, match="holds 6 sentences, 7 were scored"):
        read_sentences(tmp_path, scored | {"bleu": scored["bleu"] | {"sentences": 7}})
    with pytest.raises(ValueError, match=r"scores BLEU .* and its result says 99\.0000"):
        read_sentences(tmp_path, scored | {"bleu": scored["bleu"] | {"score": 99.0}})


def test_perplexity_at_its_ends():
    assert perplexity_of(0.0, 5) == 1
    assert perplexity_of(1e6, 2) == math.inf
    assert math.isnan(perplexity_of(math.nan, 2)) and math.isnan(perplexity_of(0.0, 0))


def test_extremes_are_the_largest_first_and_only_real_changes():
    lost, gained = extremes(np.array([0.0, -3, 5, -1, 0, 2, -3]), 2)
    assert (lost, gained) == ([1, 6], [2, 5])
    assert extremes(np.array([0.0, 0, 1]), 5) == ([], [2])
    assert extremes(np.array([1.0, -1]), 0) == ([], [])
