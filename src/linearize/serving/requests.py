"""Check requests to transformers' server.

transformers' handlers ignore fields that they do not support, and fail with a traceback on invalid values. So requests
are checked first: a field is supported, accepted with its default value only, or refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from linearize.base import check_text

GREEDY = 1e-5  # temperatures below this choose the likeliest token, as in vLLM
_MOST_FIELDS = 64  # of one JSON object
_LARGEST_SEED = 2**63 - 1  # of torch's generator
# UserError is a ValueError, which pydantic reports as a validation error.
Text = Annotated[str, AfterValidator(lambda text: check_text(text, "text"))]
Zero = Annotated[float, Field(ge=0, le=0)]
Stop = Annotated[Text, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    # Only one error of a body is reported, so long lists stop at their first error (`fail_fast`), which is fast.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > _MOST_FIELDS:
            raise ValueError(f"expected at most {_MOST_FIELDS} fields, found {len(data)}")
        return data


class StreamOptions(_Body):
    """Options of a stream, accepted without effect: the last chunk always has the usage."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(_Body):
    """Fields of both endpoints. Fields from `n` on are accepted with their default value only."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_LARGEST_SEED, le=_LARGEST_SEED)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    user: str | None = None
    n: Literal[1] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the fields that transformers supports, with its names and values."""
        found = self.model_dump(include={"stream", "max_tokens", "temperature", "top_p", "seed"}, exclude_none=True)
        if self.temperature is not None and self.temperature < GREEDY:
            found["temperature"] = 0.0
        if self.stop:
            found["stop"] = self.stop
        return found


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    """A turn of a conversation; an earlier answer has the empty fields from `refusal` on."""

    role: Annotated[Text, Field(min_length=1)]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in transformers' format."""
    return [message.model_dump(include={"role", "content"}) for message in messages]


class ResponseFormat(_Body):
    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    logprobs: Literal[False] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: ResponseFormat | None = None

    def sampling(self) -> dict[str, Any]:
        """Return those of `GenerationRequest`, with `max_completion_tokens` as `max_tokens`."""
        found = super().sampling()
        return found if self.max_completion_tokens is None else found | {"max_tokens": self.max_completion_tokens}


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt: Text
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None


class TokenizeRequest(_Body):
    """The body of ``POST /tokenize``, as in vLLM: a text or a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None


def fault(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Return the first of pydantic's errors about a body as one line, and the name of its field.

    The invalid value is not repeated: it can be long and have any bytes.
    """
    kind, places = errors[0]["type"], [part for part in errors[0]["loc"] if part != "body"]
    if kind == "json_invalid":
        return f"body: expected JSON, found other text from character {places[0]} on", None
    if kind == "model_attributes_type" and not places:
        return "body: expected a JSON object, sent with Content-Type: application/json", None
    field = ".".join(str(part) for part in places if isinstance(part, int) or part.isidentifier())[:100]
    message = errors[0]["msg"]
    if places and places[0] == "stop":
        message = "expected a string of 1 to 256 characters, or up to 4 of them"
    if kind == "extra_forbidden":
        message = "this field is not supported by transformers' server; leave it out, or serve with vLLM"
    return (f"{field}: {message}" if field else message), field or None
