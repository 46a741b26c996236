"""Loss, schedule and the count of updates, against the paper's values and one big batch."""

import contextlib
import gc
import json
import math

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from conftest import Seen, make_data, make_module, make_trainer, train
from ranks import run_ranks
from torch.nn import functional as F

from lit_transformer import fused
from lit_transformer.checkpoint import average_checkpoints, list_checkpoints, load_checkpoint
from lit_transformer.data import collate
from lit_transformer.kernels import token_losses
from lit_transformer.module import LitTransformer, TrainingError, learning_rate, sentence_nll
from lit_transformer.tokenizer import PAD_ID


# The values of paper.md's section on training, d_model 512 and 4,000 updates of warmup.
@pytest.mark.parametrize(("step", "rate"), [(1, 1.747e-7), (4000, 6.988e-4), (16000, 3.494e-4)])
def test_learning_rate_is_the_papers(step, rate):
    assert learning_rate(step, 512, 4000) == pytest.approx(rate, rel=2e-4)


def test_without_warmup_the_peak_stands_from_the_first_update_and_nothing_else_changes():
    given = [learning_rate(step, 512, 4000, start="peak") for step in (1, 2000, 4000, 16000)]
    assert given == pytest.approx([6.988e-4, 6.988e-4, 6.988e-4, 3.494e-4], rel=2e-4)


def test_learning_rate_without_warmup_starts_at_its_peak_and_is_finite():
    rates = [learning_rate(step, 512, 1) for step in range(1, 50)]
    assert max(rates) == rates[0] == pytest.approx(512**-0.5)
    assert all(map(math.isfinite, rates))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup": 0}, "warmup = 0"),
        ({"label_smoothing": 1.0}, "label_smoothing = 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing = -0.1"),
        ({"lr_factor": 0.0}, "lr_factor = 0.0"),
        ({"validate_every": 0}, "validate_every = 0"),
        ({"bleu_sentences": 0}, "bleu_sentences = 0"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        make_module(**options)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="num_head"):
        LitTransformer(num_head=4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.2])
def test_losses_equal_torchs_cross_entropy(smoothing):
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 7, 11) * 3, torch.randint(1, 11, (3, 7))
    targets[1, 4:] = PAD_ID
    loss, nll = token_losses(logits, targets, smoothing)
    flat = logits.flatten(0, 1), targets.flatten()
    expected = F.cross_entropy(*flat, ignore_index=PAD_ID, label_smoothing=smoothing, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert nll.item() == pytest.approx(F.cross_entropy(*flat, ignore_index=PAD_ID, reduction="sum").item(), rel=1e-6)


def test_bf16_logits_are_summed_in_float32():
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 50, 1000).bfloat16(), torch.randint(1, 1000, (4, 50))
    assert token_losses(logits, targets, 0.1)[0].dtype == torch.float32
    assert torch.equal(token_losses(logits, targets, 0.1)[0], token_losses(logits.float(), targets, 0.1)[0])


def sentences(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(4, 300, n) for n in lengths]


def test_zero_output_matrix_gives_log_vocabulary():
    module = make_module()
    torch.nn.init.zeros_(module.model.embedding.weight)
    batch = collate(sentences(3, 5), sentences(4, 2), 8)
    loss, nll = token_losses(module(batch.src, batch.tgt_in), batch.tgt_out, 0.1)
    assert (loss / 8).item() == pytest.approx(math.log(300), rel=1e-5)
    assert (nll / 8).item() == pytest.approx(math.log(300), rel=1e-5)


def loss_and_gradient(module, batch, per):
    module.zero_grad()
    loss = token_losses(module(batch.src, batch.tgt_in), batch.tgt_out, 0.1)[0] / per
    loss.backward()
    return loss.item(), [p.grad.clone() for p in module.parameters()]


def test_padding_to_64_changes_neither_loss_nor_gradient():
    module = make_module()
    alone = collate(sentences(5), sentences(6), 7)
    padded = alone._replace(**{k: F.pad(getattr(alone, k), (0, 57)) for k in ("src", "tgt_in", "tgt_out")})
    (loss, grads), (loss2, grads2) = (loss_and_gradient(module, batch, 7) for batch in (alone, padded))
    assert loss == pytest.approx(loss2, abs=1e-6)
    for a, b in zip(grads, grads2, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_every_pair_twice_is_the_same_loss():
    module = make_module()
    src, tgt = sentences(5, 3, 9), sentences(6, 2, 9)
    once = loss_and_gradient(module, collate(src, tgt, 20), 20)[0]
    assert loss_and_gradient(module, collate(src * 2, tgt * 2, 40), 40)[0] == pytest.approx(once, rel=1e-6)


def test_an_empty_micro_batch_adds_nothing():
    module = make_module()
    loss, grads = loss_and_gradient(module, collate([], [], 20), 20)
    assert loss == 0
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("max_tokens", [400, 60, 25])
def test_accumulation_follows_the_budget_and_gives_the_weights_of_one_big_batch(corpus, max_tokens):
    expected, _ = train(corpus, max_steps=5)
    seen = Seen()
    module, trainer = train(corpus, data={"max_tokens": max_tokens}, max_steps=5, callbacks=[seen])
    assert trainer.global_step == 5
    assert seen.micro_batches == 5 * trainer.accumulate_grad_batches
    assert (trainer.accumulate_grad_batches > 3) == (max_tokens < 400)
    for (name, a), b in zip(module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3, msg=name)


def test_reported_loss_does_not_depend_on_the_accumulation(corpus):
    a, b = Seen(), Seen()
    train(corpus, max_steps=4, callbacks=[a])
    train(corpus, data={"max_tokens": 60}, max_steps=4, callbacks=[b])
    assert len(a.losses) == 4
    assert a.losses == pytest.approx(b.losses, rel=1e-4)


def test_the_rate_counts_updates_not_micro_batches(corpus):
    seen = Seen()
    train(corpus, data={"max_tokens": 25}, max_steps=14, callbacks=[seen])
    assert len(seen.rates) == 14
    assert seen.rates.index(max(seen.rates)) + 1 == 10  # warmup
    assert seen.rates == pytest.approx([learning_rate(step, 16, 10) for step in range(1, 15)])


def test_the_rate_goes_on_after_a_resume(corpus, tmp_path):
    train(corpus, tmp_path, max_steps=7)
    seen = Seen()
    train(corpus, tmp_path, max_steps=12, callbacks=[seen])
    assert seen.rates == pytest.approx([learning_rate(step, 16, 10) for step in range(8, 13)])


@pytest.mark.parametrize("max_tokens", [400, 25])
def test_validation_comes_every_so_many_updates(corpus, max_tokens):
    # An epoch has fewer updates than the interval, and the accumulation does not divide it.
    seen = Seen()
    options = {"validate_every": 20}
    module, _ = train(corpus, data={"max_tokens": max_tokens}, module=options, max_steps=45, callbacks=[seen])
    assert seen.validated == [20, 40]
    assert module.evaluation.step == 40


def test_bleu_is_decoded_at_every_mth_validation_on_the_stated_number_of_sentences(corpus):
    found = []

    class Note(pl.Callback):
        def on_validation_end(self, trainer, module):
            found.append((trainer.global_step, [score.sentences for score in module.evaluation.scores]))

    options = {"validate_every": 2, "bleu_every": 2, "bleu_sentences": 7}
    train(corpus, module=options, max_steps=8, callbacks=[Note()])
    assert found == [(2, []), (4, [7, 7, 7]), (6, []), (8, [7, 7, 7])]


def test_validation_perplexity_is_exp_of_the_unsmoothed_nll_of_all_target_tokens(corpus):
    module, data = make_module(label_smoothing=0.2), make_data(corpus)
    make_trainer().validate(module, datamodule=data, verbose=False)
    total, count = 0.0, 0
    for src, tgt in zip(data.sentences("valid", "src"), data.sentences("valid", "tgt"), strict=True):
        batch = collate([src], [tgt], 1)
        log_probs = module.model(batch.src, batch.tgt_in).double().log_softmax(-1)[0]
        total -= sum(log_probs[i, t].item() for i, t in enumerate(batch.tgt_out[0].tolist()))
        count += len(tgt) + 1
    assert module.evaluation.tokens == count
    assert module.evaluation.nll == pytest.approx(total / count, rel=1e-5)
    assert module.evaluation.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)


class Poison(pl.Callback):
    """One gradient is not finite in some updates; notes the weights after each update."""

    def __init__(self, updates, value=math.nan):
        self.poisoned, self.value, self.weights = updates, value, {}

    def on_after_backward(self, trainer, module):
        if trainer.global_step + 1 in self.poisoned:
            module.model.embedding.weight.grad[5, 0] = self.value

    def on_train_batch_end(self, trainer, module, *_):
        self.weights[trainer.global_step] = torch.cat([p.detach().flatten().clone() for p in module.parameters()])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_left_out_and_counted(corpus, value):
    poison, seen = Poison({4}, value), Seen()
    module, trainer = make_module(), make_trainer(callbacks=[poison, seen])
    trainer.fit(module, datamodule=make_data(corpus))
    assert torch.equal(poison.weights[4], poison.weights[3])
    assert not torch.equal(poison.weights[5], poison.weights[4])
    assert all(torch.isfinite(w).all() for w in poison.weights.values())
    assert module.left_out.tolist() == [1, 0]
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {5}
    # The rate and the sentences are those of the update's number, as in a run without the fault.
    assert seen.rates == pytest.approx([learning_rate(step, 16, 10) for step in range(1, 7)])


def test_what_was_left_out_is_as_if_adam_had_never_seen_it(corpus):
    poison = Poison({2})
    module, trainer = make_module(), make_trainer(callbacks=[poison], max_steps=4)
    trainer.fit(module, datamodule=make_data(corpus))

    class Without(Poison):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step + 1 == 2:
                for parameter in module.parameters():
                    parameter.grad = None  # torch passes over those

    other, without = make_module(), Without(set())
    make_trainer(callbacks=[without], max_steps=4).fit(other, datamodule=make_data(corpus))
    for step in range(1, 5):
        assert torch.equal(poison.weights[step], without.weights[step])


def test_updates_that_stay_not_finite_end_the_training_with_weights_that_are(corpus):
    poison = Poison(set(range(4, 100)))
    module, trainer = make_module(), make_trainer(callbacks=[poison], max_steps=30)
    with pytest.raises(TrainingError, match=r"update 8: .*no longer finite .*the 5 latest updates"):
        trainer.fit(module, datamodule=make_data(corpus))
    assert trainer.global_step == 7
    assert torch.equal(poison.weights[7], poison.weights[3])


def test_the_count_of_what_was_left_out_goes_on_after_a_resume(corpus, tmp_path):
    for max_steps in (6, 7):
        module, data = make_module(), make_data(corpus)
        trainer = make_trainer(tmp_path, callbacks=[Poison({2, 5, 6})], max_steps=max_steps)
        found = list_checkpoints(tmp_path)
        trainer.fit(module, datamodule=data, ckpt_path=found[-1][1] if found else None, weights_only=True)
        assert module.left_out.tolist() == [3, 2 if max_steps == 6 else 0]


def test_a_checkpoint_loads_by_itself_with_the_model_it_holds(corpus, tmp_path):
    module, _ = train(corpus, tmp_path, module={"d_k": 4, "dropout": 0.2}, max_steps=2)
    (checkpoint,) = tmp_path.glob("*.ckpt")
    loaded = LitTransformer.load_from_checkpoint(checkpoint, weights_only=True)
    assert loaded.config == module.config
    assert loaded.warmup == 10
    for a, b in zip(loaded.parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_learned_positions_shorter_than_the_text_are_refused_at_setup(corpus):
    with pytest.raises(ValueError, match="max_positions = 8: the longest train sentence has"):
        train(corpus, module={"position": "learned", "max_positions": 8})


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_given_back_everything_after_training(corpus, fails):
    class Watch(pl.Callback):
        frozen = 0

        def on_train_batch_end(self, *_):
            self.frozen = gc.get_freeze_count()
            if fails:
                raise ArithmeticError("made up")

    watch = Watch()
    with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
        make_trainer(callbacks=[watch]).fit(make_module(), datamodule=make_data(corpus))
    assert watch.frozen > 10_000
    assert gc.get_freeze_count() == 0


def test_what_a_user_has_frozen_stays_so_and_a_second_fit_overrides_no_callback(corpus):
    module, data, trainer = make_module(), make_data(corpus), make_trainer(max_steps=2)
    gc.freeze()
    try:
        trainer.fit(module, datamodule=data)
        before = list(trainer.callbacks)
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module, datamodule=data)
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
    assert trainer.global_step == 4
    assert trainer.callbacks == before


def test_training_in_float32_takes_the_fused_pass(corpus, monkeypatch):
    called, encoded = [], fused.encoded
    monkeypatch.setattr(fused, "encoded", lambda *given: called.append(1) or encoded(*given))
    train(corpus, max_steps=3)
    assert len(called) >= 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions_train(corpus, precision):
    module, _ = train(corpus, max_steps=3, precision=precision)
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_weights_and_loads_into_a_plain_one(corpus, tmp_path):
    plain, _ = train(corpus, max_steps=3)
    compiled, _ = train(corpus, tmp_path, module={"compile": True}, max_steps=3)
    (checkpoint,) = tmp_path.glob("*.ckpt")
    loaded = LitTransformer.load_from_checkpoint(checkpoint, weights_only=True)
    for a, b, c in zip(plain.parameters(), compiled.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
        assert torch.equal(b, c)


@pytest.mark.slow
def test_shapes_and_rates_that_change_are_not_compiled_again_and_again(caplog):
    """C25 and C32."""
    module, rng = make_module(num_layers=2, compile=True), np.random.default_rng(0)
    module.model.compile(dynamic=True)
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    torch._dynamo.reset()
    compiled, shapes = [], set()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for step in range(200):
        b, s, t = rng.integers(1, 5), rng.integers(1, 40), rng.integers(1, 40)
        src, tgt = (torch.from_numpy(rng.integers(4, 300, (b, n))) for n in (s, t))
        shapes.add((b, s, t))
        loss, _ = token_losses(module.model(src, tgt), tgt, 0.1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, 16, 10)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        compiled.append(counters["unique_graphs"] - before)
    assert len(shapes) > 60
    assert 1 <= compiled[-1] <= 8
    assert compiled[-1] == compiled[150], "what comes up later fits what is compiled"
    assert "recompile_limit" not in caplog.text
    assert "cache_size_limit" not in caplog.text


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_a_loss_in_bf16_is_that_in_float32(scale):
    """C33: V = 37,000 and large logits; torch computes the matrix product in bf16, this project the loss in float32."""
    torch.manual_seed(0)
    rows = torch.randn(2, 40, 64)
    matrix = torch.randn(37_000, 64) * scale / 8
    targets = torch.randint(4, 37_000, (2, 40))
    exact = rows.double() @ matrix.double().T
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.nn.functional.linear(rows, matrix)
    assert logits.dtype == torch.bfloat16
    for smoothing in (0.0, 0.1):
        ours = token_losses(logits, targets, smoothing)[0].double() / targets.numel()
        wanted = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
        assert ours == pytest.approx(wanted.item(), rel=1e-3)


@pytest.mark.slow
def test_a_compiled_a_plain_and_a_ddp_checkpoint_load_into_each_other_and_average(corpus, tmp_path):
    """C35."""
    train(corpus, tmp_path / "plain", max_steps=2)
    train(corpus, tmp_path / "compiled", max_steps=3, module={"compile": True})
    text = "import json, sys; from pathlib import Path; from conftest import train; "
    text += "train(json.loads(sys.argv[1]), Path(sys.argv[2]), max_steps=4, devices=2, strategy='ddp')"
    run_ranks(text, 2, json.dumps(corpus), tmp_path / "ddp")
    paths = [list_checkpoints(tmp_path / kind)[-1][1] for kind in ("plain", "compiled", "ddp")]
    names = [list(load_checkpoint(path)["state_dict"]) for path in paths]
    assert names[0] == names[1] == names[2]
    for path in paths:
        assert LitTransformer.load_from_checkpoint(path, weights_only=True).config == make_module().config
    average = load_checkpoint(average_checkpoints(paths, tmp_path / "average.ckpt"))
    weights = [load_checkpoint(path)["state_dict"] for path in paths]
    for name, mean in average["state_dict"].items():
        torch.testing.assert_close(mean, sum(w[name] for w in weights) / 3)
    module, _ = train(corpus, tmp_path / "plain", max_steps=4, module={"compile": True})
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("precise", [True, False])
def test_all_pad_rows_beside_others_stay_finite_when_compiled(precise):
    torch._dynamo.reset()  # what other tests have compiled is for other shapes
    module = make_module()
    module.model.compile(dynamic=True)
    batch = collate(sentences(5, 3), sentences(4, 6), 12)
    padded = batch._replace(**{k: F.pad(getattr(batch, k), (0, 0, 0, 1)) for k in ("src", "tgt_in", "tgt_out")})
    with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
        alone, beside = (module(b.src, b.tgt_in)[:2].detach() for b in (batch, padded))
        loss, grads = loss_and_gradient(module, padded, 12)
    assert math.isfinite(loss)
    assert all(torch.isfinite(grad).all() for grad in grads)
    torch.testing.assert_close(alone, beside, atol=1e-6 if precise else 2e-2, rtol=0)


def test_the_nll_of_sentences_is_that_of_their_tokens():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 11), torch.randint(4, 11, (3, 5))
    targets[1, 2:] = PAD_ID
    targets[2] = PAD_ID
    each = sentence_nll(logits, targets)
    for row, length in enumerate((5, 2, 0)):
        by_hand = -sum(logits[row, t].softmax(0)[targets[row, t]].log() for t in range(length))
        assert each[row].item() == pytest.approx(float(by_hand), abs=1e-5)
    assert each.sum().item() == pytest.approx(token_losses(logits, targets, 0.1)[1].item(), rel=1e-6)


@pytest.mark.parametrize("value", ["none", "Zero", ""])
def test_a_start_of_the_warmup_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"warmup_start = .* must be 'zero' or 'peak'"):
        LitTransformer(vocab_size=11, warmup_start=value)
