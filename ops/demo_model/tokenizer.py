"""The byte-level BPE tokenizer: trained on the synthetic corpus, saved for Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ops.demo_model.pieces import END_OF_TEXT, IM_END, IM_START, SPLIT_PATTERN, Document
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 2560
POSITIONS_MAX = 4096

_WORDS_OF_TOOLS = (
    "{%- if tools -%}"
    "{{ '<|im_start|>system\\n' }}"
    "{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'] + '\\n\\n' }}{%- endif -%}"
    "{{ '# Tools\\n\\nYou may call these functions:\\n<tools>\\n' }}"
    "{%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}"
    "{{ '</tools>\\n\\nA call is written like this:\\n<tool_call>\\n' }}"
    '{{ \'{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\' }}'
    "{{ '<|im_end|>\\n' }}"
    "{%- endif -%}"
)
_CALLS = (
    "{%- for call in message['tool_calls'] -%}"
    "{%- if message['content'] or not loop.first -%}{{ '\\n' }}{%- endif -%}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson + '}\\n</tool_call>' }}"
    "{%- endfor -%}"
)
CHAT_TEMPLATE = (
    _WORDS_OF_TOOLS + "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] }}"
    "{{ '\\n</tool_response><|im_end|>\\n' }}"
    "{%- elif message['tool_calls'] -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}"
    "{%- elif not (tools and loop.first and message['role'] == 'system') -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""Calls are written as in the Hermes format. Without tools, messages are all there is, as in what
the model was trained on."""


def train(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer on these texts. Chat marks are single tokens; unknown text becomes
    bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(mark, special=True) for mark in (END_OF_TEXT, IM_START, IM_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=POSITIONS_MAX,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def load(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in `folder`."""
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def encode(tokenizer: PreTrainedTokenizerFast, document: Document) -> tuple[list[int], list[float]]:
    """Token ids of a document and the loss weight of each.

    Pieces are encoded one by one. The tokenizer would split the text at their boundaries anyway, so
    the ids are those of the whole text.
    """
    ids: list[int] = []
    weights: list[float] = []
    texts = [piece.text for piece in document]
    for piece, encoded in zip(document, tokenizer(texts)["input_ids"], strict=True):
        ids += encoded
        weights += [piece.weight] * len(encoded)
    return ids, weights
