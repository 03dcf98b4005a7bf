"""Tokens of conversations: a prompt that begins as an earlier one and its answer begins with their tokens.

A template writes a conversation anew for each turn, and the tokens of that text need not be those that the model wrote,
whose KV is cached. So texts of conversations are kept for a while, each with its tokens. A prompt takes the tokens of
the longest beginning that it shares with one of them, up to a place at which the tokenizer would split the text as
well; only the rest is tokenized. What a template or a client writes otherwise than before is tokenized anew.

    Turn.encode -> Conversations.begin -> Conversation: the prompt -> the request runs -> on_end -> Conversations.end

Conversations are apart by the salts of prefix caches. Knows no dialect and no template.
"""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import AnyStr, NamedTuple

from router.api.call import Call, TurnTokens
from router.api.chat import Chat, Prompt
from router.api.tokenizer import Tokenizer
from router.stream.detokenizer import CONTEXT_TOKENS, REPLACEMENT
from router.stream.request import LiveRequest, RequestObserver

MOST_BYTES = 64 * 2**20
"""What a router keeps, of all tenants; the least recently used goes first."""
_LARGEST_SHARE = 8
"""A conversation that takes more than one in so many of these bytes is not kept."""
_MOST_ANSWERS = 16
"""Answers of one request that are kept."""
_ENTRY_BYTES, _ANSWER_BYTES = 512, 96
_BEFORE_CHARS, _AFTER_CHARS = 64, 128
"""Text around a place by which it is seen whether the tokenizer splits there."""
_MOST_TRIES = 32
"""Places that are tried, the last one first."""
_MOST_LEFT = 4
"""A conversation of whose tokens at most so many are not in the one that continues it is forgotten with that."""


class Answer(NamedTuple):
    """Where a conversation has an answer, which begins and ends between tokens."""

    first_char: int
    end_char: int
    first_token: int
    end_token: int


@dataclass(frozen=True, eq=False)
class Conversation:
    """A text and its tokens, special ones written out."""

    text: str
    token_ids: Sequence[int]
    answers: tuple[Answer, ...] = ()
    """The answers in it whose tokens are those of the model, in their order."""
    continues: str = ""
    """The text of the conversation that nearly all of is in this one."""


class Conversations:
    """May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, most_bytes: int = MOST_BYTES) -> None:
        self.tokenizer = tokenizer
        self._added = re.compile(
            "|".join(map(re.escape, sorted(tokenizer.added_ids, key=len, reverse=True))) or r"(?!)"
        )
        self._most_bytes = most_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[tuple[bytes, str], Conversation] = OrderedDict()
        """By salt and text; those that were used last are last."""
        self._texts: dict[bytes, list[str]] = {}
        """The same texts by salt, sorted: a text has most in common with one of its two neighbours."""
        self._lock = Lock()

    def begin(self, text: str, salt: bytes, earlier: Conversation | None = None) -> Conversation:
        """A prompt. `earlier`: a conversation that it may continue, beside those that are kept."""
        known, num_common = earlier, 0 if earlier is None else _num_common(earlier.text, text)
        for each in self._neighbours(text, salt):
            common = _num_common(each.text, text)
            if common > num_common:
                known, num_common = each, common
        place = None if known is None else self._last_split(known, text, num_common)
        if known is None or place is None:
            return Conversation(text, self._ids(text))
        char, token = place
        answers = [
            each._replace(end_char=min(each.end_char, char), end_token=min(each.end_token, token))
            for each in known.answers
            if each.first_char < char
        ]
        is_continued = known.answers[-1].first_token < token and len(known.token_ids) - token <= _MOST_LEFT
        token_ids = (*known.token_ids[:token], *(self._ids(text[char:]) if char < len(text) else ()))
        return Conversation(text, token_ids, tuple(answers), known.text if is_continued else "")

    def end(self, prompt: Conversation, salt: bytes, answer_ids: Sequence[int]) -> Conversation:
        """Keeps a prompt with its answer, and returns that."""
        text = prompt.text + self.tokenizer.written(answer_ids, prompt.token_ids)
        token_ids = array("I", prompt.token_ids)
        token_ids.extend(answer_ids)
        answer = Answer(len(prompt.text), len(text), len(prompt.token_ids), len(token_ids))
        conversation = Conversation(text, token_ids, (*prompt.answers, answer))
        with self._lock:
            self._remove(salt, prompt.continues)
            self._remove(salt, text)
            size = _size_of(conversation)
            if size <= self._most_bytes // _LARGEST_SHARE:
                self._add(salt, conversation, size)
        return conversation

    def restored(self, turns: Sequence[TurnTokens]) -> Conversation | None:
        """The conversation of which these are the turns, in their order, as `turn_of` told them; None: there is
        none."""
        token_ids, places = array("I"), list[tuple[int, int]]()
        for turn in turns:
            if turn.tokenizer != self.tokenizer.sha256:
                return None
            del token_ids[turn.num_known :]
            token_ids.extend(turn.token_ids)
            places = [(first, min(end, turn.num_known)) for first, end in places if first < turn.num_known]
            places.append((len(token_ids) - turn.num_answer, len(token_ids)))
        text, at, answers = "", 0, list[Answer]()
        for first, end in places:
            text += self.tokenizer.written(token_ids[at:first], token_ids[max(0, at - CONTEXT_TOKENS) : at])
            first_char = len(text)
            text += self.tokenizer.written(token_ids[first:end], token_ids[max(0, first - CONTEXT_TOKENS) : first])
            answers.append(Answer(first_char, len(text), first, end))
            at = end
        return Conversation(text, token_ids, tuple(answers)) if answers else None

    def turn_of(self, conversation: Conversation, earlier: Conversation | None) -> TurnTokens:
        """What to keep of a conversation that has ended in an answer, beside what was kept of an earlier one."""
        token_ids, known = conversation.token_ids, array("I", () if earlier is None else earlier.token_ids)
        num_known = _num_common(array("I", token_ids).tobytes(), known.tobytes()) // known.itemsize
        answer = conversation.answers[-1]
        num_answer = answer.end_token - answer.first_token
        return TurnTokens(self.tokenizer.sha256, num_known, list(token_ids[num_known:]), num_answer)

    def _ids(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode(text, add_special_tokens=False).token_ids

    def _neighbours(self, text: str, salt: bytes) -> list[Conversation]:
        with self._lock:
            texts = self._texts.get(salt, [])
            at = bisect_left(texts, text)
            keys = [(salt, each) for each in texts[max(0, at - 1) : at + 1]]
            for key in keys:
                self._kept.move_to_end(key)
            return [self._kept[key] for key in keys]

    def _last_split(self, known: Conversation, text: str, num_common: int) -> tuple[int, int] | None:
        """The characters and tokens of the longest beginning to take from a conversation; None: there is none."""
        num_tries = 0
        for answer in reversed(known.answers):
            if answer.first_char > num_common:
                continue
            for char, token in reversed(self._places(known, answer, num_common)):
                if self._splits(text, char):
                    return char, token
                num_tries += 1
                if num_tries == _MOST_TRIES:
                    return None
        return None

    def _places(self, known: Conversation, answer: Answer, num_common: int) -> list[tuple[int, int]]:
        """The characters and tokens up to the begin of an answer, and up to the end of each of its tokens, as far as
        the text is common and stands for them. It does not for an id without text, for a part of a character, nor for
        letters that spell a token such as the end of a turn."""
        token_ids, char = known.token_ids, answer.first_char
        before = token_ids[max(0, answer.first_token - CONTEXT_TOKENS) : answer.first_token]
        detokenizer = self.tokenizer.new_detokenizer(before, self.tokenizer.special_ids)
        added = set(self.tokenizer.added_ids.values())
        places, added_ends = [(char, answer.first_token)], set[int]()
        for token in range(answer.first_token, answer.end_token):
            piece = detokenizer.push(token_ids[token : token + 1])
            char += len(piece)
            if char > num_common or REPLACEMENT in piece or (not piece and detokenizer.is_whole):
                break
            if token_ids[token] in added:
                added_ends.add(char)
            if detokenizer.is_whole:
                places.append((char, token + 1))
        found = self._added.finditer(known.text, answer.first_char, places[-1][0])
        spelled = next((each.end() for each in found if each.end() not in added_ends), num_common + 1)
        return [place for place in places if place[0] < spelled]

    def _splits(self, text: str, char: int) -> bool:
        """Whether the text there has the same tokens in two parts as in one."""
        before, after = text[max(0, char - _BEFORE_CHARS) : char], text[char : char + _AFTER_CHARS]
        return not after or self._ids(before) + self._ids(after) == self._ids(before + after)

    def _add(self, salt: bytes, conversation: Conversation, size: int) -> None:
        texts = self._texts.setdefault(salt, [])
        texts.insert(bisect_left(texts, conversation.text), conversation.text)
        self._kept[salt, conversation.text] = conversation
        self.num_bytes += size
        while self.num_bytes > self._most_bytes:
            self._remove(*next(iter(self._kept)))

    def _remove(self, salt: bytes, text: str) -> None:
        conversation = self._kept.pop((salt, text), None)
        if conversation is None:
            return
        self.num_bytes -= _size_of(conversation)
        texts = self._texts[salt]
        del texts[bisect_left(texts, text)]
        if not texts:
            del self._texts[salt]


class Turn(RequestObserver):
    """One request: it encodes the prompt, and keeps the conversation once the request is over."""

    def __init__(self, conversations: Conversations, salt: bytes | None, call: Call, most_tokens: int) -> None:
        """`salt` None: nothing is taken from earlier turns, nor kept. `most_tokens`: a prompt that is longer with
        the tokens of earlier turns is tokenized anew, as its text alone may fit."""
        self._conversations = conversations
        self._salt = salt
        self._call = call
        self._most_tokens = most_tokens
        self._prompt: Conversation | None = None
        self._earlier: Conversation | None = None

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """As `Tokenizer.encode_prompt`, which encodes what is no chat."""
        conversations = self._conversations
        if self._salt is None or not isinstance(prompt, Chat):
            return conversations.tokenizer.encode_prompt(prompt).token_ids
        text = conversations.tokenizer.chat_template.render(prompt)
        self._earlier = conversations.restored(self._call.turns)
        self._prompt = conversations.begin(text, self._salt, self._earlier)
        if self._prompt.answers and len(self._prompt.token_ids) > self._most_tokens:
            anew = conversations.tokenizer.encode(text, add_special_tokens=False).token_ids
            self._prompt = replace(self._prompt, token_ids=anew, answers=())
        return tuple(self._prompt.token_ids)

    def on_end(self, live: LiveRequest) -> None:
        if self._prompt is None or self._salt is None:
            return
        prompt = replace(self._prompt, token_ids=array("I", self._prompt.token_ids))  # which is quick to copy
        answers = [sequence.known_ids for sequence in live.sequences if sequence.known_ids]
        for answer_ids in answers[:_MOST_ANSWERS]:
            conversation = self._conversations.end(prompt, self._salt, answer_ids)
            if self._call.keep_turn is not None:
                self._call.keep_turn(self._conversations.turn_of(conversation, self._earlier))


def _num_common(text: AnyStr, other: AnyStr) -> int:
    """How much two texts have in common at their beginning."""
    low, high = 0, min(len(text), len(other))
    if text.startswith(other[:high]):
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if text.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle
    return low


def _size_of(conversation: Conversation) -> int:
    num_tokens, num_answers = len(conversation.token_ids), len(conversation.answers)
    return sys.getsizeof(conversation.text) + 4 * num_tokens + _ANSWER_BYTES * num_answers + _ENTRY_BYTES
