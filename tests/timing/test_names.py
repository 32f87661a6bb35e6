"""GPUs and models by name: exact names and documented aliases, and the nearest ones in the error."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from calibrate import files
from understudy.cli import main
from understudy.errors import ConfigError
from understudy.server.flags.serving import read_serve
from understudy.tiers import ModelShape
from understudy.timing.contexts import CONTEXTS, known_context
from understudy.timing.efficiencies import Efficiencies
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import ALIASES, GPUS, find_gpu
from understudy.timing.known_models import MODELS, known_name
from understudy.timing.names import name_key
from understudy.timing.repositories import find_repository

if TYPE_CHECKING:
    from pathlib import Path

TRUTH = Efficiencies(weights=0.8, compute=0.6, kv=0.8)
NOT_GPUS = {"H1000": "H100", "H100X": "H100", "A1000": "A100", "B2000": "B200", "RTX 4090 Ti": "RTX 4090"}
NOT_MODELS = {
    "Llama-3.1-8Bx": "Llama-3.1-8B",
    "Qwen3-40B": "Qwen3-4B",
    "Qwen2-57B": "Qwen2-7B",
    "Qwen2.5-15B": "Qwen2.5-1.5B",
    "Qwen3-17B": "Qwen3-1.7B",
    "Llama-27B": "Llama-2-7B",
    "meta-llama/Llama-3.1-8B-Instruct-x": "Llama-3.1-8B",
    "Qwen3-8B-Instructed": "Qwen3-8B",
    "Meta-Qwen3-8B": "Qwen3-8B",
}


@pytest.mark.parametrize(("name", "near"), NOT_GPUS.items())
def test_a_name_that_contains_that_of_a_gpu_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"gpu '{name}' is not known; nearest are {near}"):
        find_gpu(name)


@pytest.mark.parametrize(
    "name", ["RTX PRO 6000 Blackwell Workstation Edition", "L40", "GH200 144GB", "H100 PCIe", ""]
)
def test_a_gpu_with_other_peaks_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not known"):
        find_gpu(name)


def test_every_alias_of_a_gpu_is_found_in_any_case_and_with_any_separators() -> None:
    for own, others in ALIASES.items():
        for name in (own, *others):
            for spelt in (name, name.upper(), name.lower().replace(" ", "_"), f"NVIDIA {name}"):
                assert find_gpu(spelt) is GPUS[own]
    assert ALIASES.keys() == GPUS.keys()


@pytest.mark.parametrize(("name", "near"), NOT_MODELS.items())
def test_a_name_like_that_of_a_model_is_refused_with_the_nearest(name: str, near: str) -> None:
    for find in (find_architecture, ModelShape.find):
        with pytest.raises(
            ConfigError, match=rf"'{name}' is neither a known name .*; nearest are .*\b{near}\b"
        ):
            find(name)


def test_no_two_models_share_a_spelling() -> None:
    for one, other in combinations(MODELS, 2):
        assert name_key(one) != name_key(other)
    for spelt in ("llama 3.1 8b", "LLAMA_3.1_8B", "Llama3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"):
        assert find_architecture(spelt) is MODELS["Llama-3.1-8B"]
        assert ModelShape.find(spelt).name == "Llama-3.1-8B"


@pytest.mark.parametrize(("flag", "name", "near"), [("--gpu", *pair) for pair in NOT_GPUS.items()])
@pytest.mark.parametrize("verb", ["replay", "predict", "calibrate", "serve", "fleet"])
def test_every_verb_refuses_a_name_that_is_not_exact_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, flag: str, name: str, near: str
) -> None:
    run_verb(tmp_path, verb, {"--model": "Llama-3.1-8B", flag: name})
    told = capsys.readouterr()
    assert f"gpu '{name}' is not known; nearest are {near}" in told.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["Llama-3.1-8Bx", "Qwen3-40B", "Qwen2-57B"])
@pytest.mark.parametrize("verb", ["replay", "predict", "calibrate", "serve", "fleet"])
def test_every_verb_refuses_a_model_that_is_not_exact_beside_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, name: str
) -> None:
    run_verb(tmp_path, verb, {"--model": name, "--gpu": "H100"})
    told = capsys.readouterr()
    assert f"'{name}' is neither a known name nor the path of a config.json; nearest are" in told.err
    assert not (tmp_path / "out").exists()


def run_verb(folder: Path, verb: str, flags: dict[str, str]) -> None:
    given = [word for pair in flags.items() for word in pair]
    out = ["-o", str(folder / "out")]
    if verb == "calibrate":
        load = files.open_load(4)
        bench = files.vllm_detailed(folder / "bench.json", load, files.measure(load, TRUTH))
        arguments = [verb, str(bench), *given, *out]
    elif verb in ("serve", "fleet"):
        arguments = [verb, *given, "--port", "0"]
    elif verb == "predict":
        run = folder / "run.jsonl"
        run.write_text('{"request_id": "a", "arrival_s": 0, "input_tokens": 9, "output_tokens": 2}\n')
        arguments = [verb, str(run), *given, *out]
    else:
        trace = folder / "trace.jsonl"
        trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n')
        arguments = [verb, str(trace), *given, "--json", str(folder / "out")]
    assert main(arguments) == 2


@pytest.mark.parametrize(
    ("model", "context"),
    [
        ("Llama-3.1-8B", 131072),
        ("meta-llama/Llama-3.1-8B-Instruct", 131072),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16", 131072),
        ("meta-llama/Llama-2-7b-chat-hf", 4096),
        ("Qwen/Qwen3-4B", 40960),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 262144),
        ("Qwen/Qwen2.5-7B", 131072),
        ("Qwen/Qwen2.5-7B-Instruct", 32768),
        ("microsoft/Phi-3-mini-128k-instruct", 131072),
        ("microsoft/Phi-3-mini-4k-instruct", 4096),
        ("deepseek-ai/DeepSeek-V3", 163840),
        ("Llama-3.1-8Bx", 32768),
        ("understudy/tok", 32768),
    ],
)
def test_a_server_has_the_context_of_its_model(model: str, context: int) -> None:
    settings = read_serve([model]).settings
    assert settings.max_model_len == settings.engine.max_model_len == context
    assert read_serve([model, "--max-model-len", "2000"]).settings.max_model_len == 2000


def test_an_automatic_context_is_what_the_cache_has_room_for() -> None:
    blocks = ["--num-gpu-blocks-override", "100", "--max-model-len", "auto"]
    for model in ("Llama-3.1-8B", "understudy/tok"):
        settings = read_serve([model, *blocks]).settings
        assert settings.max_model_len == settings.engine.max_model_len == 1600
    assert read_serve(["Llama-3.1-8B", "--max-model-len", "auto"]).settings.max_model_len == 131072


def test_every_known_model_has_a_context() -> None:
    assert CONTEXTS.keys() == MODELS.keys()
    for name, context in CONTEXTS.items():
        assert known_context(name) == context


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                },
            },
            131072,
        ),
        ({}, None),
    ],
)
def test_a_folder_with_a_config_says_its_context(tmp_path: Path, config: object, context: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert known_context(str(tmp_path)) == known_context(str(tmp_path / "config.json")) == context
    assert read_serve([str(tmp_path)]).settings.max_model_len == (context or 32768)


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_has_a_repository_of_its_name_and_context(name: str) -> None:
    repository = find_repository(name)
    assert repository is not None
    assert known_name(repository) == name
    assert known_context(repository) == known_context(name)
    assert find_repository(f"{name}-FP8") is None
