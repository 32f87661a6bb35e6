"""Weights of one rank, fused for the forward pass, from a checkpoint or from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.qwen3.config import Qwen3Config

Progress = Callable[[int, int], None]
"""Callback with the number of tensors read, and of all tensors."""


@dataclass(slots=True)
class Layer:
    """One layer. Matrices are [out, in]; q, k and v are fused, and so are gate and up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(slots=True)
class Weights:
    """All weights of a forward pass. `head` is `embed` itself when they are tied."""

    embed: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor


def expected_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """List the tensors of a checkpoint by name, with their unsharded shapes."""
    hidden, width, kv = config.hidden_size, config.attention_width, config.kv_width
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (width, hidden),
            f"{layer}self_attn.k_proj.weight": (kv, hidden),
            f"{layer}self_attn.v_proj.weight": (kv, hidden),
            f"{layer}self_attn.q_norm.weight": (config.head_dim,),
            f"{layer}self_attn.k_norm.weight": (config.head_dim,),
            f"{layer}self_attn.o_proj.weight": (hidden, width),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}mlp.gate_proj.weight": (config.intermediate_size, hidden),
            f"{layer}mlp.up_proj.weight": (config.intermediate_size, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def random_weights(
    config: Qwen3Config, seed: int, device: torch.device, *, rank: int = 0, ranks: int = 1
) -> Weights:
    """Create weights from a seed; equal for every number of ranks on one device type."""
    names = list(expected_shapes(config).items())

    def read(name: str) -> torch.Tensor:
        number = next(i for i, (known, _) in enumerate(names) if known == name)
        shape = names[number][1]
        if len(shape) == 1:  # norms near one, so that they have an effect
            generator = torch.Generator(device).manual_seed(seed * 1_000_003 + number)
            near_one = torch.rand(shape, generator=generator, device=device) * 0.2 + 0.9
            return near_one.to(getattr(torch, config.dtype))
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + number)
        spread = 0.5 / shape[1] ** 0.5 if "embed" not in name and "lm_head" not in name else 0.02
        tensor = torch.empty(shape, dtype=getattr(torch, config.dtype), device=device)
        return tensor.normal_(0.0, 2 * spread, generator=generator)

    return _assemble(config, read, device, rank, ranks)


def load_weights(
    config: Qwen3Config,
    folder: str | Path,
    device: torch.device,
    *,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress | None = None,
) -> Weights:
    """Read safetensors, one file or shards with an index. Names and shapes are checked first."""
    from safetensors import safe_open

    files = _list_files(Path(folder))
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                where[name] = path
                shapes[name] = tuple(opened.get_slice(name).get_shape())
    expected = expected_shapes(config)
    if config.tied_embeddings and shapes.get("lm_head.weight") == expected["model.embed_tokens.weight"]:
        del shapes["lm_head.weight"]  # a copy of the embedding, which some exporters write
    for name, shape in expected.items():
        if name not in shapes:
            raise ConfigError(f"{folder}: tensor {name} is missing")
        if shapes[name] != shape:
            raise ConfigError(f"{folder}: tensor {name} has shape {list(shapes[name])}, not {list(shape)}")
    if surplus := sorted(shapes.keys() - expected.keys()):
        raise ConfigError(f"{folder}: tensor {surplus[0]} is not part of this model")
    done = 0

    def read(name: str) -> torch.Tensor:
        nonlocal done
        with safe_open(where[name], framework="pt", device=str(device)) as opened:
            tensor = opened.get_tensor(name)
        done += 1
        if progress is not None:
            progress(done, len(expected))
        assert isinstance(tensor, torch.Tensor)
        return tensor.to(getattr(torch, config.dtype))

    return _assemble(config, read, device, rank, ranks)


def _list_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: expected weight_map by tensor name ({error})") from error
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    for path in files:
        if path.parent != folder or not path.exists():
            raise ConfigError(
                f"{path} is missing; a checkpoint is model.safetensors, or shards with their index"
            )
    return files


def _assemble(
    config: Qwen3Config, read: Callable[[str], torch.Tensor], device: torch.device, rank: int, ranks: int
) -> Weights:
    """Fuse and shard: q, k, v, gate and up by output rows, o and down by input columns."""
    config.shard(ranks)  # raises if the shape does not divide

    def rows(name: str) -> torch.Tensor:
        return read(name).chunk(ranks, dim=0)[rank]

    def columns(name: str) -> torch.Tensor:
        return read(name).chunk(ranks, dim=1)[rank].contiguous()

    def layers() -> Iterator[Layer]:
        for index in range(config.num_layers):
            layer = f"model.layers.{index}."
            attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
            yield Layer(
                input_norm=read(f"{layer}input_layernorm.weight"),
                qkv=torch.cat([rows(f"{attention}{part}_proj.weight") for part in "qkv"]),
                q_norm=read(f"{attention}q_norm.weight"),
                k_norm=read(f"{attention}k_norm.weight"),
                out=columns(f"{attention}o_proj.weight"),
                mlp_norm=read(f"{layer}post_attention_layernorm.weight"),
                gate_up=torch.cat([rows(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]),
                down=columns(f"{mlp}down_proj.weight"),
            )

    embed = read("model.embed_tokens.weight").to(device)
    return Weights(
        embed=embed,
        layers=list(layers()),
        norm=read("model.norm.weight"),
        head=embed if config.tied_embeddings else read("lm_head.weight"),
    )
