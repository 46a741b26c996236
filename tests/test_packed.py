"""A packed model beside the one that it was made of."""

import pytest
import torch
from test_transformer import SOURCES, batch, build, each_variant

from lit_transformer import packed
from lit_transformer.decode import beam_search, search_all
from lit_transformer.packed import PackedTransformer, for_search
from lit_transformer.tokenizer import PAD_ID


def steps(model, src, number=6):
    """Logits of a few steps, with reordered and dropped beams."""
    torch.manual_seed(2)
    with torch.no_grad():
        state, found, sentences = model.start(src), [], len(src)
        for step in range(number):
            tokens = torch.randint(4, 11, (sentences, 3))
            found.append(model.step(tokens, state))
            if step == 2:
                state.select(torch.tensor([2, 0, 0, 5, 5, 4]), torch.tensor([0, 1]))
                sentences = 2
        return found


@each_variant
def test_packed_steps_are_the_models(variant):
    model = build(**variant)
    src = batch([*SOURCES, []], 6)
    with torch.no_grad():
        real = src != PAD_ID
        torch.testing.assert_close(PackedTransformer(model).encode(src)[real], model.encode(src)[real])
    for mine, theirs in zip(steps(PackedTransformer(model), src), steps(model, src), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("together", [1, 2, 3, 100])
def test_sentences_of_like_length_are_encoded_together_and_stand_where_they_stood(monkeypatch, together):
    monkeypatch.setattr(packed, "TOGETHER", together)
    model, src = build(), batch([[5], [6, 7, 8], [9, 5], [], [10, 6, 5, 7, 8], [7, 7]], 6)
    with torch.no_grad():
        found, expected = PackedTransformer(model).encode(src), model.encode(src)
    torch.testing.assert_close(found[src != PAD_ID], expected[src != PAD_ID])


@each_variant
def test_steps_in_8_bits_are_near(variant):
    model = build(**variant)
    src = batch([*SOURCES, []], 6)
    for mine, theirs in zip(steps(PackedTransformer(model, int8=True), src), steps(model, src), strict=True):
        assert not torch.equal(mine, theirs)
        assert (mine - theirs).square().mean() < 0.01 * theirs.var()


def test_the_model_stays_as_it_was():
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert PackedTransformer(model).max_length == model.max_length
    assert model.training is build().training
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        next(model.parameters()).zero_()
    steps(model, batch(SOURCES, 6))  # still a model of its own


def test_a_search_of_all_sources_is_the_models_own_and_after_training_that_of_the_new_weights():
    model = build()
    sources = [[*range(5, 5 + n), 3] for n in (1, 3, 5)]
    for _ in range(2):
        outputs = [best[0].ids for best in search_all(model, sources)]
        assert outputs == [beam_search(model.eval(), torch.tensor([ids]))[0][0].ids for ids in sources]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 3)


def test_a_model_with_a_part_of_somebodys_own_searches_as_it_is():
    model, sources, seen = build(), [[5, 6, 7, 3]], []
    expected = search_all(model, sources)

    class Low(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear, self.added = linear, torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
            torch.nn.init.zeros_(self.added.weight)

        def forward(self, x, relu=False):
            return self.linear(x) + self.added(x)

    model.decoder[0].self_attention.w_q = Low(model.decoder[0].self_attention.w_q)
    model.encoder[0].register_forward_hook(lambda *_: seen.append(1))
    assert for_search(model) is model
    assert search_all(model, sources)[0][0].ids == expected[0][0].ids
    assert seen


def test_what_is_not_a_number_is_not_hidden_in_a_search():
    model = build()
    with torch.no_grad():
        model.decoder[0].feed_forward[0].bias[0] = float("nan")
    assert for_search(model) is model


def test_elsewhere_a_model_searches_as_it_is_and_8_bits_are_refused():
    model = build().double()
    assert for_search(model) is model
    with pytest.raises(ValueError, match=r"int8.*float64"):
        for_search(model, int8=True)
