"""One of a thing is not several, also in a pool of one block and a prompt of one token."""

from __future__ import annotations

import json
import re
import sys

import pytest

from pagedlab import cli
from pagedlab.wording import are, plural

# A number of one before a noun in the plural; "1 of 2 tokens" and "0.1 tokens" are right.
ONE_OF_SEVERAL = re.compile(
    r"(?<![\w.,/–-])1 (?:(?:usable|computed|output|prompt|new|free|full|hit|other|more|query|key-value|kv) )?"
    r"(?:tokens|blocks|steps|requests|records|events|layers|heads|seats|slots|rounds|need|are|hold)\b"
)
TINY = ["--num-blocks", "3", "--block-size", "1", "--max-num-seqs", "1", "--max-num-batched-tokens", "1"]


def test_one_and_many():
    assert [plural(n, "free block") for n in (0, 1, 2048)] == ["0 free blocks", "1 free block", "2,048 free blocks"]
    assert [are(n) for n in (0, 1, 1000)] == ["0 are", "1 is", "1,000 are"]


@pytest.fixture
def said(monkeypatch, capsys):
    """Everything a command says, its line breaks as spaces."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pagedlab", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        out, err = capsys.readouterr()
        return " ".join(f"{out} {err}".split())

    return run


def tiny_scenario(num_blocks: int) -> dict:
    """One request, one token in each block; with two blocks it never fits."""
    return {
        "format": "pagedlab-scenario/1", "name": "tiny", "about": "Tiny.",
        "config": {"block_size": 1, "num_blocks": num_blocks, "max_num_seqs": 1, "max_num_batched_tokens": 1,
                   "max_model_len": 8},
        "requests": {"r0": {"prompt_token_ids": [1], "max_tokens": 2, "sampled_token_ids": [7, 8]}},
        "script": [{"before_step": 0, "add": ["r0"]}],
    }  # fmt: skip


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_a_tiny_story_is_told_in_the_singular(said, tmp_path, num_blocks):
    story, file = tmp_path / "tiny.json", str(tmp_path / "t.jsonl")
    story.write_text(json.dumps(tiny_scenario(num_blocks)))
    texts = [said("trace", "--scenario", str(story), "--out", file)]
    texts += [said("replay", file, "--detail", detail) for detail in ("steps", "decisions", "tensors")]
    texts += [said("why", file, "r0"), said("check", file), said("simulate", str(story)), said("scenario-from", file)]
    assert "1 token " in texts[0] and "1 token" in texts[4] and f"{num_blocks - 1} usable block" in texts[6]
    assert [ONE_OF_SEVERAL.findall(text) for text in texts] == [[]] * len(texts)


def test_an_engine_of_one_seat_and_its_refusals_are_told_in_the_singular(said):
    texts = [
        said("trace", "I", *TINY, "--max-tokens", "1"),
        said("trace", "It is a truth", *TINY),
        said("trace", "I", *TINY, "--max-num-batched-tokens", "1", "--max-model-len", "64"),
        said("generate", "I", "--kv-cache-memory", "100000"),
        said("simulate", "--num-requests", "1", *TINY),
    ]
    assert "usable blocks" in texts[1] and "pagedlab: " in texts[3]
    assert [ONE_OF_SEVERAL.findall(text) for text in texts] == [[]] * len(texts)


@pytest.mark.parametrize("text", ["1 usable blocks", "of 1 tokens, 2", "has 1 requests", "1 are free", "1 need 2"])
def test_the_search_finds_what_it_must(text):
    assert ONE_OF_SEVERAL.search(text)


@pytest.mark.parametrize("text", ["11 tokens", "1,001 tokens", "0.1 tokens", "1 token", "1 of 2 tokens"])
def test_the_search_leaves_what_is_right(text):
    assert not ONE_OF_SEVERAL.search(text)
