"""The yardstick of ``pagedlab bench``: all products of the model, and nothing else."""

from pathlib import Path

import torch

import pagedlab.models.embedded
from pagedlab.attention.torch_backend import TorchBackend
from pagedlab.bench.yardstick import BareProducts
from pagedlab.models.config import ModelConfig
from pagedlab.models.loader import load_model


def test_every_weight_counts_once_per_layer():
    directory = Path(pagedlab.models.embedded.__path__[0])
    config = ModelConfig.from_directory(directory)
    model = load_model(directory, config, device=torch.device("cpu"), dtype=torch.float32,
                       attention_backend=TorchBackend())
    bare = BareProducts(model, 4, torch.float32)
    counted = {shape: stands_for * len(products[0]) for shape, (stands_for, products) in bare._products.items()}
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = config.head_dim * config.num_attention_heads
    qkv = heads + 2 * config.head_dim * config.num_key_value_heads
    assert counted == {
        (qkv, hidden): layers, (hidden, heads): layers, (2 * config.intermediate_size, hidden): layers,
        (hidden, config.intermediate_size): layers, (config.vocab_size, hidden): 1,
    }
    assert bare.seconds() > 0
