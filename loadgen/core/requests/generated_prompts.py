"""What synthetic prompts, prompts of traces and prompts of tasks have in common."""

from __future__ import annotations

from loadgen.core.requests.sampling import derive_key
from loadgen.core.requests.text_generator import TextGenerator
from loadgen.core.requests.tokenizer import Tokenizer


class GeneratedPrompts:
    """The base class of prompts with texts that are generated to a requested length.

    Args:
        seed: Decides lengths and choices.
        salt: Decides the texts, together with the seed.
        tokenizer: Counts tokens and supplies the words of the texts.
        template_tokens: The tokens that the chat template of the target adds to a prompt.
        is_natural: Use passages of a book instead of random words.
    """

    def __init__(
        self,
        seed: int,
        salt: int,
        tokenizer: Tokenizer,
        template_tokens: int,
        *,
        is_natural: bool = False,
    ) -> None:
        """Derive the keys of all random draws from the seed and the salt."""
        # Lengths do not depend on the salt, so two salts give other texts of the same lengths.
        self._lengths_key = derive_key(seed)
        self._texts_key = derive_key(seed, salt)
        self._texts = TextGenerator(tokenizer, self._texts_key, is_natural=is_natural)
        self._tokenizer = tokenizer
        self._template_tokens = max(0, template_tokens)
        self._id_prefix = self._texts_key.hex()[:8]

    def _wire_id(self, request_id: int) -> str:
        """Return the id of a request in its body and records, which is unique to a run."""
        return f"{self._id_prefix}-{request_id}"


def without_template_tokens(tokens: int, template_tokens: int) -> int:
    """Return how many tokens a text may have if its prompt shall have `tokens` on the server.

    The chat template of the server adds `template_tokens` to the text. A text has at least one
    token.
    """
    if not template_tokens:
        return tokens
    return max(1, tokens - template_tokens)
