"""Where the model is: the embedded one, a directory, or a download from the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pagedlab.errors import UserError

EMBEDDED_DIR = Path(__file__).parent / "embedded"  # package data, trained by walkthrough/embedded_model
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]    # no second copy of the weights in another format
_WAY_OUT = "Without --model the embedded model runs, which needs no network."


def resolve_model(model: str | os.PathLike[str] | None) -> Path:
    """The folder with the model's files; a hub id is downloaded unless it is cached.

    Raises:
        UserError: no such directory, no such model on the hub, or the hub cannot be reached.
    """
    if model is None:
        return EMBEDDED_DIR
    name = os.fspath(model)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if name and path.exists():
        raise UserError(f"{name} is a file: --model takes the directory that holds config.json, or a hub id.")
    if not _HUB_ID.fullmatch(name):
        raise UserError(f"there is no directory {name!r}: give a model directory or a hub id like Qwen/Qwen3-0.6B.")
    return _download(name)


def display_name(model: str | None) -> str:
    """How people call the model; a local directory without the way to it."""
    if model is None:
        return "pagedlab-embedded"
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def _download(hub_id: str) -> Path:
    """A snapshot from the hub, with progress bars on stderr; the cache serves without network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_WANTED))
    except HFValidationError as e:
        raise UserError(f"{hub_id!r} is neither a directory nor a valid hub id.") from e
    except GatedRepoError as e:
        raise UserError(f"the hub gives {hub_id} only to those who accepted its licence there. {_WAY_OUT}") from e
    except RepositoryNotFoundError as e:
        raise UserError(f"there is no directory {hub_id!r} here, and the hub has no such model. {_WAY_OUT}") from e
    except HfHubHTTPError as e:
        status = e.response.status_code if e.response is not None else "an error"
        raise UserError(f"the hub answered {status} for {hub_id}: try again later. {_WAY_OUT}") from e
    except Exception as e:  # no network shows as one of many connection errors, also of other libraries
        if isinstance(e, OSError | RuntimeError) or "connect" in type(e).__name__.lower():
            raise UserError(
                f"there is no directory {hub_id!r} here, and without network it cannot be downloaded. {_WAY_OUT}"
            ) from e
        raise
