"""The fused training pass beside the same model's plain layers, which test_transformer.py holds to the equations."""

import copy

import pytest
import torch

from lit_transformer import kernels
from lit_transformer.kernels import vocabulary_losses
from lit_transformer.layers import FeedForward, Linear
from lit_transformer.tokenizer import EOS_ID, PAD_ID
from lit_transformer.transformer import Transformer, TransformerConfig

VOCAB = 50
VARIANTS = {
    "three heads": {},
    "d_k < d_v, learned": {"d_k": 2, "d_v": 5, "position": "learned", "max_positions": 200},
    "one head, d_k > d_v": {"num_heads": 1, "d_k": 7, "d_v": 3},
    "pre-norm, unscaled, no positions": {"norm": "pre", "scale_attention": False, "position": "none"},
}


def build(dtype=torch.float32, dropout=0.0, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "num_layers": 2, "d_model": 12, "d_ff": 17, "num_heads": 3}
    model = Transformer(TransformerConfig(**{**sizes, "dropout": dropout, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def ids(rows, length, shortest):
    found = torch.randint(EOS_ID + 1, VOCAB, (rows, length))
    for row, end in enumerate(torch.linspace(shortest, length, rows).long().tolist()):
        found[row, end:] = PAD_ID
    return found


def batch(rows=9, src=20, tgt=23, shortest=3):
    torch.manual_seed(1)
    targets = ids(rows, tgt, shortest)
    return ids(rows, src, shortest), targets.roll(1, 1), targets


def in_layers(model, src, tgt_in, tgt_out, eps):
    x = model.decode(tgt_in, model.encode(src), model.memory_mask(src))
    return vocabulary_losses(x.flatten(0, 1), model.embedding.weight, tgt_out.flatten(), eps)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", [{}, {"src": 120}, {"tgt": 120}, {"rows": 64, "shortest": 20, "tgt": 20}])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_losses_and_gradients_are_those_of_the_layers(variant, shape):
    model, exact = build(**variant), build(torch.float64, **variant)
    given = batch(**shape)
    assert model._fused(given[0])
    assert not exact._fused(given[0])
    loss, nll = model(*given, 0.1)
    expected = in_layers(exact, *given, 0.1)
    torch.testing.assert_close(loss.double(), expected[0].double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(nll.double(), expected[1].double(), rtol=1e-5, atol=0)
    mine, theirs = gradients(model, loss), gradients(exact, expected[0])
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            mine[name].double(), gradient, rtol=1e-3, atol=2e-5 * gradient.abs().max().item(), msg=name
        )


@pytest.mark.parametrize("filler", [0, 3, 63])
def test_filler_changes_nothing(monkeypatch, filler):
    """Rows are filled up to any number: neither losses nor gradients notice."""
    model, given = build(), batch()
    monkeypatch.setattr(kernels, "STEP", 1)
    alone = model(*given, 0.1)[0]
    plain = gradients(model, alone)
    monkeypatch.setattr(kernels, "STEP", given[0].numel() * given[2].numel() + filler)
    loss = model(*given, 0.1)[0]
    torch.testing.assert_close(loss, alone)
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-5 * plain[name].abs().max().item())


def test_a_batch_of_padding_alone_has_no_loss_and_finite_gradients():
    model = build()
    empty = torch.full((1, 1), PAD_ID)
    loss, _ = model(empty, empty, empty, 0.1)
    assert loss.item() == 0.0
    assert all(not gradient.any() for gradient in gradients(model, loss).values())


def test_dropout_is_drawn_and_a_seed_repeats_it():
    model, given = build(dropout=0.3).train(), batch()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(*given, 0.1)[0].item())
    assert losses[0] == losses[1] != losses[2]
    assert model.eval()(*given, 0.1)[0].item() != losses[0]


def test_dropout_is_the_same_in_the_layers():
    """So a run may go on under another strategy, and a hook changes no run."""
    model, given = build(dropout=0.3).train(), batch()
    losses = []
    for way in (model, lambda *args: in_layers(model, *args)):
        torch.manual_seed(1)
        losses.append(way(*given, 0.1)[0])
    torch.testing.assert_close(*losses)
    mine, theirs = (gradients(model, loss) for loss in losses)
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5 * gradient.abs().max().item())


def test_hooks_on_layers_are_called():
    model, given = build(), batch()
    expected, seen = model(*given, 0.1)[0], []
    hooks = [
        model.encoder[1].self_attention.w_o.register_forward_hook(lambda *_: seen.append("w_o")),
        model.decoder[0].register_forward_pre_hook(lambda *_: seen.append("layer")),
    ]
    torch.testing.assert_close(model(*given, 0.1)[0], expected)
    assert seen == ["w_o", "layer"]
    for hook in hooks:
        hook.remove()
    model(*given, 0.1)
    assert seen == ["w_o", "layer"]
    model.encoder[0].feed_forward[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    model(*given, 0.1)[0].backward()
    assert seen == ["w_o", "layer", "backward"]


def test_hooks_on_all_modules_are_called():
    model, given, seen = build(), batch(), []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    model(*given, 0.1)
    hook.remove()
    assert seen.count("MultiHeadAttention") == 2 + 2 * 2


def test_a_part_of_somebodys_own_is_called():
    model, given = build(), batch()
    expected, seen = model(*given, 0.1)[0], []

    class Own(FeedForward):
        def forward(self, x):
            seen.append("own")
            return super().forward(x)

    model.encoder[1].feed_forward = Own(12, 17)
    assert not torch.equal(model(*given, 0.1)[0], expected)
    assert seen == ["own"]

    model = build()
    attention = model.decoder[1].cross_attention
    attention.forward = lambda *args, **options: seen.append("patched") or type(attention).forward(attention, *args)
    torch.testing.assert_close(model(*given, 0.1)[0], expected)
    assert seen == ["own", "patched"]


def test_a_projection_with_a_bias_and_parts_of_torchs_own_are_called():
    model, given = build(), batch()
    model.encoder[0].self_attention.w_q = Linear(12, 12)
    model.encoder[1].feed_forward[0] = torch.nn.Linear(12, 17)
    model.decoder[0].feed_forward[1] = torch.nn.GELU()
    model.decoder[1].residuals[0].norm = torch.nn.LayerNorm(12, elementwise_affine=False)
    loss = model(*given, 0.1)[0]
    torch.testing.assert_close(loss, in_layers(model, *given, 0.1)[0])
    changed = copy.deepcopy(model)
    changed.decoder[0].feed_forward[1] = torch.nn.ReLU()
    assert not torch.equal(changed(*given, 0.1)[0], loss)
    assert all(gradient.any() for gradient in gradients(model, loss).values())


def test_norms_at_the_ends_see_sentences_where_somebody_looks():
    model, given, seen = build(norm="pre"), batch(), []
    expected = model(*given, 0.1)[0]
    model.encoder_norm.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch.testing.assert_close(model(*given, 0.1)[0], expected)
    assert seen == [(9, 20, 12)]


@pytest.mark.parametrize("length", [20, 120])
def test_an_empty_source_is_what_it_is_in_the_layers(length):
    model, (src, tgt_in, tgt_out) = build(), batch(src=length)
    src[4] = PAD_ID
    loss = model(src, tgt_in, tgt_out, 0.1)[0]
    expected = in_layers(build(torch.float64), src, tgt_in, tgt_out, 0.1)[0]
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=0)


def test_what_is_not_a_number_is_not_hidden():
    model, given = build(), batch()
    with torch.no_grad():
        model.decoder[1].feed_forward[0].bias[3] = float("nan")
    assert model(*given, 0.1)[0].isnan()


def test_second_derivatives_are_refused_in_words():
    model, given = build(), batch()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(model(*given, 0.1)[0], model.embedding.weight, create_graph=True)


def test_a_model_of_another_class_keeps_its_own_way():
    class Other(Transformer):
        def encode(self, src):
            return super().encode(src) * 2

    model, given = build(), batch()
    other = Other(model.config)
    other.load_state_dict(model.state_dict())
    x = other.decode(given[1], model.encode(given[0]) * 2, model.memory_mask(given[0]))
    expected = vocabulary_losses(x.flatten(0, 1), model.embedding.weight, given[2].flatten(), 0.1)[0]
    torch.testing.assert_close(other(*given, 0.1)[0], expected)


def test_other_precisions_are_left_to_torch():
    model, given = build(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        assert not model._fused(given[0])
        assert model(*given, 0.1)[0].isfinite()
