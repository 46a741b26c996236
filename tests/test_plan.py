"""`sweep plan`: what it counts is what a real `fit` records, what it measures is what such a run would do."""

import json
import math
import types
from dataclasses import replace

import pytest
import torch
from conftest import write_corpus

from lit_transformer import speed
from lit_transformer.__main__ import main
from lit_transformer.data import TrainingBatches, TranslationDataModule
from lit_transformer.plan import Row, hours_until_done, plan_study, table
from lit_transformer.speed import Speed, Text, saved_bytes
from lit_transformer.study import Cell, Variant, fit_arguments, read_study_file
from lit_transformer.tokenizer import PAD_ID
from lit_transformer.transformer import TransformerConfig

SMALL = {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "warmup": 2, "validate_every": 3, "bleu_every": 0}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """The first pass is enough: no test is about speed."""
    monkeypatch.setattr(speed, "MEASURE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    options = {**write_corpus(folder / "text"), "root": str(folder / "data"), "vocab_size": 300, "num_workers": 0}
    return {**options, "tokens_per_update": 200, "max_tokens": 130}


@pytest.fixture
def studied(tmp_path, text):
    """A function that writes a study: of these variants, with base configuration and study keys to add."""
    file, runs = tmp_path / "study.yaml", tmp_path / "runs"

    def write(*variants, trainer=None, model=None, data=None, **more):
        base = {
            "model": SMALL | (model or {}),
            "data": text | (data or {}),
            "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 4, "log_every_n_steps": 1} | (trainer or {}),
            "run": {"checkpoint_every": 50},
        }
        (tmp_path / "base.yaml").write_text(json.dumps(base))
        described = [v if isinstance(v, dict) else {"name": v} for v in variants or ("base",)]
        rows = {} if "search" in more else {"variants": described}
        file.write_text(json.dumps({"name": "s", "config": ["base.yaml"], **rows, **more}))
        study = read_study_file(file)
        return types.SimpleNamespace(
            study=study, file=file, runs=runs, folder=runs / "s", arguments=["sweep", "plan", str(file), "--runs", runs]
        )

    return write


def rows_of(bench, threads=1):
    return plan_study(bench.study, bench.file, bench.folder, threads)


def data_of(bench):
    data = TranslationDataModule(**json.loads((bench.file.parent / "base.yaml").read_text())["data"])
    data.setup("fit")
    return data


def typed(bench, *more):
    return main([str(argument) for argument in (*bench.arguments, *more)])


# What is counted


def test_the_plan_is_what_fit_records(studied):
    # 1.6 epochs and more: seeds differ in the sentences of a part of an epoch
    bench = studied("base", {"name": "wide", "set": {"d_ff": 64, "trainer.max_steps": 9}}, seeds=[1, 5])
    planned = {str(row.cell): row for row in rows_of(bench)}
    assert list(planned) == ["base/seed1", "wide/seed1", "base/seed5", "wide/seed5"]
    assert planned["wide/seed1"].flops != planned["wide/seed5"].flops
    cells = [Cell(bench.study.variants[1], seed) for seed in (1, 5)]
    for cell in cells:
        assert main(["fit", *fit_arguments(bench.study, bench.file, cell, bench.folder)]) == 0
        result = json.loads((bench.folder / str(cell) / "result.json").read_text())
        row = planned[str(cell)]
        for name in ("parameters", "vocab_size", "updates", "src_tokens", "tgt_tokens", "flops"):
            assert getattr(row, name) == result[name], name
    again = rows_of(bench)
    assert [str(row.cell) for row in again if row.done] == [str(cell) for cell in cells]
    for row in again:
        assert (row.speed is None) == row.done
        assert replace(row, done=False, speed=None) == replace(planned[str(row.cell)], speed=None)


def test_tokens_and_flops_are_of_the_batches_that_training_takes(studied):
    bench = studied()
    (row,) = rows_of(bench)
    data = data_of(bench)
    accumulation = data.plan.accumulation(1, data.max_tokens)
    batches = TrainingBatches(data.store, data.plan, data.max_tokens, accumulation, 0, 1)
    config, sums = TransformerConfig(vocab_size=300, num_layers=1, d_model=16, d_ff=32, num_heads=2), [0, 0, 0.0]
    for batch in (batches[k] for k in range(4 * accumulation)):
        lengths = [(ids != PAD_ID).sum(1) for ids in (batch.src, batch.tgt_out)]
        sums[0] += int(lengths[0].sum())
        sums[1] += int(lengths[1].sum())
        sums[2] += 3 * sum(
            config.forward_flops(s, t) for s, t in zip(*(side.tolist() for side in lengths), strict=True)
        )
    assert [row.src_tokens, row.tgt_tokens] == sums[:2]
    assert row.flops == pytest.approx(sums[2], rel=1e-12)
    # One validation in 4 updates: each sentence of it once, forward alone.
    sentences = zip(*((data.sentences("valid", side).lengths + 1).tolist() for side in ("src", "tgt")), strict=True)
    assert row.validation_flops == pytest.approx(sum(config.forward_flops(s, t) for s, t in sentences), rel=1e-12)


def test_parameters_are_exact(studied):
    bench = studied("base", {"name": "deep", "set": {"num_layers": 3, "d_ff": 8, "d_k": 4}})
    for row, (layers, d_ff, d_k) in zip(rows_of(bench), ((1, 32, 8), (3, 8, 4)), strict=True):
        d, heads, d_v = 16, 2, 8
        attention = 2 * d * heads * (d_k + d_v)
        feed_forward = 2 * d * d_ff + d_ff + d
        assert row.parameters == 300 * d + layers * (3 * attention + 2 * feed_forward + 5 * 2 * d)
        assert row.vocab_size == 300


# What is measured


def test_saved_bytes_counts_each_storage_once_and_no_parameter():
    linear = torch.nn.Linear(3, 5)
    x = torch.randn(7, 3, requires_grad=True)
    with saved_bytes(linear) as kept:
        y = linear(x)  # keeps x, and its weight
        z = y.exp() * y.sin()  # exp keeps its output, sin its input, the product both of its factors
        z.sum().backward()
    assert sum(kept.values()) == 4 * (7 * 3 + 3 * 7 * 5)


@pytest.mark.parametrize(("dropout", "layers"), [(0.0, 1), (0.5, 2)])
def test_memory_on_a_cpu_against_a_hand_count(studied, dropout, layers):
    bench = studied(model={"dropout": dropout, "label_smoothing": 0.0, "num_layers": layers})
    (row,) = rows_of(bench)
    opened = Text(data_of(bench))
    ids = opened.largest(1, 4)
    longest_s, longest_t = (int(lengths[ids].max()) for lengths in (opened.plan.src_lengths, opened.plan.tgt_lengths))
    s, t = len(ids) * longest_s, len(ids) * longest_t
    rows_s, rows_t = (math.ceil(n / 64) * 64 for n in (s, t))
    d, d_ff, heads, width = 16, 32, 2, 16  # width: of all heads together
    norm, feed_forward, drop = d + 2, d + d_ff, d * (dropout > 0)  # input, mean and deviation; input and inner; mask
    # Attention keeps its input, queries, keys, values, the softmax and the result.
    encoder = rows_s * (d + width + feed_forward + 2 * (norm + drop)) + s * (3 * width + heads * longest_s)
    decoder = rows_t * (2 * (d + width) + feed_forward + 3 * (norm + drop))
    decoder += t * (4 * width + heads * (longest_t + longest_s)) + s * 2 * width
    # Memory; of the loss, which makes them beside it, the gradients of the output matrix and of its input.
    ends = rows_s * d + s * drop + rows_t * d + t * drop + 300 * d
    ids_and_counts = 8 * (s + t) + 8  # source and target ids, the update's tokens
    activations = 4 * (layers * (encoder + decoder) + ends) + ids_and_counts
    assert row.speed.memory == 4 * 4 * row.parameters + activations


def test_the_largest_micro_batch_is_found(text):
    data = TranslationDataModule(**text | {"tokens_per_update": 400})
    data.prepare_data()
    opened = Text(data)
    plan, parts = opened.plan, opened.accumulation(1)
    every = [ids for n in range(plan.updates_per_epoch) for ids in plan.split(plan.update(n), parts, 130)]

    def padded(ids):
        return len(ids) * (plan.src_lengths[ids].max() + plan.tgt_lengths[ids].max())

    assert plan.updates_per_epoch <= speed.FULLEST
    assert padded(opened.largest(1, 10**6)) == max(padded(ids) for ids in every if len(ids))


class Clock:
    """Plays the clock: every pass and every step of the optimiser take so many seconds."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.threads = seconds, []
        monkeypatch.setattr(speed, "_timed", self.timed)
        monkeypatch.setattr(speed, "MEASURE_SECONDS", 3.0)

    def timed(self, device, work):
        work()
        self.threads.append(torch.get_num_threads())
        return self.seconds


def test_speed_and_hours_follow_from_the_first_micro_batches(studied, monkeypatch):
    clock, bench = Clock(monkeypatch, 1.0), studied()
    (row,) = rows_of(bench, threads=2)
    assert clock.threads == [2] * 7  # a warm-up, three passes, three steps
    assert torch.get_num_threads() == 1
    data = data_of(bench)
    accumulation = data.plan.accumulation(1, data.max_tokens)
    batches = TrainingBatches(data.store, data.plan, data.max_tokens, accumulation, 0, 1)
    config = TransformerConfig(vocab_size=300, num_layers=1, d_model=16, d_ff=32, num_heads=2)
    work = sum(
        3 * float(config.forward_flops(*((ids != PAD_ID).sum(1).double() for ids in (b.src, b.tgt_out))).sum())
        for b in (batches[k] for k in range(3))
    )
    assert row.speed.flops_per_second == pytest.approx(work / 3)
    assert (row.speed.update_seconds, row.speed.processes, row.speed.device) == (1.0, 1, "CPU")
    assert row.hours == pytest.approx(((row.flops + row.validation_flops) / (work / 3) + 4) / 3600)


def test_a_long_first_pass_is_enough(studied, monkeypatch):
    clock = Clock(monkeypatch, 4.0)
    (row,) = rows_of(studied())
    assert len(clock.threads) == 4  # it, and three steps
    assert row.speed.flops_per_second > 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_rows_are_measured_with_their_precision(studied, precision):
    bench = studied("base", {"name": "other", "set": {"trainer.precision": precision}})
    full, other = rows_of(bench)
    size = {"bf16-mixed": 4, "bf16-true": 2, "64-true": 8}[precision]
    kept = [row.speed.memory - 4 * row.parameters * width for row, width in ((full, 4), (other, size))]
    assert kept[0] > 0
    assert kept[1] > kept[0] if precision == "64-true" else 0 < kept[1] < kept[0]
    assert full.flops == other.flops


def test_processes_share_the_micro_batches(studied):
    (row,) = rows_of(studied(trainer={"devices": 2, "strategy": "ddp"}))
    assert row.speed.processes == 2
    alone = replace(row, speed=replace(row.speed, processes=1, update_seconds=0.0))
    assert replace(row, speed=replace(row.speed, update_seconds=0.0)).hours == pytest.approx(alone.hours / 2)


def test_nothing_trains_and_nothing_is_left(studied, capsys):
    bench = studied("base", "again")
    assert typed(bench) == 0
    assert {path.name for path in bench.file.parent.iterdir()} == {"study.yaml", "base.yaml"}
    said = capsys.readouterr()
    assert "s: measuring again, 2 of 2" in said.err
    assert "Trainer" not in said.err + said.out


# What is refused


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"num_heads": 3}, "num_heads = 3 does not divide d_model = 16"),
        ({"d_modell": 8}, "d_modell"),
        ({"position": "learned", "max_positions": 4}, "max_positions = 4: the longest train sentence has"),
        ({"data.max_tokens": 3}, "max_tokens = 3 is less than the longest training sentence"),
        ({"trainer.accelerator": "gpu", "trainer.devices": 99}, "trainer: "),
    ],
)
def test_a_bad_variant_is_one_sentence(studied, capsys, broken, words):
    bench = studied("base", {"name": "broken", "set": broken})
    assert typed(bench) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"lit-transformer sweep: error: {bench.file}, variant broken: ")
    assert words in last
    assert not bench.runs.exists()


def test_a_bad_variant_is_refused_as_by_sweep_run_and_before_anything_is_measured(studied, capsys):
    bench = studied("base", {"name": "broken", "set": {"num_heads": 3}})
    assert typed(bench) == 1
    planned = capsys.readouterr().err
    bench.arguments[1] = "run"
    assert typed(bench) == 1
    assert capsys.readouterr().err == planned


def test_missing_text_is_one_sentence(studied, capsys, tmp_path):
    bench = studied(data={"train": [str(tmp_path / "no.de"), str(tmp_path / "no.en")], "root": str(tmp_path / "data")})
    assert typed(bench) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("lit-transformer sweep: error: ")
    assert "no.de" in last


def test_too_little_memory_is_one_sentence(studied, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(speed, "_pass", full)
    with pytest.raises(ValueError, match=r"variant base: .* data\.max_tokens = 130 does not fit .*: lower"):
        rows_of(studied())


# The table


@pytest.mark.parametrize(
    ("hours", "workers", "expected"),
    [([], 2, 0.0), ([1, 2, 3], 1, 6), ([1, 2, 3], 2, 4), ([3, 1, 1], 2, 3), ([1, 2, 3], 9, 3)],
)
def test_hours_until_the_last_run_ends(hours, workers, expected):
    assert hours_until_done(hours, workers) == expected


def a_row(name, seed=1, done=False, device="CPU", seconds=3600.0, **variant):
    speed = None if done else Speed(device, 3 * 2**20, 1e9, 0.0, 1)
    flops = 0.0 if variant else 1e9 * seconds
    return Row(Cell(Variant(name, **variant), seed), done, 1234567, 300, 10, 1000 + seed, 2000, flops, 0.0, speed)


def test_the_table_in_the_studys_order_with_totals():
    rows = [a_row("b"), a_row("a", done=True), a_row("c", seconds=7200.0), a_row("b", seed=2), a_row("a", seed=2)]
    lines = table(rows, workers=2, threads=4).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["variant", "b", "a", "c"]
    assert lines[0].split("  ")[0] == "variant"
    assert lines[1].split() == [
        "b",
        "2",
        "to",
        "do",
        "300",
        "1,234,567",
        "3.600e+12",
        "1,001",
        "2,000",
        "3",
        "MiB",
        "1.0",
    ]
    assert lines[2].split()[1:7] == ["1", "of", "2", "done", "300", "1,234,567"]
    assert lines[2].split()[8:] == ["1,002", "2,000", "3", "MiB", "1.0"]
    assert lines[5].split() == ["all", "runs", "5", "2.160e+13", "5,007", "10,000"]
    assert lines[6].split() == ["to", "do", "4", "1.800e+13", "4,006", "8,000", "5.0"]
    # 1 and 2 hours at once, then 1 and 1 where a worker is free.
    assert lines[8] == "About 3.0 hours on CPU, 2 runs at a time, 4 threads each."
    assert len({len(line) for line in lines[:4]}) == 1


def test_trials_on_one_gpu_do_not_end_sooner_by_being_more():
    text = table([a_row("a", device="A GPU"), a_row("b", device="A GPU")], workers=2, threads=1)
    assert "About 2.0 hours on A GPU, 2 runs at a time, 1 thread each." in text


def test_a_finished_study_has_nothing_left():
    lines = table([a_row("a", done=True)], workers=1, threads=1).splitlines()
    assert lines[1].split() == ["a", "done", "300", "1,234,567", "3.600e+12", "1,001", "2,000"]
    assert lines[-1] == "Nothing is left to be trained."


def test_what_another_variant_trains_is_not_trained_twice(studied):
    bench = studied("base", {"name": "averaged", "trained_by": "base", "set": {"run.average": 2}})
    base, averaged = rows_of(bench)
    assert (averaged.flops, averaged.src_tokens, averaged.hours, averaged.speed) == (0.0, 0, 0.0, None)
    assert averaged.parameters == base.parameters
    assert "by base" in table([base, averaged], 1, 1).splitlines()[2]


def test_a_search_costs_its_trials_at_most(studied):
    search = {"trials": 3, "space": {"dropout": {"low": 0.0, "high": 0.1}}}
    bench = studied(search=search, metric="perplexity")
    [one] = rows_of(studied())
    finished = bench.folder / "trial-001" / "seed1"
    finished.mkdir(parents=True)
    (finished / "result.json").write_text("{}")
    rows = rows_of(bench)
    assert [row.done for row in rows] == [False, True, False]
    assert {row.flops for row in rows} == {one.flops}
    assert "1 of 3 done" in table(rows, 1, 1)
