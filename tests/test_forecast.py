"""`plan` for one run: what it counts is what `fit` records, and what it assumes it says."""

import json
import re

import numpy as np
import pytest
from conftest import write_corpus

from lit_transformer import speed
from lit_transformer.__main__ import main
from lit_transformer.batching import UpdatePlan
from lit_transformer.data import TrainingBatches, TranslationDataModule
from lit_transformer.forecast import ASSUMED_PIECES, SAMPLE, assumed_lengths, padding_share
from lit_transformer.tokenizer import PAD_ID

SMALL = {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "warmup": 2, "validate_every": 3, "bleu_every": 0}


@pytest.fixture
def configured(tmp_path):
    """A function that writes a configuration and returns its arguments; its text is not prepared."""

    def write(**changes):
        text = {**write_corpus(tmp_path / "text"), "root": str(tmp_path / "data"), "vocab_size": 300, "num_workers": 0}
        keys = {
            "model": SMALL,
            "data": text | {"tokens_per_update": 200, "max_tokens": 130},
            "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 9, "log_every_n_steps": 1},
            "run": {"dir": str(tmp_path / "run")},
        }
        for group, values in changes.items():
            keys[group] = keys[group] | values
        (tmp_path / "run.yaml").write_text(json.dumps(keys))
        return ["--config", str(tmp_path / "run.yaml")]

    return write


def shown(capsys, *args):
    capsys.readouterr()
    assert main(["plan", *map(str, args)]) == 0
    return capsys.readouterr().out


def number(text, pattern):
    return float(re.search(pattern, text)[1].replace(",", ""))


def rows(text):
    """{processes: (micro-batches of each, padding in %)}"""
    found = re.findall(r"^ +(\d+) +(\d+) +([\d.]+)%$", text, re.M)
    return {int(world): (int(accumulation), float(padding)) for world, accumulation, padding in found}


def test_prepared_text_is_counted_as_fit_records_it(configured, capsys, tmp_path):
    arguments = configured()
    assert main(["fit", *arguments]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    text = shown(capsys, *arguments)
    assert "ASSUMED" not in text
    for pattern, name in ((r"([\d,]+) source, ", "src_tokens"), (r"source, ([\d,]+) target", "tgt_tokens")):
        assert number(text, f"tokens: .*?{pattern}" if name == "src_tokens" else pattern) == result[name]
    assert number(text, r"parameters: ([\d,]+),") == result["parameters"]
    assert f"FLOPs: {result['flops']:.2e}" in text
    assert f"{result['epochs']:,.1f} epochs" in text


def test_micro_batches_and_padding_are_those_that_processes_get(configured, capsys, tmp_path):
    arguments = configured()
    assert main(["prepare", *arguments]) == 0
    found = rows(shown(capsys, *arguments, "--trainer.devices", 3))
    assert list(found) == [1, 2, 3, 4, 8]
    data = TranslationDataModule(**json.loads((tmp_path / "run.yaml").read_text())["data"])
    data.setup("fit")
    assert data.plan.updates_per_epoch <= SAMPLE
    for world, (accumulation, padding) in found.items():
        assert accumulation == data.plan.accumulation(world, 130)
        real = positions = 0
        for rank in range(world):
            batches = TrainingBatches(data.store, data.plan, 130, accumulation, rank, world)
            for k in range(data.plan.updates_per_epoch * accumulation):
                for ids in (batches[k].src, batches[k].tgt_out):
                    real += int((ids != PAD_ID).sum())
                    positions += ids.numel()
        assert padding == pytest.approx(100 * (1 - real / positions), abs=0.051)
    assert found[8][1] > 0
    assert main(["plan", *arguments, "--data.max_tokens", "5"]) == 1
    assert "max_tokens = 5 is less than the longest training sentence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "nodes", "processes"),
    [("auto", 1, []), ("-1", 1, []), ("3", 1, [3]), ("[0, 2, 5]", 1, [3]), ("'0,1,2'", 1, [3]), ("6", 2, [12])],
)
def test_the_runs_own_processes_have_a_row(devices, nodes, processes, configured, capsys):
    arguments = [*configured(), "--trainer.devices", devices, "--trainer.num_nodes", str(nodes)]
    assert list(rows(shown(capsys, *arguments))) == sorted([1, 2, 4, 8, *processes])


def test_text_that_is_not_prepared_is_not_prepared_but_assumed_aloud(configured, capsys, tmp_path):
    arguments = configured(data={"max_length": 100})
    before = sorted(tmp_path.rglob("*"))
    text = shown(capsys, *arguments)
    assert sorted(tmp_path.rglob("*")) == before
    assert f"NOT PREPARED: there is no {tmp_path / 'data'}" in text
    assert "LENGTHS ARE ASSUMED: 29 source and 29 target tokens in the mean, at most 101;" in text
    # 9 updates of 200 tokens a side, as near as whole sentences come.
    for pattern in (r"tokens: ([\d,]+) source", r"source, ([\d,]+) target"):
        assert number(text, pattern) == pytest.approx(9 * 200, rel=0.2)
    assert "epochs" not in text


def test_text_that_is_not_there_is_assumed_too(configured, capsys, tmp_path):
    arguments = configured(data={"train": [str(tmp_path / "no.en"), str(tmp_path / "no.de")]})
    assert f"NOT PREPARED: {tmp_path / 'no.en'}: cannot be read" in shown(capsys, *arguments)


def test_the_papers_base_before_its_text_is_there(capsys, tmp_path):
    """What does not hang on the text is exact, the rest near the paper's own arithmetic."""
    text = shown(capsys, "--data.root", tmp_path, "--tokens_per_second", 62500)
    attention, feed_forward, norm = 4 * 512 * 512, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    parameters = 37000 * 512 + 6 * (3 * attention + 2 * feed_forward + 5 * norm)
    assert number(text, r"parameters: ([\d,]+),") == parameters
    # Each weight is multiplied and added with one side's tokens, three times: forward and, twice that, backward. The
    # products of queries, keys and values come on top, at these lengths 1 or 2%.
    assert number(text, r"FLOPs: ([\d.e+]+),") == pytest.approx(1.015 * 6 * parameters * 2.5e9, rel=0.01)
    assert "Transformer (base) 3.3e18, Transformer (big) 2.3e19" in text
    # 25,000 tokens in 0.4 s are 62,500 a second; 100,000 updates are 11.1 hours, the paper says 12.
    assert number(text, r"hours: ([\d.]+) at 62,500") == pytest.approx(11.1, abs=0.3)
    assert number(text, r"second, ([\d.]+) s an update") == pytest.approx(0.4, abs=0.01)


def test_hours_measured_here_need_the_text(configured, capsys, monkeypatch):
    monkeypatch.setattr(speed, "MEASURE_SECONDS", 0.0)
    arguments = configured()
    assert main(["plan", *arguments, "--measure"]) == 1
    assert "--measure trains on the text, which is not prepared" in capsys.readouterr().err
    assert main(["prepare", *arguments]) == 0
    monkeypatch.setattr(speed, "_timed", lambda device, work: (work(), 3600.0)[1])
    text = shown(capsys, *arguments, "--measure")
    # An hour for each pass, of 9 updates with so many micro-batches that are nearly alike, and for each of 9 steps.
    passes = 9 * rows(text)[1][0]
    assert number(text, r"hours: ([\d.]+) on 1 x CPU, threads: 1") == pytest.approx(9 + passes, rel=0.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens_per_second", "0"], "--tokens_per_second 0.0: must be above 0"),
        (["--model.num_heads", "3"], "num_heads = 3"),
        (["--modell.num_heads", "3"], "--modell.num_heads"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words, configured, capsys):
    assert main(["plan", *configured(), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lit-transformer plan: error: ")
    assert words in error
    assert len(error.splitlines()) == 1


def test_sharded_weights_are_said_to_be_divided(configured, capsys):
    arguments = configured()
    assert "to exchange gradients" in shown(capsys, *arguments)
    text = shown(capsys, *arguments, "--trainer.strategy", "fsdp")
    assert "divides weights, gradients and moments" in text
    assert "to exchange gradients" not in text


@pytest.mark.parametrize("longest", [256, 50, 1])
def test_assumed_lengths_are_whole_positive_and_bounded(longest):
    src, tgt = assumed_lengths(50_000, longest, 1)
    for side in (src, tgt):
        assert side.dtype == np.int64
        assert side.min() >= 2  # a piece and the end of sentence
        assert side.max() <= longest + 1
        assert side.mean() == pytest.approx(min(ASSUMED_PIECES, longest / 2) + 1, rel=0.05 if longest > 1 else 1)
    if longest > 1:
        assert np.corrcoef(src, tgt)[0, 1] > 0.8
    assert all((a == b).all() for a, b in zip((src, tgt), assumed_lengths(50_000, longest, 1), strict=True))


def test_padding_by_hand():
    # One update of three sentences in one micro-batch: 3 x (5 + 7) positions for 3 + 4 + 5 and 7 + 6 + 2 tokens.
    plan = UpdatePlan(np.array([3, 4, 5]), np.array([7, 6, 2]), 1000, 1)
    assert padding_share(plan, 1, 100) == pytest.approx(1 - 27 / 36)
    # A micro-batch for each sentence: none.  One more, which is a row of padding: 1 + 1.
    assert padding_share(plan, 3, 7) == 0
    assert padding_share(plan, 4, 7) == pytest.approx(1 - 27 / 29)
