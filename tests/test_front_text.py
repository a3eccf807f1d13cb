"""Tokenizer, detokenizer, input and output processor: text in, text out, no model."""

import copy
import json
import shutil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from pagedlab import SamplingParams, UserError
from pagedlab.engine.detokenizer import REPLACEMENT, Detokenizer
from pagedlab.engine.input_processor import InputProcessor
from pagedlab.engine.output_processor import OutputProcessor
from pagedlab.engine.tokenizer import Tokenizer
from pagedlab.models.resolve import EMBEDDED_DIR, resolve_model
from pagedlab.sched.output import EngineCoreOutput, TopLogprobs

EOS = 0
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Byte-level BPE: end of text, every byte, and the token ",b"."""
    vocab = {"<|endoftext|>": EOS} | {c: i for i, c in enumerate(_ALPHABET, 1)}
    vocab[",b"] = len(vocab)
    hf = HFTokenizer(models.BPE(vocab=vocab, merges=[(",", "b")]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<|endoftext|>"])
    folder = tmp_path_factory.mktemp("byte-model")
    hf.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    of = {tokenizer.token_bytes(i): i for i in range(1, 257)}
    return [of[bytes([b])] for b in data]


def token(tokenizer: Tokenizer, text: str) -> int:
    return next(i for i in range(1, tokenizer.vocab_size) if tokenizer.token_bytes(i) == text.encode())


def stream(tokenizer: Tokenizer, token_ids: list[int], **params) -> list[str]:
    """Chunks of one token per step, the last one with the end."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    chunks, released = [], ""
    for place, token_id in enumerate(token_ids, 1):
        chunks.append(detokenizer.update([token_id], finished=place == len(token_ids)))
        released += chunks[-1]
        assert released == detokenizer.text
        if detokenizer.stop_reason is not None:
            break
    return chunks


# ------------------------------------------------------------------ bug report 37


def test_bug_37_an_emoji_cut_over_tokens_is_streamed_whole(tokenizer):
    chunks = stream(tokenizer, byte_ids(tokenizer, "😊".encode()))
    assert chunks == ["", "", "", "😊"]


def test_bug_37_an_emoji_cut_off_by_max_tokens_reads_the_same_streamed_or_not(tokenizer):
    ids = byte_ids(tokenizer, "😊".encode())[:2]
    chunks = stream(tokenizer, ids)
    assert chunks[0] == "" and "".join(chunks) == tokenizer.decode(ids) == REPLACEMENT


@pytest.mark.parametrize(("include", "text"), [(False, "a,"), (True, "a,b,c")])
def test_bug_37_stop_string_across_tokens_leaks_nothing(tokenizer, include, text):
    ids = [token(tokenizer, t) for t in ("a", ",b", ",", "c")]
    chunks = stream(tokenizer, [*ids, token(tokenizer, "z")], stop=["b,c"], include_stop_str_in_output=include)
    assert "".join(chunks) == text and len(chunks) == 4


@given(st.lists(st.integers(0, 257), max_size=24), st.sampled_from([(), ("b,c",), ("aa", "a,")]), st.booleans())
@example([95, 65, 0], ("aa", "a,"), False)  # a byte that is no character, then the beginning of a stop string
def test_chunks_add_up_to_the_text_and_never_end_in_half_a_character(tokenizer, token_ids, stop, include):
    chunks = stream(tokenizer, token_ids, stop=stop, include_stop_str_in_output=include)
    whole = tokenizer.decode(token_ids)
    ends = [(whole.find(s) + (len(s) if include else 0)) for s in stop if s in whole]
    assert "".join(chunks) == whole if not ends else "".join(chunks) in [whole[:end] for end in ends]
    assert not any(chunk.endswith(REPLACEMENT) for chunk in chunks[:-1])


_stop_strings = st.lists(st.sampled_from(("b", ",", "ab", ",b", "ba", "b,a", "aab", ",,b,")), max_size=3)


@given(st.lists(st.sampled_from(("a", "b", ",", ",b")), min_size=1, max_size=12), _stop_strings, st.booleans(),
       st.integers(0, 4))
def test_text_ends_at_the_first_stop_string_and_no_more_is_held_back_than_may_begin_one(
    tokenizer, texts, stop, include, min_tokens
):
    chunks = stream(tokenizer, [token(tokenizer, t) for t in texts], stop=stop, include_stop_str_in_output=include,
                    min_tokens=min_tokens)
    text = released = ""
    begin = 0  # stop strings count from here on
    for n, new in enumerate(texts, 1):
        text += new
        released += chunks[n - 1]
        begin = len(text) if n <= min_tokens else begin
        found = [(text.find(s, begin), s) for s in stop if s in text[begin:]]
        if found:
            end, first_of_the_list = found[0]
            assert released == text[: end + len(first_of_the_list) * include] and len(chunks) == n
            return
        held = max((k for s in stop for k in range(1, len(s)) if text[begin:].endswith(s[:k])), default=0)
        assert released == (text if include or n == len(texts) else text[: len(text) - held])


@given(st.lists(st.integers(0, 257), max_size=24), st.booleans())
def test_bytes_decode_as_the_tokenizers_library_decodes_them(tokenizer, token_ids, skip):
    expected = tokenizer._tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected


def test_text_that_could_begin_a_stop_string_is_held_back_only_while_it_could(tokenizer):
    assert stream(tokenizer, tokenizer.encode("xabab"), stop=["abc"]) == ["x", "", "", "ab", "ab"]


def test_stop_strings_do_not_count_before_min_tokens(tokenizer):
    ids = tokenizer.encode("ababab")
    assert "".join(stream(tokenizer, ids, stop=["ab"], min_tokens=3)) == "abab"
    assert "".join(stream(tokenizer, ids, stop=["ab"])) == ""


def test_a_stop_token_is_left_out_of_the_text_unless_it_is_to_be_included(tokenizer):
    a, b = tokenizer.encode("ab")
    for include, text in ((False, "a"), (True, "ab")):
        detokenizer = Detokenizer(tokenizer, SamplingParams(include_stop_str_in_output=include))
        detokenizer.update([a])
        detokenizer.update([b], finished=True, by_stop_token=True)
        assert detokenizer.text == text


# ------------------------------------------------------------------ tokenizer


def test_single_tokens_are_shown_as_text_or_as_their_bytes(tokenizer):
    ids = byte_ids(tokenizer, " é".encode())
    assert [tokenizer.token_text(i) for i in ids] == [" ", "\\xc3", "\\xa9"]
    assert tokenizer.token_text(9999) == "<9999>" and tokenizer.token_bytes(9999) == b""


def test_a_chat_template_runs_in_a_sandbox(tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer.model_dir / "tokenizer.json").read_bytes())
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"
    config = {"chat_template": template, "eos_token": {"content": "!"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = [{"role": "user", "content": "Hi"}]
    assert Tokenizer(tmp_path).apply_chat_template(chat) == "<user>Hi!<assistant>"
    (tmp_path / "chat_template.jinja").write_text("{% if tools is none and documents is none %}no tools{% endif %}")
    assert Tokenizer(tmp_path).apply_chat_template(chat) == "no tools"  # there are none, which a template may ask
    (tmp_path / "chat_template.jinja").unlink()
    config["chat_template"] = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="chat template"):
        Tokenizer(tmp_path).apply_chat_template(chat)


@pytest.mark.parametrize("template", [
    "{{ messages[0].content + 1 }}", "{{ 1 // 0 }}", "{{ messages | tojson(x=1) }}", "{{ 'a' * 10**15 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"{{ '\ud800' }}",
])
def test_a_chat_template_that_fails_is_one_sentence(tmp_path, template):
    shutil.copy(EMBEDDED_DIR / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="refused the messages"):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("name, content, message", [
    ("chat_template.jinja", b"{{" + b"(" * 3000, "is not valid: maximum recursion"),
    ("chat_template.jinja", b"\xff", r"chat_template\.jinja cannot be read as text"),
    ("tokenizer_config.json", b"[" * 100_000, r"tokenizer_config\.json is not JSON"),
    ("tokenizer_config.json", b"\xff", r"tokenizer_config\.json cannot be read as text"),
    ("tokenizer_config.json", b'{"eos_token": {}}', "has no chat template"),
])
def test_a_chat_template_that_cannot_be_read_is_one_sentence(tmp_path, name, content, message):
    shutil.copy(EMBEDDED_DIR / "tokenizer.json", tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "Hi"}])


def test_a_special_token_without_content_is_empty_in_a_chat_template(tmp_path):
    shutil.copy(EMBEDDED_DIR / "tokenizer.json", tmp_path)
    config = {"chat_template": "<{{ eos_token }}>", "eos_token": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).apply_chat_template([]) == "<>"


def test_a_tokenizer_config_that_is_no_object_is_refused(tmp_path):
    shutil.copy(EMBEDDED_DIR / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="must be a JSON object"):
        Tokenizer(tmp_path).apply_chat_template([])


def test_without_a_chat_template_one_sentence_says_so(tokenizer):
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.apply_chat_template([])


# ------------------------------------------------------------------ where the model is


def test_nothing_named_is_the_embedded_model():
    assert resolve_model(None) == EMBEDDED_DIR and (EMBEDDED_DIR / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "./a/b/c", ""])
def test_an_unknown_directory_is_one_sentence(name):
    with pytest.raises(UserError, match="there is no directory"):
        resolve_model(name)


def test_a_file_is_not_a_model_directory(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="is a file"):
        resolve_model(tmp_path / "model.safetensors")


def test_without_network_a_hub_id_is_one_sentence_that_names_the_embedded_model(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"without network .* the embedded model"):
        resolve_model("Qwen/no-such-model")


def test_a_hub_id_is_downloaded_without_a_second_copy_of_the_weights(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}

    def download(hub_id, **kwargs):
        asked.update(kwargs, id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path and asked["id"] == "Qwen/Qwen3-0.6B"
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]


def test_a_model_the_hub_does_not_know_is_one_sentence(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def not_found(hub_id, **kwargs):
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_found)
    with pytest.raises(UserError, match="the hub has no such model"):
        resolve_model("Qwen/Qwen3-0.6Z")


# ------------------------------------------------------------------ input processor


def processor(tokenizer: Tokenizer | None, eos: tuple[int, ...] = (EOS,)) -> InputProcessor:
    return InputProcessor(tokenizer, vocab_size=258, eos_token_ids=eos, max_model_len=32, block_hasher=None)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([258], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ("\ud800", {}, "the prompt is not valid Unicode text: it has a lone surrogate"),
        ({"prompt": "a", "cache_salt": "\ud800"}, {}, "cache_salt is not valid Unicode text"),
        (17, {}, "text or a list of token ids"),
        (["a"], {}, "text or a list of token ids"),
        ({"text": "a"}, {}, "a prompt as a dict"),
        ("a", {"stop_token_ids": [300]}, "stop token id 300"),
        ("a", {"logprobs": 300}, "logprobs is 300"),
    ],
)
def test_bad_prompts_and_parameters_are_refused_in_one_sentence(tokenizer, prompt, params, message):
    with pytest.raises(UserError, match=message):
        processor(tokenizer).process(prompt, SamplingParams(**params), request_id="r0")


def test_without_a_tokenizer_only_token_ids_are_served():
    assert processor(None).process([1, 2], SamplingParams(), request_id="r0").prompt_token_ids == [1, 2]
    for prompt, params in (("a", {}), ([1], {"stop": "x"})):
        with pytest.raises(UserError, match=r"no tokenizer\.json"):
            processor(None).process(prompt, SamplingParams(**params), request_id="r0")


def test_other_end_of_text_ids_join_the_stop_ids_unless_ignored(tokenizer):
    front = processor(tokenizer, eos=(0, 5, 7))
    (request,) = front.process("a", SamplingParams(stop_token_ids=[7]), request_id="r0").requests
    assert request.eos_token_id == 0 and request.sampling_params.stop_token_ids == (7, 5)
    (request,) = front.process("a", SamplingParams(ignore_eos=True), request_id="r1").requests
    assert request.sampling_params.stop_token_ids == ()


def test_open_max_tokens_becomes_the_room_that_is_left(tokenizer):
    (request,) = processor(tokenizer).process("abcd", SamplingParams(max_tokens=None), request_id="r0").requests
    assert request.max_tokens == 28


def test_bug_33_children_have_their_own_ids_and_seeds(tokenizer):
    requests = processor(tokenizer).process("a", SamplingParams(n=3, seed=7), request_id="r0").requests
    assert [(r.request_id, r.sampling_params.seed, r.sampling_params.n) for r in requests] == [
        ("0_r0", 7, 1), ("1_r0", 8, 1), ("2_r0", 9, 1),
    ]


def test_request_ids_count_on_and_avoid_those_a_user_gave(tokenizer):
    front = processor(tokenizer)
    front.note_request_id("r1")
    assert [front.next_request_id() for _ in range(3)] == ["r0", "r2", "r3"]


# ------------------------------------------------------------------ output processor


def started(tokenizer, kind="cumulative", prompt="ab", **params) -> OutputProcessor:
    outputs = OutputProcessor(tokenizer)
    outputs.add_request(processor(tokenizer).process(prompt, SamplingParams(**params), request_id="r0"), kind=kind)
    return outputs


def test_deltas_add_up_to_the_cumulative_output(tokenizer):
    ids = tokenizer.encode("a😊b")
    all_at_once, in_parts = started(tokenizer), started(tokenizer, kind="delta")
    text, token_ids = "", []
    for place, token_id in enumerate(ids, 1):
        step = [EngineCoreOutput("r0", [token_id], finish_reason="length" if place == len(ids) else None)]
        ((whole,), _), ((part,), _) = all_at_once.process_outputs(step), in_parts.process_outputs(step)
        text, token_ids = text + part.outputs[0].text, token_ids + part.outputs[0].token_ids
        assert (text, token_ids) == (whole.outputs[0].text, whole.outputs[0].token_ids)
    assert whole.finished and part.finished and text == "a😊b" and "r0" not in all_at_once


_letters = st.sampled_from(("a", "b", ","))


@given(st.lists(st.permutations(range(3)), min_size=1, max_size=6), st.lists(_letters, min_size=18, max_size=18),
       st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_what_the_steps_gave_is_what_each_kind_of_output_says(tokenizer, orders, letters, lengths):
    """Three continuations go on in any order and end one by one, one with an error; who keeps an output keeps it."""
    by_kind = {kind: started(tokenizer, kind, n=3, logprobs=1) for kind in ("cumulative", "delta", "final_only")}
    given, gained, kept, finals = [[], [], []], [["", [], [], 0.0] for _ in range(3)], [], []
    for step, order in enumerate([*orders, *[(0, 1, 2)] * 6]):
        core_outputs = []
        for child in order:
            if len(given[child]) == lengths[child]:
                continue
            token_id = token(tokenizer, letters[(step * 3 + child) % 18])
            given[child].append(token_id)
            reason = ("length" if child < 2 else "error") if len(given[child]) == lengths[child] else None
            core_outputs.append(EngineCoreOutput(
                f"{child}_r0", [token_id], reason, num_cached_tokens=16 * child + 2,
                logprobs=TopLogprobs([token_id], [-float(child + 1)], rank=1), error=reason and f"why {child}",
            ))  # fmt: skip
        if not core_outputs:
            continue
        outputs = {kind: processor.process_outputs(core_outputs)[0] for kind, processor in by_kind.items()}
        (whole,), (part,) = outputs["cumulative"], outputs["delta"]
        finals += outputs["final_only"]
        kept += [(whole, copy.deepcopy(whole)), (part, copy.deepcopy(part))]
        assert [o.index for o in part.outputs] == sorted(int(o.request_id[0]) for o in core_outputs)
        for o in part.outputs:
            assert len(o.token_ids) == len(o.logprobs) == 1
            text, ids, logprobs, _ = gained[o.index]
            gained[o.index] = [text + o.text, ids + o.token_ids, logprobs + o.logprobs, o.cumulative_logprob]
        for o in whole.outputs:
            assert [o.text, o.token_ids, o.logprobs, o.cumulative_logprob] == gained[o.index]
            assert o.token_ids == given[o.index] and o.text == tokenizer.decode(o.token_ids)
            assert o.cumulative_logprob == -(o.index + 1) * len(o.token_ids)
            is_over = len(o.token_ids) == lengths[o.index]
            reason = ("length" if o.index < 2 else "error") if is_over else None
            assert (o.finish_reason, o.error) == (reason, f"why {o.index}" if is_over else None)
        assert whole.finished == part.finished == all(len(g) == n for g, n in zip(given, lengths, strict=True))
        assert whole.num_cached_tokens == part.num_cached_tokens == (2 if given[0] else 0)
        assert by_kind["delta"].unfinished_request_ids() == ([] if whole.finished else ["r0"])
    assert finals == [whole] and all(output == as_it_was for output, as_it_was in kept)


def test_a_stop_string_ends_the_request_in_the_engine(tokenizer):
    outputs = started(tokenizer, stop=["b"])
    _, to_abort = outputs.process_outputs([EngineCoreOutput("r0", tokenizer.encode("a"))])
    assert to_abort == []
    (done,), to_abort = outputs.process_outputs([EngineCoreOutput("r0", tokenizer.encode("b"))])
    assert to_abort == ["r0"] and done.finished
    assert (done.outputs[0].text, done.outputs[0].finish_reason, done.outputs[0].stop_reason) == ("a", "stop", "b")


def test_bug_33_children_end_one_by_one_and_come_in_index_order(tokenizer):
    outputs = started(tokenizer, kind="final_only", n=3)
    a, b = tokenizer.encode("ab")
    early = EngineCoreOutput("1_r0", [b], finish_reason="stop", stop_reason=b)
    assert outputs.process_outputs([EngineCoreOutput("0_r0", [a]), early, EngineCoreOutput("2_r0", [a])]) == ([], [])
    (done,), _ = outputs.process_outputs([EngineCoreOutput(f"{i}_r0", [b], finish_reason="length") for i in (2, 0)])
    both = [a, b]
    assert [(o.index, o.text, o.token_ids) for o in done.outputs] == [(0, "ab", both), (1, "", [b]), (2, "ab", both)]


def test_bug_33_aborting_the_parent_aborts_its_children(tokenizer):
    outputs = started(tokenizer, n=3)
    assert "r0" in outputs and "1_r0" in outputs  # nobody else may use these ids
    outputs.process_outputs([EngineCoreOutput("1_r0", [1], finish_reason="length")])
    outputs.process_outputs([EngineCoreOutput("0_r0", [1], num_cached_tokens=16)])
    core_ids, (done,) = outputs.abort_requests(["r0", "unknown"])
    assert done.num_cached_tokens == 16
    assert core_ids == ["0_r0", "2_r0"] and "0_r0" not in outputs and "r0" not in outputs
    assert done.finished and [o.finish_reason for o in done.outputs] == ["abort", "length", "abort"]


def test_logprobs_carry_ranks_and_sum_up(tokenizer):
    outputs = started(tokenizer, logprobs=2)
    outputs.process_outputs([EngineCoreOutput("r0", [5], logprobs=TopLogprobs([5, 3, 4], [-9.0, -1.0, -2.0], rank=40))])
    outputs.process_outputs([EngineCoreOutput("r0", [3], logprobs=TopLogprobs([3, 4], [-1.0, -2.0], rank=1))])
    last = EngineCoreOutput("r0", [4], finish_reason="length", logprobs=TopLogprobs([3, 4], [-1.0, -2.0], rank=2))
    (done,), _ = outputs.process_outputs([last])
    (first, best, second), completion = done.outputs[0].logprobs, done.outputs[0]
    assert {i: p.rank for i, p in first.items()} == {5: 40, 3: 1, 4: 2}
    assert {i: p.rank for i, p in best.items()} == {i: p.rank for i, p in second.items()} == {3: 1, 4: 2}
    assert completion.cumulative_logprob == -12.0 and first[5].decoded_token == tokenizer.token_text(5)


def test_prompt_logprobs_of_all_chunks_follow_each_other(tokenizer):
    outputs = started(tokenizer, prompt=[1, 2, 3, 4], prompt_logprobs=0)
    chunk = [TopLogprobs([2], [-0.5], rank=1), TopLogprobs([3], [-0.25], rank=3)]
    outputs.process_outputs([EngineCoreOutput("r0", [], prompt_logprobs=chunk)])
    last = EngineCoreOutput("r0", [9], finish_reason="length", prompt_logprobs=[TopLogprobs([4], [-1.0], rank=2)])
    (done,), _ = outputs.process_outputs([last])
    none, *rest = done.prompt_logprobs
    assert none is None and [[(i, p.logprob, p.rank) for i, p in d.items()] for d in rest] == [
        [(2, -0.5, 1)], [(3, -0.25, 3)], [(4, -1.0, 2)],
    ]
