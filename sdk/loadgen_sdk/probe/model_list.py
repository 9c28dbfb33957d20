"""Read the list of models of a server and choose the model of a load. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import TargetUnusable
from ..wire_formats.implementation import token_count
from ..wire_formats.lenient_decoding import decode_leniently
from .http_types import HttpResponse

_CONTEXT_FIELDS = (
    "max_model_len",  # vLLM and SGLang
    "context_window",  # Dynamo and Groq
    "context_length",  # OpenRouter
    "max_context_length",  # Mistral
)
_MAX_SHOWN_MODELS = 8


class _ModelEntry(NamedTuple):
    """A model in the list of a server: its id, and all fields of its JSON object."""

    model_id: str
    fields: Mapping[str, object]


class ModelList:
    """The models that a server lists.

    Attributes:
        status: The HTTP status of the list.
        ids: The ids of all models, adapters included.
        base_ids: The ids of the models that are not adapters of another listed model.
        unprintable_count: The number of models whose names have control characters.
    """

    def __init__(self, response: HttpResponse) -> None:
        """Read the response of the server to `GET /models`. The list may be empty.

        Models whose names have control characters are left out, because such a name can neither be
        printed nor passed on a command line.
        """
        entries = _read_entries(response)
        printable_entries = [entry for entry in entries if entry.model_id.isprintable()]
        self.status = response.status
        self.unprintable_count = len(entries) - len(printable_entries)
        self._fields_by_model: dict[str, Mapping[str, object]] = {
            entry.model_id: entry.fields for entry in printable_entries
        }
        self.ids: tuple[str, ...] = tuple(self._fields_by_model)
        self.base_ids: tuple[str, ...] = tuple(
            model for model in self.ids if not self._is_adapter(model)
        )

    def _is_adapter(self, model: str) -> bool:
        """Return True for a LoRA adapter, whose entry names another listed model as its parent."""
        return self._fields_by_model[model].get("parent") in self.ids

    def __contains__(self, model: str) -> bool:
        """Return True if the server lists this model."""
        return model in self._fields_by_model

    def __str__(self) -> str:
        """Return the ids of the first models, and how many others there are."""
        shown_ids = ", ".join(self.ids[:_MAX_SHOWN_MODELS])
        hidden_count = len(self.ids) - _MAX_SHOWN_MODELS
        return f"{shown_ids} and {hidden_count} more" if hidden_count > 0 else shown_ids

    def max_context(self, model: str) -> int | None:
        """Return how many tokens a prompt and its completion may have together.

        It is the number in the entry of the model, or else in that of the model that it adapts.
        Return None if neither has one.
        """
        model_fields = self._fields_by_model.get(model, {})

        # The entry of a LoRA adapter names the model that it adapts as its parent.
        parent = model_fields.get("parent")
        parent_fields = self._fields_by_model.get(parent, {}) if isinstance(parent, str) else {}
        for fields in (model_fields, parent_fields):
            for field_name in _CONTEXT_FIELDS:
                context_tokens = token_count(fields.get(field_name))
                if context_tokens:
                    return context_tokens

        return None

    def default_model(self, *, rejects_unknown_models: bool) -> str:
        """Return the model to use if the user names none: the only one of the server.

        Adapters (LoRA) of a listed model do not count as models here.

        Args:
            rejects_unknown_models: The server needs the exact name of a model. If it does not, the
                hint for a server without models says that it accepts any name.

        Raises:
            TargetUnusable: The server lists no model, or several ones.
        """
        if len(self.base_ids) == 1:
            return self.base_ids[0]

        if self.ids:
            raise TargetUnusable(
                "no_model",
                f"the server has {len(self.ids)} models, so one has to be chosen",
                f"choose one with --model: {self}",
            )

        if self.unprintable_count:
            subject = "the name" if self.unprintable_count == 1 else "each name"
            raise TargetUnusable(
                "no_model",
                f"{subject} in the server's list of models has control characters",
                "set the model with --model, because this server's list cannot be shown",
            )

        raise self._empty_list_error(rejects_unknown_models=rejects_unknown_models)

    def _empty_list_error(self, *, rejects_unknown_models: bool) -> TargetUnusable:
        """Return the error for a user who has specified no model, if the server lists none either.

        The message and the hint depend on the HTTP status of the list.

        Args:
            rejects_unknown_models: The server needs the exact name of a model.
        """
        if self.status >= 500:
            return TargetUnusable(
                "no_model",
                f"the list of models returned HTTP {self.status}",
                (
                    "check that the server is running; the response may come from a "
                    "proxy. With --model NAME the list is not needed"
                ),
            )

        if self.status == 200:
            problem = "the server lists no models"
        else:
            problem = f"the server returns HTTP {self.status} for the list of models"

        if self.status == 404:
            hint = "check the path of the URL, or set the model with --model"
        else:
            hint = "set the model with --model"

        if not rejects_unknown_models:
            hint += "; this server accepts any name"

        return TargetUnusable("no_model", f"{problem}, and no model was specified", hint)


def _read_entries(response: HttpResponse) -> list[_ModelEntry]:
    """Return the entries of a list of models that have an id.

    The format is that of OpenAI: `{"data": [{"id": "llama"}, ...]}`. Return an empty list for any
    other response.
    """
    if response.status != 200:
        return []

    try:
        entries = decode_leniently(response.body)["data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []

    if not isinstance(entries, list):
        return []

    return [
        _ModelEntry(entry["id"], entry)
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]
