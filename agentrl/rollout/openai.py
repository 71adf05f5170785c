"""OpenAIPolicy: evaluates a model behind any endpoint that speaks OpenAI's chat-completions protocol."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError, MissingError, PolicyError
from agentrl.formats import Format, get_format
from agentrl.rollout.messages import as_users
from agentrl.rollout.requests import ContextFullError
from agentrl.types import FinishReason, Message, Parsed, Reply, Sampling, ToolCall, ToolSchema

if TYPE_CHECKING:
    from openai import APIStatusError
    from tenacity import RetryCallState

_LONGEST_WAIT_S = 60.0


class OpenAIPolicy:
    """A MessagePolicy over the `openai` SDK. Busy, failing and silent endpoints are asked again, with growing pauses.

    The model writes calls as text, as the environment's format demands. With `native_tools` the endpoint is told of the
    tools and calls them by its own means; its calls are then rendered into the environment's format, and earlier ones
    back. Tokens are not given: what is trained on is sampled here.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        native_tools: bool = False,
        format: str | Format = "hermes",  # noqa: A002 (the word for it)
        timeout_s: float = 120.0,
        attempts: int = 5,
    ) -> None:
        """Prepares a client; nothing is asked yet.

        Args:
            base_url: Of the endpoint: `http://localhost:8000/v1`.
            model: The name that the endpoint knows the model by.
            api_key_env: Name of the environment variable that holds the key. Endpoints that need none get none.
            native_tools: Whether the endpoint's own tool calls are used.
            format: The environment's tool-call format, for native calls.
            timeout_s: How long one answer may take, seconds.
            attempts: How often one question is asked before the episode is given up.

        Raises:
            ConfigError: If the URL is not one.
            MissingError: If the `openai` package is missing.
        """
        try:
            import openai
        except ImportError as error:
            raise MissingError("evaluating an endpoint needs the package openai: pip install openai") from error
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"expected base_url to be like http://localhost:8000/v1, found {base_url!r}.")
        self._openai = openai
        self._base_url = base_url
        self._model = model
        self._api_key_env = api_key_env
        self._native_tools = native_tools
        self._format = get_format(format) if isinstance(format, str) else format
        self._attempts = attempts
        self._cap_name = "max_tokens"
        key = os.environ.get(api_key_env) or "none"
        self._client = openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout_s, max_retries=0)

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSchema], sampling: Sampling) -> Reply:
        """Asks for the next message; see MessagePolicy.

        Raises:
            PolicyError: If the endpoint did not answer, or its answer is none.
            ContextFullError: If the conversation is longer than the model's context.
            ConfigError: If the endpoint refuses the key or does not know the model.
        """
        asked: dict[str, Any] = {"model": self._model, "temperature": sampling.temperature}
        if self._native_tools and tools:
            asked["messages"] = self._native_messages(messages, tools)
            asked["tools"] = [tool.as_openai() for tool in tools]
        else:
            asked["messages"] = [message.as_dict() for message in as_users(messages)]
        if sampling.top_p < 1.0:
            asked["top_p"] = sampling.top_p
        # Not in OpenAI's protocol, but in that of vLLM and others.
        extra = {"top_k": sampling.top_k or None, "min_p": sampling.min_p or None}
        if extra := {name: value for name, value in extra.items() if value is not None}:
            asked["extra_body"] = extra
        response = self._ask(asked, sampling.max_tokens)
        if not response.choices:
            raise PolicyError(f"{self._base_url} answered without a message.")
        choice = response.choices[0]
        reason: FinishReason = "length" if choice.finish_reason == "length" else "stop"
        return Reply(self._text(choice.message, tools), reason)

    def _ask(self, asked: dict[str, Any], max_tokens: int) -> Any:
        import tenacity

        sdk = self._openai
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(
                (sdk.APIConnectionError, sdk.RateLimitError, sdk.InternalServerError, sdk.ConflictError)
            ),
            wait=_pause_s,
            stop=tenacity.stop_after_attempt(self._attempts),
            reraise=True,
        )
        create: Any = self._client.chat.completions.create
        try:
            return retrying(lambda: create(**asked, **{self._cap_name: max_tokens}))
        except sdk.BadRequestError as error:
            if "max_completion_tokens" in str(error) and self._cap_name == "max_tokens":
                self._cap_name = "max_completion_tokens"  # OpenAI's reasoning models know the cap by this name alone.
                return self._ask(asked, max_tokens)
            raise self._refused(error) from error
        except sdk.APIStatusError as error:
            raise self._refused(error) from error
        except sdk.OpenAIError as error:
            raise PolicyError(
                f"{self._base_url} did not answer in {self._attempts} attempts ({type(error).__name__}: {error}):"
                " is the server up, and the URL the one that ends with /v1?"
            ) from error

    def _refused(self, error: APIStatusError) -> Exception:
        says = f"{self._base_url} answered {error.status_code}: {error.message}"
        if error.status_code in (401, 403):
            return ConfigError(f"{says}. Expected the key in the environment variable {self._api_key_env}.")
        if error.status_code == 404:
            return ConfigError(f"{says}. Expected a model that the endpoint serves, found {self._model!r}.")
        if error.status_code == 400 and ("context_length" in str(error.code) or "context length" in says.lower()):
            return ContextFullError(says)
        return PolicyError(says)

    def _native_messages(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = []
        waiting: list[str] = []
        for k, message in enumerate(messages):
            if message.role == "tool" and waiting:
                shown.append({"role": "tool", "tool_call_id": waiting.pop(0), "content": message.content})
                continue
            parsed = self._format.parse(message.content, tools) if message.role == "assistant" else None
            if not isinstance(parsed, Parsed) or not parsed.calls:
                shown += [plain.as_dict() for plain in as_users([message])]
                continue
            waiting = [f"call_{k}_{i}" for i in range(len(parsed.calls))]
            calls = [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for name, call in zip(waiting, parsed.calls, strict=True)
            ]
            shown.append({"role": "assistant", "content": parsed.content or None, "tool_calls": calls})
        return shown

    def _text(self, message: Any, tools: Sequence[ToolSchema]) -> str:
        content = (message.content or "").strip() if message.tool_calls else message.content or ""
        calls: list[ToolCall] = []
        for called in message.tool_calls or ():
            try:
                arguments = json.loads(called.function.arguments or "{}")
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict):
                # Not to be rendered as a call; the environment says that the message makes none.
                return f"{content}\n{called.function.name}({called.function.arguments})".strip()
            calls.append(ToolCall(called.function.name, arguments))
        return self._format.render_calls(content, calls, tools) if calls else content


def _pause_s(state: RetryCallState) -> float:
    """What the endpoint asks for, else 0.5 s doubled with each attempt."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked_for = getattr(getattr(error, "response", None), "headers", {}).get("retry-after", "")
    pause = float(asked_for) if asked_for.replace(".", "", 1).isdigit() else 0.5 * 2 ** (state.attempt_number - 1)
    return min(pause, _LONGEST_WAIT_S)
