"""Scores against the sacrebleu command line, an implementation of BLEU of our own and hand computation."""

import gzip
import json
import math
import random
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import sacremoses
import torch

from lit_transformer.metrics import (
    FEW_SENTENCES,
    TokenNLL,
    compound_split_bleu,
    corpus_bleu,
    corpus_chrf,
    perplexity,
    split_compounds,
)

TEXTS = Path(__file__).parents[2] / "shared" / "data" / "newstest"
NEWSTEST = TEXTS / "newstest2013.en-de.de.gz"
SCORERS = [corpus_bleu, corpus_chrf, compound_split_bleu]

# Lines that a careless reader or tokeniser would change.
HARD = [
    "„Nein“, sagte  er ,  „das geht nicht .“",
    "Der Ost-West-Konflikt dauerte 3-4 Jahre - oder mehr.",
    "Preis: 1.000,50 € (inkl. 19 % MwSt.) & Versand <b>frei</b>",
    "Zeile\u2028mit\u0085Trennern und\u00a0Leerzeichen",
    "Ein E-Mail-Anhang, z. B. von Dr. Müller-Lüdenscheidt",
    "  führende und folgende Leerzeichen  ",
    "L'été, c'est l'aube d'aujourd'hui !",
]


def perturbed(references: list[str], seed: int) -> list[str]:
    """Hypotheses of middling quality: words dropped, swapped, doubled or replaced; spacing is kept."""
    rng = random.Random(seed)
    changed = []
    for line in references:
        words = line.split(" ")
        for i in range(len(words)):
            chance = rng.random()
            if chance < 0.06:
                words[i] = ""
            elif chance < 0.10:
                words[i] = f"{words[i]} {words[i]}"
            elif chance < 0.16:
                words[i] = rng.choice(rng.choice(references).split(" "))
            elif chance < 0.20 and i:
                words[i - 1], words[i] = words[i], words[i - 1]
        changed.append(" ".join(words))
    return changed


@pytest.fixture(scope="module")
def references() -> list[str]:
    if not NEWSTEST.is_file():
        pytest.skip(f"needs real text, ../shared/data/newstest/{NEWSTEST.name}, beside the repository")
    return [*gzip.decompress(NEWSTEST.read_bytes()).decode().split("\n")[:600], *HARD]


@pytest.fixture(scope="module")
def hypotheses(references) -> list[str]:
    return perturbed(references, 1)


def bleu(hypotheses: list[list[str]], references: list[list[str]]) -> float:
    """BLEU of Papineni et al. (2002) on tokens, unsmoothed, in exact fractions up to the last step."""
    precisions, penalty = precisions_and_penalty(hypotheses, references)
    return 100 * penalty * float(math.prod(precisions)) ** 0.25


def precisions_and_penalty(hypotheses: list[list[str]], references: list[list[str]]) -> tuple[list[Fraction], float]:
    """Those of 1 to 4 tokens over a corpus, and the brevity penalty."""
    match: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for hyp, ref in zip(hypotheses, references, strict=True):
        for n in (1, 2, 3, 4):
            ours, theirs = (Counter(zip(*(s[i:] for i in range(n)), strict=False)) for s in (hyp, ref))
            match[n] += (ours & theirs).total()
            total[n] += ours.total()
    precisions = [Fraction(match[n], total[n]) if total[n] else Fraction(0) for n in (1, 2, 3, 4)]
    ours, theirs = sum(map(len, hypotheses)), sum(map(len, references))
    return precisions, min(1.0, math.exp(1 - theirs / ours)) if ours else 0.0


def split_by_hand(text: str) -> str:
    """Perl's s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g without a regular expression."""
    out, i = "", 0
    while i < len(text):
        if i + 2 < len(text) and text[i + 1] == "-" and not text[i].isspace() and not text[i + 2].isspace():
            out += f"{text[i]} ##AT##-##AT## {text[i + 2]}"
            i += 3
        else:
            out += text[i]
            i += 1
    return out


# Against the command line


def command_line(folder: Path, hypotheses: list[str], references: list[str], width: int, *more: str) -> dict[str, dict]:
    for name, lines in (("hyp", hypotheses), ("ref", references)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "hyp", "-m", "bleu", "chrf", "-w", str(width), *more]
    shown = subprocess.run([*command, "--format", "json"], cwd=folder, check=True, capture_output=True, text=True)
    return {score["name"]: score for score in json.loads(shown.stdout, parse_float=str)}


@pytest.mark.parametrize("width", [2, 10])
def test_bleu_and_chrf_equal_the_command_line_in_all_digits_and_signature(tmp_path, hypotheses, references, width):
    shown = command_line(tmp_path, hypotheses, references, width)
    for ours, theirs in (
        (corpus_bleu(hypotheses, references), shown["BLEU"]),
        (corpus_chrf(hypotheses, references), shown["chrF2"]),
    ):
        assert float(f"{ours.score:.{width}f}") == float(theirs["score"])
        assert ours.signature == theirs["signature"]
        assert ours.sentences == len(references)
        assert 20 < ours.score < 95  # a score at an end would agree by accident


@pytest.mark.slow
@pytest.mark.parametrize(("year", "language"), [(2013, "de"), (2014, "de"), (2013, "fr"), (2014, "fr")])
def test_both_bleus_on_the_papers_sets_equal_the_command_line_and_a_count_of_our_own(year, language, tmp_path):
    file = TEXTS / f"newstest{year}.en-{language}.{language}.gz"
    if not file.is_file():
        pytest.skip(f"needs real text, ../shared/data/newstest/{file.name}, beside the repository")
    references = gzip.decompress(file.read_bytes()).decode().split("\n")[:-1]
    assert len(references) == {2013: 3000, 2014: 3003}[year]
    hypotheses = perturbed(references, year)
    # Cased sacreBLEU: the command reads the same two files.
    shown = command_line(tmp_path, hypotheses, references, 10)["BLEU"]
    ours = corpus_bleu(hypotheses, references)
    assert float(f"{ours.score:.10f}") == float(shown["score"])
    assert ours.signature == shown["signature"]
    # The paper's: Moses' tokens with split compounds, counted here, and by the command told to leave them alone.
    moses = sacremoses.MosesTokenizer(lang=language)
    tokens = [[split_by_hand(" ".join(moses.tokenize(line))) for line in lines] for lines in (hypotheses, references)]
    precisions, penalty = precisions_and_penalty(*([line.split() for line in lines] for lines in tokens))
    assert penalty < 1  # words were left out, so it counts
    expected = 100 * penalty * float(math.prod(precisions)) ** 0.25
    paper = compound_split_bleu(hypotheses, references, language)
    assert paper.score == pytest.approx(expected, abs=1e-9)
    options = ("--tokenize", "none", "--smooth-method", "none", "--force")
    shown = command_line(tmp_path, *tokens, 10, *options)["BLEU"]
    assert float(f"{paper.score:.10f}") == float(shown["score"])
    counted = "/".join(f"{float(100 * precision):.1f}" for precision in precisions)
    assert shown["verbose_score"].startswith(f"{counted} (BP = {penalty:.3f} ")
    moses_tokens = f"tok:moses-{language}-{sacremoses.__version__}+compounds"
    assert paper.signature == shown["signature"].replace("tok:none", moses_tokens)
    assert 30 < paper.score < 95
    assert paper.score != ours.score


def test_scores_leave_both_texts_alone(hypotheses, references):
    before = list(hypotheses), list(references)
    for scorer in SCORERS:
        scorer(hypotheses, references)
    assert (hypotheses, references) == before


# By hand


@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected"),
    [
        ("a b c d e", "a b c d f", 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25),
        ("a b c d", "a b c d e f", 100 * math.exp(1 - 6 / 4)),
        ("a b c d e", "A B C D E", 0.0),  # cased
        ("Hallo, Welt! Ja.", "Hallo , Welt ! Ja .", 100.0),  # 13a sets punctuation apart
    ],
)
def test_bleu_by_hand(hypothesis, reference, expected):
    assert corpus_bleu([hypothesis], [reference]).score == pytest.approx(expected, abs=1e-9)


def test_compound_split_bleu_by_hand():
    # Ost ##AT##-##AT## West ##AT##-##AT## Konflikt ist|war alt: 6 of 7, 4 of 6, 3 of 5, 2 of 4 n-grams match.
    score = compound_split_bleu(["Ost-West-Konflikt ist alt"], ["Ost-West-Konflikt war alt"])
    assert score.score == pytest.approx(100 * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25, abs=1e-9)
    assert corpus_bleu(["Ost-West-Konflikt ist alt"], ["Ost-West-Konflikt war alt"]).score != pytest.approx(score.score)


def test_compound_split_bleu_is_not_smoothed():
    # Three words in common, no four in a row: a smoothed BLEU would be above 0.
    assert compound_split_bleu(["a b c x d e f"], ["a b c y d e f"]).score == 0.0
    assert corpus_bleu(["a b c x d e f"], ["a b c y d e f"]).score > 0.0


@pytest.mark.parametrize("language", ["de", "fr"])
def test_compound_split_bleu_equals_moses_tokens_split_and_scored_here(hypotheses, references, language):
    moses = sacremoses.MosesTokenizer(lang=language)
    ours, theirs = (
        [split_by_hand(" ".join(moses.tokenize(line))).split() for line in lines] for lines in (hypotheses, references)
    )
    assert sum(token == "##AT##-##AT##" for line in theirs for token in line) > 20
    score = compound_split_bleu(hypotheses, references, language)
    assert score.score == pytest.approx(bleu(ours, theirs), abs=1e-9)
    assert f"moses-{language}" in score.signature
    assert "smooth:none" in score.signature


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("a-b", "a ##AT##-##AT## b"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # matches may not overlap, as in the Perl of the paper's scripts
        ("a-b-c-d", "a ##AT##-##AT## b-c ##AT##-##AT## d"),
        ("ab-cd-ef", "ab ##AT##-##AT## cd ##AT##-##AT## ef"),
        ("a-b c-d", "a ##AT##-##AT## b c ##AT##-##AT## d"),
        ("x--y", "x ##AT##-##AT## -y"),  # any character but a space on either side, a hyphen too
        ("Vor- und Nachteile", "Vor- und Nachteile"),
        ("ja - nein", "ja - nein"),
        ("-5 Grad", "-5 Grad"),
        ("von 10-20 Uhr.", "von 10 ##AT##-##AT## 20 Uhr ."),
        ("Müller-Lüdenscheidt", "Müller ##AT##-##AT## Lüdenscheidt"),
        ("a–b", "a – b"),  # a dash is no hyphen
        ("kein Bindestrich", "kein Bindestrich"),
        ("", ""),
    ],
)
def test_compounds_are_split_at_hyphens_inside_words(line, tokens):
    assert split_compounds(sacremoses.MosesTokenizer(lang="de"), line) == tokens


# What is refused, and what only carries a note


def test_the_two_kinds_of_bleu_cannot_be_subtracted(hypotheses, references):
    today, paper = corpus_bleu(hypotheses, references), compound_split_bleu(hypotheses, references)
    assert today.name != paper.name
    for one, other in ((today, paper), (paper, today), (today, corpus_chrf(hypotheses, references))):
        with pytest.raises(ValueError, match="name"):
            one.minus(other)


def test_scores_with_another_signature_cannot_be_subtracted():
    lines = ["ein Satz mit fünf Wörtern"]
    with pytest.raises(ValueError, match=r"signature.*moses-de.*moses-fr"):
        compound_split_bleu(lines, lines, "de").minus(compound_split_bleu(lines, lines, "fr"))


def test_scores_of_one_kind_subtract():
    half = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    for scorer in (corpus_bleu, compound_split_bleu):
        best, other = scorer(["a b c d f"], ["a b c d f"]), scorer(["a b c d e"], ["a b c d f"])
        assert best.minus(other) == pytest.approx(100 - half)
        assert other.minus(best) == pytest.approx(half - 100)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("marked", ["\u2581Das \u2581Haus", "Wohn@@ haus", "Omega <0xCE><0xA9>", "Das Wohn@@"])
def test_hypotheses_with_subword_marks_are_refused_with_their_line(scorer, marked):
    with pytest.raises(ValueError, match=r"1 of 3 hypotheses hold the subword mark .*line 2"):
        scorer(["gut", marked, "gut"], ["gut", "Das Haus", "gut"])


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("text", ["a \u2581 b", "mail an@@ mich", "das Byte <0x41>"])
def test_marks_that_the_references_hold_too_are_text(scorer, text):
    assert scorer([text, "gut"], ["gut", text]).sentences == 2
    assert scorer([text], [text]).score >= 0


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("plain", ["a@b.de @ @", "1 < 0 x", "## Titel", "<b>fett</b>", "_ __", "das \u2047 Zeichen"])
def test_plain_text_is_not_taken_for_marks(scorer, plain):
    assert scorer([plain], ["etwas anderes"]).sentences == 1


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (["a"] * 3, ["a"] * 2, "3 hypotheses for 2 references"),
        (["a"], [], "1 hypotheses for 0 references"),
        ([], ["a"], "0 hypotheses for 1 references"),
        ([], [], "no sentence"),
    ],
)
def test_unlike_or_no_numbers_of_lines_are_refused(scorer, hypotheses, references, message):
    with pytest.raises(ValueError, match=message):
        scorer(hypotheses, references)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize(
    ("hypotheses", "references"),
    [
        (["zwei Wörter", "noch zwei"], ["zwei Wörter", "noch zwei"]),
        (["", ""], ["zwei Wörter", "noch zwei"]),
        (["zwei Wörter", "noch zwei"], ["", ""]),
        (["", ""], ["", ""]),
        (["x", "y"], ["zwei Wörter", "noch zwei"]),
    ],
)
def test_a_few_short_lines_give_a_number_with_a_note(scorer, hypotheses, references):
    score = scorer(hypotheses, references)
    assert math.isfinite(score.score)
    assert 0 <= score.score <= 100
    assert "few sentences" in score.note
    assert "few sentences" in str(score)


@pytest.mark.parametrize("scorer", SCORERS)
def test_the_note_ends_at_its_threshold(scorer):
    lines = ["ein Satz mit fünf Wörtern"] * FEW_SENTENCES
    assert scorer(lines[1:], lines[1:]).note
    assert not scorer(lines, lines).note


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_score_is_shown_and_kept_with_its_settings(scorer):
    score = scorer(["ein Satz mit fünf Wörtern"], ["ein Satz mit fünf Wörtern"])
    for part in (score.name, "100.00", "1 sentences", score.signature, "version:"):
        assert part in str(score)
    kept = json.loads(json.dumps(score.as_dict()))
    assert (kept["score"], kept["signature"], kept["sentences"]) == (score.score, score.signature, 1)


# Perplexity


def test_nll_is_a_sum_over_tokens_not_a_mean_of_batches():
    metric = TokenNLL()
    metric.update(torch.tensor(9.0), torch.tensor(3))
    metric.update(torch.tensor(1.0), torch.tensor(7))
    assert metric.compute().item() == 1.0  # a mean of batch means would be 11 / 7
    assert perplexity(metric.compute().item()) == pytest.approx(math.e)


@pytest.mark.parametrize("seed", range(3))
def test_nll_sums_exactly_in_any_order(seed):
    rng = random.Random(seed)
    # Multiples of 2^-10 that float32 holds, whose sum it does not hold.
    batches = [(rng.randrange(2**24) / 1024, rng.randrange(1, 5000)) for _ in range(2000)]
    tokens = sum(count for _, count in batches)
    expected = float(sum(Fraction(nll) for nll, _ in batches))
    for _ in range(2):
        metric = TokenNLL()
        for nll, count in batches:
            metric.update(torch.tensor(nll), torch.tensor(count))
        assert metric.nll.item() == expected
        assert metric.tokens.item() == tokens
        assert metric.compute().item() == expected / tokens
        rng.shuffle(batches)


def test_nll_starts_anew_after_a_reset():
    metric = TokenNLL()
    metric.update(torch.tensor(9.0), torch.tensor(3))
    metric.reset()
    metric.update(torch.tensor(4.0), torch.tensor(2))
    assert metric.compute().item() == 2.0


def test_nll_sums_over_ranks():
    metric = TokenNLL()
    metric.distributed_available_fn = lambda: True
    metric.dist_sync_fn = lambda state, group=None: [state, torch.full_like(state, 10)]  # the other rank holds 10 / 10
    metric.update(torch.tensor(3.0), torch.tensor(2))
    assert metric.compute().item() == pytest.approx(13 / 12)


def test_nll_keeps_its_digits_inside_a_module_in_low_precision():
    module = torch.nn.Module()
    module.metric = TokenNLL()
    module.to(torch.bfloat16)  # what Lightning's precision "bf16-true" does
    module.metric.update(torch.tensor(1000.0), torch.tensor(1))
    module.metric.update(torch.tensor(1.0), torch.tensor(1))
    assert module.metric.compute().item() == 500.5


@pytest.mark.parametrize(
    ("nll", "expected"),
    [(0.0, 1.0), (math.log(37000), 37000.0), (709.0, math.exp(709)), (710.0, math.inf), (1e300, math.inf)],
)
def test_perplexity_is_infinite_beyond_a_float(nll, expected):
    assert perplexity(nll) == pytest.approx(expected)


@pytest.mark.parametrize("nll", [math.inf, math.nan])
def test_perplexity_does_not_hide_a_broken_nll(nll):
    assert not math.isfinite(perplexity(nll))
