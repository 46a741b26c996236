"""Fast ways beside plain torch in float64, which knows none of them."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lit_transformer import kernels
from lit_transformer.kernels import add_dropped, dropout, product, token_losses, vocabulary_losses
from lit_transformer.tokenizer import PAD_ID


def leaves(*shapes, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def doubled(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


# Products


def test_products_are_torchs_and_torch_counts_them():
    x, weight, bias = (t.detach() for t in leaves((70, 5), (9, 5), (9,)))
    with FlopCounterMode(display=False) as counter:
        found = product(x, weight, bias)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t() + bias.double(), rtol=1e-5, atol=1e-5)
    assert counter.get_total_flops() == 2 * 70 * 5 * 9
    torch.testing.assert_close(product(x.double(), weight.double()), x.double() @ weight.double().t())


# Dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_dropout_keeps_each_element_with_the_same_probability(p):
    torch.manual_seed(4)
    n = 8_000_000
    kept = dropout(torch.ones(n), p, True) != 0
    error = (p * (1 - p) / n) ** 0.5
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=5 * error)
    # whatever an element's place in the words that masks are cut from, and whatever its neighbour
    for place in range(8):
        assert kept[place::8].float().mean().item() == pytest.approx(1 - p, abs=5 * error * 8**0.5)
    for distance in (1, 2, 3, 4, 512):
        both = (kept[distance:] & kept[:-distance]).float().mean().item()
        assert both == pytest.approx((1 - p) ** 2, abs=10 * error)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.9, 0.9999999])
def test_what_is_kept_is_divided_by_the_probability_of_being_kept(p):
    x = torch.full((1000, 999), 3.0)
    y = dropout(x, p, True)
    exact = round(p * 65536) / 65536 if p < 0.9999 else 65535 / 65536
    assert exact == pytest.approx(p, abs=2**-16)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 3 / (1 - exact)))


def test_dropout_follows_from_the_seed_alone():
    def drawn():
        torch.manual_seed(5)
        return dropout(torch.ones(3, 7, 5), 0.5, True), dropout(torch.ones(101), 0.5, True)

    first, second = drawn(), drawn()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0].flatten()[:101], first[1])


def test_the_gradient_goes_where_the_value_went():
    (x,) = leaves((30, 40))
    y = dropout(x, 0.4, True)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, (y / x).detach())


def test_adding_what_is_left_is_the_same_in_one_pass():
    x, y = leaves((30, 41), (30, 41))
    torch.manual_seed(6)
    one = add_dropped(x, y, 0.3, True)
    torch.manual_seed(6)
    other = x + dropout(y, 0.3, True)
    torch.testing.assert_close(one, other)
    change = torch.randn_like(one)
    for mine, theirs in zip(*(torch.autograd.grad(z, (x, y), change) for z in (one, other)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_dropped_without_dropout_and_in_evaluation(p, training):
    x, y = leaves((4, 5), (4, 5))
    state = torch.get_rng_state()
    assert torch.equal(dropout(x, p, training), x)
    assert torch.equal(add_dropped(x, y, p, training), x + y)
    assert torch.equal(torch.get_rng_state(), state)


# The vocabulary's losses


def case(rows=55, width=8, size=13):
    x, weight = leaves((rows, width), (size, width))
    targets = torch.randint(PAD_ID + 1, size, (rows,))
    targets[::4] = PAD_ID
    targets[-9:] = PAD_ID
    return x, weight, targets


@pytest.mark.parametrize("rows", [7, 11, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_losses_in_pieces_are_those_of_all_logits(monkeypatch, smoothing, rows):
    monkeypatch.setattr(kernels, "ROWS", rows)
    x, weight, targets = case()
    exact = doubled((x, weight))
    loss, nll = vocabulary_losses(x, weight, targets, smoothing)
    # token_losses computes in float32, so here is the formula of section 5.4 once more
    log_probs = F.log_softmax(F.linear(*exact), -1)[targets != PAD_ID]
    right = log_probs.gather(1, targets[targets != PAD_ID].unsqueeze(1))
    expected = -((1 - smoothing) * right + smoothing * log_probs.mean(1, keepdim=True)).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nll.double(), -right.sum(), rtol=1e-5, atol=1e-5)
    assert not nll.requires_grad
    (loss / 7).backward()
    (expected / 7).backward()
    for mine, theirs in zip((x, weight), exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)
    assert not x.grad[targets == PAD_ID].any()


def test_padding_alone_has_no_loss():
    x, weight, targets = case()
    loss, nll = vocabulary_losses(x, weight, torch.full_like(targets, PAD_ID), 0.1)
    loss.backward()
    assert loss.item() == nll.item() == 0.0
    assert not x.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("kind", ["bfloat16", "double", "bf16-mixed", "16-mixed"])
def test_losses_in_other_precisions_are_those_of_all_logits(kind):
    dtype = {"bfloat16": torch.bfloat16, "double": torch.float64}.get(kind, torch.float32)
    cast = torch.autocast("cpu", torch.float16 if kind == "16-mixed" else torch.bfloat16, enabled="mixed" in kind)
    given = case()
    x, weight = (t.detach().to(dtype).requires_grad_() for t in given[:2])
    with cast:
        pieces = vocabulary_losses(x, weight, given[2], 0.1)
        whole = token_losses(F.linear(x, weight)[None], given[2][None], 0.1)
    close = {"rtol": 1e-5, "atol": 1e-5} if kind == "double" else {"rtol": 0.03, "atol": 0.03}
    for mine, theirs in zip(pieces, whole, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, **close)
    for mine, theirs in zip(*(torch.autograd.grad(z[0], (x, weight)) for z in (pieces, whole)), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs, **close)
