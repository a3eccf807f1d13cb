"""The embedded model: what ships with the package is what its card says it is."""

import gzip
import itertools
import json
import re
import sys
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM

import pagedlab

FOLDER = Path(pagedlab.__file__).parent / "models" / "embedded"
sys.path.insert(0, str(Path(__file__).parents[1] / "walkthrough" / "embedded_model"))

from corpus import read_chapters  # noqa: E402
from evaluate import PROMPTS, bits_per_byte  # noqa: E402
from ngram import KneserNey  # noqa: E402

TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
CARD = (FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")


def table_value(name: str) -> str:
    """The second cell of the card's table row that begins with ``name``."""
    return re.search(rf"^\| {re.escape(name)} \| (.+) \|$", CARD, re.MULTILINE).group(1)


def parameter_count() -> int:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def test_package_data_is_at_most_ten_megabytes() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 10_000_000


def test_two_to_four_million_parameters_as_the_card_says() -> None:
    assert 2_000_000 <= parameter_count() <= 4_000_000
    assert table_value("Parameters") == f"{parameter_count():,}"


def test_config_is_a_real_qwen3_with_grouped_queries() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert 1 < config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True
    assert config["hidden_act"] == "silu"
    assert config["max_position_embeddings"] >= 1024
    assert config["eos_token_id"] == 0
    assert config["vocab_size"] == TOKENIZER.get_vocab_size()
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


def test_weights_have_qk_norm_and_no_second_output_matrix() -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.0.self_attn.q_norm.weight" in names
    assert "model.layers.0.self_attn.k_norm.weight" in names
    assert "lm_head.weight" not in names


@settings(deadline=None)  # the first call is slow on a busy machine
@given(st.text())
def test_tokenizer_gives_back_any_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["e\u0301 is not \u00e9", "  two  spaces\n\n\tand a tab ", "字 🙂 שלום\x1b[0m"])
def test_auto_tokenizer_reads_the_same_tokenizer(text: str) -> None:
    auto = AutoTokenizer.from_pretrained(FOLDER)
    assert auto(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert auto.decode(auto(text)["input_ids"]) == text


def test_end_of_text_is_token_zero() -> None:
    assert TOKENIZER.encode("<|endoftext|>").ids == [0]
    assert AutoTokenizer.from_pretrained(FOLDER).eos_token_id == 0


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    loaded, info = Qwen3ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return loaded.eval()


def test_beats_gzip_and_the_byte_5_gram_on_held_out_text(model: Qwen3ForCausalLM) -> None:
    _, held_out = read_chapters()
    # the beginning of three held-out chapters, of three novels
    pieces = [chapter[:2500] for chapter in held_out[::5]]
    data = "".join(pieces).encode()
    measured = bits_per_byte(model, TOKENIZER, pieces)
    assert measured < 8 * len(gzip.compress(data, 9)) / len(data)
    assert measured < float(table_value("5-gram over bytes, Kneser-Ney"))
    assert measured == pytest.approx(float(table_value("this model")), abs=0.25)


def test_held_out_chapters_are_not_in_the_training_text() -> None:
    training, held_out = read_chapters()
    text = "".join(training)
    assert len(held_out) == 13
    assert not any(chapter[:200] in text or chapter[-200:] in text for chapter in held_out)


def test_card_shows_the_model_beating_both_5_grams_and_gzip() -> None:
    ours = float(table_value("this model"))
    for other in (
        "5-gram over bytes, Kneser-Ney",
        "5-gram over the model's own tokens, Kneser-Ney",
        "gzip -9",
        "xz -9, after reading the training text",
    ):
        assert ours < float(table_value(other)), other


def test_card_gives_ten_continuations_of_which_nine_words_in_ten_are_words() -> None:
    found, total = map(int, re.search(r"training text: (\d+) of (\d+)", CARD).groups())
    assert total > 400
    assert found / total >= 0.9
    for seed, prompt in enumerate(PROMPTS):
        assert f"Seed {seed}:\n\n> **{prompt}**" in CARD
    assert len(PROMPTS) == 10


def test_card_names_what_is_needed_to_train_it_again() -> None:
    assert re.fullmatch(r"`python walkthrough/embedded_model/train\.py .*--seed \d+.*`", table_value("Command"))
    assert int(table_value("Seed")) >= 0
    assert float(re.match(r"[\d.]+", table_value("Training time")).group()) <= 80
    assert "public domain" in table_value("Licence")


def test_5_gram_model_is_a_probability_distribution() -> None:
    generator = numpy.random.default_rng(0)
    text = generator.integers(1, 4, size=200)
    model = KneserNey([text], order=3, alphabet=4, pad=0)
    sequences = [numpy.array(s) for s in itertools.product(range(4), repeat=4)]
    assert sum(2 ** -model.bits(s) for s in sequences) == pytest.approx(1.0)
