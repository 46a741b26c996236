"""The whole learns: text in, BLEU out, on a task that only a working model can do."""

import random

import pytest
from conftest import make_data, make_module, make_trainer, write_corpus

from lit_transformer.translate import Translator


@pytest.mark.slow
def test_reversing_is_learned_from_a_random_seed(tmp_path):
    seed = random.randrange(10**6)  # the property must not hang on one seed
    print(f"seed {seed}")
    options = write_corpus(tmp_path / "text", 4000, 100, 100, 10, lambda words: words[::-1], seed)
    corpus = {**options, "root": str(tmp_path / "data"), "vocab_size": 320, "num_workers": 0}
    data = make_data(corpus, tokens_per_update=500, max_tokens=1000, seed=seed)
    module = make_module(
        vocab_size=320, num_layers=2, d_model=64, d_ff=256, num_heads=4, dropout=0.1, warmup=200, lr_factor=0.3,
        seed=seed, bleu_sentences=100,
    )  # fmt: skip
    trainer = make_trainer(tmp_path / "run", max_steps=1500, gradient_clip_val=1.0)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    bleu = module.evaluation.scores[0]
    assert bleu.sentences == 100
    assert bleu.score > 95
    (checkpoint,) = (tmp_path / "run").glob("*.ckpt")
    assert Translator(checkpoint).translate(["bana dero lusi"]) == [["lusi dero bana"]]
