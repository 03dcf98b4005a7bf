"""Filling in the middle: the prompt of a text and its suffix, for each tokenizer that has marks for it."""

from __future__ import annotations

import pytest
from router_harness import EOS, MAX_MODEL_LEN, TOKENIZER, ids
from tokenizers import AddedToken, models, normalizers, processors
from tokenizers import Tokenizer as Library

from cluster.errors import InvalidRequest, NotServed
from cluster.pb import generation_pb2 as pb
from router.api.call import ValidatedRequest
from router.api.chat_forms import ChatForms
from router.api.chat_template import ChatTemplate
from router.api.infill import FORMATS, Infill, InfillFormat
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer
from router.api.validate import read_prompt, validate
from router.openai.bodies import CompletionBody
from router.openai.errors import failure_of
from router.openai.specs import completion_specs

BYTES = Tokenizer(TOKENIZER.to_str().encode(), ChatTemplate({}, {}))


def with_marks(*names: str) -> Tokenizer:
    library = Library.from_str(TOKENIZER.to_str())
    library.add_tokens([AddedToken(name, normalized=False) for name in names if name])
    return Tokenizer(library.to_str().encode(), ChatTemplate({}, {}))


def check(spec: pb.GenerationSpec, tokenizer: Tokenizer) -> ValidatedRequest:
    model = ServedModel("m", tokenizer.num_tokens, MAX_MODEL_LEN, 16, (EOS,))
    prompt = read_prompt(spec, model, lambda each: tokenizer.encode_prompt(each).token_ids, infill=tokenizer.infill)
    return validate(spec, model, prompt, try_grammar=lambda _, text: text, fresh_seed=1)


@pytest.mark.parametrize("marks", FORMATS, ids=lambda each: each.prefix)
def test_prefix_and_suffix_stand_as_the_model_has_them(marks: InfillFormat) -> None:
    tokenizer = with_marks(marks.prefix, marks.suffix, marks.middle)
    request = check(pb.GenerationSpec(text="def f(", suffix=")\n"), tokenizer)
    prefix, suffix = f"{marks.prefix}def f(", f"{marks.suffix})\n"
    text = (suffix + prefix if marks.is_suffix_first else prefix + suffix) + marks.middle
    assert request.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False).token_ids
    assert "fill_in_middle" in ChatForms(tokenizer).capabilities


def test_a_text_that_is_filled_in_ends_at_a_mark() -> None:
    tokenizer = with_marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
    known = {
        tokenizer.encode(name, add_special_tokens=False).token_ids[0] for name in ("<|fim_suffix|>", "<|file_sep|>")
    }
    spec = pb.GenerationSpec(text="", suffix="b")
    assert {EOS, *known} <= set(check(spec, tokenizer).sampling.stopping.stop_token_ids)
    assert check(pb.GenerationSpec(text="a"), tokenizer).sampling.stopping.stop_token_ids == [EOS]
    spec.stopping.ignore_eos = True
    assert not check(spec, tokenizer).sampling.stopping.stop_token_ids


def test_a_suffix_begins_without_the_space_of_sentencepiece_and_the_prompt_with_its_first_token() -> None:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc"]
    library = Library(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.add_special_tokens(["<s>", "▁<PRE>", "▁<SUF>", "▁<MID>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer(library.to_str().encode(), ChatTemplate({}, {}))
    names = [library.id_to_token(each) for each in tokenizer.encode_prompt(Infill("a b", "c\n")).token_ids]
    assert names == ["<s>", "▁<PRE>", "▁", "a", "▁", "b", "▁<SUF>", "c", "<0x0A>", "▁<MID>"]
    assert check(pb.GenerationSpec(text="", suffix=" c"), tokenizer).prompt_token_ids[-3:-1] == (
        library.token_to_id("▁"),
        library.token_to_id("c"),
    )


def test_a_suffix_is_refused_by_name_where_it_cannot_be_honoured() -> None:
    (spec,) = completion_specs(CompletionBody(model="m", prompt="a", suffix="b"), "")
    with pytest.raises(NotServed) as refusal:
        check(spec, BYTES)
    told = failure_of(refusal.value).body["error"]
    assert (
        told["param"] == "suffix"
        and "this model's tokenizer has no tokens for filling in the middle" in told["message"]
    )
    assert "fill_in_middle" not in ChatForms(BYTES).capabilities
    tokenizer = with_marks("[PREFIX]", "[SUFFIX]")
    with pytest.raises(InvalidRequest, match=r"spec.suffix: goes with a text alone"):
        check(pb.GenerationSpec(token_ids=pb.TokenIds(ids=ids("a")), suffix="b"), tokenizer)
