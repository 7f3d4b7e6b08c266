"""The transformer computes what its description says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from remesh.demo.training import Block, ModelConfig, Transformer

SMALL = ModelConfig(vocab_size=11, dim=24, num_layers=2, num_heads=6, num_kv_heads=2, hidden_dim=20)


def model_of(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config)


def naive_attention(block: Block, config: ModelConfig, x: Tensor) -> Tensor:
    """Head by head and position by position."""
    batch, seq, _ = x.shape
    width, group = block.head_dim, config.num_heads // config.num_kv_heads
    q, k, v = (
        (x @ projection.weight.T).double()
        for projection in (block.q_proj, block.k_proj, block.v_proj)
    )

    mixed = torch.zeros(batch, seq, config.dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(config.num_heads):
            own = slice(h * width, (h + 1) * width)
            shared = slice(h // group * width, (h // group + 1) * width)
            for i in range(seq):
                query = q[b, i, own]
                scores = torch.stack([query @ k[b, j, shared] for j in range(i + 1)]) / math.sqrt(
                    width
                )
                mixed[b, i, own] = torch.softmax(scores, 0) @ v[b, : i + 1, shared]
    return mixed.float() @ block.o_proj.weight.T


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_grouped_query_attention_equals_plain_attention(num_kv_heads: int) -> None:
    config = ModelConfig(vocab_size=11, dim=24, num_heads=6, num_kv_heads=num_kv_heads)
    torch.manual_seed(1)
    block = Block(config)
    x = torch.randn(2, 7, 24)
    expected = naive_attention(block, config, x)
    torch.testing.assert_close(block.attend(x), expected, atol=1e-5, rtol=1e-5)


def test_mlp_is_swiglu() -> None:
    torch.manual_seed(2)
    mlp = Block(SMALL)
    x = torch.randn(3, 24)
    gate = x @ mlp.gate_proj.weight.T
    expected = (gate * torch.sigmoid(gate) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp.transform(x), expected)


def test_shapes_and_number_of_parameters() -> None:
    model = model_of(SMALL)
    assert model(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 11)
    block = 2 * 24 * 24 + 2 * 8 * 24 + 3 * 20 * 24 + 2 * 24
    table = 11 * 24
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == 2 * block + 24 + table * 2


def test_no_token_sees_later_ones() -> None:
    model = model_of(SMALL)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    changed = torch.tensor([[1, 2, 3, 9, 8]])
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])
