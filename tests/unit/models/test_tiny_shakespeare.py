"""The tiny-shakespeare checkpoint: its shape, its tokenizer and that it predicts text it was not trained on.

Reads only the checkpoint's own folder; the held-out excerpt is embedded below, from the last tenth of the text.
"""

from __future__ import annotations

import importlib.util
import json
import math
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[3] / "models" / "tiny-shakespeare"

HELD_OUT_EXCERPT = """\
KATHARINA:
Young budding virgin, fair and fresh and sweet,
Whither away, or where is thy abode?
Happy the parents of so fair a child;
Happier the man, whom favourable stars
Allot thee for his lovely bed-fellow!

PETRUCHIO:
Why, how now, Kate! I hope thou art not mad:
This is a man, old, wrinkled, faded, wither'd,
And not a maiden, as thou say'st he is.

KATHARINA:
Pardon, old father, my mistaking eyes,
That have been so bedazzled with the sun
That everything I look on seemeth green:
Now I perceive thou art a reverend father;
Pardon, I pray thee, for my mad mistaking.

PETRUCHIO:
Do, good old grandsire; and withal make known
Which way thou travellest: if along with us,
We shall be joyful of thy company.

VINCENTIO:
Fair sir, and you my merry mistress,
That with your strange encounter much amazed me,
My name is call'd Vincentio; my dwelling Pisa;
And bound I am to Padua; there to visit
A son of mine, which long I have not seen.

PETRUCHIO:
What is his name?

VINCENTIO:
Lucentio, gentle sir.

PETRUCHIO:
Happily we met; the happier for thy son.
And now by law, as well as reverend age,
I may entitle thee my loving father:
The sister to my wife, this gentlewoman,
Thy son by this hath married. Wonder not,
Nor be grieved: she is of good esteem,
Her dowery wealthy, and of worthy birth;
Beside, so qualified as may beseem
The spouse of any noble gentleman.
Let me embrace with old Vincentio,
And wander we to see thy honest son,
Who will of thy arrival be full joyous."""


def read_json(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


@cache
def load_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@cache
def load_model() -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model


def load_training_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_shakespeare_train", FOLDER / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def bits_per_character(text: str) -> float:
    """Of the text after the end token, which opened every training document."""
    tokenizer = load_tokenizer()
    tokens = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(text)]])
    loss = torch.nn.functional.cross_entropy(load_model()(tokens).logits[0, :-1], tokens[0, 1:], reduction="sum")
    return loss.item() / math.log(2) / len(text)


def test_the_folder_is_under_12_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*") if path.is_file()) < 12e6


def test_the_configuration_has_8_query_heads_and_4_key_value_heads() -> None:
    config = read_json("config.json")
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)


def test_the_weights_are_three_million_bfloat16_parameters_with_a_tied_embedding() -> None:
    weights = load_file(FOLDER / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in weights.values()) == read_json("training_log.json")["parameters"] == 3016960
    assert "lm_head.weight" not in weights
    assert read_json("config.json")["tie_word_embeddings"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ROMEO:\nBut, soft! what light through yonder window breaks?\n\n",
        "  leading, doubled  and trailing spaces  ",
        "\n\n\n \t\r\n",
        "na\u00efve \u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \U0001f3f3\ufe0f\u200d\U0001f308 \ufdfd",
        "e\u0301 is not \u00e9, nor \u212b \u00c5",
        "\x00\x7f\ufeff\u2028\U0010ffff",
        "Hello , world ! 1234567890 n't 'tis",
    ],
)
def test_the_tokenizer_round_trips_any_unicode(text: str) -> None:
    assert load_tokenizer().decode(load_tokenizer().encode(text)) == text


def test_a_prompt_that_ends_in_a_newline_is_a_prefix_of_its_continuation() -> None:
    encode = load_tokenizer().encode
    prompt, continuation = "JULIET:\n", "O Romeo\n\n"
    assert encode(prompt + continuation) == encode(prompt) + encode(continuation)


def test_the_end_token_is_one_id_in_every_file() -> None:
    end = load_tokenizer().encode("<|endoftext|>")
    assert end == [load_tokenizer().eos_token_id] == [load_tokenizer().bos_token_id]
    assert end == [read_json("config.json")["eos_token_id"]] == [read_json("generation_config.json")["eos_token_id"]]


def test_the_end_token_is_likely_after_a_speech_and_unlikely_within_one() -> None:
    within, after = "KATHARINA:\nPardon, I pray thee, for my", "KATHARINA:\nPardon, I pray thee, for my mad mistaking."
    probability = {}
    for text in (within, after):
        logits = load_model()(torch.tensor([load_tokenizer().encode(text)])).logits
        probability[text] = logits[0, -1].softmax(-1)[load_tokenizer().eos_token_id].item()
    assert probability[after] > 0.01 > 0.001 > probability[within]


def test_the_chat_template_renders_a_play_with_system_text_first() -> None:
    messages = [
        {"role": "user", "content": "Good morrow."},
        {"role": "system", "content": "A street in Verona."},
        {"role": "assistant", "content": "My lord."},
        {"role": "user", "content": "Speak."},
    ]
    play = "A street in Verona.\n\nROMEO:\nGood morrow.\n\nJULIET:\nMy lord.\n\nROMEO:\nSpeak.\n\n"
    render = load_tokenizer().apply_chat_template
    assert render(messages, tokenize=False) == play
    assert render(messages, tokenize=False, add_generation_prompt=True) == play + "JULIET:\n"


def test_the_logged_held_out_loss_is_below_2_4_bits_per_character() -> None:
    log = read_json("training_log.json")
    assert log["held_out_bits_per_character"] < 2.4
    bits = log["held_out_loss_per_token"] * log["held_out_tokens"] / log["held_out_characters"] / math.log(2)
    assert bits == pytest.approx(log["held_out_bits_per_character"], abs=1e-3)


def test_transformers_finds_the_logged_loss_on_a_held_out_excerpt() -> None:
    logged = read_json("training_log.json")["held_out_bits_per_character"]
    assert bits_per_character(HELD_OUT_EXCERPT) == pytest.approx(logged, abs=0.3)


def test_the_training_model_and_transformers_give_equal_logits() -> None:
    weights = load_file(FOLDER / "model.safetensors")
    model = load_training_module().Llama().eval()
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    tokens = torch.randint(1024, (1, 1100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), load_model()(tokens).logits, atol=1e-4, rtol=0)
