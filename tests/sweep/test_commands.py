"""Commands and manifest of a fleet: only flags that the chosen release has."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from sweep.commanded import FLEETS, GPU, GROUPED, SGLANG, SPLIT, candidate, words_of
from understudy.server.flags.grammar import read_command_line, sglang_flags, vllm_flags
from understudy.sweep.commands import make_commands
from understudy.sweep.engine_words import engine_image
from understudy.sweep.manifest import write_manifest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("unsloth/Llama-3.1-8B", "unsloth/Llama-3.1-8B"),
        ("Llama-3.1-8B-FP8", "Llama-3.1-8B-FP8"),
    ],
)
def test_a_model_is_named_as_an_engine_can_load_it(model: str, said: str) -> None:
    for engine in ({}, {"engine_type": "sglang"}):
        found = make_commands(candidate({**GPU, "model": model, "engine": engine}))
        assert said in found.engines[0].words
        unknown = [text for text in found.not_expressed if text.startswith("model ")]
        assert unknown == (
            [f"model {model}: name its repository, such as --model owner/{model}"] * ("/" not in said)
        )


def test_blocks_of_kv_cache_groups_that_were_estimated_are_left_to_the_engine() -> None:
    fleet = {"model": "gpt-oss-20b", "gpu": {"name": "H100"}}
    words = words_of(candidate(fleet))
    assert "--gpu-memory-utilization" not in words, "vLLM chooses the same"
    assert "--num-gpu-blocks-override" not in words
    given = words_of(candidate({**fleet, "engine": {"num_gpu_blocks": 5000}}))
    assert given[given.index("--num-gpu-blocks-override") + 1] == "5000"


@pytest.mark.parametrize(
    ("name", "block_size", "flags"),
    [
        ("dense", None, "--prefix-cache-retention-interval None"),
        ("one group", None, "--disable-hybrid-kv-cache-manager"),
        ("unit", None, "--prefix-match-unit 8"),
        ("states", None, ""),
        ("long", 64, "--block-size 64"),
        ("explicit", 16, "--max-num-seqs 256 --max-num-batched-tokens 2048 --prefix-match-unit 8"),
    ],
)
def test_vllm_derives_the_simulated_groups_from_the_flags(
    name: str, block_size: int | None, flags: str
) -> None:
    commands = make_commands(candidate(GROUPED[name]))
    (line,) = commands.lines()
    assert (" --block-size" in line) == (block_size is not None)
    assert block_size is None or f" --block-size {block_size}" in line
    assert ("--num-gpu-blocks-override" in line) == (name == "explicit")  # others are estimated, as vLLM does
    assert line.endswith(flags)
    note = "kv_cache_groups (vLLM derives them from its model, and starts with those)"
    assert commands.not_expressed == [note] * (name == "explicit")


def test_sglang_starts_with_one_pool_where_one_group_was_simulated() -> None:
    words = words_of(candidate({**GROUPED["one group"], "engine": {"engine_type": "sglang"}}))
    assert "--disable-hybrid-swa-memory" in words
    assert "--max-total-tokens" not in words


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("name", FLEETS)
def test_every_flag_is_one_of_the_release(name: str, version: str) -> None:
    words = words_of(candidate(FLEETS[name], version))
    assert words[:2] == ["vllm", "serve"]
    line = read_command_line(words[2:], vllm_flags(version))
    model = FLEETS[name].get("model")
    assert line.words == [f"Qwen/{model}" if model else "MODEL"]


@pytest.mark.parametrize("name", FLEETS)
def test_releases_without_a_list_of_flags_get_long_known_ones(name: str) -> None:
    if name in ("engine", "experts"):
        pytest.skip("settings of newer releases")
    commands = make_commands(candidate(FLEETS[name], "0.26.0"))
    assert set(read_command_line(commands.engines[0].words[2:], vllm_flags("0.32.0")).values)
    assert any("kv-offloading-size" in each for each in commands.not_expressed) == (name == "offload")


def test_a_flag_of_a_newer_release_is_named_and_left_out() -> None:
    settings = {"engine": {"preemption_mode": "fifo", "kv_manager": "native"}}
    commands = make_commands(candidate(settings))
    assert commands.not_expressed == ["preemption-mode=fifo"]
    assert "--preemption-mode" not in commands.engines[0].words


def test_each_pool_has_its_own_command_and_set_of_engines() -> None:
    pools = [{"name": "Big ones", "workers": 2, "engine": {"max_num_seqs": 7}}, {"name": "b", "engine": {}}]
    fleet = candidate({"pools": pools, "routing": "least_loaded"})
    assert fleet.gpus == 3
    commands = make_commands(fleet)
    assert [(each.name, each.workers) for each in commands.engines] == [("big-ones", 2), ("b", 1)]
    limits = [
        read_command_line(each.words[2:], vllm_flags()).values["max-num-seqs"] for each in commands.engines
    ]
    assert limits == [7, 256]
    assert commands.router is not None
    assert commands.router[3] == "http://big-ones-0:8000,http://big-ones-1:8000,http://b-0:8000"
    documents = list(yaml.safe_load_all(write_manifest(fleet)))
    sets = [each for each in documents if each["kind"] == "StatefulSet"]
    assert [(each["metadata"]["name"], each["spec"]["replicas"]) for each in sets] == [
        ("big-ones", 2),
        ("b", 1),
    ]
    (router,) = (each for each in documents if each["kind"] == "Deployment")
    urls = router["spec"]["template"]["spec"]["containers"][0]["command"][3]
    assert urls == "http://big-ones-0.big-ones:8000,http://big-ones-1.big-ones:8000,http://b-0.b:8000"


def test_the_command_says_what_was_simulated() -> None:
    words = words_of(candidate(FLEETS["kv"]))
    values = read_command_line(words[2:], vllm_flags()).values
    assert values["tensor-parallel-size"] == 2
    assert not {"block-size", "max-num-seqs", "max-num-batched-tokens"} & set(values), "vLLM chooses the same"
    assert "gpu-memory-utilization" not in values
    assert "num-gpu-blocks-override" not in values
    assert values["kv-events-config"]["enable_kv_cache_events"] is True
    blocks = words_of(candidate({"engine": {"num_gpu_blocks": 900}}))
    values = read_command_line(blocks[2:], vllm_flags()).values
    assert values["num-gpu-blocks-override"] == 900
    assert (values["max-num-seqs"], values["max-num-batched-tokens"]) == (256, 2048), "the GPU is not known"
    longer = words_of(candidate({**FLEETS["kv"], "engine": {"block_size": 32, "max_num_seqs": 1024}}))
    values = read_command_line(longer[2:], vllm_flags()).values
    assert (values["block-size"], values["max-num-seqs"]) == (32, 1024), "given ones are repeated"


@pytest.mark.parametrize(
    ("size", "gpus", "given", "remedy"),
    [
        ("64GB", 1, 64, None),
        ("64GB", 2, 32, None),  # SGLang gives this much to each GPU
        ("300MB", 1, None, "--g2-bytes 1GB"),
        ("16GiB", 1, None, "--g2-bytes 17GB"),
        ("3GB", 2, None, "--g2-bytes 2GB"),
    ],
)
def test_the_host_cache_of_sglang_is_the_one_that_was_simulated(
    size: str, gpus: int, given: int | None, remedy: str | None
) -> None:
    gpu = {"name": "H200", "tensor_parallel_size": gpus}
    tiers = [{"tier": "g2", "bytes": size}]
    commands = make_commands(
        candidate({"model": "Qwen3-32B", "gpu": gpu, "engine": {"engine_type": "sglang"}, "tiers": tiers})
    )
    words = commands.engines[0].words
    assert read_command_line(words[3:], sglang_flags()).values.get("hicache-size") == given
    missing = [one for one in commands.not_expressed if one.startswith("hicache-size")]
    assert [remedy] * len(missing) == [one[-len(remedy or "") - 1 : -1] for one in missing]
    assert (given is None) == bool(missing)


@pytest.mark.parametrize("name", SGLANG)
def test_every_flag_is_one_of_sglang(name: str) -> None:
    words = words_of(candidate(SGLANG[name]))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert read_command_line(words[3:], sglang_flags()).values["model-path"]


def test_several_engines_get_a_router_and_one_gets_none() -> None:
    commands = make_commands(candidate(FLEETS["kv"]))
    assert commands.router is not None
    assert commands.router[:2] == ["understudy", "router"]
    assert len(commands.router[3].split(",")) == 4
    assert json.loads(commands.router[-1]) == {"temperature": 0.5}
    assert make_commands(candidate(GPU)).router is None
    assert make_commands(candidate(FLEETS["experts"])).router is None
    assert shlex.split(commands.lines()[0]) == commands.engines[0].words


@pytest.mark.parametrize("name", ["gpu", "kv", "experts"])
def test_the_manifest_has_the_fleets_gpus_and_commands(name: str) -> None:
    fleet = candidate(FLEETS[name])
    documents = list(yaml.safe_load_all(write_manifest(fleet)))
    engines = next(each for each in documents if each["kind"] == "StatefulSet")
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    assert engines["spec"]["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"] == fleet.gpus
    assert container["command"][: len(words_of(fleet))] == words_of(fleet)
    assert container["image"] == "vllm/vllm-openai:v0.33.0"
    routers = [each for each in documents if each["metadata"]["name"] == "router"]
    assert len(routers) == (2 if name == "kv" else 0)
    if routers:
        (router,) = routers[1]["spec"]["template"]["spec"]["containers"]
        assert "http://engine-3.engine:8000" in router["command"][3]


PARSE = """
import json, sys
from write_flags_table import build_parser
parser = build_parser()
for words in json.load(sys.stdin):
    parser.parse_args(words)
"""


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_releases_own_parser_accepts_the_commands(version: str) -> None:
    python = ROOT / f".venv-vllm-{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"vLLM {version} is not installed in {python.parents[1].name}")
    fleets = [candidate(fleet, version) for fleet in FLEETS.values()]
    newest = [*SPLIT.values(), *GROUPED.values()]
    fleets += [candidate(fleet) for fleet in newest] if version == "0.33.0" else []
    lines = [each.words[2:] for fleet in fleets for each in make_commands(fleet).engines]
    found = subprocess.run(
        [python, "-c", PARSE],
        input=json.dumps(lines),
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
    )
    assert found.returncode == 0, found.stderr[-2000:]


def test_a_trtllm_command_has_its_flags_and_names_lines_for_its_file_of_options() -> None:
    engine = {"engine_type": "trtllm", "enable_chunked_prefill": True, "max_batch_size": 64}
    gpu = {"model": "gpt-oss-120b", "gpu": {"name": "H200", "tensor_parallel_size": 2}}
    commands = make_commands(candidate({**gpu, "engine": engine}))
    assert commands.engines[0].words == [
        *("trtllm-serve", "openai/gpt-oss-120b", "--tp_size", "2", "--max_batch_size", "64"),
        *("--max_seq_len", "131072", "--enable_chunked_prefill"),
    ]
    assert commands.not_expressed == []
    assert engine_image(commands.engines[0].engine) == "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc25"
    small = make_commands(candidate({**gpu, "engine": {**engine, "max_tokens": 64_000}}))
    assert "kv_cache_config.max_tokens: 64" in " ".join(small.not_expressed)
