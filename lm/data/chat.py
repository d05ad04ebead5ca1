"""Conversations as tokens: a chat template makes one text of messages, of which the assistant's answers are learned.

`data/documents` reads the messages, and `data/encode` writes what `ChatTemplate.encode` returns. `lm generate --chat`
writes a prompt with the same template, which a tokenizer carries along to checkpoints and exports.
"""

import json
import re
from functools import cached_property
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lm.data.tokenizer import Tokenizer, token_name
from lm.errors import RequestError, first_line

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names -> ours; others are the same
# For tokenizers without a template: it needs no token but the one that ends a document. By `generation`, transformers
# and TRL know what an answer is.
DEFAULT_TEMPLATE = (
    "{{ eos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant:\\n' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% elif message['role'] in ['system', 'user'] %}"
    "{{ message['role'] | capitalize + ':\\n' + message['content'] + '\\n' }}"
    "{% else %}{{ raise_exception('it has no role ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)
# Put into names of special tokens in a message, which so remain text. Unicode keeps it for use inside of programs.
MARK = "\ufdd0"


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with the default template if it has none."""
    config = {**tokenizer.config, "chat_template": template_of(tokenizer) or DEFAULT_TEMPLATE}
    return Tokenizer(tokenizer.text, config, tokenizer.eos_token)


def template_of(tokenizer: Tokenizer) -> str | None:
    """The chat template of a tokenizer; of several, which older files have as a list, the default."""
    template = tokenizer.config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


class ChatTemplate:
    """The chat template of a tokenizer, rendered as transformers does; RequestError if there is none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        template = template_of(tokenizer)
        if template is None:
            raise RequestError(
                "the tokenizer has no chat template: train the model on what `lm data prepare --chat` makes, or put a "
                "chat_template.jinja beside its tokenizer.json"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = raise_exception
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            self.template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template is not one of Jinja: {first_line(error)}") from error
        self.tokenizer = tokenizer
        self.tokens = {"eos_token": tokenizer.eos_token}  # by the names that templates have for them
        for name in ("bos_token", "unk_token", "pad_token"):
            if token := token_name(tokenizer.config.get(name)):
                self.tokens[name] = token
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self.special = {tokenizer.eos_token, *(token.content for token in added if token.special)}
        names = sorted(map(re.escape, self.special), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(names)})")

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """The text of messages, followed by what comes before an answer if that is asked for.

        Names of special tokens in a message have MARK in them, so those without are the template's.
        """
        options = {"messages": self._marked(messages), "add_generation_prompt": add_generation_prompt, **self.tokens}
        try:
            return self.template.render(options)
        except Exception as error:  # a template may do anything with the messages
            raise RequestError(f"the chat template refuses the messages: {first_line(error)}") from error

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._special.sub(lambda name: name[0][0] + MARK + name[0][1:], value)
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        if isinstance(value, dict):
            return {key: self._marked(item) for key, item in value.items()}
        return value

    def encode_text(self, text: str) -> list[int]:
        """Ids of a rendered text."""
        ids = []
        for part in self._special.split(text):
            if part in self.special:
                ids.append(self.tokenizer.vocabulary[part])
            else:
                ids += self.tokenizer.encode(part.replace(MARK, ""))
        return ids

    def encode_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of messages and of what comes before the answer to them."""
        check_messages(messages)
        return self.encode_text(self.render(messages, add_generation_prompt=True))

    def encode(self, messages: Any) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a conversation up to its last answer, and which of them are learned.

        End-of-text tokens at the beginning and the end are left out, since one is before and after each document of a
        row. RequestError for messages that are malformed, or that the template refuses.

        Returns:
            Ids (n,), and whether each of them, and the end-of-text token after them, is learned: (n + 1,) bool.
        """
        messages = from_sharegpt(messages)
        check_messages(messages)
        ids, learned = [], []
        for text, is_answer in self.pieces(messages):  # encoded each by itself, so that tokens end where turns do
            new = self.encode_text(text)
            ids += new
            learned += [is_answer] * len(new)
        while learned and not learned[-1]:
            ids.pop()
            learned.pop()
        eos_id = self.tokenizer.eos_id
        first = 1 if ids[:1] == [eos_id] else 0
        if ids[-1:] == [eos_id]:
            ids.pop()
        else:
            learned.append(False)
        return np.array(ids[first:], np.int64), np.array(learned[first:], bool)

    def pieces(self, messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
        """The text up to the last answer in pieces, and whether each is an answer with the token that ends it."""
        pieces, text = [], ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:number], add_generation_prompt=True)
            answered = self.render(messages[: number + 1])
            if not (prompt.startswith(text) and answered.startswith(prompt)):
                raise RequestError(
                    f"the chat template writes what comes before message {number + 1} otherwise once it is there: "
                    "give a template that keeps earlier turns as they were, as chat_template.jinja beside the tokenizer"
                )
            answer = answered[len(prompt) :]
            end = answer.rstrip()  # blanks after the token that ends an answer are not a part of it
            end = end if end.endswith(tuple(self.special)) else answer
            pieces += [(prompt[len(text) :], False), (end, True), (answer[len(end) :], False)]
            text = answered
        return pieces

    @cached_property
    def end_of_answer(self) -> str:
        """What the template puts after an answer, without blanks; empty if it puts nothing there."""
        question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
        prompt = self.render([question], add_generation_prompt=True)
        return self.render([question, answer])[len(prompt) :].partition("answer")[2].strip()


class GenerationTag(Extension):
    """The tag `{% generation %}` around answers, which transformers adds to Jinja; here it does nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    """The function by which templates refuse messages."""
    raise jinja2.TemplateError(message)


def from_sharegpt(messages: Any) -> Any:
    """Messages of `role` and `content` from ShareGPT's of `from` and `value`; anything else as it is."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "from" in one for one in messages):
        return messages
    names = [SHAREGPT_ROLES.get(str(one["from"]), one["from"]) for one in messages]
    return [{"role": name, "content": one.get("value")} for name, one in zip(names, messages, strict=True)]


def check_messages(messages: Any) -> None:
    """RequestError unless these are messages: a list of objects with a known role and a text as content."""
    if not isinstance(messages, list) or not messages:
        raise RequestError('a conversation is a list of messages such as {"role": "user", "content": "Hello"}')
    for number, message in enumerate(messages, start=1):
        role, content = (message.get(name) if isinstance(message, dict) else None for name in ("role", "content"))
        if role not in ROLES:
            raise RequestError(f"message {number} has the role {role!r}: write `role` as one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise RequestError(f"message {number} has no text as `content`: write it, or leave the conversation out")
        if not content.isascii() and any("\ud800" <= sign <= "\udfff" for sign in content):
            raise RequestError(f"message {number} holds half of a surrogate pair, which is not a character")
