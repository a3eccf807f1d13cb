"""Text to token ids and back, on the ``tokenizers`` library.

Qwen3's vocabulary is byte-level BPE: every token stands for a run of bytes, so a token may be a
piece of a character. ``token_bytes`` is the exact value; the detokenizer joins such pieces.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from pagedlab.errors import UserError


def _byte_level_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes for bytes.

    Printable bytes stand for themselves; the others are numbered from U+0100 on, so that a space
    (byte 32, the 33rd unprintable one) is written "Ġ" (U+0120).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class Tokenizer:
    """What a model folder says about text: ``tokenizer.json`` and, for chats, a template."""

    def __init__(self, model_dir: Path) -> None:
        """Read ``model_dir/tokenizer.json``.

        Raises:
            UserError: the file is missing, unreadable, or not a byte-level vocabulary.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{model_dir} has no tokenizer.json: give token ids instead of text.")
        from tokenizers import Tokenizer as HFTokenizer

        try:
            self._tokenizer = HFTokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain Exception
            raise UserError(f"{path} is not a tokenizer file: {e}") from e
        if "ByteLevel" not in repr(self._tokenizer.decoder):
            raise UserError(f"{path} is not byte-level BPE, the only kind that Qwen3 models use.")
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.model_dir = model_dir

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; names of special tokens in it become those tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once; bytes that form no character become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for an id that the vocabulary does not name.

        A model's vocabulary may be padded beyond the tokenizer's, so such ids can be sampled.
        """
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if any(c not in _BYTE_OF for c in token):
            return str(token).encode()
        return bytes(_BYTE_OF[c] for c in token)

    def token_text(self, token_id: int) -> str:
        r"""One token for display: bytes that are part of a character as ``\xf0``, an unnamed id as ``<600>``."""
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace") or f"<{token_id}>"

    def describe(self) -> dict[str, str | int]:
        """For the header of a trace."""
        return {"kind": "byte-level BPE", "vocab_size": self.vocab_size, "num_special": len(self.special_ids)}

    # ---------------------------------------------------------------- chats

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        """The text that the model expects for a conversation, ready for its answer.

        The template is code from the model's folder, so it runs in jinja2's sandbox.

        Raises:
            UserError: the model has no template, or the template refuses the messages.
        """
        template, names = self._chat_template
        try:
            text: str = template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **names
            )
            text.encode()  # a template may write half a character
        except Exception as e:  # it is a stranger's code
            why = str(e) or type(e).__name__
            raise UserError(f"the chat template of {self.model_dir} refused the messages: {why}") from e
        return text

    @functools.cached_property
    def _chat_template(self) -> tuple[Any, dict[str, str]]:
        """The compiled template and the names of special tokens it may use."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        path = self.model_dir / "tokenizer_config.json"
        try:
            config = json.loads(_text(path) or "{}")
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path} is not JSON: {e}") from e
        if not isinstance(config, dict):
            raise UserError(f"{path} holds a {type(config).__name__}, but it must be a JSON object.")
        beside = _text(self.model_dir / "chat_template.jinja")
        source = config.get("chat_template") if beside is None else beside
        if not isinstance(source, str):
            raise UserError(f"the model in {self.model_dir} has no chat template: leave out --chat.")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            template = environment.from_string(source)
        except (TemplateError, RecursionError) as e:
            raise UserError(f"the chat template of {self.model_dir} is not valid: {e}") from e
        names = {k: _content(v) for k, v in config.items() if k.endswith("_token") and v is not None}
        return template, names


def _text(path: Path) -> str | None:
    """What a file says, None if there is none."""
    try:
        return path.read_text("utf-8") if path.is_file() else None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read as text: {e}") from e


def _content(token: object) -> str:
    """tokenizer_config.json writes a token as text, or as an object with its content."""
    return str(token.get("content", "") if isinstance(token, dict) else token)


def _raise_template_error(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
