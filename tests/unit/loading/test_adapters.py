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
from console import Run, mistake
from foretoken.errors import InputError, RefusedError
from foretoken.loading.adapters import find_adapter
from foretoken.loading.load import require_adapters
from foretoken.train.pair import load_target
from loads import refused
from media_models import built, granite_speech
from tiny import llama
from tiny_families import build

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft's own
PROMPT = [5, 17, 33]


def saved(place: Path, seed: int = 0) -> Any:
    """A base in `place/base` and a random adapter in `place/adapter`; the two together."""
    torch.manual_seed(seed)
    base = build("Llama")
    base.generation_config.eos_token_id = None
    base.save_pretrained(place / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(base, config)
    wrapped.save_pretrained(place / "adapter")
    return wrapped.eval()


def expected(wrapped: Any) -> list[int]:
    text = wrapped.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    return text[0, len(PROMPT) :].tolist()


def test_its_text_is_that_of_peft(tmp_path: Path, console: Run) -> None:
    """Also when its weights are a pickle; a draft is trained on the merged target."""
    wrapped = saved(tmp_path)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    spec = foretoken.load(base, "lookup", adapter=adapter, runtime="transformers")
    (text,) = spec.generate(PROMPT, max_new_tokens=12, gamma=2, ignore_eos=True)
    assert list(text.tokens) == expected(wrapped)
    assert spec.target_name.endswith(f" with {adapter}")
    merged, _ = load_target(str(base), None, False, None, str(adapter))
    plain, _ = load_target(str(base), None, False, None)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(merged.get_parameter(name), spec.target.model.get_parameter(name))
    assert not torch.equal(merged.get_parameter(name), plain.get_parameter(name))
    shown = console("doctor", str(base), "--adapter", str(adapter))
    assert shown.code == 0 and f"base with {adapter} runs on" in shown.out
    weights = adapter / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    spec = foretoken.load(base, "lookup", adapter=adapter, runtime="transformers")
    assert list(spec.generate(PROMPT, max_new_tokens=12)[0].tokens) == expected(wrapped)


@pytest.mark.native
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
            assert spec.target.runtime == "native" and list(text.tokens) == expected(wrapped)


def test_what_cannot_be_merged_is_said_in_a_line(tmp_path: Path) -> None:
    saved(tmp_path)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    options: dict[str, Any] = {"adapter": adapter, "runtime": "transformers"}
    refused(RefusedError, "is an adapter", adapter, "lookup")
    refused(InputError, "contains no adapter: adapter_config.json: ", base, "lookup", adapter=base)
    refused(InputError, "adapter is 3", base, "lookup", adapter=3)
    refused(InputError, "the target is in memory", build("Llama"), "lookup", adapter=adapter)
    weights = load_file(adapter / "adapter_model.safetensors")
    few = {name: weight for name, weight in weights.items() if "q_proj" in name}
    more = weights | {next(iter(weights)).replace("layers.0", "layers.9"): torch.zeros(4, 32)}
    bad = {name: weight * torch.nan for name, weight in weights.items()}
    wide = {name: torch.zeros(9, 9) for name in weights}
    for wrong, says in (
        (few, "does not fit LlamaForCausalLM: .*it lacks base_model.*v_proj"),
        (more, "does not fit LlamaForCausalLM: .*has the unknown weight"),
        (bad, "does not fit LlamaForCausalLM: NaNs detected"),
        (wide, r"has base_.* in shape \(9, 9\), not \(4, 32\)"),
    ):
        save_file(wrong, adapter / "adapter_model.safetensors")
        refused(InputError, says, base, "lookup", **options)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    refused(RefusedError, "is of kind IA3, and only LORA", base, "lookup", adapter=adapter)


def test_an_adapter_of_another_base_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In peft's own words where these say why, whole, however many names they hold; the adapter's
    own weights are read once, and only where it fits."""
    saved(tmp_path)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    read: list[Any] = []
    load_weights = peft.load_peft_weights
    monkeypatch.setattr(
        "peft.peft_model.load_peft_weights",
        lambda *given, **more: read.append(given) or load_weights(*given, **more),
    )
    require_adapters(base, [str(adapter)])
    assert not read
    foretoken.load(base, "none", adapter=adapter, runtime="transformers")
    assert len(read) == 1
    for weights in base.glob("*.safetensors"):
        weights.unlink()
    config = json.loads((adapter / "adapter_config.json").read_text())
    others = [f"a_projection_of_another_model_{i}" for i in range(6)]
    changed = config | {"target_modules": others}
    (adapter / "adapter_config.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match="Target modules .* not found in the base model") as all_:
        require_adapters(base, [str(adapter)])
    assert all(name in str(all_.value) for name in others) and "\n" not in str(all_.value)
    assert len(read) == 1


def test_a_home_folder_may_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_adapter("~/adapter") == tmp_path / "adapter"
    with pytest.raises(InputError, match="adapter is '~nobody-here/adapter'"):
        find_adapter("~nobody-here/adapter")


@pytest.mark.parametrize("command", [("generate", "hi"), ("serve",)])
def test_a_folder_without_one_is_told_before_anything_is_loaded(
    tmp_path: Path, console: Run, command: tuple[str, ...]
) -> None:
    shown = console(*command, "--adapter", tmp_path)
    mistake(shown, "contains no adapter: adapter_config.json: ")


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


def test_doctor_says_which_library_a_processor_lacks(tmp_path: Path, console: Run) -> None:
    llama(32, 64).save_pretrained(tmp_path)
    assert "no images or audio" not in console("doctor", str(tmp_path)).out
    (tmp_path / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')
    shown = console("doctor", str(tmp_path))
    assert shown.code == 0 and "no images or audio: the processor of" in shown.out
    assert "pip install 'foretoken[media]'" in shown.out


def test_a_model_with_an_adapter_for_its_sounds(tmp_path: Path) -> None:
    """Granite Speech's, which `generate` turns off for text: merged, and text by itself refused."""
    model, inputs = built(granite_speech)
    model.config.has_lora_adapter = True  # pyright: ignore
    model.save_pretrained(tmp_path)
    rank = peft.LoraConfig(
        r=4, target_modules=r".*language_model.*(q_proj|v_proj)", init_lora_weights=False
    )
    peft.get_peft_model(model, rank).save_pretrained(str(tmp_path))
    theirs: Any = type(model).from_pretrained(tmp_path, trust_remote_code=False).eval()
    made = theirs.generate(**inputs, max_new_tokens=8, do_sample=False)
    spec = foretoken.load(tmp_path, "lookup")
    for gamma in (0, 3):
        (out,) = spec.generate(inputs, max_new_tokens=8, gamma=gamma)
        assert out.tokens == made[0, inputs["input_ids"].shape[1] :].tolist()
    with pytest.raises(InputError, match="prompt 0 is only text"):
        spec.generate([[5, 6, 7]], max_new_tokens=4)
    with pytest.raises(RefusedError, match="guidance takes token ids only"):
        spec.guided(2.0)
    refused(RefusedError, "its own adapter and supports no", tmp_path, "lookup", adapter=tmp_path)
    refused(InputError, "generate turns its adapter on and off", theirs, "lookup")
    refused(RefusedError, "only torch can merge", tmp_path, "lookup", runtime="native")
    weights = load_file(tmp_path / "adapter_model.safetensors")
    broken = {name: weight * float("nan") for name, weight in weights.items()}
    save_file(broken, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    refused(InputError, "does not fit.*NaNs", tmp_path, "lookup")
    (tmp_path / "adapter_config.json").unlink()
    plain = foretoken.load(tmp_path, "lookup", runtime="transformers")
    assert plain.generate([[5, 6, 7]], max_new_tokens=4)[0].tokens
