"""A LoRA adapter is merged into the target that it was made for, and into no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import foretoken
from console import Run
from foretoken.errors import InputError, RefusedError
from foretoken.models.families import build

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft's own
PROMPT = [5, 17, 33]


def saved(folder: Path, seed: int = 0) -> Any:
    """A base in `folder/base` and a random adapter in `folder/adapter`; the two together."""
    torch.manual_seed(seed)
    base = build("Llama")
    base.generation_config.eos_token_id = None
    base.save_pretrained(folder / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(base, config)
    wrapped.save_pretrained(folder / "adapter")
    return wrapped.eval()


def expected(wrapped: Any) -> list[int]:
    text = wrapped.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    return text[0, len(PROMPT) :].tolist()


def test_its_text_is_that_of_peft(tmp_path: Path) -> None:
    wrapped = saved(tmp_path)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    spec = foretoken.load(base, "lookup", adapter=adapter, runtime="transformers")
    (text,) = spec.generate(PROMPT, max_new_tokens=12, gamma=2, ignore_eos=True)
    assert list(text.tokens) == expected(wrapped)
    assert spec.target_name.endswith(f" with {adapter}")
    plain = foretoken.load(base, "lookup", runtime="transformers")
    ours = spec.target.model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert not torch.equal(ours, plain.target.model.model.layers[0].self_attn.q_proj.weight)


@pytest.mark.openvino
def test_each_adapter_has_a_conversion_of_its_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = saved(tmp_path / "one", 1), saved(tmp_path / "two", 2)
    base = tmp_path / "one" / "base"
    two.get_base_model().load_state_dict(  # the same base
        {k: v for k, v in one.get_base_model().state_dict().items() if "lora" not in k},
        strict=False,
    )
    for _ in range(2):  # made, and kept
        for wrapped, name in ((one, "one"), (two, "two")):
            spec = foretoken.load(base, "none", adapter=tmp_path / name / "adapter")
            (text,) = spec.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
            assert spec.target.runtime == "openvino" and list(text.tokens) == expected(wrapped)


def test_what_cannot_be_merged_is_said_in_a_line(tmp_path: Path) -> None:
    saved(tmp_path)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    with pytest.raises(RefusedError, match="holds an adapter; give its base model, and adapter="):
        foretoken.load(adapter, "lookup")
    with pytest.raises(InputError, match="holds no adapter: adapter_config.json: "):
        foretoken.load(base, "lookup", adapter=base)
    with pytest.raises(InputError, match="adapter is 3; give a folder or a hub id"):
        foretoken.load(base, "lookup", adapter=3)
    with pytest.raises(InputError, match="the target is in memory; merge it there"):
        foretoken.load(build("Llama"), "lookup", adapter=adapter)
    weights = load_file(adapter / "adapter_model.safetensors")
    few = {name: weight for name, weight in weights.items() if "q_proj" in name}
    more = weights | {next(iter(weights)).replace("layers.0", "layers.9"): torch.zeros(4, 32)}
    for wrong, says in ((few, "it lacks base_model.*v_proj"), (more, "has no place in it for")):
        save_file(wrong, adapter / "adapter_model.safetensors")
        with pytest.raises(InputError, match=f"does not fit LlamaForCausalLM: .*{says}"):
            foretoken.load(base, "lookup", adapter=adapter, runtime="transformers")
    bad = {name: weight * torch.nan for name, weight in weights.items()}
    save_file(bad, adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match="does not fit LlamaForCausalLM: NaNs detected"):
        foretoken.load(base, "lookup", adapter=adapter, runtime="transformers")
    wide = {name: torch.zeros(9, 9) for name in weights}
    save_file(wide, adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match="does not fit LlamaForCausalLM: ") as caught:
        foretoken.load(base, "lookup", adapter=adapter, runtime="transformers")
    assert "\n" not in str(caught.value)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(RefusedError, match="is of kind IA3, and only LORA is merged here"):
        foretoken.load(base, "lookup", adapter=adapter)


@pytest.mark.filterwarnings("ignore")  # of peft, as it is made
def test_a_change_of_embeddings_that_are_the_output_layer_too_is_refused(tmp_path: Path) -> None:
    """peft merges it into both, and another text comes out than the adapter's."""
    base = build("Llama")
    base.config.tie_word_embeddings = True
    base.tie_weights()
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(RefusedError, match="shares with its output layer"):
        foretoken.load(tmp_path / "base", "lookup", adapter=tmp_path / "adapter")


def test_doctor_names_it(tmp_path: Path, console: Run) -> None:
    saved(tmp_path)
    shown = console("doctor", str(tmp_path / "base"), "--adapter", str(tmp_path / "adapter"))
    assert shown.code == 0 and f"base with {tmp_path / 'adapter'} runs on" in shown.out
