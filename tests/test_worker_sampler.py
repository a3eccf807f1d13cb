"""The sampler: vLLM's order, its distribution, and requests that do not disturb each other."""

from __future__ import annotations

import math

import pytest
import torch

from pagedlab.sampling_params import SamplingParams
from pagedlab.trace.events import TokensSampled
from pagedlab.trace.tracer import trace
from pagedlab.worker import sampler as sampler_module
from pagedlab.worker.requests import CachedRequestState
from pagedlab.worker.sampler import Sampler, top_logprobs

CPU = torch.device("cpu")
PROBABILITIES = [0.5, 0.3, 0.15, 0.05]


def request(req_id="r0", output=(), **params):
    params = SamplingParams(**params)
    generator = None if params.seed is None else torch.Generator(CPU).manual_seed(params.seed)
    return CachedRequestState(req_id, [1], params, ([],), 0, generator, list(output))


def sample(logits, requests, discarded=None, sampler=None):
    sampler = sampler or Sampler((0,), 0, CPU)
    return sampler.sample(logits, requests, discarded or [False] * len(requests))


def drawn_tokens(num_draws=4000, **params):
    """How often each token comes, out of draws from PROBABILITIES in one batch."""
    logits = torch.tensor(PROBABILITIES).log().repeat(num_draws, 1)
    tokens, _ = sample(logits, [request(f"r{i}", **params) for i in range(num_draws)])
    return torch.bincount(torch.tensor(tokens), minlength=4) / num_draws


def test_draws_follow_the_distribution():
    assert (drawn_tokens() - torch.tensor(PROBABILITIES)).abs().max() < 0.03


def test_temperature_sharpens_the_distribution():
    expected = torch.tensor(PROBABILITIES).pow(2)
    assert (drawn_tokens(temperature=0.5) - expected / expected.sum()).abs().max() < 0.03


@pytest.mark.parametrize("params, kept", [
    ({"top_k": 1}, 1), ({"top_k": 2}, 2), ({"top_k": 100}, 4), ({"top_k": -1}, 4),
    ({"top_p": 1e-300}, 1), ({"top_p": 0.4}, 1), ({"top_p": 0.7}, 2), ({"top_p": 0.9}, 3), ({"top_p": 1.0}, 4),
    ({"min_p": 0.5}, 2), ({"min_p": 0.29}, 3), ({"min_p": 1.0}, 1),
    ({"top_k": 3, "top_p": 0.5}, 1), ({"top_k": 2, "top_p": 0.9}, 2), ({"min_p": 0.2, "top_k": 2}, 2),
])  # fmt: skip
def test_truncation_keeps_the_most_likely_tokens_and_their_proportions(params, kept):
    found = drawn_tokens(**params)
    expected = torch.tensor([*PROBABILITIES[:kept], *[0.0] * (4 - kept)])
    assert (found[kept:] == 0).all()
    assert (found - expected / expected.sum()).abs().max() < 0.03


def test_top_k_of_3_and_top_p_of_one_half_counts_probabilities_after_top_k():
    """0.5 alone is 0.526 of what three tokens leave, so it reaches 0.52; of all four it would not."""
    assert drawn_tokens(top_k=3, top_p=0.52)[1] == 0
    assert drawn_tokens(top_p=0.52)[1] > 0


def test_the_most_likely_token_stays_also_under_a_top_p_that_float32_rounds_to_zero():
    assert sample(torch.tensor([[0.0, 9.0, 1.0]]), [request(top_p=1e-300)])[0] == [1]


def test_equally_likely_tokens_all_reach_min_p_and_are_drawn_at_any_temperature_but_a_greedy_one():
    for params, drawn in (({"min_p": 1.0}, {1, 2}), ({"temperature": 2e-5}, {1, 2}), ({"temperature": 5e-6}, {1})):
        requests = [request(str(row), **params) for row in range(50)]
        assert set(sample(torch.tensor([[0.0, 1.0, 1.0]] * 50), requests)[0]) == drawn


def test_tokens_that_reach_top_p_exactly_are_enough():
    """Eight equally likely tokens: a quarter is two of them, and not a third."""
    for top_p, kept in ((0.25, 2), (0.5, 4), (0.75, 6)):
        requests = [request(str(row), top_p=top_p) for row in range(200)]
        assert len(set(sample(torch.zeros(200, 8), requests)[0])) == kept


def test_rows_of_one_batch_keep_their_own_parameters():
    logits = torch.tensor([PROBABILITIES] * 4).log()
    requests = [
        request("a", temperature=0), request("b", top_k=1), request("c", top_p=0.1), request("d", min_p=1.0)
    ]  # fmt: skip
    assert sample(logits, requests)[0] == [0, 0, 0, 0]


def test_greedy_breaks_no_rule_and_draws_nothing():
    sampler = Sampler((0,), 7, CPU)
    before = sampler.generator.get_state()
    tokens, _ = sample(torch.tensor([[0.0, 3.0, 1.0]]), [request(temperature=0)], sampler=sampler)
    assert tokens == [1] and torch.equal(before, sampler.generator.get_state())


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}])
def test_min_tokens_forbids_end_of_text_and_stop_tokens_until_reached(params):
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]])  # end-of-text 0 first, then stop token 1
    early = request(output=[5], min_tokens=2, stop_token_ids=[1], max_tokens=5, **params)
    late = request(output=[5, 5], min_tokens=2, stop_token_ids=[1], max_tokens=5, seed=1, **params)
    assert all(sample(logits, [early])[0][0] in (2, 3) for _ in range(20))
    assert sample(logits, [late])[0][0] in (0, 1)


# ------------------------------------------------------------------ seeds


def seeded_tokens(neighbours_before=0, neighbours_after=0, neighbour_params=None, steps=12):
    """What a request with seed 42 draws in a batch; logits depend on the step only."""
    mine = request("mine", seed=42, temperature=0.8)
    others = [request(f"n{i}", **(neighbour_params or {})) for i in range(neighbours_before + neighbours_after)]
    rows = [*others[:neighbours_before], mine, *others[neighbours_before:]]
    sampler, tokens = Sampler((0,), 0, CPU), []
    for step in range(steps):
        logits = torch.randn(50, generator=torch.Generator().manual_seed(step)).repeat(len(rows), 1)
        tokens.append(sample(logits, rows, sampler=sampler)[0][neighbours_before])
    return tokens


@pytest.mark.parametrize("neighbours", [
    {"neighbours_after": 3}, {"neighbours_before": 2, "neighbours_after": 1},
    {"neighbours_before": 1, "neighbour_params": {"seed": 42}},
    {"neighbours_before": 2, "neighbour_params": {"seed": 5, "top_k": 3}},
    {"neighbours_before": 1, "neighbour_params": {"temperature": 0}},
])  # fmt: skip
def test_seeded_request_draws_the_same_whatever_its_neighbours(neighbours):
    assert seeded_tokens(**neighbours) == seeded_tokens()


def test_seeds_differ_and_the_same_seed_twice_does_not():
    logits = torch.zeros(1, 1000)
    tokens = [sample(logits, [request(seed=seed)])[0][0] for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_discarded_sample_draws_no_random_number():
    sampler, mine = Sampler((0,), 0, CPU), request(seed=3)
    states = [mine.generator.get_state(), sampler.generator.get_state()]
    sample(torch.zeros(2, 9), [mine, request("other")], [True, True], sampler)
    assert torch.equal(states[0], mine.generator.get_state())
    assert torch.equal(states[1], sampler.generator.get_state())


def test_engine_seed_decides_what_unseeded_requests_draw():
    logits = torch.zeros(6, 1000)
    requests = [request(f"r{i}") for i in range(6)]
    tokens = [sample(logits, requests, sampler=Sampler((), seed, CPU))[0] for seed in (0, 0, 1)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len(set(tokens[0])) > 1


# ------------------------------------------------------------------ log-probabilities


def test_logprobs_are_of_the_raw_logits_whatever_temperature_and_truncation():
    logits = torch.tensor([PROBABILITIES]).log() * 1.0
    _, logprobs = sample(logits, [request(temperature=2.0, top_k=1, logprobs=2)])
    entry = logprobs["r0"]
    assert entry.token_ids == [0, 1] and entry.rank == 1
    assert entry.logprobs == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)


def test_chosen_token_comes_first_when_it_is_not_among_the_candidates():
    logits = torch.tensor([PROBABILITIES]).log()
    (entry,) = top_logprobs(logits, torch.tensor([3]), [2])
    assert (entry.token_ids, entry.rank) == ([3, 0, 1], 4)
    assert entry.logprobs == pytest.approx([math.log(p) for p in (0.05, 0.5, 0.3)], abs=1e-6)


def test_zero_logprobs_give_the_chosen_token_alone_and_nothing_is_given_unasked():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    _, logprobs = sample(logits.repeat(2, 1), [request("a", temperature=0, logprobs=0), request("b", temperature=0)])
    assert list(logprobs) == ["a"] and logprobs["a"].token_ids == [1]


def test_rows_may_want_different_numbers_of_candidates():
    entries = top_logprobs(torch.randn(3, 8), torch.tensor([0, 1, 2]), [0, 3, 20])
    assert entries[0].token_ids == [0]
    assert len(entries[2].token_ids) == 8 and len(entries[1].token_ids) in (3, 4)


def test_event_says_what_was_chosen_among_what_and_tracing_changes_no_token():
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    requests = [request(f"r{i}", temperature=1.0) for i in range(3)]
    quiet = sample(logits, requests, [False, True, False])
    sampler, events = Sampler((0,), 0, CPU, lambda token_id: f"<{token_id}>"), []
    trace.start(events, record="decisions")
    try:
        traced = sample(logits, requests, [False, True, False], sampler)
    finally:
        trace.stop()
    events = [event for event in events if isinstance(event, TokensSampled)]
    assert traced[0] == quiet[0] == [event.token_id for event in events]
    assert [event.kept for event in events] == [True, False, True]
    reference = logits.log_softmax(-1)
    for row, event in enumerate(events):
        assert event.text == f"<{event.token_id}>"
        assert event.logprob == pytest.approx(float(reference[row, event.token_id]), abs=1e-5)
        assert [c.token_id for c in event.top] == reference[row].topk(5).indices.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_top_k_and_top_p_keep_what_a_full_sort_keeps(seed, monkeypatch):
    """By the definition, over the whole vocabulary, whether the first candidates suffice or not."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 40, generator=generator) * (seed % 4 + 0.5)
    rows = [SamplingParams(top_k=k, top_p=p) for k, p in [(0, 1), (3, 1), (0, 0.3), (0, 0.99), (9, 0.8), (30, 0.95)]]
    results = []
    for num_sorted in (4, 16, 1000):
        monkeypatch.setattr(sampler_module, "NUM_SORTED", num_sorted)
        together = sampler_module._keep_top_k_top_p(logits, rows)
        small_k = sampler_module._keep_top_k_top_p(logits[:5], rows[:5])  # top_k 30 alone wants more than 16 sorted
        results += [together, torch.cat([small_k, together[5:]])]
    for row, params in enumerate(rows):
        order = logits[row].argsort(descending=True)[: params.top_k or None]
        probs = logits[row, order].softmax(-1)
        kept = order[(probs.cumsum(-1) - probs < params.top_p) | (params.top_p == 1)]
        expected = torch.full((40,), -math.inf)
        expected[kept] = logits[row, kept]
        for result in results:
            assert torch.equal(result[row], expected)
