"""Prompts that begin with the tokens of earlier turns: which they take, and that the text is always the template's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import router_harness
from fake_worker import STOP, pair
from http_door import sdk, serving
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.api_keys import ApiKey, digest_of, render_keys
from cluster.model_folder import read_model_file
from router.api.call import Call
from router.api.chat import Chat
from router.api.chat_template import ChatTemplate
from router.api.conversations import Conversations, Turn
from router.api.tokenizer import Tokenizer as ModelTokenizer

BUNDLED = Path(__file__).resolve().parents[3] / "models" / "tiny-shakespeare" / "tokenizer.json"
END = "<|endoftext|>"
SALT = b"acme"
HI = "ROMEO:\nGood morrow to you.\n\nJULIET:\n"
BYE = "\n\nROMEO:\nFarewell, my lady.\n\nJULIET:\n"


def spaced() -> ModelTokenizer:
    """Words that begin with a space, as SentencePiece has them: what the first one begins with is not in the text."""
    words = ["▁" + word for word in ("Good", "morrow", "to", "you.", "my", "lady.", "Farewell,", "ROMEO:", "JULIET:")]
    letters = sorted({*HI, *BYE, *map(chr, range(32, 127)), "▁"})
    vocabulary = {piece: number for number, piece in enumerate([END, "<unk>", *letters, *words])}
    merges = [(word[:n], word[n]) for word in words for n in range(1, len(word))]
    vocabulary |= {left + right: len(vocabulary) + n for n, (left, right) in enumerate(dict.fromkeys(merges))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges)), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return ModelTokenizer(tokenizer.to_str().encode(), ChatTemplate({}, {}))


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(read_model_file(BUNDLED), ChatTemplate({}, {}))


def letters(tokenizer: ModelTokenizer, text: str) -> list[int]:
    """Text as no tokenizer would split it: each byte by itself."""
    return [token_id for c in text for token_id in _bytes(tokenizer, c)]


def _bytes(tokenizer: ModelTokenizer, character: str) -> Sequence[int]:
    return tokenizer.encode(character, add_special_tokens=False).token_ids


def test_the_next_turn_begins_with_the_tokens_of_the_last_one(tokenizer: ModelTokenizer) -> None:
    conversations = Conversations(tokenizer)
    prompt = conversations.begin(HI, SALT)
    assert prompt.token_ids == tokenizer.encode(HI, add_special_tokens=False).token_ids
    answer = letters(tokenizer, "And to you, sir.")
    conversations.end(prompt, SALT, [*answer, tokenizer.special_ids[END]])
    bye = tokenizer.encode(BYE, add_special_tokens=False).token_ids
    second = conversations.begin(f"{HI}And to you, sir.{BYE}", SALT)
    assert second.token_ids == (*prompt.token_ids, *answer, *bye)
    assert second.token_ids != tokenizer.encode(second.text, add_special_tokens=False).token_ids
    with_end = conversations.begin(f"{HI}And to you, sir.{END}{BYE}", SALT)
    assert with_end.token_ids == (*prompt.token_ids, *answer, tokenizer.special_ids[END], *bye)
    conversations.end(second, SALT, letters(tokenizer, "Go."))
    third = conversations.begin(f"{HI}And to you, sir.{BYE}Go.{BYE}", SALT)
    assert third.token_ids == (*second.token_ids, *letters(tokenizer, "Go."), *bye)
    assert conversations.begin(second.text, SALT).token_ids == second.token_ids  # once more from there


def test_conversations_of_other_salts_are_not_known(tokenizer: ModelTokenizer) -> None:
    conversations = Conversations(tokenizer)
    conversations.end(conversations.begin(HI, SALT), SALT, letters(tokenizer, "Yes."))
    anew = tokenizer.encode(f"{HI}Yes.{BYE}", add_special_tokens=False).token_ids
    for salt in (b"", b"acm", b"acme2"):
        assert conversations.begin(f"{HI}Yes.{BYE}", salt).token_ids == anew
    assert conversations.begin(f"{HI}Yes.{BYE}", SALT).token_ids != anew


def test_each_answer_of_several_goes_on(tokenizer: ModelTokenizer) -> None:
    conversations = Conversations(tokenizer)
    prompt = conversations.begin(HI, SALT)
    for answer in ("Yes.", "Yea.", "No."):
        conversations.end(prompt, SALT, letters(tokenizer, answer))
    for answer in ("No.", "Yes.", "Yea."):
        known = (*prompt.token_ids, *letters(tokenizer, answer))
        assert conversations.begin(f"{HI}{answer}{BYE}", SALT).token_ids[: len(known)] == known


def test_what_is_written_otherwise_is_tokenized_anew(tokenizer: ModelTokenizer) -> None:
    """Thinking that the template leaves out, an answer that the client has edited, a stop string that it never got."""
    conversations = Conversations(tokenizer)
    prompt = conversations.begin(HI, SALT)
    first = letters(tokenizer, "Well met. ")
    conversations.end(prompt, SALT, first)
    second = conversations.begin(f"{HI}Well met. {BYE}", SALT)
    conversations.end(second, SALT, letters(tokenizer, "<think>hm</think>Adieu.\n\nROMEO"))
    for rest in ("Adieu.", "<think>hm</think>Adieu.", "<think>ha</think>Adieu."):
        text = f"{HI}Well met. {BYE}{rest}{BYE}"
        found = conversations.begin(text, SALT)
        assert tokenizer.written(found.token_ids) == text
        assert found.token_ids[: len(second.token_ids)] == second.token_ids
    known = (*second.token_ids, *letters(tokenizer, "<think>hm</think>Adieu."))
    text = f"{HI}Well met. {BYE}<think>hm</think>Adieu.{BYE}"
    assert conversations.begin(text, SALT).token_ids[: len(known)] == known
    edited = conversations.begin(f"{HI}Well meant.{BYE}", SALT)
    assert edited.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    anew = tokenizer.encode(f" {BYE}", add_special_tokens=False).token_ids[1:]
    assert edited.token_ids[-len(anew) :] == anew and tokenizer.written(edited.token_ids) == edited.text


def test_the_tokenizer_splits_between_an_answer_and_what_follows(tokenizer: ModelTokenizer) -> None:
    """The template's newlines are one token with the answer's, so that is not taken from the answer."""
    conversations = Conversations(tokenizer)
    prompt = conversations.begin(HI, SALT)
    conversations.end(prompt, SALT, letters(tokenizer, "Go.\n"))
    found = conversations.begin(f"{HI}Go.\n{BYE}", SALT)
    rest = tokenizer.encode(f"\n{BYE}", add_special_tokens=False).token_ids
    assert found.token_ids == (*prompt.token_ids, *letters(tokenizer, "Go."), *rest)


def test_tokens_without_a_text_of_their_own_are_not_taken(tokenizer: ModelTokenizer) -> None:
    """A part of a character, which a client gets as U+FFFD, an id that stands for nothing, and an end that is spelled:
    the template writes a real one."""
    conversations = Conversations(tokenizer)
    prompt = conversations.begin(HI, SALT)
    accent = _bytes(tokenizer, "é")
    assert len(accent) == 2
    for cut, left in (([accent[0]], "\ufffd"), ([accent[0], *letters(tokenizer, "no")], "\ufffdno"), ([5000], "")):
        conversations.end(prompt, SALT, [*letters(tokenizer, "Go "), *cut])
        found = conversations.begin(f"{HI}Go {left}{BYE}", SALT)
        assert tokenizer.written(found.token_ids) == f"{HI}Go {left}{BYE}"
        assert not {5000, accent[0]} & set(found.token_ids)
    conversations.end(prompt, SALT, letters(tokenizer, f"Spelled.{END} More"))
    assert conversations.begin(f"{HI}Spelled.{END}{BYE}", SALT).token_ids.count(tokenizer.special_ids[END]) == 1
    whole = [*letters(tokenizer, "Go "), *accent]
    conversations.end(prompt, SALT, whole)
    assert conversations.begin(f"{HI}Go é{BYE}", SALT).token_ids[: len(prompt.token_ids) + 5] == (
        *prompt.token_ids,
        *whole,
    )


def test_memory_is_bounded_and_a_conversation_takes_one_place(tokenizer: ModelTokenizer) -> None:
    conversations = Conversations(tokenizer, most_bytes=40_000)
    text = HI
    for _ in range(20):
        conversations.end(conversations.begin(text, SALT), SALT, [*letters(tokenizer, "Go."), 0])
        text += f"Go.{BYE}"
    one = conversations.num_bytes
    assert one < 6_000
    for number in range(200):
        salt = str(number % 7).encode()
        conversations.end(conversations.begin(f"{number}{HI}", salt), salt, letters(tokenizer, "Go."))
        assert conversations.num_bytes <= 40_000
    assert len(conversations._kept) == sum(map(len, conversations._texts.values())) > 20
    gone = conversations.begin(f"{text}", SALT)
    assert gone.token_ids == tokenizer.encode(text, add_special_tokens=False).token_ids
    before = conversations.num_bytes
    conversations.end(conversations.begin(HI * 200, SALT), SALT, letters(tokenizer, "Go."))  # too large to be kept
    assert conversations.num_bytes == before


def test_turns_that_are_stored_give_the_conversation_again(tokenizer: ModelTokenizer) -> None:
    conversations, text, turns = Conversations(tokenizer), HI, []
    for answer in ("Aye.", "Nay.", "Perhaps."):
        elsewhere = Conversations(tokenizer)  # another router, which knows what is stored
        earlier = elsewhere.restored(turns)
        prompt = elsewhere.begin(text, SALT, earlier)
        assert prompt.token_ids == conversations.begin(text, SALT).token_ids
        ended = elsewhere.end(prompt, SALT, [*letters(tokenizer, answer), 0])
        conversations.end(conversations.begin(text, SALT), SALT, [*letters(tokenizer, answer), 0])
        turns.append(elsewhere.turn_of(ended, earlier))
        text += f"{answer}{BYE}"
    assert [len(turn.token_ids) < 60 for turn in turns] == 3 * [True]
    assert Conversations(tokenizer).restored([replace(turns[0], tokenizer="another"), *turns[1:]]) is None
    assert Conversations(tokenizer).restored([]) is None


def test_a_prompt_that_would_not_fit_with_those_tokens_is_tokenized_anew() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    conversations = Conversations(ModelTokenizer(read_model_file(BUNDLED), template))
    answer = letters(conversations.tokenizer, "And to you, sir.")
    prompt = conversations.end(conversations.begin(HI, SALT), SALT, answer)
    chat = Chat([{"role": "user", "content": f"{HI}And to you, sir.{BYE}"}], [], {})
    long = Turn(conversations, SALT, Call(), most_tokens=1000).encode(chat)
    assert long[: len(prompt.token_ids)] == tuple(prompt.token_ids)
    anew = conversations.tokenizer.encode_prompt(chat).token_ids
    assert len(long) > len(anew) and Turn(conversations, SALT, Call(), len(long)).encode(chat) == long
    assert Turn(conversations, SALT, Call(), len(long) - 1).encode(chat) == anew
    assert Turn(conversations, None, Call(), 1000).encode(chat) == anew  # of who bypasses the prefix cache


@pytest.mark.parametrize("make", [None, spaced], ids=["bytes", "spaces"])
def test_a_prompt_always_has_the_text_of_its_template(
    make: Callable[[], ModelTokenizer] | None, tokenizer: ModelTokenizer
) -> None:
    """Random answers in random tokens, then histories that are continued, edited, cut and mixed."""
    tokenizer = tokenizer if make is None else make()
    draw, conversations, num_taken = random.Random(7), Conversations(tokenizer), 0
    pieces = ["Good", " morrow", " to", " you.", " é", "\n", " ", "1", "23", "<think>", END, " my", " lady."]
    texts = [HI]
    for _ in range(150):
        prompt = conversations.begin(draw.choice(texts), SALT)
        anew = tokenizer.encode(prompt.text, add_special_tokens=False).token_ids
        found, wanted = (tokenizer.written(ids).replace(f"{END} ", END) for ids in (prompt.token_ids, anew))
        assert found == wanted  # but for a space that SentencePiece itself loses behind a special token
        num_taken += prompt.token_ids != anew
        answer = "".join(draw.choices(pieces, k=draw.randrange(1, 6)))
        as_usual = tokenizer.encode(answer, add_special_tokens=False).token_ids
        token_ids = list(as_usual) if draw.random() < 0.3 else letters(tokenizer, answer)
        ended = conversations.end(prompt, SALT, token_ids[: draw.randrange(1, len(token_ids) + 1)])
        answer = ended.text[len(prompt.text) :]
        cut = draw.randrange(len(answer) + 1)
        for said in (answer, answer.strip(), answer[:cut], answer[:cut] + draw.choice(pieces) + answer[cut:]):
            texts.append(f"{prompt.text}{said}{draw.choice([BYE, END, '', ' '])}")
        texts = draw.sample(texts, min(len(texts), 12))
    assert num_taken > 10


MERGED = (("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o"), (">", "h"))
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ eos_token }}{% endfor %}<assistant>"""
CALL = '<tool_call>\n{"name": "hello", "arguments": {"hello": "hello"}}\n</tool_call>'
SCHEMA: Any = {"type": "object", "properties": {"hello": {"type": "string"}}}
FUNCTION: Any = {"name": "hello", "parameters": SCHEMA}
PLAIN = router_harness.TOKENIZER


def spelled(text: str) -> list[int]:
    """As the fake workers generate it, letter by letter, with the end."""
    return [*PLAIN.encode(text).ids, router_harness.EOS]


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of routers joins letters, which what workers generate does not."""
    definition = json.loads(PLAIN.to_str())
    vocabulary = definition["model"]["vocab"]
    vocabulary |= {left + right: len(vocabulary) + n for n, (left, right) in enumerate(MERGED)}
    definition["model"]["merges"] = [list(each) for each in MERGED]
    monkeypatch.setattr(router_harness, "TOKENIZER", Tokenizer.from_str(json.dumps(definition)))


class Told:
    """What workers say, and were told."""

    def __init__(self) -> None:
        self.says = ["hello"]
        self.new_workers()

    def new_workers(self) -> None:
        self.workers = pair(lambda _: [spelled(text) for text in self.says], STOP)

    @property
    def prompt(self) -> list[int]:
        """The last one."""
        return list(self.workers[1].admits[-1].prompt_token_ids)

    def is_after(self, prompt: list[int], answer: str = "", end: tuple[int, ...] = (router_harness.EOS,)) -> bool:
        """Whether the last prompt begins with another one and its answer."""
        known = [*prompt, *spelled(answer or self.says[0])[:-1], *end]
        return self.prompt[: len(known)] == known


USER: Any = {"role": "user", "content": "hello"}


@pytest.mark.asyncio
@pytest.mark.usefixtures("merging")
async def test_chats_and_messages_continue_with_the_tokens_of_the_turn_before(tmp_path: Path) -> None:
    told, file = Told(), tmp_path / "keys.yaml"
    file.write_text(
        render_keys(tuple(ApiKey(name, digest_of(name), name, ("generate",)) for name in ("acme", "other")))
    )
    async with (
        serving(tmp_path, told.workers, chat_template=TEMPLATE, keys_file=str(file)) as (router, http),
        sdk(router, "acme") as client,
        sdk(router, "other") as others,
    ):
        create, usual = client.chat.completions.create, {"model": "model"}
        for told.says in (["hello"], [CALL], ["hello", "ello", "he"]):
            call: Any = {**usual, "tools": [{"type": "function", "function": FUNCTION}], "n": len(told.says)}
            messages: Any = [{"role": "user", "content": f"hello {told.says}"}]
            choices, first = (await create(messages=messages, **call)).choices, told.prompt
            for answer, choice in zip(told.says, choices, strict=True):
                results = [{**USER, "role": "tool", "tool_call_id": c.id} for c in choice.message.tool_calls or ()]
                more = [*messages, choice.message.to_dict(), *(results or [USER])]
                await create(messages=more, **call)
                assert told.is_after(first, answer)
                for apart in ({}, {"cache_salt": "b"}):
                    elsewhere: Any = create if apart else others.chat.completions.create
                    await elsewhere(messages=more, extra_body=apart, **call)
                    assert not told.is_after(first, answer) or answer == "ello"  # which has one way only
        told.says = ["hello"]
        stopped, first = await create(model="model", messages=[USER], stop="lo"), told.prompt
        await create(model="model", messages=[USER, stopped.choices[0].message.to_dict(), USER])
        assert told.is_after(first, "hel", ())
        key = {"x-api-key": "acme"}
        for told.says in (["hello"], [CALL]):
            body = {**usual, "max_tokens": 99, "tools": [{"name": "hello", "input_schema": SCHEMA}], "messages": [USER]}
            said, first = (await http.post("/v1/messages", json=body, headers=key)).json(), told.prompt
            uses = [block for block in said["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "hello"} for use in uses]
            body["messages"] = [USER, {"role": "assistant", "content": said["content"]}]
            body["messages"] += [{"role": "user", "content": results or "hello"}]
            assert (await http.post("/v1/messages", json=body, headers=key)).status_code == 200 and told.is_after(first)


@pytest.mark.asyncio
@pytest.mark.usefixtures("merging")
async def test_a_stored_response_is_continued_with_its_tokens_by_another_router(tmp_path: Path) -> None:
    told, shared = Told(), {"batch_store": str(tmp_path / "batches.db"), "chat_template": TEMPLATE}
    before, first, spoken, given = None, list[int](), "", [USER]
    for turns in ([["hello"], [CALL]], [["hell"], ["hello"]]):
        told.new_workers()
        async with serving(tmp_path, told.workers, **shared) as (router, _), sdk(router) as client:
            for told.says in turns:
                usual: Any = {"model": "model", "tools": [{"type": "function", **FUNCTION, "strict": False}]}
                asked: Any = {"input": given, "previous_response_id": before, "background": told.says == ["hell"]}
                said = await client.responses.create(**asked, **usual)
                while said.status in ("queued", "in_progress"):
                    said = await client.responses.retrieve(said.id)
                assert not first or told.is_after(first, spoken)
                assert "turn_tokens" not in said.to_dict()
                before, first, spoken = said.id, told.prompt, told.says[0]
                calls = [item.call_id for item in said.output if item.type == "function_call"]
                results = [{"type": "function_call_output", "call_id": each, "output": "hello"} for each in calls]
                given = results or [USER]
