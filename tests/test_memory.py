"""Memory that is counted without allocating it, against what real passes keep and against torch's own profiler."""

import json

import pytest
import torch
from conftest import write_corpus

from lit_transformer import kernels, speed
from lit_transformer.cli import ExperimentCLI
from lit_transformer.memory import memory
from lit_transformer.speed import Text, measure
from lit_transformer.transformer import Transformer, TransformerConfig

SMALL = {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    options = {**write_corpus(folder / "text"), "root": str(folder / "data"), "vocab_size": 300, "num_workers": 0}
    return {**options, "tokens_per_update": 200, "max_tokens": 130}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.0, "label_smoothing": 0.0}, {"norm": "pre", "position": "learned", "d_k": 5}]
)
def test_what_is_counted_is_what_a_real_pass_on_the_cpu_keeps(options, precision, text, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "MEASURE_SECONDS", 0.0)
    keys = {"data": text, "model": SMALL | options, "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 4}}
    keys["trainer"]["precision"] = precision
    (tmp_path / "run.yaml").write_text(json.dumps(keys))
    cli = ExperimentCLI(["--config", str(tmp_path / "run.yaml")])
    cli.datamodule.prepare_data()
    opened = Text(cli.datamodule)
    ids = opened.largest(1, 4)
    widths = [int(side[ids].max()) for side in (opened.plan.src_lengths, opened.plan.tgt_lengths)]
    smoothing = options.get("label_smoothing", 0.1)
    found = memory(cli.model.config, smoothing, len(ids), *widths, bf16=precision == "bf16-mixed")
    cli.model.model.encoder[0].register_forward_hook(lambda *_: None)  # layer by layer, as on other devices
    assert found.weights == found.gradients == found.moments / 2 == 4 * cli.model.model.num_parameters
    assert found.total - found.temporaries == measure(cli, opened, 1).memory
    assert found.activations > found.weights / 2


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("vocab_size", [50, 3000])  # where layers and where the loss take most
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_fullest_moment_is_that_of_torchs_profiler(device, bf16, vocab_size, monkeypatch):
    if device == "cuda":  # its pieces, on a CPU
        monkeypatch.setattr(kernels, "ROWS", kernels.PIECE_ON_GPU // vocab_size)
    config = TransformerConfig(vocab_size=vocab_size, **SMALL)
    model = Transformer(config).train()
    model.encoder[0].register_forward_hook(lambda *_: None)  # layer by layer, as on other devices
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        src, tgt_in, tgt_out = (torch.ones(16, width, dtype=torch.int64) for width in (20, 24, 24))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(src, tgt_in, tgt_out, 0.1)[0] / torch.tensor(16 * 24)
        loss.backward()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    monkeypatch.undo()
    found = memory(config, 0.1, 16, 20, 24, bf16, device)
    # Which sums of gradients autograd makes in place is its own business: some percent of so small a model.
    assert found.activations + found.temporaries == pytest.approx(most, rel=0.04)
    assert found.temporaries > 0


def test_a_model_beyond_this_machine_is_counted():
    config = TransformerConfig(num_layers=48, d_model=16384, d_ff=65536, num_heads=128)  # 3 TB in training
    found = memory(config, 0.1, 64, 64, 64, bf16=True)
    attention, norm = 4 * 16384**2, 2 * 16384
    feed_forward = 2 * 16384 * 65536 + 65536 + 16384
    parameters = 37000 * 16384 + 48 * (3 * attention + 2 * feed_forward + 5 * norm)
    assert found.weights == 4 * parameters
    assert found.total > 10 * 2**37
