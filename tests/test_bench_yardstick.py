"""The yardstick of ``pagedlab bench``: all products of the model, and nothing else."""

from collections import Counter
from pathlib import Path

import torch

import pagedlab.models.embedded
from pagedlab.attention.torch_backend import TorchBackend
from pagedlab.bench import yardstick
from pagedlab.bench.yardstick import BareProducts
from pagedlab.models.config import ModelConfig
from pagedlab.models.layers import MergedLinear
from pagedlab.models.loader import load_model
from pagedlab.models.products import linear


def test_every_weight_counts_once_per_layer():
    directory = Path(pagedlab.models.embedded.__path__[0])
    config = ModelConfig.from_directory(directory)
    model = load_model(directory, config, device=torch.device("cpu"), dtype=torch.float32,
                       attention_backend=TorchBackend())
    bare = BareProducts(model, 4, torch.float32)
    counted = Counter((sum(linear.parts.values()), linear.weight.shape[1]) for linear in bare._linears)
    assert set(bare._one_pass()) == set(counted)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = config.head_dim * config.num_attention_heads
    qkv = heads + 2 * config.head_dim * config.num_key_value_heads
    assert counted == {
        (qkv, hidden): layers, (hidden, heads): layers, (2 * config.intermediate_size, hidden): layers,
        (hidden, config.intermediate_size): layers, (config.vocab_size, hidden): 1,
    }
    assert bare.seconds() > 0


def test_a_formulation_that_would_be_faster_shortens_the_yardstick(monkeypatch):
    """By a clock that only knows what kind of product it times."""
    def other(weight):
        return lambda x, bias: x @ weight.T

    seconds = {linear(torch.ones(1, 1)).__code__: 0.25, other(torch.ones(1, 1)).__code__: 1.0}
    monkeypatch.setattr(yardstick, "_seconds", lambda products, x: sum(seconds[p.__code__] for p in products))
    model = torch.nn.ModuleList(
        [MergedLinear(64, {"proj": 64}, torch.float32, torch.device("cpu")) for _ in range(3)]
    )
    for layer in model:
        layer.formulation, layer.product = other, other(layer.weight)
    monkeypatch.setattr(yardstick, "formulations", lambda num_in, dtype: [linear, other])
    assert BareProducts(model, 4, torch.float32).seconds() == 0.75
    monkeypatch.setattr(yardstick, "formulations", lambda num_in, dtype: [other])
    assert BareProducts(model, 4, torch.float32).seconds() == 3.0
