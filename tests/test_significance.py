"""Tests and intervals against sacreBLEU's command line, scipy and brute force."""

import json
import math
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from scipy.stats import spearmanr

from lit_transformer import significance
from lit_transformer.sentences import Sentences
from lit_transformer.significance import agreement, check_same_references, compare, holm

N = 50
REFERENCES = [" ".join(random.Random(i).choices("abcdefghij", k=6 + i % 5)) for i in range(N)]


def sentences(seed, noise, nll=2.0, references=REFERENCES):
    """Outputs with this share of words wrong; NLLs spread around `nll` a token."""
    rng = random.Random(seed)
    outputs = [" ".join("z" if rng.random() < noise else word for word in line.split()) for line in references]
    tokens = np.array([len(line.split()) + 1 for line in references])
    nlls = tokens * np.array([rng.gauss(nll, 0.2) for _ in references])
    return Sentences(Path(f"run{seed}"), references, references, outputs, nlls, tokens, tokens)


def one(base, other):
    return compare({1: base}, {"other": {1: other}})["other"]


# p-values


def test_the_p_value_is_that_of_sacrebleus_command_line(tmp_path):
    base, other = sentences(1, 0.2), sentences(2, 0.25)
    for name, lines in (("ref", REFERENCES), ("base", base.hypotheses), ("other", other.hypotheses)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "base", "other", "--paired-bs", "-f", "json"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    theirs = json.loads(printed)[1]["BLEU"]
    found = one(base, other)
    assert round(found.p_value, 4) == pytest.approx(theirs["p_value"], abs=1e-4)
    assert found.bleu.value == pytest.approx(
        BLEU().corpus_score(other.hypotheses, [REFERENCES]).score
        - BLEU().corpus_score(base.hypotheses, [REFERENCES]).score
    )


def test_a_clear_difference_is_one_and_none_is_none():
    assert one(sentences(1, 0.1), sentences(2, 0.5)).p_value == pytest.approx(1 / 1001)
    assert one(sentences(1, 0.2), sentences(2, 0.2)).p_value > 0.05


def test_the_same_outputs_are_no_difference():
    """sacreBLEU alone gives 1/1001 here, as no resample of nothing is larger than nothing."""
    found = one(sentences(1, 0.2), sentences(1, 0.2))
    assert found.p_value == 1
    assert (found.bleu.value, found.bleu.low, found.bleu.high) == (0, 0, 0)


def test_the_same_outputs_three_times_are_no_more_evidence():
    """Seeds hang together by their sentences: as many sentences, not three times as many."""
    base, other = sentences(1, 0.2), sentences(2, 0.25)
    single = one(base, other).p_value
    three = compare(dict.fromkeys((1, 2, 3), base), {"other": dict.fromkeys((1, 2, 3), other)})["other"].p_value
    assert 0.02 < single < 0.9
    assert three == pytest.approx(single, abs=0.05)  # other resamples of the same sentences


def test_two_rows_that_have_learned_nothing_do_not_differ():
    """Neither has a matching n-gram, though one writes something and the other does not."""
    base, other = sentences(1, 1.0), sentences(1, 1.0)
    silent = replace(other, hypotheses=[""] * N)
    found = one(base, silent)
    assert (found.bleu.value, found.p_value) == (0, 1)


def test_each_row_is_tested_as_if_it_were_alone():
    base = {1: sentences(1, 0.2), 2: sentences(2, 0.2)}
    rows = {"a": {1: sentences(3, 0.25), 2: sentences(4, 0.3)}, "b": {2: sentences(5, 0.3)}, "c": {7: base[1]}}
    found = compare(base, rows)
    assert list(found) == ["a", "b"]
    assert found["a"] == compare(base, {"a": rows["a"]})["a"]
    assert (found["a"].seeds, found["b"].seeds) == ([1, 2], [2])
    assert found["b"] == compare({2: base[2]}, {"b": rows["b"]})["b"]


def test_nothing_to_compare():
    assert compare({}, {"a": {1: sentences(1, 0.1)}}) == {}
    assert compare({1: sentences(1, 0.1)}, {"a": {}}) == {}
    assert compare({1: sentences(1, 0.1)}, {}) == {}


def test_one_sentence_is_enough():
    found = one(sentences(1, 0.0, references=REFERENCES[:1]), sentences(2, 1.0, references=REFERENCES[:1]))
    assert found.bleu.low == found.bleu.high == pytest.approx(found.bleu.value) == pytest.approx(-100)


# Intervals


def test_intervals_are_percentiles_of_corpus_scores_of_resampled_sentences(monkeypatch):
    monkeypatch.setattr(significance, "RESAMPLES", 40)
    seeds = [(sentences(1, 0.2), sentences(3, 0.3, 2.5)), (sentences(2, 0.2), sentences(4, 0.25, 2.5))]
    found = compare(dict(enumerate(s[0] for s in seeds)), {"other": dict(enumerate(s[1] for s in seeds))})["other"]
    bleus, perplexities = [], []
    for weights in significance._weights(N)[1:].astype(int):
        drawn = np.repeat(np.arange(N), weights)
        assert len(drawn) == N
        scores = []
        for side in (0, 1):
            each = []
            for one_of_them in (pair[side] for pair in seeds):
                outputs = [one_of_them.hypotheses[i] for i in drawn]
                bleu = BLEU().corpus_score(outputs, [[REFERENCES[i] for i in drawn]]).score
                nll = sum(one_of_them.nll[i] for i in drawn)
                each.append((bleu, math.exp(nll / sum(one_of_them.tgt_tokens[i] for i in drawn))))
            scores.append([sum(values) / len(seeds) for values in zip(*each, strict=True)])
        bleus.append(scores[1][0] - scores[0][0])
        perplexities.append(scores[1][1] - scores[0][1])
    for difference, values in ((found.bleu, bleus), (found.perplexity, perplexities)):
        assert [difference.low, difference.high] == pytest.approx(list(np.percentile(values, [2.5, 97.5])))
        assert difference.low < difference.value < difference.high


def test_a_second_seed_with_the_same_outputs_tells_nothing_new():
    """The sentences are resampled, not their outputs: twice the same would else look like twice the evidence."""
    base, other = sentences(1, 0.2), sentences(2, 0.3)
    once, twice = one(base, other), compare({1: base, 2: base}, {"o": {1: other, 2: other}})["o"]
    assert (twice.bleu.low, twice.bleu.high) == pytest.approx((once.bleu.low, once.bleu.high))


def test_the_other_way_round_is_the_negative():
    a, b = sentences(1, 0.2), sentences(2, 0.3)
    there, back = one(a, b).bleu, one(b, a).bleu
    assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low))


def test_intervals_cover_a_true_difference_of_zero_about_as_often_as_they_say():
    outside = 0
    for seed in range(25):
        found = one(sentences(2 * seed, 0.2), sentences(2 * seed + 1, 0.2))
        outside += not found.bleu.low <= 0 <= found.bleu.high
    assert outside <= 5  # of 25, 1.25 are expected; more than 5 in 1 of 1,000 such tests


@pytest.mark.parametrize("nll", [math.nan, 1e9])
def test_a_perplexity_without_end_has_no_interval(nll):
    found = one(sentences(1, 0.2), sentences(2, 0.3, nll))
    assert (found.perplexity.value, found.perplexity.low, found.perplexity.high) == (None, None, None)
    assert found.bleu.low < found.bleu.high


def test_other_references_are_refused_by_file_and_line():
    other = sentences(2, 0.1, references=[*REFERENCES[:9], "else", *REFERENCES[10:]])
    with pytest.raises(ValueError, match=r"run1 and run2 cannot be compared: their sources differ from line 10 on"):
        one(sentences(1, 0.1), other)
    with pytest.raises(ValueError, match="differ from line 50 on"):
        check_same_references(sentences(1, 0.1), sentences(2, 0.1, references=REFERENCES[:49]))


# Holm


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.02, 0.02, 0.02], [0.06, 0.06, 0.06]),
        ([0.5, 0.9], [1.0, 1.0]),
        ([0.001, 0.5, 0.04, 0.011], [0.004, 0.5, 0.08, 0.033]),
        ([0.04], [0.04]),
        ([], []),
    ],
)
def test_holm_by_hand(given, expected):
    names = [f"row{i}" for i in range(len(given))]
    found = holm(dict(zip(names, given, strict=True)))
    assert list(found) == names
    assert list(found.values()) == pytest.approx(expected)


# Agreement with the paper

PAIRS = [(0.1, -0.9), (-0.3, -0.3), (1.5, 0.0), (-2.0, -0.4), (0.1, 0.2), (0.7, 0.4), (3.0, 0.4)]


def test_agreement_is_spearmans_with_ties():
    found = agreement(PAIRS)
    assert found.rho == pytest.approx(spearmanr(*zip(*PAIRS, strict=True)).statistic)
    assert found.rows == 7 and found.low < found.rho < found.high


def test_its_interval_is_of_resampled_rows(monkeypatch):
    monkeypatch.setattr(significance, "RESAMPLES", 300)
    values = np.array(PAIRS)
    rhos = []
    for chosen in np.random.default_rng(significance._SEED).integers(7, size=(300, 7)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rhos.append(spearmanr(values[chosen, 0], values[chosen, 1]).statistic)
    found = agreement(PAIRS)
    expected = np.percentile([rho for rho in rhos if not math.isnan(rho)], [2.5, 97.5])
    assert [found.low, found.high] == pytest.approx(list(expected))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_same_or_the_opposite_order(sign):
    found = agreement([(i, sign * i**3) for i in range(6)])
    assert (found.rho, found.low, found.high) == pytest.approx((sign, sign, sign))


@pytest.mark.parametrize("rows", range(4))
def test_few_rows_say_nothing(rows):
    found = agreement(PAIRS[:rows])
    assert found.rho is None and str(found) == f"too few rows ({rows} row{'s' * (rows != 1)})"


def test_differences_that_are_all_the_same_have_no_order():
    found = agreement([(i, 0.0) for i in range(5)])
    assert found.rho is None and "no order" in str(found)


def test_mostly_constant_rows_still_give_an_interval():
    found = agreement([(0, 0), (0, 0), (0, 0), (0, 0), (1, 1)])
    assert (found.rho, found.low, found.high) == pytest.approx((1, 1, 1))
