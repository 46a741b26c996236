"""A row of the paper's Table 2, and when the paper's own rows may stand beside it."""

import gzip
from pathlib import Path

import pytest

from lit_transformer.rows import read_table2
from lit_transformer.table2 import NEWSTEST2014, departures, fingerprint, identify, paper_recipe, to_markdown

NEWSTEST = Path(__file__).parents[2] / "shared" / "data" / "newstest"
needs_data = pytest.mark.skipif(
    not NEWSTEST.is_dir(), reason="needs real text, ../shared/data/newstest, beside the repository"
)

# Typed from the paper, by column, not from the file: EN-DE BLEU, EN-FR BLEU, then the exponents' figures.
EN_DE = ["23.75", "-", "24.6", "25.16", "26.03", "-", "26.30", "26.36", "27.3", "28.4"]
EN_FR = ["-", "39.2", "39.92", "40.46", "40.56", "40.4", "41.16", "41.29", "38.1", "41.8"]
EN_DE_FLOPS = ["-", "-", "2.3e19", "9.6e18", "2.0e19", "-", "1.8e20", "7.7e19", "3.3e18", "2.3e19"]
EN_FR_FLOPS = ["-", "1.0e20", "1.4e20", "1.5e20", "1.2e20", "8.0e20", "1.1e21", "1.2e21", "3.3e18", "2.3e19"]
MODELS = [
    "ByteNet", "Deep-Att + PosUnk", "GNMT + RL", "ConvS2S", "MoE", "Deep-Att + PosUnk ensemble",
    "GNMT + RL ensemble", "ConvS2S ensemble", "Transformer (base)", "Transformer (big)",
]  # fmt: skip
BASE = {"d_model": 512, "d_ff": 2048, "num_heads": 8, "dropout": 0.1, "vocab_size": 37000, "max_steps": 100_000}
BASE |= {"averaged": 5, "beam_size": 4, "length_penalty": 0.6}
BIG = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "max_steps": 300_000, "averaged": 20}
P100 = {"flops": 9.6e17, "hours": 12.0, "processes": 8, "device": "Tesla P100-SXM2-16GB", "flops_by_time": 3.28e18}


def test_the_papers_table_is_as_typed_here():
    typed = zip(MODELS, EN_DE, EN_FR, EN_DE_FLOPS, EN_FR_FLOPS, strict=True)
    held = [(name, *list(row.values())[1:]) for name, row in read_table2().items()]
    assert list(next(iter(read_table2().values()))) == ["model", "ende_bleu", "enfr_bleu", "ende_flops", "enfr_flops"]
    assert [tuple(value or "-" for value in row) for row in held] == list(typed)


# Which text it is


def newstest(year, pair, side):
    text = gzip.decompress((NEWSTEST / f"newstest{year}.{pair}.{side}.gz").read_bytes()).decode()
    return text.split("\n")[:-1]


@needs_data
@pytest.mark.parametrize("language", ["de", "fr"])
def test_newstest2014_is_known_by_its_text(language):
    english, foreign = (newstest(2014, f"en-{language}", side) for side in ("en", language))
    assert len(foreign) == 3003
    found = identify(english, foreign, "en", language)
    assert (found["table2"], found["why_not"], found["sentences"]) == (True, "", 3003)
    assert identify(english, [f"  {line.replace(' ', chr(160))} " for line in foreign], "en", language)["table2"]
    for sources, references, src, tgt, why in (
        (foreign, english, language, "en", "newstest2014 the other way round"),
        (english, foreign, "nl", language, f"of newstest2014, but the run is from nl into {language}"),
        (english[:-1], foreign[:-1], "en", language, "not newstest2014"),
        (english, [*foreign[:-1], foreign[-1] + "!"], "en", language, "not newstest2014"),
        (english, foreign[::-1], "en", language, "not newstest2014"),
        (english, foreign, "en", "fr" if language == "de" else "de", "but the run is from en into"),
        (newstest(2013, f"en-{language}", "en"), newstest(2013, f"en-{language}", language), "en", language, "not"),
    ):
        found = identify(sources, references, src, tgt)
        assert not found["table2"]
        assert why in found["why_not"]


def test_a_fingerprint_is_of_words_and_lines():
    assert fingerprint(["a b", "c"]) == fingerprint([" a\u00a0 b", "c\t"])
    assert (
        len({fingerprint(lines) for lines in (["a b", "c"], ["a", "b c"], ["ab", "c"], ["c", "a b"], ["a b c"])}) == 5
    )


# What differs


@pytest.mark.parametrize(
    ("tgt_lang", "changes", "nearer", "differs"),
    [
        ("de", {}, "base", []),
        ("de", BIG | {"dropout": 0.3}, "big", []),
        ("de", {"averaged": 1, "max_steps": 50_000}, "base", ["max_steps = 50000 (100000)", "averaged = 1 (5)"]),
        ("fr", {}, "base", ["vocab_size = 37000 (32000)"]),
        # section 6.1: the big model for French has dropout 0.1
        ("fr", BIG | {"vocab_size": 32000, "dropout": 0.1}, "big", []),
        ("fr", BIG | {"vocab_size": 32000, "dropout": 0.3}, "big", ["dropout = 0.3 (0.1)"]),
    ],
)
def test_what_differs_from_the_papers_nearer_model(tgt_lang, changes, nearer, differs):
    assert departures(BASE | changes, BASE, tgt_lang) == (nearer, differs)


def test_the_recipe_of_base_is_not_changed():
    before = dict(BASE)
    paper_recipe(BASE, "big", "fr")
    assert before == BASE


# The table


def record(tgt_lang="de", **changes):
    score = {"signature": "tok:x", "sentences": 3003}
    tested = {
        "sentences": 3003,
        "src_lang": "en",
        "tgt_lang": tgt_lang,
        "fingerprint": NEWSTEST2014.get(tgt_lang, "f0"),
    }
    return {
        "parameters": 63_045_632,
        "updates": 100_000,
        "vocab_size": 37000,
        "perplexity": 4.5,
        "compound_split_bleu": score | {"score": 27.34, "signature": "tok:moses"},
        "bleu": score | {"score": 26.51, "signature": "tok:13a"},
        "chrf": score | {"score": 55.0, "signature": "chrF2"},
        "recipe": BASE,
        "training": P100,
        "test_set": tested | {"table2": tgt_lang in NEWSTEST2014, "why_not": "why it is not"},
    } | changes


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:1] + lines[2:]]


@pytest.mark.parametrize(("tgt_lang", "column", "flops"), [("de", EN_DE, EN_DE_FLOPS), ("fr", EN_FR, EN_FR_FLOPS)])
def test_the_papers_rows_stand_above_ours_each_bleu_in_its_own_column(tgt_lang, column, flops):
    head, *published, ours = rows(to_markdown(record(tgt_lang), BASE, "Trained on 4,500,000 pairs"))
    assert head == ["model", "BLEU, compounds split", "sacreBLEU", "FLOPs by time", "FLOPs counted"]
    expected = zip(MODELS, column, flops, strict=True)
    assert published == [[m, b, "", f.replace("-", ""), ""] for m, b, f in expected if b != "-"]
    assert ours == ["ours: 63.0M parameters, 100,000 updates", "27.34", "26.51", "3.3e18", "9.6e17"]


def test_what_it_was_made_from_stands_below():
    text = to_markdown(record(recipe=BASE | {"averaged": 1}), BASE, "Trained on 4,468,840 pairs")
    for words in (
        "# newstest2014, English to German",
        "3,003 sentences, references a23c8a6312fea541",
        "tok:moses, as the paper's. sacreBLEU: tok:13a",
        "chrF 55.00 (chrF2); perplexity 4.500 per subword of 37,000",
        "Nearest to the paper's base; differs from it in: averaged = 1 (5).",
        "Trained on 4,468,840 pairs; the paper on about 4.5 million of WMT14, which is not checked.",
        "12.00 hours on 8 x Tesla P100-SXM2-16GB",
    ):
        assert words in text
    assert "41.0" not in text
    assert "its 41.8 of big is 41.0" in to_markdown(record("fr"), BASE, "Trained on 36,000,000 pairs")
    assert "differs from it in: none of the fields compared" in to_markdown(record(), BASE, "Trained on 1 pairs")


def test_another_set_stands_alone_and_says_why():
    text = to_markdown(record("cs"), BASE, "Trained on 10 pairs")
    assert len(rows(text)) == 2
    assert "# Test set, English to cs" in text
    assert "The paper's rows are left out, as Table 2 is of newstest2014 from English: why it is not." in text
    assert "WMT14" not in text


def test_what_is_not_known_is_blank_and_says_why():
    text = to_markdown(record(training=None), BASE, "Trained on 10 pairs")
    assert rows(text)[-1][3:] == ["", ""]
    assert "FLOPs are blank: no result.json says what a training of 100,000 updates took" in text
    on_a_cpu = P100 | {"device": "CPU", "flops_by_time": None}
    text = to_markdown(record(training=on_a_cpu, perplexity=None), BASE, "Trained on 10 pairs")
    assert rows(text)[-1][3:] == ["", "9.6e17"]
    assert "blank for CPU, for which it gives none" in text
    assert "perplexity beyond all bounds" in text


def test_without_the_papers_file_that_is_said(monkeypatch):
    monkeypatch.setattr("lit_transformer.table2.read_table2", dict)
    text = to_markdown(record(), BASE, "Trained on 10 pairs")
    assert len(rows(text)) == 2
    assert "results/paper\\_table2.csv is not beside the package" in text
