"""Context parallelism is refused by name, in flags of every verb and in settings."""

from __future__ import annotations

import pytest

from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.server.flags.serving import read_serve


@pytest.mark.parametrize("flag", ["--decode-context-parallel-size", "--prefill-context-parallel-size"])
@pytest.mark.parametrize("verb", ["replay", "predict", "sweep"])
def test_a_verb_refuses_the_flag(verb: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "trace.jsonl", flag, "2"])
    assert f"{flag}: context parallelism is not simulated" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["decode-context-parallel-size", "prefill-context-parallel-size"])
def test_a_server_and_settings_refuse_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name}: context parallelism is not simulated"):
        read_serve(["Llama-3.1-8B", f"--{name}", "2"])
    read_serve(["Llama-3.1-8B", f"--{name}", "1"])
    with pytest.raises(ConfigError, match="context parallelism is not simulated"):
        VllmConfig.from_dict({name.replace("-", "_"): 2})
