"""Steps from AIConfigurator's database: put together from its parts, and refused by name where it has none."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import pytest

from understudy._core import StepLoad
from understudy.errors import ConfigError
from understudy.tiers.gpu import GpuSettings
from understudy.timing.sources import Aiconfigurator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAKE = '''
class EngineHandle:
    """One ms a token of all, 10 more for a prompt token on its past, 100 for a decode on its own."""
    asked = None
    @classmethod
    def compile(cls, model_path, system, backend, **kwargs):
        cls.asked = (model_path, system, backend, kwargs)
        if kwargs["gemm_quant_mode"] == "int4_wo":
            raise RuntimeError("GEMM perf data missing for quant 'int4_wo'")
        return cls()
    def decode_step_latency(self, gen_tokens, isl, osl):
        return gen_tokens * (1 + 100 * isl)
    def predict_prefill_latency(self, bs, isl, prefix=0):
        new = isl - prefix
        return new + 10 * new * isl
    def mixed_step_breakdown(self, ctx_tokens, gen_tokens, isl, osl):
        shared, context, decode = ctx_tokens + gen_tokens, 10 * ctx_tokens * isl, 100 * gen_tokens * isl
        return shared + context + decode, shared, context, decode
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of that name with the same interface, and times that can be told apart."""
    package = tmp_path / "aiconfigurator_core"
    (package / "sdk").mkdir(parents=True)
    (package / "model_configs").mkdir()
    for name in ("meta-llama--Meta-Llama-3.1-8B", "openai--gpt-oss-120b"):
        (package / "model_configs" / f"{name}_config.json").write_text("{}")
    (package / "__init__.py").write_text("")
    (package / "sdk" / "__init__.py").write_text("")
    (package / "sdk" / "engine.py").write_text(FAKE)
    before = {name: module for name, module in sys.modules.items() if name.startswith("aiconfigurator_core")}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    import aiconfigurator_core.sdk.engine as engine

    yield engine.EngineHandle
    for name in [name for name in sys.modules if name.startswith("aiconfigurator_core")]:
        del sys.modules[name]
    sys.modules.update(before)


def timing(model: str = "Llama-3.1-8B", **gpu: Any) -> Aiconfigurator:
    settings = GpuSettings(**{"name": "H100", "aiconfigurator": True, **gpu})
    found = settings.timing(model, None)
    assert isinstance(found, Aiconfigurator)
    return found


def test_a_step_is_put_together_from_its_parts(installed: Any) -> None:
    model = timing().model()
    assert model.step_ms(StepLoad(decodes=4, context_tokens=40)) == 4 * (1 + 100 * 10)
    assert model.step_ms(StepLoad(chunks=[(8, 0), (4, 6)])) == 12 + 10 * 8 * 8 + 10 * 4 * 10
    mixed = model.step_ms(StepLoad(chunks=[(8, 0)], decodes=2, context_tokens=60))
    assert mixed == 10 + 10 * 8 * 8 + 100 * 2 * 30


def test_it_is_asked_for_the_deployment_under_its_own_names(installed: Any) -> None:
    timing(weight_dtype="fp8", tensor_parallel_size=2).model()
    assert installed.asked == (
        "meta-llama/Meta-Llama-3.1-8B",
        "h100_sxm",
        "vllm",
        {"gemm_quant_mode": "fp8", "kvcache_quant_mode": "bfloat16", "tp_size": 2, "attention_dp_size": 1},
    )
    timing("gpt-oss-120b", data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True).model()
    assert installed.asked[0] == "openai/gpt-oss-120b"
    assert installed.asked[3] == {
        "gemm_quant_mode": "bfloat16",
        "moe_quant_mode": "w4a16_mxfp4",
        "kvcache_quant_mode": "bfloat16",
        "tp_size": 2,
        "attention_dp_size": 2,
        "moe_tp_size": 1,
        "moe_ep_size": 4,
    }


def test_a_report_says_where_such_times_come_from(installed: Any) -> None:
    said = timing(tensor_parallel_size=2).describe_origin()
    assert said.startswith("aiconfigurator: ")
    assert said.endswith("kernels of Llama-3.1-8B in bf16 on 2 × H100, without engine overhead")


@pytest.mark.parametrize(
    ("model", "gpu", "says"),
    [
        ("Llama-3.1-8B", {"name": "RTX 4090"}, "aiconfigurator has no RTX 4090"),
        ("Yi-34B", {}, "aiconfigurator has no shape of Yi-34B"),
        (
            "Llama-3.1-8B",
            {"weight_dtype": "int4"},
            "does not cover Llama-3.1-8B in int4 .* on H100: GEMM perf data missing.*use --timing physical",
        ),
        ("Llama-3.1-8B", {"weight_dtype": "mxfp4"}, "has no linear layers in mxfp4"),
    ],
)
def test_what_it_does_not_cover_is_refused_by_name(
    installed: Any, model: str, gpu: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        timing(model, **gpu).build()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(ConfigError, match=r"pip install 'understudy\[aiconfigurator\]'"):
        timing().build()


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="an extra")
def test_the_package_itself_times_a_step() -> None:
    model = timing().model()
    one = model.step_ms(StepLoad(decodes=1, context_tokens=1000))
    many = model.step_ms(StepLoad(decodes=64, context_tokens=64_000))
    assert 2 < one < many < 30
    prompt = model.step_ms(StepLoad(chunks=[(2048, 0)]))
    later = model.step_ms(StepLoad(chunks=[(2048, 8192)]))
    mixed = model.step_ms(StepLoad(chunks=[(2048, 0)], decodes=64, context_tokens=64_000))
    assert 20 < prompt < min(later, mixed)
    with pytest.raises(ConfigError, match=r"does not cover Llama-3\.1-8B in nvfp4"):
        timing(weight_dtype="nvfp4").model()
